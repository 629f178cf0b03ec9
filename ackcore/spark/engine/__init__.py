"""The engine: the protocol that makes each record's outcome certain.

The modules that a micro-batch passes, one line for each step. Modules in parentheses are called by
the module before them:

    plan     batch -> checkpoint state, planned sources (closed_rows)
    run      runs (suspects, snapshot, insist) -> action (setup, kept_jobs) ==> tasks on workers ==>
    check    action -> check, runs (late_records, reread) -> check
    decide   runs (key_order, copies) -> decide -> batch -> checkpoint state
    act      batch -> act, table_changes (insist) -> sinks, tables, dead-letter store
    mark     batch -> checkpoint state, planned sources
"""
