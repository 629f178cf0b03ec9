"""What runs on workers: spouts and bolts in stages, and what passes between them.

A record's way to the file that its sink gets, module by module; a number is put to one that it
comes back to:

    first -> inflight -> bolts -> executors -> bolts 1 -> edges -> exchange ==>
    next -> exchange 2 -> next 3 -> inflight 4 -> bolts 5 -> executors 6 -> bolts 7 -> workfiles

`first` (for retries `retry`) reads it, and `next` behind an exchange; `inflight` marks what is in
flight; `bolts` calls `ackcore.topology.executors`, and hands on what is emitted; `edges` deals out
what goes to a later stage, and `exchange` packs it.  What a row hangs from is kept in `tracking`;
what becomes of that goes from `ledger_rows` through `exchange` to `last`, which settles it.
"""
