"""Connections to PostgreSQL, look-ups in its catalog, and the marker table."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, TypeAlias

import psycopg
import pyarrow as pa
from psycopg import errors, sql
from psycopg.conninfo import conninfo_to_dict

from ackcore.spark.sinks.columns import require_columns
from ackcore.spark.sinks.unavailable import unavailable

Connection: TypeAlias = psycopg.Connection[Any]

#: Begins a transaction whose commit waits for the server's disk.  Otherwise a crash could undo a
#: commit on which the checkpoint already relies.  A setting of the session is not enough: a pooler
#: such as PgBouncer may run each transaction in another session.
BEGIN = (
    "BEGIN ISOLATION LEVEL READ COMMITTED; SELECT set_config('synchronous_commit', 'on', true)"
    " WHERE current_setting('synchronous_commit') = 'off'"
)

#: Settings of TCP that a dsn may replace.  By default, the loss of a server whose host or network
#: vanished is noticed after two hours.  Here it takes about a minute.
_TCP: dict[str, Any] = {
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
}


class Column(NamedTuple):
    """A column of a table: its kind, and whether rows may or must have a value for it."""

    is_array: bool  # whether its type is an array
    generated: bool  # whether PostgreSQL always generates its value, so that none can be written
    needed: bool  # whether it is NOT NULL, and only the stream can give it a value


def quoted(name: str) -> str:
    """Return a name, quoted as an SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def columns_of(connection: Connection, table: str) -> dict[str, Column]:
    """Return a table's columns by name, in order; {} if there is no table of this SQL name."""
    found = connection.execute(
        "SELECT attname::text, typcategory = 'A', attgenerated <> '' OR attidentity = 'a',"
        # A trigger, a rule, or the default of a domain or a partition may give a value.
        " attnotnull AND NOT atthasdef AND attidentity = '' AND typdefault IS NULL"
        " AND relkind = 'r' AND NOT relhastriggers AND NOT relhasrules"
        " FROM pg_attribute JOIN pg_type ON pg_type.oid = atttypid"
        " JOIN pg_class ON pg_class.oid = attrelid"
        " WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped ORDER BY attnum",
        [table],
    )
    return {name: Column(*about) for name, *about in found}


def takes_copy(connection: Connection, table: str) -> bool:
    """Return whether COPY writes rows into a table as INSERT does; ``table`` is its name in SQL.

    COPY writes into no view, ignores rules, and fails if row security policies apply to the user.
    The result is also True if there is no such table.
    """
    found = connection.execute(
        # A view has a rule, too.
        "SELECT NOT relhasrules AND NOT row_security_active(oid)"
        " FROM pg_class WHERE oid = to_regclass(%s)",
        [table],
    ).fetchone()
    return found is None or bool(found[0])


def unique_indexes(
    connection: Connection, table: str, keys: Sequence[str]
) -> list[tuple[bool, bool]]:
    """Return two flags for each unique index on exactly these columns, in any order.

    The flags are whether a column may be null, and whether nulls are equal (NULLS NOT DISTINCT).
    Partial, deferrable and invalid indexes, and those with expressions, are left out.
    """
    found = connection.execute(
        # Through JSON, because PostgreSQL before 15 does not have this column.
        "SELECT array_agg(attname::text), bool_or(NOT attnotnull),"
        " bool_or(coalesce(to_jsonb(pg_index) ->> 'indnullsnotdistinct', 'false')::bool)"
        " FROM pg_index"
        " JOIN pg_attribute ON attrelid = indrelid AND attnum = ANY (indkey[:indnkeyatts - 1])"
        " WHERE indrelid = to_regclass(%s) AND indisunique AND indimmediate"
        " AND indisvalid AND indpred IS NULL AND indexprs IS NULL GROUP BY indexrelid",
        [table],
    )
    return [(may_be, equal) for names, may_be, equal in found if set(names) == set(keys)]


def indexes_of_defaults(connection: Connection, table: str, names: Sequence[str]) -> set[str]:
    """Return the names of the unique indexes of a table in which a row gets numbers of sequences.

    At least one column of such an index has a sequence, and the others have defaults. None of them
    is among ``names``, the stream's columns. The indexes of the table's partitions are included.
    """
    found = connection.execute(
        "SELECT relname FROM pg_index JOIN pg_class ON pg_class.oid = indexrelid"
        " WHERE (indrelid = to_regclass(%s) OR indrelid IN"
        " (SELECT relid FROM pg_partition_tree(to_regclass(%s))))"
        " AND indisunique AND indexprs IS NULL AND indpred IS NULL"
        " AND NOT EXISTS (SELECT 1 FROM pg_attribute"
        " WHERE attrelid = indrelid AND attnum = ANY (indkey[:indnkeyatts - 1]) AND (attname ="
        " ANY (%s) OR attgenerated <> '' OR NOT (atthasdef OR attidentity <> '')))"
        " AND EXISTS (SELECT 1 FROM pg_attribute"
        " LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum"
        " WHERE attrelid = indrelid AND attnum = ANY (indkey[:indnkeyatts - 1])"
        " AND (attidentity <> '' OR position('nextval(' IN pg_get_expr(adbin, adrelid)) > 0))",
        [table, table, list(names)],
    )
    return {name for (name,) in found}


