"""Files of a store of dead letters, as `ackcore.spark.dead_letters.letter_store` names them."""

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
    """A file of letters: of which micro-batches, and how often they were merged.

    Several may have the letters of one micro-batch that were not merged: see `position_of`.
    """

    path: ObjectFile
    first: int
    last: int
    level: int


class NewFile(NamedTuple):
    """A file of letters to be: which letter of the micro-batch is its first, and what writes it.

    ``source`` is a file of ``nbytes`` that is it already, by its path or its URL, with its checksum
    in its name; it is never written again.
    """

    position: int
    fill: Fill
    source: Place | None = None
    nbytes: int = 0


class Kind(NamedTuple):
    """Files of a spout whose letters have the same columns."""

    spout: str
    files: tuple[LetterFile, ...]
    payload: pa.StructType


class NotesChanged(StateError):
    """A note was made while another was about to be, which did not know of it: look again."""
