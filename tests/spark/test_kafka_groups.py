"""Commits of a group on a real broker: its limit for metadata, and two queries in one group."""

from __future__ import annotations

import sys
import threading
from contextvars import Context
from functools import partial
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from pyspark import cloudpickle

pytest.importorskip("confluent_kafka", reason="confluent-kafka is not installed")

import mock_broker
import test_kafka_spout as spouts
from servers import wait_until
from streams import available_now, until
from test_kafka_spout import Kept, source, topology

from ackcore._records import OffsetState
from ackcore.kafka import KafkaSpout
from ackcore.kafka.client_settings import ClientSettings
from ackcore.kafka.cluster import Cluster
from ackcore.offsets import decode_metadata
from ackcore.spark import run_batch, start
from ackcore.spark.base.errors import CheckpointInUse
from ackcore.spark.base.failpoints import FailpointReached
from ackcore.spark.engine import batch
from ackcore.spark.kafka import group_commits
from ackcore.spark.kafka.group_commits import GroupCommitter
from ackcore.spark.kafka.kafka_spouts import KafkaSources
from ackcore.topology import BasicBolt, TopologyBuilder

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(spouts)
YEAR_S = 366 * 86_400


def test_what_does_not_fit_into_the_brokers_metadata_is_left_out(kafka_broker):
    """It takes 4,095 characters: what is called done of twenty thousand holes was done."""
    topic, group = kafka_broker.new_topic(), kafka_broker.new_group()
    holes = 7 + np.cumsum(np.random.default_rng(5).integers(2, 9, 20_000))
    none = np.empty(0, np.int64), np.empty(0, np.int32)
    state = OffsetState(int(holes[0]), int(holes[-1]) + 2, holes, holes + 1, *none)
    told = GroupCommitter("lines", group, 5)
    with Cluster(ClientSettings(kafka_broker.bootstrap_servers)) as cluster:
        found = told.commit(cluster, {(topic, 0): state}, {topic: "its id"})
        assert found == {(topic, 0): holes[0]}
    offset, metadata = kafka_broker.committed(group, topic)
    assert 3_900 < len(metadata) <= 4_095
    found = decode_metadata(topic, 0, offset, metadata).state
    assert found.end > holes[2_000]
    below = holes[holes < found.end]
    np.testing.assert_array_equal(found.hole_starts, below)
    np.testing.assert_array_equal(found.hole_ends, below + 1)


#: The mock forgets a group's offsets with their topic, as a broker does.
REAL = pytest.param("kafka_broker", marks=[pytest.mark.broker, pytest.mark.faults])


@pytest.mark.parametrize("kafka", ["mock_kafka", REAL])
def test_what_was_done_of_a_topic_is_not_committed_to_one_that_was_made_anew(
    spark, request, kafka, tmp_path
):
    """Nobody would read what it has below that: not who refuses to go on, nor who begins then."""
    kafka = request.getfixturevalue(kafka)
    topic, group, kept = kafka.new_topic(), kafka.new_group(), Kept()
    spout = source(kafka, topic, group_id=group, start="group", lost="refuse")
    kafka.produce(topic, [b"a", b"b", b"c"])
    assert run_batch(topology(spout, kept), spark, tmp_path / "batch").acked == 3
    on = available_now(topology(spout, Kept()), spark, tmp_path / "one")
    before = kafka.committed(group, topic)
    assert before[0] == 3
    kafka.make_anew(topic)
    kafka.produce(topic, [b"1", b"2", b"3", b"4", b"5"])
    assert kafka.committed(group, topic)[0] < 0  # it is forgotten with its topic
    assert run_batch(topology(spout, kept), spark, tmp_path / "batch").acked == 3
    on = start(topology(spout, Kept()), spark, tmp_path / "one", trigger={"availableNow": True})
    with pytest.raises(Exception, match=r"created again, and lost='refuse'.*a new checkpoint"):
        on.await_termination(300)
    assert kafka.committed(group, topic)[0] < 0
    with Cluster(ClientSettings(kafka.bootstrap_servers)) as cluster:  # one that crossed that
        assert cluster.commit(group, {(topic, 0): before}).found
    kept = Kept()
    assert run_batch(topology(spout, kept), spark, tmp_path / "other").acked == 5
    assert kept.texts == ["1", "2", "3", "4", "5"]
    assert kafka.committed(group, topic)[0] == 5


