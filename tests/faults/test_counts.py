"""The checker itself: it passes honest histories, and each of its checks has been seen red.

Histories are made by a small simulation that writes a checkpoint, dead letters and a sink as a
query does; a forgery then changes one thing in them.
"""

from __future__ import annotations

import copy
import json
import random
from datetime import UTC, datetime
from hashlib import blake2b

import counts
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest

MAX_ATTEMPTS = 3
WAITING = pa.schema(
    [
        ("_ackcore_message_id", pa.string()),
        ("_ackcore_attempt", pa.int32()),
        ("_ackcore_due_ms", pa.int64()),
        ("_ackcore_first_ms", pa.int64()),
        ("_ackcore_last_ms", pa.int64()),
        ("_ackcore_reason", pa.struct([("type", pa.string())])),
        ("_ackcore_replayed", pa.int32()),
        ("id", pa.int64()),
        ("text", pa.string()),
    ]
)


def rows_of(payload):
    words = payload["text"].split()
    return [{"id": payload["id"], "at": at, "word": word} for at, word in enumerate(words)]


def write_record(path, body):
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(body).encode()
    path.write_bytes(line + b"\nblake2b " + blake2b(line, digest_size=16).hexdigest().encode())


def write_table(state, name, rows):
    sink = pa.BufferOutputStream()
    table = pa.Table.from_pylist(rows, WAITING)
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    data = sink.getvalue().to_pybytes()
    file = f"{name}.{blake2b(data, digest_size=16).hexdigest()}.arrow"
    state.mkdir(parents=True, exist_ok=True)
    (state / file).write_bytes(data)
    return {"file": file, "rows": len(rows)}


def write_segments(state, name, rows):
    """One segment, in which another has been waiting before them."""
    return [{**write_table(state, name, [*rows[:1], *rows]), "start": len(rows[:1])}]


