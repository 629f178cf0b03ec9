"""Checkpoints to try things on, and a death that comes at any file operation."""

from __future__ import annotations

import json
import os
import stat
import sys
from dataclasses import dataclass
from hashlib import blake2b

import pyarrow as pa

from ackcore.spark.base.checksummed import batches_of, write_batches
from ackcore.spark.base.schemas import REASON, REASON_TYPE, TRACKING
from ackcore.spark.checkpoint.decisions import ROOT_IDS, BatchDecision
from ackcore.spark.checkpoint.state import State
from ackcore.spark.checkpoint.waiting import Waiting
from ackcore.spark.dead_letters.checkpoints import checkpoint_at, checkpoint_of, store_of
from ackcore.spark.dead_letters.store import DeadLetters
from ackcore.spark.engine.progress import Account, Counts
from ackcore.topology.tuples import Reason

#: What the records have of which there are dead letters.
VALUE = pa.schema([("value", pa.string())])


@dataclass
class Spout:
    tracked: bool = True


class Topology:
    """Return the facts that the state reads of a topology."""

    def __init__(self, bolts=("count",), **spouts):
        self.tables = {}
        self.spouts = {name: Spout() for name in spouts}
        self.schemas = {
            name: pa.schema([(field, pa.string()) for field in fields])
            for name, fields in spouts.items()
        }
        self.structure = {
            "spouts": {name: {"fields": list(fields)} for name, fields in spouts.items()},
            "bolts": {name: {"inputs": ["lines"]} for name in bolts},
            "sinks": {},
        }
        text = json.dumps(self.structure, sort_keys=True).encode()
        self.fingerprint = blake2b(text, digest_size=8).hexdigest()


TOPOLOGY = Topology(lines=("value",), clicks=("value",))


def write_table(directory, name, table):
    """Write a table as an Arrow file with its checksum in its name; return that name."""
    return write_batches(directory, name, table.schema, batches_of(table))


def OPEN(checkpoint, topology=TOPOLOGY, kind="batch", **rest):
    rest = {"sources": topology.schemas, "clock_ms": 0, **rest}
    if kind == "stream" and "offsets" not in rest:
        rest["offsets"] = checkpoint / "offsets"
    state = State.open(checkpoint, topology, kind=kind, **rest)
    state.record_topology()
    return state


def tracked(source, **known):
    """Rows of a source as they wait or are dead; columns of tracking that are not given are 0.

    ``known``: by column of tracking, without its prefix, a value of each row or one of all.
    """
    n, columns = len(source), []
    known = {"reason": Reason("split", "ValueError", "no")._asdict(), **known}
    for field in TRACKING:
        values = known.pop(field.name.removeprefix("_ackcore_"), 0)
        values = values if isinstance(values, (list, range)) else [values] * n
        # Arrow makes text of 0, but before 21 casts no struct to another order of fields.
        made = field.type if pa.types.is_struct(field.type) else None
        columns.append(pa.array(values, made).cast(field.type))
    assert not known
    return pa.table([*columns, *source.columns], schema=pa.schema([*TRACKING, *source.schema]))


def records(first, n, due_ms=1000, attempt=1, step=1):
    """Rows ``first`` to ``first + n``; row k is due at ``due_ms + k * step``."""
    rows = range(first, first + n)
    return tracked(
        pa.table({"value": pa.array([f"line {row}" for row in rows], pa.string())}),
        message_id=[f"id-{row}" for row in rows],
        attempt=attempt,
        due_ms=[due_ms + row * step for row in rows],
        first_ms=rows,
        last_ms=[row + 1 for row in rows],
    )


BAD = Reason("split", "ValueError", "no\x1fgood ☠")
SLOW = Reason("enrich", "TimeoutError", "3 s", final=True)


def died(first, n, reasons=(BAD,), attempt=5):
    """Rows as they become dead, one for each of the reasons in turn."""
    table = records(first, n, due_ms=0, attempt=attempt, step=0)
    told = [reasons[row % len(reasons)]._asdict() for row in range(n)]
    at = table.column_names.index(REASON)
    return table.set_column(at, TRACKING.field(at), pa.array(told, REASON_TYPE))


def roots(*ids):
    return pa.table([pa.array(ids, pa.int64())], schema=ROOT_IDS)


def ids(table):
    return table["_ackcore_message_id"].to_pylist()


def decision(number, waiting=None, dead=None, **rest):
    if not isinstance(waiting, Waiting):
        waiting = Waiting({name: [table] for name, table in (waiting or {}).items()})
    return BatchDecision(number, waiting, dead or {}, rest.pop("nonacked", roots()), **rest)


def end_one(state, number, waiting=None, dead=None, prune=False, **rest):
    """Write the decision of a micro-batch, and that it is done."""
    state.write_decision(decision(number, waiting, dead, **rest))
    state.write_done(number)
    if prune:
        state.prune(number)


