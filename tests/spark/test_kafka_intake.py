"""How many records a micro-batch takes from Kafka, and how many retries beside them."""

from types import SimpleNamespace

import pytest

pytest.importorskip("confluent_kafka", reason="confluent-kafka is not installed")

from ackcore.kafka import KafkaSpout
from ackcore.spark.kafka import plans
from ackcore.spark.kafka.plans import Intake


def spout(**settings):
    return KafkaSpout("t", bootstrap_servers="x", **settings)


def clocked(monkeypatch):
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr(plans.time, "monotonic", lambda: now.s)
    return now


def test_a_slow_micro_batch_shrinks_the_next(monkeypatch):
    now = clocked(monkeypatch)
    intake = Intake(spout(target_batch_s=10))
    assert intake.most == 100_000
    intake.planned(100_000)
    now.s += 100
    intake.done(waiting=0)
    assert intake.most == 10_000
    for expected in (20_000, 40_000):
        intake.planned(intake.most)
        now.s += 1
        intake.done(waiting=0)
        assert intake.most == expected
    # One that had less than it might have taken tells nothing of what it can take.
    intake.planned(5)
    now.s += 0.01
    intake.done(waiting=0)
    assert intake.most == 40_000


@pytest.mark.parametrize(
    ("fixed_s", "each_s", "batch_s"),
    [(0, 1e-3, 10), (6, 1e-4, 12), (15, 1e-4, 30), (10.5, 1e-3, 21)],
)
def test_what_a_micro_batch_costs_by_itself_shrinks_nothing(monkeypatch, fixed_s, each_s, batch_s):
    """It takes its time, or twice what it costs without a record: not one record for ever."""
    now = clocked(monkeypatch)
    intake = Intake(spout(target_batch_s=10))
    for _ in range(60):
        intake.planned(intake.most)
        now.s += fixed_s + each_s * intake.most
        intake.done(waiting=0)
    assert fixed_s + each_s * intake.most == pytest.approx(batch_s, rel=0.1)


def test_a_full_waiting_store_shrinks_what_is_taken():
    intake = Intake(spout(max_records=1_000))
    found = []
    for waiting in (0, 0.5, 0.75, 1.0, 1.5):
        intake.planned(1_000)
        intake.done(waiting)
        found.append(intake.most)
    assert found == [1_000, 1_000, 500, 0, 0]


@pytest.mark.parametrize("each_s", [1e-4, 1e-3, 1e-2])
def test_new_records_do_not_wait_for_all_that_fail(monkeypatch, each_s):
    """However many are due: half of what a micro-batch has time for is new, and it ends in time."""
    now = clocked(monkeypatch)
    intake = Intake(spout(target_batch_s=10))
    for _ in range(20):
        new, retries = intake.most, min(100_000, intake.most_retries)
        intake.planned(new)
        now.s += each_s * (new + retries)
        intake.done(0, retries)
    assert each_s * (new + retries) == pytest.approx(10, rel=0.1)
    assert new >= 0.45 * (new + retries)
    # None is due any more.
    for _ in range(5):
        intake.planned(intake.most)
        now.s += each_s * intake.most
        intake.done(0, 0)
    assert each_s * intake.most == pytest.approx(10, rel=0.1)


def test_where_max_records_is_given_retries_are_bounded_by_their_setting_alone():
    intake = Intake(spout(max_records=10))
    intake.planned(10)
    intake.done(0, 1_000)
    assert (intake.most, intake.most_retries) == (10, None)
