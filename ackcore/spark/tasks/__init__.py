"""The code that runs on workers: spouts and bolts in stages, and the exchange between them.

A record's way to the file that its sink gets, a line for each stage; what is called in parentheses
hands its result back to the module before them:

    spout_stage (record_ids, tracking) -> isolation -> bolts (time_limit, executors)
    -> shuffle_writer -> exchange ==>
    bolt_stage (exchange, tracking) -> isolation -> bolts (time_limit, executors) -> row_files, task

`spout_stage` reads it, `retry_stage` if it is due again, `bolt_stage` behind an exchange.
`record_ids` gives it its ids, `tracking` keeps which roots a row hangs from, `isolation` marks what
is in flight (`inflight_markers`) until `bolts` is through with it.  `bolts` calls
`ackcore.topology.executors` under a time limit and hands what they emit to the next bolt, to
`shuffle_writer` if it is in a later stage, and to `row_files` for a sink.  `task` puts these
together for one task, and when that ends reports the files by name.  What became of the roots goes
from `ledger_rows` through `exchange` to `settle_stage`, which settles it, but for trees that have
failed before anything of them left: those the task settles, and `failed_writer` judges and keeps.
`reread_stage` reads a source again for other records that failed.  `exchange_format` says what a
row of an exchange holds.
"""
