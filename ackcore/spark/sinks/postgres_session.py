"""A connection to PostgreSQL, which writes each micro-batch in one transaction.

The transaction locks the sink's row in the table of micro-batches.  If two drivers write, the
second one therefore sees the commit of the first.
"""

from __future__ import annotations

import json
import zlib
from typing import Any, LiteralString, NamedTuple

import numpy as np
import psycopg
from psycopg import errors, sql

from ackcore.spark.base.atomic import check_fence
from ackcore.spark.base.errors import CheckpointForeign
from ackcore.spark.base.failpoints import failpoint
from ackcore.spark.sinks.interface import Accepted
from ackcore.spark.sinks.postgres_catalog import Target, asking, connect, marker_name, resolve
from ackcore.spark.sinks.postgres_rows import Into, PostgresRows, numbered, placed
from ackcore.spark.sinks.postgres_table import (
    DURABLE,
    columns_of,
    end_others,
    quoted,
    session_name,
    shown_message,
)
from ackcore.spark.sinks.rejects import RefusalCount, SinkRejects
from ackcore.topology.parts import MAX_REFUSED

_LONGEST = 500


class Refused(NamedTuple):
    """A refused row: its file's number, its place there, and PostgreSQL's error."""

    file: int
    place: int
    state: str
    message: str


class PostgresSession:
    """The connection of one sink of one checkpoint.

    The new connection ends those that an earlier driver left open, because they may hold locks.
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
        name = session_name(deployment, sink)
        self._connection = connection = connect(dsn, name)
        try:
            connection.execute(end_others(name))
            connection.execute(DURABLE)
            self._table = resolve(connection, target.table, f"sink {sink!r}")
            self._marker = marker_name(connection, self._table[0], target.marker)
            # Committed before any micro-batch, so that there is a row to lock.
            self._execute(
                "INSERT INTO {marker} (deployment, sink, target, batch_id, content)"
                " VALUES (%s, %s, %s, -1, '') ON CONFLICT DO NOTHING",
                [*self._of, ".".join(self._table)],
            )
        except BaseException:
            connection.close()
            raise

    def is_sound(self) -> bool:
        """Return whether the connection works; after a restart of the server it does not."""
        try:
            self._connection.execute("SELECT 1")
        except psycopg.Error:
            return False
        return True

    def close(self) -> None:
        """Disconnect; the server rolls back uncommitted changes."""
        self._connection.close()

    def write(self, accepted: Accepted) -> SinkRejects | None:
        """Write a micro-batch in one transaction, unless it is written already.

        No error shows values of rows.
        """
        try:
            return self._write(accepted)
        except psycopg.Error as error:
            raise _without_values(error) from None

    def _write(self, accepted: Accepted) -> SinkRejects | None:
        number, content = accepted.batch_id, accepted.content()
        with self._connection.transaction():
            found = self._execute(
                "SELECT batch_id, content, refused FROM {marker}"
                " WHERE (deployment, sink, target) = (%s, %s, %s) FOR UPDATE",
                [*self._of, ".".join(self._table)],
            ).fetchone()
            # A driver that passes this check owned the checkpoint while it held the row's lock.
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
        """Write the rows; return the errors of refused rows, by row number."""
        where = f"sink {accepted.sink!r}, table {self._target.table},"
        count = RefusalCount(where, accepted.batch_id, self._max_refused, _without_values)
        names, table = accepted.schema().names, ".".join(map(quoted, self._table))
        columns = columns_of(asking(self._connection), table)
        arrays = [name in columns and columns[name].is_array for name in names]
        into = Into(table, names, self._target.keys, arrays)
        return PostgresRows(self._connection, into, lambda: numbered(accepted), count).write()

    def _execute(self, text: LiteralString, values: list[Any]) -> psycopg.Cursor[Any]:
        # psycopg looks for parameters in the table's name, too.
        marker = sql.SQL(self._marker.replace("%", "%%"))
        return self._connection.execute(sql.SQL(text).format(marker=marker), values)

    def _foreign(self, accepted: Accepted, last: int) -> CheckpointForeign:
        deployment, sink = (sql.Literal(one).as_string(self._connection) for one in self._of)
        return accepted.foreign(
            f"table {self._target.table}",
            last,
            f"have micro-batches from {accepted.batch_id} to {last} written again, whatever of "
            f"them is in the table: DELETE FROM {self._marker} WHERE deployment = {deployment} "
            f"AND sink = {sink}",
        )


def _placed(accepted: Accepted, refused: dict[int, psycopg.Error]) -> list[Refused]:
    return [
        Refused(file, place, error.sqlstate or "", _message(error))
        for file, place, error in placed(accepted, refused)
    ]


def _rejects(accepted: Accepted, refused: list[Refused]) -> SinkRejects | None:
    """Return the refused rows as `SinkRejects`, without those recorded as refused before."""
    known = [file.refused for file in accepted.files]
    new = [one for one in refused if not np.isin(one.place, known[one.file])]
    if not new:
        return None
    return SinkRejects.at(
        [one.file for one in new], [one.place for one in new], list(map(_error, new))
    )


def _message(error: psycopg.Error) -> str:
    about = error.diag
    detail = f" ({about.message_detail})" if about.message_detail else ""
    return f"{about.message_primary}{detail}"[:_LONGEST]


def _without_values(error: psycopg.Error) -> psycopg.Error:
    """Return an error without the values of rows that the server quotes."""
    about = error.diag
    if about.message_primary is None:
        return error  # an error of the connection or of psycopg
    said = shown_message(error.sqlstate or "", about.message_primary, about.context)
    return type(error)(f"{said}\nHINT:  {about.message_hint}" if about.message_hint else said)


def _error(one: Refused) -> psycopg.Error:
    """Return the exception for a refused row, the same before and after it is recorded."""
    try:
        kind = errors.lookup(one.state)
    except KeyError:  # a code of a PostgreSQL newer than psycopg
        kind = psycopg.DatabaseError
    return kind(one.message)


def _pack(refused: list[Refused]) -> bytes | None:
    return zlib.compress(json.dumps(refused).encode()) if refused else None


def _unpack(packed: bytes | None) -> list[Refused]:
    return [Refused(*one) for one in json.loads(zlib.decompress(packed))] if packed else []
