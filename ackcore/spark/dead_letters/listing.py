"""Lists of selected dead letters, the newest first, without Spark."""

from __future__ import annotations

import contextlib
import heapq
import json
import operator
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ackcore._arrow.shown import base64_of, json_encoder, shown_rows
from ackcore._records import Int64s
from ackcore.spark.base.errors import CheckpointCorrupt
from ackcore.spark.base.letter_columns import as_written
from ackcore.spark.base.schemas import LETTER, TIME
from ackcore.spark.dead_letters.letter_files import (
    LetterFile,
    batch_rows,
    read_letters,
    reading_letters,
)
from ackcore.spark.dead_letters.letter_store import Letters, files_of
from ackcore.spark.dead_letters.notes import Note, gone_rows, notes_of, sent_rows

_ID = re.compile(r"(.+)/([0-9]{1,18})/([0-9]{1,18})", re.DOTALL)


@dataclass(frozen=True, slots=True)
class LetterId:
    """The id of a dead letter: its spout, its micro-batch, and its position in that micro-batch."""

    spout: str
    batch_id: int
    position: int

    def __str__(self) -> str:
        return f"{self.spout}/{self.batch_id}/{self.position}"

    @classmethod
    def of(cls, text: str) -> LetterId:
        """Return the id with this text form. Raises ValueError if the text is not an id."""
        found = _ID.fullmatch(text)
        if found is None:
            raise ValueError(
                f"a dead letter's id must be SPOUT/MICRO-BATCH/NUMBER, as in the list of letters, "
                f"got {text!r}"
            )
        return cls(found[1], int(found[2]), int(found[3]))


@dataclass(frozen=True, slots=True)
class LetterFilter:
    """A filter of dead letters by id, place and error of the failure, time of death, and replays.

    All given conditions must hold; without any, all letters match.
    """

    ids: Sequence[LetterId] | None = None  # the ids of the letters; None: any id; empty: no letter
    #: The spout of the record, the component that failed it, and the type of the error.
    spout: str | None = None
    component: str | None = None
    error_type: str | None = None
    message: str | None = None  # a substring of the error message; case is ignored
    #: The earliest time of death, and the time before which the record died, in milliseconds since
    #: 1970.
    since_ms: int | None = None
    until_ms: int | None = None
    sent: bool | None = None  # whether the letter was sent again

    def rows(self, file: LetterFile, spout: str, notes: Sequence[Note]) -> Int64s:
        """Return the sorted row numbers of a file's matching rows. Dropped letters never match.

        Raises CheckpointCorrupt if the file is damaged.
        """
        if self.spout not in (None, spout):
            return np.empty(0, np.int64)
        letters, gone = gone_rows(file.path, spout, notes)
        wanted = np.ones(len(letters), np.bool_)
        if self.ids is not None:
            wanted[:] = False
            for one in self.ids:
                row = letters.row(one.batch_id, one.position) if one.spout == spout else None
                if row is not None:
                    wanted[row] = True
        wanted &= ~gone
        if self.sent is not None:
            wanted &= (sent_rows(letters, spout, notes)[0] > 0) == self.sent
        for name, value, holds in (
            ("component", self.component, pc.equal),
            ("error_type", self.error_type, pc.equal),
            ("error_message", self.message, partial(pc.match_substring, ignore_case=True)),
        ):
            if value is not None and wanted.any():
                found = holds(read_letters(file.path, [name])[name], value)
                wanted &= np.asarray(found.fill_null(False).to_numpy(), np.bool_)
        for limit, is_within in ((self.since_ms, operator.ge), (self.until_ms, operator.lt)):
            if limit is not None and wanted.any():
                died = read_letters(file.path, ["last_ms"])["last_ms"]
                # By numpy: Arrow refuses numbers of over 64 bits, which a user may give.
                wanted &= is_within(died.cast(TIME).cast(pa.int64()).to_numpy(), limit)
        return np.flatnonzero(wanted)


@dataclass(frozen=True, slots=True)
class Letter:
    """A dead letter, with values of the columns of `dead_letters`; times are in ms since 1970."""

    id: LetterId
    message_id: str
    attempts: int
    component: str
    error_type: str
    error_message: str
    first_ms: int
    last_ms: int
    replays: int
    sent: int  # the number of times this letter was sent again
    request: str | None  # the last request that sent it
    #: The record as JSON, or None if it was not requested. Bytes that are not UTF-8 are escaped
    #: (``\xe9``), and times outside Python's range are ISO 8601.
    payload: str | None = None


