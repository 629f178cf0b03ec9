"""Columns of encoded reasons, processed without a Python object for each reason."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ackcore._records import Int64s
from ackcore.spark.base.reasons import BEHIND
from ackcore.spark.base.schemas import DUE_MS, REASON, TRACKING
from ackcore.topology.tuples import UNCOUNTED, UNIT

Bools = npt.NDArray[np.bool_]

#: The reasons of dead records, and the number of deaths for each.
DEATHS = pa.schema(
    [
        ("component", pa.string()),
        ("error_type", pa.string()),
        ("error_message", pa.string()),
        ("deaths", pa.int64()),
    ]
)

_HEAD = f"^[-!{UNCOUNTED}][0-9]*{UNIT}"
_ASKS = f"^[-{UNCOUNTED}](?P<ms>[1-9][0-9]*){UNIT}"


class ReasonTexts(NamedTuple):
    """The distinct reasons of a column, and the index of each row's reason."""

    values: pa.Array
    of: Int64s

    @classmethod
    def of_column(cls, texts: pa.Array | pa.ChunkedArray) -> ReasonTexts:
        """Return the reasons of a column of texts, or of a dictionary of them."""
        whole = texts.combine_chunks() if isinstance(texts, pa.ChunkedArray) else texts
        if isinstance(whole, pa.ChunkedArray):  # some versions return this without chunks
            whole = pa.array([], whole.type)
        if not pa.types.is_dictionary(whole.type):
            whole = whole.dictionary_encode()
        return cls(whole.dictionary, whole.indices.to_numpy(zero_copy_only=False).astype(np.int64))

    def taken(self, rows: Int64s) -> ReasonTexts:
        """Return the reasons of some of the rows."""
        return ReasonTexts(self.values, self.of[rows])

    def final(self) -> Bools:
        """Return which rows' reasons rule out another attempt."""
        return self._starting("!")[self.of]

    def counts(self) -> Bools:
        """Return which rows' failures count as attempts."""
        return ~self._starting(UNCOUNTED)[self.of]

    def behind(self) -> Bools:
        """Return which rows wait only because an earlier record of their key waits."""
        found: Bools = pc.equal(self.values, BEHIND).to_numpy(zero_copy_only=False)[self.of]
        return found

    def after_ms(self) -> Int64s:
        """Return the wait in milliseconds that each row's reason requests; 0 if none."""
        waits = np.zeros(len(self.values), np.int64)
        asking = pc.match_substring_regex(self.values, _ASKS).to_numpy(zero_copy_only=False)
        if asking.any():
            asked = pc.extract_regex(self.values.filter(pa.array(asking)), _ASKS).field("ms")
            waits[asking] = asked.cast(pa.int64()).to_numpy()
        return waits[self.of]

    def texts(self) -> pa.Array:
        """Return the text of each row."""
        return self.values.take(pa.array(self.of))

    def kept(self, counts: Bools) -> pa.Array:
        """Return the texts to store for rows that wait or are dead.

        The requested wait is left out, since the due time records it.  The flag records ``counts``,
        whether the failure counted as an attempt.
        """
        rest = pc.replace_substring_regex(self.values, _HEAD, "")
        final = pa.array(self._starting("!"))
        heads = [pc.if_else(final, f"!{UNIT}", f"{flag}{UNIT}") for flag in (UNCOUNTED, "-")]
        texts = pa.concat_arrays([pc.binary_join_element_wise(head, rest, "") for head in heads])
        return texts.take(pa.array(self.of + len(self.values) * counts))

    def refused(self, most: int) -> pa.Array:
        """Return the reasons of rows refused by a waiting store that holds ``most`` records."""
        component, kind, message = parts(self.values)
        said = f"{most} records wait already (max_waiting); it failed with "
        message = pc.binary_join_element_wise(said, kind, ": ", message, "")
        texts = encoded("!", component, pa.repeat("WaitingFull", len(message)), message)
        return texts.take(pa.array(self.of))

    def _starting(self, flag: str) -> Bools:
        found: Bools = pc.starts_with(self.values, flag).to_numpy(zero_copy_only=False)
        return found


def parts(texts: pa.Array) -> tuple[pa.Array, pa.Array, pa.Array]:
    """Return component, type and message of encoded reasons."""
    split = pc.split_pattern(texts, UNIT, max_splits=3)
    component, kind, message = (pc.list_element(split, place) for place in (1, 2, 3))
    return component, kind, message


def encoded(flag: str, component: pa.Array, kind: pa.Array, message: pa.Array) -> pa.Array:
    """Return encoded reasons, made from their parts."""
    heads = (pc.replace_substring(part, UNIT, " ") for part in (component, kind))
    return pc.binary_join_element_wise(flag, *heads, message, UNIT)


def refused(rows: pa.Table, most: int) -> pa.Table:
    """Return records refused by the full waiting store as dead records."""
    texts = ReasonTexts.of_column(rows[REASON]).refused(most)
    for name, column in ((DUE_MS, pa.array(np.zeros(len(rows), np.int64))), (REASON, texts)):
        place = TRACKING.get_field_index(name)
        rows = rows.set_column(place, TRACKING.field(place), column)
    return rows
