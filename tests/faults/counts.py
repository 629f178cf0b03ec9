"""The counts of a finished or a killed query, from what it left on disk and from nothing else.

Nothing of ackcore is imported here: the checkpoint's JSON and Arrow, the dead letters and the
sink's Parquet are read as any other program would, and compared with a model in plain Python of
what the topology leaves for each record.  What must hold:

* every source record has exactly one recorded decision: ACKED, waiting or DEAD, and in the end only
  ACKED or DEAD;
* the sink's rows are exactly the rows of ACKED records, each as often as the model says;
* the dead letters are exactly the dead, each once, with its payload;
* a decision that was recorded stays as it is, whoever dies.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

EXAMPLES = 5


class Damaged(Exception):
    """A file is not as whoever wrote it meant it to be."""


class Held(NamedTuple):
    """A record that waits, or is dead."""

    key: Any
    spout: str
    message_id: str
    attempts: int
    error_type: str
    payload: dict[str, Any]
    batch_id: int | None  # of a dead one


class Decided(NamedTuple):
    """The records of one micro-batch."""

    number: int
    done: bool
    manifest: dict[str, Any]
    dead: tuple[str, ...]  # message ids


@dataclass(frozen=True)
class Expected:
    """The expected state: the source's records, and the rows of each of them.

    Parameters
    ----------
    records : mapping
        Payload of each record by its key, which is the value of its column ``key``.
    rows : callable
        Given a payload, the rows that it leaves in the sink if it is ACKED, as dicts; with the
        column ``key`` among them.
    key : str
        Name of the key's column, in the source and in the sink.
    tag : str, optional
        A column of the sink that may hold anything, but the same for all rows of a record: what
        one execution of it has left.
    dead, alive : callable, optional
        Of a key, whether it must be DEAD, or ACKED.
    message_id : callable, optional
        Of a key, its message id.
    max_attempts : int, optional
        Executions that a dead record had, unless it was rejected.
    copies : callable, optional
        Of a key, how many records of the source have it; one of them at most has rows.
    """

    records: Mapping[Any, Mapping[str, Any]]
    rows: Callable[[Mapping[str, Any]], list[dict[str, Any]]]
    key: str = "id"
    tag: str | None = None
    dead: Callable[[Any], bool] = lambda key: False
    alive: Callable[[Any], bool] = lambda key: False
    message_id: Callable[[Any], str] | None = None
    max_attempts: int | None = None
    copies: Callable[[Any], int] = lambda key: 1

    def records_of(self, keys: Iterable[Any]) -> int:
        """Return the number of records of the source that have these keys."""
        return sum(map(self.copies, keys))


@dataclass(frozen=True)
class Found:
    """The state on the disk."""

    planned: tuple[int, ...]
    done: tuple[int, ...]
    decided: dict[int, Decided]
    waiting: list[Held]
    dead: list[Held]
    written: dict[int, list[dict[str, Any]]]  # rows of the sink by micro-batch
    totals: dict[str, int] = field(default_factory=dict)  # of all spouts together

    @property
    def last(self) -> Decided | None:
        """The newest decision."""
        return self.decided[max(self.decided)] if self.decided else None


# ----------------------------------------------------------------------------------- reading


def read_record(path: Path) -> dict[str, Any]:
    """One line of JSON and, on the next, its checksum."""
    line, _, rest = path.read_bytes().partition(b"\n")
    if rest.split() != [b"blake2b", blake2b(line, digest_size=16).hexdigest().encode()]:
        raise Damaged(f"{path} and its checksum do not fit")
    record: dict[str, Any] = json.loads(line)
    return record


def read_table(path: Path) -> pa.Table:
    """An Arrow file with its checksum in its name."""
    data = path.read_bytes()
    if blake2b(data, digest_size=16).hexdigest() != path.name.split(".")[-2]:
        raise Damaged(f"{path} and the checksum in its name do not fit")
    return pa.ipc.open_file(pa.BufferReader(data)).read_all()


def records(root: Path) -> dict[str, dict[str, Any]]:
    """The records that the head has, by name; a large one is a file of its own."""
    head = _newest(root / "head.json")
    found = {} if head is None else read_record(head)["records"]
    for name, body in found.items():
        if "object" in body:
            data = (root / body["object"]).read_bytes()
            if blake2b(data, digest_size=16).hexdigest() != body["blake2b"]:
                raise Damaged(f"{root / body['object']} and its checksum do not fit")
            found[name] = json.loads(data)
    return found


def numbers(found: dict[str, dict[str, Any]], ending: str) -> tuple[int, ...]:
    """The micro-batches that have a record of a kind."""
    matches = (re.fullmatch(rf"batches/(\d+)\.{ending}", name) for name in found)
    return tuple(sorted(int(each[1]) for each in matches if each))


def _newest(path: Path) -> Path | None:
    """An object: on a disk a directory with its versions, in a bucket a file."""
    newest = max(path.glob("*.version"), default=None) if path.is_dir() else path
    return newest if newest is not None and newest.exists() else None


def _held(table: pa.Table, spout: str, key: str) -> Iterator[Held]:
    """Rows of the checkpoint: the columns of tracking, then the source's."""
    for row in table.to_pylist():
        tracking = {name: row.pop(name) for name in [*row] if name.startswith("_ackcore_")}
        message_id, attempt, reason = (
            tracking[f"_ackcore_{name}"] for name in ("message_id", "attempt", "reason")
        )
        yield Held(row.get(key), spout, message_id, attempt, reason["type"], row, None)


