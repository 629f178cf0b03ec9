"""A table of a JDBC database as a sink: rows of ACKED records, each micro-batch once.

On Derby, which comes with Spark; what it is on PostgreSQL is in test_jdbc_postgres.py.
"""

from __future__ import annotations

import shutil
import sys
from contextlib import suppress
from datetime import datetime
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from accepted_rows import WORDS, accepted, row_file, written_without_refused
from pyspark import cloudpickle
from pyspark.errors import PySparkException
from sink_targets import DERBY, Database, derby_database
from small_disk import SmallDisk

from ackcore.spark import SinkRejects, SinkUnavailable, dead_letters, guard, to_jdbc
from ackcore.spark.base import failpoints
from ackcore.spark.base.errors import CheckpointInUse
from ackcore.spark.base.failpoints import FailpointReached
from ackcore.spark.sinks import jdbc_connection, jdbc_transaction, rejects
from ackcore.spark.sinks.jdbc_connection import JdbcConnection, JdbcError, Server
from ackcore.spark.sinks.rejects import TooManyRefused
from ackcore.spark.sinks.sink import check_sink

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture
def derby(spark):
    return derby_database(spark)


TABLE = 'CREATE TABLE words (word VARCHAR(5) NOT NULL PRIMARY KEY, "n" BIGINT CHECK ("n" < 100))'
BARE = 'CREATE TABLE words (word VARCHAR(5), "n" BIGINT)'


# -- what is refused at the start ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"url": 3}, TypeError, "url must be a str, got int"),
        ({"url": "mysql://u:hunter2@db"}, ValueError, "url must be a JDBC URL, such as"),
        (
            {"table": "a; DROP"},
            ValueError,
            "table must be the name of a table, .* got 'a; DROP'; put",
        ),
        ({"marker": ""}, ValueError, "marker must be the name of a table, such as .* got ''"),
        ({"keys": []}, ValueError, "keys must name at least one column; omit it"),
        (
            {"properties": {"fetchsize": 3}},
            TypeError,
            r"properties must be a mapping of str to str, got int for 'fetchsize' \(str\)",
        ),
        ({"properties": 5}, TypeError, "properties must be a mapping of str to str, got int"),
        ({"properties": {"dbtable": "x"}}, ValueError, "properties must not have 'dbtable'"),
    ],
)
def test_arguments_are_refused(arguments, error, says):
    with pytest.raises(error, match=says) as raised:
        to_jdbc(**{"url": "jdbc:mysql://db/shop", "table": "t", **arguments})
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "shown", "secret"),
    [
        ("jdbc:mysql://etl:hunter2@db:3306/shop?a=b", "jdbc:mysql://db:3306/shop", "hunter2"),
        ("jdbc:postgresql://db/shop?password=hunter2", "jdbc:postgresql://db/shop", "hunter2"),
        ("jdbc:sqlserver://db;password=hunter2@x", "jdbc:sqlserver://", "hunter2@x"),
        ("jdbc:oracle:thin:etl/hunter2@//db:1521/x", "jdbc:oracle:thin://db:1521/x", "hunter2"),
        ("jdbc:mysql://etl:hun;ter2@db/shop", "jdbc:mysql://", "hun;ter2"),
    ],
)
def test_what_a_url_holds_is_not_shown(url, shown, secret):
    assert repr(to_jdbc(url, "t")) == f"to_jdbc({shown!r}, 't')"
    quoted = Server("jdbc:x://etl:hunter%402@db/shop?key=hun%2Bter+2", {})
    told = quoted.redacted("no login hunter@2 hunter%402, hun+ter 2, hun+ter+2, hun%2Bter+2")
    assert told == "no login [redacted] [redacted], [redacted], [redacted], [redacted]"
    told = Server(url, {"sslpass": "xyz"}).redacted(f"no driver for {url}: {secret}, xyz")
    assert told == f"no driver for {shown}: [redacted], [redacted]"


