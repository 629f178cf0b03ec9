# cython: language_level=3, embedsignature=True, autotestdict=False
# cython: wraparound=False, boundscheck=False, initializedcheck=False
# cython: freethreading_compatible=True
"""The compiled core: ids in bulk.

Each column call has three stages: check and convert, allocate, then loops that run without
the GIL and cannot fail.  Nothing is copied on the way in.
"""

cimport cython
cimport numpy as cnp
from cpython.long cimport PyLong_AsLongLongAndOverflow, PyLong_CheckExact
from cpython.number cimport PyIndex_Check
from libc.stdint cimport INT32_MAX, INT64_MAX, UINT64_MAX, int32_t, int64_t, uint64_t

from ids cimport (
    ATTEMPT_BITS, OFFSET_BITS, PARTITION_BITS, acker_of, biject, bijection_t, edge_key,
    edge_key_t, edge_ordinal, edge_parent, edge_root, position, root_bijection, source_bijection,
)

from ackcore import _columns
from ackcore import _id_parts as parts

cnp.import_array()


# Arguments: the common types here, all others (and all refusals) through ackcore._columns,
# so that what is accepted, and the words for what is not, are those of the Python backend.

cdef cnp.ndarray id_column(object column, str name):
    """A 64-bit column as an array that shares its memory; items may be signed or not."""
    if cnp.PyArray_CheckExact(column) and cnp.PyArray_NDIM(column) == 1:
        if cnp.PyArray_ISCARRAY_RO(column):
            if cnp.PyArray_TYPE(column) == cnp.NPY_INT64 or cnp.PyArray_TYPE(column) == cnp.NPY_UINT64:
                return column
    return _columns.id_column(column, name)


cdef cnp.ndarray task_column(object column, str name):
    """A 32-bit column as an array that shares its memory."""
    if cnp.PyArray_CheckExact(column) and cnp.PyArray_NDIM(column) == 1:
        if cnp.PyArray_ISCARRAY_RO(column) and cnp.PyArray_TYPE(column) == cnp.NPY_INT32:
            return column
    return _columns.task_column(column, name)


cdef inline Py_ssize_t rows(cnp.ndarray column) noexcept:
    return cnp.PyArray_DIM(column, 0)


cdef inline const uint64_t *ids_of(cnp.ndarray column) noexcept:
    return <const uint64_t *>cnp.PyArray_DATA(column)


cdef inline const int32_t *tasks_of(cnp.ndarray column) noexcept:
    return <const int32_t *>cnp.PyArray_DATA(column)


cdef cnp.ndarray new_column(Py_ssize_t n, int typenum):
    cdef cnp.npy_intp shape = n
    return cnp.PyArray_EMPTY(1, &shape, typenum, 0)


cdef uint64_t as_id(object value, str name) except? 0:
    """64 bits from a Python integer of either sign."""
    cdef int overflow = 0
    cdef long long bits
    if PyLong_CheckExact(value):
        bits = PyLong_AsLongLongAndOverflow(value, &overflow)
        if overflow == 0:
            return <uint64_t>bits
    return <uint64_t><int64_t>_columns.as_id(value, name)


cdef int64_t as_count(object value, str name, int64_t least, int64_t most) except? -1:
    """An integer in least..most."""
    cdef int overflow = 0
    cdef long long count
    if PyLong_CheckExact(value):
        count = PyLong_AsLongLongAndOverflow(value, &overflow)
        if overflow == 0 and least <= count <= most:
            return count
    return parts.as_count(value, name, least, most)


# Ids.  Columns are checked in loops of their own: those that mix then have no way out, and
# the compiler turns them into vector instructions.

cdef inline int64_t as_part(object value, str name, int bits) except? -1:
    """A single part of an id: not negative, at most ``bits`` bits."""
    return as_count(value, name, 0, <int64_t>((<uint64_t>1 << bits) - 1))


cdef inline bint is_one_for_all(object value):
    """Whether an argument is one integer for all rows; arrays have __index__ as well."""
    return PyIndex_Check(value) and not cnp.PyArray_Check(value)


cdef int check_part(cnp.ndarray column, str name, int bits) except -1:
    """Refuse a column with an item that is negative or wider than ``bits`` bits."""
    cdef Py_ssize_t i, n = rows(column)
    cdef const uint64_t *wide
    cdef const int32_t *narrow
    cdef uint64_t seen = 0
    cdef int32_t seen_narrow = 0
    # The bits of all rows together: one that must not be set in any is not set in these.
    with nogil:
        if cnp.PyArray_ITEMSIZE(column) == 4:
            narrow = <const int32_t *>cnp.PyArray_DATA(column)
            for i in range(n):
                seen_narrow |= narrow[i]
            seen = <uint64_t>seen_narrow
        else:
            wide = <const uint64_t *>cnp.PyArray_DATA(column)
            for i in range(n):
                seen |= wide[i]
    if seen >> bits:
        parts.refuse_part(column, name, bits)
    return 0


