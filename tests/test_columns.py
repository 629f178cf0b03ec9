"""Columns: what goes in uncopied, from whom, and what is refused in which words."""

import array
import ctypes
import importlib
import mmap
import sys

import numpy as np
import pytest
from ledger_scripts import int32s, int64s
from separately import run_python

from ackcore import _columns
from ackcore._records import ACKED, RESET


def optional(name):
    """A module that the wheel does without, and so do its tests."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


pa, pd = optional("pyarrow"), optional("pandas")
needs_arrow = pytest.mark.skipif(pa is None, reason="pyarrow is not installed")

IDS = [0, 1, -1, 2**63 - 1, -(2**63)]
PATTERNS = [value % 2**64 for value in IDS]


def sliced_arrow(values, type):
    return pa.array([7, 7, *values, 7], type).slice(2, len(values))


def read_only(column):
    column.setflags(write=False)
    return column


def in_shared_memory(values):
    memory = mmap.mmap(-1, 8 * len(values))
    column = np.frombuffer(memory, np.int64)
    column[:] = values
    return column


GOOD_IDS = {
    "int64": np.array(IDS, np.int64),
    "uint64": np.array(PATTERNS, np.uint64),
    "long long": np.array(IDS, np.longlong),
    "read-only": read_only(np.array(IDS, np.int64)),
    "a slice": np.array([9, *IDS, 9], np.int64)[1:-1],
    "a column of one": np.array([IDS], np.int64).T[:, 0],
    "a subclass": np.array(IDS, np.int64).view(np.recarray),
    "a mapping": in_shared_memory(IDS),
    "memoryview": memoryview(np.array(IDS, np.int64)),
    "memoryview of uint64": memoryview(np.array(PATTERNS, np.uint64)),
    "memoryview of bytes cast": memoryview(np.array(IDS, np.int64).tobytes()).cast("q"),
    "memoryview slice": memoryview(np.array([9, *IDS], np.int64))[1:],
    "array q": array.array("q", IDS),
    "array Q": array.array("Q", PATTERNS),
    "array l": array.array("l", IDS),
    "ctypes": (ctypes.c_int64 * len(IDS))(*IDS),
    "ctypes unsigned": (ctypes.c_uint64 * len(IDS))(*PATTERNS),
}
GOOD_TASKS = {
    "int32": np.array([0, -1, 5], np.int32),
    "memoryview": memoryview(np.array([0, -1, 5], np.int32)),
    "array i": array.array("i", [0, -1, 5]),
    "ctypes": (ctypes.c_int32 * 3)(0, -1, 5),
}
if pa is not None:
    GOOD_IDS |= {
        "arrow": pa.array(IDS, pa.int64()),
        "arrow uint64": pa.array(PATTERNS, pa.uint64()),
        "arrow slice": sliced_arrow(IDS, pa.int64()),
        "arrow with a bitmap and no nulls": pa.array([None, *IDS], pa.int64())[1:],
        "arrow combined": pa.chunked_array([IDS[:2], IDS[2:]], pa.int64()).combine_chunks(),
    }
    GOOD_TASKS |= {
        "arrow": pa.array([0, -1, 5], pa.int32()),
        "arrow slice": sliced_arrow([0, -1, 5], pa.int32()),
    }
if pd is not None:
    GOOD_IDS["pandas"] = pd.Series(IDS, dtype="int64").to_numpy()


def address_of(column):
    """Where a column's items lie, asked without the code that is tested."""
    if pa is not None and isinstance(column, pa.Array):
        return column.buffers()[1].address + column.offset * column.type.bit_width // 8
    return np.asarray(memoryview(column)).__array_interface__["data"][0]


@pytest.mark.parametrize("column", GOOD_IDS.values(), ids=GOOD_IDS)
def test_id_columns_go_in_uncopied(column):
    taken = _columns.id_column(column, "root_ids")
    assert taken.dtype == np.int64
    assert type(taken) is np.ndarray
    assert taken.tolist() == IDS
    assert taken.__array_interface__["data"][0] == address_of(column)


