"""A connection to a database through Spark's JVM, and its errors without secrets."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql.types import DataType

from ackcore.spark.base.errors import one_line
from ackcore.spark.base.versions import Py4JJavaError, active_context
from ackcore.spark.sinks.unavailable import SEQUENCE_ENDED, redacted, shown_message

T = TypeVar("T")

#: Properties that errors may show: Spark's settings and the user's name.
_SHOWN = {
    "batchsize",
    "connectionprovider",
    "driver",
    "isolationlevel",
    "numpartitions",
    "querytimeout",
    "user",
}
#: The part of a URL before the host or the login.
_START = re.compile(r"jdbc:[\w+]+:(?:thin:|oci:)?(?://)?")
#: Classes of SQLSTATE: values that do not fit, integrity constraints, a view's check.
REFUSALS = ("22", "23", "44")
#: Classes of errors that users' triggers and routines raise; P0 is PostgreSQL's.
_RAISED = ("09", "38", "39", "45", "P0")
_NOT_NULL = "23502"
_LONGEST = 500
#: The text in which PostgreSQL's JDBC driver quotes a statement with its values. Behind the name of
#: the exception it is in the JVM's language.
_STATEMENT = re.compile(r"(?:java\.sql\.BatchUpdateException: |Batch entry \d+ ).*", re.DOTALL)
#: The maximum number of causes of a Spark error among which the database's error is searched.
_CAUSES = 16
_READ_COMMITTED = 2


class JdbcError(RuntimeError):
    """An error of the database, its JDBC driver, or the Spark job that fills the staging table.

    It has the SQLSTATE, "" if unknown, and in `shown` the message without values of rows.
    """

    def __init__(self, message: str, sqlstate: str = "", shown: str | None = None) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate  # "" if it is not known
        #: Whether a trigger or a routine of the user raised the error, for one row or for all rows.
        self.is_raised = sqlstate.startswith(_RAISED)
        #: Whether a row may be refused for the error.
        self.is_of_row = self.is_raised or (
            sqlstate.startswith(REFUSALS) and sqlstate != SEQUENCE_ENDED
        )
        self.connecting = False  # whether the connection failed to open
        self.shown = message if shown is None else shown  # the message without values of rows

    def without_values(self) -> JdbcError:
        """Return a new error whose message, `shown`, has no values of rows."""
        error = JdbcError(self.shown, self.sqlstate)
        error.connecting = self.connecting
        return error


class Server:
    """The URL of a database and the connection properties, and errors without their secrets.

    ``properties``: properties of the JDBC driver, and of Spark, such as ``driver`` and
    ``batchsize``.
    """

    def __init__(self, url: str, properties: Mapping[str, str]) -> None:
        self.url = url
        self.properties = dict(properties)

    def shown(self) -> str:
        """Return the URL without login and parameters.

        Return only the scheme if each ``@`` is behind a ``?`` or ``;``, which may be in a password.
        """
        start = _START.match(self.url)
        scheme = start[0] if start else ""
        main = re.split(r"[;?]", self.url[len(scheme) :], maxsplit=1)[0]
        if "@" in self.url and "@" not in main:
            return scheme  # a login may be cut in two
        return scheme + main.rpartition("@")[2]

    def redacted(self, text: str) -> str:
        """Return a text without the secrets of the URL and the properties."""
        text = text.replace(self.url, self.shown())
        secrets = {v for name, v in self.properties.items() if name.lower() not in _SHOWN}
        for name, value in re.findall(r"[?;&]([^=;&]+)=([^;&]*)", self.url):
            if name.lower() not in _SHOWN:
                secrets.add(value)
        start = _START.match(self.url)
        login = self.url[start.end() if start else 0 :].rpartition("@")[0]
        secrets.add(re.split("[:/]", login, maxsplit=1)[-1])
        return redacted(text, secrets)

    def call(self, call: Callable[[], T]) -> T:
        """Call a function, which uses Spark's JVM, and return its result.

        Errors of Java and Spark are raised as `JdbcError`, without secrets.
        """
        try:
            return call()
        except (Py4JJavaError, PySparkException) as error:
            java = _of_database(error)
            state, text = "", one_line(error)
            if java is not None:
                state, text = java.getSQLState(), java.getMessage() or text
                if state.startswith(("72000", "S0")):
                    state = _standard_state(state, java.getErrorCode())
            # The errors for a null and for a sequence quote no value.
            hidden = state.startswith(REFUSALS) and state not in (_NOT_NULL, SEQUENCE_ENDED)
            shown = f"SQLSTATE {state}" if hidden else text
            # PostgreSQL's JDBC driver has the message apart from the values.
            with contextlib.suppress(Exception):
                about = java.getServerErrorMessage()
                shown = shown_message(state, about.getMessage(), about.getWhere())
            text, shown = (
                self._message(text),
                self._message(_STATEMENT.sub("a batch is refused", shown)),
            )
        # Raised outside of the handler: the context would be Java's error with its secrets.
        raise JdbcError(text, state, shown)

    def _message(self, text: str) -> str:
        return f"{self.shown()}: {' '.join(self.redacted(text).split())[:_LONGEST]}"


def _standard_state(state: str, code: int) -> str:
    """Return the standard SQLSTATE for an error of a user's trigger or of a too long value.

    Return ``state`` for other errors.

    ``state``: Oracle's 72000, which many errors have, or SQL Server's S0 and the state of the
    error. ``code``: the database's number of the error.
    """
    if state != "72000":
        return "45000" if code >= 50_000 else state  # THROW and RAISERROR
    if 20_000 <= code <= 20_999:  # raise_application_error
        return "45000"
    return "22001" if code == 12_899 else state  # the value is too large for the column


def _of_database(error: BaseException) -> Any:
    """Return the SQL exception among a Java error and its causes, or None.

    If one is a BatchUpdateException, the SQL exception that caused it is preferred.
    """
    java: Any = error.java_exception if isinstance(error, Py4JJavaError) else None
    found = None
    for _ in range(_CAUSES):
        if java is None:
            break
        # Not all Java errors are SQL exceptions.
        with contextlib.suppress(Exception):
            if java.getSQLState():
                found = java
                if java.getClass().getName() != "java.sql.BatchUpdateException":
                    break
        java = java.getCause()
    return found


class JdbcConnection:
    """A connection from the driver to a database, opened by the constructor; without autocommit.

    ``table``: a table for the options of Spark's JDBC writer. Raises JdbcError, with ``connecting``
    set, if the connection fails; RuntimeError without a Spark session in this process; ValueError
    if the database has no transactions. `can_save`: whether the database has savepoints.
    """

    def __init__(self, server: Server, table: str) -> None:
        context = active_context()
        if context is None:
            raise RuntimeError("to_jdbc() needs a Spark session in this process; start one first")
        assert context._jvm is not None
        self.server = server
        self._jvm = context._jvm
        try:
            self._connection, self._dialect = server.call(lambda: self._connect(table))
        except JdbcError as error:
            error.connecting = True
            raise
        try:
            self.can_save: bool = server.call(self._begin)
        except BaseException:
            self.close()
            raise

    def _connect(self, table: str) -> tuple[Any, Any]:
        dialect = self._jvm.org.apache.spark.sql.jdbc.JdbcDialects.get(self.server.url)
        return dialect.createConnectionFactory(self._options(table)).apply(-1), dialect

    def _begin(self) -> bool:
        """Turn off autocommit; return whether the database has savepoints.

        Raises ValueError if it has no transactions.
        """
        about = self._connection.getMetaData()
        if not about.supportsTransactions():
            raise ValueError(
                f"the database {self.server.shown()} has no transactions, which to_jdbc() needs; "
                "write to it by a function as sink"
            )
        if about.supportsTransactionIsolationLevel(_READ_COMMITTED):
            self._connection.setTransactionIsolation(_READ_COMMITTED)
        self._connection.setAutoCommit(False)
        return bool(about.supportsSavepoints())

    def close(self) -> None:
        """Roll back uncommitted changes and disconnect; errors of the database are ignored."""
        with contextlib.suppress(Py4JJavaError):
            # Some drivers commit, and some refuse to close within a transaction.
            self._connection.rollback()
        with contextlib.suppress(Py4JJavaError):
            self._connection.close()

    def _options(self, table: str) -> Any:
        of = self._jvm.java.util.HashMap()
        for name, value in {**self.server.properties, "url": self.server.url}.items():
            of.put(name, value)
        of.put("dbtable", table)
        scala = self._jvm.org.apache.spark.api.python.PythonUtils.toScalaMap(of)
        jdbc = self._jvm.org.apache.spark.sql.execution.datasources.jdbc
        return jdbc.JdbcOptionsInWrite(self.server.url, table, scala)

    def quoted(self, name: str) -> str:
        """Return a name, quoted for this database."""
        return str(self._dialect.quoteIdentifier(name))

    def type_of(self, kind: DataType) -> str | None:
        """Return this database's type for a Spark type, or None if it has none."""
        of = self._jvm.org.apache.spark.sql.types.DataType.fromJson(kind.json())
        utils = self._jvm.org.apache.spark.sql.execution.datasources.jdbc.JdbcUtils
        for found in (self._dialect.getJDBCType(of), utils.getCommonJDBCType(of)):
            if found.isDefined():
                return str(found.get().databaseTypeDefinition())
        return None

    def columns(self, table: str) -> dict[str, bool]:
        """Return for each column of a table whether it is NOT NULL and not auto-incremented.

        A default is not considered. Raises JdbcError if the table cannot be read.
        """

        def read(statement: Any) -> dict[str, bool]:
            about = statement.executeQuery().getMetaData()
            return {
                about.getColumnName(i): about.isNullable(i) == 0 and not about.isAutoIncrement(i)
                for i in range(1, about.getColumnCount() + 1)
            }

        return self._run(f"SELECT * FROM {table} WHERE 1 = 0", (), read)

    def fill(self, table: str, rows: DataFrame) -> None:
        """Insert rows through Spark's JDBC writer. Each task commits; rows may stay on an error."""
        utils = self._jvm.org.apache.spark.sql.execution.datasources.jdbc.JdbcUtils
        none = self._jvm.scala.Option.empty()
        # Not by DataFrame.write: a plan would hold the options.
        self.server.call(lambda: utils.saveTable(rows._jdf, none, True, self._options(table)))

    def execute(self, sql: str, *values: str | int) -> int:
        """Run a statement without a commit; return the number of changed rows."""
        return self._run(sql, values, lambda statement: int(statement.executeUpdate()))

    def row(self, sql: str, *values: str | int) -> list[str | None] | None:
        """Return the first row of a query as texts, None for NULL; None if there is no row."""

        def read(statement: Any) -> list[str | None] | None:
            found = statement.executeQuery()
            if not found.next():
                return None
            return [found.getString(i + 1) for i in range(found.getMetaData().getColumnCount())]

        return self._run(sql, values, read)

    def _run(self, sql: str, values: Sequence[str | int], use: Callable[[Any], T]) -> T:
        options = {name.lower(): value for name, value in self.server.properties.items()}

        def run() -> T:
            statement = self._connection.prepareStatement(sql)
            try:
                statement.setQueryTimeout(int(options.get("querytimeout", 0)))
                for i, value in enumerate(values, 1):
                    if isinstance(value, int):
                        statement.setLong(i, value)
                    else:
                        statement.setString(i, value)
                return use(statement)
            finally:
                with contextlib.suppress(Py4JJavaError):
                    statement.close()

        return self.server.call(run)

    def save(self) -> Any:
        """Set a savepoint and return it."""
        return self.server.call(self._connection.setSavepoint)

    def commit(self) -> None:
        """Commit the transaction."""
        self.server.call(self._connection.commit)

    def rollback(self, to: Any = None) -> None:
        """Roll back to a savepoint, or without one the whole transaction."""
        self.server.call(lambda: self._connection.rollback(*([] if to is None else [to])))
