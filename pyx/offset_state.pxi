# Saving and loading of an OffsetTracker's state.  Part of _native.pyx, after offsets.pxi.

cdef tuple snapshot_of_offsets(OffsetTracker tracker, int64_t most):
    """Return the state with at most ``most`` runs of holes, waiting offsets, position and stats.

    All are from the same moment.
    """
    cdef cnp.ndarray starts, ends, failed, attempts, waits
    cdef int64_t *start
    cdef int64_t *end
    cdef int64_t *failure
    cdef int32_t *attempt
    cdef uint8_t *wait
    cdef size_t n, used, room, failure_room, wanted = <size_t>most + 1
    cdef offsets_t t
    with nogil:
        lock_acquire_nogil(&tracker.lock)
        n = list_holes(&tracker.t, NULL, NULL, wanted)
        used = tracker.t.failures.used
        lock_release(&tracker.lock)
    while True:
        # Room for offsets that other threads add meanwhile; if it does not suffice, retry.
        room = min(n + n // 4 + 16, wanted)
        failure_room = used + used // 4 + 16
        starts = new_column(room, cnp.NPY_INT64)
        ends = new_column(room, cnp.NPY_INT64)
        failed = new_column(failure_room, cnp.NPY_INT64)
        attempts = new_column(failure_room, cnp.NPY_INT32)
        waits = new_column(failure_room, cnp.NPY_UINT8)
        start = <int64_t *>cnp.PyArray_DATA(starts)
        end = <int64_t *>cnp.PyArray_DATA(ends)
        failure = <int64_t *>cnp.PyArray_DATA(failed)
        attempt = <int32_t *>cnp.PyArray_DATA(attempts)
        wait = <uint8_t *>cnp.PyArray_DATA(waits)
        with nogil:
            lock_acquire_nogil(&tracker.lock)
            n = list_holes(&tracker.t, start, end, room)
            used = tracker.t.failures.used
            if used <= failure_room:
                list_failures(&tracker.t, failure, attempt, wait)
            t = tracker.t
            lock_release(&tracker.lock)
        if used <= failure_room and (n < room or n == wanted):
            break
    top = max(t.committable, t.done_end)
    if n == wanted:  # one run more than allowed: the state ends below it
        n -= 1
        top = starts[n]
    order = np.argsort(failed[:used])
    state = _records.OffsetState(
        t.committable, int(top), starts[:n].copy(), ends[:n].copy(), failed[order],
        attempts[order],
    )
    waiting = failed[order][waits[order] != 0]
    stats = _records.OffsetStats(t.stale, t.below_base, t.not_emitted, t.repeated)
    return state, waiting, t.position, stats


cdef int load_offsets(OffsetTracker tracker, object state, int64_t position) except -1:
    """Fill a new tracker with a checked state and a position, or raise MemoryError."""
    cdef cnp.ndarray starts = state.hole_starts
    cdef cnp.ndarray ends = state.hole_ends
    cdef cnp.ndarray failed = state.failed
    cdef cnp.ndarray attempts = state.attempts
    if load_holes(
        &tracker.t, state.end, position, <const int64_t *>cnp.PyArray_DATA(starts),
        <const int64_t *>cnp.PyArray_DATA(ends), rows(starts),
    ) < 0 or load_failures(
        &tracker.t, <const int64_t *>cnp.PyArray_DATA(failed), tasks_of(attempts), rows(failed)
    ) < 0:
        raise MemoryError(
            "no memory for a tracker with these holes; make one without them, and read from "
            "committable again"
        )
    check_offsets_after(&tracker.t, rows(starts))
    return 0


def restored_tracker(key, state, position, waiting, stats):
    """Rebuild a pickled or copied `OffsetTracker`."""
    cdef OffsetTracker tracker = OffsetTracker(*key)
    cdef failure_t *failure
    cdef int64_t offset
    load_offsets(tracker, state, position)
    for offset in waiting.tolist():
        failure = failures_find(&tracker.t.failures, offset)
        failure.waits = 1
        tracker.t.failures.waiting += 1
    tracker.t.stale, tracker.t.below_base, tracker.t.not_emitted, tracker.t.repeated = stats
    return tracker
