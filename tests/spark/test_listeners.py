"""Listeners are called, and nothing depends on them."""

from __future__ import annotations

import asyncio
import signal
import sys

import pyarrow as pa
import pytest
from streams import LINE, ignored, word_count

from ackcore import testing
from ackcore.spark import QueryListener, TooManyDead, run_batch, spark_stream, start
from ackcore.spark.base.errors import CheckpointCorrupt
from ackcore.spark.base.schemas import MESSAGE_ID, REASON, TRACKING
from ackcore.spark.checkpoint.dead_records import Dead
from ackcore.spark.engine.progress import Account, Counts, Progress
from ackcore.spark.listeners import Listeners
from ackcore.topology.tuples import Reason

LINES = pa.schema([("line", pa.string())])


class Told(QueryListener):
    """Notes what it is told."""

    def __init__(self, raises=None):
        self.progress, self.dead, self.ends, self.raises = [], [], [], raises
        self.begun = []

    def on_batch_start(self, batch_id):
        self.begun.append((batch_id, len(self.progress)))

    def on_progress(self, progress, counts):
        self.progress.append((progress.batch_id, progress.acked, counts.acked))
        self._raise()

    def on_dead(self, batch_id, letters):
        for spout, table in letters.items():
            for row in table.to_pylist():
                self.dead.append((batch_id, spout, row["payload"]["line"], row["error_type"]))
        self._raise()

    def on_end(self, error, counts):
        self.ends.append((type(error).__name__, counts.acked, counts.dead))
        self._raise()

    def _raise(self):
        if self.raises:
            raise self.raises("a listener of no use")


class DeadOnly:
    """Not derived from anything."""

    def __init__(self):
        self.batches = []

    def on_dead(self, batch_id, letters):
        self.batches.append(batch_id)


def rows(*lines):
    return {"lines": [(line,) for line in lines]}


def topology(**settings):
    return word_count(testing.Source(LINES), ignored, **settings)


def test_each_micro_batch_the_dead_and_the_end_are_told():
    told, dead = Told(), DeadOnly()
    ran = testing.run(topology(), rows("a", "flaky", "bad", "no"), listeners=[told, dead])
    assert told.progress == [
        (one.batch_id, one.acked, counts)
        for one, counts in zip(
            ran.progress,
            [sum(p.acked for p in ran.progress[: n + 1]) for n in range(9)],
            strict=False,
        )
    ]
    assert told.dead == [
        (one.batch_id, one.spout, one.payload["line"], one.error_type) for one in ran.dead
    ]
    assert [line for _, _, line, _ in told.dead] == ["no", "bad"]
    assert dead.batches == sorted({one.batch_id for one in ran.dead})
    assert told.ends == [("NoneType", 2, 2)]


@pytest.mark.parametrize("error", [RuntimeError, SystemExit, asyncio.CancelledError])
def test_what_a_listener_raises_is_logged_and_changes_nothing(caplog, error):
    given = rows("a", "flaky", "no")
    raising, after = Told(raises=error), Told()
    ran = testing.run(topology(), given, listeners=[raising, after])
    assert ran == testing.run(topology(), given)
    assert (after.progress, after.dead, after.ends) == (
        raising.progress,
        raising.dead,
        raising.ends,
    )
    said = [
        record for record in caplog.records if "raised; the query continues" in record.getMessage()
    ]
    assert len(said) == len(raising.progress) + len(ran.dead) + 1
    assert "a listener of no use" in caplog.text


def test_a_class_in_place_of_a_listener_is_refused():
    with pytest.raises(TypeError, match=r"is the class Told itself; pass Told\(\.\.\.\)"):
        Listeners([Told])


def test_a_listener_that_nobody_awaits_is_named(caplog):
    class Lazy(QueryListener):
        async def on_dead(self, number, letters):
            raise AssertionError("nobody awaits this")

    testing.run(topology(), rows("no"), listeners=[Lazy()])
    assert "on_dead returned a coroutine, which has not run" in caplog.text


def test_what_a_signal_raises_while_a_listener_is_told_ends_the_run():
    class Signalled:
        def on_progress(self, progress, counts):
            try:
                signal.raise_signal(signal.SIGTERM)
            except SystemExit as error:
                raise RuntimeError("cleaned up") from error

    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(15))
    try:
        with pytest.raises(SystemExit, match="15"):
            testing.run(topology(), rows("a"), listeners=[Signalled()])
    finally:
        signal.signal(signal.SIGTERM, before)


def dead_rows(*ids):
    """Records that died, as a micro-batch has them."""
    one = dict.fromkeys(TRACKING.names, 0)
    reason = Reason("split", "Reject", "no")._asdict()
    found = [{**one, MESSAGE_ID: str(n), REASON: reason, "line": "x"} for n in ids]
    return pa.Table.from_pylist(found, pa.schema([*TRACKING, *LINES]))


