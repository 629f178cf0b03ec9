"""Arrow data for a ledger: conversion of columns and tables, mostly without copies.

A ledger reads Arrow arrays itself; this package adds functions for batches of them:

- `arrow_tables`: columns by name, errors for nulls with their row, entries and decisions as
  batches;
- `hashing`: hashes of rows, so that equal rows go to the same task;
- `record_batches`: rows in another order, batches cut by rows and bytes, buffers as numpy arrays;
- `lossless`: conversion of values and columns to a declared type without loss, or an error;
- `shown`: rows as Python values, with texts for values that Python cannot represent, and as JSON.
"""

from ackcore._arrow.arrow_tables import (
    ENTRY_SCHEMA,
    STATUS_NAMES,
    entries_from_batch,
    entries_to_batch,
    integers,
    nullable_within,
    refuse_nulls,
    settled_to_batch,
    status_names,
)
from ackcore._arrow.hashing import hash_columns
from ackcore._arrow.lossless import array_of, as_mapping, cast, short_repr
from ackcore._arrow.record_batches import (
    bytes_before,
    end_within,
    is_text,
    offsets_of,
    one_batch,
    rebatched,
    take_rows,
)

__all__ = [
    "ENTRY_SCHEMA",
    "STATUS_NAMES",
    "array_of",
    "as_mapping",
    "bytes_before",
    "cast",
    "end_within",
    "entries_from_batch",
    "entries_to_batch",
    "hash_columns",
    "integers",
    "is_text",
    "nullable_within",
    "offsets_of",
    "one_batch",
    "rebatched",
    "refuse_nulls",
    "settled_to_batch",
    "short_repr",
    "status_names",
    "take_rows",
]
