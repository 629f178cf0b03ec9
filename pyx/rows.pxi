# Hashes and fingerprints around rows.h: arguments and columns.  Part of _native.pyx.

from rows cimport (
    AT_ONCE, first_bad_offset, fold_bytes, fold_numbers, gather_bytes, place_gathered,
)


cdef cnp.ndarray as_bytes(object data, str name):
    if cnp.PyArray_CheckExact(data) and cnp.PyArray_NDIM(data) == 1:
        if cnp.PyArray_ISCARRAY_RO(data) and cnp.PyArray_TYPE(data) == cnp.NPY_UINT8:
            return data
    return _arguments.bytes_of(data, name)


cdef inline const uint8_t *bytes_at(cnp.ndarray column) noexcept:
    if column is None:
        return NULL
    return <const uint8_t *>cnp.PyArray_DATA(column)


def hash_fixed(hashes, data, width, valid=None):
    """Mix a column of numbers into a running hash per row, in place.

    Equal columns give equal hashes in every version and process.  Numbers of 1, 2 and 4 bytes are
    sign-extended, so a value has the same hash in each of these widths and in 8 bytes.

    Parameters
    ----------
    hashes : column of int64 or uint64, shape (n,), writable
        Zeros before the first column.
    data : buffer of n * width bytes
        The numbers, in native byte order, at any address.
    width : int
        The number of bytes of a number: 1, 2, 4, 8, 16 or 32.
    valid : column of bool or uint8, shape (n,), optional
        0 for a null row, whose hash is a constant, whatever ``data`` has there.  By default no row
        is null.

    Raises
    ------
    TypeError
        If an argument has another type.
    ValueError
        If ``hashes`` is read-only or a column is not one-dimensional and C-contiguous, if the
        lengths differ, or if ``width`` is another number.
    """
    cdef cnp.ndarray hash_rows = _arguments.in_place(hashes, "hashes")
    cdef int64_t w = as_count(width, "width", 1, INT64_MAX)
    if w not in _arguments.WIDTHS:
        _arguments.refuse_width(w)
    cdef cnp.ndarray memory = as_bytes(data, "data")
    cdef size_t n = rows(hash_rows)
    if <size_t>rows(memory) != n * <size_t>w:
        _arguments.refuse_size(rows(memory), n, w)
    cdef cnp.ndarray valid_rows = _arguments.valid_column(valid, n)
    cdef const uint8_t *ok = bytes_at(valid_rows)
    cdef const uint8_t *at = bytes_at(memory)
    cdef uint64_t *h = <uint64_t *>cnp.PyArray_DATA(hash_rows)
    with nogil:
        fold_numbers(h, at, <size_t>w, n, ok)


def hash_binary(hashes, offsets, data, valid=None):
    """Mix a column of strings or bytes into a running hash per row, in place.

    Parameters
    ----------
    hashes : column of int64 or uint64, shape (n,), writable
        Zeros before the first column.
    offsets : numpy.ndarray of int32 or int64, shape (n + 1,)
        Row i is ``data[offsets[i]:offsets[i + 1]]``; the hash does not depend on the type.  No
        thread may write to it during the call.
    data : buffer
        The bytes of all rows, possibly with others.
    valid : column of bool or uint8, shape (n,), optional
        0 for a null row, whose hash is the constant of `hash_fixed`.

    Raises
    ------
    TypeError
        If an argument has another type.
    ValueError
        If ``hashes`` is read-only or a column is not one-dimensional and C-contiguous, if the
        lengths differ, or if offsets descend or are outside the data: the message names the row.
    """
    cdef cnp.ndarray hash_rows = _arguments.in_place(hashes, "hashes")
    cdef size_t n = rows(hash_rows), bad
    cdef cnp.ndarray starts = _arguments.byte_offset_column(offsets, n)
    cdef cnp.ndarray memory = as_bytes(data, "data")
    cdef size_t size = rows(memory)
    cdef cnp.ndarray valid_rows = _arguments.valid_column(valid, n)
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
        _arguments.refuse_byte_offsets(starts, bad, size)


def gather_binary(offsets, data, order):
    """Reorder the strings or bytes of a column.

    For short ones, it is several times as fast as Arrow's ``take``.

    Parameters
    ----------
    offsets : numpy.ndarray of int32 or int64, shape (n + 1,)
        Row i is ``data[offsets[i]:offsets[i + 1]]``.
    data : buffer
        The bytes of all rows, possibly with others.
    order : column of int64, shape (m,)
        Row numbers, as from `split_by_shard`; a row may occur any number of times.  No thread may
        write to this or to ``offsets`` during the call.

    Returns
    -------
    offsets : numpy.ndarray of the type given, shape (m + 1,)
        The new offsets, from 0.
    data : numpy.ndarray of uint8
        The bytes of these rows only.  The memory after them, up to a multiple of 64 bytes, is zero,
        so padded output is deterministic.

    Raises
    ------
    TypeError
        If an argument has another type.
    ValueError
        If a column is not one-dimensional and C-contiguous, if the bytes are too many for the
        offsets' type, or if offsets descend or are outside the data, or ``order`` has a number that
        is not a row's: then the message names the row.
    """
    cdef cnp.ndarray starts = _arguments.byte_offset_column(offsets)
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
        _arguments.refuse_byte_offsets(starts, bad, size)
    if bad_place < m:
        _arguments.refuse_taken(bad_place, <int64_t>places[bad_place], n)
    if total > most:
        _arguments.refuse_gathered()

    cdef int64_t room = (total + AT_ONCE + 63) // 64 * 64
    cdef cnp.ndarray gathered = new_column(room, cnp.NPY_UINT8)
    cdef uint8_t *out = <uint8_t *>cnp.PyArray_DATA(gathered)
    with nogil:
        gather_bytes(start, wide, at, size, places, m, end, out)
        memset(out + total, 0, room - total)
    return ends, gathered[:total]


def fingerprint(data, seed=0):
    """Return a 64-bit fingerprint of bytes, with which a later change of them is detected.

    It depends on every byte, on the order and on the length.  Different data have the same
    fingerprint with a probability of 2**-64.  It detects accidents: a block lost, swapped, cut off
    or written twice.  It is not cryptographic.

    Parameters
    ----------
    data : buffer
        Bytes, or another C-contiguous object with the buffer protocol.  Numbers count as their
        bytes in memory.
    seed : int, default 0
        64 bits, signed or not; another seed gives an unrelated result.

    Returns
    -------
    int
        In -2**63..2**63-1, the same on every machine and in every version.

    Raises
    ------
    TypeError
        If ``data`` is not a buffer, or ``seed`` is not an integer.
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
        print_ = kernel.fingerprint(at, size, start)
    return <int64_t>print_
