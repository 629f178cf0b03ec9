"""Fixtures of all benchmarks: interleaved rounds, and a summary of ratios against their bounds."""

from __future__ import annotations

import itertools
import math
import os
import platform
import re
import shutil
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ackcore
from bench import topologies
from bench.compiled import Unavailable
from bench.processes import cpu_s


@dataclass(frozen=True)
class Ratio:
    """One claim: how two contestants compare, round by round, and what is asked of that."""

    name: str
    per_round: tuple[float, ...]
    bound: float | None
    at_most: bool
    unit: str

    def line(self, width: int, quick: bool) -> str:
        """One row of the summary: median, spread, bound, and a verdict unless in haste."""
        median = statistics.median(self.per_round)
        spread = f"{min(self.per_round):.2f} .. {max(self.per_round):.2f}"
        rounds = f"{len(self.per_round)} rounds"
        row = f"{self.name:<{width}}  {median:8.2f} {self.unit:<4} {spread:>20}   {rounds:>9}"
        if self.bound is None or quick:
            return row
        sign = "<=" if self.at_most else ">="
        row += f"   required {sign} {self.bound:g}: {'met' if self.meets(median) else 'MISSED'}"
        ends = self.interval()
        if ends is None:
            return row
        told = "" if self.meets(ends[0]) is self.meets(ends[1]) else ", which could be otherwise"
        return f"{row}{told}; the median is within {ends[0]:.3f} .. {ends[1]:.3f}"

    def markdown(self) -> str:
        """The row of a Markdown table."""
        median = statistics.median(self.per_round)
        unit = "" if self.unit == "x" else f" {self.unit}"
        asked = ""
        if self.bound is not None:
            missed = "" if self.meets(median) else ", missed"
            asked = f"{'≤' if self.at_most else '≥'} {self.bound:g}{missed}"
        spread = f"{min(self.per_round):.2f} to {max(self.per_round):.2f}"
        cells = (self.name, f"{median:.2f}{unit}", spread, str(len(self.per_round)), asked)
        return f"| {' | '.join(cells)} |\n"

    def meets(self, figure: float) -> bool:
        """Whether one keeps to the bound."""
        assert self.bound is not None
        return figure <= self.bound if self.at_most else figure >= self.bound

    def interval(self) -> tuple[float, float] | None:
        """Within what the median is, in 95 of 100 such contests; None of less than six rounds.

        As many rounds are left out at either end as chance does: half of all are above the
        median, whatever their distribution.
        """
        n = len(self.per_round)
        tails = [2 * sum(math.comb(n, k) for k in range(out + 1)) / 2**n for out in range(n // 2)]
        out = sum(tail <= 0.05 for tail in tails)
        ordered = sorted(self.per_round)
        return (ordered[out - 1], ordered[-out]) if out else None


RATIOS = pytest.StashKey[list[Ratio]]()
TABLE_HEAD = "| contest | median | lowest to highest | rounds | bound |\n|---|---|---|---|---|\n"
BY_FILE = pytest.StashKey[dict[str, list[Ratio]]]()
MISSING = pytest.StashKey[dict[str, None]]()  # a set that keeps its order


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--quick`` (small sizes, few rounds) and ``--results FILE`` (a table of the ratios)."""
    parser.addoption("--quick", action="store_true", help="small sizes, few rounds")
    parser.addoption("--results", type=Path, help="write the ratios into this Markdown file")


def pytest_configure(config: pytest.Config) -> None:
    """Keep the ratios of this run in the configuration, where the summary finds them."""
    config.stash[RATIOS] = []
    config.stash[BY_FILE] = {}
    config.stash[MISSING] = {}


@pytest.fixture(scope="session")
def quick(pytestconfig: pytest.Config) -> bool:
    """Whether this run is only to see that the benches work."""
    return bool(pytestconfig.getoption("quick"))


@pytest.fixture(scope="session")
def report_ratio(pytestconfig: pytest.Config) -> Callable[..., None]:
    """``report_ratio(name, ratios, bound=None, at_most=False, unit="x")`` adds a summary row.

    ``ratios`` holds one ratio per interleaved round; the summary prints their median and
    spread with the bound next to them. A figure that has a bound of its own, as a pause has, is
    reported the same way, in its unit. A run is never failed for a bound: a loaded machine
    would decide then, not the code.
    """
    rows = pytestconfig.stash[RATIOS]

    def report(
        name: str,
        ratios: Sequence[float],
        bound: float | None = None,
        at_most: bool = False,
        unit: str = "x",
    ) -> None:
        rows.append(Ratio(name, tuple(ratios), bound, at_most, unit))

    return report


@pytest.fixture(scope="session")
def available(pytestconfig: pytest.Config) -> Callable[..., list[Any]]:
    """``available(*makers)`` calls each; the summary names those that raise `Unavailable`."""

    def make(*makers: Callable[[], object]) -> list[Any]:
        made = []
        for maker in makers:
            try:
                made.append(maker())
            except Unavailable as error:
                pytestconfig.stash[MISSING][str(error)] = None
        return made

    return make


@pytest.fixture(scope="session")
def interleaved() -> Callable[..., dict[str, list[float]]]:
    """``interleaved(contestants, rounds, clock, before, after)`` times callables: A B C, A B C, ...

    Returns the seconds of each contestant, round by round, so that ratios can be taken
    within a round: a slow spell of the machine then hits both sides of a ratio. The default
    clock counts this thread's own CPU time; pass ``time.perf_counter`` for work done in
    other threads or processes. A callable that returns a float has timed itself, elsewhere, and
    that is its seconds. ``before(name)`` and ``after(name)`` are called around each, untimed.
    ``there_and_back=True`` has them run A B C, C B A: what grows from turn to turn, as a session
    does, falls on all alike.
    """

    def run(
        contestants: dict[str, Callable[[], object]],
        rounds: int,
        clock: Callable[[], float] = time.thread_time,
        before: Callable[[str], object] = str,
        after: Callable[[str], object] = str,
        there_and_back: bool = False,
    ) -> dict[str, list[float]]:
        seconds: dict[str, list[float]] = {name: [] for name in contestants}
        for number in range(rounds):
            back = there_and_back and number % 2
            for name in list(contestants)[:: -1 if back else 1]:
                work = contestants[name]
                before(name)
                start = clock()
                own = work()
                taken = clock() - start
                seconds[name].append(own if isinstance(own, float) else taken)
                after(name)
        return seconds

    return run


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Assign the ratios that a bench reported to its file."""
    by_file = item.config.stash[BY_FILE]
    known = sum(map(len, by_file.values()))
    by_file.setdefault(item.path.name, []).extend(item.config.stash[RATIOS][known:])


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the file of ``--results``. A quick run has no figures worth keeping."""
    path = session.config.getoption("results")
    if path is not None and not session.config.getoption("quick"):
        write_results(path, session.config.stash[BY_FILE])


def write_results(path: Path, by_file: dict[str, list[Ratio]]) -> None:
    """Replace the sections of these bench files on this machine, and keep all others."""
    text = path.read_text(encoding="utf-8") if path.exists() else "# Results of the benchmarks\n\n"
    head, *sections = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    where = machine()
    for file, rows in by_file.items():
        title = f"## {file}, {where.partition(',')[0]}\n"
        table = "".join(row.markdown() for row in rows)
        section = f"{title}\n{where}.\n\n{TABLE_HEAD}{table}\n"
        at = next((at for at, old in enumerate(sections) if old.startswith(title)), len(sections))
        sections[at : at + 1] = [section] if rows else sections[at : at + 1]
    path.write_text(head + "".join(sections).rstrip() + "\n", encoding="utf-8")


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Skip a bench whose peer, compiler or header is not there, and say what is missing."""
    return (yield from skipping(pyfuncitem.config))


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(request: pytest.FixtureRequest) -> Generator[None, object, object]:
    """The same for what a bench is set up with."""
    return (yield from skipping(request.config))


def skipping(config: pytest.Config) -> Generator[None, object, object]:
    """Turn `Unavailable` into a skip, which the summary names."""
    try:
        return (yield)
    except Unavailable as error:
        config.stash[MISSING][str(error)] = None
        pytest.skip(str(error))


@pytest.hookimpl(optionalhook=True)  # of pytest-benchmark
def pytest_benchmark_update_json(config: pytest.Config, output_json: dict[str, object]) -> None:
    """Put the ratios beside the rates in the file of ``--benchmark-json``."""
    output_json["machine"] = machine()
    output_json["ratios"] = [asdict(row) for row in config.stash[RATIOS]]


@pytest.hookimpl(trylast=True)  # below the tables of pytest-benchmark, where it is seen
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print the ratios of this run, and on what they were measured."""
    rows, missing = config.stash[RATIOS], config.stash[MISSING]
    if not rows and not missing:
        return
    terminalreporter.section("ratios: median of the rounds, lowest .. highest")
    terminalreporter.line(machine())
    quick = config.getoption("quick")
    if quick:
        terminalreporter.line("--quick: too few rounds and too small sizes to judge a bound by")
    width = max((len(row.name) for row in rows), default=0)
    for row in rows:
        terminalreporter.line(row.line(width, quick))
    for what in missing:
        terminalreporter.line(f"left out: {what}")


def machine() -> str:
    """Name what a figure belongs to: processor, Python, numpy, commit."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cpu = f"{len(models)} x {models[0]}" if models else platform.processor()
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return (
        f"{cpu}, {platform.system()} {platform.release()}, Python {platform.python_version()}, "
        f"numpy {np.__version__}, ackcore {ackcore.__version__} {git.stdout.strip()}"
    )


# ---- on Spark ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rows(quick: bool) -> int:
    """How many lines there are."""
    return int(os.environ.get("ACKCORE_BENCH_LINES", 200_000 if quick else 2_000_000))


@pytest.fixture(scope="module")
def rounds(quick: bool) -> int:
    """How often each contestant has its turn."""
    return 1 if quick else 5


@pytest.fixture(scope="module")
def spark():
    """Two cores, room for the shuffles, and Spark's own settings."""
    quiet_spark = pytest.importorskip("ackcore.examples.quiet_spark")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYSPARK_SUBMIT_ARGS", "--driver-memory 4g pyspark-shell")
        with quiet_spark.spark_session("local[2]") as (session, _):
            session.conf.set("spark.sql.adaptive.enabled", "true")
            yield session


@pytest.fixture(scope="module")
def lines(rows, tmp_path_factory) -> Path:
    """Eight Parquet files of lines."""
    directory = tmp_path_factory.mktemp("lines")
    topologies.write_lines(directory, [rows // 8] * 8)
    return directory


@pytest.fixture
def new_path(tmp_path) -> Callable[[], Path]:
    """``new_path()`` is a path that nothing is at; what the last one got is removed."""
    numbers = itertools.count()

    def new_path() -> Path:
        number = next(numbers)
        shutil.rmtree(tmp_path / str(number - 1), ignore_errors=True)
        return tmp_path / str(number)

    return new_path


@pytest.fixture
def contest(interleaved, rounds, quick, report_ratio):
    """``contest(title, contestants, bounds)`` lets them run in turn, after a round to warm up.

    ``bounds`` maps (slow, fast) to what is asked of that ratio of wall times. A contest that is
    ``fine`` has to tell a few in a hundred: three times the rounds, and CPU time is asked as well.
    """

    def contest(
        title: str,
        contestants: dict[str, Callable[[], object]],
        bounds: dict[tuple[str, str], float | None],
        fine: bool = False,
    ) -> None:
        for work in contestants.values():  # the JVM compiles what is used
            work()
        cpu: dict[str, list[float]] = defaultdict(list)
        seconds = interleaved(
            contestants,
            3 * rounds if fine and not quick else rounds,
            time.perf_counter,
            before=lambda name: cpu[name].append(-cpu_s()),
            after=lambda name: cpu[name].append(cpu[name].pop() + cpu_s()),
            there_and_back=fine,
        )
        for (slow, fast), bound in bounds.items():
            for kind, times in (("wall", seconds), ("CPU", cpu)):
                asked = bound if fine or kind == "wall" else None
                taken = " / ".join(f"{statistics.median(times[each]):.2f}" for each in (slow, fast))
                ratios = [a / b for a, b in zip(times[slow], times[fast], strict=True)]
                report_ratio(f"{title}: {slow} / {fast} ({taken} s {kind})", ratios, asked)

    return contest


@pytest.fixture
def whole(spark, new_path):
    """``whole(builder, rows)`` runs a topology to its end, and asserts that all was ACKED."""
    ackcore_spark = pytest.importorskip("ackcore.spark")

    def whole(
        builder: Any,
        rows: int,
        tracked: bool = True,
        listeners: Sequence[Any] = (),
        **settings: Any,
    ) -> None:
        topology = builder.build(**settings)
        counts = ackcore_spark.run_batch(topology, spark, new_path(), listeners=listeners)
        assert counts.balanced
        assert (counts.records, counts.acked) == ((rows, rows) if tracked else (0, 0))

    return whole


@pytest.fixture
def ends():
    """An `Ends` that hears what ackcore logs."""
    handler = topologies.Ends()
    stop = handler.listen()
    yield handler
    stop()
