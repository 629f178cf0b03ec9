"""Troubles that a table, a user or a server of PostgreSQL can cause a sink."""

from __future__ import annotations

import select
import shutil
import socket
import socketserver
import sys
import tempfile
import threading
from contextlib import nullcontext, suppress

import pyarrow as pa
import pytest
from pyspark import cloudpickle

pytest.importorskip("psycopg")

import psycopg
import test_postgres_sink
from accepted_rows import WORDS, accepted, kinds, release_all, row_file, written_without_refused
from psycopg import errors
from test_postgres_sink import TABLE, execute, words

from ackcore.spark import SinkUnavailable, to_postgres
from ackcore.spark.base.errors import CheckpointForeign
from ackcore.spark.sinks import postgres_rows, rejects
from ackcore.spark.sinks.postgres_catalog import as_unavailable, connect, session_name
from ackcore.spark.sinks.postgres_rows import PostgresRows
from ackcore.spark.sinks.rejects import SinkRejects, TooManyRefused
from ackcore.spark.sinks.sink import check_sink

cloudpickle.register_pickle_by_value(test_postgres_sink)
cloudpickle.register_pickle_by_value(sys.modules[__name__])

sink = test_postgres_sink.sink  # a fixture


# -- names, keys, triggers, partitions -------------------------------------------------------------


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        ("UNIQUE (word)", [(None, 1), (None, 2), ("a", 4)]),
        ("UNIQUE NULLS NOT DISTINCT (word)", [(None, 2), ("a", 4)]),
        ("UNIQUE (word, n)", [(None, 1), (None, 2), ("a", 3), ("a", 4)]),
    ],
)
def test_a_key_that_is_null_equals_none_but_where_the_index_says_so(
    postgres, sink, tmp_path, index, expected
):
    """Rows without a key are never taken for later versions of another."""
    if "NOT" in index and int(execute(postgres, "SHOW server_version_num")[0][0]) < 150_000:
        pytest.skip("PostgreSQL has that from 15 on")
    execute(postgres, f"CREATE TABLE words (word text, n bigint, {index})")
    one = sink(postgres, keys=("word", "n") if "n)" in index else "word")
    rows = [(None, 1, None), ("a", 3, None), (None, 2, None), ("a", 4, None)]
    for _ in range(2):
        assert one.write(accepted([row_file(tmp_path, rows)])) is None
    found = execute(postgres, "SELECT word, n FROM words")
    assert sorted(found, key=lambda row: (row[0] or "", row[1])) == expected


@pytest.mark.parametrize("keyed", [False, True])
def test_names_may_have_anything_in_them(postgres, sink, tmp_path, keyed):
    """Per cents and quotes, in table, columns, sink and the marker table."""
    word, n, table = 'wo"r%d', "n%s {x}", '"w%s.""x"""'
    columns = ", ".join(
        psycopg.sql.Identifier(name).as_string(None) + kind
        for name, kind in ((word, " text UNIQUE"), (n, " bigint"))
    )
    execute(postgres, 'CREATE SCHEMA "s%s"', f'CREATE TABLE "s%s".{table} ({columns})')
    one = sink(postgres, f'"s%s".{table}', keys=word if keyed else None, marker='"do%sne"')
    schema = pa.schema([(word, pa.string()), (n, pa.int64())])
    check_sink("it's 100%s", one, schema)
    some = row_file(tmp_path, [("a", 1, None), ("b", 2, None)], schema=schema)
    for number in (3, 3, 2):
        with nullcontext() if number == 3 else pytest.raises(CheckpointForeign) as told:
            one.write(accepted([some], number, sink="it's 100%s"))
    assert sorted(execute(postgres, f'SELECT * FROM "s%s".{table}')) == [("a", 1), ("b", 2)]
    execute(postgres, str(told.value).partition("the table: ")[2])
    assert execute(postgres, 'SELECT * FROM "s%s"."do%sne"') == []


PLAIN = "CREATE TABLE words (word text UNIQUE, n bigint)"
BEFORE_EACH = "CREATE TRIGGER t BEFORE INSERT ON words FOR EACH ROW EXECUTE FUNCTION refuse()"
RAISES = """CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN
    IF NEW.n > {} THEN RAISE EXCEPTION 'too much: %', NEW.n; END IF; RETURN NEW; END$$"""


