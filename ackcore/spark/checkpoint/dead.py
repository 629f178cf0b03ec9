"""Records that died in a micro-batch: tables, and files that tasks wrote.

Such a file is Parquet, and has the letters as the dead-letter store is to have them.  Records that
were to wait, and found no room, stay in an Arrow table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from ackcore.spark.base.letters import as_tracked
from ackcore.spark.base.paths import Place
from ackcore.spark.base.reasons import refused
from ackcore.spark.base.schemas import TRACKING, FailedFile
from ackcore.spark.checkpoint.tables import TableCache

#: Of what had no room so many rows are in memory with the reason for that.
_ROWS = 1 << 14


@dataclass(frozen=True, slots=True)
class DeadFile:
    """Rows of a table on record.

    ``no_room`` is set where they were to wait and there was no room: `max_waiting` as it was.
    """

    cache: TableCache
    file: str  # relative to <checkpoint>/ackcore/state
    rows: int
    start: int = 0
    no_room: int | None = None

    def __len__(self) -> int:
        return self.rows

    def body(self) -> dict[str, Any]:
        """Return the dead file as an object for JSON."""
        names = ("file", "rows", "start", "no_room")
        return {name: getattr(self, name) for name in names}

    def pieces(self, *, payload: bool = True, keep: bool = False) -> Iterator[pa.Table]:
        """Yield the rows, in a memory map that is kept or not; as `DeadLettersFile.pieces`."""
        table = self.cache.read(self.file, keep).slice(self.start, self.rows)
        if not payload:
            table = table.select(TRACKING.names)
        if self.no_room is None:
            yield table
            return
        for start in range(0, len(table), _ROWS):
            yield refused(table.slice(start, _ROWS), self.no_room)

    def check(self) -> None:
        """Raise `CheckpointCorrupt` if it is missing or damaged."""
        self.cache.read(self.file)


@dataclass(frozen=True, slots=True)
class DeadLettersFile:
    """Rows of a Parquet file on record, all of it, which is as the dead-letter store has it."""

    cache: TableCache
    file: str
    rows: int
    nbytes: int

    def __len__(self) -> int:
        return self.rows

    def body(self) -> dict[str, Any]:
        """Return the dead letters file as an object for JSON."""
        return {"file": self.file, "rows": self.rows, "nbytes": self.nbytes}

    def path(self) -> Place:
        """Return where it is, once its length and its checksum are right.

        Raises
        ------
        CheckpointCorrupt
            If they are not.
        """
        return self.cache.checked(self.file, self.nbytes)

    def pieces(self, *, payload: bool = True, keep: bool = False) -> Iterator[pa.Table]:
        """Yield the rows a part at a time, in `TRACKING` and, with ``payload``, the source's."""
        with pq.ParquetFile(self.cache.opened(self.file, self.nbytes)) as file:
            names = [name for name in file.schema_arrow.names if payload or name != "payload"]
            for n in range(file.num_row_groups):
                letters = file.read_row_group(n, names)
                attempts, replays = letters["attempts"], letters["replays"]
                yield as_tracked(letters, attempts, replays, payload=payload)

    def check(self) -> None:
        """Raise `CheckpointCorrupt` if it is missing or damaged."""
        self.path()


#: Records of a spout that died: on record, in a file that tasks wrote, or a table.
DeadPart: TypeAlias = DeadFile | DeadLettersFile | FailedFile | pa.Table


