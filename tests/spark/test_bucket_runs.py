"""Topologies whose checkpoint is in a bucket, run on Spark: what tasks write is there, too."""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import streams
from s3_server import environment

from ackcore.spark.base.errors import CheckpointInUse, RowFileDamaged, StateError
from ackcore.spark.dead_letters import store
from ackcore.spark.dead_letters.reading import dead_letters
from ackcore.spark.engine import decide
from ackcore.spark.planned.planned_source import PlannedSource, SourceError
from ackcore.spark.query import run_batch, start
from ackcore.spark.sinks.parquet import ParquetSink, to_parquet
from ackcore.spark.stores.opening import open_store

LINES = [("the cat",), ("flaky dog",), ("the dog",), ("bad cat",), ("a cat",)]
word_count = partial(streams.word_count, max_attempts=2, backoff_s=0.01)


def counts_in(url):
    """Return how often the sink has each word."""
    store = open_store(url, "path")
    tables = [
        pq.read_table(pa.BufferReader(store.read(entry.key)))
        for entry in store.list()
        if entry.key.endswith(".parquet")
    ]
    found = pa.concat_tables(tables)["word"]
    return {one["values"].as_py(): one["counts"].as_py() for one in pc.value_counts(found)}


COUNTED = {"the": 2, "cat": 2, "dog": 2, "flaky": 1, "a": 1}


@pytest.fixture
def places(request):
    """A checkpoint and a sink; of a parametrised test in that fixture's bucket."""
    bucket = request.getfixturevalue(getattr(request, "param", "bucket"))
    request.getfixturevalue("tasks_reach")
    return f"{bucket}/checkpoint", f"{bucket}/tallies"


def left_in(checkpoint):
    """Return what is below the checkpoint's ``work``."""
    return [entry.key for entry in open_store(f"{checkpoint}/ackcore", "path").list("work")]


@pytest.mark.parametrize(
    "places",
    ["bucket", "hdfs_place", pytest.param("azure_container", marks=pytest.mark.faults)],
    ids=["s3", "hdfs", "azure"],
    indirect=True,
)
def test_a_word_count_runs_whole_in_a_bucket(spark, places, tmp_path, caplog):
    checkpoint, tallies = places
    topology = word_count(spark.createDataFrame(LINES, "line string"), to_parquet(tallies))
    counts = run_batch(topology, spark, checkpoint)
    assert (counts.records, counts.acked, counts.dead, counts.retried) == (5, 4, 1, 2)
    assert counts.balanced
    assert counts_in(tallies) == COUNTED
    letters = dead_letters(checkpoint, spark=spark).collect()
    assert [each.payload.line for each in letters] == ["bad cat"]
    assert left_in(checkpoint) == []
    assert not [name for name in os.listdir() if name.startswith("s3:")]
    assert run_batch(topology, spark, checkpoint) == counts
    for name, value in environment("").items():
        if "KEY" in name:
            assert value not in caplog.text


def test_a_place_with_an_escape_has_all_objects(spark, bucket, tasks_reach, monkeypatch):
    monkeypatch.setattr(decide, "INLINE_BYTES", 0)
    checkpoint, tallies = f"{bucket}/ts=12%3A00 +\xe9/cp", f"{bucket}/%2e%2e/tallies"
    topology = word_count(spark.createDataFrame(LINES, "line string"), to_parquet(tallies))
    counts = run_batch(topology, spark, checkpoint)
    assert (counts.records, counts.acked, counts.dead, counts.retried) == (5, 4, 1, 2)
    assert counts_in(tallies) == COUNTED
    assert dead_letters(checkpoint, spark=spark).count() == 1
    keys = [entry.key for entry in open_store(bucket, "path").list()]
    assert {key.rpartition("%")[0] for key in keys} == {"ts=12", "%2e"}
    assert left_in(checkpoint) == []


def test_many_that_fail_are_written_by_their_tasks(spark, places, monkeypatch):
    """And the checkpoint has them by a copy within the bucket, the store of letters by another."""
    checkpoint, tallies = places
    monkeypatch.setattr(decide, "INLINE_BYTES", 0)
    monkeypatch.setattr(store, "_SMALL", 1)
    lines = [(f"{word} {n}",) for word in ("bad", "flaky") for n in range(300)]
    frame = spark.createDataFrame(lines, "line string").repartition(3)
    counts = run_batch(word_count(frame, to_parquet(tallies)), spark, checkpoint)
    assert (counts.acked, counts.dead) == (300, 300)
    assert dead_letters(checkpoint, spark=spark).count() == 300
    letters = open_store(f"{checkpoint}/ackcore/dead_letters", "path")
    index = json.loads(letters.get("index.json").data.partition(b"\n")[0])
    # Copied, with the fingerprint that its task gave it, and not with a digest of the driver's.
    assert {len(each["checksum"]) for each in index["spouts"]["lines"]["files"]} == {16}
    assert sum(counts_in(tallies).values()) == 600
    assert left_in(checkpoint) == []


