"""What is declared is what is built, and what does not fit is refused with the way out."""

from __future__ import annotations

import functools
import pickle
import re
from types import MethodType
from unittest.mock import Mock

import pyarrow as pa
import pytest

from ackcore.topology import (
    All,
    BasicBolt,
    BatchBolt,
    Bolt,
    Component,
    Fields,
    Global,
    Input,
    LocalOrShuffle,
    PartialKey,
    Settings,
    Shuffle,
    TopologyBuilder,
    TopologyError,
    Tuple,
)

KAFKA = ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType")


class Foreign:
    """As much of a frame of pandas as this floor looks at."""

    __module__ = "pandas.core.frame"
    columns = ("x",)


class Derived(Foreign):
    """One with somebody's own methods, such as geopandas has."""


@pytest.fixture
def builder(make):
    """A word count, to be spoilt by one more declaration."""
    return make.word_count()


def refusal(builder):
    """The one thing that is wrong with a topology."""
    with pytest.raises(TopologyError) as caught:
        builder.build()
    (problem,) = caught.value.problems
    assert str(caught.value) == problem
    return problem


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
    assert bolt.inputs == (Input("split", "default", Fields(("word",))),)
    assert (sink.component, sink.stream, sink.writer) == ("count", "default", make.write)
    assert topology.settings == Settings()
    assert topology.streams("lines") == topology.streams("split") == ("default",)
    assert topology.fields("lines") == ("line",)
    assert topology.fields("count", "default") == ("word", "n")
    assert repr(topology) == f"<Topology {topology.fingerprint[:12]} of lines, split, count>"


def test_each_grouping_has_its_method_and_they_chain(make):
    names = ["a", "b", "c", "d", "e", "f", "g"]
    builder = TopologyBuilder()
    for name in names:
        builder.spout(name, make.frame("x", "y"))
    builder.bolt("z", make.rows()).shuffle("a").fields("b", "x", "y").all("c").global_("d").global_(
        "e"
    ).local_or_shuffle("f").partial_key("g", "y")
    groupings = [Shuffle(), Fields(("x", "y")), All(), Global(), Global(), LocalOrShuffle()]
    groupings.append(PartialKey(("y",)))
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
        (Shuffle(), False, True),
        (LocalOrShuffle(), False, False),
        (Fields(("x",)), True, True),
        (PartialKey(("x",)), True, True),
        (All(), True, True),
        (Global(), True, True),
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
    assert topology.streams("parse") == ("good", "bad")
    assert topology.bolts["count"].inputs == (Input("parse", "good", Fields(("word",))),)
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


