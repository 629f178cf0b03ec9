"""`to_jdbc` on a real PostgreSQL, whose driver comes through Maven: by COPY, and where not."""

from __future__ import annotations

import datetime
import decimal
import math
import os
import re
import sys
import tempfile
import threading
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

pytest.importorskip("psycopg")

import psycopg
import test_jdbc_sink
from accepted_rows import row_file
from jdbc_postgres import forwarded, jars_of_postgres
from one_sink import cut_off_in_its_transaction
from pyspark import cloudpickle
from test_jdbc_sink import (
    BARE,
    TABLE,
    Database,
    refused_one_by_one,
    taken_over_while,
    written_once,
    written_once_wherever_the_driver_fails,
)
from test_postgres_troubles import WITHOUT_SYNC, policies
from test_postgres_values import REFUSES, TEXTS, shows_no_value

from ackcore.examples.quiet_spark import spark_session
from ackcore.spark import SinkRejects, SinkUnavailable, TooManyRefused
from ackcore.spark.base import failpoints
from ackcore.spark.base.errors import RowFileDamaged
from ackcore.spark.base.failpoints import FailpointReached
from ackcore.spark.sinks import jdbc_transaction, postgres_rows
from ackcore.spark.sinks.interface import check_sink
from ackcore.spark.sinks.jdbc_connection import JdbcConnection, JdbcError
from ackcore.spark.sinks.jdbc_copy import JdbcCopy

cloudpickle.register_pickle_by_value(test_jdbc_sink)
cloudpickle.register_pickle_by_value(sys.modules[__name__])

files = test_jdbc_sink.files  # a fixture


@pytest.fixture(scope="module")
def postgres_spark(live_spark):
    """A session of its own, with the driver: the one of the other tests makes room for it."""
    conf = {"spark.jars": jars_of_postgres()}
    live_spark.close()
    with spark_session("local[2,4]", conf) as (session, _):
        yield session


class Postgres(Database):
    """A database that is looked into past Spark."""

    def __init__(self, dsn, *of, **properties):
        super().__init__(*of, **properties)
        self.dsn = dsn

    def execute(self, *statements):
        with closing(psycopg.connect(self.dsn, autocommit=True)) as connection:
            for statement in statements:
                cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else None

    def rows(self, columns="word, n", table="words"):
        return sorted(self.execute(f"SELECT {columns} FROM {table}"))

    def tables(self):
        found = self.execute("SELECT relname FROM pg_class WHERE relkind = 'r'")
        return [name for (name,) in found]


@pytest.fixture
def on_postgres(postgres, postgres_server, postgres_spark):
    """By TCP, which is all that the driver speaks: it goes through a socket of ours to the file."""
    about = psycopg.conninfo.conninfo_to_dict(postgres)
    with forwarded(f"{about['host']}/.s.PGSQL.{about.get('port', 5432)}") as port:
        url = f"jdbc:postgresql://127.0.0.1:{port}/{about['dbname']}"
        about = {"user": about["user"], "driver": "org.postgresql.Driver"}
        yield Postgres(postgres, postgres_spark, url, password="hunter2", **about)


@pytest.fixture
def filled(monkeypatch):
    """How often Spark's writer has filled a staging table."""
    tables, fill = [], JdbcConnection.fill

    def counted(self, table, rows):
        tables.append(table)
        fill(self, table, rows)

    monkeypatch.setattr(JdbcConnection, "fill", counted)
    return tables


@pytest.fixture(params=["copied", "staged"])
def either(request, on_postgres, filled, monkeypatch):
    """The database, into which rows are copied, or get as into any other."""
    if request.param == "staged":
        monkeypatch.setattr(JdbcCopy, "of", classmethod(lambda cls, connection: None))
    yield on_postgres
    assert bool(filled) == (request.param == "staged")


# -- what any other database shows, too ------------------------------------------------------------


@pytest.mark.parametrize("keys", [None, "word"])
def test_a_micro_batch_is_written_once(either, files, keys):
    written_once(either, files, keys)