def list_letters(
    store: Letters,
    wanted: LetterFilter,
    limit: int | None = None,
    *,
    payload: bool = False,
    damaged: list[CheckpointCorrupt] | None = None,
    binary: Callable[[bytes], str] = base64_of,
) -> Iterator[Letter]:
    """Yield matching letters: the newest micro-batch first, in it a spout's last letter first.

    Raises CheckpointCorrupt if a note is damaged, or a file is and ``damaged`` is not given.

    ``limit``: the largest number of letters; no limit by default. ``payload``: whether to read the
    records too. ``damaged``: receives the error of each unreadable file. The letters of the other
    files are yielded. ``binary``: returns the text of bytes in a record.
    """
    notes = notes_of(store)

    most = sys.maxsize if limit is None else limit

    def of_spout(spout: str) -> Iterator[Letter]:
        for file in reversed(store.files(spout)):
            try:
                rows = wanted.rows(file, spout, notes)[-most:]
                yield from _letters(file, spout, rows, notes, payload, binary)
            except CheckpointCorrupt as error:
                if damaged is None:
                    raise
                damaged.append(error)

    spouts = store.spouts() if wanted.spout is None else [wanted.spout]
    # A merged file of one spout may have letters before and after those of another.
    found = heapq.merge(*map(of_spout, spouts), key=lambda one: one.id.batch_id, reverse=True)
    yield from islice(found, most)


def count_letters(store: Letters, wanted: LetterFilter) -> int:
    """Return the number of matching letters, without those of unreadable files.

    Raises CheckpointCorrupt if a note is damaged.
    """
    notes = notes_of(store)
    many = 0
    for spout, file in files_of(store, wanted.spout):
        with contextlib.suppress(CheckpointCorrupt):
            many += len(wanted.rows(file, spout, notes))
    return many


def none_found(store: Letters) -> str:
    """Return a message that no letter matches, with the number of all."""
    many = count_letters(store, LetterFilter())
    if not many:
        return "there are no dead letters"
    return f"no dead letter of {many:,} matches"


def _letters(
    file: LetterFile,
    spout: str,
    rows: Int64s,
    notes: Sequence[Note],
    payload: bool,
    binary: Callable[[bytes], str],
) -> Iterator[Letter]:
    """Yield the letters in given rows of a file, the last row first."""
    if not len(rows):
        return
    letters = batch_rows(file.path)
    times, newest = sent_rows(letters, spout, notes)
    columns = [*LETTER.names, "payload"] if payload else LETTER.names
    with reading_letters(file.path) as opened:
        end = opened.metadata.num_rows
        for group in reversed(range(opened.num_row_groups)):
            start = end - opened.metadata.row_group(group).num_rows
            here = rows[(rows >= start) & (rows < end)][::-1]
            end = start
            if not len(here):
                continue
            table = opened.read_row_group(group, columns=columns).take(pa.array(here - start))
            values = _told(as_written(opened, table), binary)
            for row, one in zip(here.tolist(), values, strict=True):
                by = int(newest[row])
                yield Letter(
                    LetterId(spout, one.pop("batch_id"), letters.position(row)),
                    **one,
                    sent=int(times[row]),
                    request=None if by < 0 else notes[by].request,
                )


def _told(table: pa.Table, binary: Callable[[bytes], str]) -> Iterator[dict[str, Any]]:
    for name in (field.name for field in LETTER if field.type == TIME):
        at = table.column_names.index(name)
        table = table.set_column(at, name, table[name].cast(TIME).cast(pa.int64()))
    if "payload" not in table.column_names:
        yield from shown_rows(table)
        return
    encode = encoder_of(table["payload"].type, binary)
    for one in shown_rows(table):
        yield {**one, "payload": encode(one["payload"])}


def encoder_of(
    kind: pa.DataType, binary: Callable[[bytes], str] = base64_of
) -> Callable[[Any], str]:
    """Return a function from values of a type to JSON; values that JSON lacks are shown as text."""
    try:
        return json_encoder(kind, binary)
    except TypeError:
        return lambda value: json.dumps(value, ensure_ascii=False, default=str)
