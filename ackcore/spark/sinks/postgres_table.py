"""The properties of a PostgreSQL table, and what may be shown of the errors of a server.

No statement has its values apart: psycopg would look for their places in names, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, TypeAlias

#: Runs a query, and returns the one value that it has, as text.
Ask: TypeAlias = Callable[[str], str | None]


#: Lets no commit return before it is on the server's disk: a checkpoint would go on from one that a
#: crash takes back.  To be asked, once in a session.
DURABLE = (
    "SELECT set_config('synchronous_commit', 'on', false)"
    " WHERE current_setting('synchronous_commit') = 'off'"
)
#: Of SQLSTATE: values that do not fit, and texts that a type cannot parse.
_OF_VALUES = ("22", "42601")
#: Where in the rows of a COPY an error is, as the server says; behind it comes the value.
_COLUMN = re.compile(r"COPY .*, line \d+, column ([^:]+):")


def shown_message(state: str, message: str, context: str | None) -> str:
    """Return what may be shown of an error of the server's: no value of a row.

    Parameters
    ----------
    state, message, context : str
        Its SQLSTATE, and what the server says: not the detail, which has the row.
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
        Its type's name; of a domain, the name of what it is made of.
    is_array : bool
        Whether it is an array.
    generated : bool
        Whether it is always generated.
    needed : bool
        Whether a row must have a value for it.
    """

    kind: str
    is_array: bool
    generated: bool
    needed: bool


def quoted(name: str) -> str:
    """Return a name as an identifier."""
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """Return a text as a literal."""
    escaped = text.replace("'", "''").replace("\\", "\\\\")
    return f"E'{escaped}'" if "\\" in text else f"'{escaped}'"


def columns_of(ask: Ask, table: str) -> dict[str, Column]:
    """Return the columns of a table, which is named as SQL has it, by their names."""
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
    """How rows get into a table.

    Attributes
    ----------
    copies : bool
        Whether COPY writes into it: into no view, and into no table with policies for the user.
    has_policies : bool
        Whether policies apply to the user.
    """

    copies: bool
    has_policies: bool


def way_into(ask: Ask, table: str) -> Way:
    """Return how rows get into a table."""
    found = _lists(
        ask,
        "relkind NOT IN ('v', 'm') AND NOT row_security_active(oid), row_security_active(oid)",
        f"FROM pg_class WHERE oid = to_regclass({literal(table)})",
    )
    return Way(*found[0]) if found else Way(copies=True, has_policies=False)


def nulls_differ(ask: Ask, table: str, keys: Sequence[str]) -> bool:
    """Whether keys may be null, and one that is equals no other."""
    found = unique_indexes(ask, table, keys)
    return any(may_be and not equal for may_be, equal in found) and not any(
        equal for _, equal in found
    )


def unique_indexes(ask: Ask, table: str, keys: Sequence[str]) -> list[tuple[bool, bool]]:
    """Return of each index that makes just these columns unique, for each row and at once, whether
    they may be null, and whether nulls are equal there (NULLS NOT DISTINCT)."""
    found = _lists(
        ask,
        # As JSON: PostgreSQL before 15 has no such column.
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
    """Return the name that the connection of a sink of a checkpoint has in the server."""
    # PostgreSQL cuts long ones, and has a question mark for each character that is not ASCII's.
    plain = len(sink) <= 32 and sink.isascii() and sink.isprintable()
    said = sink if plain else blake2b(sink.encode(), digest_size=8).hexdigest()
    return f"ackcore-{deployment}-{said}"[:63]


def end_others(name: str) -> str:
    """Return the query that ends the other connections of a name, which may hold locks."""
    return (
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name ="
        f" {literal(name)} AND usename = current_user AND datname = current_database()"
        " AND pid <> pg_backend_pid()"
    )