def test_a_file_of_a_run_that_is_damaged_is_found(spark, places, dying_at):
    checkpoint, tallies = places
    topology = word_count(spark.createDataFrame(LINES, "line string"), to_parquet(tallies))
    with dying_at("decided"):
        run_batch(topology, spark, checkpoint)
    store = open_store(f"{checkpoint}/ackcore", "path")
    key = next(key for key in left_in(checkpoint) if "/rows/" in key)
    data = store.get(key).data
    manifest = json.loads(store.get("head.json").data.partition(b"\n")[0])["records"]
    files = manifest["batches/0.decision"]["files"]
    assert len(data) in [size for file in files for size in file]
    for change, told in (
        (data[:-1], "bytes instead of"),
        (data[:-9] + b"x" + data[-8:], "do not match the fingerprint in its name"),
        (None, "is missing, though the checkpoint refers to it"),
    ):
        if change is None:
            store.delete([key])
        else:
            store.put(key, change)
        with pytest.raises(Exception, match=told) as raised:
            run_batch(topology, spark, checkpoint)
        assert "RowFileDamaged" in repr(raised.value.__cause__ or raised.value) or isinstance(
            raised.value, RowFileDamaged
        )
    store.put(key, data)
    counts = run_batch(topology, spark, checkpoint)
    assert (counts.acked, counts.dead) == (4, 1)
    assert counts_in(tallies) == COUNTED


def test_where_spark_keeps_its_part_is_to_be_given(spark, bucket, tmp_path):
    stream = word_count(
        spark.readStream.schema("line string").json(str(tmp_path)), to_parquet(tmp_path / "tallies")
    )
    with pytest.raises(ValueError, match="spark_checkpoint must be given if the checkpoint is"):
        start(stream, spark, bucket)
    with pytest.raises(ValueError, match="spark_checkpoint must be a path"):
        start(stream, spark, bucket, spark_checkpoint="s3a://bucket/spark")
    # And whoever has the checkpoint is not fenced by one that is refused for this.
    local = {"spark_checkpoint": tmp_path / "spark", "dead_letters": tmp_path / "dead"}
    with pytest.raises(ValueError, match="dead_letters must be a URL if the checkpoint is one"):
        start(stream, spark, bucket, **local)
    assert open_store(bucket, "path").list() == []


# -- streams --------------------------------------------------------------------------------------


def test_a_stream_goes_on_where_it_was(spark, places, folder, running, tmp_path):
    checkpoint, tallies = places
    about = {"spark_checkpoint": tmp_path / "sparks"}

    def again():
        topology = word_count(folder.stream, to_parquet(tallies))
        return running(topology, spark, checkpoint, **about)

    folder.add("a flaky", "bad", "a")
    query = again()
    query.process_all_available()
    query.stop()
    assert repr(query) == f"<Query on {checkpoint}, ended>"
    assert os.listdir(tmp_path / "sparks" / "offsets")
    folder.add("b flaky")
    query = again()
    query.process_all_available()
    query.stop()
    assert (query.counts.acked, query.counts.dead, query.counts.waiting) == (3, 1, 0)
    assert query.counts.balanced
    assert counts_in(tallies) == {"a": 2, "flaky": 2, "b": 1}
    assert left_in(checkpoint) == []
    assert not [name for name in os.listdir() if name.startswith("s3:")]