def session_name(deployment: str, sink: str) -> str:
    """Return the application name for the connections of one sink of one checkpoint."""
    # PostgreSQL cuts long names and replaces each character outside of ASCII by a question mark.
    plain = len(sink) <= 32 and sink.isascii() and sink.isprintable()
    said = sink if plain else blake2b(sink.encode(), digest_size=8).hexdigest()
    return f"ackcore-{deployment}-{said}"[:63]


def end_others(connection: Connection, name: str, marker: str) -> None:
    """End this user's other connections with an application name that are idle or lock a table.

    ``marker``: the name of that table in SQL, in which a driver first locks a row. Other
    connections are left open: behind a pooler, a connection may keep the application name in a
    transaction of another program.
    """
    connection.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity a WHERE application_name = %s"
        " AND usename = current_user AND datname = current_database() AND pid <> pg_backend_pid()"
        " AND (state = 'idle' OR EXISTS (SELECT 1 FROM pg_locks WHERE pg_locks.pid = a.pid"
        " AND relation = to_regclass(%s)))",
        [name, marker],
    )


_MARKER = """(
    deployment text NOT NULL,
    sink text NOT NULL,
    target text NOT NULL,
    batch_id bigint NOT NULL,
    content text NOT NULL,
    written_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (deployment, sink, target)
)"""


class SinkTable(NamedTuple):
    """The arguments of `to_postgres` about tables: the table, its keys and the marker table."""

    table: str  # the name of the table to write, in SQL
    keys: tuple[str, ...]  # its key columns
    marker: str  # the marker table, which has the number of each sink's last micro-batch


