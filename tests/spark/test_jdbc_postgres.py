"""`to_jdbc` on a real PostgreSQL, whose driver comes through Maven."""

from __future__ import annotations

import sys
from contextlib import closing

import pyarrow as pa
import pytest

pytest.importorskip("psycopg")

import psycopg
import test_jdbc_sink
import test_sink_contract
from accepted_rows import row_file
from jdbc_postgres import forwarded, jars_of_postgres
from pyspark import cloudpickle
from sink_targets import Database, Jdbc
from test_jdbc_sink import BARE, taken_over_while
from test_postgres_values import REFUSES, TEXTS, shows_no_value

from ackcore.spark import SinkUnavailable
from ackcore.spark.base.versions import SPARK
from ackcore.spark.sinks import rejects
from ackcore.spark.sinks import sink as sink_module
from ackcore.spark.sinks.jdbc_connection import JdbcError

cloudpickle.register_pickle_by_value(test_jdbc_sink)
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture
def postgres_spark(spark, live_spark):
    """The session of all tests, with the driver."""
    return live_spark.load_jars(*jars_of_postgres().split(","))


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
def target(on_postgres):
    return Jdbc(on_postgres)


# -- what any other database shows, too ------------------------------------------------------------


@pytest.mark.parametrize("keys", [None, "word"])
def test_a_micro_batch_is_written_once(target, files, keys):
    test_sink_contract.test_a_micro_batch_is_written_once(target, files, keys)


@pytest.mark.parametrize("keys", [None, "word"])
def test_rows_are_refused_one_by_one(target, tmp_path, keys):
    contract = test_sink_contract.test_rows_that_violate_a_constraint_are_refused_by_themselves
    contract(target, tmp_path, keys)


@pytest.mark.parametrize("step", ["_fill", "_move"])
def test_one_that_was_taken_over_writes_nothing(on_postgres, files, monkeypatch, step):
    taken_over_while(on_postgres, files, monkeypatch, step)


def test_wherever_the_driver_fails_each_row_is_there_once(target, checkpoint, failing_at):
    contract = test_sink_contract.test_wherever_the_driver_fails_each_row_is_written_once
    contract(target.spark, target, checkpoint, failing_at)
    for file in checkpoint.rglob("*"):
        assert not file.is_file() or b"hunter2" not in file.read_bytes()


@pytest.mark.parametrize("keyed", [False, True])
def test_names_may_have_anything_in_them(on_postgres, tmp_path, keyed):
    quote = '"' if SPARK >= (4, 0) else ""  # which Spark 3.5 does not double
    columns = f'"wo{quote * 2}r?d" text UNIQUE, "N {{x}}" bigint'
    on_postgres.execute('CREATE SCHEMA "s?s"', f'CREATE TABLE "s?s"."w % x" ({columns})')
    # The stream's may differ in case.
    schema = pa.schema([(f"wo{quote}R?d", pa.string()), ("n {x}", pa.int64())])
    file = row_file(tmp_path, [("a", 1, None), ("", 2, None)], schema=schema)
    keys = f"wo{quote}R?d" if keyed else None
    sink = on_postgres.sink('"s?s"."w % x"', keys=keys, marker='"do?ne"')
    sink.claim("it's ?", "abc", "/cp")
    for _ in range(2):
        sink.write(on_postgres.accepted([file], sink="it's ?"))
    assert on_postgres.rows("*", '"s?s"."w % x"') == [("", 2), ("a", 1)]


# -- rows that are refused -------------------------------------------------------------------------

RAISES = """CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN
    IF NEW.n > {} THEN RAISE EXCEPTION 'too much: %', NEW.n; END IF; RETURN NEW; END$$"""
RAISED = "CREATE TRIGGER t BEFORE INSERT ON words FOR EACH ROW EXECUTE FUNCTION refuse()"


@pytest.mark.parametrize("keys", [None, "word"])
@pytest.mark.parametrize("state", ["P0001", "45000", "38000"])
def test_rows_over_which_a_trigger_raises_are_refused(on_postgres, tmp_path, keys, state):
    """MySQL sends 45000 for SIGNAL."""
    raises = RAISES.format(5).replace("NEW.n;", f"NEW.n USING ERRCODE = '{state}';", 1)
    on_postgres.execute(BARE, raises, RAISED)
    some = [("a", 1, None), ("b", 9, None), ("c", None, None)]
    batch = on_postgres.accepted([row_file(tmp_path, some)])
    why = test_jdbc_sink.written_without_refused(on_postgres.sink(keys=keys), batch)
    assert {at: error.sqlstate for at, error in why.items()} == {(0, 1): state}
    assert [word for (word,) in on_postgres.rows("word")] == ["a", "c"]


def test_what_is_no_rows_fault_refuses_none(on_postgres, files, tmp_path):
    on_postgres.execute(BARE, RAISES.format(-1), RAISED)
    sink = on_postgres.sink()
    with pytest.raises(SinkUnavailable, match="too much"):
        sink.write(on_postgres.accepted(files))
    on_postgres.execute("DROP TRIGGER t ON words", "ALTER TABLE words ADD shop INT NOT NULL")
    with pytest.raises(JdbcError, match="shop"):
        sink.write(on_postgres.accepted(files))
    assert on_postgres.rows() == []


@pytest.mark.parametrize("of", ["a length", "a check", "a column of its own", "an outage"])
def test_no_error_shows_a_value(on_postgres, tmp_path, monkeypatch, of):
    monkeypatch.setattr(rejects, "MAX_REFUSED", 0)
    statements, says = REFUSES[of]
    on_postgres.execute(*statements)
    file = row_file(tmp_path, [("k3y", "s3cret ($", None)], schema=TEXTS)
    sink = on_postgres.sink()
    shows_no_value(lambda: sink.write(on_postgres.accepted([file])), says)


# -- what goes wrong -------------------------------------------------------------------------------


def test_a_connection_that_is_lost_writes_nothing(on_postgres, files, monkeypatch):
    on_postgres.execute(BARE)
    sink = on_postgres.sink()

    def end_connections(*of):
        on_postgres.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )

    with monkeypatch.context() as patch:
        patch.setattr(sink_module, "failpoint", end_connections)
        with pytest.raises(SinkUnavailable, match="sink 'count', table words: jdbc:postgresql:"):
            sink.write(on_postgres.accepted(files))
    assert on_postgres.rows() == []
    for _ in range(2):
        sink.write(on_postgres.accepted(files))
    assert len(on_postgres.rows()) == 4


def test_a_statement_that_takes_longer_than_it_may_is_given_up(on_postgres, files):
    on_postgres.execute(
        BARE,
        "CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS"
        " $$BEGIN PERFORM pg_sleep(60); RETURN NEW; END$$",
        "CREATE TRIGGER t BEFORE INSERT ON words FOR EACH ROW EXECUTE FUNCTION wait()",
    )
    properties = {**on_postgres.properties, "queryTimeout": "1"}
    with pytest.raises(SinkUnavailable, match="canceling statement"):
        on_postgres.sink(properties=properties).write(on_postgres.accepted(files))
