# Ids around ids.h: arguments, columns, IdSource.  Part of _native.pyx.
#
# Separate loops check columns: the loops that mix then have no exit, and the compiler vectorises
# them.  Only `xor_by_parent` may stop at a bad row.

cdef inline int64_t as_part(object value, str name, int bits) except? -1:
    """Return a partition, offset or attempt; raise if it is negative or wider than ``bits``."""
    return as_count(value, name, 0, <int64_t>((<uint64_t>1 << bits) - 1))


cdef uint64_t component_key(object component) except? 0:
    if PyUnicode_CheckExact(component):
        return <uint64_t><int64_t>hash_name(component)
    return <uint64_t><int64_t>_arguments.component_key(component)


cdef inline bint is_one_for_all(object value):
    return PyIndex_Check(value) and not cnp.PyArray_Check(value)


cdef int check_part(cnp.ndarray column, str name, int bits) except -1:
    """Raise for a column with an item that is negative or wider than ``bits`` bits."""
    cdef Py_ssize_t i, n = rows(column)
    cdef const uint64_t *wide
    cdef const int32_t *narrow
    cdef uint64_t seen = 0
    cdef int32_t seen_narrow = 0
    # OR all rows: if a bit that must not be set is clear in the result, no row has it.
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
        _arguments.refuse_part(column, name, bits)
    return 0


cdef int same_length(
    Py_ssize_t n, tuple names, cnp.ndarray first, cnp.ndarray second, cnp.ndarray third
) except -1:
    """Raise for columns of other lengths than n; None represents one integer for all rows."""
    if first is None or rows(first) == n:
        if second is None or rows(second) == n:
            if third is None or rows(third) == n:
                return 0
    given = zip(names, (first, second, third))
    _columns.same_length(**{name: column for name, column in given if column is not None})
    return 0


cdef object hash_name = _arguments.hash_name


def root_id(key, partition, offset, attempt):
    """Return the root id of one attempt at one record.

    Parameters
    ----------
    key : int
        The spout's key, of `ackcore.ids.spout_key`: 64 bits, signed or not.
    partition, offset, attempt : int
        In 0..2**16-1, 0..2**42-1 and 0..2**6-1.

    Returns
    -------
    int
        In -2**63..2**63-1. With one key, different parts give different ids; one of these ids is 0.

    Raises
    ------
    TypeError
        If an argument is not an integer.
    ValueError
        If a part is out of range.
    OverflowError
        If ``key`` has more than 64 bits.
    """
    cdef uint64_t k = as_id(key, "key")
    cdef int64_t p = as_part(partition, "partition", PARTITION_BITS)
    cdef int64_t o = as_part(offset, "offset", OFFSET_BITS)
    cdef int64_t a = as_part(attempt, "attempt", ATTEMPT_BITS)
    return <int64_t>biject(position(p, o, a), root_bijection(k))


def root_ids(key, partitions, offsets, attempts):
    """Return the root ids of a column of records.

    Parameters
    ----------
    key : int
        The spout's key, of `ackcore.ids.spout_key`: 64 bits, signed or not.
    partitions : column of int32, shape (n,), or int
        In 0..2**16-1; one integer applies to all rows.
    offsets : column of int64 or uint64, shape (n,)
        In 0..2**42-1.
    attempts : column of int32, shape (n,), or int
        In 0..2**6-1; one integer applies to all rows.

    Returns
    -------
    numpy.ndarray of int64, shape (n,)
        Row i is ``root_id(key, partitions[i], offsets[i], attempts[i])``.

    Raises
    ------
    TypeError
        If an argument is neither a column of its type nor, where allowed, an integer.
    ValueError
        If a column is not one-dimensional and C-contiguous, if lengths differ, or if a
        part is out of range: the message names its row.
    OverflowError
        If ``key`` has more than 64 bits.
    """
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
    names = ("partitions", "offsets", "attempts")
    same_length(n, names, partition_column, offset_column, attempt_column)
    if partition_column is not None:
        check_part(partition_column, "partitions", PARTITION_BITS)
    check_part(offset_column, "offsets", OFFSET_BITS)
    if attempt_column is not None:
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
    """Return the id of one delivery of one tuple to one task.

    Parameters
    ----------
    key : int
        The spout's key, of `ackcore.ids.spout_key`: 64 bits, signed or not.
    root_id : int
        The root of the tuple.
    component : str or int
        The emitting component: a name, or 64 bits (its `ackcore.ids.component_key` is the same).
    parent_edge : int
        The edge on which the emitter received its input; 0 for a spout.
    ordinal : int
        The index among the siblings: the deliveries of this parent by this component, from 0.

    Returns
    -------
    int
        In -2**63..2**63-1, never 0.  Two ids collide with a probability of 2**-64.  Siblings
        can collide only because an id of 0 is replaced by another one.

    Raises
    ------
    TypeError
        If an argument has another type.
    ValueError
        If ``ordinal`` is not in 0..2**63-1.
    OverflowError
        If an id has more than 64 bits.
    """
    cdef uint64_t k = as_id(key, "key")
    cdef uint64_t root = as_id(root_id, "root_id")
    cdef edge_key_t keys = edge_key(k, component_key(component))
    cdef uint64_t parent = as_id(parent_edge, "parent_edge")
    cdef uint64_t sibling = as_count(ordinal, "ordinal", 0, INT64_MAX)
    return <int64_t>edge_ordinal(edge_parent(edge_root(root, keys), parent, keys), sibling, keys)