def where(dsn: str) -> str:
    """Return host, port and database of a connection string for errors, without secrets.

    Those that the string lacks are left out; "" if it has none. Raises ValueError if libpq cannot
    parse the string.
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


_CONNECTION = (
    "Check that the server runs and can be reached from the driver, that the database exists, and "
    "that the user may log in. A password may be in dsn or in ~/.pgpass"
)
#: Advice by the beginning of an error's SQLSTATE, which a failed connection does not have.
_WAYS_OUT = {
    "25P03": "Set a longer idle_in_transaction_session_timeout in dsn's options",
    "25P04": "Set a longer transaction_timeout in dsn's options",
    "25006": "Connect to a server that takes writes (target_session_attrs=read-write in dsn), and "
    "let this user write (default_transaction_read_only)",
    "40": "Let the other session lock the rows in the same order, or write at another time",
    "42501": "Grant this user SELECT, INSERT and UPDATE on the table and on the marker table, and "
    "TEMPORARY on the database",
    "42": "Create or change the table, or have the bolt emit other columns",
    "3F": "Create the schema, or name another one",
    "55P03": "End the session that holds the lock, or set a longer lock_timeout in dsn's options",
    "57014": "Set a longer statement_timeout in dsn's options, or find out who cancelled the "
    "statement",
    "53100": "Free space on the server",
    "53": "Give the server more of this resource",
    **dict.fromkeys(("08", "28", "3D", "57P"), _CONNECTION),
    "": "Change the table, the server or its settings, as this error says",
}


#: Errors of the server or the login, and of missing objects or rights.
_UNAVAILABLE = (
    psycopg.OperationalError,
    psycopg.InterfaceError,
    errors.InsufficientPrivilege,
    errors.UndefinedTable,
    errors.UndefinedColumn,
    errors.InvalidSchemaName,
    errors.ReadOnlySqlTransaction,
)
#: SQLSTATEs of time-outs that end the session; psycopg 3.2.1 has no class for the second one.
_TIMEOUTS = ("25P03", "25P04")


@contextlib.contextmanager
def as_unavailable(sink: str, table: str, shown: str) -> Iterator[None]:
    """Raise errors of the server or the login, and missing objects or rights, as `SinkUnavailable`.

    ``sink``, ``table``: the names of the sink and its table. ``shown``: the server, as `where`
    returns it.
    """
    try:
        yield
    except psycopg.Error as error:
        state = error.sqlstate or "08"
        if not (isinstance(error, _UNAVAILABLE) or state in _TIMEOUTS):
            raise
        way_out = next(text for start, text in _WAYS_OUT.items() if state.startswith(start))
        # It may be a part of the password: see `where`.
        said = re.sub(r"""[^\s'"(]*@""", "", str(error))
        at = shown or "the server that PGHOST and PGPORT name"
        raise unavailable(
            sink, f"table {table} at {at}", f"{type(error).__name__}: {said}", way_out
        ) from error


def connect(dsn: str, name: str = "ackcore") -> Connection:
    """Connect in autocommit mode; transactions are READ COMMITTED. ``name``: application name."""
    connection = psycopg.connect(
        dsn,
        autocommit=True,
        application_name=name,
        prepare_threshold=None,
        **{name: value for name, value in _TCP.items() if name not in conninfo_to_dict(dsn)},
        # Arrow's texts are UTF-8; by default libpq takes the database's encoding.
        client_encoding="utf8",
    )
    connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
    return connection


def check_table(dsn: str, target: SinkTable, what: str, schema: pa.Schema) -> None:
    """Connect, and raise ValueError if a sink's table cannot take the stream's rows.

    It must exist, have all columns of the stream, of which none is generated, need no other
    column, and have a unique index on the keys. ``what``: the beginning of the message.
    """
    with contextlib.closing(connect(dsn)) as connection:
        table = resolve(connection, target.table, what)
        full_name = ".".join(map(quoted, table))
        columns = columns_of(connection, full_name)
        require_columns(what, f"table {target.table}", schema.names, list(columns))
        for name in schema.names:
            if columns[name].generated:
                raise ValueError(
                    f"{what}: column {name!r} of table {target.table} cannot be written, because "
                    "its value is always generated; have the bolt emit no such column"
                )
        for name, column in columns.items():
            if column.needed and name not in schema.names:
                raise ValueError(
                    f"{what}: column {name!r} of table {target.table} is NOT NULL without a "
                    "default, and the stream does not have it; have the bolt emit it, or make it "
                    f'nullable (ALTER TABLE ... ALTER COLUMN "{name}" DROP NOT NULL)'
                )
        if target.keys and not unique_indexes(connection, full_name, target.keys):
            keys = ", ".join(f'"{key}"' for key in target.keys)
            raise ValueError(
                f"{what}: keys need a unique index, and table {target.table} has none on exactly "
                f"{keys} (partial, deferrable and invalid ones do not count); CREATE UNIQUE INDEX "
                f"ON {target.table} ({keys}) makes one"
            )


def make_marker(dsn: str, target: SinkTable, what: str) -> None:
    """Create the marker table if it does not exist.

    Raises ValueError if this user may not create it, or the sink's table does not exist.
    """
    with contextlib.closing(connect(dsn)) as connection:
        schema, _ = resolve(connection, target.table, what)
        name = marker_name(schema, target.marker)
        if _find(connection, name):
            return
        create = sql.SQL("CREATE TABLE IF NOT EXISTS {} {}").format(sql.SQL(name), sql.SQL(_MARKER))
        try:
            connection.execute(create)
        except (errors.UniqueViolation, errors.DuplicateTable):
            pass  # another driver created it
        except errors.InsufficientPrivilege as error:
            raise ValueError(
                f"{what}: the marker table {name}, which has the numbers of written micro-batches, "
                f"does not exist, and this user may not create it ({error.diag.message_primary}). "
                "Have a user with that right run this statement, and grant this user SELECT, "
                "INSERT and UPDATE on the table: "
                f"{' '.join(create.as_string(connection).split())}"
            ) from error


def resolve(connection: Connection, table: str, what: str) -> tuple[str, str]:
    """Return schema and name of a table; raise ValueError if it does not exist or is no SQL name.

    ``table``: the name in SQL, with or without a schema. ``what``: the beginning of the message.
    """
    found = _find(connection, table)
    if found is None:
        raise ValueError(
            f"{what}: table {table} does not exist in database {connection.info.dbname!r} for user "
            f"{connection.info.user!r}; create it, or give its schema, as in shop.orders"
            + ", or put its name in double quotes, as it has capitals"
            * (table != table.lower() and '"' not in table)
        )
    return found


def _find(connection: Connection, table: str) -> tuple[str, str] | None:
    """Return schema and name of a table, or None if it does not exist.

    Raises ValueError if ``table`` is not a name in SQL.
    """
    try:
        found = connection.execute(
            "SELECT nspname, relname FROM pg_class JOIN pg_namespace"
            " ON pg_namespace.oid = relnamespace WHERE pg_class.oid = to_regclass(%s)",
            [table],
        ).fetchone()
    except (errors.SyntaxError, errors.InvalidName, errors.FeatureNotSupported) as error:
        raise ValueError(
            f"table and marker must be names of tables in SQL, such as shop.orders, got {table!r} "
            f"({error.diag.message_primary}); put parts with other characters in double quotes"
        ) from error
    return None if found is None else (found[0], found[1])


def marker_name(schema: str, marker: str) -> str:
    """Return the marker table's name in SQL; ``schema``: its schema if ``marker`` names none."""
    return marker if "." in marker else f"{quoted(schema)}.{marker}"
