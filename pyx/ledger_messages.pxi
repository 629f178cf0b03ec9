# Messages into a Ledger, in columns and one at a time: preallocate, run, tidy.
# Part of _native.pyx, after ledger.pxi.

cdef size_t run_batch(
    Ledger ledger, const batch_t *batch, size_t n, const outcomes_t *out, bint decide
) except? 0x7fffffffffffffff:
    """Run n checked rows and return the number of their outcomes."""
    cdef size_t need, missing = 0, m = 0
    cdef bint frugal = False
    while True:
        with nogil:
            lock_acquire_nogil(&ledger.lock)
            need = kernel.reserve_needed(
                &ledger.state, n, ledger.most, batch.root_ids, &missing, frugal
            )
            if need == 0:
                m = kernel.run_batch(&ledger.state, batch, n, out, decide)
            lock_release(&ledger.lock)
        if need == 0:
            break
        ledger.add_reserve(need, missing, &frugal)
    ledger.tidy()
    return m


cdef object apply_columns(
    Ledger ledger, cnp.ndarray roots, cnp.ndarray vals, cnp.ndarray tasks, int32_t kind
):
    """Apply rows; `vals` and `tasks` are None for a kind without them."""
    cdef Py_ssize_t n = rows(roots)
    cdef batch_t batch
    cdef outcomes_t out
    cdef size_t m
    cdef cnp.ndarray root_ids, out_tasks, kinds, elapsed = None
    memset(&batch, 0, sizeof(batch))
    batch.now = ledger.now()  # first, because it is user code
    batch.root_ids = ids_of(roots)
    if vals is not None:
        batch.vals = ids_of(vals)
    if tasks is not None:
        batch.tasks = tasks_of(tasks)
    batch.kind = kind
    root_ids = new_column(n, cnp.NPY_INT64)
    out_tasks = new_column(n, cnp.NPY_INT32)
    kinds = new_column(n, cnp.NPY_UINT8)
    out.root_ids = <int64_t *>cnp.PyArray_DATA(root_ids)
    out.tasks = <int32_t *>cnp.PyArray_DATA(out_tasks)
    out.kinds = <uint8_t *>cnp.PyArray_DATA(kinds)
    out.elapsed = NULL
    if ledger.timed:
        elapsed = new_column(n, cnp.NPY_INT64)
        out.elapsed = <int64_t *>cnp.PyArray_DATA(elapsed)
    m = run_batch(ledger, &batch, n, &out, True)
    return _records.Outcomes(
        shortened(root_ids, m), shortened(out_tasks, m), shortened(kinds, m),
        shortened(elapsed, m),
    )


cdef object apply_one(Ledger ledger, uint64_t root, uint64_t val, int32_t task):
    """Apply one message; return its `Outcome` or None."""
    cdef int64_t out_root = 0, out_elapsed = 0
    cdef int32_t out_task = 0
    cdef uint8_t out_kind = 0
    cdef outcomes_t out
    cdef int64_t now = ledger.now()
    cdef size_t need, missing = 0, m = 0
    cdef bint untidy = False, frugal = False
    out.root_ids = &out_root
    out.tasks = &out_task
    out.kinds = &out_kind
    out.elapsed = &out_elapsed if ledger.timed else NULL
    while True:
        lock_acquire_gil(&ledger.lock)
        need = kernel.reserve_needed(&ledger.state, 1, ledger.most, &root, &missing, frugal)
        if need == 0:
            m = kernel.run_one(&ledger.state, root, val, task, now, &out)
            untidy = ledger.state.retired != NULL or kernel.desired_size(&ledger.state) != 0
        lock_release(&ledger.lock)
        if need == 0:
            break
        ledger.add_reserve(need, 1, &frugal)
    if untidy:
        ledger.tidy()
    if m == 0:
        return None
    return _records.Outcome(
        out_root, out_task, STATUSES[out_kind], out_elapsed if ledger.timed else None
    )