@pytest.mark.parametrize("keys", [None, "word"])
def test_rows_are_refused_one_by_one(either, tmp_path, keys):
    refused_one_by_one(either, tmp_path, keys)


@pytest.mark.parametrize("step", ["_fill", "_move"])
def test_one_that_was_taken_over_writes_nothing(on_postgres, files, monkeypatch, step):
    with monkeypatch.context() as patch:
        patch.setattr(JdbcCopy, "suits", lambda self, *of: False)
        taken_over_while(on_postgres, files, patch, step)


def test_wherever_the_driver_fails_each_row_is_there_once(
    on_postgres, filled, checkpoint, monkeypatch
):
    written_once_wherever_the_driver_fails(on_postgres, checkpoint, monkeypatch)
    assert not filled


# -- what is copied --------------------------------------------------------------------------------

NEW_YEAR = datetime.datetime(2024, 1, 1, 12, 0, 0, 7)
COPIED = {
    "text": ("text", pa.string(), ["", 'a"b\n,\\.\n\\N', "\\.", None]),
    "padded": ("char(4)", pa.large_string(), ["ab", "", None, "ü  "]),
    "bytes": ("bytea", pa.binary(), [b"\x00\xff\\", b"", None, b"a"]),
    "tiny": ("smallint", pa.int8(), [-128, 127, None, 0]),
    "big": ("numeric(20, 1)", pa.int64(), [2**63 - 1, -(2**63), None, 1]),
    "small": ("float4", pa.float32(), [0.1, math.inf, None, 1e-45]),
    "float": ("float8", pa.float64(), [0.1, -math.inf, None, 5e-324]),
    "flag": ("boolean", pa.bool_(), [True, False, None, True]),
    "money": ("numeric(9, 1)", pa.decimal128(10, 2), [decimal.Decimal("1.25"), None, None, None]),
    "day": ("date", pa.date32(), [datetime.date(2024, 2, 29), -735_160, 2_932_897, None]),
    "plain": ("timestamp", pa.timestamp("us"), [NEW_YEAR, -(10**17), 10**18, None]),
    "local": ("timestamptz", pa.timestamp("us"), [NEW_YEAR, None, None, None]),
    "instant": (
        "timestamptz",
        pa.timestamp("us", "Europe/Berlin"),
        [NEW_YEAR.replace(tzinfo=datetime.UTC), None, None, None],
    ),
}
#: Of each, text would become another value than the driver sets, or none.
STAGED = {
    "rounded": ("int", pa.float64(), [1.5, None]),
    "shortened": ("numeric", pa.float64(), [0.1 + 0.2, None]),
    "widened": ("float8", pa.float32(), [0.1, None]),
    "whole": ("int", pa.decimal128(10, 2), [decimal.Decimal("2.50"), None]),
    "wall": ("timestamp", pa.timestamp("us", "UTC"), [NEW_YEAR.replace(tzinfo=datetime.UTC), None]),
    "midnight": ("timestamp", pa.date32(), [datetime.date(2024, 2, 29), None]),
    "list": ("text[]", pa.list_(pa.string()), [["a", None, '"\\,{}'], None]),
}


@pytest.fixture
def in_new_york(postgres_spark):
    """A JVM whose time zone is not that of the texts."""
    zones = postgres_spark._jvm.java.util.TimeZone
    before = zones.getDefault()
    zones.setDefault(zones.getTimeZone("America/New_York"))
    yield
    zones.setDefault(before)


