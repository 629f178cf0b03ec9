"""Tables: one row of aggregates per key, in which each ACKED record counts once.

This package computes with Arrow columns in memory; `ackcore.spark.tables` reads and writes files.
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
