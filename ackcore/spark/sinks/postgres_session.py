"""One connection to PostgreSQL, and a transaction in it for each micro-batch.

The transaction locks the sink's row in the table of micro-batches, so that of two drivers the
second sees what the first has committed.  Without keys rows are copied into the table itself; with
keys into a temporary one, from which one statement merges them in the order of the keys.  Whatever
refuses a row refuses the whole statement: it is repeated, within savepoints, by halves of halves.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import Any, LiteralString, NamedTuple

import numpy as np
import psycopg
import pyarrow as pa
from psycopg import errors, sql

from ackcore._records import Int64s
from ackcore.spark.base.atomic import check_fence
from ackcore.spark.base.errors import CheckpointForeign
from ackcore.spark.base.failpoints import failpoint
from ackcore.spark.sinks.copy_format import as_csv
from ackcore.spark.sinks.interface import Accepted, read_accepted, read_with_places
from ackcore.spark.sinks.postgres_catalog import (
    Target,
    columns_of,
    connect,
    marker_name,
    nulls_differ,
    resolve,
)
from ackcore.spark.sinks.rejects import RefusalCount, SinkRejects
from ackcore.topology.max_refused import MAX_REFUSED

#: Rows that are sent, and halved, at a time.
_CHUNK = 1 << 16

_STAGE = sql.Identifier("pg_temp", "ackcore_stage")
_ROW = "_ackcore_row"

#: What a row, and not the table or the server, is at fault for: an integrity constraint, a value
#: that does not fit, a view's check, a value that is too large for an index.
_REFUSALS = ("22", "23", "44")
_REFUSED = {"54000"}
#: What a trigger raises may be about a row or about none: of which it is, others tell that go in.
_RAISED = "P0001"
#: Rows in a row that a trigger raises over, behind which none is looked at if none went in.
_HOPELESS = 64
#: Of class 22, but about the form in which we sent the row.
_OURS = {"22P04"}

_LONGEST = 500


class Refused(NamedTuple):
    """A refused row: its file's number, its place there, and PostgreSQL's error."""

    file: int
    place: int
    state: str
    message: str


class PostgresSession:
    """The connection of one sink of one checkpoint.

    It ends those that a driver before this one has left open: one that was cut off may hold locks.
    """

    def __init__(
        self,
        dsn: str,
        target: Target,
        deployment: str,
        sink: str,
        max_refused: int = MAX_REFUSED,
    ) -> None:
        self._target = target
        self._max_refused = max_refused
        self._of = (deployment, sink)
        #: Whether any of the rows of a micro-batch that is bisected has gone in.
        self._any_taken = False
        said = blake2b(sink.encode(), digest_size=8).hexdigest() if len(sink) > 32 else sink
        name = f"ackcore-{deployment}-{said}"[:63]
        self._connection = connection = connect(dsn, name)
        try:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name ="
                " %s AND usename = current_user AND datname = current_database()"
                " AND pid <> pg_backend_pid()",
                [name],
            )
            self._table = resolve(connection, target.table, f"sink {sink!r}")
            self._marker = marker_name(connection, self._table[0], target.marker)
            # Committed before any micro-batch: there is a row to lock.
            self._execute(
                "INSERT INTO {marker} (deployment, sink, target, batch_id, content)"
                " VALUES (%s, %s, %s, -1, '') ON CONFLICT DO NOTHING",
                [*self._of, ".".join(self._table)],
            )
        except BaseException:
            connection.close()
            raise

    def is_sound(self) -> bool:
        """Whether it can be used, as one whose server was restarted cannot."""
        try:
            self._connection.execute("SELECT 1")
        except psycopg.Error:
            return False
        return True

    def close(self) -> None:
        """Disconnect; what is not committed is undone."""
        self._connection.close()

    def write(self, accepted: Accepted) -> SinkRejects | None:
        """Write a micro-batch in one transaction, or find that it is written."""
        number, content = accepted.batch_id, accepted.content()
        with self._connection.transaction():
            found = self._execute(
                "SELECT batch_id, content, refused FROM {marker}"
                " WHERE (deployment, sink, target) = (%s, %s, %s) FOR UPDATE",
                [*self._of, ".".join(self._table)],
            ).fetchone()
            # What passes here was the checkpoint's own with the lock in its hands.
            check_fence()
            if found is None:
                raise errors.NoDataFound(
                    f"the row of sink {accepted.sink!r} in {self._marker} is gone"
                )
            if found[0] >= number:
                if (found[0], found[1]) != (number, content):
                    raise self._foreign(accepted, found[0])
                return _rejects(accepted, _unpack(found[2]))
            refused = _placed(accepted, self._write_rows(accepted))
            self._execute(
                "UPDATE {marker} SET batch_id = %s, content = %s, refused = %s, written_at = now()"
                " WHERE (deployment, sink, target) = (%s, %s, %s)",
                [number, content, _pack(refused), *self._of, ".".join(self._table)],
            )
            failpoint("in-transaction", number)
        return _rejects(accepted, refused)

    def _write_rows(self, accepted: Accepted) -> dict[int, psycopg.Error]:
        """Write the rows; return the errors of those that are refused, by their numbers."""
        self._any_taken = False
        where = f"sink {accepted.sink!r}, table {self._target.table},"
        self._count = RefusalCount(where, accepted.batch_id, self._max_refused)
        refused = self._write_and_bisect(accepted)
        raised = [error for error in refused.values() if error.sqlstate == _RAISED]
        if raised and len(refused) > 1 and not self._any_taken:
            raise raised[0]  # a trigger of the whole table, perhaps: no row is at fault
        return refused

    def _write_and_bisect(self, accepted: Accepted) -> dict[int, psycopg.Error]:
        # A deferred constraint would refuse the whole micro-batch, and at its end.
        self._execute("SET CONSTRAINTS ALL IMMEDIATE")
        names = accepted.schema().names
        columns = columns_of(self._connection, self._table)
        arrays = [name in columns and columns[name].is_array for name in names]
        if not self._target.keys:
            copy = self._sql("COPY {table} ({names}) FROM STDIN (FORMAT csv)", names)
            return self._copy_all(accepted, copy, arrays, numbered=False)[0]
        self._execute(
            "CREATE TEMP TABLE {stage} ON COMMIT DROP AS"
            " SELECT {names}, NULL::bigint AS {row} FROM {table} WITH NO DATA",
            names=names,
        )
        copy = self._sql("COPY {stage} ({names}, {row}) FROM STDIN (FORMAT csv)", names)
        refused, rows = self._copy_all(accepted, copy, arrays, numbered=True)
        return {**refused, **self._merge_all(names, rows)}

    def _copy_all(
        self, accepted: Accepted, copy: sql.Composed, arrays: list[bool], *, numbered: bool
    ) -> tuple[dict[int, psycopg.Error], int]:
        """Copy the rows; return the numbers of those refused, and how many there were in all."""
        rows = 0

        def send(chunks: Iterator[tuple[int, pa.RecordBatch]]) -> None:
            nonlocal rows
            with self._connection.cursor() as cursor, cursor.copy(copy) as out:
                for first, chunk in chunks:
                    out.write(as_csv(chunk, arrays, first if numbered else None))
                    rows = first + len(chunk)

        names = accepted.schema().names
        if self._is_taken(names, lambda: send(_chunks(accepted))) is None:
            return {}, rows
        refused: dict[int, psycopg.Error] = {}
        for first, chunk in _chunks(accepted):

            def write(start: int, stop: int, first: int = first, chunk: Any = chunk) -> None:
                send(iter([(start, chunk.slice(start - first, stop - start))]))

            refused.update(self._bisect(names, first, first + len(chunk), write))
            rows = first + len(chunk)
        return refused, rows

    def _merge_all(self, names: list[str], rows: int) -> dict[int, psycopg.Error]:
        keys = self._target.keys
        others = [name for name in names if name not in keys]
        unlike: sql.Composable = sql.SQL("")
        if nulls_differ(self._connection, self._table, keys):
            some = sql.SQL(" OR ").join(
                sql.SQL("{} IS NULL").format(sql.Identifier(key)) for key in keys
            )
            unlike = sql.SQL(", CASE WHEN {} THEN {} END").format(some, sql.Identifier(_ROW))
        head = self._sql("INSERT INTO {table} ({names}) SELECT DISTINCT ON ({keys}", names)
        head += unlike + self._sql(") {names} FROM {stage} WHERE {row} ", names)
        tail = self._sql(" ORDER BY {keys}") + unlike
        tail += self._sql(", {row} DESC ON CONFLICT ({keys}) DO ")
        if others:
            sets = [sql.SQL("{0} = EXCLUDED.{0}").format(sql.Identifier(name)) for name in others]
            tail += sql.SQL("UPDATE SET ") + sql.SQL(", ").join(sets)
        else:
            tail += sql.SQL("NOTHING")

        def write(start: int, stop: int) -> None:
            # Not as values, for which psycopg would look in the names, too.
            between = sql.SQL("BETWEEN {} AND {}").format(start, stop - 1)
            self._connection.execute(head + between + tail)

        # Room to sort in; a user's own setting that is larger stays.
        self._execute(
            "SELECT set_config('work_mem', '64MB', true) WHERE pg_size_bytes("
            "current_setting('work_mem')) < 64 * 1024 * 1024"
        )
        if self._is_taken(names, lambda: write(0, rows)) is None:
            return {}
        self._execute("CREATE INDEX ON {stage} ({row})")
        self._execute("ANALYZE {stage}")
        return dict(self._bisect(names, 0, rows, write))

    def _is_taken(self, names: list[str], write: Callable[[], None]) -> psycopg.Error | None:
        """Write within a savepoint; return the error if a row was refused, None if all went in."""
        try:
            with self._connection.transaction():
                write()
        except psycopg.Error as error:
            if not _is_refusal(error, names):
                raise
            return error
        return None

    def _bisect(
        self, names: list[str], start: int, stop: int, write: Callable[[int, int], None]
    ) -> Iterator[tuple[int, psycopg.Error]]:
        """Write rows by halves, in their order; yield those that are refused by themselves."""
        pending = [(start, stop)]
        raised = 0
        while pending:
            start, stop = pending.pop()
            error = self._is_taken(names, lambda a=start, b=stop: write(a, b))  # type: ignore[misc]
            if error is None:
                self._any_taken = True
                continue
            if stop - start == 1:
                raised += error.sqlstate == _RAISED
                if raised >= _HOPELESS and not self._any_taken:
                    raise error
                self._count.add(error)
                yield start, error
            else:
                middle = (start + stop) // 2
                pending += [(middle, stop), (start, middle)]

    def _sql(self, text: LiteralString, names: list[str] | None = None) -> sql.Composed:
        return sql.SQL(text).format(
            table=sql.Identifier(*self._table),
            # All that name it have values, and psycopg looks for their places in names, too.
            marker=sql.SQL(self._marker.replace("%", "%%")),
            stage=_STAGE,
            row=sql.Identifier(_ROW),
            names=sql.SQL(", ").join(map(sql.Identifier, names or ())),
            keys=sql.SQL(", ").join(map(sql.Identifier, self._target.keys)),
        )

    def _execute(
        self, text: LiteralString, values: list[Any] | None = None, names: list[str] | None = None
    ) -> psycopg.Cursor[Any]:
        return self._connection.execute(self._sql(text, names), values)

    def _foreign(self, accepted: Accepted, last: int) -> CheckpointForeign:
        deployment, sink = (sql.Literal(one).as_string(self._connection) for one in self._of)
        return accepted.foreign(
            f"table {self._target.table}",
            last,
            f"have micro-batches from {accepted.batch_id} to {last} written again, whatever of "
            f"them is in the table: DELETE FROM {self._marker} WHERE deployment = {deployment} "
            f"AND sink = {sink}",
        )


def _chunks(accepted: Accepted) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield the rows, and with each batch the number of its first one."""
    first = 0
    for file in accepted.files:
        for rows in read_accepted(file, accepted.nonacked):
            for at in range(0, len(rows), _CHUNK):
                chunk = rows.slice(at, _CHUNK)
                yield first, chunk
                first += len(chunk)


