# The Ledger: its methods, memory and lock around kernel.h.  Part of _native.pyx; longer bodies are
# in ledger_messages.pxi and ledger_entries.pxi.
#
# Every call has three stages: check and convert; preallocate the reserves that the rows may need;
# run the kernel once, under the lock, which cannot fail.  No Python code runs under the lock: it
# finds errors before and raises them after.

cdef str NO_ROOM = (
    "no memory for a table of {} entries; ask for less capacity, or apply rows in smaller batches"
)


cdef bint can_populate = True
#: The locks of the threads that run `_populate`, which release them at their end.
cdef set populating = set()


def _populate(memory, uintptr_t start, size_t n, running):
    """In a thread, have the system provide the n bytes at ``start``; then release ``running``.

    ``memory`` contains them, and is not unmapped while this refers to it. If the system cannot do
    so, `can_populate` becomes false, and no such thread is started any more.
    """
    global can_populate
    cdef bint done
    with nogil:
        done = kernel.populate(<char *>start, n)
    if not done:
        can_populate = False
    populating.discard(running)
    running.release()


def _end_populating():
    """At the exit, wait for the threads of `_populate`, at most a second for each of them."""
    for running in list(populating):
        running.acquire(timeout=1)


atexit.register(_end_populating)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=populating.clear)  # a child has none of the threads


