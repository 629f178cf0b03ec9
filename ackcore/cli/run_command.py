"""``ackcore run MODULE:NAME --checkpoint DIR``: run a topology until it ends or is stopped."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from threading import Event, Thread
from types import FrameType
from typing import Annotated, Any, TypeVar

import typer
from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.sql import SparkSession
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from ackcore._error_hints import counted
from ackcore.cli.checkpoint_commands import rendered
from ackcore.cli.explain_command import add_path, check_name, find_named, load_topology
from ackcore.cli.reporting import INTERRUPTED, cell, console, print_json, span_of
from ackcore.examples.quiet_spark import check_java, spark_session
from ackcore.spark.base.errors import StateError
from ackcore.spark.engine.progress import Counts
from ackcore.spark.inspect.status import Activity, Logged, read_activity, read_batches, read_status
from ackcore.spark.query import Query, run_batch, start
from ackcore.topology.builder import Topology

T = TypeVar("T")

_LOOK_S = 0.5
#: The number of the last micro-batches that are read each time.
_MANY = 100
#: Seconds without output after which the activity is printed, without a terminal.
QUIET_S = 10.0


def add_to(app: typer.Typer) -> None:
    """Add ``ackcore run`` to the app."""
    app.command()(run)


def _conf(settings: list[str] | None) -> dict[str, str]:
    found = {}
    for setting in settings or ():
        key, equals, value = setting.partition("=")
        if not equals:
            raise typer.BadParameter(f"--conf must be KEY=VALUE, got {setting!r}")
        found[key] = value
    return found


def _ratio(text: str) -> float | None:
    try:
        return None if text.lower() == "none" else float(text)
    except ValueError:
        raise typer.BadParameter(
            f"--max-dead-ratio must be a share such as 0.01, or none, got {text!r}"
        ) from None


def run(
    topology: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:NAME",
            callback=check_name,
            help="A function that takes the SparkSession and returns a Topology.",
        ),
    ],
    checkpoint: Annotated[
        str,
        typer.Option(
            help="The directory or bucket URL of the checkpoint. A run on it continues there."
        ),
    ],
    master: Annotated[str, typer.Option(help="Spark's master.")] = "local[*]",
    conf: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="A Spark setting. Repeat the option for more."),
    ] = None,
    batch: Annotated[
        bool | None,
        typer.Option(
            "--batch/--stream",
            help="For a KafkaSpout: read to the end of the topics, or run until stopped.",
        ),
    ] = None,
    trigger: Annotated[
        str | None,
        typer.Option(
            metavar="INTERVAL", help="The interval of micro-batches, such as '10 seconds'."
        ),
    ] = None,
    available_now: Annotated[
        bool,
        typer.Option("--available-now", help="End a stream when all present records are done."),
    ] = False,
    max_dead: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="The number of records that may die.")
    ] = None,
    max_dead_ratio: Annotated[
        str,
        typer.Option(
            metavar="SHARE",
            help="The share of records that may die; 1.0: the run fails only if all die; "
            "none: no limit.",
        ),
    ] = "1.0",
    dead_letters: Annotated[
        str | None, typer.Option(help="The place of the dead letters, if not the checkpoint.")
    ] = None,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="Accept that the topology has changed.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print each micro-batch, then the counts, as JSON.")
    ] = False,
) -> None:
    """Run a topology: a batch to its end, a stream until Ctrl-C, which finishes the micro-batch.

    Exits with 1 if too many records died.
    """
    if trigger is not None and available_now:
        raise typer.BadParameter(
            "--trigger and --available-now cannot be combined; omit one of them"
        )
    settings = _conf(conf)
    options: dict[str, Any] = {
        "max_dead": max_dead,
        "max_dead_ratio": _ratio(max_dead_ratio),
        "dead_letters": dead_letters,
        "accept_changes": accept_changes,
    }
    add_path()
    find_named(topology)  # raises for a wrong name before Spark is started
    check_java()
    with spark_session(master, settings) as (spark, _):
        found = load_topology(topology, spark)
        if _is_batch(found, batch):
            # Without this handler, SIGTERM kills the process, and the next start counts a crash.
            before = signal.signal(signal.SIGTERM, signal.default_int_handler)
            try:
                with _shown(checkpoint, spark, as_json):
                    counts = run_batch(found, spark, checkpoint, **options)
            finally:
                signal.signal(signal.SIGTERM, before)
        else:
            timing = {"availableNow": True} if available_now else trigger
            query = start(found, spark, checkpoint, trigger=timing, **options)
            counts = _attend(query, spark, checkpoint, as_json)
    if as_json:
        print_json({"counts": counts.to_json()})
    else:
        console().print(rendered(read_status(checkpoint, batches=0)))


def _is_batch(topology: Topology, wanted: bool | None) -> bool:
    streaming = {
        spout.source.isStreaming for spout in topology.spouts.values() if spout.kind is None
    }
    if wanted is not None and streaming and wanted in streaming:
        which = "streams: leave out --batch" if wanted else "bounded: leave out --stream"
        raise typer.BadParameter(f"the sources of the topology are {which}")
    return wanted if wanted is not None else streaming == {False}


def _attend(query: Query, spark: SparkSession, checkpoint: str, as_json: bool) -> Counts:
    """Wait until a stream ends, and return its counts.

    SIGINT or SIGTERM stops it after the running micro-batch; a second signal at once, and the exit
    code is 130. Raises the error that ended the stream.
    """
    stopping = Event()

    def stop(number: int, frame: FrameType | None) -> None:
        if stopping.is_set():
            raise KeyboardInterrupt
        stopping.set()

    before = {each: signal.signal(each, stop) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        with _shown(checkpoint, spark, as_json):
            while not query.await_termination(_LOOK_S):
                if stopping.is_set():
                    query.stop(finish=True)
        return query.counts
    except KeyboardInterrupt:
        query.stop()
        raise typer.Exit(INTERRUPTED) from None
    finally:
        query.stop()
        for each, handler in before.items():
            signal.signal(each, handler)


# -- progress -------------------------------------------------------------------------------------


def described(activity: Activity | None, tasks: str = "") -> str:
    """Describe in a line what a run does.

    ``activity``: None before its first micro-batch. ``tasks``: a text with the number of Spark's
    tasks that have ended.
    """
    if activity is None:
        return "starting"
    way = activity.under_way
    if way is not None:
        parts = [f"micro-batch {way.number} runs"]
        if way.decided:
            parts = [f"micro-batch {way.number} is decided, the sinks write it"]
        parts.append(span_of(max(0, activity.at_ms - way.planned_ms)))
        if way.due:
            parts.append(counted(way.due, "retry", "retries"))
        if way.crashes:
            parts.append(f"{counted(way.crashes, 'run')} crashed")
        if tasks and not way.decided:
            parts.append(tasks)
        return ", ".join(parts)
    if not activity.waiting:
        return "waits for new records"
    due = activity.next_due_ms
    if due is None:
        return f"{activity.waiting:,} replayed records wait for the next micro-batch"
    when = "" if due <= activity.at_ms else f" in {span_of(due - activity.at_ms)}"
    return f"{activity.waiting:,} wait for a retry, the next is due{when}"


class Quiet:
    """The time since something was printed. After 10 s (`QUIET_S`) another line is due.

    ``now_s``: the time of the start, by a monotonic clock. The lines show the time since then.
    """

    def __init__(self, now_s: float):
        self._began = self._last = now_s

    def printed(self, now_s: float) -> None:
        """Record that something was printed now."""
        self._last = now_s

    def line(self, now_s: float, text: str) -> str | None:
        """Return a line with the text, counted as printed, if one is due; otherwise None."""
        if now_s - self._last < QUIET_S:
            return None
        self._last = now_s
        return f"after {span_of(1000 * (now_s - self._began))}: {text}"


@contextmanager
def _shown(checkpoint: str, spark: SparkSession, as_json: bool) -> Iterator[None]:
    """A context in which a thread prints each micro-batch that has finished.

    Without ``as_json`` it also shows what the run does now. It reads both from the checkpoint,
    twice a second, and once more at the end of the context.
    """
    done = Event()

    def batches() -> tuple[Logged, ...]:
        return _looked(lambda: read_batches(checkpoint, _MANY), ())

    before = {each.progress.batch_id for each in batches()}

    def look() -> None:
        shown = set(before)
        if as_json:
            bar = None
        else:
            bar = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(20),
                TimeElapsedColumn(),
                console=console(),
                transient=True,
            )
        with bar or nullcontext():
            task = bar.add_task(described(None), total=None) if bar else None
            quiet, ended = Quiet(time.monotonic()), False
            while not ended:
                ended = done.wait(_LOOK_S)
                for each in batches():
                    if each.progress.batch_id not in shown:
                        shown.add(each.progress.batch_id)
                        if as_json:
                            try:
                                print_json(each.to_json())
                                sys.stdout.flush()  # the reader may be behind a pipe
                            except BrokenPipeError:  # the command's end handles it
                                return
                        elif bar:
                            bar.console.print(cell(each.progress), soft_wrap=True)
                            quiet.printed(time.monotonic())
                if bar and task is not None:
                    tasks = _tasks(spark)
                    activity = _looked(lambda: read_activity(checkpoint), None)
                    text = described(activity, tasks.pop("description"))
                    bar.update(task, description=text, **tasks)
                    line = quiet.line(time.monotonic(), text)
                    if line is not None and not bar.console.is_terminal and not ended:
                        bar.console.print(cell(line), soft_wrap=True)

    thread = Thread(target=look, name="ackcore-shown", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _looked(read: Callable[[], T], otherwise: T) -> T:
    """Return the result of ``read``, or ``otherwise`` if the checkpoint cannot be read now."""
    try:
        return read()
    except (StateError, OSError):
        return otherwise


def _tasks(spark: SparkSession) -> dict[str, Any]:
    """Return how many tasks of running stages have ended, as arguments of `Progress.update`."""
    tracker = spark.sparkContext.statusTracker()
    ended = total = 0
    with suppress(Py4JError, OSError):
        for stage in tracker.getActiveStageIds():
            info = tracker.getStageInfo(stage)
            if info is not None:
                ended += info.numCompletedTasks
                total += info.numTasks
    if not total:
        return {"description": "", "total": None}
    return {"description": f"task {ended} of {total}", "completed": ended, "total": total}
