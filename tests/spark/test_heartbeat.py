"""The heartbeat: micro-batches when something is due, though no data comes."""

from __future__ import annotations

import itertools
import threading
import time
from types import SimpleNamespace

import pytest
from checkpoints import Killed, Killer

from ackcore.spark import heartbeat, loop
from ackcore.spark.base.paths import numbered
from ackcore.spark.heartbeat import (
    Beats,
    Pacemaker,
    find_log,
    forget_beats,
    trim_log,
    with_heartbeat,
)
from ackcore.spark.loop import Pacing
from ackcore.spark.planned.planned_source import SourceError
from ackcore.spark.stream import Stream


def until(found, seconds=300):
    """Wait for something that happens in another thread."""
    end = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


@pytest.fixture
def beats(tmp_path):
    return Beats(tmp_path / "beats")


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_a_beat_is_an_empty_file_that_is_newer_than_any_before(beats):
    """Whatever the clock says: Spark passes over a file that is much older than the newest."""
    assert not beats.clear()
    for number in (1, 2):
        beats.advance()
        assert names(beats.directory) == [str(number)]
        stat = (beats.directory / str(number)).stat()
        assert (stat.st_size, stat.st_mtime) == (0, number)
        assert beats.clear()
    assert names(beats.directory) == []
    beats.close()
    beats.close()
    assert not beats.directory.exists()


def write_log(checkpoint, *batches, version="v1"):
    """Spark's offset log: for each micro-batch, the lines of its sources."""
    (checkpoint / "offsets").mkdir(parents=True)
    for number, lines in enumerate(batches):
        text = "\n".join([version, '{"batchWatermarkMs":0}', *lines])
        (checkpoint / f"offsets/{number}").write_text(text)
        (checkpoint / f"offsets/.{number}.crc").write_text("of the former bytes")


def write_source(checkpoint, number, path, name="0"):
    log = checkpoint / f"sources/{number}"
    log.mkdir(parents=True)
    (log / name).write_text(f'v1\n{{"path":"file://{path}","timestamp":1000,"batchId":0}}')


def read_log(checkpoint):
    return [
        (checkpoint / f"offsets/{number}").read_text().split("\n")[2:]
        for number in numbered(checkpoint / "offsets")
    ]


@pytest.mark.parametrize("beat", ['{"logOffset":7}', "-"])
def test_beats_of_former_runs_are_forgotten(tmp_path, beat):
    write_log(tmp_path, ["a0", "b0", "c0"], ["a1", "b1", beat], ["a1", "b2", beat])
    write_source(tmp_path, 0, "/in/a")
    write_source(tmp_path, 1, "/in/b")
    write_source(tmp_path, 2, "/tmp/ackcore-beats-0f/7")
    for _ in range(2):
        forget_beats(tmp_path)
        # Spark looks at no older one.
        assert read_log(tmp_path) == [["a0", "b0", "c0"], ["a1", "b1", "-"], ["a1", "b2", "-"]]
        assert names(tmp_path / "sources") == ["0", "1"]
    kept = (
        [".0.crc", "0", "1", "2"] if beat != "-" else [".0.crc", ".1.crc", ".2.crc", "0", "1", "2"]
    )
    assert names(tmp_path / "offsets") == kept


def test_forgetting_beats_may_be_cut_short_anywhere(tmp_path):
    killer = Killer()
    for left in itertools.count():
        checkpoint = tmp_path / str(left)
        write_log(checkpoint, ["a0", '{"logOffset":0}'], ["a1", '{"logOffset":1}'])
        write_source(checkpoint, 1, "/tmp/ackcore-beats-0f/7")
        killer.arm(left)
        try:
            forget_beats(checkpoint)
            done = True
        except Killed:
            done = False
        killer.disarm()
        # Whatever Spark finds, it can read: a checksum is of the bytes beside it, or not there.
        for number, lines in enumerate(read_log(checkpoint)):
            assert lines in ([f"a{number}", "-"], [f"a{number}", f'{{"logOffset":{number}}}'])
            if lines[1] == "-":
                assert not (checkpoint / f"offsets/.{number}.crc").exists()
        forget_beats(checkpoint)
        assert read_log(checkpoint) == [["a0", "-"], ["a1", "-"]]
        assert not list(checkpoint.glob("sources/1/*"))  # at most a directory with nothing in it
        if done:
            break
    assert left >= 8