class Split(BasicBolt):
    """Emits each word of a record: nothing of one that has none."""

    outputs = pa.schema([("word", pa.string())])

    def execute(self, tuple, collector):
        for word in (tuple["value"] or b"").decode().split():
            collector.emit((word,))


class Refuse(BasicBolt):
    """Fails ``bad``."""

    outputs = Split.outputs

    def execute(self, tuple, collector):
        if tuple["word"] == "bad":
            raise ValueError("cannot take bad")
        collector.emit((tuple["word"],))


def test_a_record_is_committed_over_when_all_that_was_emitted_from_it_is_done(
    spark, mock_kafka, tmp_path, running
):
    """Nothing was, of some, and of another one tuple of three fails, behind an exchange."""
    mock_kafka.create_topic("t")
    mock_kafka.produce("t", [b"", b"a b", None, b"c bad d", b"e", b""])
    builder = TopologyBuilder()
    builder.spout("lines", source(mock_kafka, "t"))
    builder.bolt("split", Split()).shuffle("lines")
    builder.bolt("refuse", Refuse()).fields("split", "word")
    builder.sink("refuse", lambda frame, number: None)
    it = builder.build(backoff_s=YEAR_S, max_backoff_s=YEAR_S, parallelism=2)
    on = running(it, spark, tmp_path / "checkpoint")
    until(lambda: on.counts.acked, on)
    found = decode_metadata("t", 0, *mock_kafka.committed("g", "t")).state
    assert (found.committable, found.end) == (3, 6)
    assert found.hole_starts.tolist() == [3]
    assert found.hole_ends.tolist() == [4]
    assert (on.counts.acked, on.counts.waiting) == (5, 1)


def test_who_waits_for_all_that_there_is_waits_for_its_counts(
    spark, mock_kafka, tmp_path, running, monkeypatch
):
    """Also where the micro-batch is marked since."""
    told, let_go, seen, whole = threading.Event(), threading.Event(), [], KafkaSources.done

    def done(*given):
        lag = whole(*given)
        told.set()
        assert let_go.wait(60)
        return lag

    monkeypatch.setattr(KafkaSources, "done", done)
    mock_kafka.create_topic("t")
    mock_kafka.produce("t", [b"a"])
    on = running(topology(source(mock_kafka, "t"), Kept()), spark, tmp_path / "checkpoint")

    def wait():
        on.process_all_available()
        seen.append(on.counts.acked)

    assert told.wait(60)
    waits = threading.Thread(target=wait)
    waits.start()
    waits.join(0.5)  # it cannot go by
    let_go.set()
    waits.join(60)
    assert seen == [1]


def test_two_spouts_do_not_commit_to_one_group_of_the_same_partitions(spark, mock_kafka, tmp_path):
    """It would have what one of them has done."""
    mock_kafka.create_topic("t", 2)
    mock_kafka.create_topic("u")

    def run(name, *spouts):
        builder = TopologyBuilder()
        for i, spout in enumerate(spouts):
            builder.spout(f"lines{i}", spout)
            builder.sink(f"lines{i}", lambda frame, number: None, name=f"sink{i}")
        letters = tmp_path / f"letters-{name}"
        return run_batch(builder.build(), spark, tmp_path / name, dead_letters=letters)

    said = "spouts 'lines0' and 'lines1' read the same partitions and both commit to group 'g'"
    with pytest.raises(ValueError, match=said):
        run("one", source(mock_kafka, ["t", "u"]), source(mock_kafka, "u"))
    other_name = f"{mock_kafka.bootstrap_servers},127.0.0.1:1"  # of the same cluster
    other = KafkaSpout("u", bootstrap_servers=other_name, group_id="g")
    with pytest.raises(ValueError, match=said):
        run("one", source(mock_kafka, "u"), other)
    assert not (tmp_path / "letters-one").exists()  # it is not the place of the next start
    mock_kafka.produce("t", [b"a"])
    mock_kafka.produce("u", [b"a"])
    apart = source(mock_kafka, "t"), source(mock_kafka, "u"), source(mock_kafka, "u", group_id="h")
    assert run("two", *apart).acked == 3


