"""The files of a store of dead letters. `ackcore.spark.dead_letters.letter_store` names them."""

from __future__ import annotations

from collections.abc import Callable
from typing import BinaryIO, NamedTuple

import pyarrow as pa

from ackcore.spark.base.errors import StateError
from ackcore.spark.base.paths import Place
from ackcore.spark.dead_letters.objects import ObjectFile

#: Writes a file of letters.
Fill = Callable[[BinaryIO], object]


class LetterFile(NamedTuple):
    """A file of letters, with its first and last micro-batch and the number of merges behind it.

    The unmerged letters of one micro-batch may be in several files: see `position_of`.
    """

    path: ObjectFile
    first: int
    last: int
    level: int


class NewFile(NamedTuple):
    """A file of letters to write: the position of its first letter, and the function that writes
    it.

    ``source`` is the path or URL of an existing file with the same content, of ``nbytes`` bytes.
    Its name contains its checksum, and it is never rewritten.
    """

    position: int
    fill: Fill
    source: Place | None = None
    nbytes: int = 0


class Kind(NamedTuple):
    """The files of a spout whose letters have the same columns."""

    spout: str
    files: tuple[LetterFile, ...]
    payload: pa.StructType


class NotesChanged(StateError):
    """Another process added a note after the notes were read. Read them again and retry."""
