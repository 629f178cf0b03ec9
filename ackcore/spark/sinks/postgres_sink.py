"""A sink that writes each micro-batch into a PostgreSQL table, in one transaction.

The transaction locks the sink's row in the marker table. If two drivers write the same micro-batch,
the second one waits for the first, and finds its number.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, LiteralString

import psycopg
import pyarrow as pa
from psycopg import errors, sql

from ackcore.spark.base.atomic import check_fence
from ackcore.spark.sinks.columns import check_keys, named_keys
from ackcore.spark.sinks.copy_format import refuse_unfit
from ackcore.spark.sinks.postgres_catalog import (
    BEGIN,
    SinkTable,
    as_unavailable,
    check_table,
    connect,
    end_others,
    make_marker,
    marker_name,
    quoted,
    resolve,
    session_name,
    where,
)
from ackcore.spark.sinks.postgres_rows import PostgresRows
from ackcore.spark.sinks.rejects import SinkRejects, check_refused
from ackcore.spark.sinks.sink import Connections, TransactionalSink, Written
from ackcore.spark.sinks.sink_batch import SinkBatch
from ackcore.spark.sinks.unavailable import shown_message

#: The maximum length of the reason for a refused row.
_LONGEST = 500


class PostgresSession:
    """The open connection of one sink of one checkpoint, and the names of its tables.

    When it opens, it ends connections that an earlier driver left open, which may hold locks, and
    inserts the sink's row into the marker table.
    """

    def __init__(self, dsn: str, target: SinkTable, deployment: str, sink: str) -> None:
        name = session_name(deployment, sink)
        self.connection = connection = connect(dsn, name)
        try:
            self.table = resolve(connection, target.table, f"sink {sink!r}")
            self.marker = marker_name(self.table[0], target.marker)
            end_others(connection, name, self.marker)
            self._of = [deployment, sink, ".".join(self.table)]
            # Committed before any micro-batch, so that there is a row to lock.
            self.on_marker(
                "INSERT INTO {marker} (deployment, sink, target, batch_id, content)"
                " VALUES (%s, %s, %s, -1, '') ON CONFLICT DO NOTHING"
            )
        except BaseException:
            connection.close()
            raise

    def on_marker(self, text: LiteralString, *values: Any) -> psycopg.Cursor[Any]:
        """Run a statement on the sink's row of the marker table, and return its cursor.

        In its text, ``{marker}`` is the table, and the last three parameters are the row's key.
        """
        # psycopg looks for parameters in the table's name, too.
        marker = sql.SQL(self.marker.replace("%", "%%"))
        statement = sql.SQL(text).format(marker=marker)
        return self.connection.execute(statement, [*values, *self._of])

    def is_sound(self) -> bool:
        """Return whether the server answers over the connection; False once it has restarted."""
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
        """Raise ValueError if the table cannot take the stream's rows, or a key is no column.

        The table must have all columns of the stream and need no other, and have a unique index on
        the keys. Raises TypeError for a nested key or a type that has no text for PostgreSQL; types
        are not compared with the table's. Raises SinkUnavailable if the database does not answer.
        """
        what = f"sink {sink!r}"
        check_keys(what, self._target.keys, schema)
        refuse_unfit(what, schema)
        with self._as_unavailable(sink):
            check_table(self._dsn, self._target, what, schema)

    def claim(self, sink: str, deployment: str, checkpoint: str) -> None:
        """Close an open connection, and create the marker table if it does not exist.

        Raises SinkUnavailable if the database cannot be reached, ValueError if the user may not
        create the table, or the sink's table does not exist.
        """
        self.release(sink, deployment)
        with self._as_unavailable(sink):
            make_marker(self._dsn, self._target, f"sink {sink!r}")

    @contextlib.contextmanager
    def begin(self, batch: SinkBatch) -> Iterator[PostgresSession]:
        """Yield a session with a new transaction, over the open connection or a new one.

        At the end the transaction is rolled back unless it was committed. After an error other than
        SinkRejects the connection is closed. Errors are raised without values of rows:
        SinkUnavailable, or another psycopg.Error. Raises CheckpointInUse before it connects if
        another driver has taken over.
        """
        sink, deployment = batch.sink, batch.deployment
        try:
            with self._as_unavailable(sink), _without_values():
                live = self._live.get(sink, deployment)
                if live is None or not live.is_sound():
                    self.release(sink, deployment)
                    check_fence()
                    live = PostgresSession(self._dsn, self._target, deployment, sink)
                    self._live.put(sink, deployment, live)
                live.connection.execute(BEGIN)
                try:
                    yield live
                except SinkRejects:
                    live.connection.rollback()
                    raise
                live.connection.rollback()
        except SinkRejects:
            raise  # the sink is called again at once, over this connection
        except BaseException:
            self.release(sink, deployment)
            raise

    def read_number(self, transaction: PostgresSession, batch: SinkBatch) -> Written:
        """Lock the sink's row of the marker table; return its number, -1 at first, and content.

        Raises psycopg.errors.NoDataFound if the row was deleted since the connection was opened.
        """
        found = transaction.on_marker(
            "SELECT batch_id, content FROM {marker}"
            " WHERE (deployment, sink, target) = (%s, %s, %s) FOR UPDATE"
        ).fetchone()
        if found is None:
            raise errors.NoDataFound(
                f"the row of sink {batch.sink!r} in {transaction.marker} was deleted while the "
                "query ran; the next attempt inserts it again"
            )
        return Written(*found)

    def write_rows(self, transaction: PostgresSession, batch: SinkBatch) -> SinkRejects | None:
        """Write the rows; return those that the table refuses, or None.

        Raises TooManyRefused if more than `MAX_REFUSED` rows are refused. Nothing is written then.
        """
        connection, target = transaction.connection, self._target
        where = f"sink {batch.sink!r}, table {target.table},"
        check = functools.partial(check_refused, where, batch.batch_id, _without_values_of)
        table = ".".join(map(quoted, transaction.table))
        errors_of = PostgresRows(connection, table, target.keys, batch, check).write()
        if not errors_of:
            return None
        numbers = batch.all_numbers()[list(errors_of)]
        return batch.refuse(numbers, list(map(_shown, errors_of.values())))

    def record(self, transaction: PostgresSession, batch: SinkBatch, written: Written) -> None:
        """Write the number and the content into the sink's row of the marker table."""
        transaction.on_marker(
            "UPDATE {marker} SET batch_id = %s, content = %s, written_at = now()"
            " WHERE (deployment, sink, target) = (%s, %s, %s)",
            written.number,
            written.content,
        )

    def commit(self, transaction: PostgresSession) -> None:
        """Commit the transaction."""
        transaction.connection.commit()

    def advice(self, batch: SinkBatch, last: int) -> str:
        """Return advice with the DELETE that has micro-batches up to ``last`` written again."""
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

    def _as_unavailable(self, sink: str) -> contextlib.AbstractContextManager[None]:
        return as_unavailable(sink, self._target.table, self._where)


@contextlib.contextmanager
def _without_values() -> Iterator[None]:
    """Raise PostgreSQL's errors without the values of rows that they quote."""
    try:
        yield
    except psycopg.Error as error:
        raise _without_values_of(error) from None


def _without_values_of(error: psycopg.Error) -> psycopg.Error:
    """Return an error of PostgreSQL without the values of rows that it quotes."""
    about = error.diag
    if about.message_primary is None:
        return error  # an error of the connection or of psycopg
    said = shown_message(error.sqlstate or "", about.message_primary, about.context)
    new = type(error)(f"{said}\nHINT:  {about.message_hint}" if about.message_hint else said)
    new.sqlstate = error.sqlstate  # psycopg's class may not have it
    return new


def _shown(error: psycopg.Error) -> psycopg.Error:
    """Return a refused row's error for its dead letter, with values: 500 characters at most."""
    about = error.diag
    detail = f" ({about.message_detail})" if about.message_detail else ""
    return type(error)(f"{about.message_primary}{detail}"[:_LONGEST])
