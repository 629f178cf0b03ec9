"""Values that must get into a table of PostgreSQL as they are, or be refused by themselves."""

from __future__ import annotations

import sys

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
