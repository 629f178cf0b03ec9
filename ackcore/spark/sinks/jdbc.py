"""A sink that writes each micro-batch into a table of a JDBC database, in one transaction."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa

from ackcore._error_hints import naming_arguments
from ackcore.spark.base.versions import active_context, from_arrow_schema
from ackcore.spark.sinks.columns import (
    check_keys,
    named_keys,
    refusing_unfit_times,
    spark_schema,
    texts_by_name,
)
from ackcore.spark.sinks.jdbc_connection import REFUSALS, JdbcConnection, JdbcError, Server
from ackcore.spark.sinks.jdbc_transaction import (
    OF_SINK,
    JdbcTransaction,
    Names,
    match_columns,
    table_names,
)
from ackcore.spark.sinks.sink import TransactionalSink, Written
from ackcore.spark.sinks.sink_batch import SinkBatch
from ackcore.spark.sinks.unavailable import unavailable

_WAY_OUT = (
    "Check that the server runs and can be reached from the driver and the workers, that Spark has "
    "the JDBC driver (spark.jars, with the driver's class as the property 'driver'), that database "
    "and table exist, that the server's disk has free space, and that the user may log in, write "
    "the table, and create tables in its schema"
)

#: The statement that creates the marker table.
_MARKER = """CREATE TABLE {marker} (
    deployment VARCHAR(64) NOT NULL,
    sink VARCHAR(128) NOT NULL,
    target VARCHAR(128) NOT NULL,
    batch_id NUMERIC(19) NOT NULL,
    content VARCHAR(32) NOT NULL,
    staging VARCHAR(128),
    PRIMARY KEY (deployment, sink, target)
)"""


@naming_arguments
def to_jdbc(
    url: str,
    table: str,
    *,
    keys: str | Sequence[str] | None = None,
    properties: Mapping[str, str] | None = None,
    marker: str = "ackcore_jdbc_batches",
) -> JdbcSink:
    """Return a sink that writes the rows of ACKED records into a table of any JDBC database.

    Tasks fill a staging table through Spark's JDBC writer. The driver then moves the staged rows
    into `table` in one transaction, which also writes the micro-batch's number into the marker
    table. A repeated micro-batch finds its number there and writes nothing. For PostgreSQL,
    `to_postgres` is faster. Spark must have the database's JDBC driver, for instance through
    ``spark.jars`` with the driver's class as the property ``driver``.

    Parameters
    ----------
    url : str
        The JDBC URL: ``jdbc:mysql://db/shop``.
    table : str
        The table's name in SQL, ``orders`` or ``shop.orders``.  It must have a column of the same
        name for each column of the stream; its other columns get their defaults.
    keys : str or sequence of str, optional
        Columns with a unique index, which is not checked.  A row with existing keys replaces the
        stream's columns of that row; the last of several such rows in a micro-batch is kept.  A
        null key equals no other.  Without keys all rows are appended.
    properties : mapping of str, optional
        Properties of the JDBC driver, such as ``user`` and ``password``, and of Spark, such as
        ``driver``, ``batchsize``, ``numPartitions`` and ``queryTimeout``.  Plans and checkpoints
        have neither the properties nor the parameters of `url`.  Errors show the user's name and
        Spark's properties at most.
    marker : str, default "ackcore_jdbc_batches"
        The table with the number of each sink's last micro-batch, in the schema of `table` unless
        it names another schema.  The sink creates it if it does not exist.

    Raises
    ------
    TypeError, ValueError
        If an argument has another type or is empty, or if a name is not that of a table.

    Notes
    -----
    A row is refused in these cases. Its record becomes a dead letter with the database's error, and
    the other rows are written.

    - It has a value that does not fit its column.
    - It violates a constraint.
    - A trigger raises an error for it: SQLSTATE 45000, Oracle's raise_application_error, or SQL
      Server's RAISERROR.

    The whole micro-batch fails in these cases, and none of its rows is written.

    - A trigger raises errors for all of several rows.
    - A trigger ends the transaction, as with SQL Server's THROW.
    - A constraint is violated, or a trigger raises an error, in a database without savepoints.
    - More than 10,000 rows are refused: `TooManyRefused` ends the query.

    The user must be able to create and drop tables in the schema of `table`.
    """
    return JdbcSink(url, table, keys, properties, marker)


class JdbcSink(TransactionalSink[JdbcTransaction]):
    """The sink that `to_jdbc` returns."""

    #: `JdbcConnection` uses Spark's JVM, which Spark Connect does not offer.
    needs_jvm = True

    def __init__(
        self,
        url: str,
        table: str,
        keys: str | Sequence[str] | None,
        properties: Mapping[str, str] | None,
        marker: str,
    ) -> None:
        for argument, value in (("url", url), ("table", table), ("marker", marker)):
            if not isinstance(value, str):
                raise TypeError(f"{argument} must be a str, got {type(value).__name__}")
        if not re.match(r"jdbc:\w+:", url):
            # Not shown: it may hold a password.
            raise ValueError("url must be a JDBC URL, such as 'jdbc:mysql://db/shop'")
        of = texts_by_name("properties", properties)
        for name in of:
            if name.lower() in ("url", "dbtable", "query"):
                raise ValueError(
                    f"properties must not have {name!r}; leave it out and give the arguments url "
                    "and table"
                )
        self.table, self.marker = table, marker
        self.keys = named_keys(keys)
        self._names: Names = table_names(table, marker)
        self._server = Server(url, of)

    def __repr__(self) -> str:
        return f"to_jdbc({self._server.shown()!r}, {self.table!r})"

    def check(self, sink: str, schema: pa.Schema, case_sensitive: bool = False) -> None:
        """Raise ValueError if a key is no column, the table lacks a column, or it cannot be read.

        Also raises ValueError if the database has no transactions. Raises TypeError for a nested
        key, a time of day, or a type that Spark or the database lacks. Types are not compared with
        the table's. Raises SinkUnavailable if the database cannot be reached. Without a Spark
        session in this process, the table is not checked.
        """
        what = f"sink {sink!r}"
        check_keys(what, self.keys, schema)
        spark_schema(what, schema)
        for field in schema:
            if pa.types.is_time(field.type):
                raise TypeError(
                    f"{what}: Spark cannot write times of day by JDBC, and column {field.name!r} "
                    f"is {field.type}; have the bolt emit a text"
                )
        if active_context() is None:
            return  # without a JVM there is no connection, and nothing runs
        with self._connected(sink) as connection:
            try:
                columns = connection.columns(self.table)
            except JdbcError as error:
                raise ValueError(
                    f"{what}: table {self.table} cannot be read ({error}). Create it, give its "
                    "schema, as in shop.orders, or grant this user SELECT"
                ) from error
            match_columns(what, self.table, schema.names, list(columns))
            for field, found in zip(schema, from_arrow_schema(schema), strict=True):
                if connection.type_of(found.dataType) is None:
                    raise TypeError(
                        f"{what}: Spark's JDBC dialect for {self._server.shown()} has no type for "
                        f"{field.type} of column {field.name!r}; have the bolt emit another type"
                    )

    def claim(self, sink: str, deployment: str, checkpoint: str) -> None:
        """Create the marker table and the sink's row in it, if they do not exist.

        Raises SinkUnavailable if the database cannot be reached, ValueError if the marker table can
        be neither read nor created.
        """
        of = (deployment, sink[:128], self.table[:128])
        marker = self._names.marker
        find = f"SELECT batch_id FROM {marker}{OF_SINK}"
        with self._connected(sink) as connection:
            try:
                found = connection.row(find, *of)
            except JdbcError:
                connection.rollback()
                self._make_marker(connection, f"sink {sink!r}")
                found = None
            if found is None:
                insert = (
                    f"INSERT INTO {marker} (deployment, sink, target, batch_id, content)"
                    " VALUES (?, ?, ?, -1, '-')"
                )
                try:
                    connection.execute(insert, *of)
                    connection.commit()
                except JdbcError:
                    connection.rollback()
                    if connection.row(find, *of) is None:  # not inserted by another driver
                        raise

    def _make_marker(self, connection: JdbcConnection, what: str) -> None:
        create = _MARKER.format(marker=self._names.marker)
        try:
            connection.execute(create)
            connection.commit()
        except JdbcError as error:
            connection.rollback()
            try:
                connection.columns(self._names.marker)  # another driver created it
            except JdbcError:
                raise ValueError(
                    f"{what}: the marker table {self._names.marker}, which has the numbers of "
                    f"written micro-batches, can be neither read nor created ({error}). Have a "
                    "user with the right to create tables run this statement, and grant this user "
                    "SELECT, INSERT and UPDATE on the table: "
                    f"{' '.join(create.split())}"
                ) from error
            connection.rollback()

    @contextlib.contextmanager
    def begin(self, batch: SinkBatch) -> Iterator[JdbcTransaction]:
        """Connect; at the end, roll back what is not committed, and drop the staging table.

        Raises SinkUnavailable, or JdbcError for an error about rows. Neither shows values of rows.
        """
        with self._connected(batch.sink) as connection:
            transaction = JdbcTransaction(connection, self._names, self.keys, batch)
            try:
                yield transaction
                connection.rollback()
            finally:
                transaction.end()

    def read_number(self, transaction: JdbcTransaction, batch: SinkBatch) -> Written:
        """Lock the sink's row of the marker table; return its number, -1 at first, and content.

        Raises JdbcError if the row was deleted since `claim`, which inserts it.
        """
        return transaction.read_number()

    @refusing_unfit_times
    def write_rows(self, transaction: JdbcTransaction, batch: SinkBatch) -> None:
        """Write the rows through a staging table, into the table without a commit.

        Raises SinkRejects if rows violate a constraint or do not fit, and TooManyRefused if there
        are more than `MAX_REFUSED` such rows. Raises CheckpointInUse if another driver has begun to
        write. The table is then unchanged.
        """
        transaction.write_rows()

    def record(self, transaction: JdbcTransaction, batch: SinkBatch, written: Written) -> None:
        """Write the number and the content into the sink's row of the marker table."""
        transaction.mark("batch_id = ?, content = ?", written.number, written.content)

    def commit(self, transaction: JdbcTransaction) -> None:
        """Commit the transaction."""
        transaction.connection.commit()

    def advice(self, batch: SinkBatch, last: int) -> str:
        """Return advice with the DELETE that has micro-batches up to ``last`` written again."""
        deployment, sink = (one.replace("'", "''") for one in (batch.deployment, batch.sink[:128]))
        return (
            f"or have micro-batches from {batch.batch_id} to {last} written again, in addition to "
            f"their rows that are in the table: DELETE FROM {self._names.marker} WHERE deployment "
            f"= '{deployment}' AND sink = '{sink}', and start again"
        )

    @contextlib.contextmanager
    def _connected(self, sink: str) -> Iterator[JdbcConnection]:
        """Yield a new connection; raise errors of the database as `SinkUnavailable`.

        Once the connection is open, errors about rows and those without an SQLSTATE stay
        JdbcErrors. The values of rows are removed from all.
        """
        try:
            with contextlib.closing(JdbcConnection(self._server, self.table)) as connection:
                yield connection
        except JdbcError as raised:
            error = raised.without_values()
            of_rows = not error.sqlstate or error.sqlstate.startswith(REFUSALS)
            if of_rows and not error.connecting:
                raise error from None
            raise unavailable(sink, f"table {self.table}", str(error), _WAY_OUT) from error
