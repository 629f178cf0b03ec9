"""The length of each table stands in the record that names it, and whoever reads it compares it."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pyarrow as pa
import pytest
from checkpoints import OPEN, decision, died, records, roots

from ackcore.spark.base.checksummed import write_batches
from ackcore.spark.base.errors import CheckpointCorrupt
from ackcore.spark.base.schemas import FailedFile
from ackcore.spark.checkpoint.dead_records import Dead
from ackcore.spark.checkpoint.decisions import BatchDecision
from ackcore.spark.checkpoint.refusals import REFUSED, Refusal, Refusals
from ackcore.spark.checkpoint.table_cache import TableCache
from ackcore.spark.engine import decide as decide_module
from ackcore.spark.stores.opening import open_store
from ackcore.spark.stores.run_files import making_in, read_file
from ackcore.spark.tasks.failed_rows import FailedRows
from ackcore.spark.tasks.row_files import COUNTS, PLACE, ROOT_ID

RECORDS = ["decision", "refused-0", "refused"]


@pytest.fixture(params=["disk", "bucket"])
def place(request, checkpoint):
    return request.getfixturevalue("bucket") if request.param == "bucket" else checkpoint


def tables_of(place):
    """The tables as another process has them: nothing of them is known."""
    return TableCache(open_store(f"{place}/ackcore", "path"), 9)


def lengths_in(place):
    """The lengths of all tables that are there, by name."""
    found = open_store(f"{place}/ackcore", "path").list("state")
    return {entry.key.removeprefix("state/"): entry.size for entry in found}


def written(state):
    """A file of five records that a task of a run has left; and how many bytes it has."""
    state.write_plan(state.make_plan(0, 0))
    work, table = state.runs.new(0), records(0, 5)
    with making_in(work) as directory:
        name = write_batches(directory, "waiting-lines", table.schema, table.to_batches())
    path = os.path.join(work, name)
    return work, path, read_file(path).size


def decide(state):
    """Have every kind of table on record."""
    work, path, nbytes = written(state)
    # Of five there was room for three; what the driver wrote itself waits and is dead, too.
    waiting = state.waiting(None).plus("lines", FailedFile("lines", False, path, 3, nbytes, 1000))
    waiting = waiting.plus("clicks", records(7, 1, due_ms=10**9))
    dead = Dead(
        {"lines": [FailedFile("lines", False, path, 2, nbytes, start=3, no_room=100), died(8, 1)]}
    )
    state.write_decision(decision(0, waiting, dead, nonacked=roots(4), work=os.path.basename(work)))
    state.refusals.add(0, 0, Refusal("out", True, pa.Table.from_pylist([], schema=REFUSED)))
    state.close_refusals(state.decision(0), {"lines": records(9, 1)}, {}, {})
    return {name: state.records.read(f"batches/0.{name}") for name in RECORDS}


def read_all(bodies, cache):
    """Read what the records name, as a driver does that goes on from them."""
    records = SimpleNamespace(read=lambda name: bodies.get(name.split(".")[1]))
    refusals = Refusals(records, cache)
    found = refusals.amended(BatchDecision.of(cache, bodies["decision"]))
    for spout in found.waiting:
        found.waiting.tables(spout)
    for check in found.all_dead.checks():
        check()
    return len(refusals.of(0)), found.waiting.rows(), sum(map(len, found.all_dead.values()))


def test_each_table_is_refused_that_has_another_length(place):
    with OPEN(place) as state:
        bodies = decide(state)
    told = {file: n for body in bodies.values() for file, n in body["table_bytes"].items()}
    assert told == lengths_in(place)
    assert {name.split(".")[2] for name in told} == {
        *("waiting-lines", "waiting-clicks", "dead-lines", "nonacked", "refused-0")
    }
    assert read_all(bodies, tables_of(place)) == (1, 4, 4)
    for name, body in bodies.items():
        for file, n in body["table_bytes"].items():
            wrong = {**body, "table_bytes": {**body["table_bytes"], file: n + 1}}
            with pytest.raises(CheckpointCorrupt, match=rf"it has {n} bytes instead of {n + 1}\."):
                read_all({**bodies, name: wrong}, tables_of(place))


def test_what_waits_on_keeps_its_length_on_record(place):
    """The driver that goes on has read it in a record only."""
    with OPEN(place) as state:
        bodies = decide(state)
        state.write_done(0)
    with OPEN(place) as state:
        plan = state.make_plan(1, 0)
        state.write_plan(plan)
        state.write_decision(decision(1, state.split_due(plan).rest))
        body = state.records.read("batches/1.decision")
    waiting = {each["file"] for some in body["waiting"].values() for each in some}
    assert len(waiting) == 2
    before = bodies["decision"]["table_bytes"]
    assert body["table_bytes"] == {file: before[file] for file in waiting}


@pytest.mark.parametrize("kind", ["waiting", "dead", "letters"])
def test_a_file_is_not_taken_over_that_is_not_as_its_task_told(place, kind):
    with OPEN(place) as state:
        work, path, n = written(state)
        waiting, dead = state.waiting(None), Dead({})
        if kind == "waiting":
            waiting = waiting.plus("lines", FailedFile("lines", False, path, 5, n + 1, 1000))
        else:
            parts = [FailedFile("lines", kind == "letters", path, 5, n + 1)]
            dead = Dead({"lines": parts})
        given = decision(0, waiting, dead, work=os.path.basename(work))
        said = rf"has {n} bytes instead of {n + 1}\. Start aga"
        with pytest.raises(CheckpointCorrupt, match=said):
            state.write_decision(given)
        assert state.decision(0) is None


def test_what_a_task_told_of_a_file_goes_along_with_it():
    waits = FailedFile("lines", False, "waiting-lines.0.arrow", 5, 321, 1000, 0)
    dies = FailedFile("lines", True, "dead-lines.0.parquet", 4, 123, 0, 0)
    found = pa.table(
        {ROOT_ID: pa.array(range(9), pa.int64()), PLACE: pa.nulls(9), COUNTS: [True] * 9}
    )
    rows = FailedRows((waits, dies), {"lines": found}, {}, 0)
    (waiting,), (dead,) = decide_module._parts(rows, "lines")
    assert (waiting.nbytes, dead.nbytes, dead.dead) == (321, 123, True)
    _, rest = decide_module._cut(waiting, 2, 2)
    assert (len(rest), rest.nbytes, rest.dead) == (3, 321, False)
