"""Replay of dead letters through their topology.

`replay` adds a request (see `ackcore.spark.checkpoint.requests`) and its note to the store in one
step. A letter that is sent again stays in the store. If its record dies again, the store gets
another letter.
"""

from __future__ import annotations

import logging
import os
import re
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ackcore._error_hints import counted, naming_arguments
from ackcore._records import Int64s
from ackcore.spark.base.errors import CheckpointForeign
from ackcore.spark.base.letter_columns import as_tracked
from ackcore.spark.base.schemas import TRACKING
from ackcore.spark.checkpoint.schema_changes import ColumnsChanged, fit_columns
from ackcore.spark.checkpoint.segments import all_nullable
from ackcore.spark.dead_letters.checkpoints import (
    CheckpointView,
    check_spout,
    checkpoint_of,
    fields_of,
    store_of,
)
from ackcore.spark.dead_letters.letter_files import (
    BatchRows,
    Bools,
    LetterFile,
    ObjectFile,
    read_letters,
    read_parts,
    read_schema,
)
from ackcore.spark.dead_letters.letter_store import Letters, files_of
from ackcore.spark.dead_letters.listing import LetterFilter
from ackcore.spark.dead_letters.notes import (
    Note,
    add_places,
    again_if_noted,
    counts_by_spout,
    gone_rows,
    note_time,
    notes_of,
    sent_rows,
)

if TYPE_CHECKING:
    from pyspark.sql import Column, SparkSession

_log = logging.getLogger("ackcore")


class Replay(NamedTuple):
    """The result of `replay`: a request to send dead letters again, or the counts of a dry run.

    Attributes: ``request``: the id of the request. ``records``: the number of letters that it
    sends, by spout. ``left_out``: the number of letters left out because they had been sent again
    too often, by spout.
    """

    request: str
    records: dict[str, int]
    left_out: Mapping[str, int] = MappingProxyType({})


#: Errors of offsets that were not read: one letter for each range, without a record.
UNREAD = ("LostUpstream", "TooFarBehind")
#: The pattern of a request's id.
REQUEST = re.compile(r"[A-Za-z0-9_-]{1,64}")
_WAY_OUT = (
    "Nothing was sent. Choose other letters (where=, spout=), or read these with dead_letters() "
    "and send their records to the source"
)


@naming_arguments
def replay(
    path: str | os.PathLike[str],
    spark: SparkSession | None = None,
    *,
    where: str | Column | LetterFilter | None = None,
    spout: str | None = None,
    again: bool = False,
    max_replays: int | None = 20,
    request: str | None = None,
    dry_run: bool = False,
) -> Replay:
    """Send dead letters through their topology again, as new records with all their attempts.

    A running query takes them in its next micro-batch, a stopped one when it is started again. No
    letter is sent twice by one request, whatever is killed.

    Parameters
    ----------
    path : path
        The checkpoint, or the value of ``dead_letters``: a directory, or a bucket's URL.
    spark : SparkSession, optional
        The session that evaluates ``where``; by default the active one.
    where : str, Column or LetterFilter, optional
        The letters to send; all by default. A `LetterFilter` needs no Spark. A condition refers to
        the columns of `dead_letters`. Where a source has changed, it refers to the columns that the
        letters were written with, and a column that only others have is null.
    spout : str, optional
        The spout of the letters; all by default.
    again : bool, default False
        Whether to send also the letters that were sent before.
    max_replays : int or None, default 20
        The maximum number of replays of a record; None for no limit. A letter whose record was
        replayed this often is left out, counted in ``left_out`` and logged, so that a program that
        calls `replay` automatically ends. The replays of a record are the column ``replays`` of
        `dead_letters` and, with ``again``, those of this letter.
    request : str, optional
        An id of yours, of letters, digits, ``-`` and ``_``. A second call with the same id does
        nothing, and returns the result of the first one.
    dry_run : bool, default False
        Whether to count the letters without sending them.

    Returns
    -------
    Replay
        The id and the numbers of records; no records if there was nothing to send. Letters about
        offsets that `KafkaSpout` did not read represent no record, and are left out.

    Raises
    ------
    FileNotFoundError
        If the path is neither a checkpoint nor a store, or the store's checkpoint was deleted.
    ValueError
        If ``request`` is not an id, or is that of a drop, ``max_replays`` is less than 1, or
        ``where`` is not a condition over these columns. If there is no session for a condition, or
        the topology has no ``spout`` of that name.
    CheckpointForeign
        If the store belongs to another checkpoint, or the topology no longer tracks such a spout.
    ColumnsChanged
        If letters do not fit their source's present columns. A type that holds the same values and
        a new nullable column are no change.
    StateError
        If the store cannot be read or written; `CheckpointCorrupt` if a file is damaged.
    """
    if spark is not None:
        # Without this check, a condition passed as the second argument would select all letters.
        import_module("ackcore.spark.base.session").refuse_session(spark)
    name = uuid.uuid4().hex if request is None else request
    if not isinstance(name, str) or not REQUEST.fullmatch(name):
        raise ValueError(f"request must be 1 to 64 letters, digits, - or _, got {name!r}")
    bound = np.iinfo(np.int32).max if max_replays is None else max_replays
    if isinstance(bound, bool) or not isinstance(bound, int) or bound < 1:
        raise ValueError(
            f"max_replays must be a whole number of at least 1, or None, got {max_replays!r}"
        )
    store = store_of(path)
    checkpoint = checkpoint_of(store)
    check_spout(store, spout)
    return again_if_noted(
        store, lambda: _replay(checkpoint, store, spark, where, spout, again, bound, name, dry_run)
    )