def _placed(accepted: Accepted, refused: dict[int, psycopg.Error]) -> list[Refused]:
    """Return refused rows, given by their numbers, by their places."""
    numbers: Int64s = np.array(sorted(refused), np.int64)
    found: list[Refused] = []
    first = 0
    for number, file in enumerate(accepted.files if refused else ()):
        for rows, places in read_with_places(file, accepted.nonacked):
            start, stop = np.searchsorted(numbers, [first, first + len(rows)])
            for row in numbers[start:stop].tolist():
                error = refused[row]
                place = int(places[row - first])
                found.append(Refused(number, place, error.sqlstate or "", _message(error)))
            first += len(rows)
    return found


def _rejects(accepted: Accepted, refused: list[Refused]) -> SinkRejects | None:
    """Name refused rows, but for those that the sink was not given since they are on record."""
    known = [file.refused for file in accepted.files]
    new = [one for one in refused if not np.isin(one.place, known[one.file])]
    if not new:
        return None
    return SinkRejects.at(
        [one.file for one in new], [one.place for one in new], list(map(_error, new))
    )


def _is_refusal(error: psycopg.Error, names: list[str]) -> bool:
    state = error.sqlstate or ""
    if isinstance(error, errors.NotNullViolation) and error.diag.column_name not in names:
        return False  # a column that the stream does not have: no row is at fault
    if state == _RAISED or state in _REFUSED:
        return True
    return state.startswith(_REFUSALS) and state not in _OURS


def _message(error: psycopg.Error) -> str:
    about = error.diag
    detail = f" ({about.message_detail})" if about.message_detail else ""
    return f"{about.message_primary}{detail}"[:_LONGEST]


def _error(one: Refused) -> psycopg.Error:
    """Return the same error for a row whether it is refused now or was when it was recorded."""
    try:
        kind = errors.lookup(one.state)
    except KeyError:  # of a later PostgreSQL than psycopg knows
        kind = psycopg.DatabaseError
    return kind(one.message)


def _pack(refused: list[Refused]) -> bytes | None:
    return zlib.compress(json.dumps(refused).encode()) if refused else None


def _unpack(packed: bytes | None) -> list[Refused]:
    return [Refused(*one) for one in json.loads(zlib.decompress(packed))] if packed else []
