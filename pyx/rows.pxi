# Hashes, runs and fingerprints around rows.h: arguments and columns.  Part of _native.pyx.

from rows cimport (
    AT_ONCE, cut_runs, fingerprint_of, first_bad_offset, fold_bytes, fold_numbers,
    gather_bytes, number_edges, place_gathered, row_runs_t, start_edges,
)


cdef cnp.ndarray as_bytes(object data, str name):
    """The memory of a buffer as an array of bytes."""
    if cnp.PyArray_CheckExact(data) and cnp.PyArray_NDIM(data) == 1:
        if cnp.PyArray_ISCARRAY_RO(data) and cnp.PyArray_TYPE(data) == cnp.NPY_UINT8:
            return data
    return _row_arguments.bytes_of(data, name)


cdef inline const uint8_t *bytes_at(cnp.ndarray column) noexcept:
    if column is None:
        return NULL
    return <const uint8_t *>cnp.PyArray_DATA(column)


def hash_fixed(hashes, data, width, valid=None):
    """Mix a column of numbers into a running hash per row, in place.

    Equal columns give equal hashes, here and in every version and process.  Numbers of 1, 2
    and 4 bytes are taken with their sign, so a value hashes alike in any of these widths and 8.

    Parameters
    ----------
    hashes : column of int64 or uint64, shape (n,), writable
        Zeros before the first column.
    data : buffer of n * width bytes
        The numbers, in the machine's byte order; they may start at any address.
    width : int
        Bytes of a number: 1, 2, 4, 8, 16 or 32.
    valid : column of bool or uint8, shape (n,), optional
        0 where the row is null: it then hashes to a constant, whatever ``data`` holds there.

    Raises
    ------
    TypeError
        If an argument is not of its type.
    ValueError
        If ``hashes`` is read-only or a column is not one-dimensional and C-contiguous, if the
        lengths differ, or if there is no such width.
    """
    cdef cnp.ndarray hash_rows = _row_arguments.in_place(hashes, "hashes")
    cdef int64_t w = as_count(width, "width", 1, INT64_MAX)
    if w not in _row_arguments.WIDTHS:
        _row_arguments.refuse_width(w)
    cdef cnp.ndarray memory = as_bytes(data, "data")
    cdef size_t n = rows(hash_rows)
    if <size_t>rows(memory) != n * <size_t>w:
        _row_arguments.refuse_size(rows(memory), n, w)
    cdef cnp.ndarray valid_rows = _row_arguments.valid_column(valid, n)
    cdef const uint8_t *ok = bytes_at(valid_rows)
    cdef const uint8_t *at = bytes_at(memory)
    cdef uint64_t *h = <uint64_t *>cnp.PyArray_DATA(hash_rows)
    with nogil:
        fold_numbers(h, at, <size_t>w, n, ok)


def hash_binary(hashes, offsets, data, valid=None):
    """Mix a column of strings, or of bytes, into a running hash per row, in place.

    Parameters
    ----------
    hashes : column of int64 or uint64, shape (n,), writable
        Zeros before the first column.
    offsets : numpy.ndarray of int32 or int64, shape (n + 1,)
        Row i is ``data[offsets[i]:offsets[i + 1]]``; the hash does not depend on the type.  Must
        not be written to during the call.
    data : buffer
        The bytes of all rows, and maybe others.
    valid : column of bool or uint8, shape (n,), optional
        0 where the row is null: it then hashes to the constant of `hash_fixed`.

    Raises
    ------
    TypeError
        If an argument is not of its type.
    ValueError
        If ``hashes`` is read-only or a column is not one-dimensional and C-contiguous, if the
        lengths differ, or if the offsets fall or leave the data: the message names the row.
    """
    cdef cnp.ndarray hash_rows = _row_arguments.in_place(hashes, "hashes")
    cdef size_t n = rows(hash_rows), bad
    cdef cnp.ndarray starts = _row_arguments.offset_column(offsets, n)
    cdef cnp.ndarray memory = as_bytes(data, "data")
    cdef size_t size = rows(memory)
    cdef cnp.ndarray valid_rows = _row_arguments.valid_column(valid, n)
    cdef const uint8_t *ok = bytes_at(valid_rows)
    cdef const uint8_t *at = bytes_at(memory)
    cdef uint64_t *h = <uint64_t *>cnp.PyArray_DATA(hash_rows)
    cdef const void *start = cnp.PyArray_DATA(starts)
    cdef bint wide = cnp.PyArray_ITEMSIZE(starts) == 8
    with nogil:
        bad = first_bad_offset(start, wide, n, size)
        if bad == n:
            fold_bytes(h, start, wide, at, size, n, ok)
    if bad < n:
        _row_arguments.refuse_offsets(starts, bad, size)