def test_a_writer_may_be_an_object_that_writes(make):
    class Writer:
        def write(self, frame, batch_id):
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
        (lambda b, m: b.sink(7, m.write), "component must be the name of what is written, got int"),
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
            "source must be a DataFrame, whose .columns are names, got list; spark.createDataFrame",
        ),
        (
            lambda b, m: b.spout("s", pa.table({"x": [1]})),
            "source of spout 's' must be a DataFrame of Spark, got pyarrow.lib.Table; "
            "spark.createDataFrame(...) makes one of it",
        ),
        (
            lambda b, m: b.spout("s", Derived()),
            "source of spout 's' must be a DataFrame of Spark, got pandas.core.frame.Foreign; ",
        ),
        (
            lambda b, m: b.spout("s", m.frame("x"), message_id=5),
            "message_id must be the name of a column or a list of them, got int 5",
        ),
        (lambda b, m: b.spout("s", m.frame("x"), message_id=["x", 5]), "got list ['x', 5]"),
        (
            lambda b, m: b.bolt("x", m.batches),
            "bolt 'x' must be an instance, got the class Batches; pass Batches(...)",
        ),
        (
            lambda b, m: b.bolt("x", print),
            "bolt 'x' must be a Bolt, a BasicBolt or a BatchBolt, "
            "got builtin_function_or_method; derive",
        ),
        (
            lambda b, m: b.bolt("x", Component()),
            "bolt 'x' must be a Bolt, a BasicBolt or a BatchBolt, got Component; derive",
        ),
        (
            lambda b, m: b.bolt("x", m.batches(), parallelism="4"),
            "parallelism of bolt 'x' must be an integer or None, got str '4'",
        ),
        (lambda b, m: b.bolt("x", m.batches(), parallelism=True), "got bool True"),
        (
            lambda b, m: b.bolt("x", m.batches()).shuffle(m.frame("x")),
            "component must be the name of what is read, got Frame",
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
            "writer of sink 'count' must be a function of (DataFrame, batch_id) or have a method "
            "write(DataFrame, batch_id), got str",
        ),
        (
            lambda b, m: b.sink("count", m.frame),
            "writer of sink 'count' must be a function or an object, got the class Frame; "
            "pass Frame(...)",
        ),
        (
            lambda b, m: b.build({"max_attempts": 3}),
            "settings must be Settings, got dict; single ones are given by keyword",
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


def test_a_bolt_whose_methods_would_do_nothing_is_refused_by_name(builder):
    class Yields(Bolt):
        def execute(self, tuple):
            yield tuple

    with pytest.raises(TypeError, match=r"bolt 'x': Yields.execute must be a plain method"):
        builder.bolt("x", Yields())


def test_a_message_id_of_no_columns_is_refused(builder, make):
    with pytest.raises(ValueError, match=r"message_id must name at least one column, got none; "):
        builder.spout("s", make.frame("x"), message_id=[])


# --- what does not fit, refused by build ---------------------------------------------------------


def test_nothing_but_spouts_makes_records(make):
    assert refusal(TopologyBuilder()) == (
        "the topology has no spout; declare one with .spout(name, source)"
    )


@pytest.mark.parametrize(
    ("name", "usable"),
    [
        ("my bolt", "my_bolt"),
        ("../count", "_.._count"),
        ("7up", "_7up"),
        (".hidden", "_.hidden"),
        ("-x", "_-x"),
        ("größe", "gr_e"),
        ("a\n", "a_"),
        ("x" * 65, "x" * 64),
    ],
)
def test_a_name_that_is_no_file_name_is_refused(builder, make, name, usable):
    builder.bolt(name, make.batches()).shuffle("split")
    problem = refusal(builder)
    assert f"the name of bolt {name!r} must be 1 to 64 letters, digits" in problem
    assert problem.endswith(f"{usable!r} would do")


def test_the_empty_name_is_refused(make):
    builder = make.word_count()
    builder.bolt("", make.batches()).shuffle("split")
    assert refusal(builder).endswith("since files are named after it; got ''")


def test_a_name_of_64_characters_with_every_mark_will_do(builder, make):
    builder.bolt("_Az09.-" + "x" * 57, make.batches()).shuffle("split")
    assert len(builder.build().bolts) == 3


@pytest.mark.parametrize("kind", ["spout", "bolt", "sink"])
def test_names_like_ours_are_refused(builder, make, kind):
    if kind == "spout":
        builder.spout("_ackcore_x", make.frame("x"))
        builder.sink("_ackcore_x", make.write, name="x")
    elif kind == "bolt":
        builder.bolt("_ackcore_x", make.batches()).shuffle("split")
    else:
        builder.sink("split", make.write, name="_Ackcore_x")
    assert re.fullmatch(
        rf"{kind} '_[aA]ckcore_x' must not begin with '_ackcore_', as our own names do; rename it",
        refusal(builder),
    )


def test_a_name_may_be_had_once_over_spouts_and_bolts(builder, make):
    builder.bolt("lines", make.batches()).shuffle("split")
    assert refusal(builder) == (
        "2 components are named 'lines' (a spout, a bolt); rename all but one"
    )


def test_names_that_differ_in_case_only_are_refused(builder, make):
    builder.bolt("Split", make.batches()).shuffle("lines")
    assert refusal(builder) == (
        "components 'Split' and 'split' differ only in case, which neither Spark's columns nor "
        "every file system tells apart; rename one"
    )


def test_two_sinks_of_one_name_are_refused(builder, make):
    builder.sink("split", make.write, name="counts")
    assert refusal(builder) == (
        "2 sinks are named 'counts' (a sink, a sink); give all but one another with name="
    )


def test_a_sink_may_have_a_components_name_and_a_stream_may_have_two_sinks(builder, make):
    builder.sink("count", make.write)
    assert list(builder.build().sinks) == ["counts", "count"]


@pytest.mark.parametrize(
    ("component", "way_out"),
    [
        ("spilt", "did you mean 'split'?"),
        ("Split", "did you mean 'split'?"),
        ("zebra", "the components are 'lines', 'split', 'count', 'x'"),
    ],
)
def test_an_unknown_component_is_named_with_its_near_miss(builder, make, component, way_out):
    builder.bolt("x", make.batches()).shuffle(component)
    assert refusal(builder) == (f"bolt 'x' reads {component!r}, which is not declared; {way_out}")


def test_a_sink_on_an_unknown_component_is_named_with_its_near_miss(builder, make):
    builder.sink("counts", make.write, name="x")
    assert refusal(builder) == (
        "sink 'x' reads 'counts', which is not declared; did you mean 'count'?"
    )


def test_an_unknown_stream_is_named_with_its_near_miss(builder, make):
    builder.bolt("p", make.batches({"default": make.words, "errors": make.words})).shuffle("lines")
    builder.bolt("x", make.batches()).shuffle("p", stream="erors")
    builder.sink("p", make.write, stream="late", name="y")
    with pytest.raises(TopologyError) as caught:
        builder.build()
    assert caught.value.problems == (
        "bolt 'x' reads stream 'erors' of 'p', which has none such; did you mean 'errors'?",
        "sink 'y' reads stream 'late' of 'p', which has none such; "
        "the streams are 'default', 'errors'",
    )


def test_a_spout_has_one_stream(builder, make):
    builder.bolt("x", make.batches()).shuffle("lines", stream="errors")
    assert refusal(builder) == (
        "bolt 'x' reads stream 'errors' of 'lines', which is a spout; "
        "a spout's one stream is 'default'"
    )


def test_a_bolt_that_emits_nothing_has_no_stream_to_read(builder, make):
    builder.bolt("silent", make.batches()).shuffle("lines")
    builder.bolt("x", make.batches()).shuffle("silent")
    assert refusal(builder) == (
        "bolt 'x' reads stream 'default' of 'silent', which emits nothing; "
        "declare what it emits in its outputs"
    )


@pytest.mark.parametrize(
    ("source", "field", "way_out"),
    [
        ("split", "wrod", "did you mean 'word'?"),
        ("lines", "lien", "did you mean 'line'?"),
        ("count", "zebra", "the fields are 'word', 'n'"),
    ],
)
@pytest.mark.parametrize("method", ["fields", "partial_key"])
def test_a_grouping_field_that_is_not_declared_is_refused(
    builder, make, method, source, field, way_out
):
    getattr(builder.bolt("x", make.batches()), method)(source, field)
    assert refusal(builder) == (
        f"{method} grouping of bolt 'x' names field {field!r}, which {source!r} does not have; "
        f"{way_out}"
    )


@pytest.mark.parametrize("method", ["fields", "partial_key"])
def test_a_keyed_grouping_names_each_field_once_and_one_at_least(builder, make, method):
    getattr(builder.bolt("x", make.batches()), method)("split")
    getattr(builder.bolt("y", make.batches()), method)("split", "word", "word")
    with pytest.raises(TopologyError) as caught:
        builder.build()
    assert caught.value.problems == (
        f"{method} grouping of bolt 'x' on 'split' names no field; "
        "name one, or use .global_() for a single task",
        f"{method} grouping of bolt 'y' on 'split' must name a field once, got 'word', 'word'",
    )


@pytest.mark.parametrize(
    "type_",
    [
        pa.map_(pa.string(), pa.int64()),
        pa.list_(pa.map_(pa.string(), pa.int64())),
        pa.struct([("a", pa.map_(pa.string(), pa.int64()))]),
        pa.list_(pa.int64()),
        pa.struct([("a", pa.decimal128(10, 2))]),
    ],
    ids=str,
)
def test_maps_are_no_keys_however_deep(make, type_):
    builder = make.word_count(words=pa.schema([("word", pa.string()), ("tags", type_)]))
    builder.bolt("x", make.batches()).fields("split", "word", "tags")
    if "map" not in str(type_):
        assert builder.build()
        return
    assert refusal(builder) == (
        f"fields grouping of bolt 'x' names field 'tags' of 'split', which is a {type_}; equal "
        "maps may list their entries in any order, so group by another field, or emit a sorted "
        "list"
    )


def test_a_circle_is_named_from_the_bolt_that_was_declared_first(builder, make):
    for name, reads in [("a", "c"), ("b", "a"), ("c", "b")]:
        builder.bolt(name, make.batches(make.words)).shuffle("lines").fields(reads, "word")
    assert refusal(builder) == (
        "bolts read one another in a circle: a -> b -> c -> a; a tree of tuples must end within "
        "its micro-batch, so take one of these inputs away (what must come round again leaves by "
        "a sink and comes in by a spout)"
    )


@pytest.mark.parametrize("entered", ["b", "c", "d"])
def test_a_circle_is_named_alike_wherever_it_is_entered(builder, make, entered):
    builder.bolt("a", make.batches(make.words)).shuffle(entered)
    for name, reads in [("b", "d"), ("c", "b"), ("d", "c")]:
        builder.bolt(name, make.batches(make.words)).shuffle("lines").fields(reads, "word")
    assert "in a circle: b -> c -> d -> b;" in refusal(builder)


def test_a_bolt_that_reads_itself_is_a_circle(builder, make):
    builder.bolt("a", make.batches(make.words)).shuffle("a")
    assert "in a circle: a -> a;" in refusal(builder)


def test_a_bolt_has_an_input(builder, make):
    builder.bolt("alone", make.batches())
    assert refusal(builder) == (
        "bolt 'alone' reads nothing; give it an input, "
        "such as .bolt('alone', ...).shuffle(<component>)"
    )


def test_a_spout_that_nobody_reads_is_refused(builder, make):
    builder.spout("clicks", make.frame("user"))
    assert refusal(builder) == (
        "nobody reads spout 'clicks'; let a bolt or a sink read it, or take it away"
    )


def test_a_stream_is_read_once_by_a_bolt(builder, make):
    builder.bolt("x", make.batches()).shuffle("split").fields("split", "word")
    assert refusal(builder) == (
        "bolt 'x' reads 'split' twice; a bolt reads a stream by one grouping, "
        "so take the other away"
    )


@pytest.mark.parametrize("parallelism", [0, -1, 65_537])
def test_parallelism_is_a_number_of_tasks(builder, make, parallelism):
    builder.bolt("x", make.batches(), parallelism=parallelism).shuffle("split")
    assert refusal(builder) == (
        f"parallelism of bolt 'x' must be in 1..65536, got {parallelism}; "
        "leave it out for as many tasks as there are"
    )


def test_one_object_is_one_bolt(builder, make):
    bolt = make.batches()
    builder.bolt("x", bolt).shuffle("split")
    builder.bolt("y", bolt).shuffle("split")
    assert refusal(builder) == (
        "bolts 'x' and 'y' are one and the same object, which can keep one collector only; "
        "make a Batches(...) for each"
    )


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (["word"], "bolt 'x': Batches.outputs must be a pyarrow.Schema"),
        ({"default": ["word"]}, "bolt 'x': Batches.outputs must map streams to pyarrow.Schema"),
        ({1: pa.schema([("word", pa.string())])}, "must map streams to pyarrow.Schema, got 1"),
        (pa.schema([]), "bolt 'x': Batches.outputs['default'] must have a field at least"),
    ],
)
def test_outputs_that_are_no_schema_are_refused_and_their_readers_are_not_blamed(
    builder, make, outputs, message
):
    builder.bolt("x", make.batches(outputs)).shuffle("split")
    builder.bolt("y", make.batches()).shuffle("x", stream="any")
    assert message in refusal(builder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (["a", "b", "a"], "'x' has 2 fields named 'a'; rename one in outputs"),
        (
            ["_ackcore_root"],
            "'x' has a field named '_ackcore_root', and names that begin with '_ackcore_' are our "
            "own; rename it",
        ),
    ],
)
def test_fields_of_a_stream_have_names_of_their_own(builder, make, fields, message):
    builder.bolt("x", make.batches(pa.schema([(f, pa.int64()) for f in fields]))).shuffle("split")
    assert refusal(builder) == message