@pytest.mark.parametrize("said", ["Batch entry 0 INSERT", "Batch-Eintrag 0 INSERT", "0 (INSERT)"])
def test_a_statement_is_not_shown_in_any_language_of_the_jvm(said):
    """Spark's error of a task may come without its cause."""

    def fail():
        raise PySparkException(f"Task 0: java.sql.BatchUpdateException: {said} ('s3cret') ...")

    with pytest.raises(JdbcError, match=r"Task 0.*s3cret") as raised:
        Server("jdbc:postgresql://db/shop", {}).call(fail)
    assert str(raised.value.without_values()).endswith("Task 0: a batch is refused")


@pytest.mark.parametrize(
    ("state", "code", "becomes", "is_raised"),
    [
        ("72000", 20_000, "45000", True),
        ("72000", 20_999, "45000", True),
        ("72000", 21_000, "72000", False),
        ("72000", 12_899, "22001", False),
        ("42000", 20_001, "42000", False),
        ("45000", 1644, "45000", True),  # MySQL's SIGNAL
        ("HY000", 1205, "HY000", False),  # MySQL's time-out of a lock
        ("S0001", 50_000, "45000", True),  # SQL Server's RAISERROR with a text
        ("S0255", 51_000, "45000", True),  # its THROW
        ("S0001", 8134, "S0001", False),  # its division by zero
        ("40001", 60_000, "40001", False),
    ],
)
def test_errors_of_triggers_are_known_in_each_database(
    monkeypatch, state, code, becomes, is_raised
):
    java = {"getSQLState": state, "getErrorCode": code, "getMessage": "ORA-20001: no 's3cret'"}
    java = SimpleNamespace(**{name: lambda value=value: value for name, value in java.items()})
    monkeypatch.setattr(jdbc_connection, "_of_database", lambda error: java)

    def fail():
        raise PySparkException("failed")

    with pytest.raises(JdbcError, match="ORA-20001") as raised:
        Server("jdbc:oracle:thin:@db", {}).call(fail)
    assert (raised.value.sqlstate, raised.value.is_raised) == (becomes, is_raised)


@pytest.mark.parametrize("state", ["45000", "23505"])
@pytest.mark.parametrize(("ends", "says"), [("S0001", "no such word"), ("08006", "no savepoint")])
def test_an_error_that_has_ended_the_transaction_is_named(state, ends, says):
    """SQL Server's THROW ends the transaction. A lost connection counts more than the error."""
    ended, raised = JdbcError("no savepoint", ends), JdbcError("no such word", state)

    def fails(error):
        raise error

    transaction = object.__new__(jdbc_transaction.JdbcTransaction)
    transaction.connection = SimpleNamespace(
        can_save=True, save=lambda: "s", rollback=lambda saved: fails(ended)
    )
    transaction._move_some = lambda *arguments: fails(raised)
    with pytest.raises(JdbcError, match=says):
        transaction._try_move({}, [], 0, 1)


def test_the_advice_names_a_sink_as_it_is_in_the_marker_table():
    sink = to_jdbc("jdbc:x://db/shop", "orders")
    advice = sink.advice(accepted([], sink="a" * 127 + "'b"), 3)
    assert f"AND sink = '{'a' * 127}''', and start again" in advice


def test_no_error_and_no_context_of_one_holds_a_secret(spark):
    sink = to_jdbc("jdbc:nosuch://db/x?pw=hunter2", "t", properties={"password": "hunter3"})
    says = r"sink 'count', table t: jdbc:nosuch://db/x: .*No suitable driver.* Check that the"
    with pytest.raises(SinkUnavailable, match=says) as raised:
        sink.claim("count", "abc", "/cp")
    assert isinstance(raised.value.__cause__, JdbcError)
    assert raised.value.__cause__.__context__ is None
    assert raised.value.__cause__.__cause__ is None
    assert "hunter" not in str(raised.value)