@pytest.mark.usefixtures("in_new_york")
@pytest.mark.parametrize("keys", [None, "id"])
@pytest.mark.parametrize(
    "columns", [COPIED, *({name: of} for name, of in STAGED.items())], ids=lambda of: next(iter(of))
)
def test_values_are_the_same_as_from_sparks_writer(
    on_postgres, tmp_path, filled, monkeypatch, columns, keys
):
    kinds = ", ".join(f'"{name}" {sql}' for name, (sql, _, _) in columns.items())
    for table in ("one", "other"):
        on_postgres.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, {kinds})")
    schema = pa.schema([("id", pa.int32()), *((n, kind) for n, (_, kind, _) in columns.items())])
    values = zip(*(values for _, _, values in columns.values()), strict=True)
    rows = [(n, *row, None) for n, row in enumerate(values)]
    some = on_postgres.accepted([row_file(tmp_path, rows, schema=schema, batch=5)])
    one = on_postgres.sink("one", keys=keys)
    check_sink("count", one, schema)
    one.write_accepted(some)
    assert bool(filled) == (columns is not COPIED)
    monkeypatch.setattr(JdbcCopy, "of", classmethod(lambda cls, connection: None))
    on_postgres.sink("other", keys=keys).write_accepted(some)
    assert len(filled) == (1 if columns is COPIED else 2)
    assert on_postgres.rows("count(*)", "(SELECT * FROM one EXCEPT SELECT * FROM other) x") == [
        (0,)
    ]
    assert on_postgres.rows("count(*)", "one") == [(len(rows),)]


@pytest.mark.parametrize("keyed", [False, True])
def test_names_may_have_anything_in_them(on_postgres, tmp_path, filled, keyed):
    columns = '"wo""r?d" text UNIQUE, "N {x}" bigint'
    on_postgres.execute('CREATE SCHEMA "s?s"', f'CREATE TABLE "s?s"."w % x" ({columns})')
    # The stream's may differ in case.
    schema = pa.schema([('wo"R?d', pa.string()), ("n {x}", pa.int64())])
    file = row_file(tmp_path, [("a", 1, None), ("", 2, None)], schema=schema)
    keys = 'wo"R?d' if keyed else None
    sink = on_postgres.sink('"s?s"."w % x"', keys=keys, marker='"do?ne"')
    sink.claim("it's ?", "abc", "/cp")
    for _ in range(2):
        sink.write_accepted(on_postgres.accepted([file], sink="it's ?"))
    assert on_postgres.rows("*", '"s?s"."w % x"') == [("", 2), ("a", 1)]
    assert not filled


@pytest.mark.parametrize(
    ("keys", "about"),
    [
        (None, ["CREATE RULE r AS ON INSERT TO words WHERE NEW.n = 4 DO INSTEAD NOTHING"]),
        ("word", ["ALTER TABLE words DROP CONSTRAINT words_pkey"]),
        (
            "word",
            [
                "ALTER TABLE words ADD shop int",
                "UPDATE words SET shop = 1",
                "ALTER TABLE words ALTER shop SET NOT NULL",
            ],
        ),
        (
            "word",
            [
                "ALTER TABLE words ADD shop int",
                "UPDATE words SET shop = 1",
                "ALTER TABLE words ADD CHECK (shop IS NOT NULL)",
            ],
        ),
        (None, ["ALTER TABLE words RENAME TO base", "CREATE VIEW words AS SELECT * FROM base"]),
    ],
    ids=["a rule", "no index", "a column that is needed", "a constraint of another", "a view"],
)
def test_what_copy_is_not_for_is_written_by_statements(on_postgres, files, filled, keys, about):
    """Replace existing rows of the last but one micro-batch; none could be inserted."""
    known = [(word, 0) for word in "acd"] if keys else []
    on_postgres.execute(
        "CREATE TABLE words (word text CONSTRAINT words_pkey PRIMARY KEY, n bigint)"
        if keys
        else "CREATE TABLE words (word text, n bigint)",
        *(f"INSERT INTO words VALUES ('{word}', {n})" for word, n in known),
        *about,
    )
    on_postgres.sink(keys=keys).write_accepted(on_postgres.accepted(files))
    assert len(filled) == 1
    expected = [("a", 5), ("c", 3), ("d", 4)] if keys else [("a", 1), ("a", 5), ("c", 3), ("d", 4)]
    assert on_postgres.rows() == [row for row in expected if "RULE" not in about[0] or row[1] != 4]
    assert not on_postgres.has_staging()


