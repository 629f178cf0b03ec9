"""The store of dead letters: its files, who writes them, and how they are found.

A store is a directory, ``<checkpoint>/ackcore/dead_letters`` or another, of one checkpoint::

    <spout>/batch-<N>.parquet              the dead of micro-batch N; written again alike if N
                                           acts again
    <spout>/batches-<M>-<N>.<level>.parquet  those of micro-batches M to N, put together
    <spout>/columns.parquet                no rows: the columns of the source at the last start
    .owner.json                            whose they are: deployment key and checkpoint
    .replayed/<request>.json               which rows (micro-batch, position in it) were sent again

A letter is named by its micro-batch and its position among the letters of that micro-batch and
spout, in whatever file it is.  A file all of whose micro-batches are within those of another one
was put into that one and no longer counts: so a rename is all that it takes, and whoever dies
around it loses no letter and doubles none.  It stays for an hour, for whoever found it before.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ackcore._records import Int64s
from ackcore.spark.base.atomic import make_directory, remove, remove_temporaries, write_file
from ackcore.spark.base.checksummed import read_record, write_record
from ackcore.spark.base.clocks import wall_clock_ms
from ackcore.spark.base.errors import CheckpointForeign, StateError, corrupt
from ackcore.spark.base.paths import local_path
from ackcore.spark.base.schemas import ATTEMPT, FIRST_MS, LAST_MS, MESSAGE_ID, REASON, TRACKING
from ackcore.topology.tuples import Reason

_log = logging.getLogger("ackcore")

TIME = pa.timestamp("ms", "UTC")
#: What every letter has beside its payload.
LETTER = pa.schema(
    [
        pa.field("message_id", pa.string()),
        pa.field("attempts", pa.int32()),
        pa.field("error_type", pa.string()),
        pa.field("error_message", pa.string()),
        pa.field("component", pa.string()),
        pa.field("first_ms", TIME),
        pa.field("last_ms", TIME),
        pa.field("batch_id", pa.int64()),
    ]
)
NOTES = ".replayed"
_OWNER, _POINTER, _COLUMNS = ".owner.json", "dead_letters.json", "columns.parquet"
_FILE = re.compile(r"batch-(\d+)\.parquet|batches-(\d+)-(\d+)\.(\d+)\.parquet")
#: Pages carry checksums, so that a flipped bit is an error and not another letter.
_WRITING: dict[str, Any] = {"write_page_checksum": True, "compression": "zstd"}

#: So many neighbours that were put together equally often are put together once more, and at most
#: so many at once: with d deaths there are some 16 log d files, each letter written log d times.
_FEWEST, _MOST = 16, 256
#: Files are put together up to this size.
_BYTES = 1 << 28
#: What goes into one row group, so that no more of a file is in memory.
_GROUP_ROWS, _GROUP_BYTES = 1 << 16, 1 << 25
#: For how long a file is kept that was put into another: somebody may be about to read it.
KEPT_MS = 3_600_000


class LetterFile(NamedTuple):
    """A file of letters: of which micro-batches, and how often they were put together."""

    path: Path
    first: int
    last: int
    level: int


class Kind(NamedTuple):
    """Files of a spout whose letters have the same columns."""

    spout: str
    files: tuple[LetterFile, ...]
    payload: pa.StructType


class DeadLetters:
    """The store of a checkpoint, as the driver writes it; made by `open`."""

    def __init__(self, path: Path, clock: Callable[[], int] = wall_clock_ms):
        self.path = path
        self._clock = clock
        self._schemas: dict[str, bytes] = {}
        self._complained = False
        self._listed: dict[Path, tuple[list[LetterFile], list[tuple[LetterFile, LetterFile]]]] = {}

    @classmethod
    def open(
        cls,
        checkpoint: str | os.PathLike[str],
        deployment_key: int,
        path: str | os.PathLike[str] | None = None,
        sources: Mapping[str, pa.Schema] | None = None,
    ) -> DeadLetters:
        """Take a directory as the store of an open checkpoint.

        Parameters
        ----------
        checkpoint : path
            The checkpoint, which remembers a store elsewhere.
        deployment_key : int
            ``State.deployment_key``.
        path : path, optional
            The store; where it was at the last start if not given, at first in the checkpoint.
        sources : mapping from str to pyarrow.Schema, optional
            The columns of each tracked spout, which the store remembers.

        Raises
        ------
        CheckpointForeign
            If it holds the letters of another checkpoint, which would be overwritten; or the
            letters of this one are elsewhere, and would be out of sight.
        StateError
            If it cannot be written, or is not there although it was.
        """
        root = local_path(checkpoint, "checkpoint") / "ackcore"
        before = _remembered(root)
        store = before if path is None else local_path(path, "dead_letters")
        if store != before and files_of(before):
            raise CheckpointForeign(
                f"the checkpoint {root.parent} has dead letters in {before}, and dead_letters= is "
                f"{store} now: dead_letters() and replay() would not see the old ones. Move the "
                "directory there first, with all that is in it; or leave dead_letters= out, and "
                "the letters go on where they are"
            )
        if path is None and (root / _POINTER).exists() and not (store / _OWNER).exists():
            raise StateError(
                f"the dead letters of the checkpoint {root.parent} are kept in {store}, and there "
                f"is no {_OWNER} in it: is its file system mounted? If they are gone for good, "
                "give dead_letters= the directory for those to come"
            )
        owner = read_record(make_directory(store) / _OWNER, _OWNER)
        if owner is None:
            if files_of(store):
                raise corrupt(
                    store / _OWNER, "is missing, though there are letters beside it: it was removed"
                )
            about = {"deployment_key": f"{deployment_key:016x}", "checkpoint": str(root.parent)}
            write_record(store / _OWNER, _OWNER, about)
        elif owner["deployment_key"] != f"{deployment_key:016x}":
            raise CheckpointForeign(
                f"{store} holds the dead letters of the checkpoint {owner['checkpoint']} "
                f"(deployment {owner['deployment_key']}), and those of {root.parent} "
                f"({deployment_key:016x}) would overwrite them; give dead_letters= a directory of "
                "its own"
            )
        if store == root / "dead_letters":  # which is found wherever the checkpoint is moved to
            remove(root / _POINTER)
        elif store != before:
            write_record(root / _POINTER, _POINTER, {"path": str(store)})
        for directory in _spouts(store):
            remove_temporaries(directory)
        _remember_columns(store, sources or {})
        return cls(store)

    def write(self, number: int, dead: Mapping[str, pa.Table]) -> None:
        """Write the dead of a micro-batch; once more does no harm.

        Parameters
        ----------
        number : int
            The micro-batch.
        dead : mapping from str to pyarrow.Table
            ``BatchDecision.dead``.

        Raises
        ------
        StateError
            If it cannot be written.
        """
        for spout, table in dead.items():
            if table.num_rows:
                self._write(make_directory(self.path / spout), number, _letters(table, number))

    def _write(self, directory: Path, number: int, letters: pa.Table) -> None:
        # One driver writes, and what was put together stays for a while: thousands of files.
        known = self._listed.pop(directory) if directory in self._listed else None
        files, replaced = known or _listed(directory)
        for file in files:
            if file.level and file.first <= number <= file.last:
                raise corrupt(
                    file.path,
                    f"holds letters of micro-batches after {number}, which is only now being "
                    "written: the dead letters and the checkpoint are not of one age",
                )
        file = LetterFile(directory / f"batch-{number}.parquet", number, number, 0)
        write_file(file.path, partial(pq.write_table, letters, **_WRITING))
        older = [each for each in files if each.last < number]
        try:
            self._put_together(directory, older, replaced)
        except (OSError, StateError, pa.ArrowException) as error:
            # The letters are written: that they are many files only makes them slow to read.
            if not self._complained:
                _log.warning("the dead letters in %s stay many files: %s", directory, error)
            self._complained = True
        else:
            if all(each.last <= number for each in files):
                self._listed[directory] = [*older, file], replaced

    def reasons(self) -> Iterator[tuple[Reason, int]]:
        """Yield why records died and how many of each reason, from all letters that there are.

        Raises
        ------
        CheckpointCorrupt
            If a letter is damaged.
        """
        columns = ["component", "error_type", "error_message"]
        for files in files_of(self.path).values():
            for file in files:
                letters = read_letters(file.path, columns)
                counted = letters.group_by(columns).aggregate([([], "count_all")])
                for row in counted.select([*columns, "count_all"]).to_pylist():
                    *reason, deaths = row.values()
                    yield Reason(*reason), deaths

    def _put_together(
        self,
        directory: Path,
        older: list[LetterFile],
        replaced: list[tuple[LetterFile, LetterFile]],
    ) -> None:
        """Make one file of many that are older than the last, which may be written again.

        The lists are brought up to date.
        """
        until = self._clock() - KEPT_MS
        by_all = {by for _, by in replaced}
        gone = {by for by in by_all if by.path.stat().st_mtime_ns // 1_000_000 < until}
        for file, by in replaced:
            if by in gone:
                remove(file.path)
        replaced[:] = [(file, by) for file, by in replaced if by not in gone]
        run = self._run(older)
        if run:
            first, last, level = run[0].first, run[-1].last, run[0].level + 1
            name = f"batches-{first}-{last}.{level}.parquet"
            whole = LetterFile(directory / name, first, last, level)
            write_file(whole.path, partial(_copy, run))
            at = older.index(run[0])
            older[at : at + len(run)] = [whole]
            replaced[:] = [(file, whole if by in run else by) for file, by in replaced]
            replaced += [(file, whole) for file in run]

    def _run(self, files: list[LetterFile]) -> list[LetterFile] | None:
        """Return neighbours that were put together equally often and have the same columns."""
        for _, level in groupby(files, key=lambda file: file.level):
            neighbours = list(level)
            if len(neighbours) < _FEWEST:
                continue
            for _, alike in groupby(neighbours, key=self._schema):
                run: list[LetterFile] = []
                whole = 0
                for file in alike:
                    size = file.path.stat().st_size
                    if len(run) == _MOST or whole + size > _BYTES:
                        if len(run) >= _FEWEST:
                            break
                        run, whole = [], 0  # what is large stays, and others begin behind it
                    if size <= _BYTES:
                        run.append(file)
                        whole += size
                if len(run) >= _FEWEST:
                    return run
        return None

    def _schema(self, file: LetterFile) -> bytes:
        name = f"{file.path.parent.name}/{file.path.name}"
        if name not in self._schemas:
            schema = read_schema(file.path).remove_metadata()
            self._schemas[name] = schema.serialize().to_pybytes()
        return self._schemas[name]


def _letters(dead: pa.Table, number: int) -> pa.Table:
    decode = cache(Reason.decode)  # many die of one cause
    reasons = [decode(text) for text in dead[REASON].to_pylist()]
    payload = dead.select(dead.column_names[len(TRACKING) :])
    columns = [
        dead[MESSAGE_ID],
        dead[ATTEMPT],
        pa.array([reason.type for reason in reasons], pa.string()),
        pa.array([reason.message for reason in reasons], pa.string()),
        pa.array([reason.component for reason in reasons], pa.string()),
        dead[FIRST_MS].cast(TIME),
        dead[LAST_MS].cast(TIME),
        pa.array(np.full(dead.num_rows, number)),
        payload.to_struct_array(),
    ]
    return pa.table(columns, schema=_schema_of(payload.schema))


def _schema_of(source: pa.Schema) -> pa.Schema:
    """Return the schema of letters from a source of these columns."""
    return LETTER.append(pa.field("payload", pa.struct(list(source))))


def _copy(run: list[LetterFile], file: BinaryIO) -> None:
    """Write the letters of files one after the other, as they are."""
    with pq.ParquetWriter(file, read_letters(run[0].path).schema, **_WRITING) as writer:
        for tables in _groups(read_letters(each.path) for each in run):
            writer.write_table(pa.concat_tables(tables))


def _groups(tables: Iterator[pa.Table]) -> Iterator[list[pa.Table]]:
    group: list[pa.Table] = []
    rows = size = 0
    for table in tables:
        group.append(table)
        rows, size = rows + table.num_rows, size + table.nbytes
        if rows >= _GROUP_ROWS or size >= _GROUP_BYTES:
            yield group
            group, rows, size = [], 0, 0
    if group:
        yield group


def read_letters(path: Path, columns: list[str] | None = None) -> pa.Table:
    """Read a file of letters.

    Raises
    ------
    CheckpointCorrupt
        If it is damaged or missing.
    """
    try:
        return pq.read_table(
            path, columns=columns, page_checksum_verification=True, partitioning=None
        )
    except (pa.ArrowException, OSError) as error:
        raise corrupt(path, f"is damaged: {error}") from error


def read_schema(path: Path) -> pa.Schema:
    """Return the columns of a file of letters, as Arrow had them.

    Raises
    ------
    CheckpointCorrupt
        If it is damaged or missing.
    """
    try:
        return pq.read_schema(path)
    except (pa.ArrowException, OSError) as error:
        raise corrupt(path, f"is damaged: {error}") from error


# -- the columns of the sources -------------------------------------------------------------------


def _remember_columns(store: Path, sources: Mapping[str, pa.Schema]) -> None:
    """Note the columns of each source, so that they are known before anybody died."""
    for spout, schema in sources.items():
        make_directory(store / spout)
        path = columns_path(store, spout)
        letters = _schema_of(schema)
        try:
            known = path.exists() and read_schema(path).equals(letters)
        except StateError:
            known = False
        if not known:
            write_file(path, partial(pq.write_table, letters.empty_table(), **_WRITING))
    for directory in _spouts(store):
        if sources and directory.name not in sources:
            remove(directory / _COLUMNS)


def columns_path(store: Path, spout: str) -> Path:
    """Return the file that has the columns of a spout's source; it may not be there."""
    return store / spout / _COLUMNS