@pytest.mark.parametrize("column", GOOD_TASKS.values(), ids=GOOD_TASKS)
def test_task_columns_go_in_uncopied(column):
    taken = _columns.task_column(column, "tasks")
    assert taken.dtype == np.int32
    assert taken.tolist() == [0, -1, 5]
    assert taken.__array_interface__["data"][0] == address_of(column)


@pytest.mark.parametrize("column", GOOD_IDS.values(), ids=GOOD_IDS)
def test_ledgers_take_them(Ledger, column):
    ledger = Ledger()
    tasks = int32s(range(len(IDS)))
    vals = int64s([1] * len(IDS))
    assert len(ledger.init_many(column, vals, tasks)) == 0
    assert sorted(ledger.entries().root_ids.tolist()) == sorted(IDS)
    outcomes = ledger.apply(column, vals, int32s([-1] * len(IDS)))
    assert outcomes.root_ids.tolist() == IDS
    assert len(ledger.init_many(int64s(range(len(IDS))), column, tasks)) == 1
    ledger.fold(int64s(range(len(IDS))), column, tasks)
    assert ledger.get(3).val == 0


@pytest.mark.parametrize("column", GOOD_TASKS.values(), ids=GOOD_TASKS)
def test_ledgers_take_their_tasks(Ledger, column):
    outcomes = Ledger().apply(int64s([1, 2, 3]), int64s([0, 0, 0]), column)
    assert [tuple(row) for row in outcomes] == [(1, 0, ACKED, None), (3, 5, ACKED, None)]


EMPTY = {
    "numpy": np.empty(0, np.int64),
    "memoryview": memoryview(array.array("q")),
    "array": array.array("q"),
    "ctypes": (ctypes.c_int64 * 0)(),
}
if pa is not None:
    EMPTY |= {"arrow": pa.array([], pa.int64()), "arrow slice": pa.array([1, 2], pa.int64())[2:]}


@pytest.mark.parametrize("column", EMPTY.values(), ids=EMPTY)
def test_empty_columns(Ledger, column):
    assert len(Ledger().ack_many(column, column)) == 0
    assert _columns.id_column(column, "root_ids").shape == (0,)


def test_columns_are_kept_alive():
    """An array on someone's memory holds on to it."""
    taken = _columns.id_column(array.array("q", range(1000)), "root_ids")
    assert taken.tolist() == list(range(1000))


@needs_arrow
def test_arrow_columns_are_kept_alive():
    taken = _columns.id_column(pa.array(range(1000), pa.int64()), "root_ids")
    assert taken.tolist() == list(range(1000))


def test_columns_are_not_written_to(Ledger):
    root_ids, vals, tasks = int64s([1, 1, 2]), int64s([5, 5, 0]), int32s([3, -1, 0])
    before = root_ids.copy(), vals.copy(), tasks.copy()
    ledger = Ledger()
    ledger.apply(root_ids, vals, tasks)
    ledger.merge(ledger.entries())
    for column, was in zip((root_ids, vals, tasks), before, strict=True):
        np.testing.assert_array_equal(column, was)


def test_one_column_may_be_two_arguments(Ledger):
    column = int64s([5, 6])
    ledger = Ledger()
    ledger.ack_many(column, column)
    assert ledger.get(5).val == 5


BAD = {}
if pa is not None:
    BAD |= {
        "nulls": (pa.array([1, None], pa.int64()), ValueError, "nulls"),
        "all null": (pa.nulls(2), TypeError, "Arrow array of null"),
        "int32": (pa.array([1, 2], pa.int32()), TypeError, "Arrow array of int32"),
        "doubles": (pa.array([1.0, 2.0]), TypeError, "Arrow array of double"),
        "timestamps": (pa.array([1, 2], pa.timestamp("ms")), TypeError, "timestamp"),
        "dictionary": (pa.array([1, 2], pa.int64()).dictionary_encode(), TypeError, "dictionary"),
        "bools": (pa.array([True, False]), TypeError, "bool"),
        "strings": (pa.array(["1", "2"]), TypeError, "string"),
        "chunked": (pa.chunked_array([[1], [2]], pa.int64()), TypeError, r"combine_chunks\(\)"),
        "a table": (pa.table({"root_ids": [1, 2]}), TypeError, "got Table"),
        "a scalar": (pa.scalar(1), TypeError, "got Int64Scalar"),
        "a buffer": (pa.array([1, 2], pa.int64()).buffers()[1], TypeError, "format 'b'"),
    }