def letter_files(directory: Path) -> Iterator[tuple[Path, int, int]]:
    """Files that the index names, with their first and last micro-batch."""
    newest = _newest(directory / "index.json")
    if newest is not None:
        for spout in read_record(newest)["spouts"].values():
            for each in spout["files"]:
                yield directory / each["object"], each["first"], each["last"]


def _letters(directory: Path, key: str) -> Iterator[Held]:
    for path, first, last in letter_files(directory):
        for row in pq.ParquetFile(path).read().to_pylist():
            if not first <= (number := row["batch_id"]) <= last:
                raise Damaged(f"{path} has a letter of micro-batch {number}")
            payload = row["payload"]
            yield Held(
                payload.get(key),
                path.parent.name,
                row["message_id"],
                row["attempts"],
                row["error_type"],
                payload,
                number,
            )


def written(directory: Path) -> dict[int, list[dict[str, Any]]]:
    found = {}
    for number in _numbers_of(directory):
        files = sorted((directory / f"batch_id={number}").glob("*.parquet"))
        found[number] = [row for path in files for row in pq.ParquetFile(path).read().to_pylist()]
    return found


def _numbers_of(directory: Path) -> list[int]:
    return [int(path.name.split("=")[1]) for path in sorted(directory.glob("batch_id=*"))]


def _message_ids(directory: Path, entry: dict[str, Any]) -> list[str]:
    """Return the dead of a table, from a row on, or of a whole file of dead letters."""
    path = directory / entry["file"]
    if path.suffix == ".parquet":
        table = pq.ParquetFile(path).read(["message_id"])
        if (len(table), path.stat().st_size) != (entry["rows"], entry["nbytes"]):
            raise Damaged(f"{path} has {len(table)} rows and {path.stat().st_size} bytes")
        return table["message_id"].to_pylist()
    table = read_table(path).slice(entry.get("start", 0), entry["rows"])
    return table["_ackcore_message_id"].to_pylist()