def known_spouts(store: Path) -> list[str]:
    """Return the spouts of whose letters anything is known, sorted."""
    directories = _spouts(store)
    return [each.name for each in directories if (each / _COLUMNS).exists() or active_files(each)]


# -- finding files --------------------------------------------------------------------------------


def _spouts(store: Path) -> list[Path]:
    if not store.is_dir():
        return []
    found = (each for each in store.iterdir() if not each.name.startswith("."))
    return sorted(each for each in found if each.is_dir())


def _listed(directory: Path) -> tuple[list[LetterFile], list[tuple[LetterFile, LetterFile]]]:
    """Return the files that count, in order; and those that do not, with what they were put in."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        names = []
    matches = filter(None, map(_FILE.fullmatch, names))
    files = (
        LetterFile(directory / m[0], int(m[1] or m[2] or 0), int(m[1] or m[3] or 0), int(m[4] or 0))
        for m in matches
    )
    counts: list[LetterFile] = []
    replaced = []
    # Of two that begin alike the longer one comes first; files never overlap in part.
    for file in sorted(files, key=lambda file: (file.first, -file.last, -file.level)):
        if counts and file.last <= counts[-1].last:
            replaced.append((file, counts[-1]))
        else:
            counts.append(file)
    return counts, replaced


def active_files(directory: Path) -> list[LetterFile]:
    """Return the files of a spout's directory that count, in the order of their micro-batches."""
    return _listed(directory)[0]


