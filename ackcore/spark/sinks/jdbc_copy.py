"""COPY through PostgreSQL's JDBC driver, for `PostgresRows`; and where it may take the place of
Spark's writer.

It may where a row gets into the table just as it would from there: PostgreSQL reads the text of
each column as the driver would set its value, and the table has nothing that COPY passes over.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from typing import IO, Any

import pyarrow as pa

from ackcore.spark.sinks.jdbc_connection import JdbcConnection, JdbcError
from ackcore.spark.sinks.postgres_table import (
    DURABLE,
    columns_of,
    end_others,
    literal,
    unique_indexes,
)

#: The first that has all that is asked of it.
_OLDEST = 12
_BUFFER = 1 << 16

_is = pa.types
#: By types of the stream, those of columns whose values are the same by COPY as from the driver;
#: a text is of any, as the database reads it.
_ALIKE: tuple[tuple[Callable[[pa.DataType], bool], set[str]], ...] = (
    (_is.is_signed_integer, {"int2", "int4", "int8", "numeric"}),
    (_is.is_float32, {"float4"}),
    (_is.is_float64, {"float8"}),
    (_is.is_decimal, {"numeric"}),
    (_is.is_boolean, {"bool"}),
    (_is.is_date, {"date"}),
    (lambda kind: _is.is_timestamp(kind) and kind.tz is None, {"timestamp", "timestamptz"}),
    (_is.is_timestamp, {"timestamptz"}),
    (lambda kind: _is.is_binary(kind) or _is.is_large_binary(kind), {"bytea"}),
)


class JdbcCopy:
    """A connection of PostgreSQL's driver, to `PostgresRows`."""

    error = JdbcError

    def __init__(self, connection: JdbcConnection, driver: Any) -> None:
        self._connection, self._driver = connection, driver
        self.run, self.ask = connection.execute, connection.ask

    @classmethod
    def of(cls, connection: JdbcConnection) -> JdbcCopy | None:
        """Return it for a connection, None if that is to another database."""
        driver = connection.unwrapped("org.postgresql.PGConnection")
        if driver is None:
            return None
        # Others speak its protocol, too, and say so here.
        found = re.match(r"PostgreSQL (\d+)", connection.ask("SELECT version()") or "")
        return cls(connection, driver) if found and int(found[1]) >= _OLDEST else None

    def take_over(self, name: str) -> None:
        """Give the connection a name, and end others that have it: one may hold the lock.

        What it commits outlasts a crash of the server, whatever the database's own setting is.
        """
        self.run(f"SET application_name = {literal(name)}")
        self.ask(end_others(name))
        self.ask(DURABLE)
        self._connection.commit()

    def suits(
        self, table: str, names: Sequence[str], keys: Sequence[str], types: pa.Schema
    ) -> bool:
        """Whether rows may be copied into a table and be there as from Spark's writer.

        Parameters
        ----------
        table : str
            As SQL has it.
        names, keys : sequence of str
            Its columns, in the order of the stream's, and which of them are keys.
        types : pyarrow.Schema
            The stream's, as Spark has them.
        """
        of = f"to_regclass({literal(table)})"
        plain = self.ask(
            # Rules are passed over by COPY.
            f"SELECT count(*) FROM pg_class WHERE oid = {of} AND relkind IN ('r', 'p')"
            " AND NOT relhasrules"
            " AND has_database_privilege(current_database(), 'TEMP')"
        )
        columns = columns_of(self.ask, table)
        if plain != "1" or not all(
            name in columns and _alike(kind, columns[name].kind)
            for name, kind in zip(names, types.types, strict=True)
        ):
            return False
        if not keys:
            return True
        # A row that is there already is first seen as a new one by ON CONFLICT: the defaults of
        # other columns must do for that.
        listed = ", ".join(map(literal, names))
        beside = self.ask(
            f"SELECT count(*) FROM pg_constraint WHERE conrelid = {of} AND contype = 'c'"
            " AND NOT conkey <@ ARRAY(SELECT attnum FROM pg_attribute"
            f" WHERE attrelid = {of} AND attname IN ({listed}))"
        )
        needed = any(column.needed for name, column in columns.items() if name not in names)
        return beside == "0" and not needed and bool(unique_indexes(self.ask, table, keys))

    def copy(self, statement: str, chunks: Iterator[Any]) -> None:
        """Run a COPY; the JVM reads what this process writes."""
        seconds = self._connection.query_timeout()
        if seconds:
            self.run(f"SET LOCAL statement_timeout = '{seconds}s'")
        source, out = self._pipe()

        def write() -> None:
            with out:
                for chunk in chunks:
                    out.write(chunk)

        said: JdbcError | None = None
        # Also where no thread can be started.
        with closing(source), out, ThreadPoolExecutor(1, "ackcore-copy") as pool:
            written = pool.submit(write)
            try:
                self._connection.server.told(
                    lambda: self._driver.getCopyAPI().copyIn(statement, source, _BUFFER)
                )
            except JdbcError as error:
                said = error
            finally:
                source.close()  # who still writes is told that nobody reads
        failed = written.exception()
        # What ended early looks to the server as if it were all.
        if failed is not None and not (said and isinstance(failed, BrokenPipeError)):
            raise failed
        if said is not None:
            raise said

    def _pipe(self) -> tuple[Any, IO[bytes]]:
        """Return a stream of the JVM's, and the file to write by what is read there.

        It has no name any more: nobody else can open it, and nothing is left if we are killed.
        """
        with tempfile.TemporaryDirectory(prefix="ackcore-") as directory:
            path = os.path.join(directory, "rows")
            os.mkfifo(path, 0o600)
            # So that of the JVM and this process none waits until the other has opened it.
            reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            try:
                out = open(path, "wb")  # noqa: SIM115
                try:
                    return self._connection.opened(path), out
                except BaseException:
                    out.close()
                    raise
            finally:
                os.close(reading)

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        """Undo all that its body has done if that raises."""
        saved = self._connection.save()
        try:
            yield
        except BaseException:
            with suppress(JdbcError):  # of a connection that is lost
                self._connection.rollback(saved)
            raise
        self._connection.release(saved)

    def about(self, error: JdbcError) -> tuple[str, str | None]:
        """Return an error's SQLSTATE, and the column that it names, if one."""
        return error.sqlstate, error.column


def _alike(kind: pa.DataType, column: str) -> bool:
    if _is.is_string(kind) or _is.is_large_string(kind):
        return True
    return next((column in alike for is_kind, alike in _ALIKE if is_kind(kind)), False)
