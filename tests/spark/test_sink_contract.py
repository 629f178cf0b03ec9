"""The contract of sinks: each row of an ACKED record is written once, whatever the store is.

What a store does its own way is in test_delta_sink.py, test_iceberg_sink.py, test_postgres_sink.py,
test_jdbc_sink.py and test_kafka_sink.py; drivers that are killed are in test_killed_tables.py.
`MongoSink`, the example, runs on an in-memory stand-in for MongoDB (`sink_targets.FakeMongo`).
"""

from __future__ import annotations

import pickle

import pytest
from accepted_rows import latin_file, row_file, written_without_refused
from one_sink import word_count
from pyspark import cloudpickle
from sink_targets import ALL, TRANSACTIONAL

from ackcore.spark import SinkError, TransactionalSink, dead_letters, run_batch
from ackcore.spark.base.atomic import fenced
from ackcore.spark.base.errors import CheckpointForeign, CheckpointInUse
from ackcore.spark.base.failpoints import FailpointReached
from ackcore.spark.sinks import sink

FIRST, SECOND = [("a", 1), ("a", 5), ("c", 3), ("d", 4)], [("a", 5), ("d", 4)]
MERGED = [("a", 5), ("c", 3), ("d", 4)]


@pytest.fixture
def target(request, tmp_path):
    return ALL[request.param](request, tmp_path)


def each(*, keys=False, but=(), of=TRANSACTIONAL):
    """Run a test for each target; with ``keys``, also for merges."""
    names = [name for name in of if name not in but]
    cases = [(name, None) for name in names]
    if keys:
        cases += [(name, "word") for name in names if of[name].has_keys]
        return pytest.mark.parametrize(
            ("target", "keys"), cases, indirect=["target"], ids=lambda one: str(one or "appended")
        )
    return pytest.mark.parametrize("target", names, indirect=True)


@each(keys=True)
def test_a_micro_batch_is_written_once(target, files, keys):
    """By another sink object, too; other sinks and checkpoints have numbers of their own."""
    made = target.sink(keys)
    for _ in range(2):
        assert made.write(target.batch(files)) is None
    made = target.sink(keys)
    made.write(target.batch(files))
    for _ in range(2):
        made.write(target.batch(files[1:], 3))
    assert sorted(target.rows()) == (MERGED if keys else sorted(FIRST + SECOND))
    for about in ({"sink": "other"}, {"deployment": "def"}):
        made.claim(about.get("sink", "count"), about.get("deployment", "abc"), "/cp")
        for _ in range(2):
            made.write(target.batch(files[1:], **about))
    assert len(target.rows()) == (3 if keys else 10)


@each(keys=True)
def test_a_number_that_is_written_with_other_rows_is_refused(target, files, keys):
    """A restored checkpoint; then the advice of the error is followed."""
    made = target.sink(keys)
    made.write(target.batch(files, 4))
    found = sorted(target.rows())
    for number, some, nonacked in ((3, files, (11,)), (4, files[1:], (11,)), (4, files, (10, 11))):
        says = (
            f"has micro-batch 4 of sink 'count', and the checkpoint /cp is at micro-batch {number}"
        )
        if number == 4:
            says += " with other rows: the checkpoint is older"
        with pytest.raises(CheckpointForeign, match=says) as told:
            made.write(target.batch(some, number, nonacked=nonacked))
        assert repr(made) in str(told.value)
        assert "hunter2" not in str(told.value)
        assert sorted(target.rows()) == found
    target.forget(4, accept=True)
    made.write(target.batch(files[1:], 4))
    assert sorted(target.rows()) == found
    target.forget(4, accept=False)
    for _ in range(2):
        made.write(target.batch(files[1:], 4))
    assert sorted(target.rows()) == (MERGED if keys else sorted(FIRST + SECOND))


@each(but=["iceberg"])
def test_a_store_that_lost_a_commit_is_told_once(target, files):
    """A failover to a replica that lags loses commits. The query continues after a new start."""
    made = target.sink()
    made.write(target.batch(files, 4))
    target.forget(4, accept=False)
    found = sorted(target.rows())
    says = "has micro-batch 3 as the last one of sink 'count', though .* committed micro-batch 4"
    with pytest.raises(CheckpointForeign, match=says):
        made.write(target.batch(files[1:], 5))
    assert sorted(target.rows()) == found
    made.write(target.batch(files[1:], 5))
    assert sorted(target.rows()) == sorted(FIRST + SECOND)


@each(of=ALL)
def test_a_driver_that_was_taken_over_writes_nothing(target, files):
    made = target.sink()

    def fence():
        raise CheckpointInUse("was taken over")

    with fenced(fence), pytest.raises(CheckpointInUse):
        made.write(target.batch(files))
    assert target.rows() == []
    made.write(target.batch(files))
    assert sorted(target.rows()) == FIRST


