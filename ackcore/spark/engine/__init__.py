"""The engine: the protocol that makes each record's outcome certain.

The modules that a micro-batch passes, one line for each step. Modules in parentheses are called by
the module before them:

    plan     batch -> checkpoint state, planned sources (closed_rows)
    run      runs (suspects, snapshot, insist) -> action (setup, kept_jobs) ==> tasks on workers ==>
    check    action -> check, runs (late_records, reread) -> check
    decide   runs (key_order, copies) -> decide -> batch -> checkpoint state
    act      batch -> act, table_changes (insist) -> sinks, tables, dead-letter store
    mark     batch -> checkpoint state, planned sources

`batch` takes one micro-batch through all steps, and makes the plan and the mark.  `runs` runs it
until a run is accepted: it waits for sources, and adds crashes to the plan.  `suspects` finds
records that crash their worker, and `snapshot` saves the new rows for runs that search for them.
`setup` has the arguments and the result of a run, and what its tasks get.  `action` is one run, a
single Spark action.  `check` raises `Disagreement` if the results contradict each other.  `reread`
reads failed records again.  `late_records` fails records whose windows have closed.  `key_order`
and `copies` let records wait behind earlier ones of their key.  `decide` decides which records wait
and which are dead.  `act` writes rows to the sinks, finds those that a sink refuses, folds tables,
and writes dead letters; `table_changes` passes the changed rows of tables to sinks, and
`closed_rows` those of closed windows to bolts.  `insist` repeats calls and has the errors that end
a query.  `progress` has the counts and the report of a micro-batch, and `causes` checks the limit
on dead records.
"""
