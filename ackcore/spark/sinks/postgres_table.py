"""The properties of a PostgreSQL table, and error messages without values of rows.

Values are literals in the statements: psycopg would look for parameters in names, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, TypeAlias

#: Runs a query and returns its single value as text.
Ask: TypeAlias = Callable[[str], str | None]


#: Makes each commit of the session wait for the server's disk.  Otherwise a crash could undo a
#: commit on which the checkpoint already relies.  Run once per session.
DURABLE = (
    "SELECT set_config('synchronous_commit', 'on', false)"
    " WHERE current_setting('synchronous_commit') = 'off'"
)
#: SQLSTATEs of values that do not fit, and of texts that a type cannot parse.
_OF_VALUES = ("22", "42601")
#: The position of an error in a COPY, in the server's context; the value follows it.
_COLUMN = re.compile(r"COPY .*, line \d+, column ([^:]+):")


def shown_message(state: str, message: str, context: str | None) -> str:
    """Return a server's error without values of rows.

    Parameters
    ----------
    state, message, context : str
        The error's SQLSTATE, message and context.  The detail is left out, since it shows the row.
    """
    if not state.startswith(_OF_VALUES):
        return message
    column = _COLUMN.match(context or "")
    return f"SQLSTATE {state}" + (f" in column {column[1]!r}" if column else "")


class Column(NamedTuple):
    """A column of a table.

    Attributes
    ----------
    kind : str
        The name of its type; for a domain, the name of the base type.
    is_array : bool
        Whether its type is an array.
    generated : bool
        Whether its value is always generated.
    needed : bool
        Whether a row must have a value for it.
    """

    kind: str
    is_array: bool
    generated: bool
    needed: bool


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
    """The way in which rows are written into a table.

    Attributes
    ----------
    copies : bool
        Whether COPY can write into it.  It cannot for a view, or if policies apply to the user.
    has_policies : bool
        Whether policies apply to the user.
    """

    copies: bool
    has_policies: bool


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

    The flags say whether a column may be null, and whether nulls are equal (NULLS NOT DISTINCT).
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