def test_the_example_of_the_docs_runs(spark, bucket, tasks_reach, folder, tmp_path):
    page = Path(__file__).parents[2] / "docs" / "buckets.md"
    text = page.read_text(encoding="utf-8")
    example = re.search(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[1]
    folder.add("a", "bad")
    given = {
        "run_batch": run_batch,
        "start": start,
        "spark": spark,
        "nightly": word_count(
            spark.createDataFrame(LINES, "line string"), to_parquet(f"{bucket}/nightly-tallies")
        ),
        "live": word_count(folder.stream, to_parquet(f"{bucket}/live-tallies")),
    }
    exec(example.replace("s3://bucket", bucket).replace("/volume", str(tmp_path)), given)
    counts, query = given["counts"], given["query"]
    try:
        query.process_all_available()
    finally:
        query.stop()
    assert (counts.acked, counts.dead) == (4, 1)
    assert (query.counts.acked, query.counts.dead) == (1, 1)
    assert dead_letters(f"{bucket}/dead/live", spark=spark).count() == 1


#: What a micro-batch asks of a bucket at most, one after the other, when nothing fails.
MOST_TRIPS = 12


def test_a_micro_batch_takes_few_trips(spark, places, folder, running, s3, tmp_path):
    """With a sink in the bucket; requests of tasks, and of what reads their files, count each."""
    checkpoint, tallies = places
    topology = word_count(folder.stream, to_parquet(tallies))
    about = {"spark_checkpoint": tmp_path / "sparks"}
    folder.add("first")
    query = running(topology, spark, checkpoint, **about)
    query.process_all_available()
    trips = []
    for number in range(8):
        s3.requests.clear()
        folder.add(f"the {number}", f"a {number}", f"an {number}")
        query.process_all_available()
        found = [(each.method, each.path.rpartition("/")[2][:40]) for each in s3.requests]
        # The heartbeat looks for replays meanwhile, and so does who waits for the end: the plan
        # does so once.
        looks = found.count(("GET", "index.json"))
        assert looks >= 1
        trips.append([each for each in found if each != ("GET", "index.json")] + ["replays?"])
    query.stop()
    assert query.counts.acked == 25
    counted = [len(each) for each in trips]
    assert max(counted) <= MOST_TRIPS + 2, trips  # what is done is deleted in one of eight
    assert sorted(counted)[-2] <= MOST_TRIPS, trips
    # Each step is one put of the head, which is looked at before the sink is asked.
    heads = [one[0] for one in trips[0] if one[1].startswith("head.json")]
    assert heads == ["PUT", "PUT", "GET", "PUT"]


class Lines(PlannedSource):
    """Lines of a list; ``limited`` is the error of its `bounded`, if it has one."""

    schema = pa.schema([("line", pa.string())])

    def __init__(self, *lines, limited=None):
        self.lines, self.limited, self.told = list(lines), limited, []

    def plan(self, previous):
        first = 0 if previous is None else previous["to"]
        return {"from": first, "to": len(self.lines)} if first < len(self.lines) else None

    def read(self, spark, plan):
        lines = self.lines[plan["from"] : plan["to"]]
        return spark.createDataFrame([(line,) for line in lines], "line string")

    def bounded(self):
        if self.limited is not None:
            raise self.limited
        return self

    def done(self, plan):
        self.told.append(plan["to"])


NOW = {"trigger": {"availableNow": True}}


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize(
    ("refused", "options", "told"),
    [
        ("sink", {}, "others is the directory of sink 'count' of the checkpoint"),
        ("letters", {}, "holds the dead letters of the checkpoint"),
        ("source", NOW, "has no end"),
    ],
)
def test_a_start_that_is_refused_leaves_the_running_query_alone(
    spark, places, running, refused, options, told, begun
):
    checkpoint, tallies = places
    place = os.path.dirname(checkpoint)
    other = word_count(spark.createDataFrame(LINES, "line string"), to_parquet(f"{place}/others"))
    run_batch(other, spark, f"{place}/other")
    source = Lines(*(["a cat"] if begun else []))
    query = running(word_count(source, to_parquet(tallies)), spark, checkpoint)
    query.process_all_available()
    again = Lines(limited=SourceError("has no end")) if refused == "source" else Lines()
    sink = to_parquet(f"{place}/others" if refused == "sink" else tallies)
    letters = f"{place}/other/ackcore/dead_letters" if refused == "letters" else None
    # Another topology may have a checkpoint that has not begun.
    changed = word_count(again, sink, **({} if begun else {"max_waiting": 7}))
    with pytest.raises((StateError, SourceError), match=told):
        start(changed, spark, checkpoint, dead_letters=letters, **options)
    assert not again.told
    source.lines.append("the dog")
    query.process_all_available()
    assert query.counts.acked == 1 + begun


class Slow(ParquetSink):
    """A sink whose claim takes so long that the running query ends micro-batches meanwhile."""

    meanwhile = None

    def claim(self, *of):
        super().claim(*of)
        if self.meanwhile is not None:
            self.meanwhile()


def test_a_query_that_is_busy_is_taken_over(spark, places, running, tmp_path):
    checkpoint, _ = places
    source, sink = Lines("a cat"), Slow(str(tmp_path / "tallies"))
    first = running(word_count(source, sink), spark, checkpoint)
    first.process_all_available()
    claims = []

    def work():
        claims.append(first.is_active)
        source.lines.append("the dog")
        with suppress(CheckpointInUse):
            first.process_all_available()

    again = Slow(sink.path)
    again.meanwhile = work
    second = running(word_count(source, again), spark, checkpoint)
    assert claims[:2] == [True, True]
    again.meanwhile = None
    second.process_all_available()
    assert isinstance(first.exception, CheckpointInUse)
    assert (second.counts.acked, second.counts.balanced) == (1 + len(claims), True)