@pytest.mark.parametrize("keys", [None, "word"])
@pytest.mark.parametrize(
    "trigger",
    [
        "TRIGGER t BEFORE INSERT ON words",
        "CONSTRAINT TRIGGER t AFTER INSERT ON words DEFERRABLE INITIALLY DEFERRED",
    ],
)
def test_a_row_that_a_trigger_raises_over_is_refused(postgres, sink, tmp_path, keys, trigger):
    execute(postgres, PLAIN, RAISES.format(5))
    execute(postgres, f"CREATE {trigger} FOR EACH ROW EXECUTE FUNCTION refuse()")
    one = sink(postgres, keys=keys)
    some = [("a", 1, None), ("b", 9, None), ("c", 2, None)]
    told = written_without_refused(one, accepted([row_file(tmp_path, some)]))
    assert [*map(repr, told.values())] == ["RaiseException('too much: 9')"]
    assert [*told] == [(0, 1)]
    assert words(postgres) == {"a": 1, "c": 2}


BEFORE = """CREATE FUNCTION look() RETURNS trigger LANGUAGE plpgsql AS $$DECLARE x bigint; BEGIN
    {}; RETURN NEW; END$$"""
LOOKS = BEFORE_EACH.replace("refuse()", "look()")
FAILS = "IF NEW.n > 5 THEN RAISE 'no' USING ERRCODE = '{}'; END IF"
#: What a table has, a value that it takes, one that it does not, and what is said of that.
ODD = {
    "a domain": (
        ["CREATE DOMAIN full_d AS bigint NOT NULL", PLAIN.replace("bigint", "full_d")],
        ("1", None, "NotNullViolation"),
    ),
    "a trigger's other table": (
        [
            PLAIN,
            "CREATE TABLE log (who bigint NOT NULL)",
            BEFORE.format("INSERT INTO log VALUES (NEW.n)"),
            LOOKS,
        ],
        ("1", None, "NotNullViolation"),
    ),
    "a trigger that finds nothing": (
        [PLAIN, BEFORE.format("SELECT 1 INTO STRICT x WHERE NEW.n < 5"), LOOKS],
        ("1", "9", "NoDataFound"),
    ),
    "a trigger that finds too much": (
        [PLAIN, BEFORE.format("NEW.n = (SELECT generate_series(1, NEW.n))"), LOOKS],
        ("1", "9", "CardinalityViolation"),
    ),
    # As in other languages, in extensions such as PostGIS, and by users' own errors.
    **{
        f"a trigger with the error {state}": (
            [PLAIN, BEFORE.format(FAILS.format(state)), LOOKS],
            ("1", "9", kind),
        )
        for state, kind in [
            ("38000", "ExternalRoutineException"),
            ("39004", "NullValueNotAllowedExt"),
            ("0A000", "FeatureNotSupported"),
            ("XX000", "InternalError_"),
            ("45000", "DatabaseError"),
        ]
    },
    "a type's own syntax": ([PLAIN.replace("bigint", "tsquery")], ("a", "&", "SyntaxError")),
    "too deep": ([PLAIN.replace("bigint", "json")], ("[]", "[" * 99_999, "StatementTooComplex")),
}


@pytest.mark.parametrize("keys", [None, "word"])
@pytest.mark.parametrize(("statements", "values"), ODD.values(), ids=list(ODD))
def test_what_may_be_of_the_table_refuses_a_row_where_others_go_in(
    postgres, sink, tmp_path, statements, values, keys
):
    execute(postgres, *statements)
    good, bad, says = values
    schema = pa.schema([("word", pa.string()), ("n", pa.string())])
    rows = [("a", good, None), ("b", bad, None), ("c", good, None)]
    one = sink(postgres, keys=keys)
    told = written_without_refused(one, accepted([row_file(tmp_path, rows, schema=schema)]))
    assert kinds(told) == {(0, 1): says}
    assert set(words(postgres)) == {"a", "c"}
    file = row_file(tmp_path, [(key, bad, None) for key in "de"], 1, schema=schema)
    with pytest.raises((psycopg.Error, SinkUnavailable)):
        one.write(accepted([file], 1))
    assert set(words(postgres)) == {"a", "c"}