def test_a_field_that_two_have_can_be_asked_for(builder, make):
    twice = pa.schema([("a", pa.int64()), ("a", pa.int64())])
    builder.bolt("x", make.batches(twice)).shuffle("split")
    builder.bolt("y", make.batches(inputs=twice)).fields("x", "a")
    assert refusal(builder) == "'x' has 2 fields named 'a'; rename one in outputs"


def test_streams_that_differ_in_case_only_are_refused(builder, make):
    builder.bolt("x", make.batches({"bad": make.words, "Bad": make.words})).shuffle("split")
    assert refusal(builder).startswith(
        "streams of bolt 'x', 'Bad' and 'bad' differ only in case, which neither"
    )


def test_a_named_stream_has_a_name_of_its_kind(builder, make):
    builder.bolt("x", make.batches({"a/b": make.words})).shuffle("split")
    assert refusal(builder).startswith("the name of stream of bolt 'x', 'a/b' must be 1 to 64")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ((), "the source of spout 's' has no fields; a tuple has at least one"),
        (
            ("x", "y", "x"),
            "the source of spout 's' has 2 fields named 'x'; drop or rename one",
        ),
        (
            ("x", "_ACKCORE_y"),
            "the source of spout 's' has a field named '_ACKCORE_y', and names that begin with "
            "'_ackcore_' are our own; rename it",
        ),
    ],
)
def test_columns_of_a_source_have_names_of_their_own(builder, make, columns, message):
    builder.spout("s", make.frame(*columns))
    builder.sink("s", make.write)
    assert refusal(builder) == message


