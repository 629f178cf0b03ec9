"""The times at which a loop begins its micro-batches, with a simulated clock and source."""

from __future__ import annotations

import re

import pytest

from ackcore.spark.checks import interval_s
from ackcore.spark.engine.insist import RunFailed
from ackcore.spark.engine.setup import PlannedRows
from ackcore.spark.loop import Pacing, pause_s
from ackcore.spark.planned.planned_source import SourceError


class World(PlannedRows):
    """A clock, a source and the work of a loop; ``at`` says what happens at a second."""

    def __init__(self, at=(), **settings):
        self.now = 0.0
        self.at = sorted(at)
        self.new = self.unfinished = False
        self.room = True
        self.due = None
        self.calls = 0
        self.error = None
        self.stops_at = 1000.0
        self.pauses, self.looks, self.checks = [], [], []
        self.cost = self.cpu = 0.0
        self.pacing = Pacing(
            self,
            self,
            lambda: round(self.now * 1000),
            self.pause,
            seconds=lambda: self.now,
            cpu=lambda: self.cpu,
            **{"ends": False, "interval_s": 0.0, "poll_s": 0.2, **settings},
        )

    def pause(self, seconds):
        assert seconds > 0, "a loop that spins"
        self.pauses.append(seconds)
        self.now += seconds
        while self.at and self.at[0][0] <= self.now:
            _, name, value = self.at.pop(0)
            setattr(self, name, value)
        return self.now >= self.stops_at

    def begins(self):
        """The second at which the next micro-batch begins; None at the end."""
        return round(self.now, 3) if self.pacing.next() else None

    # The source.

    def has_new(self):
        self.looks.append(self.now)
        self.now += self.cost
        self.cpu += self.cost
        if self.error is not None:
            raise self.error
        return self.new

    @property
    def has_room(self):
        return self.room

    @property
    def is_through(self):
        return not self.has_new()

    # The work.

    def is_unfinished(self):
        return self.unfinished

    def next_due_ms(self):
        return self.due

    def is_called(self):
        self.calls += 1
        return self.called

    called = False

    def check(self):
        self.checks.append(self.now)
        if self.gone:
            raise RunFailed("the session is gone")

    gone = False


def test_new_rows_begin_a_micro_batch_within_the_pause_between_two_looks():
    world = World([(3.05, "new", True)])
    assert 3.05 <= world.begins() <= 3.2
    world.pacing.ran(1)
    assert world.begins() == round(world.now, 3), "there are more rows, and it pauses"
    world.new = False
    world.pacing.ran(1)
    world.stops_at = world.now + 60
    assert world.begins() is None


def test_an_unfinished_micro_batch_is_next_whatever_the_source_says():
    world = World()
    world.unfinished, world.error = True, ConnectionError("away")
    assert world.begins() == 0
    assert not world.looks


def test_a_retry_wakes_the_loop_when_it_is_due_though_nothing_comes():
    world = World()
    world.due = 7300
    assert 7.3 <= world.begins() <= 7.31
    assert max(world.pauses) <= 0.2, "the clock of the due times may jump"


def test_a_retry_is_due_though_the_source_is_away():
    world = World()
    world.due, world.error = 7300, ConnectionError("away")
    assert 7.3 <= world.begins() <= 7.31


def test_a_request_of_another_process_begins_a_micro_batch_within_a_second():
    world = World([(5.5, "called", True)])
    assert 5.5 <= world.begins() <= 6.6
    assert world.calls <= 8, "it asks more often than once a second"


@pytest.mark.parametrize("error", [OSError("away"), RuntimeError("away")])
def test_requests_that_cannot_be_read_are_read_later(error, monkeypatch):
    world = World([(2, "new", True)])
    monkeypatch.setattr(world, "is_called", lambda: (_ for _ in ()).throw(error))
    assert 2 <= world.begins() <= 2.2


def test_a_source_that_is_away_is_polled_more_and_more_rarely_and_named_once(caplog):
    world = World([(60, "error", None), (60, "new", True)])
    world.error = ConnectionError("no broker")
    assert 60 <= world.begins() <= 65
    assert len(world.looks) < 25
    assert caplog.text.count("is polled again: no broker") == 1