def test_the_offset_log_of_format_2(tmp_path):
    write_log(tmp_path, ["0:a", "1:b"], ["0:a"], ['10:{"a":1}', "1:b"], version="v2")
    forget_beats(tmp_path)  # Spark has seen no beat
    write_source(tmp_path, 1, "/tmp/ackcore-beats-0f/7", "9.compact")
    forget_beats(tmp_path)
    assert read_log(tmp_path) == [["0:a", "1:b"], ["0:a"], ['10:{"a":1}']]
    forget_beats(tmp_path / "none")
    (tmp_path / "offsets/2").write_text("")  # torn: it is for Spark to say so
    forget_beats(tmp_path)


def test_sparks_log_of_beats_is_cut_to_its_last_compact_file(tmp_path):
    for name in ("9.compact", "19.compact"):
        (tmp_path / name).write_text("v1\n" + "{}\n" * 9 + "{last}")
    for name in ("8", "18", "20", "21"):
        (tmp_path / name).write_text("v1\n{}")
    for name in names(tmp_path):
        (tmp_path / f".{name}.crc").write_text("")
    trim_log(tmp_path / "none")
    for _ in range(2):
        trim_log(tmp_path)
        assert names(tmp_path) == [".20.crc", ".21.crc", "19.compact", "20", "21"]
        assert (tmp_path / "19.compact").read_text() == "v1\n{last}"


@pytest.fixture
def beaten():
    """The beats of pacemakers."""
    return []


@pytest.fixture
def pacemaker(beaten):
    """``pacemaker(clock, called, look)`` makes those of a query, which are stopped in the end."""
    made = []

    def make(clock, called=lambda: False, look=None):
        some = [Pacemaker(lambda: beaten.append(1), clock, 0.005, called, int)]
        if look is not None:
            rows = SimpleNamespace(has_new=look)
            some.append(Pacemaker(lambda: beaten.append(1), clock, 0.005, rows=rows))
        made.extend(some)
        for one in some:
            one.start()
        return SimpleNamespace(schedule=lambda due_ms: [one.schedule(due_ms) for one in some])

    yield make
    for one in made:
        one.stop()


def test_the_pacemaker_beats_once_when_something_is_due(beaten, pacemaker):
    now = [1000]
    maker = pacemaker(lambda: now[0])
    maker.schedule(1500)
    time.sleep(0.05)
    assert not beaten
    now[0] = 1500
    until(lambda: beaten)
    time.sleep(0.05)
    assert len(beaten) == 1
    maker.schedule(None)
    maker.schedule(1400)
    until(lambda: len(beaten) == 2)


def test_a_look_of_a_pacemaker_may_end_the_wait_for_all_data():
    """It changes what ``reaching_ends`` returns, and notifies nobody."""
    asked = []

    def reached():
        asked.append(1)
        return len(asked) > 1

    stream = SimpleNamespace(
        _refuse_own_thread=lambda call: None,
        _reaching_ends=lambda: reached,
        _read_all_available=lambda: None,
        _is_waiting=lambda: False,
        _changed=threading.Condition(),
        _poll_s=0.005,
        ended=threading.Event(),
    )
    waiting = threading.Thread(target=Stream.process_all_available, args=(stream,), daemon=True)
    waiting.start()
    waiting.join(60)
    assert not waiting.is_alive()


