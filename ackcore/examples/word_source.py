"""The spout's side of the word count: text files as numbered lines, and lines as words.

A line's message id is (file, line, copy).  Files are numbered as they are given; lines from 0
within a file; when more lines are wanted than the files hold, all are read again under the next
copy number.  `ackcore.ids.root_ids` takes a partition and an offset, so a message id is laid out
as ``partition = copy`` and ``offset = file << 24 | line``: 2**16 copies of 2**18 files of 2**24
lines.

A line ends at a newline byte and nowhere else; a missing last newline does not matter.  Bytes
that are not UTF-8 become U+FFFD.  A word is a run of ASCII letters, digits, underscores and of
anything beyond ASCII.  Everything here works on columns: nothing loops over lines or words.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]

COPIES = 2**16
FILES = 2**18
LINE_BITS = 24

#: Some 100,000 lines of source code: what a task should have, and its blobs be made of, so that
#: few and large ones cross Spark.
PIECE_BYTES = 4 << 20

_NEWLINE = ord("\n")
_IS_WORD = bytes(
    byte >= 0x80 or byte == ord("_") or (chr(byte).isascii() and chr(byte).isalnum())
    for byte in range(256)
)
_BETWEEN_WORDS = bytes(byte for byte in range(256) if not _IS_WORD[byte])


class InputError(ValueError):
    """What is to be read cannot be, or cannot be numbered."""


class Piece(NamedTuple):
    """Whole lines of one file, next to each other, in one copy."""

    path: str
    file: int
    copy: int
    start: int  # in bytes
    size: int  # in bytes
    first_line: int
    lines: int


@dataclass(slots=True)
class Lines:
    """A batch of lines.

    ``text`` holds them one after the other, each with its newline; ``ends`` is the place of each
    newline; ``copies`` and ``offsets`` are the message ids as `ackcore.ids.root_ids` takes them.
    """

    text: bytes
    ends: Int64s
    copies: npt.NDArray[np.int32]
    offsets: Int64s

    def __len__(self) -> int:
        return len(self.ends)


@dataclass(slots=True)
class Words:
    """The words of a batch of lines, in order.

    Word i is ``text[bounds[i]:bounds[i + 1]]``; it is number ``ordinals[i]`` of ``lines[i]``.
    """

    text: bytes
    bounds: npt.NDArray[np.int32]
    lines: Int64s
    ordinals: Int64s

    def __len__(self) -> int:
        return len(self.lines)


def standard_library() -> list[str]:
    """Return the paths of the Python sources of the standard library, sorted."""
    top = Path(sysconfig.get_path("stdlib"))
    installed = {"site-packages", "dist-packages"}  # by others, and not the same everywhere
    found = [path for path in top.rglob("*.py") if installed.isdisjoint(path.parts)]
    if not found:
        raise InputError(f"this Python has no library sources in {top}; name files with --input")
    return sorted(str(path) for path in found)


def _cut(path: str, file: int) -> Iterator[Piece]:
    """One file as pieces of about `PIECE_BYTES`, each of whole lines."""
    start = first_line = 0
    with open(path, "rb") as source:
        while text := source.read(PIECE_BYTES) + source.readline():
            if len(text) >= 1 << 30:
                raise InputError(f"input {path!r} has a line of a gigabyte or more")
            lines = text.count(b"\n") + (not text.endswith(b"\n"))
            yield Piece(path, file, 0, start, len(text), first_line, lines)
            start += len(text)
            first_line += lines
    if first_line > 1 << LINE_BITS:
        raise InputError(
            f"input {path!r} has {first_line} lines; at most {1 << LINE_BITS} have a number"
        )


def plan(paths: Sequence[str], lines: int | None = None) -> list[Piece]:
    """Cut files into pieces of ``lines`` lines together.

    Parameters
    ----------
    paths : sequence of str
        Files, in the order of their numbers.  One that is named twice is two files.
    lines : int, optional
        How many to read: the files are read again under the next copy number until there are as
        many, and the last copy stops there.  None reads each file once.

    Raises
    ------
    InputError
        If a file cannot be read, there is not one line, or the numbers do not suffice.
    """
    if len(paths) > FILES:
        raise InputError(f"{len(paths)} input files; at most {FILES} have a number")
    once: list[Piece] = []
    for file, path in enumerate(paths):
        try:
            # Not opened if it is none: opening a pipe waits for its writer.
            if not os.path.isfile(path) and os.path.exists(path):
                raise InputError(f"input {path!r} is not a regular file")
            once.extend(_cut(path, file))
        except OSError as error:
            raise InputError(f"input {path!r} cannot be read: {error.strerror}") from error
    there = sum(piece.lines for piece in once)
    if there == 0:
        raise InputError("the input has no lines")
    wanted = there if lines is None else lines
    if wanted > there * COPIES:
        raise InputError(
            f"{wanted} lines of an input of {there} would take {-(-wanted // there)} copies; "
            f"at most {COPIES} have a number"
        )
    pieces = []
    copy = 0
    while wanted:
        for piece in once:
            taken = min(piece.lines, wanted)
            pieces.append(piece._replace(copy=copy, lines=taken))
            wanted -= taken
            if not wanted:
                break
        copy += 1
    return pieces


def share(pieces: Sequence[Piece], tasks: int) -> list[list[Piece]]:
    """Divide pieces among tasks: neighbours together, about as many bytes to each."""
    ends = np.cumsum([piece.size for piece in pieces])
    middles = ends - np.array([piece.size for piece in pieces]) / 2
    owners = (middles * tasks / ends[-1]).astype(int)
    shares: list[list[Piece]] = [[] for _ in range(tasks)]
    for piece, owner in zip(pieces, owners.tolist(), strict=True):
        shares[owner].append(piece)
    return shares


def batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Group pieces into what is handled at a time: by position, the same in every run."""
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        if batch and size + piece.size > 2 * PIECE_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(piece)
        size += piece.size
    if batch:
        yield batch


