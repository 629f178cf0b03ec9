"""Mistakes of newcomers in declarations: each error has the argument, the value and the way out."""

import importlib
import inspect
import json
import math
import re
from datetime import timedelta
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest

from ackcore.tables import collect, count, latest, session, sum_of, tumbling
from ackcore.topology import BatchBolt, Settings, TopologyBuilder, Unavailable
from ackcore.topology.explain import draw
from ackcore.topology.settings import OF_RUNS

SALE = pa.schema([("shop", pa.string()), ("euros", pa.int64()), ("at", pa.timestamp("us"))])


class Source:
    columns = tuple(SALE.names)


class Sales(BatchBolt):
    outputs = SALE

    def __init__(self, uses=()):
        self.uses = uses

    def process(self, batch, out):
        """Never called: nothing here runs."""


def write(frame, batch_id):
    """Stand in for a sink's writer."""


def declared(**changes):
    """Declare and build a topology with a bolt, a sink and two tables; None removes one."""
    of = {
        "spout": {},
        "build": {},
        "bolt": {},
        "reads": ["sales"],
        "sink": {"component": "sales"},
        "table": {},
        **changes,
    }
    builder = TopologyBuilder()
    builder.spout("orders", Source(), **of["spout"])
    builder.bolt("sales", Sales(), **of["bolt"]).shuffle("orders")
    builder.bolt("later", Sales()).fields(*of["reads"], "shop")
    builder.sink(writer=write, **of["sink"])
    table = {"key": "shop", "value": {"n": count()}, "window": tumbling(3600, "at"), **of["table"]}
    builder.table("hours", **{"from_": "sales", **table})
    builder.table("totals", from_="sales", key="shop", value={"n": count()})
    return builder.build(**of["build"])