# -- rows that are refused -------------------------------------------------------------------------

CONSTRAINED = """CREATE TABLE words (
    word varchar(5) PRIMARY KEY, n smallint NOT NULL CHECK (n < 100) REFERENCES numbers DEFERRABLE
    INITIALLY DEFERRED)"""
#: Three that are taken, and one for each kind of refusal.
MIXED = [("a", 1), ("b", 2), ("toolong", 1), ("c", 40_000), ("d", 100), ("e", None), ("f", 7)]
MIXED += [("g\0", 1), (None, 1), ("h", 2)]
WHY = {2: "22001", 3: "22003", 4: "23514", 5: "23502", 6: "23503", 7: "22021", 8: "23502"}
RAISES = """CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN
    IF NEW.n > {} THEN RAISE EXCEPTION 'too much: %', NEW.n; END IF; RETURN NEW; END$$"""
RAISED = "CREATE TRIGGER t BEFORE INSERT ON words FOR EACH ROW EXECUTE FUNCTION refuse()"


@pytest.mark.parametrize("keys", [None, "word"])
def test_rows_that_do_not_fit_are_refused_too(on_postgres, tmp_path, filled, keys):
    on_postgres.execute(
        "CREATE TABLE numbers (n smallint PRIMARY KEY)",
        "INSERT INTO numbers VALUES (1), (2)",
        CONSTRAINED,
    )
    first = row_file(tmp_path, [("y", 1, 11), ("z", 1, 12)])
    second = row_file(tmp_path, [(*row, 10) for row in MIXED], 1)
    sink = on_postgres.sink(keys=keys)
    with pytest.raises(SinkRejects) as raised:
        sink.write_accepted(on_postgres.accepted([first, second]))
    why = dict(zip(*map(list, (raised.value.places[1], raised.value.reasons)), strict=True))
    assert {place: error.sqlstate for place, error in why.items()} == WHY
    assert set(raised.value.places[0].tolist()) == {1}
    assert "Key (n)=(7) is not present" in str(why[6])
    assert on_postgres.rows() == []
    assert on_postgres.rows("batch_id", "ackcore_jdbc_batches") == [(-1,)]
    known = [first, second._replace(refused=np.arange(2, 9))]
    for _ in range(2):
        sink.write_accepted(on_postgres.accepted(known))
    assert on_postgres.rows() == [("a", 1), ("b", 2), ("h", 2), ("z", 1)]
    assert not filled


@pytest.mark.parametrize("keys", [None, "word"])
def test_a_row_that_a_trigger_raises_over_is_refused(on_postgres, tmp_path, keys):
    on_postgres.execute(TABLE, RAISES.format(5), RAISED)
    file = row_file(tmp_path, [("a", 1, None), ("b", 9, None), ("c", 2, None)])
    with pytest.raises(SinkRejects, match="too much: 9") as raised:
        on_postgres.sink(keys=keys).write_accepted(on_postgres.accepted([file]))
    assert raised.value.places[1].tolist() == [1]


@pytest.mark.parametrize("keys", [None, "word"])
def test_a_row_that_a_policy_is_against_is_refused(on_postgres, tmp_path, filled, keys):
    user = f"jdbc_{keys}".lower()
    policies(on_postgres.dsn, user)
    file = row_file(tmp_path, [("a", 1, None), ("b", 9, None), ("c", 2, None)])
    sink = on_postgres.sink(keys=keys, properties={**on_postgres.properties, "user": user})
    with pytest.raises(SinkRejects, match="policy") as raised:
        sink.write_accepted(on_postgres.accepted([file]))
    assert raised.value.places[1].tolist() == [1]
    assert not filled


