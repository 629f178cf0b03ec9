"""A topology in which things go wrong on purpose, to be run in a process that may be killed.

    lines ─► split (BatchBolt) ─► enrich (rows or batches, flaky) ═ by word ═► count ─► sink

    python fault_job.py config.json

What each record leaves in the sink is told by `rows_of`, whatever happens.  The column ``run`` is
not part of that: with ``"otherwise": true`` it names the task that made the row, so that two
executions of a record differ.  With ``"state": files``, the number of files in which the records
are, duplicates are ended, and ``count`` feeds and reads tables.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import hashlib
import json
import os
import random
import signal
import sys
import threading
import time
from contextlib import closing
from glob import glob
from http.client import HTTPConnection
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

LINES = pa.schema([("id", pa.int64()), ("text", pa.string())])
WORDS = pa.schema([("id", pa.int64()), ("at", pa.int64()), ("word", pa.string())])
RICH = WORDS.append(pa.field("run", pa.string()))
#: With the time of the record, and the number of rows of the word that the table had.
STATE = pa.schema([*RICH, ("ts", pa.timestamp("us", "UTC")), ("seen", pa.int64())])
#: The size of the windows of "times".
WINDOW_S = 20


def stage(directory, records, files, copies=False):
    """Write records to ``files`` files, in turns; a stream reads them in the order of their times.

    With ``copies``, some come once more, in the next file, or in the last one if there is none.
    """
    now_s = time.time()
    for number in range(files):
        some = records[number::files]
        before = records[number - 1 :: files] if number else []
        again = before + (some if number == files - 1 else [])
        more = [record for record in again if copies and copies_of(record["id"]) > 1]
        rows = pa.Table.from_pylist(some + more, LINES)
        path = os.path.join(directory, f"lines-{number:03}.parquet")
        pq.write_table(rows, path)
        os.utime(path, (now_s, now_s - files + number))


def copies_of(key):
    """Return the number of records of a key in a source with copies."""
    return 1 + (key % 6 == 1)


def time_of(key, files):
    """Return the time of a record in seconds; later files have later times."""
    return key % files * 1000 + key


def rows_of(payload):
    """Return the rows that a record leaves in the sink if it is ACKED."""
    words = (payload["text"] or "").split()
    return [{"id": payload["id"], "at": at, "word": word} for at, word in enumerate(words)]


def lines(n, seed=0):
    """Records: every tenth has no words, the others up to seven."""
    words = [hashlib.blake2b(f"{seed}/{i}".encode(), digest_size=1).hexdigest() for i in range(97)]
    return {
        i: {
            "id": i,
            "text": " ".join(words[(i * 31 + k * 7) % 97] for k in range(i % 8 * (i % 10 > 0))),
        }
        for i in range(n)
    }


#: Each record of `lines` whose id this divides is rejected, with the rule ``reject_every``.
POISON = 17


def poisoned(key):
    """Whether a record is rejected: one without words never comes to where that is done."""
    return key % POISON == 0 and key % 8 > 0 and key % 10 > 0


# ------------------------------------------------------------------- what runs in Spark's workers

from pyspark import TaskContext  # noqa: E402

import ackcore.spark.engine.action  # noqa: E402
from ackcore import tables  # noqa: E402
from ackcore.spark.query import run_batch, start  # noqa: E402
from ackcore.spark.sinks.parquet import to_parquet  # noqa: E402
from ackcore.spark.tasks.settle_stage import SettleStage  # noqa: E402
from ackcore.topology import AsyncBolt, BasicBolt, BatchBolt, Bolt, Reject, TopologyBuilder  # noqa: E402

#: A stage after a shuffle has three tasks on two cores: the last one starts when one is through.
LAST = 2


def first_time(directory, name):
    """Whether this is the first call for it, in any process."""
    try:
        os.close(os.open(os.path.join(directory, name), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def executor():
    """The JVM that this worker works for: the parent of the daemon that forked it."""
    pid = os.getppid()
    while "java" not in Path(f"/proc/{pid}/comm").read_text():
        pid = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    command = Path(f"/proc/{pid}/cmdline").read_text()
    assert "CoarseGrainedExecutorBackend" in command, f"{pid} is no executor: {command}"
    return pid


def losing(marks, partition, lose):
    """Make settle stages of which a task dies with what was shuffled, once, when one is through.

    ``lose`` is `remove_shuffle_files` or `kill_noted_executors`.
    """

    def losing_stage(work):
        stage = SettleStage(work)

        def run(batches):
            context = TaskContext.get()  # None where the driver settles
            if context and context.partitionId() == partition and first_time(marks, "lost"):
                lose(marks)
                os.kill(os.getpid(), signal.SIGKILL)  # its second attempt finds its input gone
            yield from stage(batches)

        return run

    return losing_stage


def remove_shuffle_files(marks):
    """Remove what was shuffled, on all executors."""
    # Spark gives its workers the directories of its blocks under this name; those of a job in a
    # process of its own, all executors', are in its temporary one.
    for place in (*os.environ["SPARK_LOCAL_DIRS"].split(","), Path(marks).parent / "tmp"):
        for file in glob(f"{place}/**/shuffle_*", recursive=True):
            with contextlib.suppress(FileNotFoundError):
                os.remove(file)
                first_time(marks, f"lost-{os.path.basename(file)}")


def kill_noted_executors(marks):
    """Kill the JVMs that bolts with the rule ``note`` ran in, and with them what they shuffled."""
    for mark in glob(f"{marks}/*-ran-in-*"):
        pid = int(mark.rpartition("-")[2])
        first_time(marks, f"lost-{pid}")
        os.kill(pid, signal.SIGKILL)


class Trouble:
    """The faults that a bolt meets at a record; rules by name, each with its record ids.

    ``kill_executor`` kills the executor's JVM each time, ``executor_once`` once for each id;
    ``hang`` never returns, nor does ``hang_with_gil``, as an extension in C may not.
    ``until`` {id: attempts} raises before that attempt; ``once`` fails the first execution ever;
    ``raise`` and ``reject`` always, and ``reject_every`` whatever it divides; ``rate`` a share of
    all (id, attempt); ``kill`` kills the worker each time, ``kill_once`` once, and ``exit`` ends
    it.  In the task of the partition that they name, ``executor`` kills the executor's JVM, once;
    ``note`` notes it down.
    ``slow`` makes the first attempt at a task wait for its copy.
    """

    def __init__(self, component, rules, marks):
        self.component, self.rules, self.marks = component, dict(rules), marks
        self.until = {int(key): n for key, n in self.rules.get("until", {}).items()}

    def has(self, rule, key):
        return key in self.rules.get(rule, ())

    def mark(self, what, key=""):
        return first_time(self.marks, f"{self.component}-{what}-{key}")

    def meet(self, key, attempt):
        """Raise, or worse."""
        if self.rules.get("note"):
            self.mark("ran-in", executor())
        if self.has("kill", key):
            Path(self.marks, f"{self.component}-killed-{key}-{time.time_ns()}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if self.has("exit", key):
            os._exit(17)
        if self.has("kill_executor", key):
            Path(self.marks, f"{self.component}-executor-killed-{key}-{time.time_ns()}").touch()
            os.kill(executor(), signal.SIGKILL)
            time.sleep(600)
        if self.has("executor_once", key) and self.mark("executor-once", key):
            os.kill(executor(), signal.SIGKILL)
            time.sleep(600)
        if self.has("hang", key):
            Path(self.marks, f"{self.component}-hung-{key}-{time.time_ns()}").touch()
            threading.Event().wait()
        if self.has("hang_with_gil", key):
            Path(self.marks, f"{self.component}-hung-{key}-{time.time_ns()}").touch()
            ctypes.PyDLL(None).sleep(600)
        if self.has("kill_once", key) and self.mark("kill", key):
            os.kill(os.getpid(), signal.SIGKILL)
        context = TaskContext.get()
        if self.rules.get("executor") == context.partitionId() and self.mark("executor"):
            os.kill(executor(), signal.SIGKILL)
            time.sleep(60)
        every = self.rules.get("reject_every", 0)
        if self.has("reject", key) or (every and key % every == 0):
            raise Reject(f"{key} is poison")
        if self.has("raise", key):
            raise ValueError(f"{key} always fails")
        if attempt < self.until.get(key, 0):
            raise ConnectionError(f"{key} fails at attempt {attempt}")
        drawn = hashlib.blake2b(
            f"{self.component}/{key}/{attempt}".encode(), digest_size=4
        ).digest()
        if int.from_bytes(drawn) < self.rules.get("rate", 0) * 2**32:
            raise TimeoutError(f"{key} was unlucky at attempt {attempt}")

    def wait(self):
        """Once, the first attempt at task 0 does not go on before its copy has come this far."""
        context = TaskContext.get()
        if self.rules.get("slow") and context is not None and context.partitionId() == 0:
            mark = Path(self.marks, f"{self.component}-copy-{context.stageId()}")
            if context.attemptNumber() > 0:
                mark.touch()
            elif self.mark("slow", context.stageId()):
                until = time.monotonic() + 300
                while not mark.exists() and time.monotonic() < until:
                    time.sleep(0.02)


class Split(BatchBolt):
    """Lines become words."""

    outputs = WORDS

    def process(self, batch, out):
        rows = [(i, row) for i, line in enumerate(batch.to_pylist()) for row in rows_of(line)]
        out.emit(
            pa.RecordBatch.from_pylist([row for _, row in rows], WORDS),
            parents=[i for i, _ in rows],
        )


class SplitValues(Split):
    """The same, of lines that are JSON in records of Kafka."""

    def process(self, batch, out):
        lines = [json.loads(value.as_py()) for value in batch["value"]]
        super().process(pa.RecordBatch.from_pylist(lines), out)


class EnrichBatch(BatchBolt):
    """Hands words on; fails some of them by itself, and raises for others."""

    outputs = RICH
    needs_identity = True

    def __init__(self, trouble, otherwise):
        self.trouble, self.otherwise = trouble, otherwise

    def process(self, batch, out):
        self.trouble.wait()
        rows = batch.to_pylist()
        for i, row in enumerate(rows):
            if row["at"] == 0:
                if self.trouble.has("once", row["id"]) and self.trouble.mark("once", row["id"]):
                    out.fail([i], [ConnectionError(f"{row['id']} fails the first time")])
                self.trouble.meet(row["id"], int(out.identity.attempts[i]))
        rich = [{**row, "run": run_of(self.otherwise)} for row in rows]
        out.emit(pa.RecordBatch.from_pylist(rich, RICH), parents=range(len(rows)))


class EnrichRows(Bolt):
    """The same, a row at a time; every third word is acked late."""

    outputs = RICH

    def __init__(self, trouble, otherwise):
        self.trouble, self.otherwise = trouble, otherwise

    def prepare(self, context):
        self.late = []

    def execute(self, tuple):
        self.trouble.wait()
        key, at, word = tuple
        if at == 0:
            if self.trouble.has("once", key) and self.trouble.mark("once", key):
                self.collector.fail(tuple, f"{key} fails the first time")
                return
            self.trouble.meet(key, tuple.attempt)
        self.collector.emit((key, at, word, run_of(self.otherwise)), anchors=tuple)
        if at % 3 == 2:
            self.late.append(tuple)
        else:
            self.collector.ack(tuple)

    def flush(self):
        for tuple in self.late:
            self.collector.ack(tuple)


class EnrichCalls(BasicBolt):
    """The same, by a call to a service for each word, made once; ``run`` is what it answers."""

    outputs = RICH
    journal = True

    def __init__(self, trouble, server):
        self.trouble, self.server = trouble, server

    def execute(self, tuple, collector):
        key, at, word = tuple
        if at == 0:
            self.trouble.meet(key, tuple.attempt)
        path = f"/{key}-{at}-{tuple.attempt}?pid={os.getpid()}"
        with closing(HTTPConnection("127.0.0.1", self.server, timeout=60)) as connection:
            connection.request("GET", path)
            answer = connection.getresponse().read().decode()
        collector.emit((key, at, word, answer))


class EnrichAsync(AsyncBolt):
    """The same, with up to four calls out at once; ``run`` says nothing."""

    outputs = RICH
    journal = True
    max_concurrency = 4

    def __init__(self, trouble, server):
        self.trouble, self.server = trouble, server

    async def execute(self, tuple, collector):
        key, at, word = tuple
        if at == 0:
            self.trouble.meet(key, tuple.attempt)
        path = f"/{key}-{at}-{tuple.attempt}?pid={os.getpid()}"
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server)
        writer.write(f"GET {path} HTTP/1.0\r\n\r\n".encode())
        answer = await reader.read()
        writer.close()
        if b" 200 " not in answer.split(b"\r\n")[0]:
            raise ConnectionError("no answer")
        collector.emit((key, at, word, "any"))


class Count(BatchBolt):
    """The far side of the shuffle; hands on what it gets."""

    outputs = RICH
    needs_identity = True

    def __init__(self, trouble):
        self.trouble = trouble

    def process(self, batch, out):
        self.trouble.wait()
        for i, row in enumerate(batch.to_pylist()):
            self.trouble.meet(row["id"], int(out.identity.attempts[i]))
        out.emit(self.answers(batch), parents=range(len(batch)))

    def answers(self, batch):
        return batch


class CountAndLookUp(Count):
    """The same bolt, with a time for windows and a count that it looks up in a table."""

    outputs = STATE
    uses = ("words",)

    def __init__(self, trouble, files):
        super().__init__(trouble)
        self.files = files

    def answers(self, batch):
        ts = [time_of(key, self.files) * 1_000_000 for key in batch["id"].to_pylist()]
        seen = self.tables["words"].lookup(batch)["n"]
        columns = [*batch.columns, pa.array(ts, STATE.field("ts").type), seen]
        return pa.record_batch(columns, schema=STATE)


def run_of(otherwise):
    """Return the maker of a row: if bolts answer otherwise the second time, the task's attempt."""
    return str(TaskContext.get().taskAttemptId()) if otherwise else "any"