class History:
    """A query that runs to its end, or up to ``stop`` micro-batches."""

    def __init__(self, directory, seed, stop=None):
        rng = random.Random(seed)
        self.recorded = {}
        self.root, self.sink = directory / "checkpoint" / "ackcore", directory / "sink"
        self.records = {
            n: {"id": n, "text": " ".join(rng.choices("abcde", k=rng.randrange(0, 5)))}
            for n in range(rng.randrange(12, 30))
        }
        # Each of these has to be there, for every forgery to have something to work on.
        self.records[0]["text"], self.records[1]["text"], self.records[2]["text"] = "a b", "", "c"
        self.poison = {2, *(n for n in self.records if n > 2 and rng.random() < 0.1)}
        self.totals = dict.fromkeys(("records", "acked", "dead", "waiting"), 0)
        self.number = 0
        fresh, waiting = list(self.records), {}
        while (fresh or waiting) and self.number != stop:
            taken = [(n, 0) for n in fresh[:7]] + list(waiting.items())
            fresh = fresh[7:]
            failed = [
                (n, a) for n, a in taken if n in self.poison or (n > 2 and rng.random() < 0.3)
            ]
            if self.number < 2:
                failed += [(n, a) for n, a in taken if (n, a) == (3, 0) and (n, a) not in failed]
            dead = [(n, a + 1) for n, a in failed if a + 1 >= MAX_ATTEMPTS]
            waiting = {n: a + 1 for n, a in failed if a + 1 < MAX_ATTEMPTS}
            bad = {n for n, _ in failed}
            self.totals["records"] += sum(a == 0 for _, a in taken)
            self.totals["acked"] += len(taken) - len(failed)
            self.totals["dead"] += len(dead)
            self.totals["waiting"] = len(waiting)
            self.commit([n for n, _ in taken if n not in bad], waiting, dead)
            self.number += 1
        self.waiting = waiting

    def tracked(self, number, attempts):
        return {
            "_ackcore_message_id": f"m{number}",
            "_ackcore_attempt": attempts,
            **dict.fromkeys(("_ackcore_due_ms", "_ackcore_first_ms", "_ackcore_last_ms"), 0),
            "_ackcore_reason": {"type": "ValueError"},
            "_ackcore_replayed": 0,
            **self.records[number],
        }

    def commit(self, acked, waiting, dead):
        n, state = self.number, self.root / "state"
        self.record(f"{n}.plan", {"number": n})
        held = {"waiting": {}, "dead": {}}
        for name, rows in (("waiting", waiting.items()), ("dead", dead)):
            if rows:
                table = [self.tracked(*row) for row in rows]
                write = write_segments if name == "waiting" else write_table
                held[name]["lines"] = write(state, f"{n}.{name}-lines", table)
        totals = {"batches": n + 1, "spouts": {"lines": dict(self.totals)}}
        self.record(f"{n}.decision", {"number": n, "totals": totals, **held})
        rows = [row for each in acked for row in rows_of(self.records[each])]
        if rows:
            (self.sink / f"batch_id={n}").mkdir(parents=True)
            pq.write_table(pa.Table.from_pylist(rows), self.sink / f"batch_id={n}/part-0.parquet")
        self.write_letters(n, [self.letter(n, *row) for row in dead])
        self.record(f"{n}.done", {"number": n})
        for ending in ("plan", "decision", "done") if n >= 2 else ():
            self.forget(f"{n - 2}.{ending}")

    def record(self, name, body):
        self.recorded[f"batches/{name}"] = body
        write_record(self.root / "head.json/000000000001.version", {"records": self.recorded})

    def forget(self, name):
        del self.recorded[f"batches/{name}"]
        write_record(self.root / "head.json/000000000001.version", {"records": self.recorded})

    def letter(self, batch, number, attempts):
        return {
            "message_id": f"m{number}",
            "attempts": attempts,
            "error_type": "ValueError",
            "batch_id": batch,
            "payload": dict(self.records[number]),
        }

    def letters_file(self, batch):
        return self.root / "dead_letters" / "lines" / f"batch-{batch}.parquet"

    def write_letters(self, batch, letters):
        if letters:
            self.letters_file(batch).parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(pa.Table.from_pylist(letters), self.letters_file(batch))
            names = [path.name for path in self.letters_file(0).parent.glob("*.parquet")]
            files = [
                {"object": f"lines/{name}", "first": n, "last": n}
                for n, name in sorted((int(name[6:-8]), name) for name in names)
            ]
            index = self.root / "dead_letters/index.json/000000000001.version"
            write_record(index, {"spouts": {"lines": {"files": files}}})

    # What forgeries do.

    def edit_manifest(self, n, change):
        body = copy.deepcopy(self.recorded[f"batches/{n}.decision"])
        change(body)
        self.record(f"{n}.decision", body)

    def edit_totals(self, **more):
        def change(body):
            for name, by in more.items():
                body["totals"]["spouts"]["lines"][name] += by

        self.edit_manifest(self.number - 1, change)

    def edit_letters(self, change, which=0):
        """Change the letters of some micro-batch that has any; the first, or the last (-1)."""
        files = sorted(self.letters_file(0).parent.glob("*"), key=lambda p: int(p.stem[6:]))
        batch = int(files[which].stem[6:])
        letters = pq.ParquetFile(files[which]).read().to_pylist()
        self.write_letters(batch, change(letters))

    def edit_sink(self, change):
        """Change the rows of the micro-batch that has those of record 0."""
        file = self.sink / "batch_id=0/part-0.parquet"
        rows = change(pq.ParquetFile(file).read().to_pylist())
        pq.write_table(pa.Table.from_pylist(rows, pq.read_schema(file)), file)

    def edit_waiting(self, rows):
        def change(body):
            body["waiting"] = {"lines": write_segments(self.root / "state", "w", rows)}
            body["totals"]["spouts"]["lines"]["waiting"] = len(rows)

        self.edit_manifest(self.number - 1, change)

    def expected(self, **more):
        return counts.Expected(
            self.records,
            rows_of,
            dead=lambda n: n in self.poison,
            alive=lambda n: n < 2,
            message_id=lambda n: f"m{n}",
            max_attempts=MAX_ATTEMPTS,
            **more,
        )

    def read(self):
        return counts.read(self.root.parent, self.sink)


