"""A table of PostgreSQL as a sink: rows of ACKED records, each micro-batch once."""

from __future__ import annotations

import datetime
import decimal
import math
import sys
import threading
from contextlib import closing

import numpy as np
import pyarrow as pa
import pytest
from pyspark import cloudpickle

pytest.importorskip("psycopg")

import postgres_server
import psycopg
from accepted_rows import WORDS, accepted, kinds, release_all, row_file, written_without_refused
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_disk import SmallDisk

from ackcore.spark import SinkRejects, SinkUnavailable, to_postgres
from ackcore.spark.base.errors import CheckpointForeign
from ackcore.spark.sinks import postgres_rows
from ackcore.spark.sinks import sink as sink_module
from ackcore.spark.sinks.sink import check_sink

cloudpickle.register_pickle_by_value(sys.modules[__name__])

TABLE = "CREATE TABLE words (word text PRIMARY KEY, n bigint CHECK (n < 100))"


def execute(dsn, *statements):
    with closing(psycopg.connect(dsn, autocommit=True)) as connection:
        for statement in statements:
            cursor = connection.execute(statement)
        return cursor.fetchall() if cursor.description else None


def words(dsn):
    return dict(execute(dsn, "SELECT word, n FROM words"))


@pytest.fixture
def sink():
    """``sink(dsn, table, ...)``, claimed; closed in the end."""
    made = []

    def sink(dsn, table="words", **arguments):
        made.append(to_postgres(dsn, table, **arguments))
        made[-1].claim("count", "abc", "/cp")
        return made[-1]

    yield sink
    for one in made:
        release_all(one)


# -- what is refused at the start ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"dsn": 3}, TypeError, "dsn must be a str, got int"),
        ({"dsn": "passwrd=hunter2"}, ValueError, r"dsn must be a connection string of libpq"),
        ({"table": ""}, ValueError, "table must be the name of a table, got ''"),
        ({"keys": [3]}, TypeError, r"keys must be names of columns, got \[3\]"),
        ({"keys": []}, ValueError, "keys must name at least one column; omit it"),
    ],
)
def test_arguments_are_refused(arguments, error, says):
    with pytest.raises(error, match=says) as raised:
        to_postgres(**{"dsn": "", "table": "t", **arguments})
    assert "hunter2" not in str(raised.value)


def test_a_password_is_not_shown():
    one = to_postgres("postgresql://etl:hunter2@db:5432/shop", "t")
    assert repr(one) == "to_postgres('host=db port=5432 dbname=shop', 't')"


@pytest.mark.parametrize(
    ("table", "arguments", "says"),
    [
        ("Shop", {}, "shop.orders, or put its name in double quotes, as it has capitals"),
        ('"Shop"', {}, "give its schema, as in shop.orders$"),
        ("a.b.c", {}, r"table and marker must be names of tables in SQL, .* got 'a\.b\.c' \("),
        ("a.b.c.d", {}, r"table and marker must be names of tables in SQL, .* got 'a\.b\.c\.d' \("),
        ("words", {}, r"sink 'count': table words does not exist in database 'db\d+' for user"),
        (
            "lacking",
            {},
            r"table lacking has no column 'n', it has word, at; add it .*COLUMN \"n\" \.\.\.",
        ),
        ("made", {}, "column 'n' of table made .* is always generated; have the bolt emit no"),
        (
            "keyed",
            {"keys": "n"},
            r"keys need a unique index, and table keyed .*CREATE UNIQUE INDEX ON keyed \(\"n\"\)",
        ),
        ("keyed", {"keys": "m"}, "keys must be among the stream's columns word, n, got 'm'"),
        ("late", {"keys": "n"}, "keys need a unique index"),
        ("part", {"keys": "n"}, "keys need a unique index"),
        ("needy", {}, "column 'at' of table needy is NOT NULL without a default, and the stream"),
    ],
)
def test_tables_are_refused_before_anything_runs(postgres, table, arguments, says):
    execute(
        postgres,
        "CREATE TABLE lacking (word text, at date)",
        "CREATE TABLE made (word text, n bigint GENERATED ALWAYS AS IDENTITY)",
        "CREATE TABLE keyed (word text, n bigint, UNIQUE (word, n))",
        "CREATE TABLE late (word text, n bigint UNIQUE DEFERRABLE)",
        "CREATE TABLE part (word text, n bigint)",
        "CREATE UNIQUE INDEX ON part (n) WHERE n > 0",
        "CREATE TABLE needy (word text, n bigint, at date NOT NULL)",
    )
    with pytest.raises(ValueError, match=says):
        check_sink("count", to_postgres(postgres, table, **arguments), WORDS)