def test_rules_of_a_table_are_applied(postgres, sink, tmp_path):
    """COPY would ignore them."""
    rule = "CREATE RULE r AS ON INSERT TO words WHERE NEW.n > 5 DO INSTEAD INSERT INTO big VALUES "
    execute(postgres, PLAIN, "CREATE TABLE big (LIKE words)", f"{rule} (NEW.*)")
    some = [("a", 1, None), ("b", 9, None), ("c", 2, None)]
    assert sink(postgres).write(accepted([row_file(tmp_path, some)])) is None
    assert words(postgres) == {"a": 1, "c": 2}
    assert execute(postgres, "SELECT * FROM big") == [("b", 9)]


@pytest.mark.parametrize(("state", "is_refused"), [("45000", True), ("0A000", False)])
def test_a_row_that_is_alone_is_refused_unless_the_table_may_be_at_fault(
    postgres, sink, tmp_path, state, is_refused
):
    execute(postgres, PLAIN, BEFORE.format(FAILS.format(state)), LOOKS)
    batch = accepted([row_file(tmp_path, [("b", 9, None)])])
    with pytest.raises(SinkRejects if is_refused else psycopg.errors.FeatureNotSupported):
        sink(postgres).write(batch)


def test_a_trigger_that_raises_over_all_refuses_none(postgres, sink, tmp_path):
    execute(postgres, PLAIN, RAISES.format(-1), BEFORE_EACH)
    one = sink(postgres)
    for n in (2, 500):
        some = [(f"{i}", i, None) for i in range(n)]
        with pytest.raises(psycopg.errors.RaiseException, match="too much"):
            one.write(accepted([row_file(tmp_path, some, batch=n)]))
    assert words(postgres) == {}


def test_a_trigger_that_raises_over_all_that_were_staged_refuses_none(postgres, sink, tmp_path):
    """Where COPY refuses one, the others go into the temporary table by halves, and no further."""
    execute(postgres, PLAIN, RAISES.format(-1), BEFORE_EACH)
    some = [("a", 1, None), ("\0", 2, None), ("c", 3, None)]
    with pytest.raises(psycopg.errors.RaiseException, match="too much"):
        sink(postgres, keys="word").write(accepted([row_file(tmp_path, some)]))
    assert words(postgres) == {}


@pytest.mark.parametrize("keys", [None, "word"])
def test_what_all_rows_violate_is_looked_for_up_to_a_number(
    postgres, sink, tmp_path, monkeypatch, keys
):
    """And nothing of the micro-batch is written: neither the other rows nor its number."""
    execute(postgres, TABLE)
    taken, asked = PostgresRows._try_write, []

    def counted(self, *of):
        asked.append(of)
        return taken(self, *of)

    monkeypatch.setattr(PostgresRows, "_try_write", counted)
    monkeypatch.setattr(rejects, "MAX_REFUSED", 20)
    one = sink(postgres, keys=keys)
    bad = [(f"b{i}", 1000 + i, None) for i in range(5000)]
    some = [("a", 1, None), *bad, ("c", 3, None)]
    says = (
        r"sink 'count', table words, refuses more than 20 rows of micro-batch 0, the first with "
        r"CheckViolation: .*\"words_n_check\". Nothing .* raises SinkRejects"
    )
    with pytest.raises(TooManyRefused, match=says) as raised:
        one.write(accepted([row_file(tmp_path, some)]))
    assert "b0" not in str(raised.value)  # no values in a log
    assert len(asked) < 100
    assert words(postgres) == {}
    assert execute(postgres, "SELECT batch_id FROM ackcore_batches") == [(-1,)]
    few = row_file(tmp_path, [*some[:21], some[-1]], batch=2)
    assert len(written_without_refused(one, accepted([few]))) == 20
    assert words(postgres) == {"a": 1, "c": 3}