def test_a_topic_that_comes_later_and_fits_the_patterns_of_two_spouts_ends_the_query(
    spark, mock_kafka, tmp_path, running
):
    """It is refused before the group is told of it."""
    for name in ("t", "u"):
        mock_kafka.create_topic(name)
    builder = TopologyBuilder()
    for name in ("t", "u"):
        spout = source(mock_kafka, None, pattern=f"{name}|both", refresh_s=0.05)
        builder.spout(name, spout)
        builder.sink(name, lambda frame, number: None, name=f"of_{name}")
    on = running(builder.build(), spark, tmp_path / "checkpoint")
    mock_kafka.produce("t", [b"a"])
    on.process_all_available()
    mock_kafka.create_topic("both")
    mock_kafka.produce("both", [b"b"])
    assert wait_until(lambda: not on.is_active, "the query ends")
    said = "spouts 't' and 'u' read the same partitions and both commit to group 'g'"
    assert said in str(on.exception)


def test_a_group_that_was_deleted_is_told_anew(spark, kafka_broker, tmp_path, running):
    """The group has moved on since; a query has its own offsets and reads nothing twice."""
    topic, group, kept = kafka_broker.new_topic(), kafka_broker.new_group(), Kept()

    def committed(n):
        return wait_until(lambda: kafka_broker.committed(group, topic)[0] == n, "the commit")

    it = topology(source(kafka_broker, topic, group_id=group), kept)
    on = running(it, spark, tmp_path / "checkpoint")
    for n in range(2):
        kafka_broker.produce(topic, [b"%d" % n])
        on.process_all_available()
        assert committed(n + 1)
        kafka_broker.admin.delete_consumer_groups([group])[group].result(30)
        assert kafka_broker.committed(group, topic)[0] < 0
    kafka_broker.produce(topic, [b"2"])
    on.process_all_available()
    assert committed(3)
    assert kept.texts == ["0", "1", "2"]
    assert on.counts.balanced


@pytest.mark.parametrize(
    ("place", "step"), [("disk", "pruned"), ("bucket", "marked"), ("bucket", "opened")]
)
def test_a_driver_that_was_taken_over_from_moves_its_group_no_more(
    spark, mock_kafka, tmp_path, monkeypatch, request, place, step
):
    """It stands still between its mark and its commit, and another goes on to the end meanwhile."""
    path = tmp_path / "checkpoint"
    if place == "bucket":
        request.getfixturevalue("tasks_reach")
        path = f"{request.getfixturevalue('bucket')}/checkpoint"
    mock_kafka.create_topic("t")
    mock_kafka.produce("t", [b"flaky", b"a", b"b"])
    run = partial(run_batch, topology(source(mock_kafka, "t"), Kept()), spark, path)
    stands_at, counts, done = step if step != "opened" else None, [], KafkaSources.done

    def take_over():
        if not counts:
            counts.append(None)
            if place == "disk":
                (path / "ackcore/lock").unlink()
            counts[0] = Context().run(run)
            assert mock_kafka.committed("g", "t")[0] == 3

    def failpoint(name, number=None):
        if stands_at is None and name == "marked":
            raise FailpointReached(name)
        if name == stands_at:
            take_over()

    def late(*given):
        take_over()
        return done(*given)

    monkeypatch.setattr(batch, "failpoint", failpoint)
    if step == "opened":
        with pytest.raises(FailpointReached):
            run()
        stands_at = "opened"
        monkeypatch.setattr(KafkaSources, "done", late)
    with pytest.raises(CheckpointInUse, match="was taken over from this driver"):
        run()
    assert mock_kafka.committed("g", "t")[0] == 3
    assert (counts[0].acked, counts[0].balanced) == (3, True)


def test_commits_that_are_refused_hold_nothing_up_and_the_next_says_all(
    spark, mock_kafka, tmp_path, running, caplog, monkeypatch
):
    """Neither the query nor what it reads; the lag says that the group was not told."""
    monkeypatch.setattr(group_commits, "_AGAIN_S", 0.2)
    mock_kafka.create_topic("t")
    kept = Kept()
    on = running(topology(source(mock_kafka, "t"), kept), spark, tmp_path / "checkpoint")
    mock_kafka.produce("t", [b"a"])
    on.process_all_available()
    mock_kafka.fail_requests(mock_broker.OFFSET_COMMIT, *[29] * 100)  # TOPIC_AUTHORIZATION_FAILED
    for n in range(2):
        mock_kafka.produce("t", [b"%d" % n])
        on.process_all_available()
        assert on.progress.lag == {"lines": n + 1}
    assert kept.texts == ["0", "1", "a"]
    assert mock_kafka.committed("g", "t")[0] == 1
    assert caplog.text.count("could not be committed to group g") == 1
    mock_kafka.clear_request_errors(mock_broker.OFFSET_COMMIT)
    # Though nothing new comes.
    assert wait_until(lambda: on.progress.lag == {"lines": 0}, "the commit")
    assert mock_kafka.committed("g", "t")[0] == 3
    assert kept.texts == ["0", "1", "a"]


