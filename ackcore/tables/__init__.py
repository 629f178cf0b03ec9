"""Tables: state by key that contains the contributions of ACKED records, each once.

This package is the part without files and Spark:

- `aggregates`: the aggregates of a table, built-in and your own;
- `table_shape`: the columns of a table, checked;
- `folding`: rows become states by key, and states are merged;
- `table_segments`: stored rows as Arrow files, look-ups and scans;
- `table_compaction`: which segments are merged, and their rows.
"""

from ackcore.tables.aggregates import (
    Aggregate,
    BatchFold,
    Fold,
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

__all__ = [
    "Aggregate",
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
    "sum_of",
]