def _utf8(text: bytes) -> bytes:
    try:
        text.decode()
    except UnicodeDecodeError:
        return text.decode(errors="replace").encode()
    return text


def _read_piece(piece: Piece) -> bytes:
    with open(piece.path, "rb") as source:
        source.seek(piece.start)
        text = source.read(piece.size)
    if text and not text.endswith(b"\n"):
        text += b"\n"
    here = text.count(b"\n")
    if here > piece.lines:  # the last copy stops in here
        text = b"\n".join([*text.split(b"\n", piece.lines)[:-1], b""])
        here = text.count(b"\n")
    if here != piece.lines:
        raise RuntimeError(f"input {piece.path!r} has changed while it was read")
    return _utf8(text)


def read(batch: Sequence[Piece]) -> Lines:
    """Read the lines of a batch."""
    text = b"".join(map(_read_piece, batch))
    ends = np.flatnonzero(np.frombuffer(text, np.uint8) == _NEWLINE)
    counts = np.array([piece.lines for piece in batch])
    firsts = np.array([piece.file << LINE_BITS | piece.first_line for piece in batch])
    copies = np.array([piece.copy for piece in batch], np.int32)
    return Lines(
        text, ends, np.repeat(copies, counts), np.repeat(firsts, counts) + ordinals(counts)
    )


def ordinals(counts: Int64s) -> Int64s:
    """Return 0, 1, 2, ... anew for each count: ``[2, 0, 3]`` gives ``[0, 1, 0, 1, 2]``."""
    before = np.cumsum(counts) - counts
    return np.arange(counts.sum(), dtype=np.int64) - np.repeat(before, counts)


def split(lines: Lines, without: npt.NDArray[np.bool_] | None = None) -> Words:
    """Split lines into words; those of the lines marked in ``without`` are left out."""
    text = lines.text
    if without is not None and without.any():
        blanked = np.frombuffer(text, np.uint8).copy()
        blanked[np.repeat(without, np.diff(lines.ends, prepend=-1))] = _NEWLINE
        text = blanked.tobytes()
    # With a newline before the first line and one after the last, words start and end in turns.
    in_word = np.frombuffer((b"\n" + text).translate(_IS_WORD), bool)
    turns = np.flatnonzero(in_word[1:] != in_word[:-1])
    starts, stops = turns[::2], turns[1::2]
    bounds = np.zeros(len(starts) + 1, np.int32)
    np.cumsum(stops - starts, out=bounds[1:])
    counts = np.diff(np.searchsorted(starts, lines.ends), prepend=0)
    letters = text.translate(None, _BETWEEN_WORDS)
    return Words(letters, bounds, np.repeat(np.arange(len(lines)), counts), ordinals(counts))
