"""Several spouts on one checkpoint: their order is the checkpoint's, and so is their number."""

from __future__ import annotations

from functools import partial

import pytest
from checkpoints import OPEN, Topology, recorded, run_one
from streams import LINE, Folder, Split

from ackcore.spark.base.errors import CheckpointForeign
from ackcore.spark.query import run_batch, start
from ackcore.topology import TopologyBuilder

TWO = Topology(lines=("value",), clicks=("value",))
SWAPPED = Topology(clicks=("value",), lines=("value",))


def test_the_order_of_the_first_start_stays(checkpoint):
    with OPEN(checkpoint, TWO) as state:
        assert state.spout_order == ("lines", "clicks")
        run_one(state, 0)
    with OPEN(checkpoint, SWAPPED) as state:
        assert state.spout_order == ("lines", "clicks")
    changed = Topology(("other",), clicks=("value",), lines=("value",))
    for accept_changes in (True, False):
        with OPEN(checkpoint, changed, accept_changes=accept_changes) as state:
            assert state.spout_order == ("lines", "clicks")


def test_as_long_as_nothing_is_read_spouts_come_and_go(checkpoint):
    OPEN(checkpoint, TWO).close()
    with OPEN(checkpoint, Topology(new=("value",), clicks=("value",))) as state:
        assert state.spout_order == ("new", "clicks")


@pytest.mark.parametrize("kind", ["stream", "batch"])
@pytest.mark.parametrize(
    ("spouts", "words"),
    [
        (("lines", "clicks", "new"), "spout 'new' is new: .* with .lines, clicks.,"),
        (("lines",), "spout 'clicks' is gone: Spark continues .* by their numbers"),
    ],
)
def test_spouts_neither_come_nor_go_afterwards(checkpoint, kind, spouts, words):
    opened = partial(OPEN, checkpoint, kind=kind)
    with opened(topology=TWO) as state:
        (checkpoint / "offsets").mkdir()
        (checkpoint / "offsets/0").write_text("v1")
        run_one(state, 0)
    topology = Topology(**dict.fromkeys(spouts, ("value",)))
    if kind == "batch" and len(spouts) == 1:
        # Whatever it had is read, and what waits is looked at elsewhere.
        with opened(topology=topology, accept_changes=True) as state:
            assert state.spout_order == spouts
        return
    with pytest.raises(CheckpointForeign, match=words):
        opened(topology=topology, accept_changes=True)
    opened(topology=TWO).close()  # and it was not taken over


def both(names, sources, sink):
    builder = TopologyBuilder()
    split = builder.bolt("split", Split())
    for name in names:
        builder.spout(name, getattr(sources[name], "stream", sources[name]))
        split.shuffle(name)
    builder.sink("split", sink)
    return builder.build(backoff_s=0.001, max_attempts=2)


def test_spouts_declared_in_another_order_read_nothing_twice(spark, tmp_path, store, running):
    places = {"one": Folder(spark, tmp_path / "one"), "two": Folder(spark, tmp_path / "two")}
    for name, place in places.items():
        place.add(f"{name} a", "bad")
    topology = partial(both, sources=places, sink=store)
    for names, acked in (["one", "two"], 2), (["two", "one"], 2), (["two", "one"], 4):
        on = running(topology(names), spark, tmp_path / "cp", trigger={"availableNow": True})
        on.await_termination(300)
        assert (on.counts.acked, on.counts.dead) == (acked, 2)
        if names[0] == "two":
            for name, place in places.items():
                place.add(f"{name} b")
    assert store.words == ["a", "a", "b", "b", "one", "one", "two", "two"]
    meta = recorded(tmp_path / "cp").read_meta()
    assert meta["spout_order"] == ["one", "two"]
    with pytest.raises(CheckpointForeign, match="spout 'two' is gone"):
        start(topology(["one"]), spark, tmp_path / "cp", accept_changes=True)


def test_sources_that_end_have_their_order_too(spark, tmp_path, store):
    lines = {name: spark.createDataFrame([(name,), ("bad",)], LINE) for name in ("one", "two")}
    counts = [
        run_batch(both(names, lines, store), spark, tmp_path / "cp")
        for names in (["one", "two"], ["two", "one"])
    ]
    assert counts[0] == counts[1]
    assert store.words == ["one", "two"]
