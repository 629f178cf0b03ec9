"""Misfits are refused by build, with the way out."""

from __future__ import annotations

import re

import pyarrow as pa
import pytest
from acting import refusal

from ackcore.tables import count
from ackcore.topology import TopologyBuilder, TopologyError

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
        rf"{kind} '_[aA]ckcore_x' must not begin with '_ackcore_', "
        "which is reserved for ackcore; rename it",
        refusal(builder),
    )


def test_a_table_may_not_be_named_like_the_rows_of_another(builder):
    builder.table("totals.changes", from_="split", key="word", value={"n": count()})
    assert "table 'totals.changes' must not end in '.changes' or '.closed'" in refusal(builder)


def test_a_name_may_be_had_once_over_spouts_and_bolts(builder, make):
    builder.bolt("lines", make.batches()).shuffle("split")
    assert refusal(builder) == (
        "2 components are named 'lines' (a spout, a bolt); rename all but one"
    )


def test_names_that_differ_in_case_only_are_refused(builder, make):
    builder.bolt("Split", make.batches()).shuffle("lines")
    assert refusal(builder) == (
        "components 'Split' and 'split' differ only in case, and Spark's columns and some "
        "file systems ignore case; rename one"
    )


def test_two_sinks_of_one_name_are_refused(builder, make):
    builder.sink("split", make.write, name="counts")
    assert refusal(builder) == (
        "2 sinks are named 'counts' (a sink, a sink); set another name with name="
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
        "bolt 'x' reads stream 'erors' of 'p', which does not exist; did you mean 'errors'?",
        "sink 'y' reads stream 'late' of 'p', which does not exist; the streams are "
        "'default', 'errors'",
    )


def test_a_spout_has_one_stream(builder, make):
    builder.bolt("x", make.batches()).shuffle("lines", stream="errors")
    assert refusal(builder) == (
        "bolt 'x' reads stream 'errors' of 'lines', which is a spout, and a spout's only "
        "stream is 'default'"
    )


def test_a_bolt_that_emits_nothing_has_no_stream_to_read(builder, make):
    builder.bolt("silent", make.batches()).shuffle("lines")
    builder.bolt("x", make.batches()).shuffle("silent")
    assert refusal(builder) == (
        "bolt 'x' reads stream 'default' of 'silent', which declares no outputs; declare the "
        "stream in its outputs"
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
        "bolts read one another in a cycle: a -> b -> c -> a; a tuple tree must end within "
        "its micro-batch; remove one of these inputs, or write the tuples to a sink and read "
        "them with a spout"
    )


@pytest.mark.parametrize("entered", ["b", "c", "d"])
def test_a_circle_is_named_alike_wherever_it_is_entered(builder, make, entered):
    builder.bolt("a", make.batches(make.words)).shuffle(entered)
    for name, reads in [("b", "d"), ("c", "b"), ("d", "c")]:
        builder.bolt(name, make.batches(make.words)).shuffle("lines").fields(reads, "word")
    assert "in a cycle: b -> c -> d -> b;" in refusal(builder)


def test_a_bolt_that_reads_itself_is_a_circle(builder, make):
    builder.bolt("a", make.batches(make.words)).shuffle("a")
    assert "in a cycle: a -> a;" in refusal(builder)


def test_a_bolt_has_an_input(builder, make):
    builder.bolt("alone", make.batches())
    assert refusal(builder) == (
        "bolt 'alone' reads nothing; give it an input, "
        "such as .bolt('alone', ...).shuffle(<component>)"
    )


def test_a_spout_that_is_not_read_is_refused(builder, make):
    builder.spout("clicks", make.frame("user"))
    assert refusal(builder) == (
        "no bolt, sink or table reads spout 'clicks'; let one read it, or remove it"
    )


def test_a_stream_is_read_once_by_a_bolt(builder, make):
    builder.bolt("x", make.batches()).shuffle("split").fields("split", "word")
    assert refusal(builder) == (
        "bolt 'x' reads 'split' twice; a bolt can read a stream by one grouping only; remove "
        "one of them"
    )


