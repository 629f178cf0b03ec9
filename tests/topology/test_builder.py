"""Declared parts are built, and arguments of another type are refused at once."""

from __future__ import annotations

import functools
import pickle
import re

import pyarrow as pa
import pytest

from ackcore.topology import Settings, TopologyBuilder, expect
from ackcore.topology.components import Component
from ackcore.topology.parts import Grouping, Input

KAFKA = ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType")


class Foreign:
    """A stand-in for the part of a pandas frame that this package reads."""

    __module__ = "pandas.core.frame"
    columns = ("x",)


class Derived(Foreign):
    """One with methods of its own, such as geopandas has."""


# --- what is built -------------------------------------------------------------------------------


def test_a_topology_holds_what_was_declared_in_order(make):
    source, split, count = make.frame("line"), make.batches(make.words), make.batches(make.counts)
    builder = TopologyBuilder()
    builder.spout("lines", source)
    builder.bolt("split", split).shuffle("lines")
    builder.bolt("count", count, parallelism=4).fields("split", "word")
    builder.sink("count", make.write, name="counts")
    topology = builder.build()
    assert [list(topology.spouts), list(topology.bolts), list(topology.sinks)] == [
        ["lines"],
        ["split", "count"],
        ["counts"],
    ]
    spout, bolt, sink = topology.spouts["lines"], topology.bolts["count"], topology.sinks["counts"]
    assert (spout.source, spout.fields, spout.message_id) == (source, ("line",), ())
    assert (spout.tracked, spout.unique) == (True, False)
    assert bolt.component is count
    assert bolt.schemas == {"default": make.counts}
    assert bolt.parallelism == 4
    assert bolt.inputs == (Input("split", "default", Grouping("fields", ("word",))),)
    assert (sink.component, sink.stream, sink.writer) == ("count", "default", make.write)
    assert topology.settings == Settings()
    assert topology.spouts["lines"].fields == ("line",)
    assert repr(topology) == f"<Topology {topology.fingerprint[:12]} of lines, split, count>"


def test_each_grouping_has_its_method_and_they_chain(make):
    names = ["a", "b", "c", "d", "e", "f", "g"]
    builder = TopologyBuilder()
    for name in names:
        builder.spout(name, make.frame("x", "y"))
    builder.bolt("z", make.rows()).shuffle("a").fields("b", "x", "y").all("c").global_("d").global_(
        "e"
    ).local_or_shuffle("f").partial_key("g", "y")
    groupings = [
        Grouping("shuffle"),
        Grouping("fields", ("x", "y")),
        Grouping("all"),
        Grouping("global"),
        Grouping("global"),
        Grouping("local_or_shuffle"),
        Grouping("partial_key", ("y",)),
    ]
    inputs = builder.build().bolts["z"].inputs
    assert inputs == tuple(
        Input(name, "default", each) for name, each in zip(names, groupings, strict=True)
    )
    assert [str(each) for each in groupings] == [
        "shuffle",
        "fields(x, y)",
        "all",
        "global",
        "global",
        "local_or_shuffle",
        "partial_key(y)",
    ]


@pytest.mark.parametrize(
    ("grouping", "without", "with_parallelism"),
    [
        (Grouping("shuffle"), False, True),
        (Grouping("local_or_shuffle"), False, False),
        (Grouping("fields", ("x",)), True, True),
        (Grouping("partial_key", ("x",)), True, True),
        (Grouping("all"), True, True),
        (Grouping("global"), True, True),
    ],
    ids=str,
)
def test_a_shuffle_moves_tuples_only_to_a_bolt_with_a_parallelism(
    grouping, without, with_parallelism
):
    assert grouping.moves(None) is without
    assert grouping.moves(2) is with_parallelism
    assert pickle.loads(pickle.dumps(grouping)) == grouping


