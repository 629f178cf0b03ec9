"""The object through which a `BatchBolt` emits and fails rows, and the conversion of its columns.

Emitted columns may be Arrow, numpy, pandas or Python objects; they are converted to the schema of
the stream.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import numpy as np
import pyarrow as pa

from ackcore._arrow.lossless import array_of, as_mapping, cast
from ackcore._arrow.record_batches import is_list, offsets_of
from ackcore._arrow.shown import shown_values
from ackcore._error_hints import counted, listed
from ackcore._records import Int64s
from ackcore.topology.bolt_calls import FixedAttributes, no_stream
from ackcore.topology.components import DEFAULT_STREAM
from ackcore.topology.failure_reasons import ReasonMaker
from ackcore.topology.row_conversion import by_name, stream_title
from ackcore.topology.tuples import Anchors, Identity, Reason

_NOT_GIVEN: Any = object()

#: The result of one emit: the stream, the rows, and their anchors.
Piece: TypeAlias = tuple[str, pa.RecordBatch, Anchors]


@dataclass(repr=False, eq=False)
class BatchCollector(FixedAttributes):
    """The `BatchOutput` of one call of ``process`` or ``flush``, which collects its results.

    ``reasons``: converts the exceptions that the bolt passes to `fail`. ``schemas``: the schema of
    each stream that the bolt emits. ``first_row``: the number of the batch's row 0 among all rows
    of the task (its handle). ``rows``: the number of rows, to which `emit` and `fail` refer by
    numbers from 0. ``component``, ``stream``: the emitter of the batch, "" in ``flush``.
    ``identity``: the records of the rows, for a bolt with ``needs_identity``.
    """

    _reasons: ReasonMaker
    _schemas: Mapping[str, pa.Schema]
    first_row: int
    _rows: int
    component: str = ""
    stream: str = ""
    identity: Identity | None = None

    def __post_init__(self) -> None:
        self._lock = threading.RLock()
        self._closed = False
        self._emitted: list[Piece] = []
        self._failures: dict[int, Reason] = {}

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "the `out` of a BatchBolt cannot be pickled, because it works only in the call that "
            "received it; call out.emit() and out.fail() in that call"
        )

    def emit(
        self, columns: Any, *, parents: Any = _NOT_GIVEN, stream: str = DEFAULT_STREAM
    ) -> None:
        """Add tuples to the emissions of this call (`BatchOutput.emit`), unless there are none.

        Raises TypeError or ValueError, without effect, if an argument does not fit the stream or
        the rows. Raises RuntimeError after the call.
        """
        schema = self._schemas.get(stream)
        if schema is None:
            raise no_stream(self._reasons.component, stream, self._schemas)
        title = stream_title(self._reasons.component, stream)
        if parents is _NOT_GIVEN:
            raise TypeError(
                f"emit to {title} needs parents=, the input rows of each tuple, and got "
                "none; pass parents=range(len(batch)) if tuple i is made from row i, "
                "parents=pc.list_parent_indices(lists) for a flattened list column, a list "
                "of rows per tuple for a sum of several rows, None for untracked tuples"
            )
        batch = conform(columns, schema, title)
        anchors = self._anchors(parents, batch.num_rows)
        with self._lock:
            self._refuse_closed()
            if batch.num_rows:
                self._emitted.append((stream, batch, anchors))

    def fail(self, rows: Any, reasons: BaseException | Reason | str | Iterable[Any] | None) -> None:
        """Add failures of rows to those of this call; a row keeps its first reason.

        ``reasons``: one for all, or one for each row. Raises TypeError or ValueError, without
        effect, if an argument does not fit. Raises RuntimeError after the call.
        """
        handles = (_row_numbers(rows, "rows", self._rows) + self.first_row).tolist()
        why: list[Reason]
        if reasons is None or isinstance(reasons, BaseException | Reason | str):
            why = [self._reasons.of(reasons)] * len(handles)
        else:
            each: Any = reasons
            if isinstance(each, pa.Array | pa.ChunkedArray):
                each = shown_values(each)
            why = [self._reasons.of(reason) for reason in each]
            if len(why) != len(handles):
                raise ValueError(
                    "reasons must be one reason for all rows, or a list with one for each, got "
                    f"{counted(len(why), 'reason')} for {counted(len(handles), 'row')}"
                )
        with self._lock:
            self._refuse_closed()
            for handle, reason in zip(handles, why, strict=True):
                self._failures.setdefault(handle, reason)

    def _close(self) -> tuple[list[Piece], dict[int, Reason]]:
        """Return the call's emissions, and its failures by the row's number in the task.

        Later emits and fails raise.
        """
        with self._lock:
            self._closed = True
            return self._emitted, self._failures

    def _refuse_closed(self) -> None:
        if self._closed:
            raise RuntimeError(
                f"the `out` of bolt {self._reasons.component!r} cannot emit or fail any more: the "
                "call that received it has returned, and its rows are acked or failed; join your "
                "threads before the call returns"
            )

    def _anchors(self, parents: Any, rows: int) -> Anchors:
        """Convert the argument ``parents`` of `emit` to the anchors of the emitted ``rows``.

        Raises TypeError or ValueError if it does not fit the rows.
        """
        if parents is None:
            return Anchors(np.empty(0, np.int64), np.zeros(rows + 1, np.int64))
        if isinstance(parents, pa.ChunkedArray):
            parents = parents.combine_chunks()
        elif hasattr(parents, "to_numpy") and not isinstance(parents, pa.Array):  # a Series
            parents = parents.to_numpy()
        if isinstance(parents, pa.Array) and is_list(parents.type):
            if parents.null_count:
                raise ValueError(
                    "parents must not hold nulls, got a list array with "
                    f"{parents.null_count}; an empty list leaves a row untracked"
                )
            lists = [parents.value_lengths().to_numpy(zero_copy_only=False), parents.flatten()]
        elif _is_lists(parents):
            lists = [[len(one) for one in parents], [row for one in parents for row in one]]
        else:
            lists = []
        if lists:
            given, flat = len(lists[0]), _row_numbers(lists[1], "parents", self._rows)
            offsets = offsets_of(np.asarray(lists[0], np.int64))
        else:
            flat, offsets = _row_numbers(parents, "parents", self._rows), None
            given = len(flat)
        if given != rows:
            raise ValueError(
                f"parents must have one item for each emitted row, got "
                f"{counted(given, 'item')} for {counted(rows, 'row')}; an item is a row number, or "
                "a list of them for several parents; pass parents=None to emit untracked rows"
            )
        return Anchors(flat + self.first_row, offsets)


def _is_lists(parents: Any) -> bool:
    """Return whether parents are a Python or numpy sequence of sequences.

    Raises TypeError if only some items are sequences.
    """
    if isinstance(parents, np.ndarray):
        return parents.dtype == object and parents.ndim == 1 and _is_lists(parents.tolist())
    if not isinstance(parents, list | tuple):
        return False
    lists = sum(isinstance(one, list | tuple | np.ndarray) for one in parents)
    if 0 < lists < len(parents):
        raise TypeError(
            "parents must be all row numbers or all lists of row numbers, got "
            f"{counted(lists, 'list')} among {len(parents)} items; write a single row number n as "
            "[n]"
        )
    return lists > 0


def _row_numbers(column: Any, name: str, rows: int) -> Int64s:
    """Convert the argument ``name``, a column of row numbers, to numpy's int64.

    Raises TypeError if it is not a column of integers. Raises ValueError if it has a null, or a
    number that is not from 0 to ``rows - 1``.
    """
    if isinstance(column, pa.Array | pa.ChunkedArray):
        if column.null_count:
            raise ValueError(f"{name} must not hold nulls, got {column.null_count}; drop them")
        column = column.to_numpy(zero_copy_only=False)
    if isinstance(column, range):  # numpy would convert it number by number
        column = np.arange(column.start, column.stop, column.step)
    numbers = np.asarray(column)
    if numbers.ndim == 1 and not len(numbers):
        return np.empty(0, np.int64)
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        hint = "; take np.flatnonzero() of a mask" if numbers.dtype.kind == "b" else ""
        raise TypeError(
            f"{name} must be a column of row numbers, which are integers, got {numbers.ndim} "
            f"dimensions of {numbers.dtype}{hint}"
        )
    low, high = int(numbers.min()), int(numbers.max())
    if low < 0 or high >= rows:
        raise ValueError(
            f"{name} must be numbers of the {counted(rows, 'row')} that the bolt received, from 0 "
            f"to {rows - 1}, got {low if low < 0 else high}"
        )
    return numbers.astype(np.int64, copy=False)


def conform(columns: Any, schema: pa.Schema, title: str) -> pa.RecordBatch:
    """Convert columns, in any form that `columns_in` takes, to a batch with exactly this schema.

    Raises TypeError or ValueError if columns are missing, unknown or of different lengths, if a
    value would change by the cast, or for a null in a field that is not nullable. ``title`` is the
    name of the schema in the text.
    """
    found = columns_in(columns, schema, title)
    arrays = [_column(column, field, title) for column, field in zip(found, schema, strict=True)]
    lengths = {len(array) for array in arrays}
    if len(lengths) > 1:
        pairs = ", ".join(
            f"{name}: {len(array)}" for name, array in zip(schema.names, arrays, strict=True)
        )
        raise ValueError(
            f"the columns of {title} must have the same length, got {pairs}; emit a value of each "
            "for each tuple"
        )
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def columns_in(columns: Any, schema: pa.Schema, title: str) -> list[Any]:
    """Return columns as a list in the order of the schema, not converted.

    ``columns``: a RecordBatch, a Table, a mapping by name, or a list in that order. Raises
    TypeError for another type, and ValueError for a missing, unknown or repeated column.
    """
    names = schema.names
    if isinstance(columns, pa.RecordBatch | pa.Table):
        given = dict(zip(columns.schema.names, columns.columns, strict=True))
        if len(given) < columns.num_columns:
            twice = [name for name in given if columns.schema.names.count(name) > 1]
            raise ValueError(
                f"columns must have each field of {title} once, got {listed(twice)} several times"
            )
        return by_name(given, names, "columns", title)
    if (named := as_mapping(columns)) is not None:
        return by_name(named, names, "columns", title)
    if isinstance(columns, list | tuple):
        if len(columns) != len(names):
            raise ValueError(
                f"columns must be a list of {len(names)} for {title} ({', '.join(names)}), got a "
                f"list of {len(columns)}; its items are columns, not rows"
            )
        return list(columns)
    raise TypeError(
        f"columns must be a RecordBatch, a Table, a mapping or a list of columns for {title}, "
        f"got {type(columns).__name__}"
    )


def _column(column: Any, field: pa.Field, title: str) -> pa.Array:
    """Convert a column to an array of a field's type, which later writes to it do not change.

    Raises TypeError if it is no column, and ValueError if its values do not fit the field.
    """
    is_row = as_mapping(column) is not None
    if is_row or isinstance(column, str | bytes | Set) or not hasattr(column, "__len__"):
        way_out = "a list holds columns, not rows" if is_row else "repeat a value once per row"
        if isinstance(column, Set | Iterator):
            way_out = "pass list(...)"
        raise TypeError(
            f"{field.name!r} of {title} must be a column, got {type(column).__name__}; {way_out}"
        )
    try:
        if isinstance(column, pa.Array | pa.ChunkedArray):
            array = column if column.type == field.type else cast(column, field.type)
        elif hasattr(column, "__arrow_c_array__") or (
            str(getattr(column, "dtype", None)) not in ("None", "object")
        ):
            # Arrow may use the memory of a numpy array or a pandas Series without a copy, and
            # the bolt may overwrite it for its next emit.
            array = pa.array(column.copy() if hasattr(column, "copy") else column)
            array = array if array.type == field.type else cast(array, field.type)
        else:
            values = list(column)
            if hasattr(column, "isna"):  # pandas has NaN for null among its objects
                missing = column.isna()
                values = [None if gone else one for one, gone in zip(values, missing, strict=True)]
            array = array_of(values, field.type)
        if isinstance(array, pa.ChunkedArray):
            array = array.combine_chunks()
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        if "offset overflow" in str(error):
            raise ValueError(
                f"{field.name!r} of {title} must have at most 2 GiB in one batch; emit its rows in "
                "several batches"
            ) from error
        got = getattr(column, "type", None) or getattr(column, "dtype", type(column).__name__)
        raise ValueError(
            f"{field.name!r} of {title} must be {field.type}, got {got}: {error}; convert it, or "
            "declare another type"
        ) from error
    if array.null_count and not field.nullable:
        raise ValueError(
            f"{field.name!r} of {title} must not hold nulls, got {array.null_count}; replace them, "
            "or declare it nullable"
        )
    return array
