"""A sink that writes each micro-batch into a PostgreSQL table, in one transaction.

The transaction locks the sink's row in the table of micro-batches.  If two drivers write, the
second one therefore reads the commit of the first.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, LiteralString

import numpy as np
import psycopg
import pyarrow as pa
from psycopg import errors, sql

from ackcore.spark.base.atomic import check_fence
from ackcore.spark.sinks.columns import check_keys, named_keys
from ackcore.spark.sinks.copy_format import refuse_unfit
from ackcore.spark.sinks.postgres_catalog import (
    DURABLE,
    SinkTable,
    check,
    columns_of,
    connect,
    end_others,
    make_marker,
    marker_name,
    named,
    quoted,
    resolve,
    session_name,
    where,
)
from ackcore.spark.sinks.postgres_rows import Into, PostgresRows, numbered, placed
from ackcore.spark.sinks.rejects import RefusalCount, SinkRejects
from ackcore.spark.sinks.sink import Connections, TransactionalSink, Written
from ackcore.spark.sinks.sink_batch import SinkBatch
from ackcore.spark.sinks.unavailable import shown_message

#: The maximum length of the recorded reason for a refused row.
_LONGEST = 500


class PostgresSession:
    """The open connection of one sink of one checkpoint.

    A new connection ends those that an earlier driver left open, because they may hold locks.
    """

    def __init__(self, dsn: str, target: SinkTable, deployment: str, sink: str) -> None:
        name = session_name(deployment, sink)
        self.connection = connection = connect(dsn, name)
        try:
            end_others(connection, name)
            connection.execute(DURABLE)
            self.table = resolve(connection, target.table, f"sink {sink!r}")
            self.marker = marker_name(connection, self.table[0], target.marker)
            self._of = [deployment, sink, ".".join(self.table)]
            # Committed before any micro-batch, so that there is a row to lock.
            self.execute(
                "INSERT INTO {marker} (deployment, sink, target, batch_id, content)"
                " VALUES (%s, %s, %s, -1, '') ON CONFLICT DO NOTHING"
            )
        except BaseException:
            connection.close()
            raise

    def execute(self, text: LiteralString, *values: Any) -> psycopg.Cursor[Any]:
        """Run a statement on the sink's row, the key of which is in its last three parameters."""
        # psycopg looks for parameters in the table's name, too.
        marker = sql.SQL(self.marker.replace("%", "%%"))
        statement = sql.SQL(text).format(marker=marker)
        return self.connection.execute(statement, [*values, *self._of])

    def is_sound(self) -> bool:
        """Return whether the connection works; after a restart of the server it does not."""
        try:
            self.connection.execute("SELECT 1")
        except psycopg.Error:
            return False
        return True

    def close(self) -> None:
        """Disconnect; the server rolls back uncommitted changes."""
        self.connection.close()