def policies(dsn, user):
    """Make a table whose policy takes rows below 5 of a user, and return how that connects."""
    execute(
        dsn,
        PLAIN,
        f"CREATE ROLE {user} LOGIN",
        "ALTER TABLE words ENABLE ROW LEVEL SECURITY",
        "CREATE POLICY p ON words USING (true) WITH CHECK (n < 5)",
        f"GRANT ALL ON words TO {user}",
        f"GRANT CREATE ON SCHEMA public TO {user}",
    )
    return dsn.replace("user=ackcore", f"user={user}")


@pytest.mark.parametrize("keys", [None, "word"])
def test_a_row_that_a_policy_is_against_is_refused(postgres, sink, tmp_path, keys):
    """COPY refuses a table with policies, and takes no view."""
    dsn = policies(postgres, f"clerk_{keys}".lower())
    one = sink(dsn, keys=keys)
    rows = [("a", 1, None), ("b", 9, None), ("c", 2, None)]
    told = written_without_refused(one, accepted([row_file(tmp_path, rows)]))
    assert kinds(told) == {(0, 1): "InsufficientPrivilege"}
    assert words(postgres) == {"a": 1, "c": 2}
    file = row_file(tmp_path, [("d", 9, None)], 1)
    said = r"policy .* Grant this user SELECT, INSERT and UPDATE"
    with pytest.raises(SinkUnavailable, match=said):
        one.write(accepted([file], 1))  # as who may not write the table


def test_a_view_takes_rows(postgres, sink, tmp_path):
    execute(
        postgres,
        PLAIN.replace("words", "base"),
        "CREATE VIEW words AS SELECT * FROM base WHERE n < 5 WITH CHECK OPTION",
    )
    rows = [("a", 1, None), ("b", 9, None), ("c", 2, None)]
    told = written_without_refused(sink(postgres), accepted([row_file(tmp_path, rows)]))
    assert kinds(told) == {(0, 1): "WithCheckOptionViolation"}
    assert words(postgres) == {"a": 1, "c": 2}


WITHOUT_SYNC = [
    """DO $$BEGIN EXECUTE format('ALTER DATABASE %I SET synchronous_commit = off',
    current_database()); END$$""",
    "CREATE TABLE words (word text, n bigint, commits text DEFAULT "
    "current_setting('synchronous_commit'))",
]


def test_a_commit_is_waited_for_where_the_database_does_not(postgres, sink, files):
    """Else a server that crashes takes back what the checkpoint has as written."""
    execute(postgres, *WITHOUT_SYNC)
    assert execute(postgres, "SHOW synchronous_commit") == [("off",)]
    one = sink(postgres)
    for number in range(2):
        one.write(accepted(files, number))
        assert set(execute(postgres, "DELETE FROM words RETURNING commits")) == {("on",)}
        (session,) = one._live._open.values()
        session.connection.execute("RESET ALL")  # as if a pooler had changed the session


def test_a_server_that_vanishes_is_noticed_in_a_minute(postgres):
    """Unless the dsn says otherwise; by default of Linux it would take two hours."""
    with connect(f"{postgres} keepalives_idle=7") as connection:
        found = connection.info.get_parameters()
    assert [found.get(name) for name in ("keepalives_idle", "keepalives_interval")] == ["7", "10"]
    assert [found.get(name) for name in ("keepalives_count", "tcp_user_timeout")] == ["3", "60000"]


def test_a_new_driver_ends_only_connections_of_a_former_one(postgres, sink, files):
    """Behind PgBouncer, a connection of another program may have the former driver's name."""
    execute(postgres, TABLE, "CREATE TABLE other (n int)")
    one = sink(postgres, keys="word")
    one.write(accepted(files))
    release_all(one)
    with (
        connect(postgres, session_name("abc", "count")) as idle,
        connect(postgres, session_name("abc", "count")) as former,
        connect(postgres, session_name("abc", "count")) as others,
    ):
        former.execute("BEGIN; SELECT * FROM ackcore_batches FOR UPDATE")
        others.execute("BEGIN; INSERT INTO other VALUES (1)")
        one.write(accepted(files, 1))
        for ended in (idle, former):
            with pytest.raises(errors.AdminShutdown):
                ended.execute("SELECT 1")
        others.execute("COMMIT")
    assert execute(postgres, "SELECT n FROM other") == [(1,)]


