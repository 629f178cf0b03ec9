"""A process that writes dead letters into a bucket is killed (SIGKILL) at any request, and another.

What `test_killed_at_any_request_no_letter_is_lost_doubled_or_sent_twice` does by an exception in
one process, and in obstore's own memory, is done here with processes and a server.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
from places import Bucket
from processes import eventually, state_of
from s3_server import REFUSED

sys.path.insert(0, str(Path(__file__).parent.parent / "spark"))

from letter_homes import Home, asked, contents, every, listed
from letter_writers import BATCHES, DROPPED, SENT, write_letters

from ackcore.spark.dead_letters.checkpoints import store_of
from ackcore.spark.dead_letters.listing import LetterFilter, list_letters

#: In `make test`, where it goes through or does not; `make faults` kills at each request.
FEW, FEWER = 48, 96


@pytest.fixture
def write(s3):
    """``write(place, n, how)`` has a process write, and kills it at its n-th request.

    That goes through, or does not get to the server.  Returns its exit code, and how many requests
    there were.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ackcore.spark.dead_letters.replay", "ackcore.topology"])

    def write(place, n=None, goes_through=True):
        asked, started = [], threading.Event()
        process = context.Process(target=write_letters, args=(place.checkpoint, place.environment))

        def before(request):
            asked.append(request)
            if len(asked) == n:
                started.wait()
                os.kill(process.pid, signal.SIGKILL)
                eventually(lambda: state_of(process.pid) in ("Z", None))
                if not goes_through:
                    s3.fail(REFUSED, lambda one: one is request)

        s3.before = before
        process.start()
        started.set()
        process.join()
        s3.before = None
        return process.exitcode, len(asked)

    yield write
    s3.before = None


def of_batches(first, end):
    return {name: one for name, one in every(end).items() if int(name.split("/")[1]) >= first}


def check(place, n):
    """Each letter is there once, but for those that were dropped; those sent again are so once."""
    home = Home(place.checkpoint)
    found = Counter(
        str(each.id) for each in list_letters(store_of(home.checkpoint), LetterFilter())
    )
    assert found.keys() == listed(home).keys()
    assert set(found.values()) == {1}, n
    dropped = of_batches(DROPPED, DROPPED + 1)
    assert listed(home).items() == of_batches(1, BATCHES).items() - dropped.items(), n
    assert asked(home) == [f"id-{2 * SENT}", f"id-{2 * SENT + 1}"], n
    assert not any(f"'id-{2 * DROPPED}'".encode() in each for each in contents(home)), n
    home.driver()[0].close()
    assert place.unnamed_letters() == set(), n


@pytest.mark.parametrize(
    ("every_nth", "goes_through"),
    [
        pytest.param(FEW, True, id="few go through"),
        pytest.param(FEWER, False, id="few get nowhere"),
        pytest.param(1, True, id="each goes through", marks=pytest.mark.faults),
        pytest.param(1, False, id="each gets nowhere", marks=pytest.mark.faults),
    ],
)
def test_killed_at_any_request_and_started_again_it_has_each_letter_once(
    write, s3, tmp_path, every_nth, goes_through
):
    def place(n):
        return Bucket.before(s3, tmp_path / str(n))

    untouched = place("untouched")
    ended, requests = write(untouched)
    assert ended == 0
    assert requests >= FEWER
    check(untouched, "untouched")
    for n in range(every_nth, requests + 1, every_nth):
        here = place(n)
        assert write(here, n, goes_through)[0] == -signal.SIGKILL, n
        # Once more it is killed, somewhere on its way.
        assert write(here, 1 + n % 17, goes_through)[0] == -signal.SIGKILL, n
        assert write(here)[0] == 0, n
        check(here, n)
