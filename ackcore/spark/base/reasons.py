"""Reasons of failed roots; of several reasons the earliest by (time, text) is kept.

Few rows have a reason.  So reasons are kept apart from the rows of a ledger, in Arrow tables of
(root, time, text), and joined again when the root is settled.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ackcore._records import Int64s
from ackcore.topology.tuples import Reason

#: The columns of records that are not ACKED, with an encoded `ackcore.topology.Reason`.
#: If a service is down, many records have the same reason: a dictionary stores each text once.
TEXTS = pa.dictionary(pa.int32(), pa.string())
FAILED = pa.schema([("root_id", pa.int64()), ("spout", TEXTS), ("reason", TEXTS)])

REASON_SCHEMA = pa.schema([("root_id", pa.int64()), ("ms", pa.int64()), ("text", pa.string())])

#: The time of a reason that an earlier settle has already returned, so that it is kept.
SHOWN_BEFORE = -(2**63)
#: The time of reasons in events without times, so that only texts are compared.
NO_TIME = 0


#: The component in reasons that do not come from a bolt.
ENGINE = "ackcore"


#: The reason of a record that waits behind another one; it never counts as an attempt.
BEHIND = Reason(ENGINE, "Behind", "an earlier record of its key waits", counts=False).encode()


def killed_worker(final: bool) -> Reason:
    """Return the reason of a record that crashed its workers."""
    return Reason(ENGINE, "KilledWorker", "killed its worker", final)


def null_message_id(spout: str, columns: Sequence[str]) -> Reason:
    """Return the reason of a record without a message id."""
    text = f"its message id, {', '.join(columns)}, is null; drop or name such records in the source"
    return Reason(spout, "NullMessageId", text, final=True)


def no_reasons() -> pa.Table:
    """Return an empty table of reasons."""
    return REASON_SCHEMA.empty_table()


def reasons_of(root_ids: Int64s, ms: Int64s | int, texts: pa.Array) -> pa.Table | None:
    """Return the rows that have a text as a table of reasons, or None if no row has."""
    if texts.null_count == len(texts):
        return None
    rows = np.flatnonzero(texts.is_valid().to_numpy(zero_copy_only=False))
    times = np.full(len(rows), ms) if isinstance(ms, int) else ms[rows]
    # Cast first, because Arrow cannot take() from string views.
    found = texts.cast(pa.string()).take(pa.array(rows))
    return pa.table([pa.array(root_ids[rows]), pa.array(times), found], schema=REASON_SCHEMA)


def earliest(tables: list[pa.Table]) -> pa.Table:
    """Return the earliest reason of each root by (time, text), in the order of root ids.

    Requested waits are ignored in the comparison.  The reason that is kept gets the longest wait of
    its root.  So the result does not depend on the order and grouping in which reasons are joined.
    """
    if not tables:
        return no_reasons()
    reasons = pa.concat_tables(tables).combine_chunks()
    texts = reasons["text"]
    # Only distinct texts are tested: if a service is down, many are equal.
    if not pc.any(pc.match_substring_regex(texts.unique(), _ASKS)).as_py():
        return _first_of_each(reasons)
    waits = pc.match_substring_regex(texts, _ASKS)
    bare = pc.replace_substring_regex(texts, "^([-~])[1-9][0-9]{0,17}\x1f", "\\1\x1f")
    kept = _first_of_each(reasons.set_column(2, "text", bare))
    roots = reasons["root_id"].filter(waits).to_numpy()
    asked = pc.extract_regex(texts.filter(waits), _ASKS).combine_chunks().field("ms")
    places = np.searchsorted(kept["root_id"].to_numpy(), roots)
    longest = np.zeros(len(kept), np.int64)
    np.maximum.at(longest, places, asked.cast(pa.int64()).to_numpy())
    said = kept["text"]
    waiting = pc.and_not(pa.array(longest > 0), pc.starts_with(said, "!"))  # final ones do not wait
    flags, rest = pc.utf8_slice_codeunits(said, 0, 1), pc.utf8_slice_codeunits(said, 1)
    asking = pc.binary_join_element_wise(flags, pa.array(longest).cast(pa.string()), rest, "")
    return kept.set_column(2, REASON_SCHEMA.field(2), pc.if_else(waiting, asking, said))


#: The beginning of an encoded `Reason` that requests a wait.
_ASKS = "^[-~](?P<ms>[1-9][0-9]{0,17})\x1f"


def _first_of_each(reasons: pa.Table) -> pa.Table:
    order = np.argsort(reasons["root_id"].to_numpy(), kind="stable")
    roots = reasons["root_id"].to_numpy()[order]
    if (roots[1:] != roots[:-1]).all():
        return reasons.take(pa.array(order))
    reasons = reasons.sort_by([(name, "ascending") for name in REASON_SCHEMA.names])
    roots = reasons["root_id"].to_numpy()
    first = np.ones(len(roots), np.bool_)
    first[1:] = roots[1:] != roots[:-1]
    return reasons.filter(pa.array(first))


def look_up(reasons: pa.Table, root_ids: Int64s) -> tuple[pa.Array, pa.Array]:
    """Return the texts and times of these roots' reasons; null for a root without a reason.

    Parameters
    ----------
    reasons : pyarrow.Table
        A result of `earliest`: one row per root, in their order.
    root_ids : numpy.ndarray of int64, shape (n,)
        Any roots.
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