def test_no_range_of_rows_is_merged_a_second_time(postgres, sink, tmp_path):
    """All, both halves, and the second one's rows: a sequence is not rolled back."""
    execute(
        postgres,
        TABLE,
        "CREATE SEQUENCE statements",
        """CREATE FUNCTION counted() RETURNS trigger LANGUAGE plpgsql AS
        $$BEGIN PERFORM nextval('statements'); RETURN NULL; END$$""",
        "CREATE TRIGGER t BEFORE INSERT ON words FOR EACH STATEMENT EXECUTE FUNCTION counted()",
    )
    some = [(word, n, None) for word, n in (("a", 1), ("b", 2), ("c", 3), ("d", 400))]
    with pytest.raises(SinkRejects) as raised:
        sink(postgres, keys="word").write(accepted([row_file(tmp_path, some)]))
    assert raised.value.numbers.tolist() == [3]
    assert execute(postgres, "SELECT last_value FROM statements") == [(5,)]


def test_a_partitioned_table_refuses_what_no_partition_takes(postgres, sink, tmp_path):
    execute(
        postgres,
        "CREATE TABLE words (word text, n bigint, UNIQUE (word, n)) PARTITION BY RANGE (n)",
        "CREATE TABLE first PARTITION OF words FOR VALUES FROM (0) TO (10)",
    )
    for keys in (None, ("word", "n")):
        one = sink(postgres, keys=keys)
        some = [("a", len(keys or ""), None), ("b", 20, None)]
        about = {"deployment": str(keys)}
        told = written_without_refused(one, accepted([row_file(tmp_path, some)], **about))
        assert [type(error).__name__ for error in told.values()] == ["CheckViolation"]
    assert execute(postgres, "SELECT count(*) FROM first") == [(2,)]


TREE = """CREATE TABLE words (
    id text PRIMARY KEY, mail text UNIQUE, parent text REFERENCES words, n int CHECK (n < 9))"""
TEXTS = [(name, pa.string()) for name in ("id", "mail", "parent")]
IN_TREE = pa.schema([*TEXTS, ("n", pa.int64())])


@pytest.mark.parametrize("keys", [None, "id"])
def test_rows_that_need_rows_behind_them_are_refused_only_without_these(
    postgres, sink, tmp_path, monkeypatch, keys
):
    """Some rows refer to the row behind them, in the same chunk or the next; others are refused."""
    rows = [("c", None, "b", 1), ("b", None, "a", 1), ("bad", None, None, 9), ("a", None, None, 1)]
    rows += [("lost", None, "gone", 1), ("y", None, "lost", 1), ("x", None, "a", 1)]
    for chunk in (2, 1 << 16):
        monkeypatch.setattr(postgres_rows, "_CHUNK", chunk)
        execute(postgres, "DROP TABLE IF EXISTS words", TREE)
        file = row_file(tmp_path, [(*row, None) for row in rows], schema=IN_TREE)
        one = sink(postgres, keys=keys)
        told = written_without_refused(one, accepted([file], deployment=str(chunk)))
        assert [place for _, place in told] == [2, 4, 5]
        assert [word for (word,) in execute(postgres, "SELECT id FROM words ORDER BY id")] == [
            *"abcx"
        ]


@pytest.mark.parametrize("keys", [None, "id"])
def test_rows_that_need_rows_behind_them_do_not_count_as_refused_before_these_are_tried(
    postgres, sink, tmp_path, monkeypatch, keys
):
    execute(postgres, TREE)
    monkeypatch.setattr(rejects, "MAX_REFUSED", 2)
    one = sink(postgres, keys=keys)
    for number, n in enumerate((15, 50)):
        rows = [(f"{number}-{i}", None, f"{number}-{i + 1}", 1, None) for i in range(n)]
        rows += [(f"{number}-{n}", None, None, 1, None), ("bad", None, None, 9, None)]
        batch = accepted([row_file(tmp_path, rows, number, schema=IN_TREE)], number)
        if n == 15:
            assert [place for _, place in written_without_refused(one, batch)] == [n + 1]
        else:  # more than ten times the limit
            with pytest.raises(TooManyRefused):
                one.write(batch)
    assert execute(postgres, "SELECT count(*) FROM words") == [(16,)]


