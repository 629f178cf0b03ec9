"""The recorded streams of Storm's own acker: events, tasks, order and pending count, exactly."""

import gzip
import json
import random
from pathlib import Path

import pytest
from ledger_scripts import send_batch, send_many, send_scalars

from ackcore import _records as records

STREAMS = [
    json.loads(line)["steps"]
    for line in gzip.decompress(
        (Path(__file__).parent / "data" / "storm-acker.jsonl.gz").read_bytes()
    ).splitlines()
]
KINDS = {"ACK": records.ACKED, "FAIL": records.FAILED, "RESET": records.RESET_TIMEOUT}
TURN = "T"


def message(op):
    """Return the parts of a recorded step: root id, val, and the task or kind; None for a turn."""
    kind, *numbers = op.split()
    numbers = [int(number) for number in numbers]
    match kind:
        case "I":
            return tuple(numbers)
        case "A":
            return (*numbers, records.ACK)
        case "F":
            # The val of a FAIL is ignored, so it may as well be one that would show.
            return (*numbers, 12345, records.FAIL)
        case "R":
            return (*numbers, 54321, records.RESET)
        case _:
            assert kind == TURN
            return None


def events_of(outcomes):
    return [(row.kind, row.root_id, row.task) for row in outcomes]


def recorded(events):
    return [(KINDS[kind], root, task) for kind, root, task in events]


def test_the_recording_is_whole():
    ops = [op.split()[0] for steps in STREAMS for op, _, _ in steps]
    assert len(STREAMS) == 60
    assert len(ops) == 24_114
    assert set(ops) == set("IAFRT")


def test_step_by_step(Ledger):
    for number, steps in enumerate(STREAMS):
        ledger = Ledger(capacity=1)
        for at, (op, events, pending) in enumerate(steps):
            row = message(op)
            outcomes = ledger.rotate() or [] if row is None else send_scalars(ledger, [row])
            assert events_of(outcomes) == recorded(events), f"stream {number}, step {at}: {op}"
            assert len(ledger) == pending, f"stream {number}, step {at}: {op}"


@pytest.mark.parametrize("way", [send_batch, send_many])
@pytest.mark.parametrize("longest", [2, 7, 400])
def test_in_batches_cut_anywhere(Ledger, way, longest):
    chance = random.Random(longest)
    for number, steps in enumerate(STREAMS):
        ledger = Ledger(capacity=1)
        at = 0
        while at < len(steps):
            if steps[at][0] == TURN:
                ledger.rotate()
                at += 1
            else:
                end = at
                limit = at + chance.randint(1, longest)
                while end < min(limit, len(steps)) and steps[end][0] != TURN:
                    end += 1
                batch = steps[at:end]
                outcomes = way(ledger, [message(op) for op, _, _ in batch])
                wanted = [event for _, events, _ in batch for event in recorded(events)]
                assert events_of(outcomes) == wanted, f"stream {number}, steps {at} to {end}"
                at = end
            assert len(ledger) == steps[at - 1][2], f"stream {number}, before step {at}"


def test_expired_are_what_left(Ledger):
    """Trees that Storm drops silently are returned by expired(), whole or in slices."""
    chance = random.Random(3)
    for steps in STREAMS:
        ledger = Ledger(capacity=1)
        pending = 0
        for op, _, now_pending in steps:
            row = message(op)
            if row is None:
                before = {entry.root_id for entry in ledger.entries()}
                ledger.rotate()
                left = [entry for _ in range(3) for entry in ledger.expired(chance.randrange(3))]
                left += ledger.expired()
                after = {entry.root_id for entry in ledger.entries()}
                assert sorted(entry.root_id for entry in left) == sorted(before - after)
                assert len(left) == pending - now_pending
            else:
                send_scalars(ledger, [row])
            pending = now_pending
