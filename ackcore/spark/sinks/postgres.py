"""`to_postgres`, which needs psycopg only when it is called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ackcore._error_hints import naming_arguments, naming_extra

if TYPE_CHECKING:
    from ackcore.spark.sinks.postgres_sink import PostgresSink


@naming_arguments
def to_postgres(
    dsn: str,
    table: str,
    *,
    keys: str | Sequence[str] | None = None,
    marker: str = "ackcore_batches",
) -> PostgresSink:
    """Return a sink that writes the rows of ACKED records into a table of PostgreSQL.

    Each micro-batch is one transaction, which also records the micro-batch's number in a marker
    table. A repeated micro-batch finds its number there and writes nothing. The driver sends all
    rows by COPY.

    Parameters
    ----------
    dsn : str
        The connection, in libpq's form: ``host=db dbname=shop user=etl`` or a URI; ``""`` for the
        environment (``PGHOST`` and others). No checkpoint or log contains it; errors show only
        host, port and database. The password may also be in ``~/.pgpass`` or in the file that
        ``passfile=`` names. Each connection reads it again, so it may hold a renewed token.
    table : str
        The table in SQL syntax, ``orders`` or ``shop.orders``. It must have a column of the same
        name for each column of the stream; its other columns get their defaults.
    keys : str or sequence of str, optional
        The columns of a unique index. A row with existing keys replaces the stream's columns of
        that row; the last of several such rows in a micro-batch is kept. ``tuple.stable_id``,
        emitted as a column, is a key that is equal in every attempt. A null key equals no other,
        unless the index is declared NULLS NOT DISTINCT. Without keys all rows are appended.
    marker : str, default "ackcore_batches"
        The table with the number of each sink's last micro-batch, in the schema of `table` unless
        it names another one. Created if it does not exist.

    Raises
    ------
    TypeError, ValueError
        If an argument has another type or is empty, or if libpq cannot parse `dsn`.
    ImportError
        If psycopg is not installed: it comes with ``ackcore[postgres]``.

    Notes
    -----
    A row that violates a constraint, or has a value that does not fit its column, is refused: its
    record becomes a dead letter with PostgreSQL's error, and the other rows are written. A row may
    refer to any row of its micro-batch that is written. More than 10,000 refused rows in a
    micro-batch end the query (`TooManyRefused`), and none of it is written.

    If other rows can be written, a row is also refused in these cases: a trigger rejects it
    (``P0001`` or an SQLSTATE of yours) or fails for it; an extension raises an error for it; it
    violates NOT NULL of a domain or of another table; its text is invalid for its column's type.
    Deferrable constraints are checked at once. Rules of the table apply without `keys`.

    PostgreSQL rounds numbers and times to the precision of their columns, and a column of type
    date drops the hours of a time. For a timestamptz column it reads a time without a zone as local
    time of the session's ``TimeZone``. Emit values that the columns store unchanged.
    """
    with naming_extra("to_postgres()", "psycopg", "postgres"):
        from ackcore.spark.sinks.postgres_sink import PostgresSink  # noqa: PLC0415
    return PostgresSink(dsn, table, keys, marker)
