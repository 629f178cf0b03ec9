"""Look-ups in PostgreSQL's catalog before a sink writes, and the table of micro-batches."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import psycopg
import pyarrow as pa
from psycopg import errors, sql
from psycopg.conninfo import conninfo_to_dict

from ackcore.spark.sinks.columns import with_columns
from ackcore.spark.sinks.postgres_table import Ask, columns_of, quoted, unique_indexes
from ackcore.spark.sinks.unavailable import unavailable

_MARKER = """(
    deployment text NOT NULL,
    sink text NOT NULL,
    target text NOT NULL,
    batch_id bigint NOT NULL,
    content text NOT NULL,
    refused bytea,
    written_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (deployment, sink, target)
)"""


class Target(NamedTuple):
    """The table to write, its keys, and the table of the micro-batches' numbers."""

    table: str
    keys: tuple[str, ...]
    marker: str


def where(dsn: str) -> str:
    """Return host, port and database of a connection string, without secrets.

    Raises
    ------
    ValueError
        If libpq cannot parse it.
    """
    try:
        found = conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:
        # libpq's message may quote the password.
        raise ValueError(
            "dsn must be what libpq connects by, such as 'host=db dbname=shop user=etl' or "
            "'postgresql://etl@db/shop'"
        ) from None
    shown = {name: found[name] for name in ("host", "port", "dbname") if name in found}
    # If a URI's password has an unencoded "@", libpq takes a part of the password for the host.
    return " ".join(f"{name}={str(value).rpartition('@')[2]}" for name, value in shown.items())


#: Advice by the beginning of an error's SQLSTATE; "" for a failed connection and all others.
_WAYS_OUT = {
    "42501": "Let this user do it, by GRANT SELECT, INSERT, UPDATE ON the table (and on the one of "
    "micro-batches beside it)",
    "42": "Make or mend the table, or have the bolt emit other columns",
    "3F": "Make the schema, or name another",
    "53100": "Free space on the server",
    "53": "Give the server more of what it lacks",
    "": "See that the server runs and can be reached from the driver, that the database is there, "
    "and that the user may log in; a password may be in dsn or in ~/.pgpass",
}


@contextlib.contextmanager
def named(sink: str, table: str, shown: str) -> Iterator[None]:
    """Raise errors that no row has caused as `SinkUnavailable`.

    Parameters
    ----------
    sink, table : str
        The names of the sink and its table.
    shown : str
        The server, as `where` returns it.
    """
    try:
        yield
    except (
        psycopg.OperationalError,
        psycopg.InterfaceError,
        errors.InsufficientPrivilege,
        errors.UndefinedTable,
        errors.UndefinedColumn,
        errors.InvalidSchemaName,
        errors.ReadOnlySqlTransaction,
    ) as error:
        state = error.sqlstate or ""
        way_out = next(
            (text for start, text in _WAYS_OUT.items() if start and state.startswith(start)),
            _WAYS_OUT[""],
        )
        # It may be a part of the password: see `where`.
        said = re.sub(r"""[^\s'"(]*@""", "", str(error))
        at = shown or "the server that PGHOST and the like name"
        raise unavailable(
            sink, f"table {table} at {at}", f"{type(error).__name__}: {said}", way_out
        ) from error


def connect(dsn: str, name: str = "ackcore") -> psycopg.Connection[Any]:
    """Return a connection with isolation level READ COMMITTED."""
    connection = psycopg.connect(
        dsn,
        autocommit=True,
        application_name=name,
        prepare_threshold=None,
        # Arrow's texts are UTF-8; by default libpq takes the database's encoding.
        client_encoding="utf8",
    )
    connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
    return connection


def asking(connection: psycopg.Connection[Any]) -> Ask:
    """Return a function that runs a query and returns its single value as text."""

    def ask(query: str) -> str | None:
        found = connection.execute(query).fetchone()
        return None if found is None or found[0] is None else str(found[0])

    return ask


def check(dsn: str, target: Target, what: str, schema: pa.Schema) -> None:
    """Raise ValueError if the table does not exist, or lacks a column or the keys' index."""
    with contextlib.closing(connect(dsn)) as connection:
        table = resolve(connection, target.table, what)
        ask, named = asking(connection), ".".join(map(quoted, table))
        columns = columns_of(ask, named)
        with_columns(what, f"table {target.table}", schema.names, list(columns))
        for name in schema.names:
            if columns[name].generated:
                raise ValueError(
                    f"{what}: column {name!r} of table {target.table} is always generated; have "
                    "the bolt emit no such column"
                )
        if target.keys and not unique_indexes(ask, named, target.keys):
            keys = ", ".join(f'"{key}"' for key in target.keys)
            raise ValueError(
                f"{what}: keys must have a unique index, and table {target.table} has none on "
                f"{keys} alone; CREATE UNIQUE INDEX ON {target.table} ({keys}) makes one"
            )


def make_marker(dsn: str, target: Target, what: str) -> None:
    """Create the table of micro-batches if it does not exist."""
    with contextlib.closing(connect(dsn)) as connection:
        schema, _ = resolve(connection, target.table, what)
        if _find(connection, marker_name(connection, schema, target.marker)):
            return
        name = marker_name(connection, schema, target.marker)
        create = sql.SQL("CREATE TABLE IF NOT EXISTS {} {}").format(
            sql.SQL(name),
            sql.SQL(_MARKER),
        )
        try:
            connection.execute(create)
        except (errors.UniqueViolation, errors.DuplicateTable):
            pass  # another driver created it
        except errors.InsufficientPrivilege as error:
            raise ValueError(
                f"{what}: the table of micro-batches, {name}, is not there, and this user may not "
                f"make it ({error.diag.message_primary}). Have this run by one who may, and let "
                f"this one read and write it: {' '.join(create.as_string(connection).split())}"
            ) from error


def resolve(connection: psycopg.Connection[Any], table: str, what: str) -> tuple[str, str]:
    """Return schema and name of a table, or raise ValueError if it does not exist."""
    found = _find(connection, table)
    if found is None:
        raise ValueError(
            f"{what}: there is no table {table} in database {connection.info.dbname!r} for user "
            f"{connection.info.user!r}; make it first, or name its schema, as in shop.orders"
        )
    return found


def _find(connection: psycopg.Connection[Any], table: str) -> tuple[str, str] | None:
    found = connection.execute(
        "SELECT nspname, relname FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace"
        " WHERE pg_class.oid = to_regclass(%s)",
        [table],
    ).fetchone()
    return None if found is None else (found[0], found[1])


def marker_name(connection: psycopg.Connection[Any], schema: str, marker: str) -> str:
    """Return the name of the table of micro-batches, with its schema."""
    return marker if "." in marker else f"{sql.Identifier(schema).as_string(connection)}.{marker}"
