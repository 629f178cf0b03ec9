"""The tables that a ledger hands out: rows, columns, and what they do not keep."""

import pickle

import numpy as np
import pytest
from ledger_scripts import Clock, int32s, int64s

import ackcore
from ackcore import _records as records


def test_statuses_are_numbers_that_do_not_move():
    """They are written to files and columns."""
    assert {status.name: int(status) for status in records.Status} == {
        "OPEN": 0,
        "ACKED": 1,
        "FAILED": 2,
        "RESET_TIMEOUT": 3,
        "EXPIRED": 4,
        "ORPHAN": 5,
        "ANOMALY": 6,
    }
    assert (records.ACK, records.FAIL, records.RESET) == (-1, -2, -3)
    assert (records.FLAG_FAILED, records.FLAG_TASKS_DIFFER) == (1, 2)


@pytest.mark.parametrize(
    "name", ["ACK", "FAIL", "RESET", "Status", "Outcomes", "Entries", "Settled"]
)
def test_the_package_exports_them(name):
    assert getattr(ackcore, name) is getattr(records, name)


def test_rows_and_columns_say_the_same(Ledger):
    clock = Clock(5)
    for timed in (True, False):
        ledger = Ledger(clock=clock if timed else None)
        outcomes = ledger.apply(int64s([1, 2, 3]), int64s([0, 5, 0]), int32s([4, 4, 5]))
        rows = list(outcomes)
        assert len(outcomes) == len(rows) == 2
        assert [row.root_id for row in rows] == outcomes.root_ids.tolist()
        assert [row.task for row in rows] == outcomes.tasks.tolist()
        assert [row.kind for row in rows] == outcomes.kinds.tolist()
        assert [row.elapsed_ms for row in rows] == ([0, 0] if timed else [None, None])
        entries = ledger.entries()
        (entry,) = entries
        assert entry == ledger.get(2)
        assert list(entries.columns()) == [
            "root_ids",
            "vals",
            "tasks",
            "inits",
            "flags",
            "ages",
            *(["first_ms", "last_ms"] if timed else []),
        ]
        (decision,) = Ledger.from_entries(
            records.Entries(**{**entries.columns(), "vals": int64s([0])}),
            clock=clock if timed else None,
        ).settle()
        assert decision == (2, records.ACKED, 0, 4, 1, 0, *((5, 5) if timed else (None, None)))


def test_tables_are_saved_and_loaded(Ledger, tmp_path):
    ledger = Ledger()
    ledger.apply(int64s([1, 2, -1]), int64s([1, 5, 7]), int32s([4, -1, -2]))
    np.savez(tmp_path / "entries.npz", **ledger.entries().columns())
    with np.load(tmp_path / "entries.npz") as saved:
        loaded = Ledger.from_entries(records.Entries(**saved))
    assert sorted(loaded.entries()) == sorted(ledger.entries())
    assert sorted(pickle.loads(pickle.dumps(ledger.entries()))) == sorted(ledger.entries())


def test_iterating_gives_plain_values(Ledger):
    ledger = Ledger(clock=Clock(3))
    (outcome,) = ledger.init_many(int64s([1]), int64s([0]), int32s([4]))
    assert [type(value) for value in outcome] == [int, int, records.Status, int]
    ledger.ack(1, 2)
    assert [type(value) for value in ledger.get(1)] == [int] * 8
    assert str(outcome.kind.name) == "ACKED"
