"""The log of micro-batches, a line each, for readers outside the query.

Nothing is decided by it: it is not synced, a line that a crash cut short is passed over, and what
cannot be written is left out.  The file is ``<checkpoint>/ackcore/progress.jsonl``; when it is full
it takes the place of ``progress.1.jsonl``, so the last thousand micro-batches or more are there.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ackcore.spark.base.atomic import check_fence

_log = logging.getLogger("ackcore")

_NAME, _OLDER = "progress.jsonl", "progress.1.jsonl"
#: A line has some 600 bytes.
_FULL_BYTES = 1 << 20
#: So much is read at a time: a hundred lines.
_BLOCK_BYTES = 1 << 16


class ProgressLog:
    """The log of a checkpoint, as its driver writes it.

    Parameters
    ----------
    root : Path
        ``<checkpoint>/ackcore``.
    """

    def __init__(self, root: Path):
        self._path, self._older = root / _NAME, root / _OLDER
        self._complained = False

    def append(self, line: Mapping[str, Any]) -> None:
        """Add a line; of one that cannot be written a warning is logged, once.

        Raises
        ------
        CheckpointInUse
            If another driver has taken over.
        """
        check_fence()
        text = json.dumps(line, separators=(",", ":"), default=float)
        try:
            with open(self._path, "ab", buffering=0) as file:
                # A newline before it as well: a crash may have cut short what is there.
                file.write(f"\n{text}\n".encode())
                full = file.tell() >= _FULL_BYTES
            if full:
                os.replace(self._path, self._older)
        except OSError as error:
            if not self._complained:
                _log.warning("%s could not be written: %s", self._path, error)
            self._complained = True


def read_progress(root: Path, most: int) -> list[dict[str, Any]]:
    """Return the lines of the last micro-batches, the newest one last.

    Of the files no more is read than that takes, however long they are: who shows how a query goes
    asks for it twice a second.

    Parameters
    ----------
    root : Path
        ``<checkpoint>/ackcore``.
    most : int
        How many at most.
    """
    found: dict[int, dict[str, Any]] = {}
    # The newer one first: what it had when it became the older one is then found there, too.
    for path in (root / _NAME, root / _OLDER):
        for lines in _blocks_of_lines(path):
            if len(found) >= most:
                break
            for line in reversed(lines):
                try:
                    one = json.loads(line)
                    found.setdefault(int(one["batch_id"]), one)
                except (ValueError, TypeError, KeyError):
                    continue
    return [found[number] for number in sorted(found)[-most:]] if most > 0 else []


def _blocks_of_lines(path: Path) -> Iterator[list[bytes]]:
    """Yield the lines of a file, some at a time, from its end to its beginning."""
    try:
        with open(path, "rb", buffering=0) as file:
            at, cut = file.seek(0, os.SEEK_END), b""
            while at > 0:
                begin = max(0, at - _BLOCK_BYTES)
                file.seek(begin)
                # Where this begins within a line, the next block has the rest of it.
                cut, *lines = (file.read(at - begin) + cut).split(b"\n")
                at = begin
                yield lines
            yield [cut]
    except OSError:
        return