def is_refused(make, text):
    with pytest.raises((TypeError, ValueError)) as caught:
        make()
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"reads": ["hours.closd"]}, "'hours.closd', which is not declared; did you mean 'hours.c"),
        ({"reads": ["totals"]}, "is a table, whose rows are no stream; set uses = ['totals'] in"),
        ({"reads": ["hours.changes"]}, "'hours.changes', which a bolt cannot read; read 'hours.cl"),
        ({"reads": ["total"]}, "'total', which is not declared; did you mean 'totals'?"),
        ({"sink": {"component": "hours.close"}}, "which is not declared; did you mean 'hours.clos"),
        ({"sink": {"component": "hour.changes"}}, "not declared; did you mean 'hours.changes'?"),
        ({"sink": {"component": "hours"}}, "no stream; read 'hours.changes' or 'hours.closed'"),
        ({"sink": {"component": "totals"}}, "whose rows are no stream; read 'totals.changes'"),
        (
            {"sink": {"component": "hours.closed", "stream": "upserts"}},
            "stream 'upserts' of the closed windows of table 'hours', which does not exist; the "
            "streams are 'default'",
        ),
        (
            {"spout": {"dedupe": "shop"}},
            "TopologyBuilder.spout() has no argument 'dedupe'; did you",
        ),
        ({"spout": {"tracked": "no"}}, "tracked of spout 'orders' must be True or False, got s"),
        (
            {"bolt": {"limit": 5}},
            "TopologyBuilder.bolt() has no argument 'limit'; the arguments are",
        ),
        (
            {"sink": {"component": "sales", "strem": "x"}},
            "no argument 'strem'; did you mean 'stream",
        ),
        (
            {"build": {"max_dead": 5}},
            "'max_dead' is not a setting; it is an argument of start() or",
        ),
        ({"build": {"backoff_s": "1 min"}}, "backoff_s must be a number of seconds in 0.001.."),
    ],
)
def test_a_mistake_in_a_declaration(changes, text):
    is_refused(lambda: declared(**changes), text)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"from_": "totals"}, "whose rows are no stream; read 'sales'"),
        ({"key": ["shop", "window_start"]}, "key must not name 'window_start', which is"),
        ({"key": "shp"}, "key must name a column of the stream (shop, euros, at), g"),
        ({"key": "shp"}, "got 'shp'; did you mean 'shop'?"),
        ({"value": {"n": sum_of("euro")}}, "got 'euro'; did you mean 'euros'?"),
        ({"window": tumbling(1, "att")}, "got 'att'; did you mean 'at'?"),
        ({"key": []}, "key of table 'hours' must name at least one column, got none; na"),
        ({"key": None}, "key of table 'hours' must be the name of a column or a list of"),
        ({"key": 3}, "key of table 'hours' must be the name of a column or a list of"),
        ({"value": {}}, "value of table 'hours' must have at least one aggregate, got n"),
        ({"value": sum_of("euros")}, "map names of columns to aggregates, got an aggreg"),
        ({"value": [count()]}, "value of table 'hours' must map names of columns to agg"),
        ({"value": {1: count()}}, "got the name 1; write it as text"),
        ({"value": {"n": count}}, "value['n'] of table 'hours' must be an aggregate of"),
        ({"value": {"n": count}}, "; write count()"),
        ({"value": {"n": "sum"}}, "got 'sum'; write sum_of(...)"),
        ({"value": {"n": len}}, "; write count() or sum_of('euros')"),
        ({"window": 3600}, "window of table 'hours' must be made by tumbling, sliding or"),
        ({"ttl_s": "1 day"}, "ttl_s of table 'hours' must be a number of seconds, got s"),
        ({"ttl_s": 0}, "ttl_s of table 'hours' must be from 0.001 to 10,000,000,000 sec"),
        ({"ttl_s": math.nan}, "ttl_s of table 'hours' must be from 0.001 to"),
        ({"ttl": 5}, "TopologyBuilder.table() has no argument 'ttl'; did you mean 'ttl_"),
        ({"from_": Sales()}, "; pass the name under which it is declared"),
        ({"value": {"n": "count"}}, "got 'count'; write count()"),
        ({"value": {"n": sum_of("shop")}}, "of string; name another column, or e"),
        ({"window": tumbling(5, "euros")}, "of int64; name another column, or e"),
    ],
)
def test_a_mistake_in_a_table(changes, text):
    is_refused(lambda: declared(table=changes), text)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: tumbling(3600, "at", lateness_s=5),
            "tumbling() has no argument 'lateness_s'; did",
        ),
        (lambda: session(size_s=5, time="at"), "session() has no argument 'size_s'; "),
        (lambda: tumbling(3600, "at", 60), "tumbling() takes 'size_s', 'time' without a keyword, "),
        (
            lambda: latest("at", col="euros"),
            "latest() has no argument 'col'; did you mean 'column'",
        ),
        (lambda: collect("euros", 5, 6), "got 6 as well; remove it"),
        (
            lambda: Settings(max_attempt=5),
            "'max_attempt' is not a setting; did you mean 'max_attem",
        ),
        (
            lambda: TopologyBuilder("lines"),
            "TopologyBuilder() takes no argument without a keyword, got 'lines'",
        ),
        (lambda: Unavailable(after=5), "Unavailable() has no argument 'after'; did you mean 'af"),
        (
            lambda: TopologyBuilder().spout("a", Source(), "shop"),
            "TopologyBuilder.spout() takes 'name', 'source' without a keyword, got 'shop' as "
            "well; pass it as a keyword: message_id, tracked, ",
        ),
    ],
)
def test_a_mistake_in_a_call(make, text):
    is_refused(make, text)


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ("1 hour", "3600"),
        ("1.5h", "5400"),
        ("30 min", "1800"),
        ("10 minutes", "600"),
        ("250ms", "0.25"),
        ("5 milliseconds", "0.005"),
        ("2 days", "172800"),
        ("1 week", "604800"),
        ("45", "45"),
        (timedelta(minutes=10), "600"),
    ],
)
def test_a_time_in_words_is_refused_with_its_number_of_seconds(given, seconds):
    for make in (
        lambda: tumbling(given, "at"),
        lambda: session(5, "at", late_s=given),
        lambda: tumbling(5, "at", idle_s=given),
        lambda: declared(table={"ttl_s": given, "window": None}),
        lambda: declared(spout={"dedup": "shop", "within_s": given}),
        lambda: Settings(max_backoff_s=given),
    ):
        with pytest.raises(TypeError, match=f"; write {re.escape(seconds)}$"):
            make()


