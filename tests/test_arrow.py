"""Arrow batches in and out: nothing copied that need not be, nothing taken that no ledger holds."""

import numpy as np
import pytest

from ackcore import ACK, FAIL, RESET, Status
from ackcore.testing.scripts import Clock, entries_of, int32s, int64s

pa = pytest.importorskip("pyarrow")
arrow = pytest.importorskip("ackcore.arrow")


def used(Ledger, clock):
    ledger = Ledger(clock=clock)
    roots = int64s([0, -1, 2**63 - 1, 4, 4])
    ledger.fold(roots, int64s([1, 2, 3, 4, 4]), int32s([2**31 - 1, ACK, FAIL, 0, 7]))
    return ledger


@pytest.mark.parametrize("clock", [None, Clock(-5)])
def test_entries_go_out_and_in(Ledger, clock):
    entries = used(Ledger, clock).entries()
    batch = arrow.entries_to_batch(entries)
    assert batch.schema == arrow.ENTRY_SCHEMA
    assert batch["first_ms"].null_count == (0 if clock else len(entries))
    back = arrow.entries_from_batch(batch.select(batch.schema.names[::-1]))
    assert sorted(back) == sorted(entries)
    assert sorted(Ledger.from_entries(back, clock=clock).entries()) == sorted(entries)


def test_entries_share_the_batch_s_memory(Ledger):
    batch = arrow.entries_to_batch(used(Ledger, None).entries())
    entries = arrow.entries_from_batch(batch)
    for name, column in (("root_id", entries.root_ids), ("flags", entries.flags)):
        assert column.__array_interface__["data"][0] == batch[name].buffers()[1].address


@pytest.mark.parametrize(
    ("column", "values", "error", "words"),
    [
        ("val", pa.array([1, None]), ValueError, "saved: val must not hold nulls, got 1 of 2 rows"),
        ("val", pa.array([1.0, 2.0]), TypeError, "saved: val must hold integers, got Arrow's doub"),
        ("task", pa.array([1, 2**31]), ValueError, "saved: task must fit int32: "),
        ("task", pa.array([1, -1]), ValueError, "saved: inits must be > 0 exactly where"),
        ("flags", pa.array([0, -1], pa.int8()), ValueError, r"saved: flags must be in 0\.\.3"),
        ("first_ms", pa.array([1, None]), ValueError, "saved: first_ms must not hold nulls"),
    ],
)
def test_rows_that_no_ledger_holds_are_refused(column, values, error, words):
    batch = arrow.entries_to_batch(entries_of([(n, 1, 4, 1, 0, 0, 5, 5) for n in range(2)]))
    changed = batch.set_column(batch.schema.names.index(column), column, values)
    with pytest.raises(error, match=words):
        arrow.entries_from_batch(changed, "saved")
    with pytest.raises(TypeError, match=f"entries must have a column {column}, got "):
        arrow.entries_from_batch(batch.drop_columns([column]))


def test_decisions_go_out_with_the_names_of_their_statuses(Ledger):
    settled = used(Ledger, Clock(7)).settle(now_ms=100, timeout_ms=5)
    batch = arrow.settled_to_batch(settled)
    rows = [(row["root_id"], row["status"], row["last_ms"]) for row in batch.to_pylist()]
    assert sorted(rows) == [
        (-1, "ORPHAN", 7),
        (0, "EXPIRED", 7),
        (4, "ANOMALY", 7),
        (2**63 - 1, "ORPHAN", 7),
    ]
    assert batch.schema.names == ["root_id", "status", *arrow.ENTRY_SCHEMA.names[1:]]


def test_every_status_has_its_name():
    names = arrow.status_names(np.arange(len(Status), dtype=np.uint8))
    assert names.to_pylist() == [status.name for status in Status]
    assert arrow.status_names(np.empty(0, np.uint8)).type == pa.string()


def test_integers_are_uncopied_or_fit():
    column = pa.array([9, RESET, 5], pa.int32())[1:]
    taken = arrow.integers(column, "task", pa.int32())
    assert taken.tolist() == [RESET, 5]
    assert taken.__array_interface__["data"][0] == column.buffers()[1].address + 4
    assert arrow.integers(column, "task", pa.int64()).dtype == np.int64
    with pytest.raises(ValueError, match="val must fit int64: "):
        arrow.integers(pa.array([2**63], pa.uint64()), "val", pa.int64())
    with pytest.raises(TypeError, match="val must hold integers, got Arrow's bool; cast it first"):
        arrow.integers(pa.array([True]), "val", pa.int64())


@pytest.mark.parametrize(
    ("arrow_type", "is_text"),
    [
        (pa.string(), True),
        (pa.large_string(), True),
        (pa.string_view(), True),
        (pa.dictionary(pa.int32(), pa.string()), True),
        (pa.dictionary(pa.int32(), pa.int64()), False),
        (pa.binary(), False),
        (pa.int64(), False),
    ],
)
def test_what_is_text(arrow_type, is_text):
    assert arrow.is_text(arrow_type) is is_text
