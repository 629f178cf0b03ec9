"""What runs on workers: spouts and bolts in stages, and what passes between them.

A record's way to the file that its sink gets, a line for each stage; what is called in parentheses
hands its result back to the module before them:

    first (source, tracking) -> inflight -> bolts (time_limit, executors) -> edges -> exchange ==>
    next (exchange, tracking) -> inflight -> bolts (time_limit, executors) -> workfiles, task

`first` reads it, `retry` if it is due again, `next` behind an exchange.  `source` gives it its ids,
`tracking` keeps which roots a row hangs from, `inflight` marks what is in flight until `bolts` is
through with it.  `bolts` calls `ackcore.topology.executors` under a time limit and hands what they
emit to the next bolt, to `edges` if it is in a later stage, and to `workfiles` for a sink.  `task`
puts these together for one task, and when that ends reports the files by name.  What became of the
roots goes from `ledger_rows` through `exchange` to `last`, which settles it.
"""