def test_tables_are_refused_before_anything_runs(derby):
    with pytest.raises(ValueError, match=r"sink 'count': table words cannot be read .*Create it"):
        check_sink("count", to_jdbc(derby.url, "words", properties=derby.properties), WORDS)
    derby.execute("CREATE TABLE words (word VARCHAR(5))")
    sink = derby.sink(keys="word")
    with pytest.raises(ValueError, match="table words has no column 'n', it has WORD; add it"):
        check_sink("count", sink, WORDS)
    derby.execute('ALTER TABLE words ADD "n" INT')
    check_sink("count", sink, WORDS)
    with pytest.raises(TypeError, match=r"jdbc:derby:memory:.* has no type for list<item: int64>"):
        check_sink("count", sink, pa.schema([WORDS[0], ("n", pa.list_(pa.int64()))]))
    with pytest.raises(TypeError, match=r"times of day by JDBC|Spark has no type for time64"):
        check_sink("count", sink, pa.schema([WORDS[0], ("n", pa.time64("us"))]))


# -- what is written -------------------------------------------------------------------------------


def test_columns_that_the_stream_does_not_have_stay(derby, files):
    """And a column that the table gained while the query ran gets its default."""
    derby.execute(TABLE, "INSERT INTO words VALUES ('a', 0), ('z', 9)")
    sink = derby.sink(keys="word")
    derby.execute("ALTER TABLE words ADD note VARCHAR(9) DEFAULT 'new'")
    derby.execute("UPDATE words SET note = 'old'")
    sink.write(derby.accepted(files))
    new = [("c", 3, "new"), ("d", 4, "new")]
    assert derby.rows("word, n, note") == [("a", 5, "old"), *new, ("z", 9, "old")]


def test_times_without_a_zone_are_kept_in_each_zone_of_the_jvm(derby, tmp_path, conf):
    """Except for a time that this zone skips: JDBC has no value for it."""
    conf("spark.sql.session.timeZone", "America/New_York")
    times = ["2024-03-31 02:30:00", "2024-07-01 02:30:00.123456", "2024-10-27 02:30:00"]
    times += ["1700-01-01 00:00:00", "9999-12-31 23:59:59"]
    schema = pa.schema([("n", pa.int64()), ("a`t", pa.timestamp("us"))])
    values = [None, *(datetime.fromisoformat(time) for time in times)]
    file = row_file(tmp_path, [(n, at, None) for n, at in enumerate(values)], schema=schema)
    derby.execute('CREATE TABLE words ("n" BIGINT, "a`t" TIMESTAMP)')
    zones = derby.session._jvm.java.util.TimeZone
    before = zones.getDefault()
    zones.setDefault(zones.getTimeZone("Europe/Berlin"))
    try:
        ((place, why),) = written_without_refused(derby.sink(), derby.accepted([file])).items()
    finally:
        zones.setDefault(before)
    said = "column 'a`t' has a time that the time zone of Spark's JVM, Europe/Berlin, skips; run"
    assert place == (0, 1)
    assert why.startswith(said)
    text = '(SELECT "n", CAST("a`t" AS CHAR(26)) AS TEXT FROM words) AS texts'
    kept = dict(derby.rows("n, cast(cast(TEXT AS timestamp_ntz) AS string)", text))
    assert kept == {0: None, **{n: time for n, time in enumerate(times, 1) if n > 1}}


# -- rows that are refused -------------------------------------------------------------------------


def asked_moves(monkeypatch):
    """Return a list to which each later call of `_try_move` adds its arguments."""
    move, asked = jdbc_transaction.JdbcTransaction._try_move, []

    def counted(self, *of):
        asked.append(of)
        return move(self, *of)

    monkeypatch.setattr(jdbc_transaction.JdbcTransaction, "_try_move", counted)
    return asked


