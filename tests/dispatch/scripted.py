"""Consumers, limits and clocks that do as a test says."""

import asyncio
import time

from ackcore.dispatch import Dispatcher
from ackcore.flow import Fixed


def dispatched(records, consumers, **settings):
    """Run a dispatcher; return its counts, and the errors by which records died."""
    dead = {}

    def keep(position, record, error):
        assert record not in dead
        dead[record] = error

    counts = Dispatcher(records, consumers, dead_letters=keep, **settings).run()
    assert counts.dead == len(dead)
    return counts, dead


def failing(times, done, error=ValueError):
    """A coroutine that fails a record so many times before it is done."""
    left = dict(times)

    async def call(record):
        if left.get(record, 0):
            left[record] -= 1
            raise error(f"record {record}")
        done.append(record)

    return call


async def turns(n):
    """Let other tasks of the loop have so many turns."""
    for _ in range(n):
        await asyncio.sleep(0)


def one():
    return Fixed(1)


class Clock:
    ns = 0

    def __call__(self):
        return self.ns


class GoingClock(Clock):
    """A clock that goes on by itself, too."""

    def __call__(self):
        return self.ns + time.monotonic_ns()


class TickingClock(Clock):
    """A clock that is later at each look, so that waits end."""

    def __init__(self, tick_ms):
        self.tick_ms = tick_ms

    def __call__(self):
        self.ns += self.tick_ms * 10**6
        return self.ns


async def coroutine(record):
    """A coroutine function of a module."""
