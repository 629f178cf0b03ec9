"""Compaction of dead-letter files, which bounds the number of files.

Adjacent files that were merged equally often and have the same columns are merged into one file.
`ackcore.spark.dead_letters.store` explains why this neither loses nor duplicates a letter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

import numpy as np
import pyarrow as pa

from ackcore.spark.base.letter_columns import write_letters
from ackcore.spark.dead_letters.letter_files import (
    LetterFile,
    ObjectFile,
    emptied,
    position_of,
    read_parts,
    read_schema,
)
from ackcore.spark.dead_letters.letter_store import Letters
from ackcore.spark.dead_letters.notes import Note, gone_rows, notes_of

#: Fewest and most neighbours that one merge takes. A neighbour is a merged file, or all files of a
#: micro-batch. With d deaths there are some 16 log d files, and each letter is written log d times.
_FEWEST, _MOST = 16, 256
#: Largest size of a merged file, in bytes.
_BYTES = 1 << 28
#: Time for which a merged file is kept, in ms: a reader may have read an older index.
KEPT_MS = 3_600_000


class Compaction:
    """The driver's merging of the files of a store, each time it has written letters.

    ``clock``: returns milliseconds since 1970.
    """

    def __init__(self, clock: Callable[[], int]):
        self._clock = clock
        self._schemas: dict[LetterFile, bytes] = {}
        self._seen: set[str] = set()

    def compact(self, store: Letters, spout: str, older: list[LetterFile]) -> None:
        """Merge one run of adjacent files of a spout, if there is a run that `_run` accepts.

        Before each merge, and at a spout's first call, files that were merged over an hour ago are
        deleted. ``older``: the spout's files without those of the last micro-batch, which may be
        written again.
        """
        run = self._run(older)
        for file in [file for file in self._schemas if _spout_of(file.path) == spout]:
            if file not in older:
                del self._schemas[file]
        # Not at each call: an hour may leave thousands of files to check.
        if run or spout not in self._seen:
            store.remove_merged(spout, self._clock() - KEPT_MS)
        self._seen.add(spout)
        if run:
            schema, letters = read_schema(run[0].path), _joined(run, notes_of(store))
            store.merge(spout, run, lambda file: write_letters(file, schema, letters))

    def _run(self, files: list[LetterFile]) -> list[LetterFile] | None:
        """Return the files of the first run of 16 to 256 neighbours that are alike, or None.

        A neighbour is a merged file, or all files of a micro-batch. Neighbours are alike if they
        were merged equally often and have the same columns. A run has at most 256 MiB.
        """
        for _, level in groupby(files, key=lambda file: file.level):
            neighbours = [tuple(some) for _, some in groupby(level, key=lambda file: file.first)]
            if len(neighbours) < _FEWEST:
                continue
            for schemas, alike in groupby(neighbours, key=lambda some: {*map(self._schema, some)}):
                if len(schemas) > 1:
                    continue
                run: list[tuple[LetterFile, ...]] = []
                whole = 0
                for some in alike:
                    size = sum(file.path.size for file in some)
                    if len(run) == _MOST or whole + size > _BYTES:
                        if len(run) >= _FEWEST:
                            break
                        run, whole = [], 0  # a large file ends the run; another begins behind it
                    if size <= _BYTES:
                        run.append(some)
                        whole += size
                if len(run) >= _FEWEST:
                    return [file for some in run for file in some]
        return None

    def _schema(self, file: LetterFile) -> bytes:
        if file not in self._schemas:
            schema = read_schema(file.path).remove_metadata()
            self._schemas[file] = schema.serialize().to_pybytes()
        return self._schemas[file]


def _joined(run: list[LetterFile], notes: Sequence[Note]) -> Iterator[pa.Table]:
    """Yield the letters of several files; dropped ones, and those of a file given up, are empty."""
    first = end = -1
    for each in run:
        lost = position_of(each.path) - (end if each.first == first else 0)
        first, end = each.first, position_of(each.path)
        for part in parts_left(each.path, notes):
            if lost:
                # The position of a letter in a merged file is its row in the micro-batch.
                empty = emptied(part.slice(0, 1), np.ones(1, np.bool_))
                yield empty.take(pa.array(np.zeros(lost, np.int64)))
                lost = 0
            end += len(part)
            yield part


def _spout_of(path: ObjectFile) -> str:
    return path.key.partition("/")[0]


def parts_left(path: ObjectFile, notes: Sequence[Note]) -> Iterator[pa.Table]:
    """Yield the letters of a file part by part, with empty rows for dropped letters.

    Raises CheckpointCorrupt if the file is damaged or missing.
    """
    _, gone = gone_rows(path, _spout_of(path), notes)
    done = 0
    for part in read_parts(path):
        here = gone[done : done + len(part)]
        done += len(part)
        yield emptied(part, here) if here.any() else part