def root_id(key, partition, offset, attempt):
    """Return the root id of one attempt at one record; see `ackcore.ids.root_id`."""
    cdef uint64_t k = as_id(key, "key")
    cdef int64_t p = as_part(partition, "partition", PARTITION_BITS)
    cdef int64_t o = as_part(offset, "offset", OFFSET_BITS)
    cdef int64_t a = as_part(attempt, "attempt", ATTEMPT_BITS)
    return <int64_t>biject(position(p, o, a), root_bijection(k))


def root_ids(key, partitions, offsets, attempts):
    """Return the root ids of a column of records; see `ackcore.ids.root_ids`."""
    cdef bijection_t keys = root_bijection(as_id(key, "key"))
    cdef cnp.ndarray partition_column = None, offset_column, attempt_column = None, ids
    cdef uint64_t partition = 0, attempt = 0, base
    cdef const uint64_t *offset_rows
    cdef const int32_t *partition_rows = NULL
    cdef const int32_t *attempt_rows = NULL
    cdef uint64_t *out
    cdef Py_ssize_t i, n

    if is_one_for_all(partitions):
        partition = as_part(partitions, "partitions", PARTITION_BITS)
    else:
        partition_column = task_column(partitions, "partitions")
        partition_rows = tasks_of(partition_column)
    offset_column = id_column(offsets, "offsets")
    offset_rows = ids_of(offset_column)
    n = rows(offset_column)
    if is_one_for_all(attempts):
        attempt = as_part(attempts, "attempts", ATTEMPT_BITS)
    else:
        attempt_column = task_column(attempts, "attempts")
        attempt_rows = tasks_of(attempt_column)
    if partition_column is not None:
        if rows(partition_column) != n:
            _columns.same_length(partitions=partition_column, offsets=offset_column)
        check_part(partition_column, "partitions", PARTITION_BITS)
    check_part(offset_column, "offsets", OFFSET_BITS)
    if attempt_column is not None:
        if rows(attempt_column) != n:
            _columns.same_length(offsets=offset_column, attempts=attempt_column)
        check_part(attempt_column, "attempts", ATTEMPT_BITS)

    ids = new_column(n, cnp.NPY_INT64)
    out = <uint64_t *>cnp.PyArray_DATA(ids)
    with nogil:
        base = position(partition, 0, attempt)
        for i in range(n):
            out[i] = base | position(0, offset_rows[i], 0)
        if partition_rows != NULL:
            for i in range(n):
                out[i] |= position(partition_rows[i], 0, 0)
        if attempt_rows != NULL:
            for i in range(n):
                out[i] |= position(0, 0, attempt_rows[i])
        for i in range(n):
            out[i] = biject(out[i], keys)
    return ids


def edge_id(key, root_id, component, parent_edge, ordinal):
    """Return the id of one delivery; see `ackcore.ids.edge_id`."""
    cdef uint64_t k = as_id(key, "key")
    cdef uint64_t root = as_id(root_id, "root_id")
    cdef edge_key_t keys = edge_key(k, as_id(parts.component_key(component), "component"))
    cdef uint64_t parent = as_id(parent_edge, "parent_edge")
    cdef uint64_t sibling = as_count(ordinal, "ordinal", 0, INT64_MAX)
    return <int64_t>edge_ordinal(edge_parent(edge_root(root, keys), parent, keys), sibling, keys)


def edge_ids(key, root_ids, component, parent_edges, ordinals):
    """Return the ids of a column of deliveries; see `ackcore.ids.edge_ids`."""
    cdef uint64_t k = as_id(key, "key")
    cdef cnp.ndarray root_column, parent_column = None, ordinal_column = None, ids
    cdef uint64_t parent = 0, ordinal = 0
    cdef const uint64_t *root_rows
    cdef const uint64_t *parent_rows = NULL
    cdef const uint64_t *ordinal_rows = NULL
    cdef uint64_t *out
    cdef Py_ssize_t i, n
    cdef edge_key_t keys

    root_column = id_column(root_ids, "root_ids")
    root_rows = ids_of(root_column)
    n = rows(root_column)
    keys = edge_key(k, as_id(parts.component_key(component), "component"))
    if is_one_for_all(parent_edges):
        parent = as_id(parent_edges, "parent_edges")
    else:
        parent_column = id_column(parent_edges, "parent_edges")
        parent_rows = ids_of(parent_column)
    if is_one_for_all(ordinals):
        ordinal = as_count(ordinals, "ordinals", 0, INT64_MAX)
    else:
        ordinal_column = id_column(ordinals, "ordinals")
        ordinal_rows = ids_of(ordinal_column)
    if parent_column is not None and rows(parent_column) != n:
        _columns.same_length(root_ids=root_column, parent_edges=parent_column)
    if ordinal_column is not None:
        if rows(ordinal_column) != n:
            _columns.same_length(root_ids=root_column, ordinals=ordinal_column)
        check_part(ordinal_column, "ordinals", parts.ORDINAL_BITS)

    ids = new_column(n, cnp.NPY_INT64)
    out = <uint64_t *>cnp.PyArray_DATA(ids)
    with nogil:
        for i in range(n):
            out[i] = edge_root(root_rows[i], keys)
        if parent_rows != NULL:
            for i in range(n):
                out[i] = edge_parent(out[i], parent_rows[i], keys)
        else:
            for i in range(n):
                out[i] = edge_parent(out[i], parent, keys)
        if ordinal_rows != NULL:
            for i in range(n):
                out[i] = edge_ordinal(out[i], ordinal_rows[i], keys)
        else:
            for i in range(n):
                out[i] = edge_ordinal(out[i], ordinal, keys)
    return ids


