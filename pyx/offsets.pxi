# The OffsetTracker: its methods and lock around offsets.h.  Included by _native.pyx.
#
# Every call has three stages: check and convert; reserve memory; one loop that cannot fail.  The
# last two run in C under the lock, without the GIL for columns.

from offsets cimport (
    are_ascending, are_offsets, check_offsets_after, failure_t, failures_find, failures_room,
    is_done, list_failures, list_holes, load_failures, load_holes, offsets_ack, offsets_emit,
    offsets_fail, offsets_free, offsets_pass, offsets_t, segment_t,
)

from ackcore import _offset_arguments

ctypedef int64_t (*message_t)(offsets_t *t, const int64_t *offsets, size_t n) noexcept nogil

cdef str NO_OFFSETS = (
    "no memory to track {} offsets more; nothing was applied: try again with fewer, or when some "
    "have finished"
)


cdef int64_t as_offset(object value, str name) except? -1:
    """An offset from a Python integer."""
    cdef int overflow = 0
    cdef long long offset
    if PyLong_CheckExact(value):
        offset = PyLong_AsLongLongAndOverflow(value, &overflow)
        if overflow == 0 and 0 <= offset < INT64_MAX:
            return offset
    return _offset_arguments.as_offset(value, name)


cdef cnp.ndarray offset_column(object offsets):
    """A column of offsets as an array that shares its memory."""
    cdef cnp.ndarray column = id_column(offsets, "offsets")
    cdef const int64_t *items = <const int64_t *>cnp.PyArray_DATA(column)
    cdef size_t n = rows(column)
    cdef bint good
    with nogil:
        good = are_offsets(items, n)
    if not good:
        _offset_arguments.refuse_offsets(offsets, column)
    return column