@pytest.mark.parametrize("keys", [None, "word"])
def test_what_all_rows_violate_is_looked_for_up_to_a_number(derby, tmp_path, monkeypatch, keys):
    """And nothing of the micro-batch is written: neither the other rows nor its number."""
    derby.execute(TABLE)
    asked = asked_moves(monkeypatch)
    monkeypatch.setattr(rejects, "MAX_REFUSED", 5)
    sink = derby.sink(keys=keys)
    some = [("a", 1, None), *((f"b{i}", 1000 + i, None) for i in range(500)), ("c", 3, None)]
    says = "sink 'count', table words, refuses more than 5 rows of micro-batch 0, the first with J"
    with pytest.raises(TooManyRefused, match=says):
        sink.write(derby.accepted([row_file(tmp_path, some)]))
    assert len(asked) < 50
    assert derby.rows() == []
    assert derby.rows("batch_id", "ackcore_jdbc_batches") == [(-1,)]
    assert not derby.has_staging()
    few = row_file(tmp_path, some[:6], batch=2)
    with pytest.raises(SinkRejects, match="5 rows are refused"):
        sink.write(derby.accepted([few]))


def test_rows_that_do_not_fit_are_refused_by_themselves(derby, spark, tmp_path):
    """Text that is too long or not UTF-8, and a year that Derby has not; the others are written."""
    derby.execute('CREATE TABLE words (word VARCHAR(5), "at" TIMESTAMP, "n" INT)')
    frame = spark.sql(
        "SELECT id, CASE id WHEN 2 THEN 'toolong' WHEN 3 THEN CAST(X'E9' AS STRING) ELSE 'ok' END"
        " AS word, timestamp_seconds(if(id = 5, 1000000000000, 0)) AS at FROM range(0, 8, 1, 2)"
    )

    def ones(batch: pa.RecordBatch):
        return np.ones(len(batch), np.int32)

    sink = to_jdbc(DERBY, "words", properties=derby.properties)
    counts = guard(frame.drop("id"), ones, "n int", sink, tmp_path / "cp")
    assert (counts.acked, counts.dead) == (5, 3)
    letters = dead_letters(tmp_path / "cp", spark).select("component", "error_message").collect()
    said = sorted(letter.error_message for letter in letters)
    assert {letter.component for letter in letters} == {"sink"}
    assert "the text of column 'word' is not UTF-8" in said
    assert derby.rows("word") == [("ok",)] * 5
    assert not derby.has_staging()


@pytest.mark.parametrize("keys", [None, "id"])
def test_rows_that_need_rows_behind_them_are_refused_only_without_these(derby, tmp_path, keys):
    """Some rows refer to the row behind them, and other rows are refused."""
    derby.execute(
        'CREATE TABLE words ("id" INT NOT NULL PRIMARY KEY, "parent" INT, "n" INT CHECK ("n" < 9))',
        'ALTER TABLE words ADD FOREIGN KEY ("parent") REFERENCES words',
    )
    schema = pa.schema([(name, pa.int32()) for name in ("id", "parent", "n")])
    rows = [(3, 2, 1), (2, 1, 1), (9, None, 9), (1, None, 1), (7, 8, 1), (6, 7, 1), (4, 1, 1)]
    file = row_file(tmp_path, [(*row, None) for row in rows], schema=schema)
    told = written_without_refused(derby.sink(keys=keys), derby.accepted([file]))
    assert [place for _, place in told] == [2, 4, 5]
    assert derby.rows("id") == [(1,), (2,), (3,), (4,)]


def test_rows_that_need_rows_behind_them_do_not_count_as_refused_before_these_are_tried(
    derby, tmp_path, monkeypatch
):
    derby.execute(
        'CREATE TABLE words ("id" INT NOT NULL PRIMARY KEY, "parent" INT CHECK ("parent" < 99))',
        'ALTER TABLE words ADD FOREIGN KEY ("parent") REFERENCES words',
    )
    schema = pa.schema([(name, pa.int32()) for name in ("id", "parent")])
    monkeypatch.setattr(rejects, "MAX_REFUSED", 2)
    for number, n in enumerate((15, 50)):
        rows = [*((n, n + 1, None) for n in range(n)), (n, n, None), (98, 100, None)]
        batch = derby.accepted([row_file(tmp_path, rows, number, schema=schema)], number)
        if n == 15:
            ((_, place),) = written_without_refused(derby.sink(), batch)
            assert place == n + 1
            derby.execute('UPDATE words SET "parent" = NULL', "DELETE FROM words")
        else:  # more than ten times the limit
            with pytest.raises(TooManyRefused):
                derby.sink().write(batch)
            assert derby.rows("id") == []


