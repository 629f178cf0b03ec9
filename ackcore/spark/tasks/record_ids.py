"""The records that tasks read from sources, and their ids: root ids, message ids and claims.

A root id is a function of (partition, row number in the partition, attempt) and a key.  The key
differs for each micro-batch and spout, so two records never share a root id.  If a partition's rows
come in the same order when it is read again, their numbers are enough to find them.  For other
sources the spout stage *spills* the rows: it writes them to files as it reads them.

A message id identifies a record in its source.  It is the values of the columns that the spout
names, as text.  Without such columns it is ``micro-batch-partition-row``, assigned when the record
is first read and stored with it.  If the source does not guarantee unique message ids, each
record also makes a *claim*: an INIT under the hash of its message id.  A second claim of the same
id within the micro-batch is an anomaly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ackcore._arrow.hashing import hash_columns
from ackcore._arrow.record_batches import take_rows
from ackcore._arrow.shown import as_texts, shown_values
from ackcore._records import Bools, Int64s, UInt64s
from ackcore._reference.id_hashes import subkey
from ackcore.ids import edge_ids, root_ids
from ackcore.spark.base.arrow_batches import as_spark_types
from ackcore.spark.base.reasons import one_array
from ackcore.spark.base.schemas import ATTEMPT, CORRUPT_REASON, MESSAGE_ID
from ackcore.spark.tasks.row_files import PLACE, ROOT_ID, among
from ackcore.topology.tuples import Identity, Reason

#: The columns of a record that was read again, besides the source's columns.
READ_AGAIN = pa.schema(
    [(ROOT_ID, pa.int64()), (PLACE, pa.int64()), (MESSAGE_ID, pa.string()), (ATTEMPT, pa.int32())]
)
#: The partition of records due for a retry, whose row number is that in the table of due records.
RETRIES = (1 << 16) - 1
#: Later attempts share this number in root ids: no two of them run in one micro-batch.
LAST_ATTEMPT = (1 << 6) - 1
#: Claims are INITs with a task that no spout has: the spout's number plus this.
CLAIM = 1 << 20

#: The factors of `ackcore._reference.id_hashes.mix_many`, inverted modulo 2 ** 64.
_FACTORS = tuple(
    np.uint64(pow(factor, -1, 1 << 64)) for factor in (0x94D049BB133111EB, 0xBF58476D1CE4E5B9)
)


class Decoder(Protocol):
    """A function that turns a source's rows into the rows that the spout emits."""

    def __call__(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, dict[int, Reason]]:
        """Return a row to emit for each row; and the reasons of failed rows, by row number."""


class RefusedOffsets(NamedTuple):
    """Offsets from ``start`` to below ``stop`` whose records are dead letters once they are read.

    ``reason`` is the encoded `Reason` of the dead letters.
    """

    topic: str
    partition: int
    start: int
    stop: int
    reason: str


