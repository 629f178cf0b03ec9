# cython: language_level=3, embedsignature=True, autotestdict=False
# cython: wraparound=False, boundscheck=False, initializedcheck=False
# cython: freethreading_compatible=True
"""The compiled core: the ledger, offsets, ids in bulk, packing.

Calls with columns check and convert, allocate, then loop without the GIL and read rows in place.
The loops of Ledger calls cannot fail; others may stop at a bad row.
"""

cimport cython
cimport numpy as cnp
from cpython.long cimport PyLong_AsLongLongAndOverflow, PyLong_CheckExact
from cpython.number cimport PyIndex_Check
from cpython.unicode cimport PyUnicode_CheckExact
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport (
    INT32_MAX, INT64_MAX, INT64_MIN, SIZE_MAX, UINT64_MAX, int32_t, int64_t, uint8_t, uint64_t,
    uintptr_t,
)
from libc.string cimport memcpy, memset

from ids cimport (
    ATTEMPT_BITS, OFFSET_BITS, PARTITION_BITS, acker_of, biject, bijection_t, edge_key,
    edge_key_t, edge_ordinal, edge_parent, edge_root, position, root_bijection, source_bijection,
)
from kernel cimport (
    FULL, ROWS_BAD, ROWS_PLAIN, SLOTS,
    TASK_ACK, TASK_FAIL, TASK_RESET, batch_t, columns_t, kernel_at,
    kernel_t, ledger_t, live, lock_acquire_gil, lock_acquire_nogil, lock_destroy,
    lock_init, lock_release, lock_t, memory_of, outcomes_t, table_at, table_bytes, table_t,
    takeable,
)

import _thread
import atexit
import contextlib
import mmap
import os

import numpy as np

from ackcore import _arguments, _columns, _records

cnp.import_array()

cdef tuple LEVELS = ("baseline", "avx2", "avx512")


cdef const kernel_t *chosen_kernel(object order) except NULL:
    """Return the kernel that ``order`` names, else the best for this machine; set `cpu`.

    ``order``: the value of ACKCORE_CPU, or None. Raises ImportError for an unknown name, and for
    instructions that this machine lacks.
    """
    cdef int level
    if order:
        if order not in LEVELS:
            raise ImportError(f"ACKCORE_CPU must be one of {', '.join(LEVELS)}, got {order!r}")
        level = LEVELS.index(order)
        if kernel_at(level) == NULL:
            raise ImportError(
                f"ACKCORE_CPU={order}: this machine does not run it; unset ACKCORE_CPU"
            )
    else:
        level = len(LEVELS) - 1
        while kernel_at(level) == NULL:
            level -= 1
    global cpu
    cpu = LEVELS[level]
    return kernel_at(level)


#: The SIMD level of the kernel that runs: "baseline", "avx2" or "avx512".
cpu = None
cdef const kernel_t *kernel = chosen_kernel(os.environ.get("ACKCORE_CPU"))


include "columns.pxi"


# Arguments: common types are converted here, all others (and all errors) in ackcore._columns, so
# that both backends accept the same arguments and raise the same errors.

cdef cnp.ndarray id_column(object column, str name):
    if cnp.PyArray_CheckExact(column) and cnp.PyArray_NDIM(column) == 1:
        if cnp.PyArray_ISCARRAY_RO(column):
            if cnp.PyArray_TYPE(column) in (cnp.NPY_INT64, cnp.NPY_UINT64):
                return column
    return _columns.id_column(column, name)


cdef cnp.ndarray task_column(object column, str name):
    if cnp.PyArray_CheckExact(column) and cnp.PyArray_NDIM(column) == 1:
        if cnp.PyArray_ISCARRAY_RO(column) and cnp.PyArray_TYPE(column) == cnp.NPY_INT32:
            return column
    return _columns.task_column(column, name)


cdef inline const uint64_t *ids_of(cnp.ndarray column) noexcept:
    return <const uint64_t *>cnp.PyArray_DATA(column)


cdef inline const int32_t *tasks_of(cnp.ndarray column) noexcept:
    return <const int32_t *>cnp.PyArray_DATA(column)


cdef object shortened(cnp.ndarray column, size_t n):
    """Return the first n rows; free the memory of the others if they are more than 65,536.

    Returns None for None.
    """
    cdef Py_ssize_t size
    if column is None:
        return None
    size = rows(column)
    if <size_t>size == n:
        return column
    if size - <Py_ssize_t>n > 65536:
        column.resize(n, refcheck=False)
        return column
    return column[:n]


cdef int32_t lowest(cnp.ndarray column) noexcept:
    """Return the lowest number of a column of tasks; 0 if all are above 0."""
    cdef const int32_t *items = tasks_of(column)
    cdef size_t n = rows(column)
    cdef int32_t least
    if n <= 65536:  # cheaper than releasing the GIL
        return kernel.lowest_task(items, n)
    with nogil:
        least = kernel.lowest_task(items, n)
    return least