def test_columns_of_a_message_id_are_the_sources_each_once(builder, make):
    builder.spout("s", make.frame("user", "time"), message_id=("usr", "time", "time"))
    builder.sink("s", make.write)
    with pytest.raises(TopologyError) as caught:
        builder.build()
    assert caught.value.problems == (
        "message_id of spout 's' must name a column once, got 'usr', 'time', 'time'",
        "message_id of spout 's' names 'usr', which its source does not have; did you mean 'user'?",
    )


def test_unique_is_said_of_a_message_id(builder, make):
    builder.spout("s", make.frame("x"), unique=True)
    builder.sink("s", make.write)
    assert refusal(builder) == (
        "unique=True of spout 's' says that its message ids need no check, and it has none; "
        "name their columns in message_id, or leave unique out"
    )


# --- methods that nobody could call --------------------------------------------------------------


def one(base, **methods):
    """A bolt of these methods."""
    return type("Split", (base,), methods)()


@pytest.mark.parametrize(
    ("bolt", "problem"),
    [
        (
            one(Bolt),
            "bolt 'x' must have a method execute(self, tuple), as it is a Bolt, and Split has none",
        ),
        (
            one(BasicBolt, process=lambda self, batch, out: None),
            "bolt 'x' must have a method execute(self, tuple, collector), as it is a BasicBolt, "
            "and Split has process, which is a BatchBolt's; rename it or derive from that",
        ),
        (
            one(BatchBolt, execute=lambda self, tuple: None),
            "bolt 'x' must have a method process(self, batch, out), as it is a BatchBolt, "
            "and Split has execute, which is a Bolt's or a BasicBolt's; "
            "rename it or derive from that",
        ),
        (
            one(Bolt, execute=lambda self, tuple, collector: None),
            "bolt 'x': Split.execute must take (self, tuple), as in a Bolt, "
            "got (self, tuple, collector)",
        ),
        (
            one(BasicBolt, execute=lambda self, tuple: None),
            "bolt 'x': Split.execute must take (self, tuple, collector), as in a BasicBolt, "
            "got (self, tuple)",
        ),
        (
            one(BatchBolt, process=lambda self, batch: None),
            "bolt 'x': Split.process must take (self, batch, out), as in a BatchBolt, "
            "got (self, batch)",
        ),
        (
            one(BatchBolt, process=lambda self, batch, *, out: None),
            "bolt 'x': Split.process must take (self, batch, out), as in a BatchBolt, "
            "got (self, batch, *, out)",
        ),
        (
            one(Bolt, execute=lambda: None),
            "bolt 'x': Split.execute must take (self, tuple), as in a Bolt, got ()",
        ),
        (
            one(Bolt, execute=staticmethod(lambda: None)),
            "bolt 'x': Split.execute must take (tuple), as in a Bolt, got ()",
        ),
        (one(Bolt, execute=5), "bolt 'x': Split.execute must be a method, got int"),
        (
            one(BatchBolt, process=lambda self, batch, out: None, flush=lambda self: None),
            "bolt 'x': Split.flush must take (self, out), as in a BatchBolt, got (self)",
        ),
        (
            one(Bolt, execute=lambda self, tuple: None, flush=lambda self, out: None),
            "bolt 'x': Split.flush must take (self), as in a Bolt, got (self, out)",
        ),
        (
            one(Bolt, execute=lambda self, tuple: None, prepare=lambda self: None),
            "bolt 'x': Split.prepare must take (self, context), as in a Bolt, got (self)",
        ),
        (
            one(Bolt, execute=lambda self, tuple: None, cleanup=lambda self, why: None),
            "bolt 'x': Split.cleanup must take (self), as in a Bolt, got (self, why)",
        ),
    ],
)
def test_a_bolt_that_would_fail_every_record_is_refused(builder, bolt, problem):
    builder.bolt("x", bolt).shuffle("split")
    assert refusal(builder) == problem


