"""Tables: state by key that contains the contributions of ACKED records, each once.

This package is the part without files and Spark:

- `aggregates`: the aggregates of a table; `own_folds`: the base classes of your own;
- `group_values`: sums and extremes of groups of rows;
- `table_shape`: the columns of a table, checked;
- `folding`: rows become states by key, and states are merged;
- `table_segments`: stored rows as Arrow files, look-ups and scans;
- `time_windows`: windows of time; `watermarks`: the time until which they are closed;
- `window_rows`: the stored rows of sessions, and of windows that close;
- `table_compaction`: the choice of the segments that are merged.
"""

from ackcore.tables.aggregates import (
    approx_distinct,
    collect,
    count,
    first,
    latest,
    max_of,
    mean_of,
    min_of,
    sum_of,
)
from ackcore.tables.own_folds import BatchFold, Fold
from ackcore.tables.time_windows import session, sliding, tumbling

__all__ = [
    "BatchFold",
    "Fold",
    "approx_distinct",
    "collect",
    "count",
    "first",
    "latest",
    "max_of",
    "mean_of",
    "min_of",
    "session",
    "sliding",
    "sum_of",
    "tumbling",
]
