"""Decoders: turn a source's rows into the rows that a spout emits, in the task that reads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from ackcore.spark.base.schemas import CORRUPT_REASON, CORRUPT_RECORD
from ackcore.topology.failure_reasons import ReasonMaker
from ackcore.topology.row_conversion import Row, RowSchema
from ackcore.topology.tuples import Reason

_VALUE = "value"


class ValueDecoder:
    """A decoder that calls a user's deserializer on the values of Kafka records.

    ``spout``: the name of the spout, for reasons. ``deserializer``: the user's deserializer, see
    `ackcore.kafka.KafkaSpout`. ``value_type``: the type of the column ``value``.
    """

    def __init__(
        self, spout: str, deserializer: Callable[..., Any], value_type: pa.DataType
    ) -> None:
        self._spout = spout
        self._reasons = ReasonMaker(spout)
        self._deserializer = deserializer
        self._field = pa.field(_VALUE, value_type)
        self._rows = RowSchema(f"the deserializer of {spout!r}", pa.schema([self._field]))
        self._rows.projects = True  # producers add fields to their messages, and leave some out
        self._is_prepared = False

    def __eq__(self, other: object) -> bool:
        """Return whether the deserializer is the same object, and spout and type are equal."""
        if not isinstance(other, ValueDecoder) or self._deserializer is not other._deserializer:
            return False
        return bool((self._spout, self._field) == (other._spout, other._field))

    def __call__(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, dict[int, Reason]]:
        """Return the records with deserialized values, and the reasons of failures by row number.

        The value of a failed record is null, as is that of a record without a value. If the
        deserializer cannot be prepared, all records with a value fail.
        """
        rows: list[Row] = []
        failed: dict[int, Reason] = {}
        unprepared = self._prepared()
        contexts = self._contexts(batch) if _wants_context(self._deserializer) else None
        for row, value in enumerate(batch.column(_VALUE).to_pylist()):
            found: Row = (None,)
            if value is not None and unprepared is not None:
                failed[row] = unprepared
            elif value is not None:
                try:
                    context = () if contexts is None else (contexts(row),)
                    # A deserializer may fill the same list again for its next record.
                    found = self._rows.row((self._deserializer(value, *context),))
                except KeyboardInterrupt:
                    raise
                except BaseException as error:  # including SystemExit and a panic of an extension
                    failed[row] = self._reasons.of(error)
            rows.append(found)
        place = batch.schema.get_field_index(_VALUE)
        return batch.set_column(place, self._field, self._column(rows, failed)), failed

    def _prepared(self) -> Reason | None:
        """Call the deserializer's ``prepare``, if any, until it succeeds once; return its error."""
        if not self._is_prepared:
            try:
                getattr(self._deserializer, "prepare", lambda: None)()
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                return self._reasons.of(error)
            self._is_prepared = True
        return None

    def _column(self, rows: list[Row], failed: dict[int, Reason]) -> pa.Array:
        """Return values as a column, null if one does not fit; put its error into ``failed``."""
        batches, misfits = self._rows.batches(rows)
        for row, error in misfits:
            failed[row] = self._reasons.of(error)
        parts = {start: part.column(0) for start, part in batches}
        parts |= {row: pa.nulls(1, self._field.type) for row, _ in misfits}
        if len(parts) == 1:
            return next(iter(parts.values()))
        nothing = pa.nulls(0, self._field.type)
        return pa.concat_arrays([nothing, *(parts[start] for start in sorted(parts))])

    def _contexts(self, batch: pa.RecordBatch) -> Callable[[int], Any]:
        from ackcore.kafka.spout import value_context  # noqa: PLC0415 - may not be installed

        topics, headers = batch.column("topic"), batch.column("headers")

        def of(row: int) -> Any:
            pairs = [(one["key"], one["value"]) for one in headers[row].as_py() or ()]
            return value_context(topics[row].as_py(), pairs)

        return of


@dataclass(frozen=True)
class CorruptLines:
    """A decoder of lines of files: lines that could not be parsed fail without retries.

    ``spout``: the name of the spout, for reasons.
    """

    spout: str

    def __call__(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, dict[int, Reason]]:
        """Return all rows, without the columns on errors, and reasons by corrupt line's number."""
        said = batch.column(CORRUPT_REASON)
        failed: dict[int, Reason] = {}
        if said.null_count < len(said):
            failed = {
                place: Reason(self.spout, "CorruptRecord", text, final=True)
                for place, text in enumerate(said.to_pylist())
                if text is not None
            }
        names = [
            name for name in batch.schema.names if name not in (CORRUPT_RECORD, CORRUPT_REASON)
        ]
        return batch.select(names), failed


def _wants_context(deserializer: Any) -> bool:
    """Return whether this is confluent-kafka's `Deserializer`, which also takes a context."""
    return any(
        kind.__module__.startswith("confluent_kafka.") and kind.__name__ == "Deserializer"
        for kind in type(deserializer).__mro__
    )