def test_a_refused_method_is_shown_without_its_types(builder):
    class Split(BasicBolt):
        def execute(self, tuple: Tuple, n: int = 3, *, loud: bool) -> None:
            """Never called."""

    builder.bolt("x", Split()).shuffle("split")
    assert refusal(builder).endswith("got (self, tuple, n=3, *, loud)")


def decorated(method):
    @functools.wraps(method)
    def call(self, *inputs):
        return method(self, *inputs, "more")

    return call


@pytest.mark.parametrize(
    "bolt",
    [
        one(Bolt, execute=lambda self, tuple, n=3: None),
        one(BasicBolt, execute=lambda self, *inputs: None),
        one(BasicBolt, execute=lambda me, t, out: None),
        one(BatchBolt, process=lambda self, batch, out: None, execute=lambda self: None),
        one(Bolt, execute=decorated(lambda self, tuple, more: None)),
        one(Bolt, execute=staticmethod(lambda tuple: None)),
        one(Bolt, execute=classmethod(lambda cls, tuple: None)),
        one(Bolt, execute=functools.partialmethod(lambda self, n, tuple: None, 3)),
        one(Bolt, execute=Mock()),
        one(Bolt, execute=dict.fromkeys),  # a builtin
        one(Bolt, execute=iter),  # a builtin without a signature
        one(Bolt, execute=MethodType(iter, ())),
    ],
)
def test_what_can_be_called_is_accepted_however_it_is_written(builder, bolt):
    builder.bolt("x", bolt).shuffle("split")
    assert builder.build()


