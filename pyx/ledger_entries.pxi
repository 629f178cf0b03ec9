# A Ledger's entries: merging, settling, a snapshot of all to save and restore, and views of its
# memory.  Part of _native.pyx, after ledger.pxi.

cdef int merge_columns(Ledger ledger, entries, bint check) except -1:
    """Fold entries in, or raise as `Ledger.merge`; ``check`` is false only for a ledger's own."""
    cdef list in_order = entry_columns(entries)
    cdef columns_t columns
    cdef batch_t batch
    cdef outcomes_t out
    cdef size_t n, need, missing = 0
    cdef int found = ROWS_BAD
    cdef bint frugal = False
    if check:
        if are_plain_arrays(in_order, ledger.timed):
            bind_columns(in_order, &columns)
            n = len(in_order[0])
            with nogil:
                found = kernel.check_rows(&columns, n, ledger.state.turns)
        if found == ROWS_BAD:
            entries = _columns.check_entries(entries, ledger.options.buckets, ledger.timed)
            in_order = entry_columns(entries)
    bind_columns(in_order, &columns)
    n = len(in_order[0])
    if found == ROWS_PLAIN:
        memset(&out, 0, sizeof(out))
        memset(&batch, 0, sizeof(batch))
        batch.root_ids = <const uint64_t *>columns.root_ids
        batch.vals = <const uint64_t *>columns.vals
        batch.tasks = columns.tasks
        run_batch(ledger, &batch, n, &out, False)
        return 0
    while True:
        with nogil:
            lock_acquire_nogil(&ledger.lock)
            need = kernel.reserve_needed(
                &ledger.state, n, ledger.most, <const uint64_t *>columns.root_ids, &missing,
                frugal,
            )
            if need == 0:
                kernel.merge_rows(&ledger.state, &columns, n)
            lock_release(&ledger.lock)
        if need == 0:
            break
        ledger.add_reserve(need, missing, &frugal)
    ledger.tidy()
    return 0


cdef object settled_of(Ledger ledger, object deadline):
    """Decide every entry once; remove the decided ones, and return them as `Settled`.

    An entry has timed out if its last message is older than the deadline.
    """
    # Without a deadline, or with one below the 64-bit integers, no entry has timed out.
    cdef bint timed_out = deadline is not None and deadline >= INT64_MIN
    cdef int64_t before = deadline if timed_out else 0
    cdef size_t n, most
    cdef columns_t out
    while True:
        most = len(ledger)
        columns = ledger.new_columns(most, &out)
        statuses = new_column(most, cnp.NPY_UINT8)
        out.statuses = <uint8_t *>cnp.PyArray_DATA(<cnp.ndarray>statuses)
        out.ages = NULL
        with nogil:
            lock_acquire_nogil(&ledger.lock)
            n = live(&ledger.state)
            if n <= most:
                n = kernel.settle_all(&ledger.state, &out, timed_out, before)
                most = SIZE_MAX
            lock_release(&ledger.lock)
        if most == SIZE_MAX:
            break
    roots, *others = (shortened(column, n) for column in columns)
    del others[4]  # ages, which settling does not store
    return _records.Settled(roots, shortened(statuses, n), *others)


cdef tuple snapshot_of(Ledger ledger):
    """Return pending and expired entries, and the counters, at one moment."""
    cdef size_t n, m, most_live, most_expired
    cdef int64_t counts[4]
    cdef columns_t out, gone
    memset(counts, 0, sizeof(counts))
    while True:
        lock_acquire_gil(&ledger.lock)
        most_live = live(&ledger.state)
        most_expired = takeable(&ledger.state)
        lock_release(&ledger.lock)
        pending = ledger.new_columns(most_live, &out)
        expired = ledger.new_columns(most_expired, &gone)
        with nogil:
            lock_acquire_nogil(&ledger.lock)
            n = live(&ledger.state)
            m = takeable(&ledger.state)
            if n <= most_live and m <= most_expired:
                n = kernel.list_entries(&ledger.state, &out)
                m = kernel.list_expired(&ledger.state, &gone)
                ledger.count(counts)
                most_live = SIZE_MAX
            lock_release(&ledger.lock)
        if most_live == SIZE_MAX:
            break
    return (
        _records.Entries(*[shortened(column, n) for column in pending]),
        _records.Entries(*[shortened(column, m) for column in expired]),
        _records.Stats(counts[0], counts[1], counts[2], counts[3]),
    )


cdef int restore(Ledger ledger, arguments, entries, expired, stats) except -1:
    # Without the lock: no other thread has a reference to this ledger yet.
    most, ledger.most = ledger.most, -1
    merge_columns(ledger, entries, False)
    merge_columns(ledger, expired, False)
    ledger.most = most
    ledger.options = ledger.options._replace(capacity=arguments["capacity"])
    ledger.state.min_buckets = kernel.buckets_for(min(ledger.options.capacity, INT64_MAX))
    ledger.state.second_inits = stats.second_inits
    ledger.state.orphans = stats.orphans - kernel.waiting_orphans(&ledger.state)
    ledger.state.untaken = stats.expired_untaken
    ledger.state.growths = stats.growths
    return 0


def restored(arguments, entries, expired, stats):
    """Rebuild a pickled or copied `Ledger`."""
    # Entries are in the order of their table. Filling a growing table with the same seed in that
    # order would cluster them at one end, so reserve room for all of them first.
    room = max(arguments["capacity"], len(entries) + len(expired))
    cdef Ledger ledger = Ledger(**{**arguments, "capacity": room})
    restore(ledger, arguments, entries, expired, stats)
    return ledger


cdef tuple views_of(Ledger ledger):
    cdef table_t cur, old
    lock_acquire_gil(&ledger.lock)
    cur = ledger.state.cur
    old = ledger.state.old
    Py_INCREF(<object>cur.owner)
    if old.n_buckets:
        Py_INCREF(<object>old.owner)
    lock_release(&ledger.lock)
    views = [bucket_view(cur)]
    Py_DECREF(<object>cur.owner)
    if old.n_buckets:
        views.append(bucket_view(old))
        Py_DECREF(<object>old.owner)
    return tuple(views)


cdef object BUCKET = np.dtype(
    [
        ("keys", np.uint64, SLOTS), ("stamps", np.uint8, SLOTS), ("overflow_count", np.uint8),
        ("not_tasks", np.int32, SLOTS), ("vals", np.uint64, SLOTS),
    ]
)
