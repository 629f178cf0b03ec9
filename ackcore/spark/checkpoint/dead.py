"""Records that died in a micro-batch: tables, and files that tasks wrote."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from ackcore.spark.base.checksummed import TableCache
from ackcore.spark.base.reason_columns import refused
from ackcore.spark.checkpoint.segments import with_replayed


@dataclass(frozen=True, slots=True)
class DeadFile:
    """Rows of a file on record.

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
        """Return it as JSON can hold it."""
        names = ("file", "rows", "start", "no_room")
        return {name: getattr(self, name) for name in names}

    def table(self, keep: bool = True) -> pa.Table:
        """Return the rows, in a memory map that is kept or not."""
        table = with_replayed(self.cache.read(self.file, keep).slice(self.start, self.rows))
        return table if self.no_room is None else refused(table, self.no_room)


@dataclass(frozen=True, slots=True)
class WrittenDead:
    """The same of a file that tasks wrote, before it is on record."""

    path: Path
    rows: int
    start: int = 0
    no_room: int | None = None

    def __len__(self) -> int:
        return self.rows

    def kept(self, cache: TableCache, directory: str) -> DeadFile:
        """Move it to where the checkpoint has it."""
        return DeadFile(
            cache, cache.adopt(self.path, directory), self.rows, self.start, self.no_room
        )


class Dead(Mapping[str, pa.Table]):
    """Records that died, by spout; as a mapping it gives all of a spout, put together.

    Parameters
    ----------
    parts : mapping from str to sequence of DeadFile, WrittenDead or pyarrow.Table
        By spout; what has no rows is left out.
    """

    def __init__(self, parts: Mapping[str, Sequence[DeadFile | WrittenDead | pa.Table]]):
        filled = {spout: tuple(part for part in some if len(part)) for spout, some in parts.items()}
        self.parts = {spout: some for spout, some in filled.items() if some}

    @classmethod
    def of(cls, cache: TableCache, body: Mapping[str, Any]) -> Dead:
        """Read what `write` returned, or what was written when each spout had one table."""
        return cls(
            {
                spout: (
                    [DeadFile(cache, **each) for each in found]
                    if isinstance(found, list)
                    else [DeadFile(cache, found["file"], found["rows"])]
                )
                for spout, found in body.items()
            }
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
        for spout, some in self.parts.items():
            for part in some:
                if isinstance(part, pa.Table):
                    file = cache.write_table(directory, f"dead-{spout}", part)
                    kept = DeadFile(cache, file, len(part))
                else:
                    kept = part if isinstance(part, DeadFile) else part.kept(cache, directory)
                found.setdefault(spout, []).append(kept.body())
        return found

    @property
    def files(self) -> set[str]:
        """The files on record."""
        return {
            part.file for some in self.parts.values() for part in some if isinstance(part, DeadFile)
        }

    def pieces(self, spout: str) -> Iterator[pa.Table]:
        """Yield the records of a spout file by file; what was yielded need not stay in memory."""
        for part in self.parts[spout]:
            yield part.table(keep=False) if isinstance(part, DeadFile) else _table(part)

    def __getitem__(self, spout: str) -> pa.Table:
        parts = self.parts[spout]
        return pa.concat_tables(
            part.table() if isinstance(part, DeadFile) else _table(part) for part in parts
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)

    def __repr__(self) -> str:
        rows = (f"{spout}: {sum(map(len, some))} rows" for spout, some in self.parts.items())
        return f"Dead({', '.join(rows)})"


def _table(part: WrittenDead | pa.Table) -> pa.Table:
    assert isinstance(part, pa.Table), f"{part} is not on record yet"
    return part


def pieces_of(dead: Mapping[str, pa.Table], spout: str) -> Iterator[pa.Table]:
    """Yield the records of a spout that died, a part at a time where they are in files."""
    if isinstance(dead, Dead):
        yield from dead.pieces(spout)
    else:
        yield dead[spout]
