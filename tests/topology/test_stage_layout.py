"""Levels, subscriptions and the fingerprint, by example and over random DAGs."""

from __future__ import annotations

from typing import ClassVar

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from separately import run_python

from ackcore.topology import BasicBolt, BatchBolt, Bolt, TopologyBuilder
from ackcore.topology.stage_layout import Layout
from ackcore.topology.structure_changes import changes

NUMBERS = pa.schema([("x", pa.int64()), ("y", pa.int64())])


class Frame:
    columns = ("x", "y")


class Batches(BatchBolt):
    outputs: ClassVar = {"default": NUMBERS, "errors": NUMBERS}

    def process(self, batch, out):
        """Never called: nothing here runs."""


class Asking(Batches):
    needs_identity = True


class Rows(Bolt):
    outputs = Batches.outputs

    def execute(self, tuple):
        """Never called: nothing here runs."""


class Basic(BasicBolt):
    outputs = Batches.outputs

    def execute(self, tuple, collector):
        """Never called: nothing here runs."""


def write(frame, batch_id):
    """Stand in for a sink's writer."""


READ = {
    "shuffle": lambda bolt, *of: bolt.shuffle(*of),
    "local": lambda bolt, *of: bolt.local_or_shuffle(*of),
    "fields": lambda bolt, name, stream: bolt.fields(name, "x", stream=stream),
    "partial": lambda bolt, name, stream: bolt.partial_key(name, "x", stream=stream),
    "all": lambda bolt, *of: bolt.all(*of),
    "global": lambda bolt, *of: bolt.global_(*of),
}


@st.composite
def topologies(draw):
    """Up to 3 spouts and 8 bolts, declared in any order, reading what they like but in a ring."""
    builder = TopologyBuilder()
    spouts = [f"s{n}" for n in range(draw(st.integers(1, 3)))]
    for name in spouts:
        message_id = draw(st.sampled_from([None, "x"]))
        unique = message_id is not None and draw(st.booleans())
        tracked = draw(st.booleans())
        builder.spout(name, Frame(), message_id=message_id, tracked=tracked, unique=unique)
        builder.sink(name, write)
    bolts = [f"b{n}" for n in range(draw(st.integers(0, 8)))]
    streams = [(name, "default") for name in spouts]
    reads = {}
    for name in bolts:
        count = min(len(streams), 3)
        reads[name] = draw(
            st.lists(st.sampled_from(streams), min_size=1, max_size=count, unique=True)
        )
        streams += [(name, "default"), (name, "errors")]
    for name in draw(st.permutations(bolts)):
        kind = draw(st.sampled_from([Batches, Batches, Batches, Asking, Rows, Basic]))
        bolt = builder.bolt(name, kind(), parallelism=draw(st.sampled_from([None, None, 1, 4])))
        for of in reads[name]:
            READ[draw(st.sampled_from(list(READ)))](bolt, *of)
    if bolts and draw(st.booleans()):
        builder.sink(draw(st.sampled_from(bolts)), write, stream="errors")
    return builder.build()


# --- what always holds ---------------------------------------------------------------------------


@given(topologies())
def test_levels_are_as_low_as_they_can_be(topology):
    layout = Layout.of(topology)
    assert list(layout.levels) == [*topology.spouts, *topology.bolts]
    assert all(layout.levels[name] == 1 for name in topology.spouts)
    for name, bolt in topology.bolts.items():
        level = layout.levels[name]
        for sub in layout.into(name):
            assert (sub.level_from, sub.level_to) == (layout.levels[sub.source], level)
            assert sub.moves == (layout.levels[sub.source] < level)
            assert sub.spreads == sub.grouping.moves(bolt.parallelism)
        assert level == max(sub.level_from + sub.spreads for sub in layout.into(name))
    assert {layout.levels[name] for name in layout.levels} == set(range(1, layout.depth + 1))


@given(topologies())
def test_every_bolt_is_at_one_level_after_all_that_it_reads(topology):
    layout = Layout.of(topology)
    by_level = [layout.at(level) for level in range(1, layout.depth + 1)]
    assert sorted(name for names in by_level for name in names) == sorted(topology.bolts)
    assert sorted(layout.order) == sorted(topology.bolts)
    for order in (layout.order, [name for names in by_level for name in names]):
        done = set(topology.spouts)
        for name in order:
            assert {each.component for each in topology.bolts[name].inputs} <= done
            done.add(name)
    assert layout.at(0) == layout.at(layout.depth + 1) == ()


@given(topologies())
def test_every_input_is_one_edge_and_is_found_from_both_ends(topology):
    layout = Layout.of(topology)
    declared = [
        (each.component, each.stream, bolt.name, each.grouping)
        for bolt in topology.bolts.values()
        for each in bolt.inputs
    ]
    assert declared == [(e.source, e.stream, e.target, e.grouping) for e in layout.subscriptions]
    assert [sub.index for sub in layout.subscriptions] == list(range(len(declared)))
    streams = [(name, "default") for name in topology.spouts]
    streams += [(name, stream) for name, bolt in topology.bolts.items() for stream in bolt.schemas]
    from_sources = [sub for component, stream in streams for sub in layout.out(component, stream)]
    into_targets = [sub for name in topology.bolts for sub in layout.into(name)]
    by_index = sorted(from_sources, key=lambda sub: sub.index)
    assert by_index == into_targets == list(layout.subscriptions)