FITS = """CREATE FUNCTION fits(n bigint) RETURNS bool LANGUAGE plpgsql AS $$BEGIN
    IF n > 5 THEN RAISE 'unfit' USING ERRCODE = '23503'; END IF; RETURN true; END$$"""


def test_a_row_that_a_domain_refuses_is_not_written_again_with_those_of_the_table(
    postgres, sink, tmp_path
):
    """The temporary table lacks this row, so writing it from there would raise no error."""
    execute(
        postgres,
        FITS,
        "CREATE DOMAIN few AS bigint CHECK (fits(VALUE))",
        TREE.replace("n int", "n few"),
        "INSERT INTO words VALUES ('k2', 'x')",
    )
    # The first row must be written after the last one.
    rows = [("k1", "x", None, 1, None), ("k3", "u", None, 6, None), ("k2", "z", None, 1, None)]
    file = row_file(tmp_path, rows, schema=IN_TREE)
    told = written_without_refused(sink(postgres, keys="id"), accepted([file]))
    assert [place for _, place in told] == [1]
    found = execute(postgres, "SELECT id, mail FROM words ORDER BY id")
    assert found == [("k1", "x"), ("k2", "z")]


def test_the_last_row_of_a_key_is_kept_if_another_must_be_written_first(postgres, sink, tmp_path):
    """The last row of k1 has the address that k3 gives up, so k3 must be written before it."""
    execute(postgres, TREE, "INSERT INTO words VALUES ('k2', 'x'), ('k3', 'y')")
    rows = [("k1", "x"), ("k1", "y"), ("k2", "z"), ("k3", None)]
    file = row_file(tmp_path, [(*row, None, 1, None) for row in rows], schema=IN_TREE)
    assert sink(postgres, keys="id").write(accepted([file])) is None
    found = execute(postgres, "SELECT id, mail FROM words ORDER BY id")
    assert found == [("k1", "y"), ("k2", "z"), ("k3", None)]


@pytest.mark.parametrize(
    ("keys", "partitions"), [(None, ""), ("word", ""), (None, "PARTITION BY RANGE (id)")]
)
def test_a_sequence_behind_the_rows_of_its_table_refuses_none(
    postgres, sink, tmp_path, keys, partitions
):
    """A restore leaves such a sequence. Failed attempts advance it until it has passed the rows."""
    execute(
        postgres,
        f"CREATE TABLE words (id serial PRIMARY KEY, word text, n bigint) {partitions}",
        "CREATE TABLE part PARTITION OF words DEFAULT"
        if partitions
        else "CREATE UNIQUE INDEX ON words (word)",
        "INSERT INTO words (id, word)"
        " SELECT n, 'old' || n FROM generate_series(1, 40) n WHERE n % 6 > 0",
    )
    one = sink(postgres, keys=keys)
    words = "bcdefg"
    for number, rows in enumerate(([("a", 1, None)], [(word, 2, None) for word in words])):
        batch = accepted([row_file(tmp_path, rows)], number)
        for _ in range(40):
            with suppress(errors.UniqueViolation):
                assert one.write(batch) is None
    found = execute(postgres, "SELECT word, n FROM words WHERE n > 0 ORDER BY word")
    assert found == [("a", 1), *((word, 2) for word in words)]


@pytest.mark.parametrize("keys", [None, "word"])
def test_a_sequence_at_its_end_refuses_none(postgres, sink, tmp_path, keys):
    """The error is raised, although some rows could be written before the sequence ended."""
    execute(
        postgres,
        "CREATE TABLE words (id serial, word text UNIQUE, n bigint)",
        "ALTER SEQUENCE words_id_seq MAXVALUE 2",
    )
    rows = [(word, 1, None) for word in "abcd"]
    with pytest.raises(errors.SequenceGeneratorLimitExceeded, match="nextval: reached maximum"):
        sink(postgres, keys=keys).write(accepted([row_file(tmp_path, rows)]))
    assert words(postgres) == {}


