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
from accepted_rows import accepted, columns_file, row_file, written_without_refused
from test_postgres_sink import TABLE, execute

from ackcore._arrow.shown import text_of
from ackcore.spark import SinkUnavailable
from ackcore.spark.sinks import rejects
from ackcore.spark.sinks.sink import check_sink
from ackcore.spark.sinks.unavailable import names_no_object, shown_message
from ackcore.spark.tasks.row_files import ROOT

cloudpickle.register_pickle_by_value(test_postgres_sink)
cloudpickle.register_pickle_by_value(sys.modules[__name__])

sink = test_postgres_sink.sink  # a fixture

#: By PostgreSQL's texts, days since 1970: of years that Python, Arrow or both have no text for.
DAYS = {
    "2024-02-29": 19_782,
    "0044-03-15 BC": -735_160,
    "0001-12-31 BC": -719_163,
    "0001-01-01": -719_162,
    "10000-01-01": 2_932_897,
    "40000-06-15": 13_890_338,
}
DAY_US = 86_400_000_000
FAR = {
    "day": ("date", pa.date32(), 1),
    "plain": ("timestamp", pa.timestamp("us"), DAY_US),
    "instant": ("timestamptz", pa.timestamp("us", "Europe/Berlin"), DAY_US),
    "second": ("timestamp", pa.timestamp("s"), 86_400),
    "days": ("date[]", pa.list_(pa.date32()), 1),
    "thing": ("jsonb", pa.struct([("x", pa.timestamp("us", "UTC"))]), DAY_US),
}


@pytest.mark.parametrize("keys", [None, "id"])
def test_dates_of_all_years_come_through(postgres, sink, tmp_path, keys):
    """None is refused, and none keeps the others from being written."""
    kinds = ", ".join(f"{name} {sql}" for name, (sql, _, _) in FAR.items())
    execute(postgres, f"CREATE TABLE words (id text PRIMARY KEY, {kinds})")
    schema = pa.schema([("id", pa.string()), *((n, kind) for n, (_, kind, _) in FAR.items())])
    wraps = {"days": lambda n: [n, None], "thing": lambda n: {"x": n}}
    rows = [
        (text, *(wraps.get(name, int)(day * unit) for name, (_, _, unit) in FAR.items()), None)
        for text, day in DAYS.items()
    ]
    rows.append(("none", *[None] * len(FAR), None))
    one = sink(postgres, keys=keys)
    check_sink("count", one, schema)
    assert one.write(accepted([row_file(tmp_path, rows, schema=schema, batch=9)])) is None
    found = execute(
        postgres,
        "SET TIME ZONE 'UTC'",
        """SELECT id FROM words WHERE id <> 'none' AND day = id::date AND plain = id::date
        AND instant = id::date AND second = id::date AND days = ARRAY[id::date, NULL]
        AND (thing ->> 'x')::timestamptz = id::date OR id = 'none' AND thing IS NULL""",
    )
    assert {text for (text,) in found} == {*DAYS, "none"}