def test_a_method_of_the_instance_counts(builder):
    bolt = one(Bolt)
    bolt.execute = lambda tuple: None
    builder.bolt("x", bolt).shuffle("split")
    assert builder.build()


# --- what a bolt says that it reads --------------------------------------------------------------


def test_inputs_that_come_in_are_accepted_beside_others(make):
    builder = make.word_count()
    builder.bolt("x", make.batches(inputs=make.words)).shuffle("count")
    builder.bolt("y", make.batches(inputs=pa.schema([("line", pa.string())]))).shuffle("lines")
    assert builder.build()


@pytest.mark.parametrize(
    ("source", "wanted", "message"),
    [
        (
            "count",
            pa.schema([("n", pa.int32())]),
            "inputs of bolt 'x' ask for 'n: int32', and 'count' has 'n: int64'; "
            "change the one or the other",
        ),
        (
            "count",
            pa.schema([("words", pa.string())]),
            "inputs of bolt 'x' ask for 'words: string', and 'count' has no such field; "
            "did you mean 'word'?",
        ),
        (
            "lines",
            pa.schema([("text", pa.string())]),
            "inputs of bolt 'x' ask for 'text: string', and 'lines' has no such field; "
            "the fields are 'line'",
        ),
        (
            "lines",
            ["line"],
            "inputs of bolt 'x' must be a pyarrow.Schema or None, got list; "
            "pyarrow.schema(...) makes one",
        ),
    ],
)
def test_inputs_that_do_not_come_in_are_refused(builder, make, source, wanted, message):
    builder.bolt("x", make.batches(inputs=wanted)).shuffle(source)
    assert refusal(builder) == message