def test_an_error_of_the_source_itself_ends_the_query():
    world = World()
    world.error = SourceError("the same rows twice")
    with pytest.raises(SourceError, match="the same rows twice"):
        world.pacing.next()


def test_a_session_that_ended_ends_the_query_within_a_second():
    world = World([(5, "gone", True)])
    with pytest.raises(RunFailed, match="gone"):
        world.pacing.next()
    assert 5 <= world.now <= 6.1


def test_looks_take_a_fiftieth_of_the_time_at_most():
    world = World()
    world.cost, world.stops_at = 0.05, 100
    assert world.begins() is None
    assert world.cpu <= 100 / 50


def test_a_query_that_ends_takes_what_there_is_and_its_retries():
    world = World(ends=True)
    world.new, world.due = True, 9000
    assert world.begins() == 0
    world.new = False
    world.pacing.ran(3)
    assert 9 <= world.begins() <= 9.01
    world.due = None
    world.pacing.ran(0)
    assert world.begins() is None
    assert world.now < 10


def test_a_query_that_ends_waits_for_a_source_that_is_away():
    world = World([(30, "error", None), (30, "new", True)], ends=True)
    world.error = ConnectionError("away")
    assert 30 <= world.begins() <= 35.1


def test_a_query_that_ends_pauses_after_it_took_nothing():
    world = World(ends=True)
    world.new = True
    assert world.begins() == 0
    world.pacing.ran(0)
    assert world.begins() == 0.2
    world.pacing.ran(1)
    assert world.begins() == 0.2


def test_a_query_that_ends_takes_a_replay_first():
    world = World(ends=True)
    world.called = True
    assert world.begins() == 0
    world.called = False
    world.pacing.ran(0)
    assert world.begins() is None


def test_without_room_a_query_that_ends_waits_for_its_retries():
    world = World(ends=True)
    world.new, world.room, world.due = True, False, 4000
    assert 4 <= world.begins() <= 4.01


def test_by_trigger_micro_batches_begin_at_multiples_of_the_interval():
    world = World(interval_s=10.0)
    world.new = True
    found = [world.begins()]
    for took in (3.0, 3.0, 12.0, 1.0):
        world.now += took
        world.pacing.ran(1)
        found.append(world.begins())
    # One that takes longer than the interval is followed at once, as in Spark.
    assert found == [0, 10, 20, 32, 40]


def test_by_trigger_a_retry_waits_for_the_next_multiple():
    world = World(interval_s=10.0)
    world.due = 12_000
    assert world.begins() == 20


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1 second", 1),
        ("0 seconds", 0),
        ("500 milliseconds", 0.5),
        ("interval 2 minutes", 120),
        ("1 minute 30 seconds", 90),
        ("1.5 seconds", 1.5),
        (".5 Second\t5. SECONDS", 5.5),
        (" Interval\n1  Day 2 weeks 3 hours", 15 * 86400 + 3 * 3600),
        ("500 milliseconds 1 second 1 second", 2.5),
    ],
)
def test_a_processing_time_is_as_many_seconds(text, seconds):
    assert interval_s({"processingTime": text}) == seconds


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "soon", "5", "second", "interval", "availableNow", "-1 second", "1 month"),
        *("10seconds", "interval2 minutes", "1 minute30 seconds", "1 minute, 30 seconds"),
        *("1.5 minutes", "1.0 Hours", "1.5 milliseconds", ". seconds", "1.0000000000 seconds"),
        *("1 second!", "1 secondss", "1 ms", "1 s", "1 min", "1 second 2", "1e3 seconds"),
        *("\u0663 seconds", "1\xa0second", "1 \u017feconds", "106751992 days"),
    ],
)
def test_what_is_no_processing_time_is_refused(text):
    said = "trigger must be a processing time such as .* got " + re.escape(repr(text))
    with pytest.raises(ValueError, match=said + ", which is no processing time for Spark"):
        interval_s({"processingTime": text})


@pytest.mark.parametrize(
    ("took_s", "failures", "pause"),
    [(0, 0, 0.1), (0.1, 0, 2), (60, 0, 5), (0, 1, 0.1), (60, 1, 0.1), (60, 2, 0.2), (60, 99, 5)],
)
def test_the_pause_between_two_looks_is_limited(took_s, failures, pause):
    assert pause_s(took_s, failures) == pause
