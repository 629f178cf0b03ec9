"""Members of a group are killed, stopped and ended, most on the mock cluster; counts balance."""

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("confluent_kafka", reason="confluent-kafka is not installed")

import mock_broker
from confluent_kafka.admin import ConfigResource
from consumer_counts import Counts, Effect, Taken
from consumer_job import POINTS
from servers import wait_until

pytestmark = pytest.mark.faults

JOB = Path(__file__).with_name("consumer_job.py")
#: Each fiftieth record; none.
POISON, NONE = 50, 10**9
REVOCATION = {point for point in POINTS if "revocation" in point}


@pytest.fixture
def counts(mock_kafka, tmp_path):
    return Counts(mock_kafka, tmp_path)


def member(counts, **arguments):
    job = {
        "servers": counts.server.bootstrap_servers,
        "topic": counts.topic,
        "group": counts.group,
        "dead_topic": counts.dead_topic,
        "effects": str(counts.file),
        "poison": POISON,
        **arguments,
    }
    return subprocess.Popen([sys.executable, JOB, json.dumps(job)], stdout=subprocess.PIPE)


@contextmanager
def members(counts, n, **arguments):
    """Processes that are ended with the test, whatever becomes of it."""
    running = [member(counts, **arguments) for _ in range(n)]
    try:
        yield running
    finally:
        for process in running:
            process.kill()
            process.wait()
            process.stdout.close()


def end(process):
    """SIGTERM, and what it says of itself at its end."""
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == b"draining\n"
    said = process.stdout.read()
    assert process.wait(30) == 0
    return json.loads(said)


def check(counts, most_again=math.inf, poison=POISON):
    """N1 to N4, N8."""
    dead = {value for value in counts.delivered.values() if not (int(value) + 1) % poison}
    return counts.check_complete(most_again, dead)


def left(counts):
    """Records done without a commit are done again, exactly those (N3), with nobody there."""
    return (counts.effects().keys() | counts.dead().keys()) - counts.done_by_commits()


@pytest.mark.parametrize("point", sorted(POINTS.keys() - REVOCATION))
def test_a_member_that_dies_at_a_point_loses_nothing(counts, point):
    """F7: with the exact bound for that point."""
    counts.produce(1000)
    # One is, or some are in retry when the second commit is made, or none.
    poison = 1000 if "dead letter" in point else NONE if "ack" in point else POISON
    after, threads = (100, 1) if "ack" in point else (poison == POISON, 2)
    with members(counts, 1, at=point, after=after, threads=threads, poison=poison) as (first,):
        assert first.wait(30) == -signal.SIGKILL
        counts.check_commits()
        again = left(counts)
    with members(counts, 1, poison=poison) as (second,):
        counts.wait_for_the_end()
        end(second)
    assert check(counts, poison=poison) == len(again)
    if "ack" in point:
        assert len(again) == 1
    if "dead letter" in point:
        assert list(counts.dead().values()) == [2]


@pytest.mark.parametrize("point", sorted(REVOCATION))
def test_a_member_that_dies_as_its_partitions_go_loses_nothing(kafka_broker, tmp_path, point):
    """F7: on a broker that takes commits while a group rebalances; all of them go."""
    counts = Counts(kafka_broker, tmp_path, records=1000)
    arguments = {"protocol": "eager", "poison": NONE}
    with members(counts, 1, at=point, commit_interval_s=1000, **arguments) as (first,):
        wait_until(counts.effects, "it works")
        with members(counts, 1, **arguments) as (second,):
            assert first.wait(30) == -signal.SIGKILL
            counts.wait_for_the_end()
            end(second)
    mine = [line for line in counts.lines() if line.process == first.pid]
    done = {line[:2] for line in mine if isinstance(line, Effect)}
    for line in mine:
        if isinstance(line, Taken):
            done -= {(line.partition, offset) for offset in counts.said(*line[:2], line.metadata)}
    assert bool(done) == ("before the commit" in point)
    assert check(counts, poison=NONE) == len(done)