@given(topologies())
def test_an_exchange_carries_what_has_somewhere_further_on_to_go(topology):
    layout = Layout.of(topology)
    assert layout.exchanges == layout.depth - 1
    for sub in layout.subscriptions:
        crossed = [k for k in range(0, layout.depth + 2) if sub in layout.crossing(k)]
        assert crossed == list(range(sub.level_from, sub.level_to))
    for level in range(1, layout.depth):
        assert any(sub.spreads for sub in layout.crossing(level))


@given(topologies())
def test_identity_is_needed_by_bolts_that_ask_and_all_that_they_hang_from(topology):
    layout = Layout.of(topology)
    asking = {name for name, bolt in topology.bolts.items() if bolt.component.needs_identity}
    upstream, todo = set(), list(asking)
    while todo:
        name = todo.pop()
        if name not in upstream:
            upstream.add(name)
            todo += [sub.source for sub in layout.into(name)]
    assert layout.needs_identity == upstream


@given(topologies())
def test_there_is_a_settle_where_one_task_cannot_decide_alone(topology):
    layout = Layout.of(topology)
    assert layout.checks_unique == any(
        spout.tracked and spout.message_id == ("x",) and not spout.unique
        for spout in topology.spouts.values()
    )
    assert layout.settles == (layout.depth > 1 or layout.checks_unique)


@given(topologies())
def test_sunk_are_the_streams_with_a_sink(topology):
    layout = Layout.of(topology)
    sunk = {(sink.component, sink.stream) for sink in topology.sinks.values()}
    for component in (*topology.spouts, *topology.bolts):
        for stream in ("default", "errors"):
            assert layout.sunk(component, stream) is ((component, stream) in sunk)


@given(topologies())
def test_explain_names_everything_and_draws_each_edge(topology):
    text = topology.explain()
    lines = text.splitlines()
    for line in lines:
        assert line == line.rstrip()
        assert len(line) <= 100
    for name in (*topology.spouts, *topology.bolts):
        assert any(line.startswith((f"  spout {name}: ", f"  bolt {name}: ")) for line in lines)
    layout = Layout.of(topology)
    for sub in layout.subscriptions:
        assert f"{'══' if sub.moves else '──'}▶ {sub.target}: {sub.grouping}" in text
    assert lines.count(f"══ shuffle {'═' * 67}") == layout.exchanges


# --- by example ----------------------------------------------------------------------------------


def test_bolts_that_might_come_in_any_order_come_as_declared():
    builder = TopologyBuilder()
    builder.spout("s", Frame())
    for name in ("z", "a", "m"):
        builder.bolt(name, Batches()).shuffle("s")
    builder.bolt("k", Batches()).shuffle("a", "errors").shuffle("a")
    assert Layout.of(builder.build()).at(1) == ("z", "a", "m", "k")


def test_a_thousand_bolts_in_a_row_are_laid_out():
    builder = TopologyBuilder()
    builder.spout("b0", Frame())
    for n in range(1, 1_001):
        builder.bolt(f"b{n}", Batches()).fields(f"b{n - 1}", "x")
    assert Layout.of(builder.build()).depth == 1_001


# --- the fingerprint -----------------------------------------------------------------------------

PRINTS = """
import pyarrow as pa
from ackcore.topology import BatchBolt, TopologyBuilder

class Frame:
    columns = ["x", "y"]

class Batches(BatchBolt):
    outputs = {name: pa.schema([("x", pa.int64())]) for name in {"default", "errors", "late"}}

    def process(self, batch, out):
        pass

builder = TopologyBuilder()
builder.spout("s", Frame(), message_id="x")
builder.bolt("b", Batches()).fields("s", "x").all("c", "errors")
builder.bolt("c", Batches()).shuffle("s")
builder.sink("b", print)
topology = builder.build()
print(topology.fingerprint, hash("ackcore"))
"""


def test_the_fingerprint_is_the_same_in_every_process():
    printed = [run_python(PRINTS, PYTHONHASHSEED=seed).split() for seed in ("1", "2")]
    assert len({hashed for _, hashed in printed}) == 2  # the seeds were heard
    # And in every version: a checkpoint that was written with another is refused.
    assert {fingerprint for fingerprint, _ in printed} == {"4b3ad0277f46184df7b7206adaadb862"}


