# Messages into a Ledger, in columns and one at a time: preallocate, run, tidy.
# Part of _native.pyx, after ledger.pxi.

cdef size_t run_batch(
    Ledger ledger, const batch_t *batch, size_t n, const outcomes_t *out, bint decide
) except? 0x7fffffffffffffff:
    """Run n checked rows; return the number of the outcomes in ``out``, 0 without ``decide``.

    Raises LedgerFull or MemoryError before any row is applied.
    """
    cdef size_t need, missing = 0, m = 0
    cdef bint untidy = False, migrates = False, frugal = False
    while True:
        with nogil:
            lock_acquire_nogil(&ledger.lock)
            need = kernel.reserve_needed(
                &ledger.state, n, ledger.most, batch.root_ids, &missing, frugal
            )
            if need == 0:
                m = kernel.run_batch(&ledger.state, batch, n, out, decide)
                untidy = is_untidy(&ledger.state)
                migrates = ledger.state.old.n_buckets != 0
            lock_release(&ledger.lock)
        if need == 0:
            break
        ledger.add_reserve(need, missing, &frugal)
    if untidy:
        ledger.tidy()
    if migrates:
        ledger.request_pages()
    return m


cdef inline bint is_untidy(const ledger_t *state) noexcept nogil:
    return state.retired != NULL or kernel.desired_size(state) != 0


# The maximum number of rows of a call whose outcomes are written to the stack and then copied: this
# makes one array for each column, where a longer column and a view of it are two.
cdef enum:
    SHORT_CALL = 1024


cdef cnp.ndarray copied(const void *items, size_t n, int typenum):
    cdef cnp.ndarray column = new_column(n, typenum)
    memcpy(cnp.PyArray_DATA(column), items, n * cnp.PyArray_ITEMSIZE(column))
    return column


cdef object outcomes_of(object root_ids, object tasks, object kinds, object elapsed_ms):
    """Return `Outcomes` without a call of its ``__init__``, which is Python."""
    outcomes = new_outcomes(Outcomes)
    outcomes.root_ids = root_ids
    outcomes.tasks = tasks
    outcomes.kinds = kinds
    outcomes.elapsed_ms = elapsed_ms
    return outcomes


cdef object Outcomes = _records.Outcomes
cdef object new_outcomes = object.__new__


cdef object apply_columns(
    Ledger ledger, cnp.ndarray roots, cnp.ndarray vals, cnp.ndarray tasks, int32_t kind
):
    """Apply checked rows; return their `Outcomes`. Without ``tasks``, all rows are of ``kind``.

    ``vals`` is None for a kind without values.
    """
    cdef Py_ssize_t n = rows(roots)
    cdef batch_t batch
    cdef outcomes_t out
    cdef size_t m
    cdef int64_t short_roots[SHORT_CALL]
    cdef int32_t short_tasks[SHORT_CALL]
    cdef uint8_t short_kinds[SHORT_CALL]
    cdef int64_t short_elapsed[SHORT_CALL]
    cdef cnp.ndarray root_ids, out_tasks, kinds, elapsed = None
    memset(&batch, 0, sizeof(batch))
    batch.now = ledger.now()  # first, because it is user code
    batch.root_ids = ids_of(roots)
    if vals is not None:
        batch.vals = ids_of(vals)
    if tasks is not None:
        batch.tasks = tasks_of(tasks)
    batch.kind = kind
    if n <= SHORT_CALL:
        out.root_ids = short_roots
        out.tasks = short_tasks
        out.kinds = short_kinds
        out.elapsed = short_elapsed if ledger.timed else NULL
        m = run_batch(ledger, &batch, n, &out, True)
        return outcomes_of(
            copied(short_roots, m, cnp.NPY_INT64), copied(short_tasks, m, cnp.NPY_INT32),
            copied(short_kinds, m, cnp.NPY_UINT8),
            copied(short_elapsed, m, cnp.NPY_INT64) if ledger.timed else None,
        )
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
    return outcomes_of(
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
            untidy = is_untidy(&ledger.state)
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
