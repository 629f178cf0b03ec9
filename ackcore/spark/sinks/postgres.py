"""A sink that writes each micro-batch into a PostgreSQL table, in one transaction."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import pyarrow as pa

from ackcore.spark.base.atomic import check_fence
from ackcore.spark.sinks.columns import check_keys, named_keys
from ackcore.spark.sinks.connections import Connections
from ackcore.spark.sinks.copy_format import refuse_unfit
from ackcore.spark.sinks.interface import Accepted
from ackcore.spark.sinks.rejects import SinkRejects
from ackcore.topology.parts import MAX_REFUSED, check_max_refused

if TYPE_CHECKING:
    from ackcore.spark.sinks.postgres_catalog import Target
    from ackcore.spark.sinks.postgres_session import PostgresSession


def to_postgres(
    dsn: str,
    table: str,
    *,
    keys: str | Sequence[str] | None = None,
    marker: str = "ackcore_batches",
    max_refused: int = MAX_REFUSED,
) -> PostgresSink:
    """Return a sink that writes the rows of ACKED records into a table of PostgreSQL.

    Each micro-batch is one transaction, which also records the micro-batch's number in a marker
    table. A repeated micro-batch finds its number there and writes nothing. The driver sends all
    rows by COPY.

    Parameters
    ----------
    dsn : str
        The connection, in libpq's form: ``host=db dbname=shop user=etl`` or a URI; ``""`` for the
        environment (``PGHOST`` and others). It is not written to checkpoints, logs or errors. The
        password may also be in ``~/.pgpass``.
    table : str
        The table in SQL syntax, ``orders`` or ``shop.orders``. It must have a column of the same
        name for each column of the stream; its other columns get their defaults.
    keys : str or sequence of str, optional
        Columns with a unique index. A row with existing keys replaces the stream's columns of that
        row; the last of several such rows in a micro-batch is kept. ``tuple.stable_id``, emitted as
        a column, is a key that is equal in every attempt. A null key equals no other, unless the
        index says NULLS NOT DISTINCT. Without keys all rows are appended.
    marker : str, default "ackcore_batches"
        The table with the number of each sink's last micro-batch, in the schema of `table` unless
        it names another one. Created if it does not exist.
    max_refused : int, default 10_000
        The maximum number of refused rows per micro-batch, which are searched within the
        transaction. One more ends the query (`TooManyRefused`), and nothing of the micro-batch is
        written.

    Returns
    -------
    PostgresSink

    Raises
    ------
    TypeError
        If an argument has another type.
    ValueError
        If an argument is empty, or libpq cannot parse `dsn`.
    ImportError
        If psycopg is not installed: it comes with ``ackcore[postgres]``.

    Notes
    -----
    A row that violates a constraint, or has a value that does not fit its column, is refused: its
    record becomes a dead letter with PostgreSQL's error, and the other rows are written.

    If other rows can be written, a row is also refused in these cases: a trigger rejects it
    (``P0001``) or fails for it; it violates NOT NULL of a domain or of another table; its text is
    invalid for its column's type. Deferrable constraints are checked at once.
    """
    return PostgresSink(dsn, table, keys=keys, marker=marker, max_refused=max_refused)


def _load(module: str) -> ModuleType:
    """Import and return a module that needs psycopg."""
    try:
        return importlib.import_module(f"ackcore.spark.sinks.{module}")
    except ModuleNotFoundError as error:
        if error.name != "psycopg":
            raise
        raise ImportError(
            "to_postgres() needs psycopg, which is not installed: pip install 'ackcore[postgres]'"
        ) from error


def _catalog() -> ModuleType:
    return _load("postgres_catalog")


class PostgresSink:
    """The sink that `to_postgres` returns."""

    def __init__(
        self,
        dsn: str,
        table: str,
        *,
        keys: str | Sequence[str] | None = None,
        marker: str = "ackcore_batches",
        max_refused: int = MAX_REFUSED,
    ) -> None:
        for argument, value in (("dsn", dsn), ("table", table), ("marker", marker)):
            if not isinstance(value, str):
                raise TypeError(f"{argument} must be a str, got {type(value).__name__}")
            if not value and argument != "dsn":
                raise ValueError(f"{argument} must be the name of a table, got ''")
        self.table = table
        self.keys = named_keys(keys)
        self.max_refused = check_max_refused(max_refused)
        self.marker = marker
        self._dsn = dsn
        self._where = _catalog().where(dsn)
        self._live: Connections[PostgresSession] = Connections()

    def __repr__(self) -> str:
        return f"to_postgres({self._where!r}, {self.table!r})"

    def check(self, name: str, schema: pa.Schema, case_sensitive: bool = False) -> None:
        """Raise ValueError or TypeError if the table cannot hold the stream's columns.

        Raises
        ------
        SinkUnavailable
            If the database does not answer.
        """
        what = f"sink {name!r}"
        check_keys(what, self.keys, schema)
        refuse_unfit(what, schema)
        with self._named(name):
            _catalog().check(self._dsn, self._target(), what, schema)

    def claim(self, sink: str, deployment: str, checkpoint: str) -> None:
        """Create the table of micro-batches if it does not exist.

        Raises
        ------
        SinkUnavailable
            If the database cannot be reached.
        ValueError
            If the user may not create it; the message contains the statement to run.
        """
        self.release(sink, deployment)
        with self._named(sink):
            _catalog().make_marker(self._dsn, self._target(), f"sink {sink!r}")

    def write_accepted(self, accepted: Accepted) -> SinkRejects | None:
        """Write the rows of a micro-batch from the files of its run.

        Returns
        -------
        SinkRejects or None
            The rows that violate a constraint or do not fit. All others are written.

        Raises
        ------
        SinkUnavailable, psycopg.Error
            If the database fails, or the table is gone or lacks a column. Nothing is written then,
            except that all rows may be written if the connection broke during the commit: the next
            call checks.
        TooManyRefused
            If more than `max_refused` rows are refused. Nothing is written then.
        CheckpointForeign
            If this micro-batch was written with other rows, or a later one was written.
        CheckpointInUse
            If another driver has taken over.
        """
        sink, deployment = accepted.sink, accepted.deployment
        try:
            with self._named(sink):
                live = self._live.get(sink, deployment)
                if live is None or not live.is_sound():
                    self.release(sink, deployment)
                    check_fence()
                    opened = _load("postgres_session").PostgresSession
                    live = opened(self._dsn, self._target(), deployment, sink, self.max_refused)
                    self._live.put(sink, deployment, live)
                refused: SinkRejects | None = live.write(accepted)
                return refused
        except BaseException:
            self.release(sink, deployment)
            raise

    def release(self, sink: str, deployment: str) -> None:
        """Close the connection of a sink. The next micro-batch connects again."""
        self._live.release(sink, deployment)

    def close(self) -> None:
        """Close all connections."""
        self._live.close()

    def _named(self, sink: str) -> contextlib.AbstractContextManager[None]:
        """Raise errors that no row has caused as `SinkUnavailable` with the sink's name."""
        named: contextlib.AbstractContextManager[None] = _catalog().named(
            sink, self.table, self._where
        )
        return named

    def _target(self) -> Target:
        made: Target = _catalog().Target(self.table, self.keys, self.marker)
        return made
