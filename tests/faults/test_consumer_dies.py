"""Members of a group are killed, stopped and ended, on the mock cluster: the books balance."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("confluent_kafka", reason="confluent-kafka is not installed")

from consumer_books import Books
from consumer_job import POINTS
from servers import wait_until

pytestmark = pytest.mark.faults

JOB = Path(__file__).with_name("consumer_job.py")
#: Each fiftieth record.
POISON = 50


@pytest.fixture
def books(mock_kafka, tmp_path):
    return Books(mock_kafka, tmp_path)


def member(books, **arguments):
    job = {
        "servers": books.server.bootstrap_servers,
        "topic": books.topic,
        "group": books.group,
        "dead_topic": books.dead_topic,
        "effects": str(books.file),
        "poison": POISON,
        **arguments,
    }
    return subprocess.Popen([sys.executable, JOB, json.dumps(job)], stdout=subprocess.PIPE)


@contextmanager
def members(books, n, **arguments):
    """Processes that are ended with the test, whatever becomes of it."""
    running = [member(books, **arguments) for _ in range(n)]
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
    said = process.stdout.read()
    assert process.wait(30) == 0
    return json.loads(said)


def check(books):
    """N1, N3, N8: again is at most what was done since the last commit, and what was out."""
    effects, dead = books.effects(), books.dead()
    assert books.delivered.keys() <= effects.keys() | dead.keys(), "lost"
    poison = {at for at, value in books.delivered.items() if not int(value) % POISON}
    assert dead.keys() == poison
    assert not effects.keys() & dead.keys()
    return sum(effects.values()) - len(effects)


@pytest.mark.parametrize("point", POINTS)
def test_a_member_that_dies_at_a_point_loses_nothing(books, point):
    """F7"""
    books.produce(1000)
    after = 0 if "revocation" in point else 1
    with members(books, 1, die=point, after=after) as (first,):
        if "revocation" in point:
            wait_until(books.effects, "it works")
            first.send_signal(signal.SIGTERM)
        assert first.wait(30) == -signal.SIGKILL
        books.check_commits()
    with members(books, 1) as (second,):
        books.wait_for_the_end()
        end(second)
    again = check(books)
    if point == "in the revocation, after the commit":
        assert again <= 2


def test_members_are_killed_again_and_again(books):
    """F6: one of three, every half second, ten times."""
    chance = random.Random(6)
    books.produce(2000)
    with members(books, 3) as running:
        for _ in range(10):
            wait_until(books.effects, "they work")
            time.sleep(0.5)
            books.produce(500)
            victim = chance.randrange(3)
            running[victim].kill()
            running[victim].wait()
            running[victim].stdout.close()
            running[victim] = member(books)
            books.check_commits()
        books.wait_for_the_end(120)
        for process in running:
            end(process)
    check(books)


def test_a_member_that_was_stopped_wakes_as_a_zombie(books):
    """F9, F17: its partitions went to another meanwhile; what it says then is refused or late."""
    books.produce(2000)
    with members(books, 2) as (one, other):
        wait_until(books.effects, "they work")
        os.kill(one.pid, signal.SIGSTOP)
        books.produce(2000)
        wait_until(lambda: not books.lag(), "the other does it all")
        os.kill(one.pid, signal.SIGCONT)
        books.produce(2000)
        books.wait_for_the_end()
        end(one)
        end(other)
    assert check(books) <= 2 * 4 * 112


def test_a_member_that_is_told_to_end_leaves_nothing_to_be_done_again(books):
    """F18"""
    books.produce(4000)
    for _ in range(3):
        with members(books, 1) as (process,):
            before = sum(books.effects().values())
            wait_until(lambda b=before: sum(books.effects().values()) > b, "it works")
            end(process)
    with members(books, 1) as (process,):
        books.wait_for_the_end()
        end(process)
    assert check(books) == 0