def pack_runs(key, component, owners, roots, parent_edges, order=None, counts=None, ordinals=None):
    """Give emitted rows their edges, and cut what goes to each destination into runs.

    The edge of row i is ``edge_id(key, roots[g], component, parent_edges[g], ordinal)`` for its
    group ``g = owners[i]``, where the ordinal counts the rows of the group from 0 on, or from
    where ``ordinals`` has it.  A run is a longest stretch of rows of one group that
    follow each other on the way to one destination.

    Parameters
    ----------
    key : int
        The spout's, of `ackcore.ids.spout_key`: 64 bits in either sign.
    component : str or int
        The emitting component, as `ackcore.ids.edge_id` takes it.
    owners : column of int64 or uint64, shape (m,)
        The group that each row hangs from, 0..g-1; at most 2**31-1 rows.
    roots : column of int64 or uint64, shape (g,)
        The root of each group.
    parent_edges : column of int64 or uint64, shape (g,), or int
        The edge, or the XOR of edges, on which each group came; one integer stands for all.
    order : column of int64, shape (m,), optional
        Row numbers, destination by destination, as `split_by_shard` gives them.  None: the rows
        are in that order.
    counts : column of int64, shape (d,), optional
        Rows per destination.  None: there is one.
    ordinals : column of int64, shape (g,), writable, optional
        How many rows each group has emitted before, 0..2**62-1; is raised by those of this call.

    Returns
    -------
    totals : numpy.ndarray of int64, shape (g,)
        The XOR of all edges of each group.
    run_groups, run_vals : numpy.ndarray of int64, shape (k,)
        Each run's group and the XOR of its edges.
    run_rows : numpy.ndarray of int32, shape (k,)
        How many rows each run has.
    run_counts : numpy.ndarray of int64, shape (d,)
        Runs per destination.

    Raises
    ------
    TypeError
        If an argument is not of its type.
    ValueError
        If a column is not one-dimensional and C-contiguous, if lengths differ, if ``counts`` do
        not add up to m, if ``order`` does not have each row once, or if an owner or an ordinal
        is out of range: the message names its row.  ``ordinals`` are then as before.
    OverflowError
        If an integer has more than 64 bits.
    """
    cdef edge_key_t keys = edge_key(as_id(key, "key"), component_key(component))
    cdef cnp.ndarray owner_column = id_column(owners, "owners")
    cdef cnp.ndarray root_column = id_column(roots, "roots")
    cdef cnp.ndarray parent_column = None, order_column = None, count_column, ordinal_column = None
    cdef uint64_t parent = 0
    cdef size_t m = rows(owner_column), groups = rows(root_column)
    if m > <size_t>INT32_MAX:
        _row_arguments.refuse_rows(m)
    if is_one_for_all(parent_edges):
        parent = as_id(parent_edges, "parent_edges")
    else:
        parent_column = id_column(parent_edges, "parent_edges")
        if <size_t>rows(parent_column) != groups:
            _columns.same_length(roots=root_column, parent_edges=parent_column)
    if order is not None:
        order_column = id_column(order, "order")
        if <size_t>rows(order_column) != m:
            _columns.same_length(owners=owner_column, order=order_column)
    if counts is None:
        count_column = np.array([m], np.int64)
    else:
        # Copied, as these are places in memory: what was checked is what is used.
        count_column = np.array(id_column(counts, "counts"), np.int64)
        _row_arguments.check_counts(count_column, m)
    if ordinals is not None:
        ordinal_column = _row_arguments.in_place(ordinals, "ordinals")
        if <size_t>rows(ordinal_column) != groups:
            _columns.same_length(roots=root_column, ordinals=ordinal_column)
        check_part(ordinal_column, "ordinals", _row_arguments.START_BITS)

    cdef size_t destinations = rows(count_column)
    cdef cnp.ndarray totals = np.zeros(groups, np.int64)
    cdef cnp.ndarray bases = new_column(groups, cnp.NPY_INT64)
    cdef cnp.ndarray edges = new_column(m, cnp.NPY_INT64)
    cdef cnp.ndarray next_ordinals = (
        np.zeros(groups, np.int64) if ordinal_column is None else ordinal_column.copy()
    )
    cdef cnp.ndarray run_groups = new_column(m, cnp.NPY_INT64)
    cdef cnp.ndarray run_vals = new_column(m, cnp.NPY_INT64)
    cdef cnp.ndarray run_rows = new_column(m, cnp.NPY_INT32)
    cdef cnp.ndarray run_counts = np.zeros(destinations, np.int64)
    cdef uint64_t *base = <uint64_t *>cnp.PyArray_DATA(bases)
    cdef uint64_t *edge = <uint64_t *>cnp.PyArray_DATA(edges)
    cdef uint64_t *total = <uint64_t *>cnp.PyArray_DATA(totals)
    cdef uint64_t *ordinal = <uint64_t *>cnp.PyArray_DATA(next_ordinals)
    cdef const uint64_t *of_row = ids_of(owner_column)
    cdef const uint64_t *root = ids_of(root_column)
    cdef const uint64_t *parent_rows = NULL
    cdef const uint64_t *places = NULL
    cdef const int64_t *count = <const int64_t *>cnp.PyArray_DATA(count_column)
    cdef row_runs_t out
    out.groups = <uint64_t *>cnp.PyArray_DATA(run_groups)
    out.vals = <uint64_t *>cnp.PyArray_DATA(run_vals)
    out.rows = <int32_t *>cnp.PyArray_DATA(run_rows)
    out.counts = <int64_t *>cnp.PyArray_DATA(run_counts)
    cdef cnp.ndarray seen = np.zeros(m, np.uint8)
    cdef uint8_t *came_up = <uint8_t *>cnp.PyArray_DATA(seen)
    cdef size_t i, done, runs = 0, distinct_rows = 0, bad_place = m
    cdef uint64_t bad_owner = 0
    if parent_column is not None:
        parent_rows = ids_of(parent_column)
    if order_column is not None:
        places = ids_of(order_column)
    with nogil:
        start_edges(root, parent_rows, parent, groups, keys, base)
        done = number_edges(of_row, m, groups, keys, base, ordinal, edge, total, &bad_owner)
        if done == m:
            runs = cut_runs(
                of_row, edge, m, places, count, destinations, out, came_up, &bad_place
            )
            for i in range(m):
                distinct_rows += came_up[i]
    if done < m:
        _row_arguments.refuse_owner(done, <int64_t>bad_owner, groups)
    if bad_place < m:
        _row_arguments.refuse_order(bad_place, <int64_t>places[bad_place], m)
    if distinct_rows < m:
        _row_arguments.refuse_order(rows=m)
    if ordinal_column is not None:
        np.copyto(ordinal_column, next_ordinals)
    return (
        totals, shortened(run_groups, runs), shortened(run_vals, runs), shortened(run_rows, runs),
        run_counts,
    )


