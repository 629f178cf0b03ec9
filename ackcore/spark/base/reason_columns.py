"""Columns of reasons, read and written without a Python object for each of them.

While a run is under way a reason is the text that `Reason.encode` makes: the few different ones are
a dictionary, for the driver as for the exchange.  `Reasons` takes it apart, once, when its record
is judged; from then on it is a struct, `REASON_TYPE`.
"""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ackcore._records import Int64s
from ackcore.spark.base.reasons import BEHIND
from ackcore.spark.base.schemas import DUE_MS, REASON, REASON_TYPE, TRACKING
from ackcore.topology.tuples import UNCOUNTED, UNIT

Bools = npt.NDArray[np.bool_]

#: Why records died, and how many of each reason.
DEATHS = pa.schema(
    [
        ("component", pa.string()),
        ("error_type", pa.string()),
        ("error_message", pa.string()),
        ("deaths", pa.int64()),
    ]
)


class Reasons(NamedTuple):
    """Different reasons, and which one each row has."""

    values: pa.StructArray
    of: Int64s

    @classmethod
    def of_texts(cls, texts: pa.Array | pa.ChunkedArray) -> Reasons:
        """Return the reasons of a column of encoded ones, or of a dictionary of them."""
        whole = one_array(texts)
        if not pa.types.is_dictionary(whole.type):
            whole = whole.dictionary_encode()
        parts = pc.split_pattern(whole.dictionary, UNIT, max_splits=3)
        head, *told = (pc.list_element(parts, place) for place in range(4))
        asked = pc.utf8_slice_codeunits(head, 1)
        after_ms = pc.if_else(pc.equal(asked, ""), "0", asked).cast(pa.int64())
        final, uncounted = (pc.starts_with(head, flag) for flag in ("!", UNCOUNTED))
        values = _struct([*told, final, after_ms, pc.invert(uncounted)])
        return cls(values, whole.indices.to_numpy(zero_copy_only=False).astype(np.int64))

    def taken(self, rows: Int64s) -> Reasons:
        """Return the reasons of some of the rows."""
        return Reasons(self.values, self.of[rows])

    def final(self) -> Bools:
        """Return which rows' reasons allow of no other attempt."""
        return self._flags("final")

    def counts(self) -> Bools:
        """Return which rows' failures were attempts."""
        return self._flags("counts")

    def after_ms(self) -> Int64s:
        """Return how long each row's reason asks to wait."""
        waits: Int64s = self.values.field("after_ms").to_numpy()[self.of]
        return waits

    def behind(self) -> Bools:
        """Return which rows only wait behind another of their key."""
        same = (pc.equal(self.values.field(name), getattr(BEHIND, name)) for name in _TEXTS)
        found: Bools = reduce(pc.and_, same).to_numpy(zero_copy_only=False)[self.of]
        return found

    def kept(self, counts: Bools) -> pa.StructArray:
        """Return the reasons of rows that wait or are dead, as they are on record.

        The wait is on record as the time; whether a failure counted, as ``counts`` has it.
        """
        n = len(self.values)
        told = [self.values.field(name) for name in (*_TEXTS, "final")]
        no_wait = pa.array(np.zeros(n, np.int64))
        both = [_struct([*told, no_wait, pa.repeat(flag, n)]) for flag in (False, True)]
        return pa.concat_arrays(both).take(pa.array(self.of + n * counts))

    def _flags(self, name: str) -> Bools:
        found: Bools = self.values.field(name).to_numpy(zero_copy_only=False)[self.of]
        return found


_TEXTS = ("component", "type", "message")


def one_array(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Return a column as one array."""
    whole = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(whole, pa.ChunkedArray):  # as some versions have it where there is no chunk
        return pa.array([], whole.type)
    return whole


def _struct(columns: list[pa.Array]) -> pa.StructArray:
    return pa.StructArray.from_arrays(columns, fields=[*REASON_TYPE])


def reason_column(
    component: pa.Array, kind: pa.Array, message: pa.Array, *, final: bool = False
) -> pa.StructArray:
    """Return reasons that counted, from the parts of each row."""
    n = len(message)
    told = [one_array(part).cast(pa.string()) for part in (component, kind, message)]
    return _struct(
        [*told, pa.repeat(final, n), pa.array(np.zeros(n, np.int64)), pa.repeat(True, n)]
    )


def reason_parts(column: pa.Array | pa.ChunkedArray) -> tuple[pa.Array, ...]:
    """Return the components, types and messages of a column of reasons."""
    return tuple(pc.struct_field(column, name) for name in _TEXTS)


def encoded(flag: str, component: pa.Array, kind: pa.Array, message: pa.Array) -> pa.Array:
    """Return reasons as `Reason.encode` does, from the parts of each row."""
    heads = (pc.replace_substring(part, UNIT, " ") for part in (component, kind))
    return pc.binary_join_element_wise(flag, *heads, message, UNIT)


def refused(rows: pa.Table, most: int) -> pa.Table:
    """Return records for which the waiting store has no room, as dead ones."""
    component, kind, message = map(one_array, reason_parts(rows[REASON]))
    said = f"{most} records wait already (max_waiting); it failed with "
    message = pc.binary_join_element_wise(said, kind, ": ", message, "")
    reasons = reason_column(component, pa.repeat("WaitingFull", len(rows)), message, final=True)
    for name, column in ((DUE_MS, pa.array(np.zeros(len(rows), np.int64))), (REASON, reasons)):
        place = TRACKING.get_field_index(name)
        rows = rows.set_column(place, TRACKING.field(place), column)
    return rows