class Dead(Mapping[str, pa.Table]):
    """Records that died, by spout; as a mapping it gives all of a spout, put together.

    Parameters
    ----------
    parts : mapping from str to sequence of DeadPart
        By spout; what has no rows is left out.
    """

    def __init__(self, parts: Mapping[str, Sequence[DeadPart]]):
        filled = {spout: tuple(part for part in some if len(part)) for spout, some in parts.items()}
        self.parts = {spout: some for spout, some in filled.items() if some}

    @classmethod
    def of(cls, cache: TableCache, body: Mapping[str, Any]) -> Dead:
        """Rebuild the value that `write` turned into JSON."""
        return cls(
            {spout: [_on_record(cache, each) for each in found] for spout, found in body.items()}
        )

    @classmethod
    def of_tables(cls, tables: Mapping[str, pa.Table]) -> Dead:
        """Return what tables hold."""
        return cls({spout: [table] for spout, table in tables.items()})

    def plus(self, tables: Mapping[str, pa.Table]) -> Dead:
        """Return it with more records, behind the others of their spouts."""
        spouts = dict.fromkeys([*self.parts, *tables])
        return Dead(
            {
                spout: [*self.parts.get(spout, ()), *([tables[spout]] if spout in tables else [])]
                for spout in spouts
            }
        )

    def write(self, cache: TableCache, directory: str) -> dict[str, Any]:
        """Write what is not on record, and return all as JSON can hold it."""
        found: dict[str, Any] = {}
        every = (part for some in self.parts.values() for part in some)
        written = (part for part in every if isinstance(part, FailedFile))
        cache.adopt_soon({part.path: part.nbytes for part in written}, directory)
        for spout, some in self.parts.items():
            for part in some:
                kept: DeadFile | DeadLettersFile
                if isinstance(part, pa.Table):
                    file = cache.write_table(directory, f"dead-{spout}", part)
                    kept = DeadFile(cache, file, len(part))
                elif isinstance(part, FailedFile):
                    kept = adopted(part, cache, directory)
                else:
                    kept = part
                found.setdefault(spout, []).append(kept.body())
        return found

    @property
    def files(self) -> set[str]:
        """The files on record."""
        return {part.file for part in self._on_record()}

    def check(self) -> None:
        """Raise `CheckpointCorrupt` if a file is missing or damaged."""
        for part in self._on_record():
            part.check()

    def _on_record(self) -> Iterator[DeadFile | DeadLettersFile]:
        for some in self.parts.values():
            for part in some:
                if isinstance(part, DeadFile | DeadLettersFile):
                    yield part

    def pieces(self, spout: str, *, payload: bool = True) -> Iterator[pa.Table]:
        """Yield the records of a spout a part at a time; what was yielded need not stay in memory.

        Parameters
        ----------
        spout : str
            Whose.
        payload : bool, default True
            Whether the source's columns are wanted as well as those of `TRACKING`; else they may
            be there.
        """
        for part in self.parts[spout]:
            yield from pieces_of(part, payload=payload)

    def __getitem__(self, spout: str) -> pa.Table:
        parts = self.parts[spout]
        return pa.concat_tables(piece for part in parts for piece in pieces_of(part, keep=True))

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)

    def __repr__(self) -> str:
        rows = (f"{spout}: {sum(map(len, some))} rows" for spout, some in self.parts.items())
        return f"Dead({', '.join(rows)})"


def pieces_of(part: DeadPart, *, payload: bool = True, keep: bool = False) -> Iterator[pa.Table]:
    """Yield the records of a part, as `Dead.pieces`; memory maps of files are kept or not."""
    if isinstance(part, pa.Table):
        yield part
    else:
        assert not isinstance(part, FailedFile), f"{part} is not on record yet"
        yield from part.pieces(payload=payload, keep=keep)


def adopted(part: FailedFile, cache: TableCache, directory: str) -> DeadFile | DeadLettersFile:
    """Move a file that a task wrote to where the checkpoint has it."""
    file = cache.adopt(part.path, directory, part.nbytes)
    if part.dead:
        assert part.nbytes is not None
        return DeadLettersFile(cache, file, part.rows, part.nbytes)
    return DeadFile(cache, file, part.rows, part.start, part.no_room)


def dead_of(dead: Mapping[str, pa.Table]) -> Dead:
    """Return the dead of a micro-batch as such, where they may be tables by spout."""
    return dead if isinstance(dead, Dead) else Dead.of_tables(dead)


def _on_record(cache: TableCache, body: Mapping[str, Any]) -> DeadFile | DeadLettersFile:
    return DeadLettersFile(cache, **body) if "nbytes" in body else DeadFile(cache, **body)