def run_one(state, number, waiting=None, dead=None, now_ms=0, **rest):
    state.write_plan(state.make_plan(number, now_ms))
    end_one(state, number, waiting, dead, **rest)


def with_dead_letters(path, message="no", records_of=None):
    """Make a checkpoint with seven dead letters of two micro-batches, and three that wait.

    ``message`` is what the error of two of them says; ``records_of`` their records, else lines.
    """
    slow, bad = Reason("enrich", "TimeoutError", "3 s"), Reason("split", "ValueError", message)
    spouts = {"lines": Account(10, 0, 0, 7, 3, 4)}
    topology = Topology(lines=("value",), clicks=("value",))
    topology.structure["bolts"] = {
        "split": {"inputs": [["lines", "default", "shuffle"]], "streams": {}},
        "enrich": {
            "inputs": [
                ["split", "default", "fields", "word"],
                ["clicks", "default", "local_or_shuffle"],
            ],
            "streams": {},
        },
    }
    topology.structure["sinks"] = {"words": ["enrich", "default"]}
    with OPEN(path, topology) as state:
        columns = {"lines": pa.schema([("value", pa.string())])}
        letters = DeadLetters.checked(path, state.deployment_key, None, columns, state.records)()
        for number, dead in enumerate([died(0, 4, (bad, slow)), died(4, 3, (slow,))]):
            if records_of is not None:
                texts = pa.array([records_of] * len(dead))
                dead = dead.set_column(dead.num_columns - 1, "value", texts)
            letters.write(number, {"lines": dead})
            totals = Counts(number + 1, spouts).to_json()
            run_one(state, number, {"lines": records(20, 3)}, {"lines": dead}, totals=totals)
    return path


def recorded(checkpoint):
    """The records of a checkpoint, by name, as who looks at it sees them."""
    return checkpoint_at(str(checkpoint)).records()


def damage_head(checkpoint, change):
    """Change the bytes of the newest version of the head."""
    path = max((checkpoint / "ackcore/head.json").iterdir())
    path.write_bytes(change(path.read_bytes()))
    return path


def ask(checkpoint, request="r1", spout="lines", table=None):
    """Ask for dead letters again; return the request's name."""
    store = store_of(checkpoint)
    if store.owner() is None:
        meta = checkpoint_of(store).meta()
        about = {"deployment_key": meta["deployment_key"], "checkpoint": str(checkpoint)}
        store.own(about, lambda: None)
    list(store.notes())
    table = records(77, 1, attempt=0) if table is None else table
    note = {"request": request, "at_ms": 0, "rows": {}}
    store.send(request, note, {spout: [table]})
    (name,) = [name for name in store.requested() if name.startswith(f"{request}.{spout}.")]
    return name


def request_path(checkpoint, name):
    """Where the file of a request is."""
    (path,) = (checkpoint / "ackcore/dead_letters/.requests").glob(f"*/{name}")
    return path


def withdraw(checkpoint, name):
    """Have the query go on without a request, as errors say."""
    mark = checkpoint / f"ackcore/dead_letters/.requests/{name}.withdrawn"
    mark.touch()
    return mark


class Killed(KeyboardInterrupt):
    """The process is no more; nothing that would clean up may work."""


def ours(frame):
    """The lines of ours that led to a call, the innermost first."""
    while frame is not None:
        if "ackcore" in frame.f_code.co_filename:
            yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


class Killer:
    """Dies at the n-th operation that changes a file, and stays dead.

    Armed with None it lets all be done; ``places`` has then for each place in the code, by the
    lines that led there, the first and the last of its operations.
    """

    EVENTS = frozenset({"os.rename", "os.link", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"})

    def __init__(self):
        self.active, self.left, self.count = False, None, 0
        self.places = {}
        sys.addaudithook(self._hook)

    def arm(self, left):
        self.active, self.left, self.count = True, left, 0
        if left is None:
            self.places = {}

    def disarm(self):
        self.active = False

    def _hook(self, event, args):
        if self.active and (event in self.EVENTS or (event == "open" and self._writes(args))):
            self.note()
            self.step()

    def note(self):
        """Note where the operation that comes next was called."""
        if self.left is None:
            place, now = tuple(ours(sys._getframe(1))), self.count + 1
            self.places[place] = self.places.get(place, (now,))[0], now

    @staticmethod
    def _writes(args):
        return bool(args[2] and args[2] & (os.O_WRONLY | os.O_RDWR))

    def step(self):
        self.count += 1
        if self.left is not None and self.count > self.left:
            raise Killed

    def fsync(self, handle):
        """Whoever dies before it has synced half a file."""
        if not self.active:
            return
        try:
            self.step()
        except Killed:
            self.disarm()
            if stat.S_ISREG(os.fstat(handle).st_mode):
                os.ftruncate(handle, os.fstat(handle).st_size // 2)
            self.active = True
            raise
