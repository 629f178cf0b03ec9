"""Values that must get into a table of PostgreSQL as they are, or be refused by themselves."""

from __future__ import annotations

import sys
import traceback

import pyarrow as pa
import pytest
from pyspark import cloudpickle

pytest.importorskip("psycopg")

import psycopg
import test_postgres_sink
from accepted_rows import accepted, row_file
from test_postgres_sink import TABLE, execute, refused

cloudpickle.register_pickle_by_value(test_postgres_sink)
cloudpickle.register_pickle_by_value(sys.modules[__name__])

sink = test_postgres_sink.sink  # a fixture

TEXTS = pa.schema([("word", pa.string()), ("n", pa.string())])
#: What a table has that takes no "s3cret", and what is said of it.
REFUSES = {
    "a number": (["CREATE TABLE words (word text UNIQUE, n bigint)"], "SQLSTATE 22P02"),
    "a syntax": (["CREATE TABLE words (word text UNIQUE, n jsonpath)"], "SQLSTATE 42601"),
    "a length": (["CREATE TABLE words (word text UNIQUE, n varchar(3))"], "SQLSTATE 22001"),
    "a check": (
        ["CREATE TABLE words (word text UNIQUE, n text CONSTRAINT short CHECK (n < 'b'))"],
        'violates check constraint "short"',
    ),
    "a column of its own": (
        ["CREATE TABLE words (word text UNIQUE, n text, shop int NOT NULL)"],
        'null value in column "shop"',
    ),
    "an outage": (
        [
            "CREATE TABLE words (word text UNIQUE, n text)",
            """CREATE FUNCTION late() RETURNS trigger LANGUAGE plpgsql AS
            $$BEGIN RAISE 'too late' USING ERRCODE = 'query_canceled'; END$$""",
            "CREATE TRIGGER t BEFORE INSERT ON words FOR EACH ROW EXECUTE FUNCTION late()",
        ],
        "too late",
    ),
}


def shows_no_value(write, says):
    """See that what a sink raises says what is wrong, and none of what it was given."""
    with pytest.raises(Exception, match=says) as told:
        write()
    shown = "".join(traceback.format_exception(told.value))
    assert "s3cret" not in shown
    assert "k3y" not in shown


@pytest.mark.parametrize("keys", [None, "word"])
@pytest.mark.parametrize(("statements", "says"), REFUSES.values(), ids=list(REFUSES))
def test_no_error_shows_a_value(postgres, sink, tmp_path, statements, says, keys):
    execute(postgres, *statements)
    file = row_file(tmp_path, [("k3y", "s3cret ($", None)], schema=TEXTS)
    one = sink(postgres, keys=keys, max_refused=0)
    shows_no_value(lambda: one.write_accepted(accepted([file])), says)


@pytest.mark.parametrize("keys", [None, "word"])
@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII", "UTF8"])
def test_texts_are_the_same_whatever_the_encoding_of_the_database(
    postgres_server, sink, tmp_path, encoding, keys
):
    name = f"{encoding}_{keys}".lower()
    with psycopg.connect(postgres_server.dsn("postgres"), autocommit=True) as connection:
        connection.execute(
            f"CREATE DATABASE {name} ENCODING '{encoding}' LOCALE 'C' TEMPLATE template0"
        )
    dsn = postgres_server.dsn(name) + " client_encoding=LATIN1" * (encoding == "UTF8")
    execute(dsn, TABLE)
    one = sink(dsn, keys=keys)
    file = row_file(tmp_path, [("ü", 1, None), ("€", 2, None), ("c", 3, None)])
    for _ in range(2):
        rejects = one.write_accepted(accepted([file]))
        told = {} if rejects is None else refused(rejects)
        has_no_euro = {(0, 1): "UntranslatableCharacter"} if encoding == "LATIN1" else {}
        assert {at: type(error).__name__ for at, error in told.items()} == has_no_euro
    with psycopg.connect(dsn, client_encoding="utf8") as connection:
        found = connection.execute("SELECT word::bytea FROM words ORDER BY n").fetchall()
    stored = "latin1" if encoding == "LATIN1" else "utf8"
    words = ["ü", "c"] if encoding == "LATIN1" else ["ü", "€", "c"]
    assert [bytes(word).decode(stored) for (word,) in found] == words