def gather_binary(offsets, data, order):
    """Put the strings, or bytes, of a column in another order.

    Several times as fast as Arrow's ``take`` where they are short.

    Parameters
    ----------
    offsets : numpy.ndarray of int32 or int64, shape (n + 1,)
        Row i is ``data[offsets[i]:offsets[i + 1]]``.
    data : buffer
        The bytes of all rows, and maybe others.
    order : column of int64, shape (m,)
        Row numbers, as `split_by_shard` gives them; a row may come up any number of times.
        Neither this nor ``offsets`` must be written to during the call.

    Returns
    -------
    offsets : numpy.ndarray of the type given, shape (m + 1,)
        From 0 on.
    data : numpy.ndarray of uint8
        The bytes of these rows and no others.  The memory behind them, up to a multiple of 64
        bytes, holds zeros, so padded output is deterministic.

    Raises
    ------
    TypeError
        If an argument is not of its type.
    ValueError
        If a column is not one-dimensional and C-contiguous, if the offsets fall or leave the
        data, if there is no row of a number in ``order``, or if the bytes are too many for the
        offsets' type: the message names the row.
    """
    cdef cnp.ndarray starts = _row_arguments.offset_column(offsets)
    cdef cnp.ndarray memory = as_bytes(data, "data")
    cdef cnp.ndarray order_column = id_column(order, "order")
    cdef size_t n = rows(starts) - 1, m = rows(order_column), bad, bad_place = 0
    cdef int64_t size = rows(memory), total = 0
    cdef bint wide = cnp.PyArray_ITEMSIZE(starts) == 8
    cdef cnp.ndarray ends = new_column(m + 1, cnp.NPY_INT64 if wide else cnp.NPY_INT32)
    cdef const void *start = cnp.PyArray_DATA(starts)
    cdef void *end = cnp.PyArray_DATA(ends)
    cdef const uint64_t *places = ids_of(order_column)
    cdef const uint8_t *at = bytes_at(memory)
    cdef int64_t most = INT64_MAX if wide else INT32_MAX
    with nogil:
        bad = first_bad_offset(start, wide, n, size)
        if bad == n:
            bad_place = place_gathered(start, wide, n, places, m, end, most, &total)
    if bad < n:
        _row_arguments.refuse_offsets(starts, bad, size)
    if bad_place < m:
        _row_arguments.refuse_taken(bad_place, <int64_t>places[bad_place], n)
    if total > most:
        _row_arguments.refuse_gathered()

    cdef int64_t room = (total + AT_ONCE + 63) // 64 * 64
    cdef cnp.ndarray gathered = new_column(room, cnp.NPY_UINT8)
    cdef uint8_t *out = <uint8_t *>cnp.PyArray_DATA(gathered)
    with nogil:
        gather_bytes(start, wide, at, size, places, m, end, out)
        memset(out + total, 0, room - total)
    return ends, gathered[:total]


def fingerprint(data, seed=0):
    """Return 64 bits that tell whether bytes are still the same.

    They change with any byte, with the order and with the length; two unlike pieces of data
    agree by the odds of 64 bits.  That holds against accidents - a block lost, swapped, cut off
    or written twice; it is not cryptographic.

    Parameters
    ----------
    data : buffer
        Bytes, or any other object with the buffer protocol, C-contiguous.  Numbers count as
        the bytes they are in memory.
    seed : int, default 0
        64 bits in either sign; another seed gives an unrelated result.

    Returns
    -------
    int
        In -2**63..2**63-1, the same on every machine and in every version.

    Raises
    ------
    TypeError
        If ``data`` is no buffer, or ``seed`` no integer.
    ValueError
        If the buffer is not C-contiguous.
    OverflowError
        If ``seed`` has more than 64 bits.
    """
    cdef cnp.ndarray memory = as_bytes(data, "data")
    cdef uint64_t start = as_id(seed, "seed")
    cdef const uint8_t *at = bytes_at(memory)
    cdef uint64_t size = rows(memory)
    cdef uint64_t print_
    with nogil:
        print_ = fingerprint_of(at, size, start)
    return <int64_t>print_