def test_inputs_on_the_class_hold_for_every_stream_that_is_read(builder, make):
    class Adds(type(make.batches())):
        inputs = pa.schema([("n", pa.int64())])

        def __init__(self):
            """Leave what the class says."""

    builder.bolt("p", make.batches({"a": make.counts, "b": make.words})).shuffle("lines")
    builder.bolt("x", Adds()).shuffle("p", stream="a").shuffle("p", stream="b")
    assert refusal(builder) == (
        "inputs of bolt 'x' ask for 'n: int64', and stream 'b' of 'p' has no such field; "
        "the fields are 'word'"
    )


# --- several at once -----------------------------------------------------------------------------


def test_everything_that_is_wrong_is_said_at_once(builder, make):
    builder.bolt("x", make.batches(), parallelism=0).fields("split", "wrod")
    builder.spout("clicks", make.frame("user"))
    with pytest.raises(TopologyError) as caught:
        builder.build()
    assert len(caught.value.problems) == 3
    lines = str(caught.value).splitlines()
    assert lines[0] == "3 things are wrong:"
    assert lines[1].startswith("1. parallelism of bolt 'x'")
    assert lines[2].startswith("2. fields grouping of bolt 'x' names field 'wrod'")
    assert lines[3].startswith("3. nobody reads spout 'clicks'")
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), again.problems) == (TopologyError, caught.value.problems)


def test_what_hangs_from_a_mistake_is_not_said_beside_it(make):
    builder = TopologyBuilder()
    builder.spout("lines", make.frame("line"))
    builder.bolt("split", make.batches(make.words)).fields("lnies", "lnie")
    assert refusal(builder).startswith("bolt 'split' reads 'lnies', which is not declared")


def test_a_long_list_of_names_is_cut(make):
    builder = TopologyBuilder()
    builder.spout("s", make.frame(*(f"c{n}" for n in range(20))))
    builder.bolt("x", make.batches()).fields("s", "zebra")
    assert refusal(builder).endswith("'c10', 'c11' and 8 more")


@pytest.mark.parametrize(
    "type_",
    [
        pa.dictionary(pa.int32(), pa.string()),
        pa.list_(pa.dictionary(pa.int8(), pa.string())),
        pa.struct([("a", pa.string_view())]),
        pa.binary_view(),
        pa.run_end_encoded(pa.int32(), pa.int64()),
        pa.dense_union([pa.field("a", pa.int64())]),
    ],
    ids=str,
)
def test_types_that_cannot_be_sent_row_by_row_are_refused(make, builder, type_):
    """They would be found out by a sink, when everything is decided."""
    schema = pa.schema([("n", pa.int64()), ("odd", type_)])
    builder.bolt("more", make.batches(schema)).shuffle("split")
    problem = refusal(builder)
    assert "field 'odd' of" in problem
    assert "must be of a type whose rows can be cut" in problem
    assert "declare the values' own type" in problem