#: Derby's second driver would wait for the lock of the first.
@each(keys=True, but=["derby", "mongo"])
def test_a_driver_that_stood_still_commits_nothing_that_another_has(
    target, files, monkeypatch, keys
):
    """Between its look at the number and its commit another driver writes the micro-batch."""
    first, second = (target.sink(keys, name="zähle") for _ in range(2))
    batch = target.batch(files, sink="zähle")
    reached = []

    def take_over(*point):
        reached.append(point)
        if len(reached) == 1:
            second.write(batch)

    monkeypatch.setattr(sink, "failpoint", take_over)
    with pytest.raises(Exception, match=target.conflict[1]) as told:
        first.write(batch)
    assert told.type.__name__ == target.conflict[0]
    assert reached == 2 * [("in-transaction", 0)]
    expected = MERGED if keys else FIRST
    assert sorted(target.rows()) == expected
    first.write(batch)
    assert sorted(target.rows()) == expected


@each(of={"mongo": TRANSACTIONAL["mongo"]})
def test_of_two_transactions_of_the_example_one_commits(target, files, monkeypatch):
    """Whichever writes the number first."""
    first, second = target.sink(), target.sink()
    fences = []

    def take_over():
        fences.append(None)
        if len(fences) == 1:
            second.write(target.batch(files))

    with fenced(take_over), pytest.raises(RuntimeError, match="WriteConflict"):
        first.write(target.batch(files))
    assert sorted(target.rows()) == FIRST

    def is_open(*point):
        with pytest.raises(RuntimeError, match="WriteConflict"):
            second.write(target.batch(files, 1))

    with monkeypatch.context() as patch:
        patch.setattr(sink, "failpoint", is_open)
        first.write(target.batch(files, 1))
    for one in (first, second):
        one.write(target.batch(files, 1))
    assert sorted(target.rows()) == sorted(2 * FIRST)


@each(but=["derby"])  # see test_jdbc_sink.py
def test_a_table_that_went_away_fails_the_sink_until_it_is_back(target, files):
    made = target.sink()
    made.write(target.batch(files[1:]))
    with target.hide(), pytest.raises(target.away):
        made.write(target.batch(files, 1))
    for _ in range(2):
        made.write(target.batch(files, 1))
    assert sorted(target.rows()) == sorted(FIRST + SECOND)


@each(keys=True, but=["mongo"])
def test_a_row_whose_text_is_not_utf8_is_refused_by_itself(target, tmp_path, keys):
    made = target.sink(keys)
    said = written_without_refused(made, target.batch([latin_file(tmp_path)]))
    assert list(said) == [(0, 2)]
    assert sorted(target.rows()) == [("a", 1), ("d", 4)]


@each(keys=True, but=["delta", "iceberg", "mongo"])
def test_rows_that_violate_a_constraint_are_refused_by_themselves(target, tmp_path, keys):
    first = row_file(tmp_path, [("y", 1, 11), ("z", 1, 12)])
    rows = [("a", 1, 10), ("b", target.too_large, 10), ("c", 3, 10), ("d", 200, 10)]
    made = target.sink(keys)
    said = written_without_refused(made, target.batch([first, row_file(tmp_path, rows, 1)]))
    assert list(said) == [(1, 1), (1, 3)]
    assert sorted(target.rows()) == [("a", 1), ("c", 3), ("z", 1)]


@each(of=ALL)
def test_a_sink_can_be_pickled_after_it_has_written(target, files):
    """Keep connections out of the pickled sink."""
    made = target.sink()
    made.write(target.batch(files))
    copy = pickle.loads(cloudpickle.dumps(made))
    copy.write(target.batch(files))
    copy.release("count", "abc")
    assert sorted(target.rows()) == FIRST


#: The steps at a sink; test_batch.py has those of the engine.
STEPS = ["in-transaction", "in-sink", "acted"]


@each(of=ALL, but=["mongo"])
def test_wherever_the_driver_fails_each_row_is_written_once(spark, target, checkpoint, failing_at):
    """In a topology, one record of which fails. Refused rows: test_refusing_sinks.py."""
    target.make(None)
    transactional = isinstance(target.writer(), TransactionalSink)
    for step in STEPS if transactional else STEPS[1:]:
        failing_at(step)
        with pytest.raises((FailpointReached, SinkError), match=f"failpoint {step}"):
            run_batch(word_count(spark, target.writer()), spark, checkpoint)
    failing_at()
    run_batch(word_count(spark, target.writer()), spark, checkpoint, max_dead_ratio=None)
    assert sorted(row[0] for row in target.rows()) == ["a", "a", "b"]
    assert dead_letters(checkpoint, spark).count() == 1