def test_a_row_of_the_marker_table_that_was_deleted_is_inserted_again(postgres, sink, files):
    execute(postgres, "CREATE TABLE words (word text, n bigint)")
    one = sink(postgres)
    one.write(accepted(files))
    execute(postgres, "DELETE FROM ackcore_batches")
    with pytest.raises(errors.NoDataFound, match="the next attempt inserts it again"):
        one.write(accepted(files, 1))
    assert one.write(accepted(files, 1)) is None
    assert execute(postgres, "SELECT batch_id FROM ackcore_batches") == [(1,)]


# -- servers, rights, connections ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            ("host=", "host=/nowhere/"),
            r"host=/nowhere/.* dbname=db\d+: Operational.*Check that the ser",
        ),
        (("dbname=db", "dbname=no"), r"dbname=no\d+: .*does not exist\. Check that the"),
        (("user=ackcore", "user=nobody password=hunter2"), r"\"nobody\" does not exist\. Check"),
    ],
)
def test_a_database_that_cannot_be_used_is_named_at_the_start(postgres, change, says):
    execute(postgres, TABLE)
    one = to_postgres(postgres.replace(*change), "words")
    for call in (
        lambda: check_sink("count", one, WORDS),
        lambda: one.claim("count", "abc", "/cp"),
        lambda: one.write(accepted(())),
    ):
        said = rf"sink 'count', table words at .*{says}"
        with pytest.raises(SinkUnavailable, match=said) as told:
            call()
        assert "hunter2" not in str(told.value)


def test_a_part_of_a_password_is_no_host(postgres):
    one = to_postgres("postgresql://etl:hun@ter2@localhost:1/shop", "words")
    assert repr(one) == "to_postgres('host=localhost port=1 dbname=shop', 'words')"
    with pytest.raises(SinkUnavailable, match="host=localhost port=1 dbname=shop") as told:
        one.claim("count", "abc", "/cp")
    assert "ter2" not in str(told.value)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (errors.DeadlockDetected, "Let the other session lock the rows in the same order"),
        (errors.LockNotAvailable, "End the session that holds the lock"),
        (errors.QueryCanceled, "Set a longer statement_timeout"),
        (errors.IdleInTransactionSessionTimeout, "Set a longer idle_in_transaction"),
        (errors.ObjectNotInPrerequisiteState, "Change the table, the server or its settings, as"),
        (errors.CannotConnectNow, "Check that the server runs"),
    ],
)
def test_a_server_that_answers_is_not_said_to_be_away(error, says):
    with (
        pytest.raises(SinkUnavailable, match=rf"table words at host=db: .*no\. {says}"),
        as_unavailable("count", "words", "host=db"),
    ):
        raise error("no")


def test_a_transaction_timeout_is_named_in_each_psycopg(postgres, sink, tmp_path, monkeypatch):
    """PostgreSQL has this time-out since 17; psycopg 3.2.1 has no class for its error."""
    monkeypatch.delitem(errors._sqlcodes, "25P04", raising=False)
    execute(postgres, PLAIN, BEFORE.format(FAILS.format("25P04")), LOOKS)
    batch = accepted([row_file(tmp_path, [("b", 9, None)])])
    says = "sink 'count', table words at .* InternalError: no. Set a longer transaction_timeout"
    with pytest.raises(SinkUnavailable, match=says):
        sink(postgres).write(batch)


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ("REVOKE INSERT ON words FROM writer", "InsufficientPrivilege: permission denied .* Grant"),
        ("REVOKE UPDATE ON ackcore_batches FROM writer", "permission denied for table ackcore_b"),
        (
            "ALTER TABLE words RENAME n TO m",
            r'column "n" .*does not exist.* Create or change the table',
        ),
        (
            "ALTER ROLE writer SET default_transaction_read_only = on",
            "ReadOnlySqlTransaction: cannot execute .* Connect to a server that takes writes",
        ),
    ],
)
def test_what_is_taken_away_while_a_query_runs_is_named(postgres, sink, files, statement, says):
    execute(
        postgres,
        "DROP ROLE IF EXISTS writer",
        "CREATE ROLE writer LOGIN",
        "CREATE TABLE words (word text, n bigint)",
        "GRANT ALL ON SCHEMA public TO writer",
        "GRANT ALL ON words TO writer",
    )
    sink(postgres)
    execute(postgres, "GRANT ALL ON ackcore_batches TO writer")
    try:
        one = sink(postgres.replace("user=ackcore", "user=writer"))
        one.write(accepted(files))
        execute(postgres, statement)
        release_all(one)
        with pytest.raises(SinkUnavailable, match=rf"sink 'count', table words at host=.*{says}"):
            one.write(accepted(files, 1))
        assert execute(postgres, "SELECT count(*) FROM words") == [(4,)]
    finally:
        release_all(one)
        execute(postgres, "DROP OWNED BY writer", "DROP ROLE writer")


