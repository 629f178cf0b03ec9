"""Records that died in a micro-batch: tables, and files that tasks wrote.

Such a file is Parquet, in the format of the dead-letter store.  Records that died because the
waiting store was full stay in an Arrow table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from ackcore.spark.base.letter_columns import as_tracked
from ackcore.spark.base.paths import Place
from ackcore.spark.base.reasons import refused
from ackcore.spark.base.schemas import TRACKING, FailedFile
from ackcore.spark.checkpoint.table_cache import TableCache

#: Most rows without room to wait that are in memory with their reason.
_ROWS = 1 << 14


@dataclass(frozen=True, slots=True)
class DeadFile:
    """Dead rows in a recorded table.

    ``no_room`` is the value of `max_waiting` if the rows died because the waiting store was full.
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
        """Yield the rows, in a memory map that the cache keeps if ``keep``; see
        `DeadLettersFile.pieces`.
        """
        table = self.cache.read(self.file, keep).slice(self.start, self.rows)
        if not payload:
            table = table.select(TRACKING.names)
        if self.no_room is None:
            yield table
            return
        for start in range(0, len(table), _ROWS):
            yield refused(table.slice(start, _ROWS), self.no_room)

    def check(self) -> None:
        """Raise `CheckpointCorrupt` if the file is missing or damaged."""
        self.cache.read(self.file)


@dataclass(frozen=True, slots=True)
class DeadLettersFile:
    """All rows of a recorded Parquet file, in the format of the dead-letter store."""

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
        """Return the path or URL of the file after a check of its length and checksum.

        Raises CheckpointCorrupt if the check fails.
        """
        return self.cache.checked(self.file, self.nbytes)

    def pieces(self, *, payload: bool = True, keep: bool = False) -> Iterator[pa.Table]:
        """Yield the rows in pieces: the `TRACKING` columns and, with ``payload``, those of the
        source.
        """
        with pq.ParquetFile(self.cache.opened(self.file, self.nbytes)) as file:
            names = [name for name in file.schema_arrow.names if payload or name != "payload"]
            for n in range(file.num_row_groups):
                letters = file.read_row_group(n, names)
                attempts, replays = letters["attempts"], letters["replays"]
                yield as_tracked(letters, attempts, replays, payload=payload)

    def check(self) -> None:
        """Raise `CheckpointCorrupt` if the file is missing or damaged."""
        self.path()


#: Dead records of a spout: in a recorded file, in a file that tasks wrote, or in a table.
DeadPart: TypeAlias = DeadFile | DeadLettersFile | FailedFile | pa.Table


class Dead(Mapping[str, pa.Table]):
    """Records that died, by spout. As a mapping it returns all dead records of a spout in one
    table.

    ``parts``: the parts by spout; parts without rows are left out.
    """

    def __init__(self, parts: Mapping[str, Sequence[DeadPart]]):
        filled = {spout: tuple(part for part in some if len(part)) for spout, some in parts.items()}
        self.parts = {spout: some for spout, some in filled.items() if some}

    @classmethod
    def of(cls, cache: TableCache, body: Mapping[str, Any]) -> Dead:
        """Rebuild the value from the JSON that `write` returned."""
        return cls(
            {spout: [_on_record(cache, each) for each in found] for spout, found in body.items()}
        )

    @classmethod
    def of_tables(cls, tables: Mapping[str, pa.Table]) -> Dead:
        """Return the dead records of tables by spout."""
        return cls({spout: [table] for spout, table in tables.items()})

    def plus(self, tables: Mapping[str, pa.Table]) -> Dead:
        """Return a copy with more records, which follow the other records of their spouts."""
        spouts = dict.fromkeys([*self.parts, *tables])
        return Dead(
            {
                spout: [*self.parts.get(spout, ()), *([tables[spout]] if spout in tables else [])]
                for spout in spouts
            }
        )

    def write(self, cache: TableCache, directory: str) -> dict[str, Any]:
        """Write the parts that are not recorded yet, and return all parts as an object for JSON."""
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
        """The recorded files."""
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
        """Yield the dead records of a spout in pieces. Earlier pieces need not stay in memory.

        ``spout``: the name of the spout. ``payload``: whether to include the source's columns with
        those of `TRACKING`. If False, they may still be present.
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
    """Yield the records of a part like `Dead.pieces`; the cache keeps memory maps if ``keep``."""
    if isinstance(part, pa.Table):
        yield part
    else:
        assert not isinstance(part, FailedFile), f"{part} is not on record yet"
        yield from part.pieces(payload=payload, keep=keep)


def adopted(part: FailedFile, cache: TableCache, directory: str) -> DeadFile | DeadLettersFile:
    """Move a task's file into the checkpoint."""
    file = cache.adopt(part.path, directory, part.nbytes)
    if part.dead:
        assert part.nbytes is not None
        return DeadLettersFile(cache, file, part.rows, part.nbytes)
    return DeadFile(cache, file, part.rows, part.start, part.no_room)


def dead_of(dead: Mapping[str, pa.Table]) -> Dead:
    """Return the dead records of a micro-batch as `Dead`; ``dead`` may be tables by spout."""
    return dead if isinstance(dead, Dead) else Dead.of_tables(dead)


def _on_record(cache: TableCache, body: Mapping[str, Any]) -> DeadFile | DeadLettersFile:
    return DeadLettersFile(cache, **body) if "nbytes" in body else DeadFile(cache, **body)
