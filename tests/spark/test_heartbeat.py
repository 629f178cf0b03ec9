"""The heartbeat: micro-batches when something is due, though no data comes."""

from __future__ import annotations

import json
import threading
import time

import pytest

from ackcore.spark.heartbeat import (
    FORMAT,
    Heartbeat,
    HeartbeatReader,
    Pacemaker,
    SteadyClock,
    advance_beat,
    read_beat,
    wall_clock_ms,
    with_heartbeat,
)


def until(found, seconds=30):
    """Wait for something that happens in another thread."""
    end = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "beat")


def test_a_beat_is_more_than_any_before(path):
    assert read_beat(path) == 0
    first = advance_beat(path)
    assert first >= wall_clock_ms() - 60_000  # more than what was forgotten with the file
    with open(path, "w") as file:
        file.write(str(2 * first))
    assert advance_beat(path) == read_beat(path) == 2 * first + 1


@pytest.mark.parametrize("torn", ["", "17\x00\x00"])
def test_a_torn_beat_is_none(path, torn):
    with open(path, "w") as file:
        file.write(torn)
    assert read_beat(path) == 0


def test_the_reader_follows_the_file_and_never_goes_back(path):
    reader = Heartbeat({"path": path}).streamReader(None)
    assert Heartbeat.name() == FORMAT
    start = reader.initialOffset()
    assert reader.latestOffset(start, None) == start
    beat = advance_beat(path)
    assert reader.latestOffset(start, None) == {"beat": beat}
    assert reader.latestOffset({"beat": beat + 5}, None) == {"beat": beat + 5}
    assert reader.partitions(start, {"beat": beat}) == []
    assert list(reader.read(None)) == []
    json.dumps(start)


def test_available_now_is_what_there_was(path):
    reader = HeartbeatReader(path)
    beat = advance_beat(path)
    reader.prepareForTriggerAvailableNow()
    advance_beat(path)
    assert reader.latestOffset({"beat": 0}, None) == {"beat": beat}


def test_a_clock_that_goes_back_goes_on_here():
    times = iter([100, 160, 40, 50, 700])
    clock = SteadyClock(lambda: next(times), at_least=120)
    assert [clock() for _ in range(5)] == [120, 180, 180, 190, 840]


@pytest.fixture
def pacemaker(path):
    """``pacemaker(clock, called)`` makes one that is stopped in the end."""
    made = []

    def make(clock, called=None):
        made.append(Pacemaker(path, clock, poll_ms=5, called=called))
        made[-1].start()
        return made[-1]

    yield make
    for one in made:
        one.stop()


def test_the_pacemaker_beats_once_when_something_is_due(path, pacemaker):
    now = [1000]
    maker = pacemaker(lambda: now[0])
    maker.schedule(1500)
    time.sleep(0.05)
    assert read_beat(path) == 0
    now[0] = 1500
    until(lambda: read_beat(path))
    beat = read_beat(path)
    time.sleep(0.05)
    assert read_beat(path) == beat
    maker.schedule(None)
    maker.schedule(1400)
    until(lambda: read_beat(path) > beat)


def test_the_pacemaker_answers_who_calls_once_until_the_next_micro_batch(
    path, pacemaker, monkeypatch
):
    monkeypatch.setattr(Pacemaker, "CALLED_S", 0.01)
    calls = []

    def called():
        calls.append(1)
        if len(calls) == 1:
            raise OSError("the directory is being made")
        return len(calls) > 3

    maker = pacemaker(lambda: 0, called)
    until(lambda: read_beat(path))
    assert len(calls) == 4
    beat = read_beat(path)
    time.sleep(0.05)
    assert read_beat(path) == beat
    maker.schedule(None)
    until(lambda: read_beat(path) > beat)


def test_a_beat_that_cannot_be_written_is_tried_again(tmp_path, caplog):
    path = tmp_path / "later" / "beat"
    maker = Pacemaker(str(path), lambda: 0, poll_ms=5)
    maker.schedule(0)
    maker.start()
    until(lambda: "the heartbeat cannot be written" in caplog.text)
    path.parent.mkdir()
    until(lambda: read_beat(str(path)))
    maker.stop()


def test_one_that_was_never_started_can_be_stopped(path):
    Pacemaker(path, lambda: 0).stop()
    assert "ackcore-heartbeat" not in [thread.name for thread in threading.enumerate()]


def test_a_micro_batch_for_each_beat_and_none_between(spark, tmp_path, path):
    (tmp_path / "in").mkdir()
    source = spark.readStream.schema("n int, s string").json(str(tmp_path / "in"))
    frame = with_heartbeat(spark, source, path)
    assert frame.columns == ["n", "s"]
    assert [field.dataType for field in frame.schema] == [field.dataType for field in source.schema]
    seen = []
    writer = frame.writeStream.foreachBatch(
        lambda rows, number: seen.append((number, [tuple(row) for row in rows.collect()]))
    ).option("checkpointLocation", str(tmp_path / "spark"))
    query = writer.start()
    try:
        time.sleep(0.5)
        assert seen == []
        advance_beat(path)
        until(lambda: len(seen) == 1)
        (tmp_path / "in" / "a.json").write_text('{"n": 1, "s": "x"}\n')
        until(lambda: len(seen) == 2)
        time.sleep(0.5)
    finally:
        query.stop()
    assert seen == [(0, []), (1, [(1, "x")])]
    # availableNow: one for a beat that is new, none where nothing is.
    advance_beat(path)
    for _ in range(2):
        writer.trigger(availableNow=True).start().awaitTermination()
    assert seen[2:] == [(2, [])]
