# Rows for the shards of a shuffle.  Included by _native.pyx, whose argument helpers it uses.

from libc.stdint cimport uint32_t

from pack cimport MAX_SHARDS, find_shards, order_by_shard


def split_by_shard(root_ids, n):
    """Sort row numbers by the shard of their root.

    The shard is a fixed hash of the root id that shares nothing with the hash of a ledger's
    table nor with `ackcore.ids.acker_task`.

    Parameters
    ----------
    root_ids : column of int64 or uint64, shape (m,)
        The rows' roots.
    n : int
        Number of shards, in 1..2**20.

    Returns
    -------
    order : numpy.ndarray of int64, shape (m,)
        Row numbers: those of shard 0, then those of shard 1, each shard's in their old order.
    counts : numpy.ndarray of int64, shape (n,)
        How many rows each shard has.

    Raises
    ------
    TypeError
        If ``root_ids`` is not a column of 64-bit integers, or ``n`` no integer.
    ValueError
        If the column is not one-dimensional and C-contiguous, or ``n`` out of range.
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