def declare(
    *,
    spout="s",
    columns=("x", "y"),
    message_id="x",
    tracked=True,
    unique=False,
    source=Frame,
    bolt="b",
    kind=Batches,
    outputs=None,
    parallelism=None,
    read=READ["fields"],
    stream="default",
    more=False,
    sink="b",
    sunk="default",
    writer=write,
    turned=False,
    **settings,
):
    """A topology of a spout, two bolts and a sink, with anything about it changed."""
    frame = source()
    frame.columns = columns
    second = kind()
    if outputs is not None:
        second.outputs = outputs
    builder = TopologyBuilder()
    builder.spout(spout, frame, message_id=message_id, tracked=tracked, unique=unique)
    declared = [builder.bolt("a", Batches()), None]
    declared[1] = builder.bolt(bolt, second, parallelism=parallelism)
    if turned:
        builder = TopologyBuilder()
        declared[1] = builder.bolt(bolt, second, parallelism=parallelism)
        declared[0] = builder.bolt("a", Batches())
        builder.spout(spout, frame, message_id=message_id, tracked=tracked, unique=unique)
    declared[0].shuffle(spout)
    inputs = [lambda: read(declared[1], "a", stream), lambda: declared[1].shuffle(spout)]
    for take in reversed(inputs) if turned else inputs:
        take()
    if more:
        builder.bolt("more", Batches()).shuffle("a")
    builder.sink(bolt, writer, stream=sunk, name=sink)
    return builder.build(**settings)


def other_schema(*fields, **streams):
    return {"default": pa.schema(list(fields) or NUMBERS), "errors": NUMBERS, **streams}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"columns": ("x", "y", "z")}, "spout 's' differs in its fields"),
        ({"columns": ("y", "x")}, "spout 's' differs in its fields"),
        ({"message_id": "y"}, "spout 's' differs in its message id"),
        ({"message_id": ("x", "y")}, "spout 's' differs in its message id"),
        ({"message_id": None, "tracked": False}, "differs in its message id and tracking"),
        ({"tracked": False}, "spout 's' differs in its tracking"),
        ({"read": READ["partial"]}, "bolt 'b' differs in its inputs"),
        ({"read": READ["all"]}, "bolt 'b' differs in its inputs"),
        ({"read": READ["global"]}, "its inputs: a by fields(x) before, a by global now"),
        ({"read": READ["shuffle"]}, "bolt 'b' differs in its inputs"),
        ({"read": READ["local"]}, "bolt 'b' differs in its inputs"),
        ({"read": lambda b, n, s: b.fields(n, "y", stream=s)}, "bolt 'b' differs in its inputs"),
        ({"stream": "errors"}, "bolt 'b' differs in its inputs"),
        (
            {"outputs": other_schema(("x", pa.int32()), ("y", pa.int64()))},
            "bolt 'b' differs in its streams",
        ),
        (
            {"outputs": other_schema(("z", pa.int64()), ("y", pa.int64()))},
            "bolt 'b' differs in its streams",
        ),
        (
            {"outputs": other_schema(*NUMBERS, ("z", pa.int64()))},
            "'default' no other before, z int64 now",
        ),
        (
            {"outputs": other_schema(pa.field("x", pa.int64(), False), ("y", pa.int64()))},
            "bolt 'b' differs in its streams",
        ),
        ({"outputs": other_schema(late=NUMBERS)}, "bolt 'b' differs in its streams"),
        ({"more": True}, "bolt 'more' is new"),
        ({"sunk": "errors"}, "sink 'b' reads another stream"),
    ],
)
def test_the_fingerprint_changes_with_each_part_of_the_structure(changed, words):
    before, after = declare(), declare(**changed)
    assert before.fingerprint != after.fingerprint
    (change,) = changes(before.structure, after.structure)
    assert words in change


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"spout": "t"}, {"spout 's' is gone", "spout 't' is new"}),
        ({"bolt": "c"}, {"bolt 'b' is gone", "bolt 'c' is new"}),
        ({"sink": "t"}, {"sink 'b' is gone", "sink 't' is new"}),
    ],
)
def test_the_fingerprint_changes_with_names(changed, words):
    before, after = declare(), declare(**changed)
    assert before.fingerprint != after.fingerprint
    assert words <= set(changes(before.structure, after.structure))


@pytest.mark.parametrize(
    "changed",
    [
        {"kind": Rows},
        {"source": type("Other", (), {})},
        {"parallelism": 4},
        {"unique": True},
        {"writer": print},
        {"max_attempts": 3},
        {"turned": True},
        {"outputs": other_schema().__class__(errors=NUMBERS, default=NUMBERS)},
        {"outputs": {"default": NUMBERS.with_metadata({"k": "v"}), "errors": NUMBERS}},
    ],
    ids=[
        "code",
        "source",
        "parallelism",
        "unique",
        "writer",
        "settings",
        "order of declarations",
        "order of streams",
        "metadata",
    ],
)
def test_the_fingerprint_does_not_hear_of_what_may_change_from_start_to_start(changed):
    before, after = declare(), declare(**changed)
    assert before.fingerprint == after.fingerprint
    assert changes(before.structure, after.structure) == ()


@given(topologies(), topologies())
def test_fingerprints_are_equal_where_structures_are(one, other):
    assert (one.fingerprint == other.fingerprint) is (one.structure == other.structure)
    assert bool(changes(one.structure, other.structure)) is (one.structure != other.structure)
