"""The files of a dead-letter store on a file system, and the columns of its sources.

What a bucket does instead is in `ackcore.spark.dead_letters.bucket`; both are `Letters`, and none
but these two opens, lists or names a file of a store.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import pyarrow as pa

from ackcore.spark.base.atomic import (
    link_file,
    make_directory,
    remove,
    remove_temporaries,
    write_file,
)
from ackcore.spark.base.checksummed import read_record, write_record
from ackcore.spark.base.errors import StateError
from ackcore.spark.base.letters import schema_of, write_letters
from ackcore.spark.base.paths import Place
from ackcore.spark.dead_letters.letters import FilePath, position_of, read_schema

OWNER, NOTES = ".owner.json", ".replayed"
_COLUMNS = "columns.parquet"
_FILE = re.compile(r"batch-(\d+)(?:\.\d+)?\.parquet|batches-(\d+)-(\d+)\.(\d+)\.parquet")

#: Writes a file of letters.
Fill = Callable[[BinaryIO], object]


class LetterFile(NamedTuple):
    """A file of letters: of which micro-batches, and how often they were merged.

    Several may have the letters of one micro-batch that were not merged: see `position_of`.
    """

    path: FilePath
    first: int
    last: int
    level: int

    @property
    def size(self) -> int:
        """Its bytes."""
        return self.path.stat().st_size if isinstance(self.path, Path) else self.path.size

    def state(self) -> tuple[object, ...]:
        """Return what is another once something else is in it."""
        if not isinstance(self.path, Path):
            return (self.path,)
        stat = self.path.stat()
        return self.path, stat.st_mtime_ns, stat.st_size


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


class Letters(Protocol):
    """The files of a store of dead letters, and its notes.

    Attributes
    ----------
    url : str
        Where it is.
    """

    url: str

    def refresh(self) -> None:
        """Look anew at what is there, where that was remembered."""

    def owner(self) -> dict[str, Any] | None:
        """Return to which checkpoint it belongs, None if nobody has said yet."""

    def own(self, about: Mapping[str, str], check_owner: Callable[[], object]) -> None:
        """Make it that of a checkpoint; a driver that wrote to it before is out.

        Parameters
        ----------
        about : mapping of str to str
            What `owner` returns from now on.
        check_owner : callable
            Raises if the checkpoint is another driver's meanwhile.
        """

    def spouts(self) -> list[str]:
        """Return the spouts that have letters, or whose columns are known, sorted."""

    def files(self, spout: str) -> list[LetterFile]:
        """Return the files of a spout that count, in the order of their micro-batches."""

    def columns(self, spout: str) -> FilePath | None:
        """Return the file that has the columns of a spout's source, if there is one."""

    def remember_columns(self, sources: Mapping[str, pa.Schema]) -> None:
        """Note the columns of each source, so that they are known before a record died."""

    def publish(self, spout: str, number: int, new: Sequence[NewFile]) -> None:
        """Write the letters of a micro-batch, in the place of those that are there of it."""

    def merge(self, spout: str, run: list[LetterFile], fill: Fill) -> LetterFile | None:
        """Write neighbours as one file; None if they are not all there any more."""

    def remove_merged(self, spout: str, until_ms: int) -> None:
        """Remove files that were merged into others before that time."""

    def named(self, spout: str, numbers: set[int]) -> list[LetterFile]:
        """Return files with letters of these micro-batches, also such as do not count."""

    def rewrite(self, spout: str, file: LetterFile, fill: Fill) -> bool:
        """Write a file again in its place, and return whether it still had one."""

    def has(self, spout: str, file: LetterFile) -> bool:
        """Whether a file is there still."""

    def notes(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield what was noted of requests, by request."""

    def note_place(self, request: str) -> Path | str:
        """Return where a request is noted down, or the URL of what has all notes."""

    def add_note(self, request: str, body: Mapping[str, Any]) -> None:
        """Note down a request, by which it counts.

        Raises
        ------
        NotesChanged
            If there are notes that `notes` did not yield before.
        """


class DirectoryLetters:
    """A store that is a directory: what counts is told by the names that are there.

    Parameters
    ----------
    path : Path
        The directory; it need not be there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.url = str(path)
        #: By the one driver that writes: what was put together stays for a while, thousands of it.
        self._known: dict[str, tuple[list[LetterFile], list[tuple[LetterFile, LetterFile]]]] = {}

    def __repr__(self) -> str:
        return f"DirectoryLetters({self.url!r})"

    def refresh(self) -> None:
        """See `Letters.refresh`."""
        self._known.clear()

    def owner(self) -> dict[str, Any] | None:
        """See `Letters.owner`."""
        return read_record(self.path / OWNER, OWNER)

    def own(self, about: Mapping[str, str], check_owner: Callable[[], object]) -> None:
        """See `Letters.own`. The lock of the checkpoint decides its owner."""
        make_directory(self.path)
        if self.owner() is None:
            write_record(self.path / OWNER, OWNER, about)
        for directory in spouts_of(self.path):
            remove_temporaries(directory)

    def spouts(self) -> list[str]:
        """See `Letters.spouts`."""
        directories = spouts_of(self.path)
        return [
            each.name for each in directories if (each / _COLUMNS).exists() or active_files(each)
        ]

    def files(self, spout: str) -> list[LetterFile]:
        """See `Letters.files`."""
        return list(self._listed(spout)[0])

    def _listed(self, spout: str) -> tuple[list[LetterFile], list[tuple[LetterFile, LetterFile]]]:
        return self._known[spout] if spout in self._known else listed(self.path / spout)

    def columns(self, spout: str) -> Path | None:
        """See `Letters.columns`."""
        path = self.path / spout / _COLUMNS
        return path if path.exists() else None

    def remember_columns(self, sources: Mapping[str, pa.Schema]) -> None:
        """See `Letters.remember_columns`."""
        for spout, schema in sources.items():
            path = make_directory(self.path / spout) / _COLUMNS
            letters = schema_of(schema)
            try:
                known = path.exists() and read_schema(path).equals(letters)
            except StateError:
                known = False
            if not known:
                write_file(path, partial(write_letters, schema=letters, tables=()))
        for directory in spouts_of(self.path):
            if sources and directory.name not in sources:
                remove(directory / _COLUMNS)

    def publish(self, spout: str, number: int, new: Sequence[NewFile]) -> None:
        """See `Letters.publish`."""
        directory = make_directory(self.path / spout)
        files, replaced = self._listed(spout)
        self._known.pop(spout, None)
        there = []
        for position, fill, source, _ in new:
            part = f".{position}" if position else ""
            path = directory / f"batch-{number}{part}.parquet"
            if isinstance(source, Path):
                link_file(source, path)
            else:
                write_file(path, fill)
            there.append(LetterFile(path, number, number, 0))
        for file in files:
            if file.first == file.last == number and file not in there:
                remove(_path(file))  # of a micro-batch of that number that a backup has undone
        if all(each.last <= number for each in files):
            others = [each for each in files if each.last < number]
            self._known[spout] = [*others, *there], replaced

    def merge(self, spout: str, run: list[LetterFile], fill: Fill) -> LetterFile:
        """See `Letters.merge`: files within another one's micro-batches do not count any more."""
        files, replaced = self._listed(spout)
        self._known.pop(spout, None)
        first, last, level = run[0].first, run[-1].last, run[0].level + 1
        path = self.path / spout / f"batches-{first}-{last}.{level}.parquet"
        write_file(path, fill)
        whole = LetterFile(path, first, last, level)
        files = [whole if file == run[0] else file for file in files if file not in run[1:]]
        replaced = [(file, whole if by in run else by) for file, by in replaced]
        self._known[spout] = files, [*replaced, *((file, whole) for file in run)]
        return whole

    def remove_merged(self, spout: str, until_ms: int) -> None:
        """See `Letters.remove_merged`."""
        files, replaced = self._listed(spout)
        self._known.pop(spout, None)
        gone = {by for by in {by for _, by in replaced} if _written_ms(by) < until_ms}
        for file, by in replaced:
            if by in gone:
                remove(_path(file))
        left = [(file, by) for file, by in replaced if by not in gone]
        self._known[spout] = files, left

    def named(self, spout: str, numbers: set[int]) -> list[LetterFile]:
        """See `Letters.named`."""
        remove_temporaries(make_directory(self.path / NOTES))
        files, replaced = listed(self.path / spout)
        some = [*files, *(file for file, _ in replaced)]
        return [file for file in some if any(file.first <= n <= file.last for n in numbers)]

    def rewrite(self, spout: str, file: LetterFile, fill: Fill) -> bool:
        """See `Letters.rewrite`. A driver that starts meanwhile does not delete the new file."""
        write_file(_path(file), fill, made_in=make_directory(self.path / NOTES))
        return True

    def has(self, spout: str, file: LetterFile) -> bool:
        """See `Letters.has`."""
        return _path(file).exists()

    def notes(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """See `Letters.notes`."""
        directory = self.path / NOTES
        for path in directory.glob("*.json") if directory.is_dir() else ():
            if not path.name.startswith("."):
                record = read_record(path, f"{NOTES}/{path.name}")
                assert record is not None
                yield path.stem, record

    def note_place(self, request: str) -> Path:
        """See `Letters.note_place`."""
        return self.path / NOTES / f"{request}.json"

    def add_note(self, request: str, body: Mapping[str, Any]) -> None:
        """See `Letters.add_note`. The caller holds the lock of the checkpoint's requests."""
        path = self.note_place(request)
        make_directory(path.parent)
        write_record(path, f"{NOTES}/{path.name}", body)


def _path(file: LetterFile) -> Path:
    assert isinstance(file.path, Path)
    return file.path


def _written_ms(file: LetterFile) -> int:
    return _path(file).stat().st_mtime_ns // 1_000_000


def spouts_of(store: Path) -> list[Path]:
    """Return the directories of its spouts, sorted."""
    if not store.is_dir():
        return []
    found = (each for each in store.iterdir() if not each.name.startswith("."))
    return sorted(each for each in found if each.is_dir())


def listed(directory: Path) -> tuple[list[LetterFile], list[tuple[LetterFile, LetterFile]]]:
    """Return the files that count, in order; and others with what they were merged into."""
    names: list[str] = []
    with contextlib.suppress(FileNotFoundError):
        names = os.listdir(directory)
    matches = filter(None, map(_FILE.fullmatch, names))
    files = (
        LetterFile(directory / m[0], int(m[1] or m[2] or 0), int(m[1] or m[3] or 0), int(m[4] or 0))
        for m in matches
    )
    counts: list[LetterFile] = []
    replaced = []

    def order(file: LetterFile) -> tuple[int, int, int, int]:
        # Of two that begin alike the longer one comes first; micro-batches never overlap in part.
        return file.first, -file.last, -file.level, position_of(file.path)

    for file in sorted(files, key=order):
        last = counts[-1] if counts else None
        if last is not None and file.last <= last.last and file.level < last.level:
            replaced.append((file, counts[-1]))
        else:
            counts.append(file)
    return counts, replaced


def active_files(directory: Path) -> list[LetterFile]:
    """Return the files of a spout's directory that count, in the order of their micro-batches."""
    return listed(directory)[0]


# -- of any store ---------------------------------------------------------------------------------


def files_of(store: Letters) -> dict[str, list[LetterFile]]:
    """Return the files that count, by spout; no spout without letters."""
    found = {spout: store.files(spout) for spout in store.spouts()}
    return {spout: files for spout, files in found.items() if files}


def kinds_of(store: Letters, spout: str | None) -> list[Kind]:
    """Return the files that count, of one spout or of all, those of the same columns together."""
    kinds = []
    for name, files in files_of(store).items():
        if spout in (None, name):
            by_columns: dict[tuple[pa.StructType, bool], list[LetterFile]] = {}
            for file in files:
                schema = read_schema(file.path)
                columns = schema.field("payload").type, "replays" in schema.names
                by_columns.setdefault(columns, []).append(file)
            kinds += [Kind(name, tuple(each), payload) for (payload, _), each in by_columns.items()]
    return kinds