def test_the_pacemaker_answers_who_calls_once_until_the_next_micro_batch(
    beaten, pacemaker, monkeypatch
):
    monkeypatch.setattr(Pacing, "CALLED_S", 0.01)
    calls = []

    def called():
        calls.append(1)
        if len(calls) == 1:
            raise OSError("the directory is being made")
        return len(calls) > 3

    maker = pacemaker(lambda: 0, called)
    until(lambda: beaten)
    assert len(calls) == 4
    time.sleep(0.05)
    assert len(beaten) == 1
    maker.schedule(None)
    until(lambda: len(beaten) == 2)


def test_a_beat_that_cannot_be_written_is_tried_again(beats, caplog):
    tries = []

    def advance():
        tries.append(time.monotonic())
        if len(tries) <= 4:
            raise OSError("no space left on device")
        beats.advance()

    maker = Pacemaker(advance, lambda: 0, 0.03)
    maker.schedule(0)
    maker.start()
    until(beats.clear)
    maker.stop()
    told = [line for line in caplog.messages if "micro-batch for retries and planned rows" in line]
    assert len(told) == 1
    assert tries[4] - tries[0] >= 4 * 0.025


def test_a_clock_that_raises_does_not_silence_the_heartbeat(beaten, pacemaker):
    """The micro-batch that follows meets the error, and tells it; a thread that ends tells none."""
    maker = pacemaker(lambda: 1 // 0)
    maker.schedule(10**15)
    until(lambda: beaten)


def test_new_rows_of_planned_spouts_cause_one_beat_until_a_micro_batch_has_ended(beaten, pacemaker):
    looks, new = threading.Semaphore(0), threading.Event()

    def look():
        looks.release()
        return new.is_set()

    maker = pacemaker(lambda: 0, look=look)
    assert looks.acquire(timeout=60)
    assert looks.acquire(timeout=60)
    assert not beaten
    new.set()
    until(lambda: beaten)
    time.sleep(0.05)
    assert len(beaten) == 1
    maker.schedule(None)
    until(lambda: len(beaten) == 2)


def test_a_source_that_does_not_answer_is_polled_again(beaten, pacemaker, caplog):
    answers = iter([ConnectionError("down"), ConnectionError("down"), True])

    def look():
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    pacemaker(lambda: 0, look=look)
    until(lambda: beaten)
    told = "a source did not answer whether it has new rows, and is polled again: down"
    assert caplog.text.count(told) == 1


@pytest.mark.parametrize("reason", ["retry", "request"])
def test_a_source_whose_answer_takes_long_delays_neither_retries_nor_requests(
    beaten, pacemaker, monkeypatch, reason
):
    monkeypatch.setattr(Pacing, "CALLED_S", 0.01)
    looks, answered = threading.Event(), threading.Event()

    def look():
        looks.set()
        answered.wait()
        return False

    maker = pacemaker(lambda: 0, lambda: reason == "request" and looks.is_set(), look)
    try:
        assert looks.wait(60)
        if reason == "retry":
            maker.schedule(0)
        until(lambda: beaten, 30)
    finally:
        answered.set()


def test_an_error_that_ends_the_query_is_left_to_the_micro_batch(beaten, pacemaker):
    def look():
        raise SourceError("the table is another one")

    pacemaker(lambda: 0, look=look)
    until(lambda: beaten)


def test_a_micro_batch_ends_the_pause_between_two_looks(pacemaker, monkeypatch):
    for name in ("POLL_S", "LONGEST_S"):
        monkeypatch.setattr(loop, name, 3600.0)
    looks = threading.Semaphore(0)
    maker = pacemaker(lambda: 0, look=looks.release)
    for _ in range(2):
        assert looks.acquire(timeout=60)
        maker.schedule(None)


def test_a_beat_that_was_lost_is_written_again(beaten, pacemaker, monkeypatch):
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.01)
    pacemaker(lambda: 0, look=lambda: True)
    until(lambda: len(beaten) > 2)


def test_the_directory_of_beats_may_be_swept_away(beats):
    beats.close()
    beats.advance()
    assert beats.clear()


def test_one_that_was_never_started_can_be_stopped():
    Pacemaker(int, lambda: 0, 0.2).stop()
    assert "ackcore-heartbeat" not in [thread.name for thread in threading.enumerate()]