def test_seconds_may_be_numbers_of_numpy_and_decimals():
    for given in (np.int8(100), np.float32(100), Decimal("100.0")):
        assert tumbling(given, "at", late_s=given) == tumbling(100, "at", late_s=100)
        builder = declared(table={"ttl_s": given, "window": None})
        assert json.dumps(builder.tables["hours"].shape.ttl_s) == "100.0"
    with pytest.raises(ValueError, match="size_s must be from"):
        tumbling(Decimal("nan"), "at")


@pytest.mark.parametrize("given", ["1 month", "soon", "1 h 5 min", None, b"5"])
def test_other_values_have_no_number_of_seconds(given):
    with pytest.raises(TypeError, match=r"size_s must be a number of seconds, got ") as caught:
        tumbling(given, "at")
    assert "write" not in str(caught.value)


def test_the_arguments_of_runs_are_known():
    pytest.importorskip("pyspark")
    spark = importlib.import_module("ackcore.spark")
    arguments = {*inspect.signature(spark.start).parameters}
    arguments |= {*inspect.signature(spark.run_batch).parameters}
    assert set(OF_RUNS) <= arguments - set(Settings.names())


# --- Readers of tables in build(): the tables of bolts, and the sinks of changed rows.


def built(*, uses=(), value=None, changes="totals.changes", bolt="sales", **sink):
    builder = TopologyBuilder()
    builder.spout("lines", Source())
    builder.bolt(bolt, Sales(uses)).shuffle("lines")
    value = {"euros": sum_of("euros"), "orders": count()} if value is None else value
    builder.table("totals", from_=bolt, key="shop", value=value)
    builder.sink(changes, write, **sink)
    return builder.build()


def test_sinks_of_changed_rows_have_the_schema_of_their_stream():
    topology = built(uses=["totals"])
    sink = topology.sinks["totals.changes"]
    assert topology.table_read(sink) is topology.tables["totals"]
    names = ["shop", "euros", "orders", "old_euros", "old_orders"]
    assert topology.sink_schema(sink).names == names
    upserts = built(stream="upserts")
    assert upserts.sink_schema(upserts.sinks["totals.changes.upserts"]).names == names[:3]
    assert topology.fingerprint != upserts.fingerprint
    assert "sink totals.changes: write, of changes to totals" in topology.explain()
    assert ">totals.changes<" in draw(topology.structure)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"uses": "totals"}, "uses of bolt 'sales' must be a list of names of tables, got str"),
        ({"uses": [1]}, "uses of bolt 'sales' must be a list of names of tables, got list"),
        ({"uses": ["total"]}, "uses table 'total', which is not declared; did you mean 'totals'"),
        ({"changes": "total.changes"}, "reads 'total.changes', which is not declared"),
        ({"stream": "upsert"}, "stream 'upsert' of the changes of table 'totals'.*'upserts'"),
        ({"isolate": True}, "isolate of sink 'totals.changes' makes .* remove isolate"),
        (
            {"value": {"n": count(), "old_n": count()}},
            "has 2 fields named 'old_n'; rename a value of the table, or read stream 'upserts'",
        ),
        ({"bolt": "totals.changes"}, "'totals.changes' must have another name"),
    ],
)
def test_wrong_readers_are_refused(wrong, text):
    with pytest.raises(ValueError, match=text):
        built(**wrong)