if pd is not None:
    BAD |= {
        "pandas": (pd.Series([1, 2]), TypeError, r"root_ids\.to_numpy\(\)"),
        "pandas index": (pd.Index([1, 2]), TypeError, r"to_numpy\(\)"),
    }


@pytest.mark.parametrize(("column", "error", "words"), BAD.values(), ids=BAD)
def test_refused_arrow_and_pandas(Ledger, column, error, words):
    ledger = Ledger()
    with pytest.raises(error, match=words) as refusal:
        ledger.fail_many(column)
    assert str(refusal.value).startswith("root_ids must ")
    assert len(ledger) == 0


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (
            memoryview(array.array("i", [1])),
            "root_ids must hold 64-bit integers, got items of format 'i' (4 bytes); "
            "cast the column to int64 first",
        ),
        (
            np.array([1.0]),
            "root_ids must hold 64-bit integers, got items of dtype float64; "
            "cast the column to int64 first",
        ),
        (
            np.array([1], ">i8"),
            "root_ids must hold 64-bit integers, got items of dtype >i8; "
            "cast the column to int64 first",
        ),
        (
            [1],
            "root_ids must be an array or another buffer of 64-bit integers, got list; "
            "numpy.array(..., dtype=numpy.int64) makes one",
        ),
        (np.zeros((1, 1), np.int64), "root_ids must be one-dimensional, got 2 dimensions"),
        (
            np.zeros(4, np.int64)[::2],
            "root_ids must be C-contiguous, got a strided column; "
            "copy it with numpy.ascontiguousarray()",
        ),
    ],
)
def test_words(Ledger, column, words):
    with pytest.raises((TypeError, ValueError)) as refusal:
        Ledger().fail_many(column)
    assert str(refusal.value) == words


def test_words_of_lengths_and_kinds(Ledger):
    ledger = Ledger()
    with pytest.raises(
        ValueError, match=r"^root_ids has 2 rows and ack_vals has 3; they must pair"
    ):
        ledger.ack_many(int64s([1, 2]), int64s([1, 2, 3]))
    with pytest.raises(ValueError, match=r"^tasks must be .*, got -4 in row 1$"):
        ledger.apply(int64s([1, 2]), int64s([1, 2]), int32s([RESET, RESET - 1]))


def test_scalars_take_any_integer(Ledger):
    class Seven:
        def __index__(self):
            return 7

    ledger = Ledger()
    ledger.init(Seven(), np.uint64(2**64 - 1), np.int8(3))
    assert ledger.get(np.int64(7)).val == -1
    assert ledger.ack(True, 1) is None  # a bool is an integer of Python's
    assert ledger.ack(np.uint8(7), np.int32(-1)).kind == ACKED


def test_an_index_that_raises_applies_nothing(Ledger):
    class Broken:
        def __index__(self):
            raise ZeroDivisionError

    ledger = Ledger()
    with pytest.raises(ZeroDivisionError):
        ledger.ack(Broken(), 1)
    assert len(ledger) == 0


def test_arrow_is_not_imported():
    """Arrow arrays are recognised where pyarrow is installed, and cost nothing elsewhere."""
    code = (
        "import sys, array; from ackcore import _columns;"
        "_columns.id_column(array.array('q', [1]), 'root_ids');"
        "assert not {'pyarrow', 'pandas', 'pyspark'} & set(sys.modules)"
    )
    run_python(code)


def test_signed():
    assert [_columns.signed(value) for value in PATTERNS] == IDS
    assert _columns.signed(2**64 + 5) == 5
    assert _columns.signed(-(2**63) - 1) == 2**63 - 1


def test_an_import_of_pyarrow_under_way_elsewhere_disturbs_nothing(Ledger, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", type(sys)("pyarrow"))
    Ledger().ack_many(array.array("q", [1]), array.array("q", [2]))
    with pytest.raises(TypeError, match="root_ids must be an array"):
        Ledger().fail_many([1])
