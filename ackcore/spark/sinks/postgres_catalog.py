"""PostgreSQL's catalog: look-ups before a sink writes, and the table of micro-batches.

Values are literals in the statements: psycopg would look for parameters in names, too.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, TypeAlias

import psycopg
import pyarrow as pa
from psycopg import errors, sql
from psycopg.conninfo import conninfo_to_dict

from ackcore.spark.sinks.columns import with_columns
from ackcore.spark.sinks.unavailable import unavailable

#: Runs a query and returns its single value as text.
Ask: TypeAlias = Callable[[str], str | None]


#: Makes each commit of the session wait for the server's disk.  Otherwise a crash could undo a
#: commit on which the checkpoint already relies.  Run once per session.
DURABLE = (
    "SELECT set_config('synchronous_commit', 'on', false)"
    " WHERE current_setting('synchronous_commit') = 'off'"
)


class Column(NamedTuple):
    """A column of a table."""

    kind: str  # the name of its type; for a domain, the name of the base type
    is_array: bool  # whether its type is an array
    generated: bool  # whether its value is always generated
    needed: bool  # whether a row must have a value for it


def quoted(name: str) -> str:
    """Return a name, quoted as an SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """Return a text as an SQL literal."""
    escaped = text.replace("'", "''").replace("\\", "\\\\")
    return f"E'{escaped}'" if "\\" in text else f"'{escaped}'"


def columns_of(ask: Ask, table: str) -> dict[str, Column]:
    """Return the columns of a table by name; ``table`` is its name in SQL."""
    found = _lists(
        ask,
        "attname, coalesce(base.typname, own.typname), own.typcategory = 'A',"
        " attgenerated <> '' OR attidentity = 'a',"
        " attnotnull AND NOT atthasdef AND attidentity = ''",
        "FROM pg_attribute JOIN pg_type AS own ON own.oid = atttypid"
        " LEFT JOIN pg_type AS base ON base.oid = own.typbasetype"
        f" WHERE attrelid = to_regclass({literal(table)}) AND attnum > 0 AND NOT attisdropped"
        " ORDER BY attnum",
    )
    return {name: Column(*about) for name, *about in found}


class Way(NamedTuple):
    """The way in which rows are written into a table."""

    #: Whether COPY can write into it.  It cannot for a view, or if policies apply to the user.
    copies: bool
    has_policies: bool  # whether policies apply to the user


def way_into(ask: Ask, table: str) -> Way:
    """Return the way in which rows are written into a table."""
    found = _lists(
        ask,
        "relkind NOT IN ('v', 'm') AND NOT row_security_active(oid), row_security_active(oid)",
        f"FROM pg_class WHERE oid = to_regclass({literal(table)})",
    )
    return Way(*found[0]) if found else Way(copies=True, has_policies=False)


def nulls_differ(ask: Ask, table: str, keys: Sequence[str]) -> bool:
    """Return whether keys may be null, and a null key equals no other."""
    found = unique_indexes(ask, table, keys)
    return any(may_be and not equal for may_be, equal in found) and not any(
        equal for _, equal in found
    )


def unique_indexes(ask: Ask, table: str, keys: Sequence[str]) -> list[tuple[bool, bool]]:
    """Return two flags for each unique index on exactly these columns.

    The flags are whether a column may be null, and whether nulls are equal (NULLS NOT DISTINCT).
    Partial and deferrable indexes are left out.
    """
    found = _lists(
        ask,
        # Through JSON, because PostgreSQL before 15 does not have this column.
        "array_agg(attname::text), bool_or(NOT attnotnull),"
        " bool_or(coalesce(to_jsonb(pg_index) ->> 'indnullsnotdistinct', 'false')::bool)",
        "FROM pg_index"
        " JOIN pg_attribute ON attrelid = indrelid AND attnum = ANY (indkey[:indnkeyatts - 1])"
        f" WHERE indrelid = to_regclass({literal(table)}) AND indisunique AND indimmediate"
        " AND indisvalid AND indpred IS NULL AND indexprs IS NULL GROUP BY indexrelid",
    )
    return [(may_be, equal) for names, may_be, equal in found if set(names) == set(keys)]


