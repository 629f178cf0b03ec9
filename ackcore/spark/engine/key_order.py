"""Order by key: a record does not overtake an earlier one of its key that failed.

Each waiting record of a spout with ``ordered_by`` has a number (`ORDER`), in the order of arrival:
by micro-batch, then by partition and place.  The records of a replay request get numbers of the
plan that took the request, before the new records of that plan.  A record that is behind a waiting
one of its key waits too:

* a due record behind one that is not due continues to wait (`held_back`);
* new records with the key of a waiting record are not run: they fail at the spout, as `behind`;
* a record that ran behind a failed one counts as failed, too, `behind` it (`Ordering.behind`):
  none of its rows is written, and its attempt does not count.

All functions are pure, except those that read the sources again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ackcore._records import Bools, Int64s
from ackcore.spark.base.reasons import BEHIND, FAILED, Reasons, failures
from ackcore.spark.base.root_ids import distinct
from ackcore.spark.base.schemas import ATTEMPT, DUE_MS, FIRST_MS, ORDER, ORDER_BITS
from ackcore.spark.checkpoint.decisions import Retries
from ackcore.spark.checkpoint.waiting import Fit, Waiting
from ackcore.spark.tasks.record_ids import RETRIES, key_hashes, positions_of, roots_of
from ackcore.spark.tasks.row_files import PLACE, ROOT_ID, among
from ackcore.topology.settings import Settings

#: Added to the numbers of new records, which come after replayed ones of the micro-batch.
_NEW = 1 << (ORDER_BITS - 1)
#: Base of the numbers of records that waited before their spout was ordered: they come first,
#: sorted by the time when they were first seen.
_BEFORE = -(1 << 62)

#: Returns, by spout, records with given roots, and new ones with given hashes of keys: tables of
#: the schema `KEYED`.
FindKeys = Callable[[Mapping[str, Int64s], Mapping[str, Int64s]], Mapping[str, pa.Table]]
#: Returns the failures with those that follow from them.
Propagate = Callable[[pa.Table], pa.Table]


def held_back(
    retries: Retries, keys: Mapping[str, tuple[str, ...]], fit: Fit
) -> tuple[Retries, dict[str, Int64s]]:
    """Let due records continue to wait while an earlier record of their key waits.

    Returns the retries, divided anew into due and waiting ones, the due ones of each ordered spout
    in order; and by spout, the sorted hashes of the keys of all its retries, due or waiting. New
    records with these keys must not run.

    ``keys`` has the key columns of each ordered spout.  ``fit`` converts rows of a spout to the
    present columns of its source.
    """
    due, rest = dict(retries.due), retries.rest
    blocked = {}
    for spout, columns in keys.items():
        if spout in due:
            due[spout] = _numbered(due[spout])
        # Only these columns of the waiting records: the payloads stay in their files.
        wanted = {DUE_MS, FIRST_MS, ORDER, *columns}
        tables = (fit(spout, table) for table in rest.tables(spout))
        waiting = (_numbered(t.select([n for n in t.column_names if n in wanted])) for t in tables)
        rest, *found = hold(spout, due, rest, waiting, partial(_keyed, columns=columns))
        if sum(map(len, found)):
            blocked[spout] = distinct(np.concatenate(found))
    return retries._replace(due=due, rest=rest), blocked


def _keyed(table: pa.Table, columns: tuple[str, ...]) -> tuple[Int64s, Int64s, Bools]:
    hashes, ordered = key_hashes(table, columns)
    return hashes, table[ORDER].to_numpy(), ordered


def hold(
    spout: str,
    due: dict[str, pa.Table],
    rest: Waiting,
    waiting: Iterable[pa.Table],
    keyed: Callable[[pa.Table], tuple[Int64s, Int64s, Bools]],
) -> tuple[Waiting, Int64s, Int64s]:
    """Move due records of a spout to ``rest`` if an earlier record of their key waits.

    A moved record becomes due no earlier than the first waiting one of its key. Returns ``rest``,
    the hashes of the keys of the records in ``waiting``, and those of the records that remain due.

    ``due``: the due records by spout, which this changes. ``rest``: the waiting records of all
    spouts. ``waiting``: those of the spout, as tables. ``keyed``: returns the hash of each record's
    key, its number, and whether it has a key; a record is behind those with lower numbers.
    """
    parts = [np.empty((3, 0), np.int64)]
    for table in waiting:
        keys, numbers, known = keyed(table)
        parts.append(np.stack([keys, numbers, table[DUE_MS].to_numpy()])[:, known])
    waits = np.concatenate(parts, axis=1)
    tried = due.pop(spout, None)
    if tried is None:
        return rest, waits[0], _EMPTY
    keys, numbers, known = keyed(tried)
    times = _until(waits, keys, numbers, known)
    held = times >= 0
    if held.any():
        later = np.maximum(times[held], tried[DUE_MS].to_numpy()[held])
        rest = rest.plus(spout, with_column(tried.filter(pa.array(held)), DUE_MS, later))
    tried = tried.filter(pa.array(~held))
    if len(tried):
        due[spout] = tried
    return rest, waits[0], keys[known & ~held]


_EMPTY: Int64s = np.empty(0, np.int64)


def _until(waits: Int64s, keys: Int64s, numbers: Int64s, known: Bools) -> Int64s:
    """Return, for each record, the due time of the first waiting one of its key; -1 if none waits.

    Only waiting records with lower numbers count. ``waits``: the keys, the numbers and the due
    times of the waiting records, as three rows.
    """
    found = np.full(len(keys), -1)
    by = np.lexsort((waits[1], waits[0]))
    distinct_keys, first = np.unique(waits[0, by], return_index=True)
    if not len(distinct_keys):
        return found
    at = np.minimum(np.searchsorted(distinct_keys, keys), len(distinct_keys) - 1)
    _, number, due_ms = waits[:, by[first[at]]]
    behind = known & (distinct_keys[at] == keys) & (number < numbers)
    found[behind] = due_ms[behind]
    return found


def _numbered(table: pa.Table) -> pa.Table:
    """Return records sorted by `ORDER`; those without a number get one before all others."""
    if ORDER not in table.schema.names:  # it waited before its spout was ordered
        table = table.append_column(pa.field(ORDER, pa.int64()), pa.nulls(len(table), pa.int64()))
    fresh = pa.array(_BEFORE + table[FIRST_MS].to_numpy())
    table = with_column(table, ORDER, pc.coalesce(table[ORDER].combine_chunks(), fresh))
    return table.take(pc.sort_indices(table[ORDER]))


def with_column(table: pa.Table, name: str, values: Int64s | pa.Array) -> pa.Table:
    """Return a table with other values, of the same type, in a column."""
    place = table.schema.get_field_index(name)
    return table.set_column(place, table.schema.field(place), pa.array(values))


@dataclass(frozen=True)
class Ordering:
    """The order of the records of a run, by key.

    ``keys`` has the columns of the key of each ordered spout, and ``source_keys`` the 64-bit key
    from which its root ids are made.  ``number`` and ``now_ms`` are the micro-batch's number and
    time.  ``due`` has the due records, as `held_back` returned them.  The ``settings`` decide
    whether a record is dead.
    """

    keys: Mapping[str, tuple[str, ...]]
    source_keys: Mapping[str, int]
    number: int
    now_ms: int
    due: Mapping[str, pa.Table]
    settings: Settings

    def all_behind(self, failed: pa.Table, find_keys: FindKeys, propagate: Propagate) -> pa.Table:
        """Return the failures, and the records behind them as failures, with the column `ORDER`.

        ``failed`` has the schema `FAILED`.  ``find_keys`` reads records again; ``propagate`` adds
        the failures that follow from others.
        """
        while True:
            found = find_keys(self._candidates(failed), {})
            held = self._behind(failed, found, find_keys)
            if not held:
                break
            failed = propagate(_with_behind(failed, held))
        return failed.append_column(ORDER, self._numbers_in(failed, found))

    def _candidates(self, failed: pa.Table) -> dict[str, Int64s]:
        """Return, by ordered spout, the sorted failed roots that are or may be of the spout."""
        roots, owners = failed["root_id"].to_numpy(), failed["spout"].cast(pa.string())
        return {
            spout: np.sort(roots[pc.fill_null(pc.equal(owners, spout), True).to_numpy()])
            for spout in self.keys
        }

    def _behind(
        self, failed: pa.Table, found: Mapping[str, pa.Table], find_keys: FindKeys
    ) -> dict[str, Int64s]:
        """Return, by spout, the roots behind failed records that are not marked `behind` yet."""
        root_ids = failed["root_id"].to_numpy()
        order = np.argsort(root_ids, kind="stable")
        root_ids, reasons = root_ids[order], Reasons.of_texts(failed["reason"]).taken(order)
        already = root_ids[reasons.behind()]
        held: dict[str, Int64s] = {}
        wanted: dict[str, Int64s] = {}
        heads: dict[str, tuple[Int64s, Int64s]] = {}
        for spout, rows in found.items():
            ordered = rows["key"].is_valid().to_numpy()
            hashes = rows["key"].fill_null(0).to_numpy()
            said = reasons.taken(np.searchsorted(root_ids, rows[ROOT_ID].to_numpy()))
            stays = ordered & ~self._dies(spout, rows, said)
            due, places = _places(rows)
            tried = self.due.get(spout)
            if tried is not None and (stays & due).any():
                held[spout] = self._behind_due(spout, tried, places[stays & due])
            new = stays & ~due & ~said.behind()
            if new.any():
                came = self._numbers_of(spout, rows[ROOT_ID].to_numpy()[new])
                heads[spout] = _least(hashes[new], came)
                wanted[spout] = heads[spout][0]
        for spout, rows in (find_keys({}, wanted) if wanted else {}).items():
            roots, hashes = rows[ROOT_ID].to_numpy(), rows["key"].to_numpy()
            keys, first = heads[spout]
            behind = self._numbers_of(spout, roots) > first[np.searchsorted(keys, hashes)]
            held[spout] = np.concatenate([held.get(spout, _EMPTY), roots[behind]])
        fresh = {spout: distinct(roots) for spout, roots in held.items()}
        fresh = {spout: roots[~among(roots, already)] for spout, roots in fresh.items()}
        return {spout: roots for spout, roots in fresh.items() if len(roots)}

    def _dies(self, spout: str, rows: pa.Table, reasons: Reasons) -> Bools:
        """Return a mask of the failed records that are dead: no record waits behind these."""
        first_ms = np.full(len(rows), self.now_ms)
        due, places = _places(rows)
        if due.any():
            first_ms[due] = self.due[spout][FIRST_MS].to_numpy()[places[due]]
        late = self.now_ms - first_ms >= 1000 * self.settings.unavailable_timeout_s
        counts = reasons.counts() | (late & ~reasons.behind())
        last = rows[ATTEMPT].to_numpy() + 1 >= self.settings.max_attempts
        found: Bools = reasons.final() | (counts & last)
        return found

    def _behind_due(self, spout: str, tried: pa.Table, failed: Int64s) -> Int64s:
        """Return the roots of due records behind failed ones of their key.

        ``tried``: the due records in order. ``failed``: the places in it of those that failed.
        """
        hashes, ordered = key_hashes(tried, self.keys[spout])
        known, first = _least(hashes[failed], failed)
        at = np.minimum(np.searchsorted(known, hashes), len(known) - 1)
        places = np.arange(len(tried))
        behind = ordered & (known[at] == hashes) & (places > first[at])
        places = places[behind]
        attempts = tried[ATTEMPT].to_numpy()[places]
        return roots_of(self.source_keys[spout], RETRIES, places, attempts)

    def _numbers_of(self, spout: str, roots: Int64s) -> Int64s:
        """Return numbers that sort new records by arrival; they are not the numbers in `ORDER`."""
        partitions, places = positions_of(self.source_keys[spout], roots)
        return (partitions << 42) + places

    def _numbers_in(self, failed: pa.Table, found: Mapping[str, pa.Table]) -> pa.Array:
        """Return the column `ORDER` of failures; null for records of spouts that are not ordered.

        ``found``: by ordered spout, the records of the failures, of the schema `KEYED`.
        """
        roots, numbers = [_EMPTY], [_EMPTY]
        for spout, rows in found.items():
            due, places = _places(rows)
            roots.append(rows[ROOT_ID].to_numpy())
            number = np.zeros(len(rows), np.int64)
            if due.any():
                number[due] = self.due[spout][ORDER].to_numpy()[places[due]]
            came = self._numbers_of(spout, roots[-1][~due])
            ranks = np.empty(len(came), np.int64)
            ranks[np.argsort(came, kind="stable")] = np.arange(len(came))
            number[~due] = (self.number << ORDER_BITS) + _NEW + ranks
            numbers.append(number)
        known = pa.table({"root_id": np.concatenate(roots), ORDER: np.concatenate(numbers)})
        at = pc.index_in(failed["root_id"], value_set=known["root_id"])
        return known[ORDER].take(at)


def _places(rows: pa.Table) -> tuple[Bools, Int64s]:
    """Return which records were due, and the place of each among them; 0 for the others."""
    return rows[PLACE].is_valid().to_numpy(), rows[PLACE].fill_null(0).to_numpy()


def _least(keys: Int64s, values: Int64s) -> tuple[Int64s, Int64s]:
    """Return the sorted distinct keys, and the least value of each."""
    by = np.lexsort((values, keys))
    known, first = np.unique(keys[by], return_index=True)
    return known, values[by[first]]


def _with_behind(failed: pa.Table, held: Mapping[str, Int64s]) -> pa.Table:
    """Return the failures, in which the ``held`` roots have the reason `BEHIND`."""
    roots = np.sort(np.concatenate([*held.values()]))
    rest = failed.filter(pa.array(~among(failed["root_id"].to_numpy(), roots)))
    added = [
        failures(some, [spout], pa.repeat(BEHIND.encode(), len(some)))
        for spout, some in held.items()
    ]
    return pa.concat_tables([rest.cast(FAILED), *added]).unify_dictionaries()