def edge_ids(key, root_ids, component, parent_edges, ordinals):
    """Return the ids of a column of deliveries by one component.

    Parameters
    ----------
    key : int
        The spout's key, of `ackcore.ids.spout_key`: 64 bits, signed or not.
    root_ids : column of int64 or uint64, shape (n,)
        The roots of the tuples.
    component : str or int
        The emitting component: a name, or 64 bits (its `ackcore.ids.component_key` is the same).
    parent_edges : column of int64 or uint64, shape (n,), or int
        The edges on which the emitter received its inputs; one integer applies to all rows.
    ordinals : column of int64, shape (n,), or int
        Indexes among the siblings, 0..2**63-1; one integer applies to all rows.

    Returns
    -------
    numpy.ndarray of int64, shape (n,)
        Row i is ``edge_id(key, root_ids[i], component, parent_edges[i], ordinals[i])``.

    Raises
    ------
    TypeError
        If an argument is neither a column of its type nor, where allowed, an integer.
    ValueError
        If a column is not one-dimensional and C-contiguous, if lengths differ, or if an
        ordinal is negative: the message names its row.
    OverflowError
        If an integer has more than 64 bits.
    """
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
    keys = edge_key(k, component_key(component))
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
    names = ("root_ids", "parent_edges", "ordinals")
    same_length(n, names, root_column, parent_column, ordinal_column)
    if ordinal_column is not None:
        check_part(ordinal_column, "ordinals", _arguments.ORDINAL_BITS)

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
    """Return the XOR of the edges of each of n parents.

    XORed with the edges of a bolt's inputs, these are its ack vals:
    ``edges_in ^ xor_by_parent(parents, edges_out, len(edges_in))``.

    Parameters
    ----------
    parents : column of int64 or uint64, shape (m,)
        Row numbers 0..n-1, in any order.
    edges : column of int64 or uint64, shape (m,)
        Parallel to ``parents``.
    n : int
        The number of parents, at least 0.

    Returns
    -------
    numpy.ndarray of int64, shape (n,)
        0 for a parent without edges.

    Raises
    ------
    TypeError
        If a column does not hold 64-bit integers, or ``n`` is not an integer.
    ValueError
        If a column is not one-dimensional and C-contiguous, if lengths differ, if ``n`` is
        negative, or if a parent is out of range: the message names its row.
    """
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
        # Read and check each index once: it is an index into memory, and another thread may
        # write to the caller's column.
        while i < m:
            parent = parent_rows[i]
            if parent >= <uint64_t>of_rows:
                break
            out[parent] ^= edge_rows[i]
            i += 1
    if i < m:
        _arguments.refuse_parent(i, <int64_t>parent, of_rows)
    return xors


def acker_task(root_ids, n):
    """Return the acker task, of n, for each root, as in Storm's fields grouping.

    In Java: ``floorMod(31 + (int) (id ^ (id >>> 32)), n)``.

    Parameters
    ----------
    root_ids : column of int64 or uint64, shape (m,), or int
        The roots, or one root.
    n : int
        The number of acker tasks, 1..2**31-1.

    Returns
    -------
    numpy.ndarray of int32, shape (m,), or int
        In 0..n-1; an int for an int.

    Raises
    ------
    TypeError
        If ``root_ids`` is neither a column of 64-bit integers nor an integer.
    ValueError
        If the column is not one-dimensional and C-contiguous, or ``n`` is out of range.
    OverflowError
        If a single root id has more than 64 bits.
    """
    cdef cnp.ndarray root_column, tasks
    cdef const uint64_t *root_rows
    cdef int32_t *out
    cdef uint64_t root
    cdef int32_t among
    cdef Py_ssize_t i, m
    if is_one_for_all(root_ids):
        root = as_id(root_ids, "root_ids")
        return acker_of(root, as_count(n, "n", 1, INT32_MAX))
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
    """A source of ids for one process: a counter through a keyed bijection.

    No id is returned twice, and none is 0.  Any thread may call `next` and `next_many`.  A copy,
    pickled or not, continues after the ids of the original: use only one of the two, because both
    return the same ids.

    Parameters
    ----------
    key : int
        64 bits, signed or not.  Sources with the same key return the same ids.
    given : int, default 0
        The number of ids to skip, 0..2**64-1.

    Raises
    ------
    TypeError
        If an argument is not an integer.
    ValueError
        If ``given`` is out of range.
    OverflowError
        If ``key`` has more than 64 bits.
    """

    cdef uint64_t _key
    cdef uint64_t _given
    cdef bijection_t keys
    cdef cython.pymutex lock

    def __cinit__(self, key, given=0):
        # Not typed, so that IdSource.__new__ checks its arguments as the reference
        # implementation does.
        self._key = as_id(key, "key")
        self._given = <uint64_t>_columns.as_count(given, "given", 0, UINT64_MAX)
        self.keys = source_bijection(self._key)

    @property
    def key(self):
        """The key as a signed int."""
        return <int64_t>self._key

    @property
    def given(self):
        """The number of ids that were skipped or returned so far. A copy continues after them."""
        cdef uint64_t given
        with self.lock:
            given = self._given
        return given

    cdef uint64_t take(self, uint64_t n) except? 1:
        """Reserve the next n counts; return the counter before, or raise OverflowError."""
        cdef uint64_t before
        with self.lock:
            before = self._given
            if n <= UINT64_MAX - before:
                self._given = before + n
        if n > UINT64_MAX - before:
            raise OverflowError(
                f"this source has given {before} ids and has no {n} left; use another key"
            )
        return before

    def next(self):
        """Return the next id, an int in -2**63..2**63-1, never 0.

        Raises OverflowError after 2**64 - 1 ids.
        """
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
        # Without the key, from which every later id can be computed.
        return f"IdSource(given={self.given})"