def test_a_row_is_not_refused_for_another_one_whose_place_an_earlier_row_takes(derby, tmp_path):
    derby.execute(
        'CREATE TABLE words ("id" INT NOT NULL PRIMARY KEY, "parent" INT)',
        'ALTER TABLE words ADD FOREIGN KEY ("parent") REFERENCES words',
    )
    schema = pa.schema([(name, pa.int32()) for name in ("id", "parent")])
    rows = [(1, 1, None), (1, 99, None), (2, 1, None)]
    file = row_file(tmp_path, rows, schema=schema)
    told = written_without_refused(derby.sink(keys="id"), derby.accepted([file]))
    assert [place for _, place in told] == [1]
    assert derby.rows("id, parent") == [(1, 1), (2, 1)]


def test_all_rows_of_a_key_that_are_refused_are_found_at_once(derby, tmp_path):
    """Otherwise each call of the sink, with jobs of its own, would find only one of them."""
    derby.execute(
        'CREATE TABLE words (word VARCHAR(5) NOT NULL PRIMARY KEY, "n" INT CHECK ("n" < 100), '
        '"of" VARCHAR(5))',
        'ALTER TABLE words ADD FOREIGN KEY ("of") REFERENCES words',
    )
    schema = pa.schema([("word", pa.string()), ("n", pa.int32()), ("of", pa.string())])
    rows = [("a", 1, "a"), ("a", 2, "a"), *(("a", 100 + n, "a") for n in range(5)), ("b", 3, "a")]
    rows += [*(("b", n, f"z{n}") for n in range(5)), ("c", 4, "a"), ("c", 100, "a"), ("c", 5, "a")]
    rows += [("d", 100, "a"), ("d", 5, "z")]
    file = row_file(tmp_path, [(*row, None) for row in rows], schema=schema)
    told = written_without_refused(derby.sink(keys="word"), derby.accepted([file]))
    assert sorted(place for _, place in told) == [*range(2, 7), *range(8, 13), 16, 17]
    assert derby.rows() == [("a", 2), ("b", 3), ("c", 5)]


@pytest.mark.parametrize("keys", [None, "word"])
def test_a_sequence_at_its_end_refuses_none(derby, tmp_path, keys):
    """The error is raised, although some rows could be written before the sequence ended."""
    derby.execute(
        "CREATE TABLE words (id SMALLINT GENERATED ALWAYS AS IDENTITY (START WITH 32766), word "
        'VARCHAR(5) NOT NULL UNIQUE, "n" INT)'
    )
    rows = [(word, 1, None) for word in "abcd"]
    with pytest.raises(JdbcError, match="No more values can be obtained"):
        derby.sink(keys=keys).write(derby.accepted([row_file(tmp_path, rows)]))
    assert derby.rows() == []


def test_a_row_whose_time_is_too_far_for_microseconds_is_refused(derby, tmp_path):
    derby.execute('CREATE TABLE words ("n" INT, "at" TIMESTAMP)')
    schema = pa.schema([("n", pa.int32()), ("at", pa.timestamp("s"))])
    file = row_file(tmp_path, [(1, 0, None), (2, 2**45, None), (3, 1, None)], schema=schema)
    sink = to_jdbc(DERBY, "words", properties=derby.properties)
    sink.claim("count", "abc", "/cp")
    said = "the value of column 'at' does not fit into timestamp[us]"
    assert written_without_refused(sink, derby.accepted([file])) == {(0, 1): said}
    assert len(derby.rows('"n"')) == 2
    assert not derby.has_staging()