def read(
    checkpoint: str | Path,
    sink: str | Path,
    *,
    key: str = "id",
    dead_letters: str | Path | None = None,
) -> Found:
    """Read whatever a query has left.

    Raises
    ------
    Damaged
        If a file that was recorded is not whole.
    """
    root = Path(checkpoint, "ackcore")
    recorded = records(root)
    planned, done = numbers(recorded, "plan"), numbers(recorded, "done")
    decided = {}
    corrected = {}
    waiting: list[Held] = []
    totals: Counter[str] = Counter()
    for number in numbers(recorded, "decision"):
        manifest = recorded[f"batches/{number}.decision"]
        # What sinks refused makes more of them dead, after the decision.
        refused = recorded.get(f"batches/{number}.refused")
        after = [] if refused is None else [refused]
        corrected[number] = (after or [manifest])[0]["totals"]
        dead = [
            message_id
            for record in [manifest, *after]
            for entries in record["dead"].values()
            for entry in (entries if isinstance(entries, list) else [entries])
            for message_id in _message_ids(root / "state", entry)
        ]
        decided[number] = Decided(number, number in done, manifest, tuple(dead))
    if decided:
        last = decided[max(decided)].manifest
        segments = [(spout, each) for spout, some in last["waiting"].items() for each in some]
        for spout, entry in segments:
            table = read_table(root / "state" / entry["file"])
            if len(table) != entry["rows"]:
                raise Damaged(f"{entry['file']} has {len(table)} rows and not {entry['rows']}")
            waiting += _held(table.slice(entry["start"]), spout, key)
        for account in corrected[max(decided)]["spouts"].values():
            totals.update(account)
    letters = Path(dead_letters) if dead_letters is not None else root / "dead_letters"
    return Found(
        planned,
        done,
        decided,
        waiting,
        list(_letters(letters, key)),
        written(Path(sink)),
        dict(totals),
    )


# ----------------------------------------------------------------------------------- checking


class _Problems(list[str]):
    def say(self, what: str, about: Any = ()) -> None:
        """Add a problem; with a collection, only if there is anything in it."""
        some = list(about)
        shown = ", ".join(map(str, some[:EXAMPLES])) + (" ..." if len(some) > EXAMPLES else "")
        if some:
            self.append(f"{what}: {len(some)} ({shown})")


def check(found: Found, expected: Expected, *, finished: bool = True) -> list[str]:
    """Return what is wrong; nothing if the counts balance.

    Parameters
    ----------
    found : Found
        What is on the disk.
    expected : Expected
        What should be.
    finished : bool, default True
        Whether the query has come to the end of its source and of all retries.
    """
    problems = _Problems()
    _check_protocol(problems, found, finished)
    _check_held(problems, found, expected)
    _check_sink(problems, found, expected, finished)
    _check_totals(problems, found, expected, finished)
    return problems


def _check_protocol(problems: _Problems, found: Found, finished: bool) -> None:
    """Plan, decision and mark come in this order, and nothing is acted on before the decision."""
    newest = max(found.planned, default=-1)
    problems.say("done without a decision", sorted({*found.done} - {*found.decided}))
    problems.say("decided without a plan", sorted({*found.decided} - {*found.planned}))
    problems.say(
        "planned before the last one was done",
        [n for n in found.planned if n > 0 and n - 1 not in found.done and n == newest],
    )
    last = found.last
    known = -1 if last is None else last.number
    problems.say("written to the sink undecided", [n for n in found.written if n > known])
    problems.say(
        "dead letters undecided", sorted({h.batch_id for h in found.dead if h.batch_id > known})
    )
    for number, decided in sorted(found.decided.items()):
        stored = Counter(h.message_id for h in found.dead if h.batch_id == number)
        missing, extra = Counter(decided.dead) - stored, stored - Counter(decided.dead)
        if decided.done:
            problems.say(f"dead in {number} and no dead letter", missing)
        problems.say(f"dead letters of {number} that it did not decide", extra)
    if finished:
        problems.say("planned and not done", [n for n in found.planned if n not in found.done])