def problems(history, **arguments):
    return counts.check(history.read(), history.expected(), **arguments)


@pytest.mark.parametrize("seed", range(4))
def test_honest_counts_balance(tmp_path, seed):
    whole = History(tmp_path / "whole", seed)
    assert problems(whole) == []
    before = None
    for stop in range(1, whole.number):
        part = History(tmp_path / str(stop), seed, stop)
        found = part.read()
        assert counts.check(found, part.expected(), finished=False) == []
        assert before is None or counts.check_since(before, found) == []
        before = found
    assert counts.check_since(before, whole.read()) == []


def edited(method, change, *arguments):
    return lambda history: getattr(history, method)(change, *arguments)


def payload(letters, **values):
    return [{**each, "payload": {**each["payload"], **values}} for each in letters]


FORGERIES = {
    # The sink.
    "a row twice": (edited("edit_sink", lambda rows: rows + rows[:1]), "rows too many"),
    "a row missing": (edited("edit_sink", lambda rows: rows[1:]), "some of their rows are missing"),
    "no row of a record": (
        edited("edit_sink", lambda rows: [row for row in rows if row["id"] != 0]),
        "neither in the sink, nor waiting, nor dead",
    ),
    "a row of no record": (
        edited("edit_sink", lambda rows: [*rows, {**rows[0], "id": 999}]),
        "in the sink, unknown",
    ),
    "a row of a dead one": (
        edited("edit_sink", lambda rows: [*rows, {"id": 2, "at": 0, "word": "c"}]),
        "in the sink and dead",
    ),
    "a micro-batch that was not decided": (
        lambda h: (h.sink / "batch_id=0").rename(h.sink / "batch_id=77"),
        "written to the sink undecided",
    ),
    # The dead letters.
    "a letter twice": (edited("edit_letters", lambda d: d + d[:1]), "dead more than once"),
    "an id twice": (edited("edit_letters", lambda d: d + d[:1]), "dead under one message id"),
    "a letter missing": (
        lambda h: h.edit_letters(lambda d: d[1:] or payload(d, id=0, text="a b")),
        "not dead, and must be",
    ),
    "a letter of no record": (
        edited("edit_letters", lambda d: payload(d, id=999)),
        "dead, unknown to the source",
    ),
    "a letter with another payload": (
        edited("edit_letters", lambda d: payload(d, text="forged")),
        "dead with another payload",
    ),
    "a letter under another id": (
        edited("edit_letters", lambda d: [{**each, "message_id": "x"} for each in d]),
        "dead under a wrong message id",
    ),
    "a letter of one that must be acked": (
        edited("edit_letters", lambda d: payload(d, id=1, text="")),
        "dead, and must be ACKED",
    ),
    "too many attempts": (
        edited("edit_letters", lambda d: [{**each, "attempts": 9} for each in d]),
        "dead after too many attempts",
    ),
    "letters of no decision": (
        lambda h: h.write_letters(88, [h.letter(88, 0, 3)]),
        "dead letters undecided",
    ),
    "a decided letter is not in the store": (
        lambda h: h.edit_manifest(
            h.number - 1,
            lambda body: body["dead"].update(
                more=write_table(h.root / "state", "d", [h.tracked(0, 3)])
            ),
        ),
        "and no dead letter",
    ),
    "a letter that its batch did not decide": (
        lambda h: h.write_letters(h.number - 2, [h.letter(h.number - 2, 0, 3)]),
        "that it did not decide",
    ),
    # Those that wait.
    "waiting at the end": (lambda h: h.edit_waiting([h.tracked(0, 1)]), "still waiting"),
    "waiting and written": (lambda h: h.edit_waiting([h.tracked(0, 1)]), "in the sink and waiting"),
    "waiting and dead": (lambda h: h.edit_waiting([h.tracked(2, 1)]), "both waiting and dead"),
    "waiting twice": (lambda h: h.edit_waiting([h.tracked(1, 1)] * 2), "waiting more than once"),
    "waiting too long": (
        lambda h: h.edit_waiting([h.tracked(1, MAX_ATTEMPTS)]),
        "waiting after the last attempt",
    ),
    "waiting with another payload": (
        lambda h: h.edit_waiting([{**h.tracked(1, 1), "text": "forged"}]),
        "waiting with another payload",
    ),
    # The query's own counts.
    "one ACKED too many": (lambda h: h.edit_totals(acked=1), "the counts do not add up"),
    "acked for dead": (lambda h: h.edit_totals(acked=-1, dead=1), "are dead by the counts"),
    "silent ones forgotten": (
        lambda h: h.edit_totals(records=-9, acked=-9),
        "were read by the counts",
    ),
    "more than there are": (lambda h: h.edit_totals(records=1, acked=1), "the source has"),
    "ACKED without rows": (
        lambda h: h.edit_totals(acked=-50, records=-50),
        "ACKED by the counts",
    ),
    "one waits by the counts": (lambda h: h.edit_totals(waiting=1), "wait by the counts"),
    # The protocol.
    "no plan": (
        lambda h: h.forget(f"{h.number - 1}.plan"),
        "decided without a plan",
    ),
    "no decision": (lambda h: h.forget(f"{h.number - 1}.decision"), "done without a decision"),
    "no mark": (
        lambda h: h.forget(f"{h.number - 1}.done"),
        "planned and not done",
    ),
    "planned too early": (
        lambda h: h.record(f"{h.number + 1}.plan", {}),
        "planned before the last one was done",
    ),
}


