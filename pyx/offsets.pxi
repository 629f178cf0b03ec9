# The OffsetTracker: its methods and lock around offsets.h.  Included by _native.pyx.
#
# Every call has three stages: check and convert; reserve memory; one loop that cannot fail.  The
# last two run in C under the lock, without the GIL for columns.

from offsets cimport (
    are_ascending, are_offsets, check_offsets_after, failure_t, failures_find, failures_room,
    is_done, list_failures, list_holes, load_failures, load_holes, offsets_ack, offsets_emit,
    offsets_fail, offsets_free, offsets_pass, offsets_t, segment_t,
)


ctypedef int64_t (*message_t)(offsets_t *t, const int64_t *offsets, size_t n) noexcept nogil

cdef str NO_OFFSETS = (
    "no memory to track {} offsets more; nothing was applied: try again with fewer, or when some "
    "have finished"
)


cdef int64_t as_offset(object value, str name) except? -1:
    cdef int overflow = 0
    cdef long long offset
    if PyLong_CheckExact(value):
        offset = PyLong_AsLongLongAndOverflow(value, &overflow)
        if overflow == 0 and 0 <= offset < INT64_MAX:
            return offset
    return _arguments.as_offset(value, name)


cdef cnp.ndarray offset_column(object offsets):
    cdef cnp.ndarray column = id_column(offsets, "offsets")
    cdef const int64_t *items = <const int64_t *>cnp.PyArray_DATA(column)
    cdef size_t n = rows(column)
    cdef bint good
    with nogil:
        good = are_offsets(items, n)
    if not good:
        _arguments.refuse_offsets(offsets, column)
    return column


cdef object in_order(object offsets):
    """Return a checked column in ascending order, so that gaps are detected, or an int itself."""
    cdef cnp.ndarray column
    cdef const int64_t *items
    cdef size_t n
    cdef bint ascending
    if is_one_for_all(offsets):
        return offsets
    column = offset_column(offsets)
    items = <const int64_t *>cnp.PyArray_DATA(column)
    n = rows(column)
    with nogil:
        ascending = are_ascending(items, n)
    return column if ascending else np.sort(column)


