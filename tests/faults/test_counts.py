"""The checker of the fault tests: it accepts a correct state, and each check refuses a forgery.

A forgery changes one thing in the state of a query that has ended.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from hashlib import blake2b

import counts
import pytest
from counts import Decided, Found, Held

RECORDS = {n: {"id": n, "text": text} for n, text in enumerate(["a b", "", "c", "d e", "f"])}
#: Record 1 has no rows, and record 2 always fails.
POISON = 2


def rows_of(payload):
    words = payload["text"].split()
    return [{"id": payload["id"], "at": at, "word": word} for at, word in enumerate(words)]


EXPECTED = counts.Expected(
    RECORDS,
    rows_of,
    dead=lambda n: n == POISON,
    alive=lambda n: n < POISON,
    message_id=lambda n: f"m{n}",
    max_attempts=3,
)


def held(n, attempts, batch=None, **other):
    one = Held(n, "lines", f"m{n}", attempts, "ValueError", RECORDS[n], batch)
    return one._replace(**other)


def honest():
    """Three micro-batches: record 3 is acked in the second one, and record 2 dies in the third."""
    written = [(0, 1, 4), (3,), ()]
    return Found(
        planned=(0, 1, 2),
        done=(0, 1, 2),
        decided={n: Decided(n, True, {"number": n}, ("m2",) if n == 2 else ()) for n in range(3)},
        waiting=[],
        dead=[held(POISON, 3, 2)],
        written={
            n: [row for i in some for row in rows_of(RECORDS[i])]
            for n, some in zip(range(3), written, strict=True)
        },
        totals={"records": 5, "acked": 4, "dead": 1, "waiting": 0},
    )


def test_an_honest_state_balances():
    found = honest()
    assert counts.check(found, EXPECTED) == []
    assert counts.check_since(found, honest()) == []
    # After the first micro-batch, two records wait, and one was not read yet.
    part = Found(
        (0, 1),
        (0,),
        {0: found.decided[0]},
        [held(POISON, 1), held(3, 1)],
        [],
        {0: found.written[0]},
        {"records": 5, "acked": 3, "dead": 0, "waiting": 2},
    )
    assert counts.check(part, EXPECTED, finished=False) == []
    assert counts.check_since(part, found) == []


def sink(change: Callable, batch=0):
    """A forgery of the rows of a micro-batch."""
    return lambda f: replace(f, written={**f.written, batch: change(f.written[batch])})


def letter(**other):
    """A forgery of the one dead letter."""
    return lambda f: replace(f, dead=[f.dead[0]._replace(**other)])


def waits(*some):
    """A forgery after which some records wait."""
    return lambda f: replace(f, waiting=[*some], totals={**f.totals, "waiting": len(some)})


def totals(**more):
    return lambda f: replace(f, totals={k: n + more.get(k, 0) for k, n in f.totals.items()})


def decided(n, **other):
    return lambda f: replace(f, decided={**f.decided, n: f.decided[n]._replace(**other)})


FORGERIES = {
    # The sink.
    "a row twice": (sink(lambda rows: rows + rows[:1]), "rows too many"),
    "a row missing": (sink(lambda rows: rows[1:]), "some of their rows are missing"),
    "no row of a record": (sink(lambda rows: rows[2:]), "neither in the sink, nor waiting"),
    "a row of no record": (sink(lambda rows: [*rows, {"id": 999}]), "in the sink, unknown"),
    "a row of a dead one": (
        sink(lambda rows: rows + rows_of(RECORDS[POISON])),
        "in the sink and dead",
    ),
    "undecided rows": (
        lambda f: replace(f, written={**f.written, 77: f.written[1]}),
        "written to the sink undecided",
    ),
    # The dead letters.
    "a letter twice": (lambda f: replace(f, dead=f.dead * 2), "dead more than once"),
    "an id twice": (lambda f: replace(f, dead=f.dead * 2), "dead under one message id"),
    "a letter missing": (lambda f: replace(f, dead=[]), "not dead, and must be"),
    "a letter that was decided is missing": (
        lambda f: replace(f, dead=[]),
        "dead in 2 and no dead letter",
    ),
    "a letter of no record": (letter(key=999), "dead, unknown to the source"),
    "a letter with another payload": (letter(payload={}), "dead with another payload"),
    "a letter under another id": (letter(message_id="x"), "dead under a wrong message id"),
    "a letter of one that must be acked": (letter(key=1), "dead, and must be ACKED"),
    "too many attempts": (letter(attempts=9), "dead after too many attempts"),
    "letters of no decision": (letter(batch_id=88), "dead letters undecided"),
    "a letter that its batch did not decide": (
        letter(batch_id=1),
        "dead letters of 1 that it did not decide",
    ),
    # Those that wait.
    "waiting at the end": (waits(held(0, 1)), "still waiting"),
    "waiting and written": (waits(held(0, 1)), "in the sink and waiting"),
    "waiting and dead": (waits(held(POISON, 1)), "both waiting and dead"),
    "waiting twice": (waits(held(1, 1), held(1, 1)), "waiting more than once"),
    "waiting too long": (waits(held(1, 3)), "waiting after the last attempt"),
    "waiting with another payload": (waits(held(1, 1, payload={})), "waiting with another payload"),
    # The query's own counts.
    "one ACKED too many": (totals(acked=1), "the counts do not add up"),
    "acked for dead": (totals(acked=-1, dead=1), "are dead by the counts"),
    "silent ones forgotten": (totals(records=-2, acked=-2), "were read by the counts"),
    "more than there are": (totals(records=1, acked=1), "the source has"),
    "ACKED without rows": (totals(records=-3, acked=-3), "ACKED by the counts"),
    "one waits by the counts": (totals(waiting=1), "wait by the counts"),
    # The protocol.
    "no plan": (lambda f: replace(f, planned=(0, 1)), "decided without a plan"),
    "no decision": (
        lambda f: replace(f, decided={0: f.decided[0], 1: f.decided[1]}),
        "done without a decision",
    ),
    "no mark": (lambda f: replace(f, done=(0, 1)), "planned and not done"),
    "planned too early": (
        lambda f: replace(f, planned=(0, 1, 2, 4)),
        "planned before the last one was done",
    ),
}


@pytest.mark.parametrize(("forge", "message"), FORGERIES.values(), ids=FORGERIES)
def test_a_forgery_is_found(forge, message):
    found = counts.check(forge(honest()), EXPECTED)
    assert any(message in problem for problem in found), found


def test_rows_of_two_executions_are_found():
    expected = replace(EXPECTED, tag="run")
    found = honest()
    for row in (row for rows in found.written.values() for row in rows):
        row["run"] = "first"
    assert counts.check(found, expected) == []
    found.written[0][0]["run"] = "second"
    assert counts.check(found, expected) == ["in the sink from more than one execution: 1 (0)"]


CHANGES = {
    "decided otherwise than before: 1 (2)": decided(2, manifest={"more": "then"}),
    "done before, and not any more: 2 (1, 2)": lambda f: replace(f, done=(0,)),
    "sink rows of a finished micro-batch have changed: 1 (0)": sink(lambda rows: rows[1:]),
    "dead letters have gone: 1 (m2)": lambda f: replace(f, dead=[]),
    "acked: the counts went back from 4": totals(acked=-1),
}


@pytest.mark.parametrize(("problem", "forge"), CHANGES.items())
def test_what_changes_after_it_was_recorded_is_found(problem, forge):
    assert counts.check_since(honest(), forge(honest())) == [problem]


def test_damage_is_noticed(tmp_path):
    line = json.dumps({"records": {}}).encode()
    whole = line + b"\nblake2b " + blake2b(line, digest_size=16).hexdigest().encode()
    (tmp_path / "record").write_bytes(whole)
    assert counts.read_record(tmp_path / "record") == {"records": {}}
    table = tmp_path / f"0.dead-lines.{blake2b(b'table', digest_size=16).hexdigest()}.arrow"
    for path, read in (("record", counts.read_record), (table.name, counts.read_table)):
        (tmp_path / path).write_bytes(whole.replace(b"records", b"recOrds"))
        with pytest.raises(counts.Damaged):
            read(tmp_path / path)


def of_state(**changes):
    """Return what `counts.check_state` finds in two rows of a word, which one window has."""
    times = [datetime.fromtimestamp(s, UTC) for s in (1, 2)]
    rows = {n: [{"id": n + 7, "word": "a", "ts": times[n], "seen": n or None}] for n in (0, 1)}
    rows[1][0] |= changes.pop("row", {})
    closed = {"word": "a", "window_start": times[0].replace(second=0), "ids": [8, 7]}
    number = changes.pop("number", 1)
    tables = {"words": [{"word": "a", "n": 2, "ids": 15}], "times": []} | changes
    found = counts.Found((0, 1), (0, 1), {}, [], [], rows)
    return counts.check_state(found, tables, {number: [closed]}, 20)


@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        ({}, []),
        ({"words": [{"word": "a", "n": 3, "ids": 15}]}, ["folded too often", "not folded"]),
        ({"words": []}, ["not folded"]),
        ({"row": {"seen": 2}}, ["looked up otherwise than the table was before 1"]),
        # The micro-batch that closed it is not done.
        ({"number": 2}, ["not in their windows"]),
        (
            {"times": [{"word": "a", "window_start": datetime(1970, 1, 1, tzinfo=UTC), "ids": []}]},
            ["in windows too often"],
        ),
    ],
)
def test_tables_that_do_not_hold_the_rows_are_found(changes, messages):
    assert [problem.partition(":")[0] for problem in of_state(**changes)] == messages