def _lists(ask: Ask, columns: str, rest: str) -> list[list[Any]]:
    """Return the rows of a query."""
    found = ask(
        "SELECT coalesce(json_agg(one), '[]')::text"
        f" FROM (SELECT json_build_array({columns}) AS one {rest}) AS found"
    )
    rows: list[list[Any]] = json.loads(found or "[]")
    return rows


def session_name(deployment: str, sink: str) -> str:
    """Return the application name of the connection of a checkpoint's sink."""
    # PostgreSQL cuts long names and replaces each character outside of ASCII by a question mark.
    plain = len(sink) <= 32 and sink.isascii() and sink.isprintable()
    said = sink if plain else blake2b(sink.encode(), digest_size=8).hexdigest()
    return f"ackcore-{deployment}-{said}"[:63]


def end_others(name: str) -> str:
    """Return a query that ends the other connections with a name, since they may hold locks."""
    return (
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name ="
        f" {literal(name)} AND usename = current_user AND datname = current_database()"
        " AND pid <> pg_backend_pid()"
    )


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


class SinkTable(NamedTuple):
    """The table to write, its keys, and the table of the micro-batches' numbers."""

    table: str
    keys: tuple[str, ...]
    marker: str


def where(dsn: str) -> str:
    """Return host, port and database of a connection string, without secrets.

    Raises ValueError if libpq cannot parse it.
    """
    try:
        found = conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:
        # libpq's message may quote the password.
        raise ValueError(
            "dsn must be a connection string of libpq, such as 'host=db dbname=shop user=etl' or "
            "'postgresql://etl@db/shop'"
        ) from None
    shown = {name: found[name] for name in ("host", "port", "dbname") if name in found}
    # If a URI's password has an unencoded "@", libpq takes a part of the password for the host.
    return " ".join(f"{name}={str(value).rpartition('@')[2]}" for name, value in shown.items())


#: Advice by the beginning of an error's SQLSTATE; "" for a failed connection and all others.
_WAYS_OUT = {
    "42501": "Grant this user SELECT, INSERT and UPDATE on the table and on the table of "
    "micro-batches",
    "42": "Create or change the table, or have the bolt emit other columns",
    "3F": "Create the schema, or name another one",
    "53100": "Free space on the server",
    "53": "Give the server more of this resource",
    "": "Check that the server runs and can be reached from the driver, that the database exists, "
    "and that the user may log in; a password may be in dsn or in ~/.pgpass",
}


@contextlib.contextmanager
def named(sink: str, table: str, shown: str) -> Iterator[None]:
    """Raise errors that no row has caused as `SinkUnavailable`.

    ``sink``, ``table``: the names of the sink and its table. ``shown``: the server, as `where`
    returns it.
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
        at = shown or "the server that PGHOST and PGPORT name"
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


def check(dsn: str, target: SinkTable, what: str, schema: pa.Schema) -> None:
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


def make_marker(dsn: str, target: SinkTable, what: str) -> None:
    """Create the table of micro-batches if it does not exist."""
    with contextlib.closing(connect(dsn)) as connection:
        schema, _ = resolve(connection, target.table, what)
        if _find(connection, marker_name(connection, schema, target.marker)):
            return
        name = marker_name(connection, schema, target.marker)
        create = sql.SQL("CREATE TABLE IF NOT EXISTS {} {}").format(sql.SQL(name), sql.SQL(_MARKER))
        try:
            connection.execute(create)
        except (errors.UniqueViolation, errors.DuplicateTable):
            pass  # another driver created it
        except errors.InsufficientPrivilege as error:
            raise ValueError(
                f"{what}: the table of micro-batches, {name}, does not exist, and this user may "
                f"not create it ({error.diag.message_primary}). Have a user with that right run "
                "this statement, and grant this user SELECT, INSERT and UPDATE on the table: "
                f"{' '.join(create.as_string(connection).split())}"
            ) from error


def resolve(connection: psycopg.Connection[Any], table: str, what: str) -> tuple[str, str]:
    """Return schema and name of a table, or raise ValueError if it does not exist."""
    found = _find(connection, table)
    if found is None:
        raise ValueError(
            f"{what}: table {table} does not exist in database {connection.info.dbname!r} for user "
            f"{connection.info.user!r}; create it, or give its schema, as in shop.orders"
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