@pytest.mark.parametrize("parallelism", [0, -1, 65_537])
def test_parallelism_is_a_number_of_tasks(builder, make, parallelism):
    builder.bolt("x", make.batches(), parallelism=parallelism).shuffle("split")
    assert refusal(builder) == (
        f"parallelism of bolt 'x' must be in 1..65536, got {parallelism}; omit it for the default"
    )


def test_one_object_is_one_bolt(builder, make):
    bolt = make.batches()
    builder.bolt("x", bolt).shuffle("split")
    builder.bolt("y", bolt).shuffle("split")
    assert refusal(builder) == (
        "bolts 'x' and 'y' are the same object, and a bolt object has only one collector; "
        "create a Batches(...) for each"
    )


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (["word"], "bolt 'x': Batches.outputs must be a pyarrow.Schema"),
        ({"default": ["word"]}, "bolt 'x': Batches.outputs must map the name of each str"),
        ({1: pa.schema([("word", pa.string())])}, "to a pyarrow.Schema, got 1: Schema"),
        (pa.schema([]), "bolt 'x': Batches.outputs['default'] must have at least one field"),
    ],
)
def test_outputs_that_are_no_schema_are_refused_and_their_readers_are_not(
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
            "'x' has a field named '_ackcore_root', and names that begin with '_ackcore_' "
            "are reserved for ackcore; rename it",
        ),
    ],
)
def test_fields_of_a_stream_have_names_of_their_own(builder, make, fields, message):
    builder.bolt("x", make.batches(pa.schema([(f, pa.int64()) for f in fields]))).shuffle("split")
    assert refusal(builder) == message


def test_a_field_that_two_have_can_be_asked_for(builder, make):
    twice = pa.schema([("a", pa.int64()), ("a", pa.int64())])
    builder.bolt("x", make.batches(twice)).shuffle("split")
    builder.bolt("y", make.batches()).fields("x", "a")
    assert refusal(builder) == "'x' has 2 fields named 'a'; rename one in outputs"


def test_streams_that_differ_in_case_only_are_refused(builder, make):
    builder.bolt("x", make.batches({"bad": make.words, "Bad": make.words})).shuffle("split")
    assert refusal(builder).startswith(
        "streams of bolt 'x', 'Bad' and 'bad' differ only in case, and Spark's"
    )


def test_a_named_stream_has_a_name_of_its_kind(builder, make):
    builder.bolt("x", make.batches({"a/b": make.words})).shuffle("split")
    assert refusal(builder).startswith("the name of stream of bolt 'x', 'a/b' must be 1 to 64")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ((), "the source of spout 's' has no fields; a tuple has at least one"),
        (("x", "y", "x"), "the source of spout 's' has 2 fields named 'x'; drop or rename one"),
        (
            ("x", "_ACKCORE_y"),
            "the source of spout 's' has a field named '_ACKCORE_y', and names that begin "
            "with '_ackcore_' are reserved for ackcore; rename it",
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
        "unique=True of spout 's' applies to message ids, and message_id is not set; name "
        "their columns in message_id, or remove unique"
    )


class Group:
    """A stand-in for a Kafka spout, as `TopologyBuilder.spout` sees it."""

    commits_to = "kafka"


def test_a_commit_group_needs_offsets(make):
    builder = make.word_count()
    builder.spout("x", make.frame("topic", "value"), commit_group=Group())
    builder.sink("x", make.write)
    said = refusal(builder)
    assert "and its source lacks 'partition', 'offset'" in said


def test_a_commit_group_needs_tracked_records(make):
    builder = make.word_count()
    columns = ("topic", "partition", "offset")
    builder.spout("x", make.frame(*columns), commit_group=Group(), tracked=False)
    builder.sink("x", make.write)
    assert "commits the offsets of tracked records" in refusal(builder)


def test_a_commit_group_is_one(make):
    with pytest.raises(TypeError, match=r"must be an ackcore\.kafka\.KafkaGroup"):
        TopologyBuilder().spout("x", make.frame("topic"), commit_group="g")