class Rows:
    """The micro-batches that a `foreachBatch` saw: numbers and rows; and the heartbeat's plan."""

    def __init__(self, spark, tmp_path, name="spark"):
        (tmp_path / "in").mkdir(exist_ok=True)
        self.checkpoint = tmp_path / name
        self.beats = Beats.beside(spark)
        self.source = spark.readStream.schema("n int, s string").json(str(tmp_path / "in"))
        self.frame = with_heartbeat(spark, self.source, self.beats.directory)
        self.seen = []
        self.partitions = []
        self.writer = self.frame.writeStream.foreachBatch(self.each)
        self.writer.option("checkpointLocation", f"file://{self.checkpoint}")

    def each(self, rows, number):
        if self.beats.clear():
            trim_log(find_log(self.checkpoint))
        self.seen.append((number, [tuple(row) for row in rows.collect()]))
        self.partitions.append(rows.rdd.getNumPartitions())


def test_a_micro_batch_for_each_beat_and_none_between(spark, tmp_path):
    rows = Rows(spark, tmp_path, "a [b] {c}*?\\ 50% ü#1 a%20b")
    frame, source, seen = rows.frame, rows.source, rows.seen
    assert frame.columns == ["n", "s"]
    assert [field.dataType for field in frame.schema] == [field.dataType for field in source.schema]
    query = rows.writer.start()
    try:
        query.processAllAvailable()
        assert seen == []
        rows.beats.advance()
        until(lambda: len(seen) == 1)
        query.processAllAvailable()  # else its commit may be to come
        assert len(seen) == 1
        (tmp_path / ".a.json").write_text('{"n": 1, "s": "x"}\n')
        (tmp_path / ".a.json").rename(tmp_path / "in" / "a.json")  # never seen half written
        until(lambda: len(seen) == 2)
        query.processAllAvailable()
    finally:
        query.stop()
    assert seen == [(0, []), (1, [(1, "x")])]
    until(lambda: len(rows.partitions) == 2)
    assert rows.partitions == [0, 1]  # the heartbeat has none
    # availableNow: one for a beat that is new, none where nothing is.
    forget_beats(rows.checkpoint)
    rows.beats.advance()
    for _ in range(2):
        rows.writer.trigger(availableNow=True).start().awaitTermination()
    assert seen[2:] == [(2, [])]
    rows.beats.close()


def test_a_micro_batch_that_was_not_committed_is_repeated_without_its_beat(spark, tmp_path):
    rows = Rows(spark, tmp_path)
    for number in range(2):
        (tmp_path / f"in/{number}.json").write_text(f'{{"n": {number}, "s": "x"}}\n')
        rows.beats.advance()
        rows.writer.trigger(availableNow=True).start().awaitTermination()
        offsets = rows.checkpoint / f"offsets/{number}"
        assert offsets.read_text().split("\n")[-1] == '{"logOffset":0}'
        for name in (f"{number}", f".{number}.crc"):
            (rows.checkpoint / "commits" / name).unlink()
        forget_beats(rows.checkpoint)
        rows.writer.trigger(availableNow=True).start().awaitTermination()
    assert rows.seen == [(0, [(0, "x")])] * 2 + [(1, [(1, "x")])] * 2
    rows.beats.close()


def test_many_beats_leave_little_behind(spark, tmp_path, conf):
    conf("spark.sql.streaming.fileSource.log.compactInterval", "3")
    rows = Rows(spark, tmp_path)
    query = rows.writer.trigger(processingTime="0 seconds").start()
    log, sizes = rows.checkpoint / "sources/1", []
    try:
        for number in range(20):
            rows.beats.advance()
            until(lambda n=number: len(rows.partitions) > n)
            sizes.append(sum(path.stat().st_size for path in log.iterdir()))
    finally:
        query.stop()
    assert names(rows.beats.directory) == []
    assert len(names(log)) <= 9
    assert max(sizes) < 2_000
    rows.beats.close()