class Cutting:
    """A socket in front of the server's, which cuts a connection at its n-th message to there.

    Before it is handed on, or after the server has answered it, which the client does not hear.
    """

    def __init__(self, directory, server):
        self.directory, self.path = directory, f"{directory}/.s.PGSQL.5432"
        self.server = f"{server}/.s.PGSQL.5432"
        self.messages = self.at = 0
        self.heard = True
        outer = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self):
                with suppress(OSError):
                    outer.forward(self.request)

        self.listening = socketserver.ThreadingUnixStreamServer(self.path, Handler)
        self.listening.daemon_threads = True
        self.thread = threading.Thread(target=self.listening.serve_forever)
        self.thread.start()

    def forward(self, client):
        with socket.socket(socket.AF_UNIX) as server:
            server.connect(self.server)
            while True:
                ready, _, _ = select.select([client, server], [], [])
                if server in ready:
                    data = server.recv(1 << 16)
                    if not data:
                        return
                    client.sendall(data)
                elif client in ready:
                    data = client.recv(1 << 16)
                    if not data:
                        return
                    # A former connection says good-bye whenever its turn comes.
                    self.messages += data != b"X\0\0\0\4"
                    if self.messages == self.at and not self.heard:
                        return
                    server.sendall(data)
                    if self.messages == self.at:
                        # It is done there, or is nothing that is answered.
                        select.select([server], [], [], 1.0)
                        return

    def close(self):
        self.listening.shutdown()
        self.listening.server_close()
        self.thread.join()


@pytest.mark.parametrize("keys", [None, "word"])
def test_a_connection_that_is_lost_at_any_message_writes_each_row_once(
    postgres, postgres_server, files, keys
):
    """Between any two statements, within COPY, and with the answer to COMMIT on its way."""
    execute(postgres, f"CREATE TABLE words (word text {'UNIQUE' if keys else ''}, n bigint)")
    directory = tempfile.mkdtemp(prefix="ackcore-cut-")
    cutting = Cutting(directory, postgres_server.directory)
    dsn = postgres.replace(f"host={postgres_server.directory}", f"host={directory}")
    one = to_postgres(dsn, "words", keys=keys)
    each = 3 if keys else 4
    lost_answers = number = 0
    try:
        one.claim("count", "abc", "/cp")
        for heard in (False, True):
            release_all(one)  # whether a connection is sound is asked before it is used
            cutting.at = 0
            while True:
                cutting.at, cutting.messages, cutting.heard = cutting.at + 1, 0, heard
                some = accepted(files, number)
                try:
                    one.write(some)
                    break
                except SinkUnavailable:
                    n = len(execute(postgres, "SELECT * FROM words"))
                    before = 0 if keys else each * number
                    assert n in (before, before + each) or (keys and n == each)
                    lost_answers += n > before
                    cutting.messages = -1000
                    one.write(some)
                number += 1
                expected = each if keys else each * number
                assert len(execute(postgres, "SELECT * FROM words")) == expected
            assert cutting.at > 6
            number += 1
        assert lost_answers or keys
    finally:
        release_all(one)
        cutting.close()
        shutil.rmtree(directory)