def test_what_is_no_rows_fault_refuses_none(derby, files, tmp_path):
    derby.execute(TABLE)
    sink = derby.sink(keys="word")
    # A column that the table gained and that needs a value.
    derby.execute("DROP TABLE words", TABLE[:-1] + ", shop INT NOT NULL)")
    with pytest.raises(JdbcError, match="SHOP"):
        sink.write(derby.accepted(files))
    assert derby.rows() == []
    assert not derby.has_staging()


@pytest.fixture
def only_numbers(derby):
    """A table whose trigger raises an error over texts that are no numbers."""
    function = "CREATE FUNCTION look(w VARCHAR(5)) RETURNS INT LANGUAGE JAVA PARAMETER STYLE JAVA"
    derby.execute(
        BARE,
        f"{function} NO SQL EXTERNAL NAME 'java.lang.Integer.parseInt'",
        "CREATE TRIGGER t AFTER INSERT ON words REFERENCING NEW AS one FOR EACH ROW"
        " VALUES look(one.word)",
    )
    yield derby
    derby.execute("DROP TRIGGER t", "DROP FUNCTION look")


@pytest.mark.parametrize("keys", [None, "word"])
def test_rows_over_which_a_trigger_raises_are_refused(only_numbers, tmp_path, keys):
    some = [("1", 1, None), ("x", 2, None), ("3", 3, None), ("y", 4, None)]
    batch = only_numbers.accepted([row_file(tmp_path, some)])
    why = written_without_refused(only_numbers.sink(keys=keys), batch)
    assert (set(why), {error.sqlstate for error in why.values()}) == ({(0, 1), (0, 3)}, {"38000"})
    assert only_numbers.rows() == [("1", 1), ("3", 3)]


@pytest.mark.parametrize(("n", "tried"), [(1, 1), (2, 3), (8, 11)])
def test_a_trigger_that_raises_over_all_of_several_rows_refuses_none(
    only_numbers, tmp_path, monkeypatch, n, tried
):
    asked = asked_moves(monkeypatch)
    monkeypatch.setattr(jdbc_transaction, "_HOPELESS", 5)
    file = row_file(tmp_path, [("x", number, None) for number in range(n)], batch=n)
    with pytest.raises(SinkRejects if n == 1 else SinkUnavailable):
        only_numbers.sink().write(only_numbers.accepted([file]))
    assert len(asked) == tried
    assert only_numbers.rows() == []
    assert not only_numbers.has_staging()


def test_a_row_alone_is_refused_beside_a_column_with_a_default(derby, tmp_path):
    """Whether NOT NULL has a default is not known, but no null violates a CHECK."""
    derby.execute(
        'CREATE TABLE words (word VARCHAR(5), "n" BIGINT NOT NULL CHECK ("n" < 100),'
        " shop INT NOT NULL DEFAULT 7)"
    )
    sink = derby.sink()
    with pytest.raises(SinkRejects, match="1 row is refused"):
        sink.write(derby.accepted([row_file(tmp_path, [("a", 1000, None)])]))
    with pytest.raises(JdbcError, match="'n'"):  # perhaps the null is in the other column
        sink.write(derby.accepted([row_file(tmp_path, [("a", None, None)])]))


# -- what goes wrong -------------------------------------------------------------------------------


def test_a_table_that_went_away_fails_the_sink_until_it_is_back(derby, files):
    derby.execute(TABLE)
    sink = derby.sink(keys="word")
    derby.execute("DROP TABLE words")
    with pytest.raises(SinkUnavailable, match=r"sink 'count', table words: jdbc:derby:.*WORDS"):
        sink.write(derby.accepted(files))
    derby.execute("CREATE TABLE words (word VARCHAR(5))")
    with pytest.raises(ValueError, match="table words has no column 'n'"):
        sink.write(derby.accepted(files))
    derby.execute('ALTER TABLE words ADD "n" INT')
    sink.write(derby.accepted(files))
    assert derby.rows() == [("a", 5), ("c", 3), ("d", 4)]
    derby.execute("DELETE FROM ackcore_jdbc_batches")
    with pytest.raises(JdbcError, match=r"the row of sink 'count' in .*_batches was deleted"):
        sink.write(derby.accepted(files, 1))
    sink.claim("count", "abc", "/cp")
    assert sink.write(derby.accepted(files, 1)) is None


