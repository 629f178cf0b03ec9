"""Reasons of failed roots; of several reasons the earliest by (time, text) is kept.

Few rows have a reason.  So reasons are kept apart from the rows of a ledger, in Arrow tables of
(root, time, text), and joined again when the root is settled.

During a run a reason is the text of `Reason.encode`.  The few distinct texts are a dictionary, in
the driver and in the exchange.  When a record is judged, `Reasons` splits its text once; from then
on the reason is a struct, `REASON_TYPE`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ackcore._arrow.shown import as_texts
from ackcore._records import Bools, Int64s
from ackcore.spark.base.root_ids import distinct
from ackcore.spark.base.schemas import DUE_MS, OF_REASON, REASON, REASON_TYPE, without_numbers
from ackcore.topology.tuples import REASON_TEXTS, UNCOUNTED, UNIT, Reason

#: The columns of records that are not ACKED, with an encoded `ackcore.topology.Reason`.
#: If a service is down, many records have the same reason: a dictionary stores each text once.
TEXTS = pa.dictionary(pa.int32(), pa.string())
FAILED = pa.schema([("root_id", pa.int64()), ("spout", TEXTS), ("reason", TEXTS)])


def failures(roots: Int64s, spouts: Sequence[str], reasons: pa.Array) -> pa.Table:
    """Return a table of the schema `FAILED` from the roots and encoded reasons of its records.

    ``spouts``: the spouts that the records may be of. With several, the column ``spout`` is null.
    """
    spout = pa.scalar(spouts[0] if len(spouts) == 1 else None, pa.string())
    owners = pa.repeat(spout, len(roots)).dictionary_encode()
    columns = [pa.array(roots, pa.int64()), owners, reasons.dictionary_encode()]
    return pa.table(columns, schema=FAILED)


#: Reasons of roots: the time of the failure in milliseconds since 1970, and the encoded reason.
REASON_SCHEMA = pa.schema([("root_id", pa.int64()), ("ms", pa.int64()), ("text", pa.string())])

#: The time of a reason that an earlier settle returned: the lowest, so that this reason is kept.
SHOWN_BEFORE = -(2**63)
#: The time of reasons in events without times, so that only texts are compared.
NO_TIME = 0


#: The component in reasons that do not come from a bolt.
ENGINE = "ackcore"


#: The reason of a record that waits behind another one; it never counts as an attempt.
BEHIND = Reason(ENGINE, "Behind", "an earlier record of its key waits", counts=False)
#: The reason of a record that crashed its workers.
KILLED_WORKER = Reason(ENGINE, "KilledWorker", "killed its worker", final=True)


def null_message_id(spout: str, columns: Sequence[str]) -> Reason:
    """Return the reason, which is final, of a record whose message id is null in all columns."""
    names = ", ".join(columns)
    text = f"its message id, {names}, is null; drop such records in the source, or give them an id"
    return Reason(spout, "NullMessageId", text, final=True)


def reasons_of(root_ids: Int64s, ms: Int64s | int, texts: pa.Array) -> pa.Table | None:
    """Return a table of reasons (`REASON_SCHEMA`) of the rows with a text, or None if no row has.

    ``ms``: the times of the reasons, or one for all. ``texts``: encoded reasons, with nulls.
    """
    if texts.null_count == len(texts):
        return None
    rows = np.flatnonzero(texts.is_valid().to_numpy(zero_copy_only=False))
    times = np.full(len(rows), ms) if isinstance(ms, int) else ms[rows]
    # Cast first, because Arrow cannot take() from string views. Users' text may not be UTF-8.
    found = as_texts(texts.cast(pa.string()).take(pa.array(rows)))
    return pa.table([pa.array(root_ids[rows]), pa.array(times), found], schema=REASON_SCHEMA)


def earliest(tables: list[pa.Table]) -> pa.Table:
    """Return the earliest reason of each root by (time, text): a row per root, sorted by root."""
    if not tables:
        return REASON_SCHEMA.empty_table()
    reasons = pa.concat_tables(tables).combine_chunks()
    order = np.argsort(reasons["root_id"].to_numpy(), kind="stable")
    roots = reasons["root_id"].to_numpy()[order]
    if (roots[1:] != roots[:-1]).all():
        return reasons.take(pa.array(order))
    reasons = reasons.sort_by([(name, "ascending") for name in REASON_SCHEMA.names])
    roots = reasons["root_id"].to_numpy()
    first = np.ones(len(roots), np.bool_)
    first[1:] = roots[1:] != roots[:-1]
    return reasons.filter(pa.array(first))


def first_reasons(tables: list[pa.Table]) -> pa.Table:
    """Return the earliest reason of each root by (time, text): a row per root, sorted by root.

    Requested waits are not compared.  The reason that is kept gets the longest wait of its root, or
    none if it is final.  So the result depends on no order or grouping of the reasons.
    """
    if not tables:
        return REASON_SCHEMA.empty_table()
    reasons = pa.concat_tables(tables)
    said = Reasons.of_texts(reasons["text"])
    asked = said.after_ms()
    if not asked.any():
        return earliest([reasons])
    place, field = 2, REASON_SCHEMA.field(2)
    kept = earliest([reasons.set_column(place, field, said.encoded(0 * asked))])
    longest = np.zeros(len(kept), np.int64)
    places = np.searchsorted(kept["root_id"].to_numpy(), reasons["root_id"].to_numpy())
    np.maximum.at(longest, places, asked)
    said = Reasons.of_texts(kept["text"])
    # Final reasons have no wait.
    return kept.set_column(place, field, said.encoded(np.where(said.final(), 0, longest)))


def with_several(tables: list[pa.Table], firsts: pa.Table) -> Int64s:
    """Return the sorted roots whose reasons differ in their text, requested waits included.

    ``tables``: all reasons. ``firsts``: the result of `first_reasons`.
    """
    if sum(map(len, tables)) == len(firsts):
        return np.empty(0, np.int64)
    reasons = pa.concat_tables(tables)
    roots = reasons["root_id"].to_numpy()
    other = pc.not_equal(reasons["text"], look_up(firsts, roots)[0])
    return distinct(roots[other.to_numpy()])


def look_up(reasons: pa.Table, root_ids: Int64s) -> tuple[pa.Array, pa.Array]:
    """Return two columns, the texts and times of roots' reasons; null for a root without one.

    ``reasons``: a result of `earliest`: one row per root, in their order. ``root_ids``: any roots.
    """
    n = len(root_ids)
    if len(reasons) == 0:
        return pa.nulls(n, pa.string()), pa.nulls(n, pa.int64())
    roots = reasons["root_id"].to_numpy()
    rows = np.searchsorted(roots, root_ids)
    rows[rows == len(roots)] = 0
    found = pa.array(rows, mask=roots[rows] != root_ids)
    return (
        reasons["text"].combine_chunks().take(found),
        reasons["ms"].combine_chunks().take(found),
    )


#: The reasons of dead records, and the number of deaths for each.
DEATHS = pa.schema(
    [
        ("component", pa.string()),
        ("error_type", pa.string()),
        ("error_message", pa.string()),
        ("deaths", pa.int64()),
    ]
)


class Reasons(NamedTuple):
    """The distinct reasons of a column, and the index of each row's reason."""

    values: pa.StructArray
    of: Int64s

    @classmethod
    def of_texts(cls, texts: pa.Array | pa.ChunkedArray) -> Reasons:
        """Return the reasons of a column of encoded reasons without nulls; also dictionaries."""
        whole = one_array(texts)
        if not pa.types.is_dictionary(whole.type):
            whole = whole.dictionary_encode()
        n = len(REASON_TEXTS)
        parts = pc.split_pattern(whole.dictionary, UNIT, max_splits=n)
        head, *told = (pc.list_element(parts, place) for place in range(n + 1))
        asked = pc.utf8_slice_codeunits(head, 1)
        after_ms = pc.if_else(pc.equal(asked, ""), "0", asked).cast(pa.int64())
        final, uncounted = (pc.starts_with(head, flag) for flag in ("!", UNCOUNTED))
        values = _struct([*told, final, after_ms, pc.invert(uncounted)])
        return cls(values, whole.indices.to_numpy(zero_copy_only=False).astype(np.int64))

    def taken(self, rows: Int64s) -> Reasons:
        """Return the reasons of the rows with these row numbers, in their order."""
        return Reasons(self.values, self.of[rows])

    def final(self) -> Bools:
        """Return a mask of the rows whose reasons rule out another attempt."""
        return self._flags("final")

    def counts(self) -> Bools:
        """Return a mask of the rows whose failures count as attempts."""
        return self._flags("counts")

    def after_ms(self) -> Int64s:
        """Return the wait in milliseconds that each row's reason requests; 0 if none."""
        waits: Int64s = self.values.field("after_ms").to_numpy()[self.of]
        return waits

    def behind(self) -> Bools:
        """Return a mask of the rows that wait only because an earlier record of their key waits."""
        same = (pc.equal(self.values.field(name), getattr(BEHIND, name)) for name in REASON_TEXTS)
        found: Bools = reduce(pc.and_, same).to_numpy(zero_copy_only=False)[self.of]
        return found

    def encoded(self, after_ms: Int64s) -> pa.Array:
        """Return each row's reason in the form of `Reason.encode`, with these waits; 0 for none."""
        texts = (self.values.field(name) for name in REASON_TEXTS)
        counts, final = (self.values.field(name) for name in ("counts", "final"))
        flags = pc.if_else(final, "!", pc.if_else(counts, "-", UNCOUNTED))
        said = pc.binary_join_element_wise(*texts, UNIT)
        waits = pa.array(after_ms)
        asked = pc.if_else(pc.equal(waits, 0), "", waits.cast(pa.string()))
        rows = pa.array(self.of)
        heads = pc.binary_join_element_wise(flags.take(rows), asked, "")
        return pc.binary_join_element_wise(heads, said.take(rows), UNIT)

    def kept(self, counts: Bools) -> pa.StructArray:
        """Return the reasons to store for rows that wait or are dead.

        The requested wait is left out, since the due time records it.  ``counts`` is for each row
        whether the failure counted as an attempt.
        """
        n = len(self.values)
        told = [self.values.field(name) for name in (*REASON_TEXTS, "final")]
        no_wait = pa.array(np.zeros(n, np.int64))
        both = [_struct([*told, no_wait, pa.repeat(flag, n)]) for flag in (False, True)]
        return pa.concat_arrays(both).take(pa.array(self.of + n * counts))

    def _flags(self, name: str) -> Bools:
        found: Bools = self.values.field(name).to_numpy(zero_copy_only=False)[self.of]
        return found


