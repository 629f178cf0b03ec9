# The Ledger: its methods, memory and lock around kernel.h.  Part of _native.pyx; longer bodies are
# in ledger_messages.pxi and ledger_entries.pxi.
#
# Every call has three stages: check and convert; preallocate the reserves that the rows may need;
# one run of the kernel, under the lock, which cannot fail.  No Python code runs while the lock is
# held: errors are found before it and raised after it.

cdef str NO_ROOM = (
    "no memory for a table of {} entries; ask for less capacity, or apply rows in smaller batches"
)


@cython.final
cdef class Ledger:
    """Pending tuple trees, keyed by root id.

    Each entry holds the XOR of every value folded into it.  A tree is complete once its init has
    been seen and that XOR is zero; completing it forgets it.  Acks may arrive before the init.
    What each message means is Apache Storm 2.x's ``org.apache.storm.daemon.Acker``, case by case.

    Parameters
    ----------
    capacity : int, default 1024
        Entries to make room for up front.  The table grows when it must, in slices, and shrinks,
        never below this size, when its load has long been far lower.
    buckets : int, default 3
        An entry expires at this many calls of `rotate` after its last refresh, 2 to 126.
    refresh_on_ack : bool, default False
        Every message moves its entry to the newest bucket, as in early Storm; by default only
        a fail or a reset does.
    clock : callable, optional
        Returns the time as an int, in milliseconds.  With one, outcomes carry ``elapsed_ms``
        and entries ``first_ms`` and ``last_ms``.  It is called once a call.
    max_entries : int, optional
        A call that might take the ledger past this many entries is refused.
    seed : int, optional
        Of the table's hash.  Drawn from the system unless given; only tests and jobs that must
        lay out the same table twice, at one SIMD level, need to give one.

    Notes
    -----
    All methods may be called from any thread; those that take columns run without the GIL.
    A call is applied whole or not at all.  A process that was forked while another thread was
    in a call cannot use its copy of that ledger: hand it ``entries()`` or a pickle.
    """

    cdef ledger_t state
    cdef lock_t lock
    cdef bint timed
    cdef int64_t most
    cdef object options
    cdef object _clock

    def __cinit__(
        self, capacity=1024, *, buckets=3, refresh_on_ack=False, clock=None, max_entries=None,
        seed=None,
    ):
        # Not __init__: this runs once, even for Ledger.__new__(Ledger), so no method runs on
        # a ledger without a table.
        cdef table_t t
        if lock_init(&self.lock) != 0:
            raise MemoryError("no memory for a lock")
        self.options = _columns.ledger_options(
            capacity, buckets, refresh_on_ack, clock, max_entries, seed
        )
        self._clock = self.options.clock
        self.timed = clock is not None
        self.most = -1 if max_entries is None else min(self.options.max_entries, INT64_MAX)
        secret = int.from_bytes(os.urandom(8), "little") if seed is None else self.options.seed
        secret &= UINT64_MAX
        self.state.min_buckets = kernel.buckets_for(min(self.options.capacity, INT64_MAX))
        t = self.new_table(self.state.min_buckets)
        kernel.open(&self.state, t, self.options.buckets, self.options.refresh_on_ack, secret)

    def __dealloc__(self):
        # No lock: there are no references left.
        kernel.close(&self.state)
        self.free_retired()
        lock_destroy(&self.lock)

    # Memory.

    cdef table_t new_table(self, size_t n) except *:
        """An empty table of n buckets, which owns a reference to the array of its memory."""
        cdef cnp.ndarray memory
        if n >= <size_t>1 << 32:  # home_bucket scales 32 bits
            raise MemoryError(NO_ROOM.format(kernel.limit_of(n, self.state.min_buckets)))
        try:
            memory = zeroed(table_bytes(n, self.timed))
        except (MemoryError, OSError):
            raise MemoryError(NO_ROOM.format(kernel.limit_of(n, self.state.min_buckets))) from None
        Py_INCREF(memory)
        return table_at(cnp.PyArray_DATA(memory), n, self.timed, <void *>memory)

    cdef int add_reserve(self, size_t need, size_t missing, bint *frugal) except -1:
        """Add the reserve that the kernel asked for, or refuse what might pass `max_entries`."""
        cdef table_t t
        if need == FULL:
            _columns.refuse_full(len(self), missing, self.most)
        try:
            t = self.new_table(need)
        except MemoryError:
            if frugal[0]:
                raise
            frugal[0] = True  # ask again, for the least that suffices
            return 0
        lock_acquire_gil(&self.lock)
        kernel.add_reserve(&self.state, t)
        lock_release(&self.lock)
        return 0

    cdef int tidy(self) except -1:
        """After a call: free retired tables, and install one of the size the kernel desires."""
        cdef size_t desired
        cdef table_t t
        lock_acquire_gil(&self.lock)
        desired = kernel.desired_size(&self.state)
        lock_release(&self.lock)
        if desired:
            try:
                t = self.new_table(desired)
            except MemoryError:
                return 0  # the present table is correct, if not the best
            lock_acquire_gil(&self.lock)
            kernel.install(&self.state, t)
            lock_release(&self.lock)
        self.free_retired()
        return 0

    cdef void free_retired(self) noexcept:
        cdef void *owner
        while True:
            lock_acquire_gil(&self.lock)
            owner = kernel.next_retired(&self.state)
            lock_release(&self.lock)
            if owner == NULL:
                return
            Py_DECREF(<object>owner)

    cdef int64_t now(self) except? -1:
        return 0 if self._clock is None else _columns.read_clock(self._clock)

    # Messages in columns.

    def apply(self, root_ids, vals, tasks):
        """Apply a batch of messages of any kind, in order.

        Parameters
        ----------
        root_ids, vals : buffer of int64 or uint64, shape (n,), C-contiguous
            Parallel columns, read in place and not kept: anything with the buffer protocol, and
            Arrow arrays without nulls.
        tasks : buffer of int32, shape (n,)
            A task >= 0 is an INIT by that spout task; ``ACK``, ``FAIL`` or ``RESET`` otherwise.
            The val of a fail or a reset is ignored.

        Returns
        -------
        Outcomes
            In the order of the rows that brought them about.

        Raises
        ------
        TypeError, ValueError
            If a column is of another type, shape or length, or a kind is unknown.
        LedgerFull
            If ``max_entries`` might be passed.
        MemoryError
            If the ledger cannot grow.

        On any of these, nothing has been applied.
        """
        cdef cnp.ndarray roots = id_column(root_ids, "root_ids")
        cdef cnp.ndarray values = id_column(vals, "vals")
        cdef cnp.ndarray kinds = task_column(tasks, "tasks")
        if rows(values) != rows(roots) or rows(kinds) != rows(roots):
            _columns.same_length(root_ids=roots, vals=values, tasks=kinds)
        if lowest(kinds) < TASK_RESET:
            _columns.check_kinds(kinds)
        return apply_columns(self, roots, values, kinds, 0)

    def init_many(self, root_ids, init_vals, tasks):
        """Apply a batch of inits: `apply` with tasks that are all >= 0."""
        cdef cnp.ndarray roots = id_column(root_ids, "root_ids")
        cdef cnp.ndarray values = id_column(init_vals, "init_vals")
        cdef cnp.ndarray spouts = task_column(tasks, "tasks")
        if rows(values) != rows(roots) or rows(spouts) != rows(roots):
            _columns.same_length(root_ids=roots, init_vals=values, tasks=spouts)
        if lowest(spouts) < 0:
            _columns.check_init_tasks(spouts)
        return apply_columns(self, roots, values, spouts, 0)

    def ack_many(self, root_ids, ack_vals):
        """Apply a batch of acks: row i folds ``ack_vals[i]`` into ``root_ids[i]``."""
        cdef cnp.ndarray roots = id_column(root_ids, "root_ids")
        cdef cnp.ndarray values = id_column(ack_vals, "ack_vals")
        if rows(values) != rows(roots):
            _columns.same_length(root_ids=roots, ack_vals=values)
        return apply_columns(self, roots, values, None, TASK_ACK)

    def fail_many(self, root_ids):
        """Fail a batch of roots."""
        return apply_columns(self, id_column(root_ids, "root_ids"), None, None, TASK_FAIL)

    def reset_timeout_many(self, root_ids):
        """Give a batch of roots their full time again."""
        return apply_columns(self, id_column(root_ids, "root_ids"), None, None, TASK_RESET)

    # Messages one at a time.

    def init(self, root_id, init_val, task):
        """Apply one init by a spout task; return its `Outcome`, or None if nothing came of it."""
        cdef int32_t spout = as_count(task, "task", 0, INT32_MAX)
        return apply_one(self, as_id(root_id, "root_id"), as_id(init_val, "init_val"), spout)

    def ack(self, root_id, ack_val):
        """Apply one ack; return its `Outcome`, or None if nothing came of it."""
        return apply_one(self, as_id(root_id, "root_id"), as_id(ack_val, "ack_val"), TASK_ACK)

    def fail(self, root_id):
        """Fail one root; return its `Outcome`, or None if its init is still to come."""
        return apply_one(self, as_id(root_id, "root_id"), 0, TASK_FAIL)

    def reset_timeout(self, root_id):
        """Give one root its full time again; return its `Outcome`, or None without an init."""
        return apply_one(self, as_id(root_id, "root_id"), 0, TASK_RESET)

    # Time.

    def rotate(self):
        """Age every entry by one turn; the oldest bucket's entries leave.

        In bounded time, whatever is pending, unless the table's hash needs another seed or
        entries that expired are still there 126 turns after their last refresh, which have to be
        dropped at once: those not taken with 126 buckets, those not swept without traffic.
        """
        lock_acquire_gil(&self.lock)
        kernel.rotate(&self.state)
        lock_release(&self.lock)
        self.tidy()

    def expired(self, limit=None):
        """Hand out, once, the entries that left at the last turn.

        Parameters
        ----------
        limit : int, optional
            At most so many, to take them in slices; all of them by default.

        Returns
        -------
        Entries
            In any order.  What is not taken before the next turn is dropped, and counted.
        """
        cdef size_t n, most = SIZE_MAX
        if limit is not None:
            most = min(_columns.as_count(limit, "limit", 0), INT64_MAX)
        cdef columns_t out
        lock_acquire_gil(&self.lock)
        n = takeable(&self.state)
        lock_release(&self.lock)
        n = min(n, most)
        columns = self.new_columns(n, &out)
        with nogil:
            lock_acquire_nogil(&self.lock)
            n = kernel.take_expired(&self.state, &out, n)
            lock_release(&self.lock)
        self.free_retired()
        return _records.Entries(*[shortened(column, n) for column in columns])

    # Folding.

    def fold(self, root_ids, vals, tasks, times_ms=None):
        """Fold a batch of messages in without deciding anything; `settle` decides.

        Columns as in `apply`.  ``times_ms`` (int64) is the time of each message, for a ledger with
        a clock; by default all have the clock's.
        """
        cdef cnp.ndarray roots = id_column(root_ids, "root_ids")
        cdef cnp.ndarray values = id_column(vals, "vals")
        cdef cnp.ndarray kinds = task_column(tasks, "tasks")
        cdef cnp.ndarray times = None
        cdef Py_ssize_t n = rows(roots)
        cdef batch_t batch
        cdef outcomes_t out
        if times_ms is not None:
            times = _columns.times_column(times_ms, self.timed)
            _columns.same_length(root_ids=roots, vals=values, tasks=kinds, times_ms=times)
        elif rows(values) != n or rows(kinds) != n:
            _columns.same_length(root_ids=roots, vals=values, tasks=kinds)
        if lowest(kinds) < TASK_RESET:
            _columns.check_kinds(kinds)
        memset(&out, 0, sizeof(out))
        memset(&batch, 0, sizeof(batch))
        if times is None:
            batch.now = self.now()
        else:
            batch.times = <const int64_t *>cnp.PyArray_DATA(times)
        batch.root_ids = ids_of(roots)
        batch.vals = ids_of(values)
        batch.tasks = tasks_of(kinds)
        run_batch(self, &batch, n, &out, False)

    def merge(self, entries):
        """Fold saved or foreign entries in without deciding anything.

        Values XOR, inits add up, flags join, the greatest task and the newest bucket stay.

        Raises
        ------
        TypeError, ValueError
            If a column is not as in `Entries`, a row cannot be an entry, or one of the two keeps
            times and the other does not.  Nothing has been folded then.
        """
        merge_columns(self, entries, True)

    def settle(self, now_ms=None, timeout_ms=None):
        """Decide every entry once, when everything is in; what is decided leaves.

        Parameters
        ----------
        now_ms : int, optional
            The time, in milliseconds; the clock's by default.  Unused without
            ``timeout_ms``.
        timeout_ms : int, optional
            An entry whose last message is older than this is decided as well.

        Returns
        -------
        Settled
            The decided entries, in any order: ``ANOMALY`` (several inits), ``ACKED``, ``FAILED``,
            ``EXPIRED``, ``ORPHAN`` (no init).  What is open stays in the ledger.
        """
        return settled_of(self, _columns.deadline(now_ms, timeout_ms, self._clock))

    # Looking inside, saving and loading.

    cdef list new_columns(self, size_t n, columns_t *out):
        """Columns for n entries, in the order of `Entries`."""
        columns = [new_column(n, typenum) for typenum in ENTRY_TYPES]
        if not self.timed:
            columns[6] = columns[7] = None
        bind_columns(columns, out)
        return columns

    def entries(self):
        """All pending entries as columns, in any order: what `from_entries` and `merge` take."""
        return snapshot_of(self)[0]

    @classmethod
    def from_entries(cls, entries, **arguments):
        """A ledger with these entries; the other arguments are the constructor's."""
        cdef Ledger ledger = cls(**arguments)
        ledger.merge(entries)
        return ledger

    def get(self, root_id):
        """The `Entry` of a root, or None if it is not pending."""
        cdef uint64_t root = as_id(root_id, "root_id")
        cdef columns_t out
        cdef bint found
        columns = self.new_columns(1, &out)
        lock_acquire_gil(&self.lock)
        found = kernel.look_up(&self.state, root, &out)
        lock_release(&self.lock)
        return next(iter(_records.Entries(*columns))) if found else None

    def oldest(self, n):
        """The n entries nearest to expiry: by age, then first message, then root id."""
        cdef Py_ssize_t most = min(_columns.as_count(n, "n", 0), INT64_MAX)
        entries = self.entries()
        keys = [entries.root_ids, -entries.ages.astype(np.int16)]
        if self.timed:
            keys.insert(1, entries.first_ms)
        return entries.take(np.lexsort(keys)[:most])

    def __contains__(self, root_id):
        cdef uint64_t root = as_id(root_id, "root_id")
        cdef bint found
        lock_acquire_gil(&self.lock)
        found = kernel.look_up(&self.state, root, NULL)
        lock_release(&self.lock)
        return found

    def __len__(self):
        cdef size_t n
        lock_acquire_gil(&self.lock)
        n = live(&self.state)
        lock_release(&self.lock)
        return n

    @property
    def buckets(self):
        """Calls of `rotate` after its last refresh at which an entry expires."""
        return self.options.buckets

    @property
    def refresh_on_ack(self):
        """Whether every message moves its entry to the newest bucket."""
        return self.options.refresh_on_ack

    @property
    def clock(self):
        """The callable that gives the time in milliseconds, or None."""
        return self._clock

    @property
    def max_entries(self):
        """The bound on entries, or None."""
        return self.options.max_entries

    @property
    def capacity(self):
        """Entries that the present table holds before it grows."""
        cdef size_t n
        lock_acquire_gil(&self.lock)
        n = self.state.limit
        lock_release(&self.lock)
        return n

    @property
    def nbytes(self):
        """Bytes of the table, or of both while entries move from one to the other."""
        cdef size_t n
        lock_acquire_gil(&self.lock)
        n = table_bytes(self.state.cur.n_buckets, self.timed)
        if self.state.old.n_buckets:
            n += table_bytes(self.state.old.n_buckets, self.timed) - self.state.released
        lock_release(&self.lock)
        return n

    @property
    def stats(self):
        """`Stats`: second inits, orphans, expired and not taken, growths and reseeds."""
        cdef int64_t counts[4]
        with nogil:
            lock_acquire_nogil(&self.lock)
            self.count(counts)
            lock_release(&self.lock)
        return _records.Stats(counts[0], counts[1], counts[2], counts[3])

    cdef void count(self, int64_t *counts) noexcept nogil:
        """The fields of `Stats`; the caller has the lock."""
        # First: it finishes a migration, which counts the orphans that it drops.
        cdef int64_t waiting = kernel.waiting_orphans(&self.state)
        counts[0] = self.state.second_inits
        counts[1] = self.state.orphans + waiting
        counts[2] = self.state.untaken
        counts[3] = self.state.growths

    @property
    def tables(self):
        """The one or two tables as read-only arrays of 64-byte buckets; stale after growth."""
        return views_of(self)

    def __reduce__(self):
        """Constructor arguments, pending entries, expired ones that wait to be taken, counters."""
        return restored, (self.options._asdict(), *snapshot_of(self))

    def __repr__(self):
        return f"<ackcore.Ledger: {len(self)} entries, {self.nbytes} bytes, native>"


cdef tuple STATUSES = tuple(_records.Status)