TEXTS = pa.schema([("word", pa.string()), ("n", pa.string())])
#: What a table has that takes no "s3cret", and what is said of it.
REFUSES = {
    "a number": (["CREATE TABLE words (word text UNIQUE, n bigint)"], "SQLSTATE 22P02"),
    "a syntax": (["CREATE TABLE words (word text UNIQUE, n jsonpath)"], "SQLSTATE 42601"),
    "a name": (["CREATE TABLE words (word text UNIQUE, n regclass)"], "SQLSTATE 42602"),
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
def test_no_error_shows_a_value(postgres, sink, tmp_path, monkeypatch, statements, says, keys):
    monkeypatch.setattr(rejects, "MAX_REFUSED", 0)
    execute(postgres, *statements)
    file = row_file(tmp_path, [("k3y", "s3cret ($", None)], schema=TEXTS)
    one = sink(postgres, keys=keys)
    shows_no_value(lambda: one.write(accepted([file])), says)


NAMES = {"regclass": "pg_class", "regtype": "bigint", "regrole": "pg_monitor", "regproc": "now"}


@pytest.mark.parametrize("keys", [None, "word"])
@pytest.mark.parametrize("kind", NAMES)
def test_a_value_that_names_no_object_is_refused_by_itself(postgres, sink, tmp_path, kind, keys):
    execute(postgres, f"CREATE TABLE words (word text UNIQUE, n {kind})")
    some = [("a", NAMES[kind], None), ("b", "k3y", None), ("c", "k3y.s3cret", None)]
    one = sink(postgres, keys=keys)
    why = written_without_refused(one, accepted([row_file(tmp_path, some, schema=TEXTS)]))
    assert list(why) == [(0, 1), (0, 2)]
    assert execute(postgres, "SELECT word FROM words") == [("a",)]


@pytest.mark.parametrize(
    ("context", "column"),
    [
        ('COPY a, b, line 3, column n: "s3cret, 1, x: y"', "column n"),
        ("COPY words, Zeile 3, Spalte n: »s3cret«", "Spalte n"),
        ("COPY words, ligne 3, colonne n : « s3cret »", "colonne n"),
        ('wordsのCOPY、行 3、列 n: "s3cret"', "列 n"),
        ('words 복사, 3번째 줄, n 열: "s3cret"', "n 열"),
    ],
)
def test_the_column_of_a_value_is_found_in_each_language(context, column):
    """The texts are those of PostgreSQL's translations: a server may have another lc_messages."""
    assert names_no_object("42P01", context)
    assert shown_message("42P01", "s3cret", context) == f"SQLSTATE 42P01 in {column}"


@pytest.mark.parametrize(
    "context", [None, "COPY words, line 3", "COPY words, Zeile 3: »a, 1, b: c«"]
)
def test_an_error_without_a_column_is_of_no_value(context):
    assert not names_no_object("42P01", context)


@pytest.mark.parametrize("keys", [None, "word"])
def test_a_table_that_is_missing_refuses_no_row(postgres, sink, tmp_path, keys):
    """Neither the sink's own table nor that of a trigger."""
    execute(
        postgres,
        "CREATE TABLE words (word text UNIQUE, n regclass)",
        """CREATE FUNCTION noted() RETURNS trigger LANGUAGE plpgsql AS
        $$BEGIN INSERT INTO missing VALUES (1); RETURN NEW; END$$""",
        "CREATE TRIGGER t BEFORE INSERT ON words FOR EACH ROW EXECUTE FUNCTION noted()",
    )
    batch = accepted([row_file(tmp_path, [("a", "pg_class", None)], schema=TEXTS)])
    one = sink(postgres, keys=keys)
    with pytest.raises(SinkUnavailable, match='relation "missing" does not exist'):
        one.write(batch)
    execute(postgres, "DROP TABLE words")
    with pytest.raises(ValueError, match="table words does not exist"):
        one.write(batch)


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
    if encoding == "LATIN1":
        ((at, error),) = written_without_refused(one, accepted([file])).items()
        assert (at, type(error).__name__) == ((0, 1), "UntranslatableCharacter")
    else:
        assert one.write(accepted([file])) is None
    with psycopg.connect(dsn, client_encoding="utf8") as connection:
        found = connection.execute("SELECT word::bytea FROM words ORDER BY n").fetchall()
    stored = "latin1" if encoding == "LATIN1" else "utf8"
    words = ["ü", "c"] if encoding == "LATIN1" else ["ü", "€", "c"]
    assert [bytes(word).decode(stored) for (word,) in found] == words


@pytest.mark.parametrize("keys", [None, "id"])
@pytest.mark.parametrize("nested", [False, True])
def test_a_row_whose_text_is_not_utf8_is_refused_by_itself(postgres, sink, tmp_path, keys, nested):
    """In a text column, and within JSON."""
    execute(postgres, f"CREATE TABLE words (id int PRIMARY KEY, t {'jsonb' if nested else 'text'})")
    texts = text_of([b"plain", b"caf\xe9", b"more"])
    column = pa.StructArray.from_arrays([texts], ["x"]) if nested else texts
    schema = pa.schema([("id", pa.int32()), ("t", column.type)])
    one = sink(postgres, keys=keys)
    check_sink("count", one, schema)
    whole = schema.append(pa.field(ROOT, pa.int64()))
    file = columns_file(tmp_path, whole, [[1, 2, 3], column, [1, 2, 3]])
    assert list(written_without_refused(one, accepted([file]))) == [(0, 1)]
    assert [row[0] for row in execute(postgres, "SELECT id FROM words ORDER BY id")] == [1, 3]