@pytest.mark.parametrize(("forge", "message"), FORGERIES.values(), ids=FORGERIES)
def test_a_forgery_is_found(tmp_path, forge, message):
    history = History(tmp_path, seed=1)
    forge(history)
    found = problems(history)
    assert any(message in problem for problem in found), found


def test_rows_of_two_executions_are_found(tmp_path):
    history = History(tmp_path, 1)
    for file in history.sink.glob("*/*.parquet"):
        rows = [{**row, "run": "first"} for row in pq.ParquetFile(file).read().to_pylist()]
        pq.write_table(pa.Table.from_pylist(rows), file)
    expected = history.expected(tag="run")
    assert counts.check(history.read(), expected) == []
    history.edit_sink(lambda rows: [{**rows[0], "run": "second"}, *rows[1:]])
    (problem,) = counts.check(history.read(), expected)
    assert problem == "in the sink from more than one execution: 1 (0)"


@pytest.mark.parametrize(
    ("forge", "message"),
    [
        (
            lambda h: h.edit_manifest(2, lambda body: body.update(more="then")),
            "decided otherwise than before: 1 (2)",
        ),
        (
            lambda h: [h.forget(f"{n}.done") for n in (1, 2)],
            "done before, and not any more: 2 (1, 2)",
        ),
        (
            edited("edit_sink", lambda rows: rows[1:]),
            "sink rows of a finished micro-batch have changed: 1 (0)",
        ),
        (
            lambda h: [path.unlink() for path in h.root.glob("dead_letters/*/*")],
            "dead letters have gone",
        ),
        (
            lambda h: h.edit_manifest(2, lambda b: b["totals"]["spouts"]["lines"].update(acked=0)),
            "back",
        ),
    ],
)
def test_what_changes_after_it_was_recorded_is_found(tmp_path, forge, message):
    history = History(tmp_path, 5, 3)
    history.write_letters(2, [history.letter(2, 2, 3)])
    before = history.read()
    assert counts.check_since(before, history.read()) == []
    # The sink's oldest micro-batch counts as long as its mark is there.
    history.record("0.done", {"number": 0})
    before = history.read()
    forge(history)
    assert any(message in problem for problem in counts.check_since(before, history.read()))


@pytest.mark.parametrize("pattern", ["head.json/*", "state/*.arrow"])
def test_damage_is_noticed(tmp_path, pattern):
    history = History(tmp_path, 4, 2)
    (file, *_) = sorted(history.root.glob(pattern), reverse=True)
    file.write_bytes(file.read_bytes()[:-40] + b"x" * 40)
    with pytest.raises(counts.Damaged):
        history.read()


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