def test_a_commit_that_did_not_arrive_is_due_later_each_time(monkeypatch):
    now, fails = [100.0], [True]
    monkeypatch.setattr(group_commits.time, "monotonic", lambda: now[0])

    def commit(_group, commits):
        failed = dict.fromkeys(commits if fails[0] else (), SimpleNamespace(text="no", code="no"))
        return SimpleNamespace(found={} if fails[0] else commits, failed=failed)

    told = GroupCommitter("lines", "g", 5)
    none = np.empty(0, np.int64)
    done = {("t", 0): OffsetState(3, 3, none, none, none, np.empty(0, np.int32))}
    waits = []
    for _ in range(12):
        told.commit(SimpleNamespace(commit=commit), done, {})
        assert not told.is_due
        began = now[0]
        while not told.is_due:
            now[0] += 0.5
        waits.append(now[0] - began)
    assert waits == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 300]
    fails[0] = False
    told.commit(SimpleNamespace(commit=commit), done, {})
    now[0] += 1000
    assert not told.is_due


def test_a_group_has_as_much_metadata_as_its_broker_takes():
    holes, limit, done = np.cumsum(np.random.default_rng(5).integers(2, 90, 3_000)), 300, {}
    none = np.empty(0, np.int64), np.empty(0, np.int32)
    sizes = []

    def commit(_group, commits):
        too_large = SimpleNamespace(text="no", code="OFFSET_METADATA_TOO_LARGE")
        sizes.extend(len(one.metadata) for one in commits.values())
        failed = {key: too_large for key, one in commits.items() if len(one.metadata) > limit}
        done.update((key, one) for key, one in commits.items() if key not in failed)
        return SimpleNamespace(found=commits.keys() - failed.keys(), failed=failed)

    told = GroupCommitter("lines", "g", 5)
    for end in range(holes[-1] + 2, holes[-1] + 12):
        many = OffsetState(holes[0], end, holes, holes + 1, *none)
        few = OffsetState(end, end, none[0], none[0], *none)
        states = {("t", 0): many, ("t", 1): few}
        tell = told.commit(SimpleNamespace(commit=commit), states, {})
        assert tell == {("t", 0): holes[0], ("t", 1): end}
    assert 270 < len(done["t", 0].metadata) <= limit
    assert not done["t", 0].metadata.isascii()
    assert sum(size > limit for size in sizes) < 12


def test_two_queries_of_one_group_lose_nothing(spark, kafka_broker, tmp_path, running, caplog):
    """Each checkpoint knows what is done of it: the group has what was told it last."""
    topic, group = kafka_broker.new_topic(), kafka_broker.new_group()
    both = [Kept(), Kept()]

    def begun(i):
        it = topology(source(kafka_broker, topic, group_id=group), both[i])
        return running(it, spark, tmp_path / f"checkpoint{i}")

    on = [begun(0), begun(1)]
    sent = []
    for n in range(4):
        sent += [f"{n}", "flaky"]
        kafka_broker.produce(topic, [f"{n}".encode(), b"flaky"])
        on[n % 2].process_all_available()
    for query, kept in zip(on, both, strict=True):
        query.process_all_available()
        assert kept.texts == sorted(sent)
        assert query.counts.balanced
        query.stop()
    assert kafka_broker.committed(group, topic)[0] == 8
    # A third goes on where the group is, and the others are told that it was there.
    kafka_broker.produce(topic, [b"more"])
    third = source(kafka_broker, topic, group_id=group, start="group")
    assert run_batch(topology(third, Kept()), spark, tmp_path / "third").records == 1
    assert kafka_broker.committed(group, topic)[0] == 9
    caplog.clear()
    again = begun(0)
    again.process_all_available()
    assert both[0].texts == sorted([*sent, "more"])
    assert f"another deployment has committed to group {group} of {topic}-0" in caplog.text
    again.stop()
    caplog.clear()
    running(topology(third, Kept()), spark, tmp_path / "new").process_all_available()
    assert "another deployment" not in caplog.text