def files_of(store: Path) -> dict[str, list[LetterFile]]:
    """Return the files that count, by spout; no spout without letters."""
    found = {directory.name: active_files(directory) for directory in _spouts(store)}
    return {spout: files for spout, files in found.items() if files}


def kinds_of(store: Path, spout: str | None) -> list[Kind]:
    """Return the files that count, of one spout or of all, those of the same columns together."""
    kinds = []
    for name, files in files_of(store).items():
        if spout in (None, name):
            by_columns: dict[pa.StructType, list[LetterFile]] = {}
            for file in files:
                payload = read_schema(file.path).field("payload").type
                by_columns.setdefault(payload, []).append(file)
            kinds += [Kind(name, tuple(each), payload) for payload, each in by_columns.items()]
    return kinds


def starts_of(batch_ids: Int64s) -> dict[int, int]:
    """Return where the letters of each micro-batch begin in a file."""
    numbers, starts = np.unique(batch_ids, return_index=True)
    return dict(zip(numbers.tolist(), starts.tolist(), strict=True))


# -- finding a store ------------------------------------------------------------------------------


def _remembered(root: Path) -> Path:
    """Return where a checkpoint's store is."""
    pointer = read_record(root / _POINTER, _POINTER)
    return root / "dead_letters" if pointer is None else Path(pointer["path"])