class _Decision:
    def __init__(self, dead):
        self.all_dead = dead


def test_letters_are_read_only_for_who_is_told_of_them(monkeypatch, caplog):
    def read(*about, **rest):
        raise AssertionError("letters were read")

    monkeypatch.setattr(Dead, "pieces", read)
    monkeypatch.setattr(Dead, "__getitem__", read)

    class OnProgress(QueryListener):
        def on_progress(self, progress, counts):
            seen.append(progress.batch_id)

    seen = []
    decision = _Decision(Dead({"lines": [dead_rows(1)]}))
    Listeners([OnProgress()]).done(Progress(7), Counts(), decision)
    assert seen == [7]
    assert not caplog.records


def test_many_letters_are_told_some_at_a_time(monkeypatch, caplog):
    monkeypatch.setattr("ackcore.spark.listeners._TOLD_BYTES", 2 * dead_rows(1).nbytes)
    dead = Dead(
        {
            "lines": [dead_rows(1), dead_rows(2), dead_rows(3, 4), dead_rows(5, 6, 7)],
            "more": [dead_rows(8)],
        }
    )
    told, errors = [], []

    class OnDead:
        def on_dead(self, batch_id, letters):
            told.append(
                {spout: table["message_id"].to_pylist() for spout, table in letters.items()}
            )
            assert batch_id == 7
            errors.append(letters["lines"]["error_type"][0].as_py() if "lines" in letters else None)

    Listeners([OnDead()]).done(Progress(7), Counts(), _Decision(dead))
    assert told == [
        {"lines": ["1", "2"]},
        {"lines": ["3", "4"]},
        {"lines": ["5", "6", "7"]},
        {"more": ["8"]},
    ]
    assert errors[0] == "Reject"
    assert not caplog.records


def test_letters_that_cannot_be_read_end_nothing(monkeypatch, caplog):
    def read(*about, **rest):
        raise CheckpointCorrupt("dead-lines is missing")

    monkeypatch.setattr(Dead, "pieces", read)
    decision = _Decision(Dead({"lines": [dead_rows(1)]}))
    Listeners([Told()]).done(Progress(7), Counts(), decision)
    assert "the dead letters of micro-batch 7 could not be read" in caplog.text


def test_the_start_is_told_with_an_account_of_each_spout():
    starts = []

    class OnStart:
        def on_start(self, counts):
            starts.append((counts.batches, dict(counts.spouts)))

    listeners = Listeners([OnStart()])
    listeners.started(topology(), Counts())
    assert starts == [(0, {"lines": Account()})]


@pytest.mark.parametrize("listeners", [[Told], ["on_dead"], [None], Told(), "on_dead"])
def test_what_is_no_listener_is_refused(listeners):
    with pytest.raises(TypeError, match=r"listeners (must be|is the class Told itself)"):
        testing.run(topology(), rows("a"), listeners=listeners)


def test_a_stream_and_a_batch_tell_alike(spark, tmp_path, folder, running):
    """A listener also learns of a batch that ends with TooManyDead."""
    of_batch, of_stream = Told(), Told()
    lines = spark.createDataFrame([("no",)], LINE)
    with pytest.raises(TooManyDead, match="all of 1 record died"):
        run_batch(word_count(lines, ignored), spark, tmp_path / "batch", listeners=[of_batch])
    folder.add("a", "no")
    query = running(
        word_count(folder.stream, ignored),
        spark,
        tmp_path / "stream",
        trigger={"availableNow": True},
        listeners=[Told(raises=SystemExit), of_stream],  # one that raises ends nothing
    )
    query.await_termination()
    assert of_batch.dead == [(0, "lines", "no", "Reject")]
    assert of_batch.ends == [("TooManyDead", 0, 1)]
    assert [line for _, _, line, _ in of_stream.dead] == ["no"]
    assert of_stream.progress[-1][2] == 1
    assert of_stream.ends == [("NoneType", 1, 1)]
    # Each micro-batch of the stream began after the one before was done.
    assert of_stream.begun == [(each[0], n) for n, each in enumerate(of_stream.progress)]
    assert of_batch.begun == []


def test_a_query_that_spark_does_not_start_has_an_end(spark, tmp_path, folder, monkeypatch):
    """Else its metrics show a query that runs."""
    told = []

    class Ends:
        def on_start(self, counts):
            told.append("start")

        def on_end(self, error, counts):
            told.append(type(error).__name__)

    def refuse(directory):
        raise PermissionError(directory)

    monkeypatch.setattr(spark_stream, "forget_beats", refuse)
    topology = word_count(folder.stream, ignored)
    with pytest.raises(PermissionError, match="/spark"):
        start(topology, spark, tmp_path / "checkpoint", listeners=[Ends()])
    assert told == ["start", "PermissionError"]
