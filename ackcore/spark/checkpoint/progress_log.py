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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ackcore.spark.base.atomic import check_fence

_log = logging.getLogger("ackcore")

_NAME, _OLDER = "progress.jsonl", "progress.1.jsonl"
#: A line has some 600 bytes.
_FULL_BYTES = 1 << 20
#: Lines that are read beside the requested ones: after a restored backup numbers begin again.
_MORE = 100


class ProgressLog:
    """The writer of a checkpoint's log, for its driver."""

    def __init__(self, root: Path):
        self._path, self._older = root / _NAME, root / _OLDER
        self._complained = False

    def append(self, line: Mapping[str, Any]) -> None:
        """Add a line. If it cannot be written, it is lost, and a warning is logged the first time.

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
                text = "%s could not be written, so status() lacks results of micro-batches: %s"
                _log.warning(text, self._path, error)
            self._complained = True


def read_progress(root: Path, most: int) -> list[dict[str, Any]]:
    """Return the lines of the ``most`` highest micro-batch numbers as dicts, the highest last.

    If several lines have the same number, only the last one is returned. Lines and files that
    cannot be read are left out.
    """
    found: dict[int, dict[str, Any]] = {}
    # The newer file first: if it is renamed in between, its lines are found in the older one.
    for path in (root / _NAME, root / _OLDER):
        if len(found) >= most:
            break
        try:
            lines = [line for line in path.read_bytes().split(b"\n") if line]
        except OSError:
            continue
        for line in reversed(lines[-(most + _MORE) :]):
            try:
                one = json.loads(line)
                found.setdefault(int(one["batch_id"]), one)
            except (ValueError, TypeError, KeyError):
                continue  # a crash cut it short
    return [found[number] for number in sorted(found)[-most:]] if most > 0 else []