# -------------------------------------------------------------------------------------- the driver


class Sink:
    """A sink of (DataFrame, batch id) that raises, before or amid its work."""

    def __init__(self, path, marks, times=0, partial=False):
        self.path, self.marks, self.times, self.partial = path, marks, times, partial

    def __call__(self, frame, batch_id):
        place = f"{self.path}/batch_id={batch_id}"
        for time_ in range(self.times):
            if first_time(self.marks, f"sink-{batch_id}-{time_}"):
                if self.partial:
                    frame.limit(3).coalesce(1).write.mode("overwrite").parquet(place)
                raise OSError(f"the sink fails, time {time_}")
        frame.write.mode("overwrite").parquet(place)


def source_of(spark, config):
    """The lines: of files, or of a topic."""
    if "kafka" in config:
        from ackcore.kafka import KafkaSpout  # noqa: PLC0415

        return KafkaSpout(**config["kafka"])
    if "bucket_files" in config:
        from ackcore.spark import FileSpout  # noqa: PLC0415

        return FileSpout(config["bucket_files"], "parquet", LINES, max_files_per_batch=1)
    schema = "id bigint, text string"
    if config.get("mode", "stream") == "stream":
        source = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1)
    else:
        source = spark.read.schema(schema)
    frame = source.parquet(f"{config['directory']}/in")
    if config.get("slow_source"):
        frame = frame.mapInArrow(Slowly(config["slow_source"]), schema)
    if config.get("shuffled"):
        frame = frame.repartition(2).mapInArrow(in_any_order, schema)
    return frame