def test_what_is_no_rows_fault_refuses_none(on_postgres, files, tmp_path):
    on_postgres.execute(BARE, RAISES.format(-1), RAISED)
    sink = on_postgres.sink()
    with pytest.raises(SinkUnavailable, match="too much"):
        sink.write_accepted(on_postgres.accepted(files))
    on_postgres.execute("DROP TRIGGER t ON words", "ALTER TABLE words ADD shop INT NOT NULL")
    with pytest.raises(JdbcError, match="shop"):
        sink.write_accepted(on_postgres.accepted(files))
    assert on_postgres.rows() == []


def test_more_than_are_looked_for_end_it(on_postgres, tmp_path):
    on_postgres.execute(TABLE)
    file = row_file(tmp_path, [(f"b{n}", 1000 + n, None) for n in range(500)], batch=500)
    with pytest.raises(TooManyRefused, match="refuses more than 5 rows of micro-batch 0"):
        on_postgres.sink(max_refused=5).write_accepted(on_postgres.accepted([file]))


@pytest.mark.parametrize("of", REFUSES)
def test_no_error_shows_a_value(on_postgres, tmp_path, of):
    statements, says = REFUSES[of]
    on_postgres.execute(*statements)
    file = row_file(tmp_path, [("k3y", "s3cret ($", None)], schema=TEXTS)
    sink = on_postgres.sink(max_refused=0)
    shows_no_value(lambda: sink.write_accepted(on_postgres.accepted([file])), says)


def test_a_commit_is_waited_for_where_the_database_does_not(on_postgres, files):
    on_postgres.execute(*WITHOUT_SYNC)
    on_postgres.sink().write_accepted(on_postgres.accepted(files))
    assert set(on_postgres.rows("commits")) == {("on",)}


@pytest.mark.parametrize("of", ["a length", "a check"])
def test_no_error_by_a_staging_table_shows_a_value(on_postgres, tmp_path, monkeypatch, of):
    """Tasks that fill it report a length, and quote their statement."""
    monkeypatch.setattr(JdbcCopy, "of", classmethod(lambda cls, connection: None))
    test_no_error_shows_a_value(on_postgres, tmp_path, of)


# -- what goes wrong -------------------------------------------------------------------------------