cdef uint64_t as_id(object value, str name) except? 0:
    cdef int overflow = 0
    cdef long long bits
    if PyLong_CheckExact(value):
        bits = PyLong_AsLongLongAndOverflow(value, &overflow)
        if overflow == 0:
            return <uint64_t>bits
    return <uint64_t><int64_t>_columns.as_id(value, name)


# Columns of entries, as columns_t declares them.

cdef tuple ENTRY_TYPES = (
    cnp.NPY_INT64, cnp.NPY_INT64, cnp.NPY_INT32, cnp.NPY_UINT8, cnp.NPY_UINT8, cnp.NPY_UINT8,
    cnp.NPY_INT64, cnp.NPY_INT64,
)


cdef void *data_of(cnp.ndarray column):
    return NULL if column is None else cnp.PyArray_DATA(column)


cdef list entry_columns(entries):
    """Return the eight columns of `Entries` in the order of `columns_t`; raise for other types."""
    if not isinstance(entries, _records.Entries):
        _columns.check_entries(entries, 0, False)  # raises
    return [
        entries.root_ids, entries.vals, entries.tasks, entries.inits, entries.flags, entries.ages,
        entries.first_ms, entries.last_ms,
    ]


cdef bint are_plain_arrays(list columns, bint timed):
    """Return whether all columns of entries are arrays of the right types and of one length.

    Without a clock (``timed`` is false), the times must be None. Values are not checked.
    """
    cdef Py_ssize_t k
    cdef cnp.ndarray column
    for k in range(8 if timed else 6):
        if not cnp.PyArray_CheckExact(columns[k]):
            return False
        column = columns[k]
        if cnp.PyArray_NDIM(column) != 1 or not cnp.PyArray_ISCARRAY_RO(column):
            return False
        if cnp.PyArray_TYPE(column) != <int>ENTRY_TYPES[k]:
            return False
        if rows(column) != rows(columns[0]):
            return False
    return timed or (columns[6] is None and columns[7] is None)


cdef void bind_columns(list columns, columns_t *out):
    out.root_ids = <int64_t *>data_of(columns[0])
    out.vals = <int64_t *>data_of(columns[1])
    out.tasks = <int32_t *>data_of(columns[2])
    out.inits = <uint8_t *>data_of(columns[3])
    out.flags = <uint8_t *>data_of(columns[4])
    out.ages = <uint8_t *>data_of(columns[5])
    out.first = <int64_t *>data_of(columns[6])
    out.last = <int64_t *>data_of(columns[7])
    out.statuses = NULL


# Mapped, not allocated: malloc reuses blocks of up to 32 MB, and clearing takes ten milliseconds at
# once. Huge pages unless NUMPY_MADVISE_HUGEPAGE=0, as in numpy; aligned to huge pages, because
# otherwise much of a table just larger than L2 lies in small pages.
cdef Py_ssize_t MAPPED = 1 << 20
cdef Py_ssize_t HUGE_PAGE = 2 << 20
cdef bint CAN_MAP = hasattr(mmap, "MAP_PRIVATE") and hasattr(mmap, "MAP_ANONYMOUS")
cdef bint HUGE_PAGES = (
    hasattr(mmap, "MADV_HUGEPAGE") and os.environ.get("NUMPY_MADVISE_HUGEPAGE") != "0"
)


cdef cnp.ndarray zeroed(cnp.npy_intp size):
    """Return ``size`` zeroed bytes; large arrays are mapped, and unwritten pages take no memory."""
    cdef Py_ssize_t room, start = 0
    cdef cnp.ndarray memory
    if not CAN_MAP or size < MAPPED:
        return cnp.PyArray_ZEROS(1, &size, cnp.NPY_UINT8, 0)
    room = (size // HUGE_PAGE + 2) * HUGE_PAGE if HUGE_PAGES else size
    mapped = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = np.frombuffer(mapped, np.uint8)
    if HUGE_PAGES:
        with contextlib.suppress(OSError):  # an OS kernel without huge pages
            mapped.madvise(mmap.MADV_HUGEPAGE)
        start = HUGE_PAGE - <uintptr_t>cnp.PyArray_DATA(memory) % HUGE_PAGE
    return memory[start:start + size]


cdef object bucket_view(table_t t):
    """Return a table's buckets as a read-only structured array over its memory."""
    cdef cnp.ndarray memory = <cnp.ndarray>t.owner
    offset = <char *>t.buckets - <char *>cnp.PyArray_DATA(memory)
    buckets = memoryview(memory)[offset:offset + BUCKET.itemsize * t.n_buckets]
    return np.frombuffer(buckets.toreadonly(), BUCKET)  # cannot be made writable again


include "ids.pxi"
include "ledger.pxi"
include "ledger_messages.pxi"
include "ledger_entries.pxi"
include "offsets.pxi"
include "offset_state.pxi"
include "pack.pxi"
include "rows.pxi"