def test_columns_that_get_values_of_their_own_are_not_needed(postgres, sink, files):
    """From a default, an identity, a domain or a trigger; the stream lacks all of them."""
    execute(
        postgres,
        "CREATE DOMAIN always AS int DEFAULT 3",
        """CREATE TABLE words (word text, n bigint, a int NOT NULL DEFAULT 1, b always NOT NULL,
        c int NOT NULL GENERATED BY DEFAULT AS IDENTITY,
        d int NOT NULL GENERATED ALWAYS AS (n::int + 1) STORED, e serial)""",
        "CREATE TABLE filled (word text, n bigint, at int NOT NULL)",
        """CREATE FUNCTION fill() RETURNS trigger LANGUAGE plpgsql AS
        $$BEGIN NEW.at = 7; RETURN NEW; END$$""",
        "CREATE TRIGGER t BEFORE INSERT ON filled FOR EACH ROW EXECUTE FUNCTION fill()",
    )
    for table in ("words", "filled"):
        one = sink(postgres, table)
        check_sink("count", one, WORDS)
        assert one.write(accepted(files)) is None


def test_what_has_no_text_for_postgres_is_refused(postgres):
    one = to_postgres(postgres, "words")
    at = pa.timestamp("ns")
    for kind, instead in (
        (at, "timestamp"),
        (pa.list_(at), "timestamp"),
        (pa.list_(pa.list_(at)), "timestamp"),
        (pa.time64("ns"), "time64"),
    ):
        says = rf"column 'n' is .*cannot store nanoseconds; have the bolt emit {instead}\('us'\)"
        with pytest.raises(TypeError, match=says):
            check_sink("count", one, pa.schema([("n", kind)]))
    says = r"column 'n' is duration\[us\], which cannot be written as text"
    with pytest.raises(TypeError, match=says):
        check_sink("count", one, pa.schema([("n", pa.duration("us"))]))


def test_who_may_not_make_the_marker_is_told_what_to_run(postgres, postgres_server):
    execute(postgres, TABLE, "CREATE ROLE reader LOGIN", "GRANT ALL ON words TO reader")
    execute(postgres, "CREATE SCHEMA etl")
    as_reader = postgres.replace("user=ackcore", "user=reader")
    says = r"may not create it .permission denied.*CREATE TABLE"
    with pytest.raises(ValueError, match=says) as told:
        to_postgres(as_reader, "words").claim("count", "abc", "/cp")
    way_out = str(told.value).partition("the table: ")[2]
    execute(postgres, way_out, "GRANT ALL ON ackcore_batches TO reader")
    to_postgres(as_reader, "words").claim("count", "abc", "/cp")
    to_postgres(postgres, "words", marker="etl.done").claim("count", "abc", "/cp")
    assert execute(postgres, "SELECT count(*) FROM etl.done") == [(0,)]


# -- what is written -------------------------------------------------------------------------------


def test_columns_that_the_stream_does_not_have_stay(postgres, sink, files):
    """And a column that the table gained while the query ran gets its default."""
    execute(postgres, TABLE, "INSERT INTO words VALUES ('a', 0), ('z', 9)")
    one = sink(postgres, keys="word")
    execute(postgres, "ALTER TABLE words ADD note text DEFAULT 'new'")
    execute(postgres, "UPDATE words SET note = 'old'")
    one.write(accepted(files))
    found = sorted(execute(postgres, "SELECT * FROM words"))
    assert found == [("a", 5, "old"), ("c", 3, "new"), ("d", 4, "new"), ("z", 9, "old")]


