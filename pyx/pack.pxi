# Rows for the shards of a shuffle.  Included by _native.pyx, whose argument helpers it uses.

from libc.stdint cimport uint32_t

from pack cimport MAX_SHARDS, find_shards, order_by_hash, order_by_shard, take_rows_of_shard


def split_by_shard(root_ids, n):
    """Sort row numbers by the shard of their root.

    The shard is a fixed hash of the root id, independent of the hash of a ledger's table and of
    `ackcore.ids.acker_task`.

    Parameters
    ----------
    root_ids : column of int64 or uint64, shape (m,)
        The root of each row.
    n : int
        The number of shards, in 1..2**20.

    Returns
    -------
    order : numpy.ndarray of int64, shape (m,)
        The row numbers of shard 0, then those of shard 1, and so on; within a shard ascending.
    counts : numpy.ndarray of int64, shape (n,)
        The number of rows of each shard.

    Raises
    ------
    TypeError
        If ``root_ids`` is not a column of 64-bit integers, or ``n`` is not an integer.
    ValueError
        If the column is not one-dimensional and C-contiguous, or ``n`` is out of range.
    """
    cdef cnp.ndarray root_column = id_column(root_ids, "root_ids")
    cdef int64_t shards = as_count(n, "n", 1, MAX_SHARDS)
    cdef Py_ssize_t m = rows(root_column)
    cdef cnp.ndarray of_row = new_column(m, cnp.NPY_UINT32)
    cdef cnp.ndarray order = new_column(m, cnp.NPY_INT64)
    counts = np.zeros(shards, np.int64)
    next_place = np.zeros(shards, np.int64)
    cdef int64_t *count = <int64_t *>cnp.PyArray_DATA(counts)
    cdef int64_t *place = <int64_t *>cnp.PyArray_DATA(next_place)
    cdef uint32_t *shard = <uint32_t *>cnp.PyArray_DATA(of_row)
    cdef int64_t *to = <int64_t *>cnp.PyArray_DATA(order)
    cdef const uint64_t *roots = ids_of(root_column)
    cdef int64_t i
    with nogil:
        find_shards(roots, m, shards, shard, count)
        for i in range(1, shards):
            place[i] = place[i - 1] + count[i - 1]
        order_by_shard(shard, m, place, to)
    return order, counts


def sort_by_shard(root_ids, n):
    """Sort row numbers by the shard of their root, and by a hash of the root within a shard.

    The order does not depend on the processor, the backend or ``n``; ``counts`` depends on ``n``.

    Parameters
    ----------
    root_ids : column of int64 or uint64, shape (m,)
        The root of each row.
    n : int
        The number of shards, in 1..2**20.

    Returns
    -------
    order, counts
        As in `split_by_shard`; the rows of one root are ascending.

    Raises
    ------
    TypeError, ValueError
        As for `split_by_shard`.
    """
    cdef cnp.ndarray root_column = id_column(root_ids, "root_ids")
    cdef int64_t shards = as_count(n, "n", 1, MAX_SHARDS)
    cdef Py_ssize_t m = rows(root_column)
    cdef cnp.ndarray hash_column = new_column(m, cnp.NPY_UINT64)
    cdef cnp.ndarray order = new_column(m, cnp.NPY_INT64)
    # Then 4 to 8 rows have to be sorted together; the counters take 1 to 2 bytes a row.
    cdef int bits = max(1, int(m).bit_length() - 3)
    counts = np.zeros(shards, np.int64)
    next_place = np.zeros(<Py_ssize_t>1 << bits, np.int64)
    cdef int64_t *count = <int64_t *>cnp.PyArray_DATA(counts)
    cdef int64_t *place = <int64_t *>cnp.PyArray_DATA(next_place)
    cdef uint64_t *hashes = <uint64_t *>cnp.PyArray_DATA(hash_column)
    cdef int64_t *to = <int64_t *>cnp.PyArray_DATA(order)
    cdef const uint64_t *roots = ids_of(root_column)
    with nogil:
        order_by_hash(roots, m, shards, bits, place, hashes, to, count)
    return order, counts


def take_shard(root_ids, vals, tasks, times_ms, shard, n):
    """Copy the messages of one shard's roots, in their order.

    Parameters
    ----------
    root_ids, vals : column of int64 or uint64, shape (m,)
        The messages, as for `Ledger.fold`.
    tasks : column of int32, shape (m,)
        Their kinds.
    times_ms : column of int64, shape (m,), or None
        Their times.
    shard : int
        The number of the shard, as in `split_by_shard`, in 0..n-1.
    n : int
        The number of shards, in 1..2**20.

    Returns
    -------
    tuple
        ``(root_ids, vals, tasks, times_ms)`` of k <= m rows: arrays of int64, int64, int32 and
        int64. The last is None without times.

    Raises
    ------
    TypeError, ValueError
        If a column has another type, shape or length, or a number is out of range.
    """
    cdef cnp.ndarray root_column = id_column(root_ids, "root_ids")
    cdef cnp.ndarray val_column = id_column(vals, "vals")
    cdef cnp.ndarray kinds = task_column(tasks, "tasks")
    cdef cnp.ndarray time_column = None
    cdef int64_t shards = as_count(n, "n", 1, MAX_SHARDS)
    cdef int64_t wanted = as_count(shard, "shard", 0, shards - 1)
    cdef Py_ssize_t m = rows(root_column)
    if times_ms is None:
        _columns.same_length(root_ids=root_column, vals=val_column, tasks=kinds)
    else:
        time_column = id_column(times_ms, "times_ms")
        _columns.same_length(
            root_ids=root_column, vals=val_column, tasks=kinds, times_ms=time_column
        )
    cdef cnp.ndarray out_roots = new_column(m, cnp.NPY_INT64)
    cdef cnp.ndarray out_vals = new_column(m, cnp.NPY_INT64)
    cdef cnp.ndarray out_kinds = new_column(m, cnp.NPY_INT32)
    cdef cnp.ndarray out_times = None if times_ms is None else new_column(m, cnp.NPY_INT64)
    cdef const uint64_t *roots = ids_of(root_column)
    cdef const uint64_t *xors = ids_of(val_column)
    cdef const int32_t *task = tasks_of(kinds)
    cdef const int64_t *times = NULL
    cdef int64_t *to_roots = <int64_t *>cnp.PyArray_DATA(out_roots)
    cdef int64_t *to_vals = <int64_t *>cnp.PyArray_DATA(out_vals)
    cdef int32_t *to_kinds = <int32_t *>cnp.PyArray_DATA(out_kinds)
    cdef int64_t *to_times = NULL
    cdef size_t k
    if time_column is not None:
        times = <const int64_t *>cnp.PyArray_DATA(time_column)
        to_times = <int64_t *>cnp.PyArray_DATA(out_times)
    with nogil:
        k = take_rows_of_shard(
            roots, xors, task, times, m, <uint32_t>wanted, shards, to_roots, to_vals, to_kinds,
            to_times,
        )
    return (
        shortened(out_roots, k), shortened(out_vals, k), shortened(out_kinds, k),
        shortened(out_times, k),
    )
