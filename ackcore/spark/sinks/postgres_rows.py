"""Writing of a micro-batch's rows into a PostgreSQL table, within an open transaction.

Without keys the rows are copied into the table itself.  With keys, or if COPY cannot write because
of policies or a view, they are copied into a temporary table; one statement then merges them in
the order of the keys.  If PostgreSQL refuses a row, the whole statement fails.  The rows are then
bisected, within savepoints, to the failing ones.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, TypeAlias

import psycopg
import pyarrow as pa

from ackcore.spark.sinks.copy_format import as_csv
from ackcore.spark.sinks.postgres_catalog import (
    Connection,
    columns_of,
    indexes_of_defaults,
    quoted,
    takes_copy,
    unique_indexes,
)
from ackcore.spark.sinks.rejects import OF_OTHERS
from ackcore.spark.sinks.sink_batch import SinkBatch
from ackcore.spark.sinks.unavailable import SEQUENCE_ENDED, names_no_object

#: The maximum number of rows that are sent, and bisected, at a time.
_CHUNK = 1 << 16

_STAGE = 'pg_temp."ackcore_stage"'
_ROW = '"_ackcore_row"'

#: SQLSTATEs for which a row is at fault, not the table or the server: integrity constraints,
#: values that do not fit, a view's check, values too large for an index.
_REFUSALS = ("22", "23", "44")
_REFUSED = {"54000"}
#: SQLSTATEs of the server, the session, the table or the sink's statements, for which no row is at
#: fault. All other errors, such as those of triggers and extensions, are suspect: a row is at fault
#: if other rows can be written.
_OF_SERVER = (
    *("08", "0L", "0P", "25", "26", "28", "2B", "2D", "34", "3B", "3D", "3F", "40", "42"),
    *("53", "55", "57", "58", "72", "F0", "HV", "XX001", "XX002"),
)
#: A text that a type cannot parse.
_SYNTAX = "42601"
#: The number of rows refused by suspect errors after which the search ends if no row was written.
_HOPELESS = 64
#: Errors of class 22 for which no row is at fault: a wrong format in COPY, and a sequence at its
#: end.
_OF_NO_ROW = {"22P04", SEQUENCE_ENDED}
_NOT_NULL, _UNIQUE = "23502", "23505"
#: A row that a policy forbids, or a user without the right to write; a statement that the table
#: does not take; internal errors, which extensions raise for values, too.
_OF_TABLE = ("42501", "0A", "XX000")

#: Batches of rows, each with the number of its first row, from 0.
Chunks = Iterator[tuple[int, pa.RecordBatch]]
#: The number of the first row, that of the last row plus 1, and a function that writes some of
#: these rows.
_Part: TypeAlias = tuple[int, int, Callable[[int, int], None]]


class PostgresRows:
    """The writer of one micro-batch's rows.

    ``connection``: a connection with an open transaction. ``table``: the table's name in SQL.
    ``keys``: the key columns. ``check``: raises if too many rows are refused; see `check_refused`.
    """

    def __init__(
        self,
        connection: Connection,
        table: str,
        keys: Sequence[str],
        batch: SinkBatch,
        check: Callable[[dict[int, psycopg.Error], int], None],
    ) -> None:
        self._connection, self._table, self._keys = connection, table, keys
        self._batch, self._check = batch, check
        self._names = batch.schema().names
        self._named = ", ".join(map(quoted, self._names))
        columns = columns_of(connection, table)
        #: For each column, True if its lists become PostgreSQL arrays, False if they become JSON.
        self._arrays = [name in columns and columns[name].is_array for name in self._names]
        self._takes_copy = takes_copy(connection, table)
        #: The errors of refused rows, by row number.
        self._refused: dict[int, psycopg.Error] = {}
        #: The numbers of refused rows that are tried again after other rows.
        self._waiting: set[int] = set()
        #: Whether any row was written into the table, or into the temporary table.
        self._any_written = False

    @cached_property
    def _of_defaults(self) -> set[str]:
        """The names of the unique indexes in which a row gets numbers of sequences."""
        return indexes_of_defaults(self._connection, self._table, self._names)

    def write(self) -> dict[int, psycopg.Error]:
        """Write the rows; return the errors of refused rows, by index among the batch's rows.

        The index counts the rows of `SinkBatch.record_batches`, from 0. Raises errors for which no
        row is at fault, and those of ``check``. Also raises an error about default values that the
        table has already. If no row could be written, also raises any other error that the table
        may have caused.
        """
        # A deferred constraint would refuse the whole micro-batch at its end.
        self._connection.execute("SET CONSTRAINTS ALL IMMEDIATE")
        if self._takes_copy and not self._keys:
            copy = f"COPY {self._table} ({self._named}) FROM STDIN (FORMAT csv)"
            self._copy_all(copy, numbered=False)
        else:
            self._connection.execute(
                f"CREATE TEMP TABLE {_STAGE} ON COMMIT DROP AS SELECT {self._named},"
                f" NULL::bigint AS {_ROW} FROM {self._table} WITH NO DATA"
            )
            copy = f"COPY {_STAGE} ({self._named}, {_ROW}) FROM STDIN (FORMAT csv)"
            self._merge_all(self._copy_all(copy, numbered=True))
        for error in self._refused.values():
            if self._is_of_default(error):
                raise error  # the next attempt takes later numbers of the sequence
            if self._any_written:
                continue
            if self._is_of_table(error) or (self._is_suspect(error) and len(self._refused) > 1):
                raise error  # perhaps a trigger of the whole table: no row is at fault
        return self._refused

    def _copy_all(self, copy: str, *, numbered: bool) -> int:
        """Copy the rows by a COPY statement; return the number of all rows, refused ones included.

        Adds the refused ones to `_refused`.

        ``numbered``: whether the statement has a last column for the row's number.
        """
        rows = 0

        def send(chunks: Chunks) -> None:
            nonlocal rows
            with self._connection.cursor() as cursor, cursor.copy(copy) as out:
                for first, chunk in chunks:
                    out.write(as_csv(chunk, self._arrays, first if numbered else None))
                    rows = first + len(chunk)

        if self._try_write(lambda: send(_chunks_of(self._batch))) is None:
            return rows

        def parts() -> Iterator[_Part]:
            for first, chunk in _chunks_of(self._batch):

                def write(start: int, stop: int, first: int = first, chunk: Any = chunk) -> None:
                    send(iter([(start, chunk.slice(start - first, stop - start))]))

                yield first, first + len(chunk), write

        for start, stop, write in parts():
            self._bisect(start, stop, write, waits=not numbered)
            rows = stop
        self._write_again(parts)
        return rows

    def _merge_all(self, rows: int) -> None:
        """Merge the temporary table into the table, and add the refused rows to `_refused`.

        ``rows``: the result of `_copy_all`.
        """
        own, order, on_conflict = self._by_keys() if self._keys else ("", _ROW, "")
        distinct = f"DISTINCT ON ({own}) " if own else ""
        head = (
            f"INSERT INTO {self._table} ({self._named}) SELECT {distinct}{self._named}"
            f" FROM {_STAGE} WHERE {_ROW} BETWEEN "
        )

        def write(start: int, stop: int) -> None:
            until = f"{stop - 1} ORDER BY {order}{on_conflict}"
            self._connection.execute(f"{head}{start} AND {until}")

        # Memory for the sort; a larger setting of the user is kept.
        self._connection.execute(
            "SELECT set_config('work_mem', '64MB', true) WHERE pg_size_bytes("
            "current_setting('work_mem')) < 64 * 1024 * 1024"
        )
        error = self._try_write(lambda: write(0, rows))
        if error is None:
            return
        self._any_written = False  # only the temporary table has rows
        self._connection.execute(f"CREATE INDEX ON {_STAGE} ({_ROW})")
        self._connection.execute(f"ANALYZE {_STAGE}")
        self._bisect(0, rows, write, sorted(self._refused), error)
        self._write_again(lambda: iter([(0, rows, write)]), own)

    def _by_keys(self) -> tuple[str, str, str]:
        """Return the expressions of a row's key, an order, and the ON CONFLICT clause.

        In this order, the last row of each key is the first one.
        """
        keys = ", ".join(map(quoted, self._keys))
        own = keys
        indexes = unique_indexes(self._connection, self._table, self._keys)
        if any(may_be_null for may_be_null, _ in indexes) and not any(same for _, same in indexes):
            some = " OR ".join(f"{quoted(key)} IS NULL" for key in self._keys)
            own += f", CASE WHEN {some} THEN {_ROW} END"
        others = [quoted(name) for name in self._names if name not in self._keys]
        sets = ", ".join(f"{name} = EXCLUDED.{name}" for name in others)
        do = f"UPDATE SET {sets}" if sets else "NOTHING"
        return own, f"{own}, {_ROW} DESC", f" ON CONFLICT ({keys}) DO {do}"

    def _next_of_keys(self, own: str) -> dict[int, int | None]:
        """Return for each refused row the next row with its key, or None.

        ``own``: the expressions of a row's key.
        """
        found = self._connection.execute(
            f"SELECT {_ROW}, later FROM (SELECT {_ROW}, lead({_ROW}) OVER"
            f" (PARTITION BY {own} ORDER BY {_ROW}) AS later FROM {_STAGE}) AS rows"
            f" WHERE {_ROW} IN ({', '.join(map(str, self._refused))})"
        )
        return dict(found.fetchall())

    def _try_write(self, write: Callable[[], None]) -> psycopg.Error | None:
        """Call ``write`` within a savepoint.

        Returns the error if PostgreSQL refused a row, or may have done so, and None if all is
        written. Raises all other errors.
        """
        try:
            with self._connection.transaction():
                write()
        except psycopg.Error as error:
            state = error.sqlstate or ""
            refuses = state in _REFUSED or (state.startswith(_REFUSALS) and state not in _OF_NO_ROW)
            refuses = refuses or names_no_object(state, error.diag.context)
            if not (refuses or self._is_suspect(error)):
                raise
            return error
        return None

    def _is_suspect(self, error: psycopg.Error) -> bool:
        """Return whether the row is at fault for an error only if other rows can be written."""
        state = error.sqlstate or _OF_SERVER[0]
        is_clear = state.startswith((*_OF_SERVER, *_REFUSALS, *_REFUSED))
        return not is_clear or state == _SYNTAX or self._is_of_table(error)

    def _is_of_table(self, error: psycopg.Error) -> bool:
        """Return whether the table may have caused an error, and not the values of a row.

        Such errors are violations of a policy, missing rights and features, and internal errors.
        So are nulls in a column that the stream does not have, or that PostgreSQL does not name. So
        are default values that the table has already: the sequence of a restored table may be
        behind its rows.
        """
        is_null = error.sqlstate == _NOT_NULL and error.diag.column_name not in self._names
        is_of_table = is_null or (error.sqlstate or "").startswith(_OF_TABLE)
        return is_of_table or self._is_of_default(error)

    def _is_of_default(self, error: psycopg.Error) -> bool:
        """Return whether the table has a row's default values already: a sequence is behind."""
        return error.sqlstate == _UNIQUE and error.diag.constraint_name in self._of_defaults

    def _bisect(
        self,
        start: int,
        stop: int,
        write: Callable[[int, int], None],
        absent: Sequence[int] = (),
        error: psycopg.Error | None = None,
        *,
        waits: bool = True,
    ) -> None:
        """Write rows by bisection, in their order, and add the refused ones to `_refused`.

        If no row was written and 64 failed with errors that are suspect (`_is_suspect`), raises the
        last of these errors.

        ``start``, ``stop``: the range of row numbers. ``write``: writes such a range. ``absent``:
        the sorted numbers of rows that it cannot write. ``error``: the error of the whole range, or
        None if it was not tried. ``waits``: whether rows that may depend on other rows are added to
        `_waiting`.
        """
        pending: list[tuple[int, int, psycopg.Error | None]] = [(start, stop, error)]
        suspects = 0
        while pending:
            start, stop, error = pending.pop()
            if bisect_left(absent, stop) - bisect_left(absent, start) == stop - start:
                continue  # no row of this range was copied
            if error is None:
                error = self._try_write(lambda a=start, b=stop: write(a, b))  # type: ignore[misc]
            if error is None:
                self._any_written = True
                continue
            if stop - start == 1:
                suspects += self._is_suspect(error)
                if suspects >= _HOPELESS and not self._any_written:
                    raise error
                self._refused[start] = error
                if waits and error.sqlstate in OF_OTHERS:
                    self._waiting.add(start)
                self._check(self._refused, len(self._waiting))
            else:
                middle = (start + stop) // 2
                pending += [(middle, stop, None), (start, middle, None)]

    def _write_again(self, parts: Callable[[], Iterator[_Part]], own: str = "") -> None:
        """Write the rows in `_waiting` again, as long as one is written.

        A row may refer to a row behind it, which was not written when this one was refused.
        ``parts``: returns the parts with all rows. ``own``: the expressions of a row's key, if a
        row replaces an earlier one with its key.
        """
        refused, waiting = self._refused, self._waiting
        is_progress = bool(waiting)
        later = self._next_of_keys(own) if own and is_progress else {}
        while is_progress:
            is_progress = False
            for start, stop, write in parts():
                # The last row first: if each refers to the next one, one pass writes all.
                for row in sorted((n for n in waiting if start <= n < stop), reverse=True):
                    replaced = later.get(row)
                    while replaced in refused:
                        # A waiting row was tried before this one, and no row behind it is written.
                        replaced = None if replaced in waiting else later.get(replaced)
                    again = partial(write, row, row + 1)
                    if replaced is not None or self._try_write(again) is None:
                        del refused[row]
                        waiting.remove(row)
                        is_progress = True
        waiting.clear()
        self._check(refused, 0)


def _chunks_of(batch: SinkBatch) -> Chunks:
    """Yield the rows of a micro-batch in chunks, each with the number of its first row."""
    first = 0
    for rows in batch.record_batches():
        for at in range(0, len(rows), _CHUNK):
            chunk = rows.slice(at, _CHUNK)
            yield first, chunk
            first += len(chunk)
