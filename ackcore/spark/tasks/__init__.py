"""The code that runs on workers: spouts and bolts in stages, and the exchange between them.

The modules that a record passes on its way to a sink's file, one line for each stage. Modules in
parentheses are called by the module before them:

    spout_stage (record_ids, tracking) -> isolation -> bolts (time_limit, executors)
    -> shuffle_writer -> exchange ==>
    bolt_stage (exchange, tracking) -> isolation -> bolts (time_limit, executors) -> row_files, task

`spout_stage` reads new records and records that are due for a retry, and `bolt_stage` reads rows
behind an exchange.  `record_ids` makes the ids of a record.  `tracking`
keeps the roots that each row is anchored to.  `isolation` marks rows as in flight
(`inflight_markers`) until `bolts` has processed them.  `bolts` calls `ackcore.topology.executors`
under a time limit.  It passes emitted rows to the next bolt, to `shuffle_writer` for a later stage,
and to `row_files` for a sink.  `task` combines these parts for one task and reports the names of
its files at the end.  `ledger_rows` sends the outcome of roots through `exchange` to
`settle_stage`, which settles them.  If a tree fails before any row of it leaves the task, the
task itself settles the tree: `failed_writer` judges and keeps its record.  `reread_stage` reads a
source again for other failed records.  `exchange_format` defines the rows of an exchange.
"""