cdef object in_order(object offsets):
    """Offsets as they are read, which is what says where the gaps are."""
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

    The lowest that is not done is where a reader has to begin again: what may be committed.  An
    offset is *emitted* when its record was read and sent on, and *done* when nothing more is to
    happen to it: its tree is ACKED, or it is in the dead letters.  Offsets that are passed over
    are done as well, since no record has them (compaction, transaction markers).

    Parameters
    ----------
    topic : str
        Of the partition.
    partition : int
        Its number, from 0.
    generation : int
        Of the assignment, from 0: Kafka's, or one that the caller counts.  A partition that is
        assigned anew gets a new tracker, so that what the last owner still had in flight cannot
        be taken for what is in flight now.
    base : int
        The offset that this generation reads first: all below it is done.

    Raises
    ------
    TypeError, ValueError
        If an argument is of another type or range.

    Notes
    -----
    Offsets go in as a column (int64, read in place and not kept; uint64 will do) or as an int,
    in any order, and any number of times.  A call is applied whole or not at all.  What changes
    nothing is counted in `stats`, by why; so is a message of another generation, if it says so.

    A record of which several tuples were made is one offset: it is done when all of them are, which
    is what a `Ledger` says of its root.

    All methods may be called from any thread; those that take columns run without the GIL.  A
    process that was forked while another thread was in a call cannot use its copy.
    """

    cdef offsets_t t
    cdef lock_t lock
    cdef object key
    cdef int64_t _generation

    def __cinit__(self, topic, partition, generation, base):
        # Not __init__: this runs once, even for OffsetTracker.__new__(OffsetTracker, ...).
        if lock_init(&self.lock) != 0:
            raise MemoryError("no memory for a lock")
        self.key = _offset_arguments.tracker_key(topic, partition, generation, base)
        self._generation = self.key.generation
        self.t.base = self.t.committable = self.t.position = self.t.done_end = self.key.base

    def __dealloc__(self):
        # No lock: there are no references left.
        offsets_free(&self.t)
        lock_destroy(&self.lock)

    # Messages.

    def emitted(self, offsets, generation=None):
        """Take in that records were read and sent on.

        Offsets between the position and the lowest of these, and between these, are done: no
        record has them.  An offset that waits after a failure is in flight again.

        Parameters
        ----------
        offsets : column of int64, shape (n,), or int
            In any order within a column.  Columns come as they are read: of an offset below the
            `position` it is known already what became of it, unless it waits.
        generation : int, optional
            Whose they are; this tracker's by default.

        Returns
        -------
        int
            How many of them are in flight now and were not before.

        Raises
        ------
        TypeError, ValueError
            If ``offsets`` is no column of 64-bit integers and no int, or one is no offset.
        MemoryError
            If there is no room for them.

        On any of these, nothing has been applied.
        """
        return apply_offsets(self, offsets_emit, in_order(offsets), generation)

    def acked(self, offsets, generation=None):
        """Take in that nothing more is to happen to records: ACKED, or in the dead letters.

        Parameters
        ----------
        offsets : column of int64, shape (n,), or int
            In any order.
        generation : int, optional
            As for `emitted`.

        Returns
        -------
        int
            How many of them are done now and were not before.

        Raises
        ------
        TypeError, ValueError
            As for `emitted`.
        """
        return apply_offsets(self, offsets_ack, offsets, generation)

    def failed(self, offsets, generation=None):
        """Take in that records failed: each waits until it is emitted again.

        Parameters
        ----------
        offsets : column of int64, shape (n,), or int
            In any order.
        generation : int, optional
            As for `emitted`.

        Returns
        -------
        int
            How many of them wait now and did not before.

        Raises
        ------
        TypeError, ValueError, MemoryError
            As for `emitted`.
        """
        return apply_offsets(self, offsets_fail, offsets, generation)

    def advance(self, position, generation=None):
        """Take in that nothing will be emitted below a position that was not yet.

        For a reader that has come to the end: behind the last record may lie markers of
        transactions, which would leave a lag for ever.

        Parameters
        ----------
        position : int
            The reader's: the offset that it reads next.  A lower one than that of the tracker
            changes nothing.
        generation : int, optional
            As for `emitted`.
        """
        cdef int64_t to = _offset_arguments.as_position(position, "position")
        cdef bint stale = is_stale(self, generation)
        lock_acquire_gil(&self.lock)
        if stale:
            self.t.stale += 1
        else:
            offsets_pass(&self.t, to)
            check_offsets_after(&self.t, 1)
        lock_release(&self.lock)

    # What came of them.

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
        """The number of the generation; messages of another change nothing."""
        return self.key.generation

    @property
    def base(self):
        """The offset that this generation read first."""
        return self.key.base

    @property
    def position(self):
        """One above the highest offset that was emitted or passed."""
        return read(self, &self.t.position)

    @property
    def committable(self):
        """The lowest offset that is not done: what to commit, as Kafka names the next to read."""
        return read(self, &self.t.committable)

    @property
    def pending(self):
        """Offsets that were emitted and are not done."""
        return read(self, &self.t.pending)

    @property
    def waiting(self):
        """Those of them that failed and were not emitted again."""
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
        """Bytes of memory for offsets and failures."""
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
        """`OffsetStats`: offsets of messages that changed nothing, by why."""
        cdef offsets_t t
        lock_acquire_gil(&self.lock)
        t = self.t
        lock_release(&self.lock)
        return _records.OffsetStats(t.stale, t.below_base, t.not_emitted, t.repeated)

    def is_done(self, offsets):
        """Whether records need not be read, or not again.

        Parameters
        ----------
        offsets : column of int64, shape (n,), or int
            Whatever is below `base` is done.

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
        """How often an offset that is not done has failed; 0 the first time, and when done."""
        cdef int64_t one = as_offset(offset, "offset")
        cdef failure_t *failure
        cdef int32_t attempts = 0
        lock_acquire_gil(&self.lock)
        failure = failures_find(&self.t.failures, one)
        if failure != NULL:
            attempts = failure.attempts
        lock_release(&self.lock)
        return attempts

    # Looking inside, saving and loading.

    def holes(self, limit=None):
        """The offsets that are not done below the highest that is.

        Parameters
        ----------
        limit : int, optional
            The lowest so many; all of them by default.

        Returns
        -------
        numpy.ndarray of int64
            In order.
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
        """The state that the next reader needs: for `from_state`, and for commit metadata.

        Parameters
        ----------
        limit : int, optional
            At most so many runs of holes, the lowest: the state ends below the next.

        Returns
        -------
        OffsetState
            Of one moment.
        """
        cdef int64_t most = INT64_MAX - 1
        if limit is not None:
            most = min(_columns.as_count(limit, "limit", 0), INT64_MAX - 1)
        return snapshot_of_offsets(self, most)[0]

    @classmethod
    def from_state(cls, topic, partition, generation, state):
        """A tracker that goes on where another, of an earlier generation, was saved.

        Its base is what was committable, and its holes are to be emitted again.

        Parameters
        ----------
        topic, partition, generation
            As for the constructor.
        state : OffsetState
            What `state` or `ackcore.offsets.decode_metadata` returned.

        Raises
        ------
        TypeError, ValueError
            If it is no state that a tracker can have.
        """
        cdef OffsetTracker tracker
        checked = _offset_arguments.check_state(state)
        tracker = cls(topic, partition, generation, checked.committable)
        load_offsets(tracker, checked, checked.committable)
        return tracker

    def __reduce__(self):
        """The tracked key, the state, and the part of it that the next reader does not need."""
        state, waiting, position, stats = snapshot_of_offsets(self, INT64_MAX - 1)
        return restored_tracker, (tuple(self.key), state, position, waiting, stats)

    def __repr__(self):
        return (
            f"<ackcore.OffsetTracker: {self.topic}-{self.partition}, generation "
            f"{self.generation}, committable {self.committable}, {self.pending} pending, native>"
        )


cdef int64_t read(OffsetTracker tracker, const int64_t *field):
    """One number, which another thread may be changing."""
    cdef int64_t number
    lock_acquire_gil(&tracker.lock)
    number = field[0]
    lock_release(&tracker.lock)
    return number


cdef int is_stale(OffsetTracker tracker, object generation) except -1:
    """Whether a message is of another generation than the tracker's."""
    if generation is None:
        return False
    cdef int64_t theirs = as_count(generation, "generation", 0, INT64_MAX)
    return theirs != tracker._generation


cdef object apply_offsets(
    OffsetTracker tracker, message_t message, object offsets, object generation
):
    """Apply one message to a column of offsets, or to one; how many it changed."""
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