def store_of(path: str | os.PathLike[str]) -> Path:
    """Return the store that a path means: the path, or the one of that checkpoint.

    Raises
    ------
    FileNotFoundError
        If it is neither.
    """
    given = local_path(path, "path")
    if (given / _OWNER).is_file():
        return given
    if not (given / "ackcore" / "meta.json").is_file():
        raise FileNotFoundError(
            f"path must be a checkpoint or a store of dead letters, and {given} is neither: it "
            f"has no ackcore/meta.json and no {_OWNER} in it"
        )
    return _remembered(given / "ackcore")


def checkpoint_of(store: Path) -> tuple[Path, dict[str, list[str]]]:
    """Return the checkpoint (its ``ackcore``) of a store, and the columns' names of its spouts.

    Raises
    ------
    FileNotFoundError
        If it is gone.
    CheckpointForeign
        If another one is in its place.
    """
    owner = read_record(store / _OWNER, _OWNER)
    root = store.parent
    if owner is None:  # nothing was started since, and the store is the checkpoint's own
        owner = {"checkpoint": str(root.parent), "deployment_key": None}
    if not (root.name == "ackcore" and (root / "meta.json").is_file()):
        root = Path(owner["checkpoint"]) / "ackcore"
    meta = read_record(root / "meta.json", "meta.json")
    if meta is None:
        raise FileNotFoundError(
            f"the dead letters in {store} belong to the checkpoint {owner['checkpoint']}, which is "
            "not there any more; read them by dead_letters() and send them to the source again"
        )
    if owner["deployment_key"] not in (None, meta["deployment_key"]):
        raise CheckpointForeign(
            f"the dead letters in {store} belong to deployment {owner['deployment_key']}, and "
            f"{root} is now that of {meta['deployment_key']}; read them by dead_letters() and "
            "send them to the source again"
        )
    spouts = meta["structure"]["spouts"]
    return root, {name: list(spout["fields"]) for name, spout in spouts.items()}


def check_spout(store: Path, spout: str | None) -> None:
    """Raise ValueError if a spout is neither in the topology nor has letters."""
    known = {*known_spouts(store)}
    if spout is None or spout in known:
        return
    # The letters can be read without their checkpoint.
    with contextlib.suppress(FileNotFoundError, StateError):
        known.update(checkpoint_of(store)[1])
    if known and spout not in known:
        raise ValueError(f"spout must be one of {', '.join(sorted(known))}, got {spout!r}")