def taken_over_while(database, files, monkeypatch, step):
    """Another driver writes the micro-batch while this one stands still at a step."""
    database.execute(BARE)
    first, second = database.sink(), database.sink()
    taken = []
    method = getattr(jdbc_transaction.JdbcTransaction, step)

    def take_over(self, *of):
        if not taken:
            taken.append(step)
            second.write(database.accepted(files))
        return method(self, *of)

    monkeypatch.setattr(jdbc_transaction.JdbcTransaction, step, take_over)
    with pytest.raises((CheckpointInUse, JdbcError, SinkUnavailable)):
        first.write(database.accepted(files))
    first.write(database.accepted(files))
    assert database.rows() == [("a", 1), ("a", 5), ("c", 3), ("d", 4)]
    assert not database.has_staging()


@pytest.mark.parametrize("step", ["_fill", "_move"])
def test_one_that_was_taken_over_writes_nothing(derby, files, monkeypatch, step):
    taken_over_while(derby, files, monkeypatch, step)


def test_what_one_that_was_killed_left_is_dropped(derby, files, monkeypatch):
    derby.execute(BARE)
    sink = derby.sink()
    with monkeypatch.context() as patch:
        patch.setattr(jdbc_transaction.JdbcTransaction, "end", lambda self: None)
        patch.setattr(failpoints, "_POINTS", failpoints.parse("in-transaction=raise"))
        with pytest.raises(FailpointReached):
            sink.write(derby.accepted(files))
    assert derby.has_staging()
    assert derby.rows() == []
    sink.write(derby.accepted(files))
    assert not derby.has_staging()
    assert len(derby.rows()) == 4


@pytest.mark.parametrize(("free_mb", "is_staged"), [(2, False), (14, True)])
def test_a_disk_that_is_full_refuses_no_row(spark, tmp_path, monkeypatch, free_mb, is_staged):
    """While the staging table is filled, or when its rows are moved on."""
    file = row_file(tmp_path, [(f"{n:0200}", n, None) for n in range(20_000)], batch=10_000)
    disk = SmallDisk(tmp_path / "disk", 64)
    url = f"jdbc:derby:{disk.path}/db"
    moves = []
    move = jdbc_transaction.JdbcTransaction._move
    monkeypatch.setattr(
        jdbc_transaction.JdbcTransaction, "_move", lambda *of: (moves.append(of), move(*of))
    )
    try:
        Database(spark, f"{url};create=true").execute(
            'CREATE TABLE words (word VARCHAR(200), "n" BIGINT)',
            "INSERT INTO words VALUES ('a', 1)",
        )
        derby = Database(spark, url)
        sink = derby.sink()
        disk.resize(-(-shutil.disk_usage(disk.path).used // (1 << 20)) + free_mb)
        with pytest.raises((SinkUnavailable, JdbcError)):
            sink.write(derby.accepted([file]))
        assert bool(moves) == is_staged
        disk.resize(128)
        assert derby.rows() == [("a", 1)]
        for _ in range(2):
            assert sink.write(derby.accepted([file])) is None
        assert len(derby.rows()) == 20_001
        assert not derby.has_staging()
    finally:
        with suppress(JdbcError):  # as it says that it is done
            Database(spark, f"{url};shutdown=true").execute()
        disk.remove(lazily=True)  # Derby keeps what it could not write open


def test_a_task_that_commits_twice_fails_the_micro_batch(derby, files, monkeypatch):
    derby.execute(BARE)
    sink = derby.sink()
    fill = JdbcConnection.fill

    def twice(self, table, rows):
        fill(self, table, rows)
        fill(self, table, rows)

    with monkeypatch.context() as patch:
        patch.setattr(JdbcConnection, "fill", twice)
        with pytest.raises(JdbcError):
            sink.write(derby.accepted(files))
    assert derby.rows() == []
