"""Arrow data: conversion to a ledger's columns and to Python, hashes of rows, cuts of batches."""

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