@cython.final
cdef class OffsetTracker:
    """The done offsets of one partition, in one generation of its assignment.

    The lowest offset that is not done is the one to commit: a reader must begin again there.  An
    offset is *emitted* when its record was read and sent, and *done* when its tree is ACKED or its
    record is in the dead letters.  Skipped offsets are done too, because no record has them
    (compaction, transaction markers).

    Parameters
    ----------
    topic : str
        The topic of the partition.
    partition : int
        The number of the partition, from 0.
    generation : int
        The number of the assignment, from 0: Kafka's, or the caller's own.  Make a new tracker when
        a partition is assigned again; records that the last owner still had in flight are then not
        confused with those in flight now.
    base : int
        The offset that this generation reads first: all below it are done.

    Raises
    ------
    TypeError, ValueError
        If an argument has another type or is out of range.

    Notes
    -----
    Pass offsets as a column (int64 or uint64, read in place and not kept) or as an int, in any
    order, and any number of times.  A call is applied whole or not at all.  `stats` counts offsets
    that had no effect, by cause, and messages with another generation.

    A record from which several tuples were made has one offset.  It is done when all of them are,
    that is, when a `Ledger` reports its root as ACKED.

    Any thread may call any method; methods with columns run without the GIL.  If a process is
    forked while another thread is in a call, the child cannot use its copy, in which calls may wait
    for ever.
    """

    cdef offsets_t t
    cdef lock_t lock
    cdef object key
    cdef int64_t _generation

    def __cinit__(self, topic, partition, generation, base):
        # Not __init__: this runs once, even for OffsetTracker.__new__(OffsetTracker, ...).
        if lock_init(&self.lock) != 0:
            raise MemoryError("no memory for a lock")
        self.key = _arguments.tracker_key(topic, partition, generation, base)
        self._generation = self.key.generation
        self.t.base = self.t.committable = self.t.position = self.t.done_end = self.key.base

    def __dealloc__(self):
        # No lock: no references are left.
        offsets_free(&self.t)
        lock_destroy(&self.lock)

    # Messages.

    def emitted(self, offsets, generation=None):
        """Mark offsets as emitted: their records were read and sent.

        Skipped offsets, between the position and the highest of these, become done: no record has
        them.  An offset that waits after a failure is in flight again.

        Parameters
        ----------
        offsets : column of int64, shape (n,), or int
            The offsets, in any order within a column.  Pass columns in the order of reading: an
            offset below the `position` has no effect, unless it waits.
        generation : int, optional
            The generation that read them; this tracker's by default.  Offsets of another one have
            no effect, and are counted as stale in `stats`.

        Returns
        -------
        int
            The number of offsets that are newly in flight.

        Raises
        ------
        TypeError, ValueError
            If ``offsets`` is neither a column of 64-bit integers nor an int, or has an item that is
            not an offset.
        MemoryError
            If there is no memory for them.

        If it raises, nothing has been applied.
        """
        return apply_offsets(self, offsets_emit, in_order(offsets), generation)

    def acked(self, offsets, generation=None):
        """Mark offsets as done: their records are ACKED, or in the dead letters.

        Parameters
        ----------
        offsets : column of int64, shape (n,), or int
            The offsets, in any order.
        generation : int, optional
            As for `emitted`.

        Returns
        -------
        int
            The number of offsets that are newly done.

        Raises
        ------
        TypeError, ValueError
            As for `emitted`.
        """
        return apply_offsets(self, offsets_ack, offsets, generation)

    def failed(self, offsets, generation=None):
        """Mark offsets in flight as failed: each waits until it is emitted again.

        Its `attempt` grows by 1.

        Parameters
        ----------
        offsets : column of int64, shape (n,), or int
            The offsets, in any order.
        generation : int, optional
            As for `emitted`.

        Returns
        -------
        int
            The number of offsets that newly wait.

        Raises
        ------
        TypeError, ValueError, MemoryError
            As for `emitted`.
        """
        return apply_offsets(self, offsets_fail, offsets, generation)

    def advance(self, position, generation=None):
        """Mark all offsets below a position that were not emitted as done.

        Call it when a reader is at the end: transaction markers may follow the last record, and
        would leave a lag for ever.

        Parameters
        ----------
        position : int
            The reader's position: the offset that it reads next.  It becomes the tracker's
            position, unless it is below that.
        generation : int, optional
            As for `emitted`.
        """
        cdef int64_t to = _arguments.as_position(position, "position")
        cdef bint stale = is_stale(self, generation)
        lock_acquire_gil(&self.lock)
        if stale:
            self.t.stale += 1
        else:
            offsets_pass(&self.t, to)
            check_offsets_after(&self.t, 1)
        lock_release(&self.lock)

    # Properties.

    @property
    def topic(self):
        """The topic."""
        return self.key.topic

    @property
    def partition(self):
        """The number of the partition."""
        return self.key.partition

    @property
    def generation(self):
        """The number of the generation; messages of other generations have no effect."""
        return self.key.generation

    @property
    def base(self):
        """The offset that this generation read first."""
        return self.key.base

    @property
    def position(self):
        """The highest offset that was emitted or passed, plus 1; at first `base`."""
        return read(self, &self.t.position)

    @property
    def committable(self):
        """The lowest offset that is not done: the one to commit, Kafka's next offset to read."""
        return read(self, &self.t.committable)

    @property
    def pending(self):
        """The number of offsets that were emitted and are not done."""
        return read(self, &self.t.pending)

    @property
    def waiting(self):
        """The number of pending offsets that failed and were not emitted again."""
        return read(self, &self.t.failures.waiting)

    @property
    def oldest(self):
        """The lowest pending offset, or None."""
        cdef int64_t lowest
        cdef bint found
        lock_acquire_gil(&self.lock)
        lowest = self.t.committable
        found = lowest < self.t.position
        lock_release(&self.lock)
        return lowest if found else None

    @property
    def nbytes(self):
        """The memory for offsets and failures, in bytes."""
        cdef size_t n
        lock_acquire_gil(&self.lock)
        n = (
            self.t.room * sizeof(uint64_t) + self.t.seg_room * sizeof(segment_t)
            + failures_room(&self.t.failures) * sizeof(failure_t)
        )
        lock_release(&self.lock)
        return n

    @property
    def stats(self):
        """The `OffsetStats`: the number of offsets in messages that had no effect, by cause."""
        cdef offsets_t t
        lock_acquire_gil(&self.lock)
        t = self.t
        lock_release(&self.lock)
        return _records.OffsetStats(t.stale, t.below_base, t.not_emitted, t.repeated)

    def is_done(self, offsets):
        """Return whether offsets are done, so that they need not be read (again).

        Parameters
        ----------
        offsets : column of int64, shape (n,), or int
            The offsets.  All below `base` are done.

        Returns
        -------
        numpy.ndarray of bool, shape (n,), or bool
            A bool for an int.

        Raises
        ------
        TypeError, ValueError
            As for `emitted`.
        """
        cdef int64_t one
        cdef bint done
        cdef cnp.ndarray column, answers
        cdef const int64_t *items
        cdef uint8_t *out
        cdef Py_ssize_t i, n
        if is_one_for_all(offsets):
            one = as_offset(offsets, "offsets")
            lock_acquire_gil(&self.lock)
            done = is_done(&self.t, one)
            lock_release(&self.lock)
            return done
        column = offset_column(offsets)
        n = rows(column)
        items = <const int64_t *>cnp.PyArray_DATA(column)
        answers = new_column(n, cnp.NPY_BOOL)
        out = <uint8_t *>cnp.PyArray_DATA(answers)
        with nogil:
            lock_acquire_nogil(&self.lock)
            for i in range(n):
                out[i] = is_done(&self.t, items[i])
            lock_release(&self.lock)
        return answers

    def attempt(self, offset):
        """Return the number of failures of an offset that is not done; 0 for all other offsets."""
        cdef int64_t one = as_offset(offset, "offset")
        cdef failure_t *failure
        cdef int32_t attempts = 0
        lock_acquire_gil(&self.lock)
        failure = failures_find(&self.t.failures, one)
        if failure != NULL:
            attempts = failure.attempts
        lock_release(&self.lock)
        return attempts

    # Inspection, saving and loading.

    def holes(self, limit=None):
        """Return the offsets below the highest done one that are not done.

        Parameters
        ----------
        limit : int, optional
            The maximum number of offsets, the lowest first; all by default.

        Returns
        -------
        numpy.ndarray of int64
            The offsets, in order.
        """
        cdef int64_t most = INT64_MAX
        cdef cnp.ndarray starts, ends, out
        cdef const int64_t *start
        cdef const int64_t *end
        cdef int64_t *to
        cdef int64_t offset, n = 0
        cdef Py_ssize_t i
        if limit is not None:
            most = min(_columns.as_count(limit, "limit", 0), INT64_MAX)
        starts, ends = snapshot_of_offsets(self, min(most, INT64_MAX - 1))[0][2:4]
        start = <const int64_t *>cnp.PyArray_DATA(starts)
        end = <const int64_t *>cnp.PyArray_DATA(ends)
        for i in range(rows(starts)):
            n += min(end[i] - start[i], most - n)
        out = new_column(n, cnp.NPY_INT64)
        to = <int64_t *>cnp.PyArray_DATA(out)
        n = 0
        for i in range(rows(starts)):
            for offset in range(start[i], end[i]):
                if n == most:
                    break
                to[n] = offset
                n += 1
        return out

    def state(self, limit=None):
        """Return the state that the next reader needs, for `from_state` and commit metadata.

        Parameters
        ----------
        limit : int, optional
            The maximum number of runs of holes, the lowest first. The state ends below the next.

        Returns
        -------
        OffsetState
            The state at one moment.
        """
        cdef int64_t most = INT64_MAX - 1
        if limit is not None:
            most = min(_columns.as_count(limit, "limit", 0), INT64_MAX - 1)
        return snapshot_of_offsets(self, most)[0]

    @classmethod
    def from_state(cls, topic, partition, generation, state):
        """Make a tracker that continues from the state of a tracker of an earlier generation.

        Its base is the committable offset of the state. The holes must be emitted again.

        Parameters
        ----------
        topic, partition, generation
            As for the constructor.
        state : OffsetState
            The result of `state`, or the state from `ackcore.offsets.decode_metadata`.

        Raises
        ------
        TypeError, ValueError
            If no tracker can have this state.
        """
        cdef OffsetTracker tracker
        checked = _arguments.check_state(state)
        tracker = cls(topic, partition, generation, checked.committable)
        load_offsets(tracker, checked, checked.committable)
        return tracker

    def __reduce__(self):
        """Pickle the key, the state, and the data that the next reader does not need."""
        state, waiting, position, stats = snapshot_of_offsets(self, INT64_MAX - 1)
        return restored_tracker, (tuple(self.key), state, position, waiting, stats)

    def __repr__(self):
        return (
            f"<ackcore.OffsetTracker: {self.topic}-{self.partition}, generation "
            f"{self.generation}, committable {self.committable}, {self.pending} pending, native>"
        )


