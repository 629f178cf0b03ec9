"""Processes that write dead letters into a bucket, and send some again and drop some.

No tests; a module of its own, so that a fork server can load it once for all of them.
"""

from __future__ import annotations

import os

from checkpoints import decision, died
from letter_homes import Home, named

from ackcore.spark.dead_letters import compaction
from ackcore.spark.dead_letters.drop import drop
from ackcore.spark.dead_letters.replay import replay

#: Micro-batches with two letters each, but for the first; of these some are sent again or dropped.
BATCHES = 7
SENT, DROPPED = 2, 3


def write_letters(checkpoint, environment):
    """Go on from wherever the last one was, to the end."""
    os.environ.update(environment)
    compaction._FEWEST = 3
    state, letters = Home(checkpoint).driver()
    with state:
        while state.last_done != BATCHES - 1:
            number = 0 if state.last_done is None else state.last_done + 1
            dead = {"lines": died(2 * number, 2)} if number else {}
            if state.decision(number) is None:
                state.write_plan(state.plan(number) or state.make_plan(number, 0))
                state.write_decision(decision(number, dead=dead))
            letters.write(number, dead)
            state.write_done(number)
            state.prune(number)
        replay(checkpoint, where=named(SENT), request="r")
        drop(checkpoint, named(DROPPED))