def test_members_are_killed_again_and_again(counts):
    """F6: one of three, ten times, when part of what came is committed and poison is in retry."""
    chance = random.Random(6)
    with members(counts, 3) as running:
        for _ in range(10):
            counts.wait_for_the_end()
            counts.produce(500)
            wait_until(lambda: counts.lag() < 500, "some of it is committed")
            victim = chance.randrange(3)
            running[victim].kill()
            running[victim].wait()
            running[victim].stdout.close()
            running[victim] = member(counts)
            counts.check_commits()
        counts.wait_for_the_end(120)
        for process in running:
            end(process)
    check(counts)


def is_stopped(process):
    return os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG) is not None


def test_a_member_that_was_stopped_wakes_as_a_zombie(counts):
    """F9, F17: its partitions went to another meanwhile; what it says then is refused, or late."""
    counts.produce(2000)
    stops = {"at": "before the commit is sent", "after": 1, "signal": signal.SIGSTOP}
    with members(counts, 1, late=True, **stops) as (one,):
        wait_until(lambda: is_stopped(one), "it stops, and has something to commit")
        with members(counts, 1) as (other,):
            counts.produce(2000)
            wait_until(lambda: not counts.lag(), "the other does it all")
            one.send_signal(signal.SIGCONT)
            counts.produce(2000)
            counts.wait_for_the_end()
            end(other)
        counts.produce(2000)
        counts.wait_for_the_end()
        said = end(one)
    assert said["rejected"] > 0
    assert said["stale"] == [1]
    check(counts)


def shorten_session(broker, group):
    """Have a group (KIP-848) take a member for dead after a second, as `consumer_job` asks for."""
    beats = {"consumer_heartbeat_interval_ms": 200, "consumer_session_timeout_ms": 1000}
    broker.configure(ConfigResource.Type.GROUP, group, **beats)


@pytest.mark.parametrize("others", [0, 1], ids=["alone", "beside another"])
@pytest.mark.parametrize("protocol", ["cooperative", "eager", "consumer"])
def test_a_member_that_was_taken_for_dead_leaves_nothing_uncommitted(
    kafka_broker, tmp_path, protocol, others
):
    """F9: on a real broker. Its next commit is refused, or not sent (KIP-848); it joins again."""
    counts = Counts(kafka_broker, tmp_path)
    shorten_session(kafka_broker, counts.group)
    counts.produce(1000)
    stops = {"at": "before the commit is sent", "after": 1, "signal": signal.SIGSTOP}
    with members(counts, 1, protocol=protocol, **stops) as (one,):
        wait_until(lambda: is_stopped(one), "it stops, and has something to commit")
        wait_until(lambda: not counts.members(), "its group takes it for dead")
        with members(counts, others, protocol=protocol) as more:
            if others:
                wait_until(lambda: not counts.lag(), "the other does it all")
            one.send_signal(signal.SIGCONT)
            counts.produce(1000)
            counts.wait_for_the_end()
            for process in more:
                end(process)
        said = end(one)
    check(counts)
    # With KIP-848 a heartbeat may be refused first. Then it gives its partitions up, uncommitted.
    assert said["rejected"] > 0 or protocol == "consumer"


def test_a_member_that_is_told_to_end_leaves_nothing_to_be_done_again(counts):
    """F18"""
    counts.produce(4000)
    for _ in range(3):
        with members(counts, 1) as (process,):
            before = sum(counts.effects().values())
            wait_until(lambda b=before: sum(counts.effects().values()) > b, "it works")
            end(process)
    with members(counts, 1) as (process,):
        counts.wait_for_the_end()
        end(process)
    assert check(counts) == 0