cdef int64_t read(OffsetTracker tracker, const int64_t *field):
    """Read one number of the tracker under its lock, because another thread may change it."""
    cdef int64_t number
    lock_acquire_gil(&tracker.lock)
    number = field[0]
    lock_release(&tracker.lock)
    return number


cdef int is_stale(OffsetTracker tracker, object generation) except -1:
    """Return whether a message has another generation than the tracker; None has the same."""
    if generation is None:
        return False
    cdef int64_t theirs = as_count(generation, "generation", 0, INT64_MAX)
    return theirs != tracker._generation


cdef object apply_offsets(
    OffsetTracker tracker, message_t message, object offsets, object generation
):
    """Apply a message to an offset or a column; return the number of offsets that it changed.

    Raises MemoryError before any is changed.
    """
    cdef int64_t one, changed = 0
    cdef cnp.ndarray column
    cdef const int64_t *items
    cdef size_t n = 1
    cdef bint stale
    if is_one_for_all(offsets):
        one = as_offset(offsets, "offsets")
        stale = is_stale(tracker, generation)
        lock_acquire_gil(&tracker.lock)
        if stale:
            tracker.t.stale += 1
        else:
            changed = message(&tracker.t, &one, 1)
            check_offsets_after(&tracker.t, 1)
        lock_release(&tracker.lock)
    else:
        column = offset_column(offsets)
        stale = is_stale(tracker, generation)
        items = <const int64_t *>cnp.PyArray_DATA(column)
        n = rows(column)
        with nogil:
            lock_acquire_nogil(&tracker.lock)
            if stale:
                tracker.t.stale += n
            else:
                changed = message(&tracker.t, items, n)
                check_offsets_after(&tracker.t, n)
            lock_release(&tracker.lock)
    if changed < 0:
        raise MemoryError(NO_OFFSETS.format(n))
    return changed
