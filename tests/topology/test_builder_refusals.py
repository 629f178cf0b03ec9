"""Misfits are refused by build, with the way out."""

from __future__ import annotations

import re

import pyarrow as pa
import pytest
from acting import refusal

from ackcore.tables import count
from ackcore.topology import TopologyBuilder, TopologyError


def ints(*names):
    return pa.schema([(name, pa.int64()) for name in names])


class Group:
    """A stand-in for a Kafka spout, as `TopologyBuilder.spout` sees it."""

    commits_to = "kafka"


def sink_of_spout(b, m, *columns, **arguments):
    b.spout("s", m.frame(*columns), **arguments)
    b.sink("s", m.write)


#: What is declared beside the word count, and the only problem of the topology then.
REFUSED = {
    "an empty name": (
        lambda b, m: b.bolt("", m.batches()).shuffle("split"),
        "the name of bolt '' must be 1 to 64 letters, digits, '_', '.' or '-', the first a letter "
        "or '_', since files are named after it; got ''",
    ),
    "a table named like the rows of another": (
        lambda b, m: b.table("totals.changes", from_="split", key="word", value={"n": count()}),
        "table 'totals.changes' must not end in '.changes' or '.closed': these are the ends of "
        "the names under which the rows of tables are read; rename it",
    ),
    "a spout and a bolt of one name": (
        lambda b, m: b.bolt("lines", m.batches()).shuffle("split"),
        "2 components are named 'lines' (a spout, a bolt); rename all but one",
    ),
    "names that differ in case only": (
        lambda b, m: b.bolt("Split", m.batches()).shuffle("lines"),
        "components 'Split' and 'split' differ only in case, and Spark's columns and some "
        "file systems ignore case; rename one",
    ),
    "two sinks of one name": (
        lambda b, m: b.sink("split", m.write, name="counts"),
        "2 sinks are named 'counts' (a sink, a sink); set another name with name=",
    ),
    "a sink on an unknown component": (
        lambda b, m: b.sink("counts", m.write, name="x"),
        "sink 'x' reads 'counts', which is not declared; did you mean 'count'?",
    ),
    "another stream of a spout": (
        lambda b, m: b.bolt("x", m.batches()).shuffle("lines", stream="errors"),
        "bolt 'x' reads stream 'errors' of 'lines', which is a spout, and a spout's only "
        "stream is 'default'",
    ),
    "a stream of a bolt that emits nothing": (
        lambda b, m: [
            b.bolt("silent", m.batches()).shuffle("lines"),
            b.bolt("x", m.batches()).shuffle("silent"),
        ],
        "bolt 'x' reads stream 'default' of 'silent', which declares no outputs; declare the "
        "stream in its outputs",
    ),
    "a bolt that reads itself": (
        lambda b, m: b.bolt("a", m.batches(m.words)).shuffle("a"),
        "bolts read one another in a cycle: a -> a; a tuple tree must end within its micro-batch; "
        "remove one of these inputs, or write the tuples to a sink and read them with a spout",
    ),
    "a bolt without an input": (
        lambda b, m: b.bolt("alone", m.batches()),
        "bolt 'alone' reads nothing; give it an input, "
        "such as .bolt('alone', ...).shuffle(<component>)",
    ),
    "a spout that nothing reads": (
        lambda b, m: b.spout("clicks", m.frame("user")),
        "no bolt, sink or table reads spout 'clicks'; let one read it, or remove it",
    ),
    "a stream that a bolt reads twice": (
        lambda b, m: b.bolt("x", m.batches()).shuffle("split").fields("split", "word"),
        "bolt 'x' reads 'split' twice; a bolt can read a stream by one grouping only; remove "
        "one of them",
    ),
    "two fields of one name": (
        lambda b, m: b.bolt("x", m.batches(ints("a", "b", "a"))).shuffle("split"),
        "'x' has 2 fields named 'a'; rename one in outputs",
    ),
    "two fields of one name, one of them read": (
        lambda b, m: [
            b.bolt("x", m.batches(ints("a", "a"))).shuffle("split"),
            b.bolt("y", m.batches()).fields("x", "a"),
        ],
        "'x' has 2 fields named 'a'; rename one in outputs",
    ),
    "a field named like ours": (
        lambda b, m: b.bolt("x", m.batches(ints("_ackcore_root"))).shuffle("split"),
        "'x' has a field named '_ackcore_root', and names that begin with '_ackcore_' "
        "are reserved for ackcore; rename it",
    ),
    "streams that differ in case only": (
        lambda b, m: b.bolt("x", m.batches({"bad": m.words, "Bad": m.words})).shuffle("split"),
        "streams of bolt 'x', 'Bad' and 'bad' differ only in case, and Spark's columns and some "
        "file systems ignore case; rename one",
    ),
    "a stream with a name of another kind": (
        lambda b, m: b.bolt("x", m.batches({"a/b": m.words})).shuffle("split"),
        "the name of stream of bolt 'x', 'a/b' must be 1 to 64 letters, digits, '_', '.' or '-', "
        "the first a letter or '_', since files are named after it; got 'a/b': 'a_b' would do",
    ),
    "a source without columns": (
        lambda b, m: sink_of_spout(b, m),
        "the source of spout 's' has no fields; a tuple has at least one",
    ),
    "two columns of one name": (
        lambda b, m: sink_of_spout(b, m, "x", "y", "x"),
        "the source of spout 's' has 2 fields named 'x'; drop or rename one",
    ),
    "a column named like ours": (
        lambda b, m: sink_of_spout(b, m, "x", "_ACKCORE_y"),
        "the source of spout 's' has a field named '_ACKCORE_y', and names that begin "
        "with '_ackcore_' are reserved for ackcore; rename it",
    ),
    "unique without a message id": (
        lambda b, m: sink_of_spout(b, m, "x", unique=True),
        "unique=True of spout 's' applies to message ids, and message_id is not set; name "
        "their columns in message_id, or remove unique",
    ),
    "a commit group without offsets": (
        lambda b, m: sink_of_spout(b, m, "topic", "value", commit_group=Group()),
        "commit_group of spout 's' needs the offset columns of Spark's Kafka source, and its "
        "source lacks 'partition', 'offset'; keep these columns",
    ),
    "a commit group of untracked records": (
        lambda b, m: sink_of_spout(
            b, m, "topic", "partition", "offset", commit_group=Group(), tracked=False
        ),
        "commit_group of spout 's' commits the offsets of tracked records, and the spout is "
        "untracked; remove tracked=False",
    ),
}


@pytest.mark.parametrize(("declare", "problem"), REFUSED.values(), ids=REFUSED)
def test_a_declaration_that_does_not_fit_is_refused(builder, make, declare, problem):
    declare(builder, make)
    assert refusal(builder) == problem


def test_nothing_but_spouts_makes_records():
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


def test_columns_of_a_message_id_are_the_sources_each_once(builder, make):
    builder.spout("s", make.frame("user", "time"), message_id=("usr", "time", "time"))
    builder.sink("s", make.write)
    with pytest.raises(TopologyError) as caught:
        builder.build()
    assert caught.value.problems == (
        "message_id of spout 's' must name a column once, got 'usr', 'time', 'time'",
        "message_id of spout 's' names 'usr', which its source does not have; did you mean 'user'?",
    )


def test_a_commit_group_is_one(make):
    with pytest.raises(TypeError, match=r"must be an ackcore\.kafka\.KafkaGroup"):
        TopologyBuilder().spout("x", make.frame("topic"), commit_group="g")
