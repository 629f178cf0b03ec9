"""Arrow columns in, Arrow tables out: what a ledger takes and hands out, uncopied.

A ledger reads Arrow arrays by itself; this package adds what batches of them need:

- `tables`: columns by name, nulls refused with their place, entries and decisions as batches;
- `hashing`: hashes of rows, by which equal ones go to one place;
- `batches`: rows taken in another order, batches cut by rows and bytes;
- `lossless`: values and columns in a declared type, whole or not at all;
- `buffers`: what Arrow's buffers hold, as numpy arrays.
"""

from ackcore.arrow.batches import bytes_before, end_within, one_batch, rebatched, take_rows
from ackcore.arrow.buffers import is_text, offsets_of
from ackcore.arrow.hashing import hash_columns
from ackcore.arrow.lossless import array_of, as_mapping, cast, short_repr
from ackcore.arrow.tables import (
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
