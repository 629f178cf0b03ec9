# A snapshot of a whole Ledger, to save and restore it, and views of its memory.
# Part of _native.pyx, after ledger.pxi.

cdef tuple snapshot_of(Ledger ledger):
    """Pending and expired entries, and the counters, of one moment."""
    cdef size_t n, m, most_live, most_expired
    cdef int64_t counts[4]
    cdef columns_t out, gone
    memset(counts, 0, sizeof(counts))
    while True:
        lock_acquire_gil(&ledger.lock)
        most_live = live(&ledger.l)
        most_expired = takeable(&ledger.l)
        lock_release(&ledger.lock)
        pending = ledger.new_columns(most_live, &out)
        expired = ledger.new_columns(most_expired, &gone)
        with nogil:
            lock_acquire_nogil(&ledger.lock)
            n = live(&ledger.l)
            m = takeable(&ledger.l)
            if n <= most_live and m <= most_expired:
                n = kernel.list_entries(&ledger.l, &out)
                m = kernel.list_expired(&ledger.l, &gone)
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
    # Without the lock: no other thread has this ledger yet.
    most, ledger.most = ledger.most, -1
    ledger.merge_columns(entries, False)
    ledger.merge_columns(expired, False)
    ledger.most = most
    ledger.options = ledger.options._replace(capacity=arguments["capacity"])
    ledger.l.min_buckets = buckets_for(min(ledger.options.capacity, INT64_MAX))
    ledger.l.second_inits = stats.second_inits
    ledger.l.orphans = stats.orphans - kernel.waiting_orphans(&ledger.l)
    ledger.l.untaken = stats.expired_untaken
    ledger.l.growths = stats.growths
    return 0


def restored(arguments, entries, expired, stats):
    """Rebuild a pickled or copied `Ledger`."""
    # Entries come in the order of their table, and to fill a growing one of the same seed in
    # that order would crowd one end of it: there is room for all of them from the start.
    room = max(arguments["capacity"], len(entries) + len(expired))
    cdef Ledger ledger = Ledger(**{**arguments, "capacity": room})
    restore(ledger, arguments, entries, expired, stats)
    return ledger


cdef tuple views_of(Ledger ledger):
    """`Ledger.tables`."""
    cdef table_t cur, old
    lock_acquire_gil(&ledger.lock)
    cur = ledger.l.cur
    old = ledger.l.old
    Py_INCREF(<object>cur.owner)
    if old.n:
        Py_INCREF(<object>old.owner)
    lock_release(&ledger.lock)
    views = [bucket_view(cur)]
    Py_DECREF(<object>cur.owner)
    if old.n:
        views.append(bucket_view(old))
        Py_DECREF(<object>old.owner)
    return tuple(views)


cdef object BUCKET = np.dtype(
    [
        ("keys", np.uint64, SLOTS), ("stamps", np.uint8, SLOTS), ("over", np.uint8),
        ("not_tasks", np.int32, SLOTS), ("vals", np.uint64, SLOTS),
    ]
)