def test_named_streams_are_read_by_name(make):
    builder = TopologyBuilder()
    builder.spout("lines", make.frame("line"))
    builder.bolt("parse", make.batches({"good": make.words, "bad": make.words})).shuffle("lines")
    builder.bolt("count", make.batches()).fields("parse", "word", stream="good")
    builder.sink("parse", make.write, stream="bad")
    topology = builder.build()
    assert tuple(topology.bolts["parse"].schemas) == ("good", "bad")
    assert topology.bolts["count"].inputs == (
        Input("parse", "good", Grouping("fields", ("word",))),
    )
    assert topology.sinks["parse.bad"].stream == "bad"


def test_a_bolt_may_be_declared_before_what_it_reads(make):
    builder = TopologyBuilder()
    builder.bolt("count", make.batches()).fields("split", "word")
    builder.bolt("split", make.batches(make.words)).shuffle("lines")
    builder.spout("lines", make.frame("line"))
    assert list(builder.build().bolts) == ["count", "split"]


def test_a_builder_builds_again_and_what_was_built_stays(builder, make):
    before = builder.build()
    builder.bolt("more", make.batches()).shuffle("count")
    after = builder.build()
    assert list(before.bolts) == ["split", "count"]
    assert list(after.bolts) == ["split", "count", "more"]


def test_a_spout_that_only_a_sink_reads_is_a_topology(make):
    builder = TopologyBuilder()
    builder.spout("lines", make.frame("line"))
    builder.sink("lines", make.write)
    assert builder.build().sinks["lines"].component == "lines"


def test_a_writer_may_be_a_sink(make):
    class Writer:
        def write(self, batch):
            raise AssertionError("no sink is called here")

    builder = make.word_count()
    builder.sink("split", Writer())
    assert list(builder.build().sinks) == ["counts", "split"]


@pytest.mark.parametrize(
    ("columns", "unique"),
    [
        (KAFKA, True),
        ((*KAFKA, "headers"), True),
        (("value", "topic", "partition", "offset"), False),  # perhaps exploded
        ((*KAFKA, "word"), False),
    ],
)
def test_kafkas_columns_are_known(make, columns, unique):
    builder = TopologyBuilder()
    builder.spout("events", make.frame(*columns))
    builder.sink("events", make.write)
    spout = builder.build().spouts["events"]
    assert spout.message_id == ("topic", "partition", "offset")
    assert spout.unique is unique


def test_a_message_id_that_is_given_counts_for_more_than_kafkas(make):
    builder = TopologyBuilder()
    builder.spout("a", make.frame(*KAFKA), message_id="key")
    builder.spout("b", make.frame(*KAFKA[1:5]), unique=True)
    builder.spout("c", make.frame("topic", "partition", "offset"))
    builder.spout("d", make.frame("x", "y"), message_id=["y", "x"], tracked=False)
    for name in "abcd":
        builder.sink(name, make.write)
    spouts = builder.build().spouts
    assert (spouts["a"].message_id, spouts["a"].unique) == (("key",), False)
    assert (spouts["b"].message_id, spouts["b"].unique) == (("topic", "partition", "offset"), True)
    assert spouts["c"].message_id == ()
    assert (spouts["d"].message_id, spouts["d"].tracked) == (("y", "x"), False)


def test_settings_come_as_an_object_or_by_keyword_and_keywords_count_for_more(builder):
    assert builder.build(max_attempts=2).settings == Settings(max_attempts=2)
    given = Settings(max_attempts=2, chunk_rows=7)
    assert builder.build(given).settings is not None
    assert builder.build(settings=given, max_attempts=9).settings == Settings(
        max_attempts=9, chunk_rows=7
    )


