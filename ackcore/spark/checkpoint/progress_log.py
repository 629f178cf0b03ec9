"""The log of micro-batches, one line each, for readers outside the query.

No decision depends on the log.  It is not synced; readers skip a line that a crash cut short, and
the writer skips a line that it cannot write.  The file is ``<checkpoint>/ackcore/progress.jsonl``.
When it is full, it replaces ``progress.1.jsonl``, so at least the last thousand micro-batches are
kept.
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
#: Bytes that are read at a time: about a hundred lines.
_BLOCK_BYTES = 1 << 16


class ProgressLog:
    """The writer of a checkpoint's log, for its driver."""

    def __init__(self, root: Path):
        self._path, self._older = root / _NAME, root / _OLDER
        self._complained = False

    def append(self, line: Mapping[str, Any]) -> None:
        """Add a line. If it cannot be written, log one warning.

        Raises CheckpointInUse if another driver has taken over.
        """
        check_fence()
        text = json.dumps(line, separators=(",", ":"), default=float)
        try:
            with open(self._path, "ab", buffering=0) as file:
                # A newline before it as well: a crash may have cut short the last line.
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

    It reads no more of the files than it needs, however long they are: a progress display calls it
    twice a second.

    ``most``: the largest number of lines to return.
    """
    found: dict[int, dict[str, Any]] = {}
    # The newer file first: if it is renamed in between, its lines are found in the older one.
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
    """Yield the lines of a file in blocks, from its end to its beginning."""
    try:
        with open(path, "rb", buffering=0) as file:
            at, cut = file.seek(0, os.SEEK_END), b""
            while at > 0:
                begin = max(0, at - _BLOCK_BYTES)
                file.seek(begin)
                # If this block begins within a line, the next block has the line's beginning.
                cut, *lines = (file.read(at - begin) + cut).split(b"\n")
                at = begin
                yield lines
            yield [cut]
    except OSError:
        return