@cython.final
cdef class Ledger:
    """Pending tuple trees, keyed by root id.

    Each entry holds the XOR of every value folded into it.  A tree is complete when its init has
    arrived and that XOR is zero; its entry is then removed.  Acks may arrive before the init.
    Messages have the same effect as in Apache Storm 2.x's ``org.apache.storm.daemon.Acker``.

    Parameters
    ----------
    capacity : int, default 1024
        The number of entries to reserve room for, 48 bytes each in a large table.  The table grows
        as needed, in slices.  It then has 62 to 94 bytes an entry, and is faster than a full table.
        It shrinks after a long time with few entries, but never below this size.
    buckets : int, default 3
        The number of turns (`rotate`) since its last refresh after which an entry expires, 2..126.
    refresh_on_ack : bool, default False
        Whether every message moves its entry to the newest bucket, as in early Storm; by default
        only a fail or a reset does.
    clock : callable, optional
        Returns the time as an int, in milliseconds.  With a clock, outcomes have ``elapsed_ms``,
        and entries ``first_ms`` and ``last_ms``.  A call with messages reads it once.
    max_entries : int, optional
        The limit on entries; a call that might exceed it raises `LedgerFull` and applies nothing.
    seed : int, optional
        The seed of the table's hash, by default a random one from the system.  Pass it only to
        get the same table layout twice (at one SIMD level), as in tests.

    Notes
    -----
    Any thread may call any method; methods with columns run without the GIL.  A call is applied
    whole or not at all.  If a process is forked while another thread is in a call, the child cannot
    use its copy of the ledger, in which calls may wait for ever: pass ``entries()`` or a pickle to
    it.
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
        # No lock: no references are left.
        kernel.close(&self.state)
        self.free_retired()
        lock_destroy(&self.lock)

    # Memory.

    cdef table_t new_table(self, size_t n) except *:
        """Return an empty table of n buckets, which owns a reference to the array of its memory.

        Raises MemoryError.
        """
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
        """Give the kernel an empty table of ``need`` buckets, to which its rows can move.

        Raises LedgerFull if ``need`` is FULL, for ``missing`` new roots.  Without memory, sets
        ``frugal``, so that the caller tries the smallest sufficient size, or raises MemoryError if
        it is set.
        """
        cdef table_t t
        if need == FULL:
            _columns.refuse_full(len(self), missing, self.most)
        try:
            t = self.new_table(need)
        except MemoryError:
            if frugal[0]:
                raise
            frugal[0] = True  # retry with the smallest sufficient size
            return 0
        lock_acquire_gil(&self.lock)
        kernel.add_reserve(&self.state, t)
        lock_release(&self.lock)
        return 0

    cdef int tidy(self) except -1:
        """After a call, free retired tables, and install one of the kernel's desired size.

        Without memory for that, the present table stays.
        """
        cdef size_t desired
        cdef table_t t
        lock_acquire_gil(&self.lock)
        desired = kernel.desired_size(&self.state)
        lock_release(&self.lock)
        if desired:
            try:
                t = self.new_table(desired)
            except MemoryError:
                return 0  # the present table is correct, though not ideal
            lock_acquire_gil(&self.lock)
            kernel.install(&self.state, t)
            lock_release(&self.lock)
        self.free_retired()
        return 0

    cdef int request_pages(self) except -1:
        """Start a thread that requests the pages which a migration will write next, if any.

        A page of 2 MB takes milliseconds where the host of a virtual machine has to provide it.
        """
        cdef char *start = NULL
        cdef size_t n
        lock_acquire_gil(&self.lock)
        n = kernel.pages_ahead(&self.state, &start)
        memory = <object>self.state.cur.owner
        lock_release(&self.lock)
        if n == 0 or not can_populate:
            return 0
        running = _thread.allocate_lock()
        running.acquire()
        populating.add(running)
        try:
            _thread.start_new_thread(_populate, (memory, <uintptr_t>start, n, running))
        except RuntimeError:  # no thread: the pages are faulted in later
            populating.discard(running)
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
            Parallel columns, read in place and not kept: any buffer, or Arrow arrays without
            nulls.
        tasks : buffer of int32, shape (n,)
            The kind of each row: a task >= 0 is an INIT by that spout task, otherwise ``ACK``,
            ``FAIL`` or ``RESET``.  The val of a fail or a reset is ignored.

        Returns
        -------
        Outcomes
            The outcomes, in the order of the rows.

        Raises
        ------
        TypeError, ValueError
            If a column has another type, shape or length, or a kind is unknown.
        LedgerFull
            If ``max_entries`` might be exceeded.
        MemoryError
            If the ledger cannot grow.

        If it raises, nothing has been applied.
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
        """Apply a batch of inits, as `apply` does; return their `Outcomes`. Tasks must be >= 0."""
        cdef cnp.ndarray roots = id_column(root_ids, "root_ids")
        cdef cnp.ndarray values = id_column(init_vals, "init_vals")
        cdef cnp.ndarray spouts = task_column(tasks, "tasks")
        if rows(values) != rows(roots) or rows(spouts) != rows(roots):
            _columns.same_length(root_ids=roots, init_vals=values, tasks=spouts)
        if lowest(spouts) < 0:
            _columns.check_init_tasks(spouts)
        return apply_columns(self, roots, values, spouts, 0)

    def ack_many(self, root_ids, ack_vals):
        """Apply a batch of acks, as `apply` does; return their `Outcomes`.

        Row i folds ``ack_vals[i]`` into the entry of ``root_ids[i]``.
        """
        cdef cnp.ndarray roots = id_column(root_ids, "root_ids")
        cdef cnp.ndarray values = id_column(ack_vals, "ack_vals")
        if rows(values) != rows(roots):
            _columns.same_length(root_ids=roots, ack_vals=values)
        return apply_columns(self, roots, values, None, TASK_ACK)

    def fail_many(self, root_ids):
        """Fail a batch of roots, as `apply` does; return their `Outcomes`."""
        return apply_columns(self, id_column(root_ids, "root_ids"), None, None, TASK_FAIL)

    def reset_timeout_many(self, root_ids):
        """Restart the time-out of a batch of roots, as `apply` does; return their `Outcomes`."""
        return apply_columns(self, id_column(root_ids, "root_ids"), None, None, TASK_RESET)

    # Messages one at a time.

    def init(self, root_id, init_val, task):
        """Apply one init by a spout task; return its `Outcome`, or None if the tree stays open."""
        cdef int32_t spout = as_count(task, "task", 0, INT32_MAX)
        return apply_one(self, as_id(root_id, "root_id"), as_id(init_val, "init_val"), spout)

    def ack(self, root_id, ack_val):
        """Apply one ack; return its `Outcome`, or None if the tree stays open."""
        return apply_one(self, as_id(root_id, "root_id"), as_id(ack_val, "ack_val"), TASK_ACK)

    def fail(self, root_id):
        """Fail one root; return its `Outcome`, or None before its init: the failure is kept."""
        return apply_one(self, as_id(root_id, "root_id"), 0, TASK_FAIL)

    def reset_timeout(self, root_id):
        """Restart the time-out of one root; return its `Outcome`, or None before its init."""
        return apply_one(self, as_id(root_id, "root_id"), 0, TASK_RESET)

    # Time.

    def rotate(self):
        """Make every entry one turn older; the entries of the oldest bucket expire.

        The time is bounded, whatever the number of entries, with two exceptions: the table's hash
        needs another seed, or expired entries are still in the table 126 turns after their last
        refresh (with 126 buckets, or without traffic), and must then be dropped at once.
        """
        lock_acquire_gil(&self.lock)
        kernel.rotate(&self.state)
        lock_release(&self.lock)
        self.tidy()

    def expired(self, limit=None):
        """Remove and return the entries that expired at the last turn.

        Parameters
        ----------
        limit : int, optional
            The maximum number of entries, to take them in slices; all by default.

        Returns
        -------
        Entries
            The entries, in any order.  The next turn drops and counts those not taken.
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
        """Fold a batch of messages in, without decisions, which `settle` makes.

        A message of any kind moves its entry to the newest bucket.
        Columns and errors as in `apply`.  ``times_ms`` (int64) is the time of each message, by
        default the clock's.  It raises ValueError in a ledger without a clock.
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
        """Fold the entries of a saved or another ledger in, without decisions.

        Values are XORed, inits added, and flags ORed; the greatest task and newest bucket are kept.

        Raises
        ------
        TypeError, ValueError
            If a column is not as in `Entries`, a row cannot be an entry, or only one of the
            entries and the ledger has times.
        LedgerFull, MemoryError
            As for `apply`.

        If it raises, nothing has been folded.
        """
        merge_columns(self, entries, True)

    def settle(self, now_ms=None, timeout_ms=None):
        """Decide every entry once, after all messages; remove and return the decided ones.

        Parameters
        ----------
        now_ms : int, optional
            The time in milliseconds; the clock's by default.  Unused without ``timeout_ms``.
        timeout_ms : int, optional
            The time-out: an entry whose last message is older is decided too.  By default none
            times out.  A time-out raises ValueError in a ledger without a clock.

        Returns
        -------
        Settled
            The decided entries, in any order: ``ANOMALY`` (several inits), ``ACKED``, ``FAILED``;
            and after the time-out ``EXPIRED``, or ``ORPHAN`` (no init).  Open entries stay in the
            ledger.
        """
        return settled_of(self, _columns.deadline(now_ms, timeout_ms, self._clock))

    # Inspection, saving and loading.

    cdef list new_columns(self, size_t n, columns_t *out):
        """Return columns for n entries, in the order of `Entries`."""
        columns = [new_column(n, typenum) for typenum in ENTRY_TYPES]
        if not self.timed:
            columns[6] = columns[7] = None
        bind_columns(columns, out)
        return columns

    def entries(self):
        """Return all pending entries as columns, in any order, for `from_entries` and `merge`."""
        return snapshot_of(self)[0]

    @classmethod
    def from_entries(cls, entries, **arguments):
        """Make a ledger with these entries; the other arguments are the constructor's."""
        cdef Ledger ledger = cls(**arguments)
        ledger.merge(entries)
        return ledger

    def get(self, root_id):
        """Return the `Entry` of a root, or None if it is not pending."""
        cdef uint64_t root = as_id(root_id, "root_id")
        cdef columns_t out
        cdef bint found
        columns = self.new_columns(1, &out)
        lock_acquire_gil(&self.lock)
        found = kernel.look_up(&self.state, root, &out)
        lock_release(&self.lock)
        return next(iter(_records.Entries(*columns))) if found else None

    def oldest(self, n):
        """Return up to n entries nearest to expiry: by age, then first message, then root id."""
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
        """The number of turns (`rotate`) since its last refresh after which an entry expires."""
        return self.options.buckets

    @property
    def refresh_on_ack(self):
        """Whether every message moves its entry to the newest bucket."""
        return self.options.refresh_on_ack

    @property
    def clock(self):
        """The callable that returns the time in milliseconds, or None."""
        return self._clock

    @property
    def max_entries(self):
        """The limit on entries, or None."""
        return self.options.max_entries

    @property
    def capacity(self):
        """The number of entries that the table holds before it grows."""
        cdef size_t n
        lock_acquire_gil(&self.lock)
        n = self.state.limit
        lock_release(&self.lock)
        return n

    @property
    def nbytes(self):
        """The memory of the table in bytes; during a migration, that of the parts in use of both.

        With huge pages, up to 4 MB more may be resident.
        """
        cdef size_t n
        lock_acquire_gil(&self.lock)
        n = memory_of(&self.state, self.timed)
        lock_release(&self.lock)
        return n

    @property
    def stats(self):
        """The `Stats` since the ledger was made."""
        cdef int64_t counts[4]
        with nogil:
            lock_acquire_nogil(&self.lock)
            self.count(counts)
            lock_release(&self.lock)
        return _records.Stats(counts[0], counts[1], counts[2], counts[3])

    cdef void count(self, int64_t *counts) noexcept nogil:
        """Store the fields of `Stats`; the caller has the lock."""
        # First, because it finishes a migration, which counts the orphans that it drops.
        cdef int64_t waiting = kernel.waiting_orphans(&self.state)
        counts[0] = self.state.second_inits
        counts[1] = self.state.orphans + waiting
        counts[2] = self.state.untaken
        counts[3] = self.state.growths

    @property
    def tables(self):
        """The table, and in a migration the former one, as read-only arrays of 64-byte buckets.

        They are views; after a growth they no longer show the ledger.
        """
        return views_of(self)

    def __reduce__(self):
        """Pickle the arguments, the pending and the expired entries, and the counters."""
        return restored, (self.options._asdict(), *snapshot_of(self))

    def __repr__(self):
        return f"<ackcore.Ledger: {len(self)} entries, {self.nbytes} bytes, native>"


cdef tuple STATUSES = tuple(_records.Status)
