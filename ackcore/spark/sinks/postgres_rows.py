"""The rows of a micro-batch on their way into a table of PostgreSQL, within an open transaction.

Without keys they are copied into the table itself; with keys, or where policies or a view are in
the way of COPY, into a temporary one, from which one statement merges them in the order of the
keys.  Whatever refuses a row refuses the whole statement:
it is repeated, within savepoints, by halves of halves.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import psycopg
import pyarrow as pa

from ackcore._records import Int64s
from ackcore.spark.sinks.copy_format import as_csv
from ackcore.spark.sinks.interface import Accepted, read_accepted, read_with_places
from ackcore.spark.sinks.postgres_catalog import asking
from ackcore.spark.sinks.postgres_table import nulls_differ, quoted, way_into
from ackcore.spark.sinks.rejects import RefusalCount

#: Rows that are sent, and halved, at a time.
_CHUNK = 1 << 16

_STAGE = 'pg_temp."ackcore_stage"'
_ROW = '"_ackcore_row"'

#: What a row, and not the table or the server, is at fault for: an integrity constraint, a value
#: that does not fit, a view's check, a value that is too large for an index.
_REFUSALS = ("22", "23", "44")
_REFUSED = {"54000"}
#: What may be about a row or about none: of which it is, others tell that go in.  What a trigger
#: raises, by whatever statement; what a type does not read; what is nested too deep.
_SUSPECT = ("P0", "21000", "42601", "54001")
#: Rows in a row that are refused so, behind which none is looked at if none went in.
_HOPELESS = 64
#: Of class 22, but about the form in which we sent the row.
_OURS = {"22P04"}
_NOT_NULL = "23502"
#: What is said of a row that a policy is against, and of a user without the right to write.
_NOT_ALLOWED = "42501"

#: Numbers of rows, from 0, and the rows.
Chunks = Iterator[tuple[int, pa.RecordBatch]]


class Into(NamedTuple):
    """The destination of rows.

    Attributes
    ----------
    table : str
        The table's name, as SQL has it.
    names : sequence of str
        Its columns, in the order of the stream's.
    keys : sequence of str
        Those of them that are keys.
    arrays : list of bool
        Of each column, whether a list becomes an array; JSON if not.
    """

    table: str
    names: Sequence[str]
    keys: Sequence[str]
    arrays: list[bool]


class PostgresRows:
    """The writing of one micro-batch's rows.

    Parameters
    ----------
    connection : psycopg.Connection
        Its transaction is open.
    into : Into
        The table.
    chunks : callable
        Yields the rows, as `numbered` does; called again where some are refused.
    count : RefusalCount
        Counts these.
    """

    def __init__(
        self,
        connection: psycopg.Connection[Any],
        into: Into,
        chunks: Callable[[], Chunks],
        count: RefusalCount[psycopg.Error],
    ) -> None:
        self._connection, self._into, self._chunks, self._count = connection, into, chunks, count
        self._ask = asking(connection)
        self._named = ", ".join(map(quoted, into.names))
        self._way = way_into(self._ask, into.table)
        #: Whether any of the rows has gone in by itself or with others.
        self._any_taken = False

    def write(self) -> dict[int, psycopg.Error]:
        """Write the rows; return the errors of those that are refused, by their numbers."""
        refused = self._write_and_bisect()
        for error in () if self._any_taken else refused.values():
            if self._is_of_table(error) or (self._is_suspect(error) and len(refused) > 1):
                raise error  # a trigger of the whole table, perhaps: no row is at fault
        return refused

    def _write_and_bisect(self) -> dict[int, psycopg.Error]:
        # A deferred constraint would refuse the whole micro-batch, and at its end.
        self._connection.execute("SET CONSTRAINTS ALL IMMEDIATE")
        if self._way.copies and not self._into.keys:
            copy = f"COPY {self._into.table} ({self._named}) FROM STDIN (FORMAT csv)"
            return self._copy_all(copy, numbered=False)[0]
        self._connection.execute(
            f"CREATE TEMP TABLE {_STAGE} ON COMMIT DROP AS SELECT {self._named},"
            f" NULL::bigint AS {_ROW} FROM {self._into.table} WITH NO DATA"
        )
        copy = f"COPY {_STAGE} ({self._named}, {_ROW}) FROM STDIN (FORMAT csv)"
        refused, rows = self._copy_all(copy, numbered=True)
        return {**refused, **self._merge_all(rows, sorted(refused))}

    def _copy_all(self, copy: str, *, numbered: bool) -> tuple[dict[int, psycopg.Error], int]:
        """Copy the rows; return the numbers of those refused, and how many there were in all."""
        rows = 0

        def texts(chunks: Chunks) -> Iterator[Any]:
            nonlocal rows
            for first, chunk in chunks:
                yield as_csv(chunk, self._into.arrays, first if numbered else None)
                rows = first + len(chunk)

        def send(chunks: Chunks) -> None:
            with self._connection.cursor() as cursor, cursor.copy(copy) as out:
                for text in texts(chunks):
                    out.write(text)

        if self._is_taken(lambda: send(self._chunks())) is None:
            return {}, rows
        refused: dict[int, psycopg.Error] = {}
        for first, chunk in self._chunks():

            def write(start: int, stop: int, first: int = first, chunk: Any = chunk) -> None:
                send(iter([(start, chunk.slice(start - first, stop - start))]))

            refused.update(self._bisect(first, first + len(chunk), write))
            rows = first + len(chunk)
        return refused, rows

    def _merge_all(self, rows: int, absent: Sequence[int]) -> dict[int, psycopg.Error]:
        """Merge what was copied, which lacks some rows; return the errors of those refused."""
        into = self._into
        distinct, tail = self._by_keys() if into.keys else ("", f" ORDER BY {_ROW}")
        head = (
            f"INSERT INTO {into.table} ({self._named}) SELECT {distinct}{self._named}"
            f" FROM {_STAGE} WHERE {_ROW} BETWEEN "
        )

        def write(start: int, stop: int) -> None:
            self._connection.execute(f"{head}{start} AND {stop - 1}{tail}")

        # Room to sort in; a user's own setting that is larger stays.
        self._ask(
            "SELECT set_config('work_mem', '64MB', true) WHERE pg_size_bytes("
            "current_setting('work_mem')) < 64 * 1024 * 1024"
        )
        error = self._is_taken(lambda: write(0, rows))
        if error is None:
            return {}
        self._any_taken = False  # what is in the temporary table is not in the table
        self._connection.execute(f"CREATE INDEX ON {_STAGE} ({_ROW})")
        self._connection.execute(f"ANALYZE {_STAGE}")
        return dict(self._bisect(0, rows, write, absent, error))

    def _by_keys(self) -> tuple[str, str]:
        """Return how an INSERT of staged rows chooses the last of each key, and replaces others."""
        into = self._into
        keys = ", ".join(map(quoted, into.keys))
        unlike = ""
        if nulls_differ(self._ask, into.table, into.keys):
            some = " OR ".join(f"{quoted(key)} IS NULL" for key in into.keys)
            unlike = f", CASE WHEN {some} THEN {_ROW} END"
        others = [quoted(name) for name in into.names if name not in into.keys]
        sets = ", ".join(f"{name} = EXCLUDED.{name}" for name in others)
        return f"DISTINCT ON ({keys}{unlike}) ", (
            f" ORDER BY {keys}{unlike}, {_ROW} DESC ON CONFLICT ({keys}) DO "
            f"{f'UPDATE SET {sets}' if sets else 'NOTHING'}"
        )

    def _is_taken(self, write: Callable[[], None]) -> psycopg.Error | None:
        """Write within a savepoint; return the error if a row was refused, None if all went in."""
        try:
            with self._connection.transaction():
                write()
        except psycopg.Error as error:
            if not self._is_refusal(error):
                raise
            return error
        return None

    def _is_refusal(self, error: psycopg.Error) -> bool:
        state = error.sqlstate or ""
        if state in _REFUSED or self._is_suspect(error):
            return True
        return state.startswith(_REFUSALS) and state not in _OURS

    def _is_suspect(self, error: psycopg.Error) -> bool:
        """Whether a row is at fault only if others go in."""
        return (error.sqlstate or "").startswith(_SUSPECT) or self._is_of_table(error)

    def _is_of_table(self, error: psycopg.Error) -> bool:
        """Whether it is about what the stream does not have, and a row at fault only by a trigger;
        by a domain that takes no null, of which PostgreSQL names no column; or by a policy."""
        if error.sqlstate == _NOT_ALLOWED:
            return self._way.has_policies
        return error.sqlstate == _NOT_NULL and error.diag.column_name not in self._into.names

    def _bisect(
        self,
        start: int,
        stop: int,
        write: Callable[[int, int], None],
        absent: Sequence[int] = (),
        error: psycopg.Error | None = None,
    ) -> Iterator[tuple[int, psycopg.Error]]:
        """Write rows by halves, in their order; yield those that are refused by themselves.

        The numbers of ``absent`` rows are sorted; ``error`` is that of all together, if known.
        """
        pending: list[tuple[int, int, psycopg.Error | None]] = [(start, stop, error)]
        suspects = 0
        while pending:
            start, stop, error = pending.pop()
            if bisect_left(absent, stop) - bisect_left(absent, start) == stop - start:
                continue  # none is there, so none goes in
            if error is None:
                error = self._is_taken(lambda a=start, b=stop: write(a, b))  # type: ignore[misc]
            if error is None:
                self._any_taken = True
                continue
            if stop - start == 1:
                suspects += self._is_suspect(error)
                if suspects >= _HOPELESS and not self._any_taken:
                    raise error
                self._count.add(error)
                yield start, error
            else:
                middle = (start + stop) // 2
                pending += [(middle, stop, None), (start, middle, None)]


def numbered(accepted: Accepted) -> Chunks:
    """Yield the rows, and with each batch the number of its first one."""
    first = 0
    for file in accepted.files:
        for rows in read_accepted(file, accepted.nonacked):
            for at in range(0, len(rows), _CHUNK):
                chunk = rows.slice(at, _CHUNK)
                yield first, chunk
                first += len(chunk)


def placed(
    accepted: Accepted, refused: dict[int, psycopg.Error]
) -> Iterator[tuple[int, int, psycopg.Error]]:
    """Yield of refused rows, given by their numbers, file, place and error."""
    numbers: Int64s = np.array(sorted(refused), np.int64)
    first = 0
    for file, about in enumerate(accepted.files if refused else ()):
        for rows, places in read_with_places(about, accepted.nonacked):
            start, stop = np.searchsorted(numbers, [first, first + len(rows)])
            for row in numbers[start:stop].tolist():
                yield file, int(places[row - first]), refused[row]
            first += len(rows)