def _check_held(problems: _Problems, found: Found, expected: Expected) -> None:
    """Each record waits once, or is dead once, with its own payload."""
    for name, held in (("waiting", found.waiting), ("dead", found.dead)):
        keys = Counter(h.key for h in held)
        copies = expected.copies
        problems.say(f"{name} more than once", [key for key, n in keys.items() if n > copies(key)])
        ids = Counter(h.message_id for h in held if copies(h.key) == 1)
        problems.say(f"{name} under one message id", [i for i, n in ids.items() if n > 1])
        problems.say(
            f"{name}, unknown to the source", [k for k in keys if k not in expected.records]
        )
        problems.say(
            f"{name} with another payload",
            [h.key for h in held if expected.records.get(h.key, h.payload) != h.payload],
        )
        if expected.message_id is not None:
            problems.say(
                f"{name} under a wrong message id",
                [h.key for h in held if h.message_id != expected.message_id(h.key)],
            )
    dead = {h.key for h in found.dead}
    problems.say("both waiting and dead", _single(expected, dead & {h.key for h in found.waiting}))
    problems.say("dead, and must be ACKED", [key for key in dead if expected.alive(key)])
    most = expected.max_attempts
    if most is not None:
        problems.say(
            "dead after too many attempts", [h.key for h in found.dead if h.attempts > most]
        )
        problems.say(
            "waiting after the last attempt", [h.key for h in found.waiting if h.attempts >= most]
        )


def _check_sink(problems: _Problems, found: Found, expected: Expected, finished: bool) -> None:
    """The rows of a record are all there or not at all, and only if it is ACKED."""
    key, tag = expected.key, expected.tag
    rows: dict[Any, Counter[tuple[Any, ...]]] = {}
    tags: dict[Any, set[Any]] = {}
    for row in (row for written in found.written.values() for row in written):
        rows.setdefault(row[key], Counter())[_plain(row, tag)] += 1
        if tag is not None:
            tags.setdefault(row[key], set()).add(row[tag])
    waiting, dead = {h.key for h in found.waiting}, {h.key for h in found.dead}
    problems.say(
        "in the sink, unknown to the source", [k for k in rows if k not in expected.records]
    )
    problems.say("in the sink and waiting", _single(expected, waiting & rows.keys()))
    problems.say("in the sink and dead", _single(expected, dead & rows.keys()))
    problems.say(
        "in the sink from more than one execution", [k for k, t in tags.items() if len(t) > 1]
    )
    lacks, exceeds, absent = [], [], []
    for each, payload in expected.records.items():
        wanted = Counter(_plain(row, tag) for row in expected.rows(payload))
        got = rows.get(each)
        if got is None:
            if wanted and each not in waiting and each not in dead:
                absent.append(each)
            continue
        if wanted - got:
            lacks.append(each)
        if got - wanted:
            exceeds.append(each)
    problems.say("some of their rows are missing in the sink", lacks)
    problems.say("rows too many in the sink", exceeds)
    if finished:
        problems.say("neither in the sink, nor waiting, nor dead", absent)


def _single(expected: Expected, keys: Iterable[Any]) -> list[Any]:
    return sorted(key for key in keys if expected.copies(key) == 1)


def _plain(row: Mapping[str, Any], tag: str | None) -> tuple[Any, ...]:
    return tuple((name, row[name]) for name in sorted(row) if name != tag)


def _check_totals(problems: _Problems, found: Found, expected: Expected, finished: bool) -> None:
    """The counts that the query keeps are those of the files."""
    if not found.totals:
        if finished:
            problems.append("no counts were kept")
        return
    totals, size = found.totals, expected.records_of(expected.records)
    records, acked = totals["records"], totals["acked"]
    last = found.last
    assert last is not None
    if totals["waiting"] != len(found.waiting):
        problems.append(
            f"{totals['waiting']} wait by the counts, {len(found.waiting)} by the files"
        )
    if last.done and totals["dead"] != len(found.dead):
        problems.append(
            f"{totals['dead']} are dead by the counts, {len(found.dead)} by the letters"
        )
    if records != acked + totals["waiting"] + totals["dead"]:
        problems.append(f"the counts do not add up: {totals}")
    if records > size:
        problems.append(f"{records} were read by the counts, the source has {size}")
    if last.done:
        present = {row[expected.key] for written in found.written.values() for row in written}
        silent = [key for key, p in expected.records.items() if not expected.rows(p)]
        if not len(present) <= acked <= expected.records_of({*present, *silent}):
            problems.append(
                f"{acked} ACKED by the counts; {len(present)} have rows, {len(silent)} have none"
            )
    if finished:
        problems.say("still waiting", [h.key for h in found.waiting])
        if records != size:
            problems.append(f"{records} were read by the counts, the source has {size}")
        dead = {h.key for h in found.dead}
        problems.say(
            "not dead, and must be",
            [k for k in expected.records if expected.dead(k) and k not in dead],
        )


