"""The dead records of a micro-batch: tables in memory, and files that tasks wrote.

Tasks write dead records as Parquet, in the format of the dead-letter store, and records that wait
as Arrow.  If more than `max_waiting` records wait, the last rows of an Arrow file are dead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from ackcore.spark.base.letter_columns import as_tracked, as_written
from ackcore.spark.base.paths import Place
from ackcore.spark.base.reasons import without_room
from ackcore.spark.base.schemas import TRACKING, FailedFile
from ackcore.spark.checkpoint.table_cache import BySpout, RecordFile, TableCache

#: Most rows without room to wait that are in memory with their reason.
_ROWS = 1 << 14


@dataclass(frozen=True, slots=True)
class DeadFile(RecordFile):
    """Dead records in a recorded Arrow file: ``rows`` of its rows, from row ``start`` on.

    ``no_room``: the value of `max_waiting` if they died because so many records waited.
    """

    start: int = 0
    no_room: int | None = None

    def pieces(self, *, payload: bool = True, keep: bool = False) -> Iterator[pa.Table]:
        """Yield tables of the records: the `TRACKING` columns and, with ``payload``, the source's.

        With `no_room`, the reason of each record names that limit, and is final. Raises
        CheckpointCorrupt if the file is missing or damaged. ``keep``: whether the cache keeps the
        table for later reads.
        """
        table = self.cache.read(self.file, keep).slice(self.start, self.rows)
        if not payload:
            table = table.select(TRACKING.names)
        if self.no_room is None:
            yield table
            return
        for start in range(0, len(table), _ROWS):
            yield without_room(table.slice(start, _ROWS), self.no_room)

    def check(self) -> None:
        """Raise `CheckpointCorrupt` if the file is missing or damaged."""
        self.cache.read(self.file)


@dataclass(frozen=True, slots=True)
class DeadLettersFile(RecordFile):
    """Dead records in a recorded Parquet file, in the format of the dead-letter store."""

    nbytes: int

    def path(self) -> Place:
        """Return the path or URL of the file.

        Raises CheckpointCorrupt if the file is missing or damaged.
        """
        return self.cache.checked(self.file, self.nbytes)

    def pieces(self, *, payload: bool = True, keep: bool = False) -> Iterator[pa.Table]:
        """Yield tables of the records: the `TRACKING` columns and, with ``payload``, the source's.

        The due times are 0. ``keep`` has no effect: the cache keeps Arrow files only. Raises
        CheckpointCorrupt if the file is missing or damaged.
        """
        with pq.ParquetFile(self.cache.opened(self.file, self.nbytes)) as file:
            names = [name for name in file.schema_arrow.names if payload or name != "payload"]
            for n in range(file.num_row_groups):
                letters = as_written(file, file.read_row_group(n, names))
                attempts, replays = letters["attempts"], letters["replays"]
                yield as_tracked(letters, attempts, replays, payload=payload)

    def check(self) -> None:
        """Raise `CheckpointCorrupt` if the file is missing or damaged."""
        self.path()


#: Dead records of a spout: in a recorded file, in a file that tasks wrote, or in a table.
DeadPart: TypeAlias = DeadFile | DeadLettersFile | FailedFile | pa.Table


class Dead(BySpout[DeadPart]):
    """The dead records of a micro-batch."""

    @classmethod
    def of(cls, cache: TableCache, body: Mapping[str, Any]) -> Dead:
        """Return the dead records that the JSON of `write` describes."""
        return cls(
            {spout: [_on_record(cache, each) for each in found] for spout, found in body.items()}
        )

    def plus(self, other: Dead) -> Dead:
        """Return a new object with these records, and after them those of ``other``, by spout."""
        mine, more = self.parts, other.parts
        return Dead({one: (*mine.get(one, ()), *more.get(one, ())) for one in {**mine, **more}})

    def write(self, cache: TableCache, prefix: str) -> dict[str, Any]:
        """Put all parts into recorded files, and return their JSON by spout.

        Tables are written, files of tasks are linked or copied, and recorded files stay. New names
        are durable after `TableCache.sync`. ``prefix``: the prefix of new files' names.
        """
        cache.adopt_all((part for some in self.parts.values() for part in some), prefix)
        return {
            spout: [recorded(part, spout, cache, prefix).body() for part in some]
            for spout, some in self.parts.items()
        }

    @property
    def files(self) -> set[str]:
        """The names of the recorded files, relative to ``<checkpoint>/ackcore/state``."""
        return {part.file for part in self._on_record()}

    def checks(self) -> list[Callable[[], None]]:
        """Return functions that each raise `CheckpointCorrupt` if a file is missing or damaged."""
        return [part.check for part in self._on_record()]

    def _on_record(self) -> Iterator[DeadFile | DeadLettersFile]:
        for some in self.parts.values():
            for part in some:
                if isinstance(part, DeadFile | DeadLettersFile):
                    yield part

    def pieces(self, spout: str, *, payload: bool = True) -> Iterator[pa.Table]:
        """Yield the dead records of a spout in several tables, which need not all be in memory.

        ``payload``: whether the tables need the source's columns, beside those of `TRACKING`. If
        False, they may still be present.

        Raises KeyError for a spout without dead records, and CheckpointCorrupt if a file is missing
        or damaged.
        """
        for part in self.parts[spout]:
            yield from pieces_of(part, payload=payload)

    def __getitem__(self, spout: str) -> pa.Table:
        parts = self.parts[spout]
        return pa.concat_tables(piece for part in parts for piece in pieces_of(part, keep=True))


def pieces_of(part: DeadPart, *, payload: bool = True, keep: bool = False) -> Iterator[pa.Table]:
    """Yield tables of the records of one part. A part that is a table is yielded unchanged.

    ``payload``, ``keep``: the arguments of `DeadFile.pieces`.
    """
    if isinstance(part, pa.Table):
        yield part
    else:
        assert not isinstance(part, FailedFile), f"{part} is not on record yet"
        yield from part.pieces(payload=payload, keep=keep)


def recorded(
    part: DeadPart, spout: str, cache: TableCache, prefix: str
) -> DeadFile | DeadLettersFile:
    """Put one part of a spout's dead records into a recorded file; see `Dead.write`."""
    if isinstance(part, pa.Table):
        return DeadFile(cache, cache.write_table(prefix, f"dead-{spout}", part), len(part))
    if not isinstance(part, FailedFile):
        return part
    file = cache.adopt(part, prefix)
    if part.dead:
        assert part.nbytes is not None
        return DeadLettersFile(cache, file, part.rows, part.nbytes)
    return DeadFile(cache, file, part.rows, part.start, part.no_room)


def dead_of(dead: Mapping[str, pa.Table]) -> Dead:
    """Return a mapping of spouts to tables as a `Dead`; a `Dead` is returned unchanged."""
    if isinstance(dead, Dead):
        return dead
    return Dead({spout: [table] for spout, table in dead.items()})


def _on_record(cache: TableCache, body: Mapping[str, Any]) -> DeadFile | DeadLettersFile:
    return DeadLettersFile(cache, **body) if "nbytes" in body else DeadFile(cache, **body)