def test_rows_that_are_nothing_but_keys_are_there_once(postgres, sink, files, tmp_path):
    execute(postgres, "CREATE TABLE words (word text, n bigint, PRIMARY KEY (n, word))")
    one = sink(postgres, keys=("word", "n"))
    one.write(accepted(files))
    one.write(accepted(files, 1, nonacked=()))
    assert len(execute(postgres, "SELECT * FROM words")) == 5


VALUES = {
    "text": ("text", pa.string(), ["", 'a"b\n,\\.\n\\N', "\\.", None, "ü"]),
    "large": ("varchar(5)", pa.large_string(), ["abc", None, "", "x", "NULL"]),
    "bytes": ("bytea", pa.binary(), [b"\x00\xff\\", b"", None, b"a", b"\n"]),
    "small": ("smallint", pa.int8(), [-128, 127, None, 0, 1]),
    "big": ("numeric", pa.uint64(), [2**64 - 1, 0, None, 1, 2]),
    "float": ("float8", pa.float64(), [0.1, math.inf, None, 5e-324, -0.0]),
    "flag": ("boolean", pa.bool_(), [True, False, None, True, False]),
    "money": ("numeric(10, 2)", pa.decimal128(10, 2), [decimal.Decimal("1.50"), None] * 2 + [None]),
    "day": ("date", pa.date32(), [datetime.date(2024, 2, 29), None] * 2 + [None]),
    "time": ("time", pa.time64("us"), [datetime.time(1, 2, 3, 4), None] * 2 + [None]),
    "plain": ("timestamp", pa.timestamp("us"), [datetime.datetime(2024, 5, 1, 12, 0, 0, 7)] * 5),
    "instant": (
        "timestamptz",
        pa.timestamp("us", "Europe/Berlin"),
        [datetime.datetime(2024, 5, 1, 12, tzinfo=datetime.UTC)] * 5,
    ),
    "list": ("text[]", pa.list_(pa.string()), [["a", None, '"\\,{}'], [], None, ["NULL"], [""]]),
    "nested": ("int[]", pa.list_(pa.list_(pa.int32())), [[[1, 2], [3, None]], [], None, [[1]], []]),
    "days": ("date[]", pa.list_(pa.date32()), [[datetime.date(2024, 5, 1)], None] * 2 + [[]]),
    "struct": ("jsonb", pa.struct([("x", pa.int8())]), [{"x": 1}, None, {"x": None}, None, None]),
    "items": ("jsonb", pa.list_(pa.int8()), [[1, None], None, [], None, None]),
    "map": ("json", pa.map_(pa.string(), pa.int64()), [[("k", 1)], None, [], None, None]),
    "none": ("int", pa.null(), [None] * 5),
}


@pytest.mark.parametrize("keys", [None, "id"])
def test_values_of_every_type_come_through(postgres, sink, tmp_path, keys):
    columns_of = ", ".join(f'"{name}" {sql}' for name, (sql, _, _) in VALUES.items())
    execute(postgres, f"CREATE TABLE words (id int PRIMARY KEY, {columns_of})")
    kinds_of = [(name, kind) for name, (_, kind, _) in VALUES.items()]
    schema = pa.schema([("id", pa.int32()), *kinds_of])
    columns = [values for _, _, values in VALUES.values()]
    rows = [(n, *values, None) for n, values in enumerate(zip(*columns, strict=True))]
    one = sink(postgres, keys=keys)
    check_sink("count", one, schema)
    assert one.write(accepted([row_file(tmp_path, rows, schema=schema, batch=5)])) is None
    with closing(psycopg.connect(postgres)) as connection:
        connection.execute("SET TIME ZONE 'UTC'")
        names = ", ".join(f'"{name}"' for name in VALUES)
        found = connection.execute(f"SELECT {names} FROM words ORDER BY id").fetchall()
    expected = [list(row[1:-1]) for row in rows]
    at = list(VALUES).index("map")
    for row in expected:
        row[at] = None if row[at] is None else dict(row[at])
    assert [list(row) for row in found] == expected