@dataclass(frozen=True)
class SpoutSpec:
    """The settings of one spout for the spout stage."""

    name: str
    number: int  # the number of the spout in ledger rows
    schema: pa.Schema  # the schema of the source's rows
    message_id: tuple[str, ...]  # the columns with the message id
    tracked: bool  # whether its records are acked and retried
    claims: bool  # whether its records claim their message ids
    spills: bool  # whether the rows are written to files, since a second read may give others
    key: int  # the key of the micro-batch for this spout
    #: Whether tasks read the source themselves.  No other spout shares the input of its rows.
    by_tasks: bool = False
    #: Makes the emitted rows in each attempt; waiting and dead records are stored undecoded.
    decode: Decoder | None = None
    refused: tuple[RefusedOffsets, ...] = ()  # new rows at these offsets fail
    ordered_by: tuple[str, ...] = ()  # the columns with the key whose records stay in order
    blocked: Int64s | None = None  # the hashes of keys whose new rows must wait
    number_column: str | None = None  # the column of `NUMBERS` that its waiting records have

    def held(self, batch: pa.RecordBatch) -> list[int]:
        """Return the row numbers of new records whose key is blocked by an earlier record."""
        if self.blocked is None:
            return []
        hashes, ordered = key_hashes(batch, self.ordered_by)
        places: list[int] = np.flatnonzero(ordered & np.isin(hashes, self.blocked)).tolist()
        return places

    def rows(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return rows from Spark with the columns and types of the schema."""
        if batch.schema.equals(self.schema):
            return batch
        if batch.num_columns != len(self.schema):
            batch = batch.select(self.schema.names)
        return as_spark_types(batch, self.schema)  # Spark may have other names for the columns

    def roots(self, partition: int, first: int, n: int, attempts: Any = 0) -> Int64s:
        """Return the root ids of ``n`` records from row ``first`` of a partition on."""
        places = np.arange(first, first + n, dtype=np.int64)
        return roots_of(self.key, partition, places, attempts)

    def claim_ids(self, batch: pa.RecordBatch) -> Int64s:
        """Return a hash of each record's message id, to find ids that occur twice."""
        columns = [batch.column(name) for name in self.message_id]
        return edge_ids(self.key, hash_columns(columns, len(batch)), "claim", 0, 0)

    def lacks_message_id(self, batch: pa.RecordBatch) -> Bools | None:
        """Return a mask of records with nulls in all columns of the message id; None if none has.

        Corrupt lines are not among them.
        """
        columns = [batch.column(name) for name in self.message_id]
        if columns and CORRUPT_REASON in self.schema.names:
            columns.append(batch.column(CORRUPT_REASON))  # a corrupt line fails for that reason
        if not columns or not all(column.null_count for column in columns):
            return None
        nulls = [column.is_null().to_numpy(zero_copy_only=False) for column in columns]
        found: Bools = np.logical_and.reduce(nulls)
        return found if found.any() else None

    def refusals(self, batch: pa.RecordBatch) -> dict[int, Reason]:
        """Return the reasons of the records of a batch at refused offsets, by row number."""
        found: dict[int, Reason] = {}
        if not self.refused:
            return found
        offsets = batch.column("offset").to_numpy()
        partitions = batch.column("partition").to_numpy()
        for one in self.refused:
            of = (partitions == one.partition) & (offsets >= one.start) & (offsets < one.stop)
            if of.any():
                of &= pc.equal(batch.column("topic"), one.topic).to_numpy(zero_copy_only=False)
            reason = Reason.decode(one.reason)
            found.update((place, reason) for place in np.flatnonzero(of).tolist())
        return found

    def message_ids(
        self, batch: pa.RecordBatch, number: int, partition: int, first: int
    ) -> pa.Array:
        """Return the message ids of records as text; without columns of ids, `assigned_ids`.

        Several columns, or one of bytes or nested values, give a JSON list. ``number``: the number
        of the micro-batch. ``first``: the row number of the first record in its partition.
        """
        if not self.message_id:
            return assigned_ids(number, partition, np.arange(first, first + len(batch)))
        columns = [batch.column(name) for name in self.message_id]
        # The text of a value must depend on the value alone, not on the rest of the batch.
        if len(columns) == 1 and _has_plain_text(columns[0].type):
            return pc.fill_null(as_texts(columns[0]), "null")
        parts = [_json_texts(column) for column in columns]
        if all(part is not None for part in parts):
            inside = pc.binary_join_element_wise(*parts, ", ")
            return pc.binary_join_element_wise("[", inside, "]", "")
        rows = zip(*(shown_values(column) for column in columns), strict=True)
        return pa.array([json.dumps(row, default=_text) for row in rows], pa.string())


class SourceRecords(NamedTuple):
    """Consecutive records of one spout, new ones or retries, from row ``first`` of a partition."""

    source: SpoutSpec
    batch: pa.RecordBatch
    partition: int
    first: int
    attempts: Any = 0  # the attempt of all records, or a column of them
    #: The stored rows of due records, in `TRACKING` and the source's columns; None for new records.
    due: pa.RecordBatch | None = None

    def message_ids(self, number: int) -> pa.Array:
        """Return the message ids as text: stored ones of due records, or those of the source."""
        if self.due is not None:  # stored since the first attempt
            return self.due.column(MESSAGE_ID)
        return self.source.message_ids(self.batch, number, self.partition, self.first)

    def identity(self, number: int) -> Identity:
        """Return message ids, numbers of earlier attempts, and ids that all attempts share.

        ``number``: the number of the micro-batch.
        """
        message_ids = self.message_ids(number)
        attempts = np.full(len(self.batch), self.attempts, np.int32)
        # Numbers made of the spout and the message ids are the same in every attempt.
        hashes = hash_columns([message_ids], len(message_ids))
        return Identity(message_ids, attempts, edge_ids(0, hashes, self.source.name, 0, 0))


def pick(
    some: SourceRecords, roots: Mapping[str, Int64s], claims: Mapping[str, Int64s], number: int
) -> pa.RecordBatch:
    """Return the records with the given roots, and the new ones with the given claim ids.

    ``roots``, ``claims``: by spout, sorted. A claim id is the hash of a message id; see
    `record_ids`. ``number``: the number of the micro-batch. The result is that of `records_at`.
    """
    source = some.source
    ids = source.roots(some.partition, some.first, len(some.batch), some.attempts)
    wanted = among(ids, roots.get(source.name, np.empty(0, np.int64)))
    repeated = claims.get(source.name)
    if repeated is not None and some.partition != RETRIES:
        wanted |= among(source.claim_ids(some.batch), repeated)
    return records_at(some, ids, np.flatnonzero(wanted), number)


def records_at(some: SourceRecords, ids: Int64s, places: Int64s, number: int) -> pa.RecordBatch:
    """Return some of the records in the columns of `READ_AGAIN` and of the source.

    ``ids``: the roots of all of the records. ``places``: the row numbers in the batch of the
    records to return, sorted. ``number``: the number of the micro-batch.

    The metadata of the result's schema has the spout's name.
    """
    source = some.source
    whole = len(places) == len(some.batch)
    rows = some.batch if whole else take_rows(some.batch, places)
    if some.due is not None:
        due_places = pa.array(places + some.first)
        names = some.due.column(MESSAGE_ID)
        message_ids = names if whole else names.take(pa.array(places))
        attempts = np.asarray(some.attempts, np.int32)[places]
    else:
        due_places = pa.nulls(len(places), pa.int64())
        if source.message_id:
            message_ids = source.message_ids(rows, number, some.partition, 0)
        else:
            message_ids = assigned_ids(number, some.partition, places + some.first)
        attempts = np.zeros(len(rows), np.int32)
    columns = [pa.array(ids[places]), due_places, message_ids, pa.array(attempts), *rows.columns]
    schema = pa.schema([*READ_AGAIN, *source.schema])
    schema = schema.with_metadata({"spout": source.name})
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def roots_of(key: int, partition: int, places: Int64s, attempts: Any = 0) -> Int64s:
    """Return root ids of row numbers in a partition; in a column, attempts above 63 count as 63."""
    if not isinstance(attempts, int):
        attempts = np.minimum(attempts, LAST_ATTEMPT).astype(np.int32)
    return root_ids(key, partition, places, attempts)


def positions_of(key: int, roots: Int64s) -> tuple[Int64s, Int64s]:
    """Return the partition and the row number of each root: the inverse of `roots_of`.

    ``key``: the key with which the roots were made.
    """
    words = roots.view(np.uint64) ^ np.uint64(subkey(key & (1 << 64) - 1, 2))
    words = _unmixed(words) - np.uint64(subkey(key & (1 << 64) - 1, 1))
    words = _unmixed(words) ^ np.uint64(subkey(key & (1 << 64) - 1, 0))
    places = (words >> np.uint64(6)) & np.uint64((1 << 42) - 1)
    return (words >> np.uint64(48)).astype(np.int64), places.astype(np.int64)


def _unmixed(words: UInt64s) -> UInt64s:
    """Return the numbers from which `ackcore._reference.id_hashes.mix_many` made some words."""
    words = _unshifted(words, 31) * _FACTORS[0]
    words = _unshifted(words, 27) * _FACTORS[1]
    return _unshifted(words, 30)


def _unshifted(words: UInt64s, bits: int) -> UInt64s:
    """Return the numbers x such that ``x ^ x >> bits`` are the given words."""
    found = words
    for shift in range(bits, 64, bits):
        found = found ^ (words >> np.uint64(shift))
    return found


def key_hashes(rows: pa.Table | pa.RecordBatch, columns: Sequence[str]) -> tuple[Int64s, Bools]:
    """Return the hash of each record's key, and whether none of the key's ``columns`` is null."""
    arrays = [one_array(rows[name]) for name in columns]
    ordered = np.ones(len(rows), np.bool_)
    for array in arrays:
        if array.null_count:
            ordered &= array.is_valid().to_numpy(zero_copy_only=False)
    return hash_columns(arrays, len(rows)), ordered


def assigned_ids(number: int, partition: int, places: Int64s) -> pa.Array:
    """Return the ids ``number-partition-place`` for a spout that names no message id columns."""
    texts = pa.array(places).cast(pa.string())
    return pc.binary_join_element_wise(f"{number}-{partition}", texts, "-")


def _has_plain_text(arrow_type: pa.DataType) -> bool:
    """Return whether a type's values have a plain text form; nested and binary ones have none."""
    return not pa.types.is_nested(arrow_type) and not (
        pa.types.is_binary(arrow_type) or pa.types.is_large_binary(arrow_type)
    )


def _json_texts(column: pa.Array) -> pa.Array | None:
    """Return values as `json.dumps` writes them, or None for nulls or other types."""
    if column.null_count:
        return None
    if pa.types.is_integer(column.type):
        return column.cast(pa.string())
    if not pa.types.is_string(column.type):
        return None
    encoded = column.dictionary_encode()
    if len(encoded.dictionary) > len(column) / 8:
        return None
    texts = [json.dumps(value) for value in shown_values(encoded.dictionary)]
    return pa.array(texts, pa.string()).take(encoded.indices)


def _text(value: Any) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