def one_array(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Return a column as one array."""
    whole = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(whole, pa.ChunkedArray):  # some versions return this without chunks
        return pa.array([], whole.type)
    return whole


def _struct(columns: list[pa.Array]) -> pa.StructArray:
    return pa.StructArray.from_arrays(columns, fields=[*REASON_TYPE])


def reason_column(texts: Mapping[str, pa.Array], *, final: bool = False) -> pa.StructArray:
    """Return a column of `REASON_TYPE` from its texts; each counts as an attempt, with no wait.

    ``texts``: columns of equal length, by name. A missing one of `REASON_TEXTS` becomes empty.
    """
    n = len(texts["message"])
    told = [one_array(texts.get(name, pa.repeat("", n))).cast(pa.string()) for name in REASON_TEXTS]
    return _struct(
        [*told, pa.repeat(final, n), pa.array(np.zeros(n, np.int64)), pa.repeat(True, n)]
    )


def reason_parts(column: pa.Array | pa.ChunkedArray) -> tuple[pa.Array, ...]:
    """Return the columns of `DEATHS`, except ``deaths``, from a column of `REASON_TYPE`."""
    return tuple(pc.struct_field(column, OF_REASON[name]) for name in DEATHS.names[:-1])


def without_room(rows: pa.Table, most: int) -> pa.Table:
    """Return failed records as dead ones: they cannot wait, since ``most`` records wait already.

    The reason of each names this limit and the failure, and is final. Due times become 0, and the
    columns `NUMBERS` are dropped.
    """
    texts = {name: one_array(pc.struct_field(rows[REASON], name)) for name in REASON_TEXTS}
    said = f"{most} records wait already (max_waiting); it failed with "
    texts["message"] = pc.binary_join_element_wise(said, texts["type"], ": ", texts["message"], "")
    texts["type"] = pa.repeat("WaitingFull", len(rows))
    reasons = reason_column(texts, final=True)
    for name, column in ((DUE_MS, pa.array(np.zeros(len(rows), np.int64))), (REASON, reasons)):
        rows = rows.set_column(rows.schema.get_field_index(name), rows.schema.field(name), column)
    return without_numbers(rows)