# --- arguments of another type, refused where they are made --------------------------------------


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (lambda b, m: b.spout(1, m.frame("x")), "name must be the name of the spout, got int 1"),
        (lambda b, m: b.bolt(None, m.batches()), "name must be the name of the bolt, got NoneType"),
        (lambda b, m: b.sink(7, m.write), "component must be the name of a component, got int"),
        (
            lambda b, m: b.sink("count", m.write, name=3),
            "name must be the name of the sink, got int 3",
        ),
        (
            lambda b, m: b.sink("count", m.write, stream=None),
            "stream must be the name of a stream, got NoneType",
        ),
        (
            lambda b, m: b.spout("s", [1, 2]),
            "source of spout 's' must be a DataFrame or an instance of a planned source, whose "
            ".columns are names, got list; create a DataFrame with spark.createDataFrame",
        ),
        (
            lambda b, m: b.spout("s", pa.table({"x": [1]})),
            "source of spout 's' must be a DataFrame of Spark or a planned source, got "
            "pyarrow.lib.Table; "
            "pass spark.createDataFrame(...) of a pandas.DataFrame instead",
        ),
        (
            lambda b, m: b.spout("s", Derived()),
            "source of spout 's' must be a DataFrame of Spark or a planned source, got "
            "pandas.core.frame.Foreign; ",
        ),
        (
            lambda b, m: b.spout("s", m.frame("x"), message_id=5),
            "message_id of spout 's' must be the name of a column or a list of them, got int 5",
        ),
        (lambda b, m: b.spout("s", m.frame("x"), message_id=["x", 5]), "got list ['x', 5]"),
        (
            lambda b, m: b.bolt("x", m.batches),
            "bolt 'x' is the class Batches itself; pass Batches(...)",
        ),
        (
            lambda b, m: b.bolt("x", print),
            "bolt 'x' must be a Bolt, a BasicBolt, an AsyncBolt or a BatchBolt, "
            "got builtin_function_or_method; derive",
        ),
        (
            lambda b, m: b.bolt("x", Component()),
            "bolt 'x' must be a Bolt, a BasicBolt, an AsyncBolt or a BatchBolt, got Component",
        ),
        (
            lambda b, m: b.bolt("x", m.batches(), parallelism="4"),
            "parallelism of bolt 'x' must be an integer or None, got str '4'",
        ),
        (lambda b, m: b.bolt("x", m.batches(), parallelism=True), "got bool True"),
        (
            lambda b, m: b.bolt("x", m.batches()).shuffle(m.frame("x")),
            "component must be the name of a component, got Frame",
        ),
        (
            lambda b, m: b.bolt("x", m.batches()).shuffle("split", stream=2),
            "stream must be the name of a stream, got int 2",
        ),
        (
            lambda b, m: b.bolt("x", m.batches()).fields("split", ["word"]),
            "fields must be names, got list ['word']; pass them one by one: "
            ".fields(component, 'a', 'b')",
        ),
        (
            lambda b, m: b.bolt("x", m.batches()).partial_key("split", 1),
            ".partial_key(component, 'a', 'b')",
        ),
        (
            lambda b, m: b.sink("count", "counts.parquet"),
            "writer of sink 'count' must be a function of (DataFrame, batch_id) or an "
            "ackcore.spark.Sink, got str",
        ),
        (
            lambda b, m: b.sink("count", m.frame),
            "writer of sink 'count' is the class Frame itself; pass Frame(...)",
        ),
        (
            lambda b, m: b.sink("count", expect),
            "writer of sink 'count' is the function expect itself; pass expect(...)",
        ),
        (
            lambda b, m: b.spout("s", m.frame),
            "source of spout 's' is the class Frame itself; pass Frame(...)",
        ),
        (
            lambda b, m: b.spout("s", m.frame("x"), commit_group=Derived),
            "commit_group of spout 's' is the class Derived itself; pass Derived(...)",
        ),
        (
            lambda b, m: b.build({"max_attempts": 3}),
            "settings must be Settings, got dict; pass single settings by keyword",
        ),
        (
            lambda b, m: b.build(max_attemps=3),
            "'max_attemps' is not a setting; did you mean 'max_attempts'?",
        ),
    ],
)
def test_an_argument_of_another_type_is_refused_at_once(builder, make, declare, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        declare(builder, make)


def test_a_users_function_that_wraps_one_of_ackcore_is_a_sink(builder):
    @functools.wraps(expect)
    def write(frame, batch_id):
        raise AssertionError("nothing runs")

    builder.sink("count", write)


def test_a_message_id_of_no_columns_is_refused(builder, make):
    with pytest.raises(ValueError, match="message_id of spout 's' must name at least one column"):
        builder.spout("s", make.frame("x"), message_id=[])
