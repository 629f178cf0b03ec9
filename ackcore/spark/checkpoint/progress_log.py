"""What micro-batches did, line by line, for those who look at a checkpoint from outside.

Nothing is decided by it: it is not synced, a line that a crash cut short is passed over, and what
cannot be written is left out.  The file is ``<checkpoint>/ackcore/progress.jsonl``; when it is full
it takes the place of ``progress.1.jsonl``, so the last thousand micro-batches or more are there.
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

    Parameters
    ----------
    root : Path
        ``<checkpoint>/ackcore``.
    most : int
        How many at most.
    """
    found: dict[int, dict[str, Any]] = {}
    # The newer one first: what it had when it became the older one is then found there, too.
    texts = [_read(root / name) for name in (_NAME, _OLDER)]
    for line in b"\n".join(reversed(texts)).splitlines():
        try:
            one = json.loads(line)
            found[int(one["batch_id"])] = one
        except (ValueError, TypeError, KeyError):
            continue
    return [found[number] for number in sorted(found)[-most:]] if most > 0 else []


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