# -- rows that are refused -------------------------------------------------------------------------


CONSTRAINED = """CREATE TABLE words (
    word varchar(5) PRIMARY KEY, n smallint NOT NULL CHECK (n < 100) REFERENCES numbers DEFERRABLE
    INITIALLY DEFERRED)"""
#: Three that are taken, and one for each kind of refusal.
MIXED = [("a", 1), ("b", 2), ("toolong", 1), ("c", 40_000), ("d", 100), ("e", None), ("f", 7)]
MIXED += [("g\0", 1), (None, 1), ("h", 2)]
WHY = {2: "StringDataRightTruncation", 3: "NumericValueOutOfRange", 4: "CheckViolation"}
WHY |= {5: "NotNullViolation", 6: "ForeignKeyViolation", 8: "NotNullViolation"}
WHY[7] = "CharacterNotInRepertoire"


@pytest.mark.parametrize("keys", [None, "word"])
def test_rows_are_refused_one_by_one_and_the_others_written(postgres, sink, tmp_path, keys):
    execute(
        postgres,
        "CREATE TABLE numbers (n smallint PRIMARY KEY)",
        "INSERT INTO numbers VALUES (1), (2)",
        CONSTRAINED,
    )
    first = row_file(tmp_path, [("y", 1, 11), ("z", 1, 12)])
    second = row_file(tmp_path, [(*row, 10) for row in MIXED], 1)
    one = sink(postgres, keys=keys)
    told = written_without_refused(one, accepted([first, second]))
    assert kinds(told) == {(1, place): name for place, name in WHY.items()}
    assert 'violates foreign key constraint "words_n_fkey" (Key (n)=(7) is not' in str(told[1, 6])
    assert words(postgres) == {"z": 1, "a": 1, "b": 2, "h": 2}
    # The next micro-batch may have fewer files, and so may that of an older checkpoint.
    few = [row_file(tmp_path, [("i", 2, 10)], 2)]
    assert one.write(accepted(few, 1)) is None
    with pytest.raises(CheckpointForeign, match="is at micro-batch 0"):
        one.write(accepted(few, 0))


def test_a_row_that_is_there_is_refused_without_keys(postgres, sink, files):
    execute(postgres, TABLE, "INSERT INTO words VALUES ('c', 0)")
    one, batch = sink(postgres), accepted(files)
    with pytest.raises(SinkRejects):
        one.write(batch)
    assert one._live.get(batch.sink, batch.deployment) is not None  # for the call without them
    told = written_without_refused(one, batch)
    assert kinds(told) == dict.fromkeys([(0, 2), (1, 1)], "UniqueViolation")
    assert words(postgres) == {"a": 1, "c": 0, "d": 4}


rows_of_words = st.lists(
    st.tuples(st.sampled_from("abcdef"), st.integers(90, 105), st.sampled_from([None, 10, 11])),
    min_size=1,
    max_size=30,
)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batches=st.lists(rows_of_words, min_size=1, max_size=3), chunk=st.integers(1, 8))
def test_upserts_are_those_of_a_dict(postgres, sink, tmp_path, monkeypatch, batches, chunk):
    monkeypatch.setattr(postgres_rows, "_CHUNK", chunk)
    execute(postgres, "DROP TABLE IF EXISTS words, ackcore_batches", TABLE)
    one = sink(postgres, keys="word")
    expected = {}
    for number, rows in enumerate(batches):
        file = row_file(tmp_path, rows, batch=7)
        batch = accepted([file], number)
        try:
            told = one.write(batch)
        except SinkRejects as raised:
            told = raised.numbers
            known = file._replace(refused=np.sort(told))
            assert one.write(accepted([known], number)) is None
        taken = [(place, row) for place, row in enumerate(rows) if row[2] != 11]
        expected |= {word: n for _, (word, n, _) in taken if n < 100}
        # One that a later row of its key replaces need not be looked at.
        must = {place for place, row in taken if row[1] >= 100}
        assert (set() if told is None else set(told.tolist())) <= must
        assert words(postgres) == expected
    release_all(one)