def topology_of(spark, config):
    """The topology, its source and sink where the configuration says."""
    directory, rules = config["directory"], config.get("rules", {})
    marks = f"{directory}/marks"
    builder = TopologyBuilder()
    frame, key = source_of(spark, config), config.get("ordered_by")
    more = {}
    if "state" in config:
        more = {"dedup": "value" if "kafka" in config else "id", "within_s": 86_400}
    builder.spout("lines", frame, message_id=config.get("message_id"), ordered_by=key, **more)
    trouble = Trouble("enrich", rules.get("enrich", {}), marks)
    if config.get("server"):
        kind = EnrichAsync if config.get("enrich") == "async" else EnrichCalls
        enrich = kind(trouble, config["server"])
    else:
        kind = {"row": EnrichRows, "batch": EnrichBatch}[config.get("enrich", "row")]
        enrich = kind(trouble, config.get("otherwise", False))
    builder.bolt("split", SplitValues() if "kafka" in config else Split()).shuffle("lines")
    builder.bolt("enrich", enrich).shuffle("split")
    trouble = Trouble("count", rules.get("count", {}), marks)
    count = CountAndLookUp(trouble, config["state"]) if "state" in config else Count(trouble)
    builder.bolt("count", count).fields("enrich", "word")
    if "state" in config:
        totals = {"n": tables.count(), "ids": tables.sum_of("id")}
        builder.table("words", from_="count", key="word", value=totals)
        # A copy comes a file later, and may run before a record in retry: it must not be late.
        window = tables.tumbling(WINDOW_S, "ts", late_s=1_200 if config["state"] > 1 else 0)
        ids = {"ids": tables.collect("id", 1000)}
        builder.table("times", from_="count", key="word", value=ids, window=window)
        closed = f"{config.get('sink_path', f'{directory}/sink')}-closed"
        builder.sink("times.closed", to_parquet(closed))
    builder.sink("count", sink_of(config))
    settings = {"backoff_s": 0.05, "max_backoff_s": 0.2, "parallelism": 3}
    return builder.build(**{**settings, **config.get("settings", {})})