def _replay(
    checkpoint: CheckpointView,
    store: Letters,
    spark: SparkSession | None,
    where: str | Column | LetterFilter | None,
    spout: str | None,
    again: bool,
    bound: int,
    name: str,
    dry_run: bool,
) -> Replay:
    notes = notes_of(store)
    for note in notes:
        if note.request == name:
            if note.dropped:
                raise ValueError(
                    f"request must be a new id, got {name!r}, the id of a drop of letters"
                )
            return Replay(name, counts_by_spout(note.rows), note.left_out or {})
    where = LetterFilter() if where is None else where
    matching: Mapping[ObjectFile, Int64s] = {}
    if not isinstance(where, LetterFilter):
        reading = import_module("ackcore.spark.dead_letters.reading")
        matching = reading.matching_rows(spark, store, spout, notes, where)
    rows: dict[str, dict[str, list[list[int]]]] = {}
    wanted: dict[str, list[_Chosen]] = {}
    left_out: Counter[str] = Counter()
    for each, file in files_of(store, spout):
        if isinstance(where, LetterFilter):
            some = where.rows(file, each, notes)
        else:
            some = matching.get(file.path, np.empty(0, np.int64))
        if not len(some):
            continue
        one, batches, often = _choose(file, each, some, notes, again, bound)
        if often:
            left_out[each] += often
        if len(one.times):
            add_places(rows.setdefault(each, {}), np.flatnonzero(one.mask), batches)
            wanted.setdefault(each, []).append(one)
    fields = fields_of(checkpoint)
    tables = {
        each: _fitting(store, each, files, fields.get(each)) for each, files in wanted.items()
    }
    if tables and not dry_run:
        note = Note(name, note_time(notes), rows, left_out=dict(left_out))
        store.send(name, note._asdict(), tables)
    if left_out:
        _log.warning(
            "%s in %s after %d or more replays. To send them, set a larger max_replays",
            counted(left_out.total(), "dead letter is left out", "dead letters are left out"),
            store.url,
            bound,
        )
    return Replay(name, counts_by_spout(rows), dict(left_out))


class _Chosen(NamedTuple):
    """The letters of a file that are to be sent."""

    file: LetterFile
    mask: Bools  # by row of the file, whether the letter is to be sent
    times: Int64s  # by letter, the number of replays of its record, including this one


def _choose(
    file: LetterFile, spout: str, chosen: Int64s, notes: Sequence[Note], again: bool, bound: int
) -> tuple[_Chosen, BatchRows, int]:
    """Return the letters of a file to send, its rows, and the number of letters sent too often.

    ``chosen``: the numbers of the selected rows. ``notes``: all notes of the store. ``again``:
    whether to send also letters that were sent before. ``bound``: the maximum number of replays of
    a record.
    """
    rows, gone = gone_rows(file.path, spout, notes)
    sent, _ = sent_rows(rows, spout, notes)
    wanted = np.isin(np.arange(len(rows)), chosen) & ~gone
    if not again:
        wanted &= sent == 0
    letters = read_letters(file.path, ["component", "error_type", "replays"])
    # The spout itself failed, not a bolt: these offsets were not read.
    unread = pc.and_(
        pc.equal(letters["component"], spout), pc.is_in(letters["error_type"], pa.array(UNREAD))
    )
    wanted &= ~unread.fill_null(False).to_numpy()
    if not wanted.any():
        return _Chosen(file, wanted, np.empty(0, np.int64)), rows, 0
    replays = letters["replays"].fill_null(0).to_numpy()  # null in emptied rows
    times = replays + sent
    often = wanted & (times >= bound)
    wanted &= ~often
    return _Chosen(file, wanted, times[wanted] + 1), rows, int(np.count_nonzero(often))


def _fitting(
    store: Letters, spout: str, wanted: Sequence[_Chosen], fields: list[str] | None
) -> Iterator[pa.Table]:
    """Yield letters as records with the present columns of their source, part by part.

    Raises CheckpointForeign if the topology does not track such a spout: each start would refuse
    the request. Raises ColumnsChanged if the letters do not fit these columns. If the store has no
    record of them, only the names are compared.
    """
    path = store.columns(spout)
    recorded = path is not None
    now = None if path is None else pa.schema(list(read_schema(path).field("payload").type))
    for file, mask, times in wanted:
        what = f"{counted(mask.sum(), 'dead letter')} of spout {spout!r} in {store.url}"
        if fields is None:
            raise CheckpointForeign(
                f"{what} cannot be sent: the topology has no such tracked spout now. {_WAY_OUT}."
            )
        done = 0
        for letters in read_parts(file.path, mask):
            records = _records(letters, times[done : done + len(letters)])
            done += len(letters)
            source = pa.schema(list(records.schema)[len(TRACKING) :])
            # No column types are recorded: only the names can be compared.
            if not recorded and source.names != fields:
                raise ColumnsChanged(
                    f"the columns of {what} are {', '.join(source.names)}, and the source has "
                    f"{', '.join(fields)} now. {_WAY_OUT}."
                )
            now = source if now is None else now
            yield fit_columns(records, now, what, _WAY_OUT)


def _records(letters: pa.Table, times: Int64s) -> pa.Table:
    """Return letters as records that were not tried yet. ``times``: their numbers of replays."""
    attempts = pa.array(np.zeros(len(letters), np.int32))
    return all_nullable(as_tracked(letters, attempts, pa.array(times.astype(np.int32))))