@pytest.mark.parametrize("then", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_a_member_is_told_to_end_and_then_once_more(counts, then):
    """F18: a second SIGTERM changes nothing, what is still out is done again; or it is killed."""
    counts.produce(1000)
    arguments = {"late": True, "poison": NONE, "drain_s": 2.0}
    with members(counts, 1, **arguments) as (process,):
        wait_until(lambda: len(counts.effects()) > 100, "it works")
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == b"draining\n"
        process.send_signal(then)
        assert process.wait(30) == (0 if then == signal.SIGTERM else -signal.SIGKILL)
        again = left(counts)
    with members(counts, 1, poison=NONE) as (process,):
        counts.wait_for_the_end()
        end(process)
    assert check(counts, poison=NONE) == len(again) > 0
    if then == signal.SIGTERM:
        assert len(again) == 1


def test_the_broker_is_killed_under_load(own_kafka_broker, tmp_path):
    """F20: kill -9 of a real one, three times, on what it had."""
    counts = Counts(own_kafka_broker, tmp_path, records=2000)
    with members(counts, 2) as running:
        for _ in range(3):
            before = sum(counts.effects().values())
            wait_until(lambda b=before: sum(counts.effects().values()) > b, "they work")
            own_kafka_broker.kill()
            own_kafka_broker.restart()
            counts.produce(2000)
            counts.check_commits()
        counts.wait_for_the_end(120)
        for process in running:
            end(process)
    check(counts)


SECONDS = float(os.environ.get("ACKCORE_SOAK_S", "40"))
SEED = int(os.environ.get("ACKCORE_SOAK_SEED", str(time.time_ns() % 1_000_000)))
#: What a commit may be answered.
REFUSALS = (7, 12, 14, 16, 22, 25, 27)


class Chaos:
    """Draw faults from a seed, one after the other."""

    def __init__(self, counts, seed):
        self.counts = counts
        self.chance = random.Random(seed)
        self.running = []
        self.stopped = []
        self.down = None
        self.happened = Counter()

    def step(self):
        name = self.chance.choice(
            ["kill", "join", "leave", "pause", "refuse", "broker", "leader", "coordinator"]
        )
        self.happened[name] += 1
        getattr(self, name)()

    def some(self):
        return self.running.pop(self.chance.randrange(len(self.running)))

    def let_go(self, process):
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()
        process.stdout.close()

    def kill(self):
        """F6, and another in its place."""
        self.let_go(self.some())
        self.join()

    def join(self):
        """F8"""
        self.running.append(member(self.counts))
        if len(self.running) > 4:
            self.leave()

    def leave(self):
        """F8, F18"""
        if len(self.running) > 1:
            process = self.some()
            process.send_signal(signal.SIGTERM)
            self.stopped.append(process)

    def pause(self):
        """F9, F17: longer than its session."""
        process = self.chance.choice(self.running)
        process.send_signal(signal.SIGSTOP)
        time.sleep(self.chance.uniform(0.2, 2.0))
        process.send_signal(signal.SIGCONT)

    def refuse(self):
        """F10"""
        some = self.chance.choices(REFUSALS, k=3)
        self.counts.server.fail_requests(mock_broker.OFFSET_COMMIT, *some)

    def broker(self):
        """F11"""
        self.heal()
        self.down = self.chance.randrange(1, 4)
        self.counts.server.broker_set_down(self.down)

    def heal(self):
        if self.down is not None:
            self.counts.server.broker_set_up(self.down)
            self.down = None

    def leader(self):
        """F11"""
        partition, broker = self.chance.randrange(4), self.chance.randrange(1, 4)
        self.counts.server.partition_set_leader(self.counts.topic, partition, broker)

    def coordinator(self):
        """F11"""
        broker = self.chance.randrange(1, 4)
        self.counts.server.coordinator_set("group", self.counts.group, broker)

    def close(self):
        for process in (*self.running, *self.stopped):
            self.let_go(process)


def test_whatever_goes_wrong_nothing_is_lost(counts):
    """F26: for ``ACKCORE_SOAK_S`` seconds; ``ACKCORE_SOAK_SEED`` says what happens, and when."""
    print(f"again: ACKCORE_SOAK_S={SECONDS:g} ACKCORE_SOAK_SEED={SEED}")
    chaos = Chaos(counts, SEED)
    try:
        for _ in range(3):
            chaos.join()
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            chaos.heal()
            counts.produce(200)
            chaos.step()
            time.sleep(chaos.chance.uniform(0.0, 1.0))
            chaos.heal()
            counts.check_commits()
        # N7: with all of it over, it goes on to the end.
        counts.wait_for_the_end(60)
    finally:
        chaos.close()
    print(dict(chaos.happened))
    check(counts)