@pytest.fixture
def no_pipe_left(tmp_path, monkeypatch):
    """Whatever happens, nothing stays in the folder of temporary files."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield
    assert os.listdir(folder) == []


@pytest.mark.usefixtures("no_pipe_left")
@pytest.mark.parametrize("keys", [None, "word"])
def test_a_file_that_is_damaged_is_not_taken_for_a_short_one(on_postgres, tmp_path, keys):
    on_postgres.execute(TABLE)
    first = row_file(tmp_path, [("a", 1, None)])
    second = row_file(tmp_path, [("b", 2, None)], 1)
    Path(second.path).write_bytes(Path(second.path).read_bytes()[:-1])
    with pytest.raises(RowFileDamaged):
        on_postgres.sink(keys=keys).write_accepted(on_postgres.accepted([first, second]))
    assert on_postgres.rows() == []


def test_a_thread_that_cannot_be_started_leaves_nothing_open(on_postgres, files, monkeypatch):
    """Neither here nor in the JVM."""
    on_postgres.execute(TABLE)
    sink, pipe = on_postgres.sink(keys="word"), JdbcCopy._pipe

    def without_threads(self):
        made = pipe(self)
        threading.stack_size(1 << 46)  # more than there are addresses
        return made

    with monkeypatch.context() as patch:
        patch.setattr(JdbcCopy, "_pipe", without_threads)
        try:
            with pytest.raises(RuntimeError, match="can't start new thread"):
                sink.write_accepted(on_postgres.accepted(files))
        finally:
            threading.stack_size(0)
    handle = on_postgres.session._jvm.java.lang.ProcessHandle.current()
    for process in ("self", handle.pid()):
        folder = Path(f"/proc/{process}/fd")
        open_files = [os.path.realpath(one) for one in folder.iterdir()]
        assert not [one for one in open_files if re.search("ackcore-[^/]*/rows", one)]
    sink.write_accepted(on_postgres.accepted(files))
    assert on_postgres.rows("count(*)") == [(3,)]


def end_connections(database):
    database.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE application_name LIKE 'ackcore-%'"
    )


@pytest.mark.usefixtures("no_pipe_left")
@pytest.mark.parametrize("keys", [None, "word"])
def test_a_connection_that_is_lost_writes_nothing(on_postgres, tmp_path, monkeypatch, keys):
    """While rows are copied, and at the end of the transaction."""
    on_postgres.execute(TABLE)
    rows = [(f"{n:05}", 1, None) for n in range(50_000)]
    file = row_file(tmp_path, rows, batch=10_000)
    sink, as_csv, calls = on_postgres.sink(keys=keys), postgres_rows.as_csv, []

    def cutting(*of):
        calls.append(of)
        if len(calls) == 3:
            end_connections(on_postgres)
        return as_csv(*of)

    with monkeypatch.context() as patch:
        patch.setattr(postgres_rows, "as_csv", cutting)
        with pytest.raises(SinkUnavailable, match="sink 'count', table words: jdbc:postgresql:"):
            sink.write_accepted(on_postgres.accepted([file]))
    with monkeypatch.context() as patch:
        patch.setattr(jdbc_transaction, "failpoint", lambda *of: end_connections(on_postgres))
        with pytest.raises(SinkUnavailable):
            sink.write_accepted(on_postgres.accepted([file]))
    assert on_postgres.rows() == []
    for _ in range(2):
        sink.write_accepted(on_postgres.accepted([file]))
    assert len(on_postgres.rows()) == 50_000


@pytest.mark.usefixtures("no_pipe_left")
def test_a_statement_that_takes_longer_than_it_may_is_given_up(on_postgres, files):
    on_postgres.execute(
        BARE,
        "CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS"
        " $$BEGIN PERFORM pg_sleep(60); RETURN NEW; END$$",
        "CREATE TRIGGER t BEFORE INSERT ON words FOR EACH ROW EXECUTE FUNCTION wait()",
    )
    properties = {**on_postgres.properties, "queryTimeout": "1"}
    with pytest.raises(SinkUnavailable, match="statement timeout"):
        on_postgres.sink(properties=properties).write_accepted(on_postgres.accepted(files))


@pytest.mark.parametrize("keys", [None, "word"])
def test_one_that_was_cut_off_in_its_transaction_holds_nobody_up(
    on_postgres, files, monkeypatch, keys
):
    """Its host stands still with its locks; who takes over ends its connection."""
    on_postgres.execute(TABLE if keys else BARE)
    first, second = (
        partial(on_postgres.sink(keys=keys).write_accepted, on_postgres.accepted(files))
        for _ in range(2)
    )
    with cut_off_in_its_transaction(monkeypatch, jdbc_transaction, first, second):
        # When it is woken it ends nobody else's.
        monkeypatch.setattr(JdbcCopy, "take_over", lambda *of: pytest.fail("it was taken over"))
    assert len(on_postgres.rows()) == (3 if keys else 4)


def test_what_one_that_was_killed_left_is_dropped(on_postgres, files, filled, monkeypatch):
    """By one of an earlier version, or before the table was one that rows are copied into."""
    on_postgres.execute(BARE)
    sink = on_postgres.sink()
    with monkeypatch.context() as patch:
        patch.setattr(JdbcCopy, "of", classmethod(lambda cls, connection: None))
        patch.setattr(jdbc_transaction.JdbcTransaction, "_drop_own", lambda self: None)
        patch.setattr(failpoints, "_POINTS", failpoints.parse("in-transaction=raise"))
        with pytest.raises(FailpointReached):
            sink.write_accepted(on_postgres.accepted(files))
    assert on_postgres.has_staging()
    for _ in range(2):
        sink.write_accepted(on_postgres.accepted(files))
    assert not on_postgres.has_staging()
    assert (len(on_postgres.rows()), len(filled)) == (4, 1)
    assert on_postgres.rows("staging", "ackcore_jdbc_batches") == [(None,)]