def test_a_column_of_the_table_alone_refuses_no_row(postgres, sink, files):
    execute(postgres, TABLE)
    one = sink(postgres)
    execute(postgres, "ALTER TABLE words ADD shop int NOT NULL")
    with pytest.raises(psycopg.errors.NotNullViolation, match="shop"):
        one.write(accepted(files))
    execute(postgres, "ALTER TABLE words ALTER shop SET DEFAULT 1")
    assert len(written_without_refused(one, accepted(files))) == 1  # "a" is there twice
    assert execute(postgres, "SELECT DISTINCT shop FROM words") == [(1,)]


# -- what goes wrong -------------------------------------------------------------------------------


def test_who_may_not_end_the_other_waits_for_it(postgres, sink, files, monkeypatch):
    execute(postgres, "CREATE TABLE words (word text, n bigint)", "CREATE ROLE other LOGIN")
    first = sink(postgres)
    execute(postgres, "GRANT ALL ON words, ackcore_batches TO other")
    second = sink(postgres.replace("user=ackcore", "user=other"))
    for one in (first, second):  # both are connected, with nothing left to wait for
        one.write(accepted(files))
    threads = []
    waits = "SELECT 1 FROM pg_stat_activity WHERE usename = 'other' AND wait_event_type = 'Lock'"

    def take_over(*point):
        if not threads:
            batch = [accepted(files, 1)]
            threads.append(threading.Thread(target=second.write, args=batch))
            threads[0].start()
            postgres_server.wait_until(lambda: execute(postgres, waits), "the other waits")

    monkeypatch.setattr(sink_module, "failpoint", take_over)
    first.write(accepted(files, 1))
    threads[0].join()
    assert len(execute(postgres, "SELECT * FROM words")) == 8


def test_a_server_that_crashes_takes_each_row_once(own_postgres_server, sink, files, monkeypatch):
    dsn = own_postgres_server.new_database()
    execute(dsn, "CREATE TABLE words (word text, n bigint)")
    one = sink(dsn)
    one.write(accepted(files))

    def crash(*point):
        own_postgres_server.kill()
        own_postgres_server.start()

    with monkeypatch.context() as patch:
        patch.setattr(sink_module, "failpoint", crash)
        with pytest.raises(SinkUnavailable):
            one.write(accepted(files, 1))
    for _ in range(2):
        one.write(accepted(files, 1))
    # One that crashed between two micro-batches is nothing that a sink notices.
    crash()
    one.write(accepted(files, 2))
    assert len(execute(dsn, "SELECT * FROM words")) == 12


@pytest.mark.parametrize("keys", [None, "word"])
def test_a_disk_that_is_full_refuses_no_row(own_postgres_server, sink, tmp_path, keys):
    rows = [(f"{n:08}", 1, None) for n in range(40_000)]
    file = row_file(tmp_path, rows, batch=10_000)
    dsn = own_postgres_server.new_database()
    disk = SmallDisk(own_postgres_server.directory / "disk", 2)
    try:
        space = disk.path / "space"
        space.mkdir()
        own_postgres_server.own(space)
        execute(dsn, f"CREATE TABLESPACE small LOCATION '{space}'", TABLE + " TABLESPACE small")
        execute(dsn, "INSERT INTO words VALUES ('a', 1)")
        one = sink(dsn, keys=keys)
        for _ in range(2):
            with pytest.raises(SinkUnavailable, match=r"DiskFull: .*Free space on the server"):
                one.write(accepted([file]))
            assert words(dsn) == {"a": 1}
        disk.resize(64)
        for _ in range(2):
            assert one.write(accepted([file])) is None
        assert len(words(dsn)) == 40_001
        release_all(one)
    finally:
        own_postgres_server.kill()
        disk.remove()