def check_state(
    found: Found,
    tables: Mapping[str, list[dict[str, Any]]],
    closed: Mapping[int, list[dict[str, Any]]],
    window_s: int,
) -> list[str]:
    """Return how tables differ from the fold of the sink's rows, and look-ups from the tables.

    Parameters
    ----------
    found : Found
        What is on the disk; the sink's rows have ``word``, ``id``, ``ts``, and in ``seen`` what
        their bolt found in the table "words".
    tables : mapping
        The rows of the tables: "words" has ``n`` and ``ids``, number and sum, by ``word``, and
        "times" the list ``ids`` by ``word`` and window.
    closed : mapping
        The rows of closed windows of "times", by micro-batch.
    window_s : int
        The size of a window.
    """
    problems = _Problems()
    newest = max(found.done, default=-1)
    words: dict[str, tuple[int, int]] = {}
    windows: dict[tuple[str, int], list[int]] = {}
    for number, rows in sorted(found.written.items()):
        wrong = [row["id"] for row in rows if row["seen"] != words.get(row["word"], (None,))[0]]
        problems.say(f"looked up otherwise than the table was before {number}", wrong)
        for row in rows if number <= newest else ():
            n, ids = words.get(row["word"], (0, 0))
            words[row["word"]] = n + 1, ids + row["id"]
            start = int(row["ts"].timestamp()) // window_s * window_s
            windows.setdefault((row["word"], start), []).append(row["id"])
    counted = Counter((row["word"], (row["n"], row["ids"])) for row in tables["words"])
    problems.say("folded too often", counted - Counter(words.items()))
    problems.say("not folded", Counter(words.items()) - counted)
    emitted = [row for number, rows in closed.items() if number <= newest for row in rows]
    of_windows = Counter(
        (row["word"], int(row["window_start"].timestamp()), *sorted(row["ids"]))
        for row in [*emitted, *tables["times"]]
    )
    expected = Counter((*key, *sorted(ids)) for key, ids in windows.items())
    problems.say("in windows too often", of_windows - expected)
    problems.say("not in their windows", expected - of_windows)
    return problems


def check_since(before: Found, after: Found) -> list[str]:
    """Return which of the recorded decisions have changed between two looks at one checkpoint."""
    problems = _Problems()
    both = before.decided.keys() & after.decided.keys()
    problems.say(
        "decided otherwise than before",
        sorted(n for n in both if before.decided[n].manifest != after.decided[n].manifest),
    )
    newest = max(after.done, default=-1)
    problems.say("done before, and not any more", [n for n in before.done if n > newest])
    sunk = {n: before.written[n] for n in before.done if n in before.written}
    problems.say(
        "sink rows of a finished micro-batch have changed",
        [n for n, rows in sunk.items() if _multiset(rows) != _multiset(after.written.get(n, []))],
    )
    gone = Counter(h.message_id for h in before.dead) - Counter(h.message_id for h in after.dead)
    problems.say("dead letters have gone", gone)
    for name in ("records", "acked", "dead"):
        if before.totals.get(name, 0) > after.totals.get(name, 0):
            problems.append(f"{name}: the counts went back from {before.totals[name]}")
    return problems


def _multiset(rows: list[dict[str, Any]]) -> Counter[tuple[Any, ...]]:
    return Counter(_plain(row, None) for row in rows)