def xor_by_parent(parents, edges, n):
    """Return the XOR of each parent's edges; see `ackcore.ids.xor_by_parent`."""
    cdef cnp.ndarray parent_column = id_column(parents, "parents")
    cdef cnp.ndarray edge_column = id_column(edges, "edges")
    cdef cnp.npy_intp of_rows = as_count(n, "n", 0, INT64_MAX)
    cdef Py_ssize_t i = 0, m = rows(parent_column)
    cdef const uint64_t *parent_rows = ids_of(parent_column)
    cdef const uint64_t *edge_rows = ids_of(edge_column)
    cdef cnp.ndarray xors
    cdef uint64_t *out
    cdef uint64_t parent = 0
    if rows(edge_column) != m:
        _columns.same_length(parents=parent_column, edges=edge_column)

    xors = cnp.PyArray_ZEROS(1, &of_rows, cnp.NPY_INT64, 0)
    out = <uint64_t *>cnp.PyArray_DATA(xors)
    with nogil:
        # Checked in the same breath as used, and only once read: these are places in memory,
        # and another thread may write to the caller's column.
        while i < m:
            parent = parent_rows[i]
            if parent >= <uint64_t>of_rows:
                break
            out[parent] ^= edge_rows[i]
            i += 1
    if i < m:
        parts.refuse_parent(i, <int64_t>parent, of_rows)
    return xors


def acker_task(root_ids, n):
    """Return which of ``n`` acker tasks a root, or each of a column, belongs to; see `ackcore.ids.acker_task`."""
    cdef cnp.ndarray root_column, tasks
    cdef const uint64_t *root_rows
    cdef int32_t *out
    cdef int32_t among
    cdef Py_ssize_t i, m
    if is_one_for_all(root_ids):
        among = as_count(n, "n", 1, INT32_MAX)
        return acker_of(as_id(root_ids, "root_ids"), among)
    root_column = id_column(root_ids, "root_ids")
    among = as_count(n, "n", 1, INT32_MAX)
    root_rows = ids_of(root_column)
    m = rows(root_column)

    tasks = new_column(m, cnp.NPY_INT32)
    out = <int32_t *>cnp.PyArray_DATA(tasks)
    with nogil:
        for i in range(m):
            out[i] = acker_of(root_rows[i], among)
    return tasks


@cython.final
cdef class IdSource:
    """Ids for use in one process, each given once; see `ackcore.ids.IdSource`."""

    cdef uint64_t _key
    cdef uint64_t _given
    cdef bijection_t keys
    cdef cython.pymutex lock

    def __cinit__(self, key, given=0):
        # Not typed: the arguments of IdSource.__new__ are checked as those of the twin.
        self._key = as_id(key, "key")
        self._given = <uint64_t>parts.as_count(given, "given", 0, UINT64_MAX)
        self.keys = source_bijection(self._key)

    @property
    def key(self):
        """The key, signed."""
        return <int64_t>self._key

    @property
    def given(self):
        """How many ids have been given: the place at which a copy goes on."""
        cdef uint64_t given
        with self.lock:
            given = self._given
        return given

    cdef uint64_t take(self, uint64_t n) except? 1:
        """Reserve the next n counts and return how many were taken before them."""
        cdef uint64_t before
        with self.lock:
            before = self._given
            if n <= UINT64_MAX - before:
                self._given = before + n
        if n > UINT64_MAX - before:
            raise OverflowError(f"this source has given {before} ids and has no {n} left; use another key")
        return before

    def next(self):
        """Return the next id: an int in -2**63..2**63-1, never 0."""
        return <int64_t>biject(self.take(1) + 1, self.keys)

    def next_many(self, n):
        """Return the next ``n`` ids as an array of int64, the same as ``n`` calls of `next`."""
        cdef int64_t m = as_count(n, "n", 0, INT64_MAX)
        cdef Py_ssize_t i
        cdef cnp.ndarray ids = new_column(m, cnp.NPY_INT64)
        cdef uint64_t *out = <uint64_t *>cnp.PyArray_DATA(ids)
        cdef uint64_t first = self.take(m) + 1
        with nogil:
            for i in range(m):
                out[i] = biject(first + <uint64_t>i, self.keys)
        return ids

    def __reduce__(self):
        return IdSource, (self.key, self.given)

    def __repr__(self):
        # The key is left out: who has it can tell every id that is to come.
        return f"IdSource(given={self.given})"