class PostgresSink(TransactionalSink[PostgresSession]):
    """The sink that `to_postgres` returns."""

    def __init__(self, dsn: str, table: str, keys: str | Sequence[str] | None, marker: str) -> None:
        for argument, value in (("dsn", dsn), ("table", table), ("marker", marker)):
            if not isinstance(value, str):
                raise TypeError(f"{argument} must be a str, got {type(value).__name__}")
            if not value and argument != "dsn":
                raise ValueError(f"{argument} must be the name of a table, got ''")
        self._dsn = dsn
        self._target = SinkTable(table, named_keys(keys), marker)
        self._where = where(dsn)
        self._live: Connections[PostgresSession] = Connections()

    def __repr__(self) -> str:
        return f"to_postgres({self._where!r}, {self._target.table!r})"

    def check(self, sink: str, schema: pa.Schema, case_sensitive: bool = False) -> None:
        """Raise ValueError or TypeError if the table cannot hold the stream's columns.

        Raises SinkUnavailable if the database does not answer.
        """
        what = f"sink {sink!r}"
        check_keys(what, self._target.keys, schema)
        refuse_unfit(what, schema)
        with self._named(sink):
            check(self._dsn, self._target, what, schema)

    def claim(self, sink: str, deployment: str, checkpoint: str) -> None:
        """Create the table of micro-batches if it does not exist.

        Raises SinkUnavailable if the database cannot be reached. Raises ValueError if the user may
        not create it; the message contains the statement to run.
        """
        self.release(sink, deployment)
        with self._named(sink):
            make_marker(self._dsn, self._target, f"sink {sink!r}")

    @contextlib.contextmanager
    def begin(self, batch: SinkBatch) -> Iterator[PostgresSession]:
        """Begin a transaction. No error shows values of rows; after one, the connection is closed.

        Raises SinkUnavailable or psycopg.Error if the database fails, or the table was deleted or
        lacks a column.
        """
        sink, deployment = batch.sink, batch.deployment
        try:
            with self._named(sink), _without_values():
                live = self._live.get(sink, deployment)
                if live is None or not live.is_sound():
                    self.release(sink, deployment)
                    check_fence()
                    live = PostgresSession(self._dsn, self._target, deployment, sink)
                    self._live.put(sink, deployment, live)
                live.connection.execute("BEGIN ISOLATION LEVEL READ COMMITTED")
                yield live
                live.connection.rollback()
        except BaseException:
            self.release(sink, deployment)
            raise

    def read_number(self, transaction: PostgresSession, batch: SinkBatch) -> Written:
        """Return the sink's last micro-batch, and lock its row."""
        found = transaction.execute(
            "SELECT batch_id, content, refused FROM {marker}"
            " WHERE (deployment, sink, target) = (%s, %s, %s) FOR UPDATE"
        ).fetchone()
        if found is None:
            raise errors.NoDataFound(
                f"the row of sink {batch.sink!r} in {transaction.marker} was deleted while the "
                "query ran; the next attempt inserts it again"
            )
        # The refused rows are by file of the batch that was written, which may be another one.
        is_same = (found[0], found[1]) == (batch.batch_id, batch.content())
        return Written(found[0], found[1], _unpack(batch, found[2]) if is_same else None)

    def write_rows(self, transaction: PostgresSession, batch: SinkBatch) -> SinkRejects | None:
        """Write the rows; return those that violate a constraint or do not fit.

        Raises TooManyRefused if more than `MAX_REFUSED` rows are refused. Nothing is written then.
        """
        connection, target = transaction.connection, self._target
        where = f"sink {batch.sink!r}, table {target.table},"
        count = RefusalCount(where, batch.batch_id, _without_values_of)
        names, table = batch.schema().names, ".".join(map(quoted, transaction.table))
        columns = columns_of(connection, table)
        arrays = [name in columns and columns[name].is_array for name in names]
        into = Into(table, names, target.keys, arrays)
        errors_of = PostgresRows(connection, into, lambda: numbered(batch), count).write()
        if not errors_of:
            return None
        files, places, found = zip(*placed(batch, errors_of), strict=True)
        return SinkRejects.at(files, places, list(map(_shown, found)))

    def record(self, transaction: PostgresSession, batch: SinkBatch, written: Written) -> None:
        """Update the sink's row."""
        transaction.execute(
            "UPDATE {marker} SET batch_id = %s, content = %s, refused = %s, written_at = now()"
            " WHERE (deployment, sink, target) = (%s, %s, %s)",
            written.number,
            written.content,
            _pack(written.refused),
        )

    def commit(self, transaction: PostgresSession) -> None:
        """Commit the transaction."""
        transaction.connection.commit()

    def advice(self, batch: SinkBatch, last: int) -> str:
        """Return the statement that deletes the sink's number."""
        of = [sql.Literal(one).as_string() for one in (batch.deployment, batch.sink)]
        marker = self._target.marker
        live = self._live.get(batch.sink, batch.deployment)
        if live is not None:
            marker = live.marker
        return (
            f"or have micro-batches from {batch.batch_id} to {last} written again, in addition to "
            f"their rows that are in the table: DELETE FROM {marker} WHERE deployment = {of[0]} "
            f"AND sink = {of[1]}"
        )

    def release(self, sink: str, deployment: str) -> None:
        """Close the connection of a sink. The next micro-batch connects again."""
        self._live.release(sink, deployment)

    def _named(self, sink: str) -> contextlib.AbstractContextManager[None]:
        return named(sink, self._target.table, self._where)


@contextlib.contextmanager
def _without_values() -> Iterator[None]:
    try:
        yield
    except psycopg.Error as error:
        raise _without_values_of(error) from None


def _without_values_of(error: psycopg.Error) -> psycopg.Error:
    """Return an error without the values of rows that the server quotes."""
    about = error.diag
    if about.message_primary is None:
        return error  # an error of the connection or of psycopg
    said = shown_message(error.sqlstate or "", about.message_primary, about.context)
    return type(error)(f"{said}\nHINT:  {about.message_hint}" if about.message_hint else said)


def _pack(refused: SinkRejects | None) -> bytes | None:
    """Return the refused rows in bytes: file, place, SQLSTATE and message of each."""
    if refused is None:
        return None
    assert refused.places is not None
    rows = []
    for file, place, reason in zip(*refused.places, refused.reason_of, strict=True):
        error = refused.reasons[reason]
        assert isinstance(error, psycopg.Error)
        rows.append([int(file), int(place), error.sqlstate or "", str(error)])
    return zlib.compress(json.dumps(rows).encode())


def _unpack(batch: SinkBatch, packed: bytes | None) -> SinkRejects | None:
    """Return the refused rows, without those that are recorded in the batch as refused."""
    rows = json.loads(zlib.decompress(packed)) if packed else []
    new = [row for row in rows if not np.isin(row[1], batch.files[row[0]].refused)]
    if not new:
        return None
    files, places, states, messages = zip(*new, strict=True)
    return SinkRejects.at(files, places, list(map(_refusal, states, messages)))


def _shown(error: psycopg.Error) -> psycopg.Error:
    """Return the error of a refused row with the values that the server quotes."""
    about = error.diag
    detail = f" ({about.message_detail})" if about.message_detail else ""
    return _refusal(error.sqlstate or "", f"{about.message_primary}{detail}")


def _refusal(state: str, message: str) -> psycopg.Error:
    """Return the exception for a refused row, the same before and after it is recorded."""
    try:
        kind = errors.lookup(state)
    except KeyError:  # a code of a PostgreSQL newer than psycopg
        kind = psycopg.DatabaseError
    return kind(message[:_LONGEST])
