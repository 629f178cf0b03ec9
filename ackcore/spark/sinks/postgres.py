"""A sink that is a table of PostgreSQL: each micro-batch once, in a transaction with its number."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from ackcore.spark.base.atomic import check_fence
from ackcore.spark.sinks.columns import check_keys, named_keys
from ackcore.spark.sinks.copy_format import refuse_unfit
from ackcore.spark.sinks.interface import Accepted
from ackcore.spark.sinks.rejects import SinkRejects

if TYPE_CHECKING:
    from ackcore.spark.sinks.postgres_catalog import Target
    from ackcore.spark.sinks.postgres_session import PostgresSession


def to_postgres(
    dsn: str,
    table: str,
    *,
    keys: str | Sequence[str] | None = None,
    marker: str = "ackcore_batches",
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
        as a column, is a key that is the same at every attempt.  All rows are appended if not
        given.
    marker : str, default "ackcore_batches"
        The table with the number of each sink's last micro-batch, in the schema of `table` unless
        it names another.  Created if it is not there.

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
    goes to the dead letters with PostgreSQL's error, the others are written.  Constraints that are
    deferrable are checked at once.
    """
    return PostgresSink(dsn, table, keys=keys, marker=marker)


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
    """What `to_postgres` returns."""

    def __init__(
        self,
        dsn: str,
        table: str,
        *,
        keys: str | Sequence[str] | None = None,
        marker: str = "ackcore_batches",
    ) -> None:
        for argument, value in (("dsn", dsn), ("table", table), ("marker", marker)):
            if not isinstance(value, str):
                raise TypeError(f"{argument} must be a str, got {type(value).__name__}")
            if not value and argument != "dsn":
                raise ValueError(f"{argument} must be the name of a table, got ''")
        self.table = table
        self.keys = named_keys(keys)
        self.marker = marker
        self._dsn = dsn
        self._where = _catalog().where(dsn)
        self.__setstate__({})

    def __repr__(self) -> str:
        return f"to_postgres({self._where!r}, {self.table!r})"

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is connected."""
        return {name: of for name, of in vars(self).items() if name not in ("_live", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Begin with nothing that is connected."""
        vars(self).update(state)
        # A session for each deployment and sink that this object is used for.
        self._live: dict[tuple[str, str], PostgresSession] = {}
        self._lock = threading.Lock()

    def check(self, name: str, schema: pa.Schema, case_sensitive: bool = False) -> None:
        """Raise ValueError or TypeError if the table could not hold the stream's columns.

        Raises
        ------
        psycopg.Error
            If the database cannot be asked.
        """
        what = f"sink {name!r}"
        check_keys(what, self.keys, schema)
        refuse_unfit(what, schema)
        _catalog().check(self._dsn, self._target(), what, schema)

    def claim(self, sink: str, deployment: str, checkpoint: str) -> None:
        """Make the table of micro-batches, if it is not there.

        Raises
        ------
        psycopg.Error
            If the database cannot be reached.
        ValueError
            If the user may not make it; the message says what to run.
        """
        self.release(sink, deployment)
        _catalog().make_marker(self._dsn, self._target(), f"sink {sink!r}")

    def write_accepted(self, accepted: Accepted) -> SinkRejects | None:
        """Write the rows of a micro-batch, from the files that its run left.

        Returns
        -------
        SinkRejects or None
            The rows that violate a constraint or do not fit; all others are written.

        Raises
        ------
        psycopg.Error
            If the database fails, the table is gone or lacks a column; nothing is written then.
        CheckpointForeign
            If this micro-batch was written with other rows, or a later one was.
        CheckpointInUse
            If another driver has taken over.
        """
        of = accepted.deployment, accepted.sink
        with self._lock:
            live = self._live.get(of)
        try:
            if live is None or not live.is_sound():
                self.release(accepted.sink, accepted.deployment)
                check_fence()
                live = _load("postgres_session").PostgresSession(self._dsn, self._target(), *of)
                with self._lock:
                    self._live[of] = live
            refused: SinkRejects | None = live.write(accepted)
            return refused
        except BaseException:
            self.release(accepted.sink, accepted.deployment)
            raise

    def release(self, sink: str, deployment: str) -> None:
        """Give up the connection of a sink; a micro-batch connects again."""
        with self._lock:
            live = self._live.pop((deployment, sink), None)
        if live is not None:
            live.close()

    def close(self) -> None:
        """Give up all connections."""
        for deployment, sink in list(self._live):
            self.release(sink, deployment)

    def _target(self) -> Target:
        made: Target = _catalog().Target(self.table, self.keys, self.marker)
        return made