def sink_of(config):
    """Return the sink: Parquet files, or files of a sink that fails."""
    path, sink = config.get("sink_path", f"{config['directory']}/sink"), config.get("sink")
    return to_parquet(path) if sink is None else Sink(path, f"{config['directory']}/marks", **sink)


class Slowly:
    """Rows that are long in coming."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __call__(self, batches):
        for batch in batches:
            time.sleep(self.seconds)
            yield batch


def in_any_order(batches):
    """Rows as a shuffle hands them out: each time in another order."""
    for batch in batches:
        yield batch.take(pa.array(random.SystemRandom().sample(range(len(batch)), len(batch))))


def checkpoint_of(config):
    """Where the checkpoint is."""
    return config.get("checkpoint", f"{config['directory']}/checkpoint")


def wait_briefly(seconds):
    """Nothing here waits for long, unless something is wrong."""
    assert seconds < 30, f"told to wait for {seconds} s"
    time.sleep(seconds)


def run_job(spark, config):
    """Run it to its end; return what it says of itself."""
    said = {"error": None, "progress": [], "counts": {}}
    checkpoint = checkpoint_of(config)
    options = {"dead_letters": config.get("dead_letters")}
    if "lose" in config:
        lose = {"files": remove_shuffle_files, "executors": kill_noted_executors}[config["lose"]]
        ackcore.spark.engine.action.SettleStage = losing(f"{config['directory']}/marks", LAST, lose)
    try:
        topology = topology_of(spark, config)
        if config.get("mode", "stream") == "batch":
            counts = run_batch(topology, spark, checkpoint, **options, wait=wait_briefly)
            said["counts"] = counts.to_json()
            return said
        trigger = config.get("trigger", {"availableNow": True})
        if "spark_checkpoint" in config:
            options["spark_checkpoint"] = config["spark_checkpoint"]
        query = start(topology, spark, checkpoint, trigger=trigger, **options)
        try:
            if config.get("until_decided") is not None:
                until = time.monotonic() + config.get("patience_s", 600)
                while (
                    query.is_active
                    and query.counts.acked + query.counts.dead < config["until_decided"]
                ):
                    assert time.monotonic() < until, f"it has come to rest at {query.counts}"
                    time.sleep(0.05)
                query.stop()
            query.await_termination()
        finally:
            query.stop()
            said["progress"] = [
                {"batch_id": one.batch_id, "runs": one.runs, "retried": one.retried}
                for one in query.recent_progress
            ]
            said["counts"] = query.counts.to_json()
    except Exception as error:
        said["error"] = f"{type(error).__name__}: {error}"
    return said


def main(path):
    """Run what a file describes, and leave what is to be said beside it."""
    from ackcore.examples.quiet_spark import spark_session  # noqa: PLC0415

    config = json.loads(Path(path).read_text())
    with spark_session(config["master"], config.get("conf"), config.get("jvm_log")) as (spark, _):
        said = run_job(spark, config)
        Path(config["result"]).write_text(json.dumps(said))


if __name__ == "__main__":
    main(sys.argv[1])
