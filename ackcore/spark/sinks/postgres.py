"""A sink that is a table of PostgreSQL: each micro-batch once, in a transaction with its number."""

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
from ackcore.topology.max_refused import MAX_REFUSED, check_max_refused

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

    Each micro-batch is written in one transaction, with its number in a small table beside: one
    that is repeated finds it there and writes nothing.  One process, the driver, sends all rows, by
    COPY.

    Parameters
    ----------
    dsn : str
        How to connect, as libpq takes it: ``host=db dbname=shop user=etl`` or a URI; ``""`` for
        what ``PGHOST`` and the like say.  What it holds goes into no checkpoint, log or error; a
        password may also be in ``~/.pgpass``.
    table : str
        As SQL has it, ``orders`` or ``shop.orders``.  It must have a column for each of the
        stream's, of the same name; what else it has gets its default.
    keys : str or sequence of str, optional
        Columns with a unique index: a row whose keys are there replaces the stream's columns of
        that row, and of several in one micro-batch the last is kept.  ``tuple.stable_id``, emitted
        as a column, is a key that is the same at every attempt.  A key that is null equals none,
        unless the index says NULLS NOT DISTINCT.  All rows are appended if not given.
    marker : str, default "ackcore_batches"
        The table with the number of each sink's last micro-batch, in the schema of `table` unless
        it names another.  Created if it is not there.
    max_refused : int, default 10_000
        Rows of a micro-batch that may be refused: they are looked for within its transaction.  One
        more ends the query (`TooManyRefused`), and nothing of the micro-batch is written.

    Returns
    -------
    PostgresSink

    Raises
    ------
    TypeError
        If an argument is of another type.
    ValueError
        If it is empty, or libpq does not understand `dsn`.
    ImportError
        If psycopg is not installed: it comes with ``ackcore[postgres]``.

    Notes
    -----
    A row that violates a constraint, or whose value does not fit its column, is refused: its record
    goes to the dead letters with PostgreSQL's error, the others are written.  So is one that a
    trigger raises an exception over (``P0001``), or fails for, that a domain's or another table's
    NOT NULL does not take, or that is no text of its column's type by the type's own syntax, if
    others go in.  Constraints that are deferrable are checked at once.
    """
    return PostgresSink(dsn, table, keys=keys, marker=marker, max_refused=max_refused)


def _load(module: str) -> ModuleType:
    """Return one of the modules that need psycopg, which only those have who use PostgreSQL."""
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
        """Raise ValueError or TypeError if the table could not hold the stream's columns.

        Raises
        ------
        SinkUnavailable
            If the database cannot be asked.
        """
        what = f"sink {name!r}"
        check_keys(what, self.keys, schema)
        refuse_unfit(what, schema)
        with self._named(name):
            _catalog().check(self._dsn, self._target(), what, schema)

    def claim(self, sink: str, deployment: str, checkpoint: str) -> None:
        """Make the table of micro-batches, if it is not there.

        Raises
        ------
        SinkUnavailable
            If the database cannot be reached.
        ValueError
            If the user may not make it; the message says what to run.
        """
        self.release(sink, deployment)
        with self._named(sink):
            _catalog().make_marker(self._dsn, self._target(), f"sink {sink!r}")

    def write_accepted(self, accepted: Accepted) -> SinkRejects | None:
        """Write the rows of a micro-batch, from the files that its run left.

        Returns
        -------
        SinkRejects or None
            The rows that violate a constraint or do not fit; all others are written.

        Raises
        ------
        SinkUnavailable, psycopg.Error
            If the database fails, the table is gone or lacks a column; nothing is written then, or
            if the connection was lost while it was committed, perhaps all: the next call finds out.
        TooManyRefused
            If that are more than `max_refused` rows; nothing is written then.
        CheckpointForeign
            If this micro-batch was written with other rows, or a later one was.
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
        """Give up the connection of a sink; a micro-batch connects again."""
        self._live.release(sink, deployment)

    def close(self) -> None:
        """Give up all connections."""
        self._live.close()

    def _named(self, sink: str) -> contextlib.AbstractContextManager[None]:
        """Raise with the sink's name what the database does not let it do."""
        named: contextlib.AbstractContextManager[None] = _catalog().named(
            sink, self.table, self._where
        )
        return named

    def _target(self) -> Target:
        made: Target = _catalog().Target(self.table, self.keys, self.marker)
        return made
