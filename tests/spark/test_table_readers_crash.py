"""Readers of tables, whatever dies when: look-ups and changed rows are those of an oracle.

The oracle is computed from the rows that a plain sink got, micro-batch by micro-batch.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import Killed, killed

from ackcore.spark.engine import act, batch, runs, table_changes
from ackcore.spark.listeners import Listeners
from ackcore.spark.sinks.sink import Sink
from ackcore.tables import count, sum_of
from ackcore.testing.local_runs import LocalRuns
from ackcore.testing.results import Source
from ackcore.testing.task_kills import Kills
from ackcore.topology import BasicBolt, BatchBolt, TopologyBuilder

ORDER = pa.schema([("shop", pa.string()), ("euros", pa.int64()), ("fails", pa.int64())])
SEEN = pa.schema([("shop", pa.string()), ("euros", pa.int64()), ("before", pa.int64())])


class Rate(BasicBolt):
    """Emits each order with the sum that the table has for its shop."""

    outputs = SEEN
    uses = ("totals",)

    def execute(self, tuple, collector):
        if tuple["fails"] > tuple.attempt:
            raise TimeoutError("the service is out")
        row = self.tables["totals"].get(tuple["shop"])
        collector.emit((tuple["shop"], tuple["euros"], None if row is None else row["euros"]))


class Compare(BatchBolt):
    """Fails if a look-up in another stage, of another shape, sees another table."""

    outputs = SEEN
    uses = ("totals",)

    def process(self, batch, out):
        found = self.tables["totals"].lookup(batch)
        assert found["euros"].to_pylist() == batch["before"].to_pylist()
        out.emit(batch, parents=range(len(batch)))


class Replacing(Sink):
    """A sink that keeps the rows of each micro-batch, and refuses to get others the next time."""

    def __init__(self):
        self.rows, self.contents, self.calls = {}, {}, 0

    @property
    def batches(self):
        return []

    def write(self, accepted):
        rows = [row for part in accepted.record_batches() for row in part.to_pylist()]
        self.calls += 1
        known = self.contents.setdefault(accepted.batch_id, accepted.content())
        assert known == accepted.content()
        assert self.rows.setdefault(accepted.batch_id, rows) == rows


def topology():
    builder = TopologyBuilder()
    builder.spout("orders", Source(ORDER))
    builder.bolt("rate", Rate()).shuffle("orders")
    builder.bolt("compare", Compare()).fields("rate", "shop")
    builder.table(
        "totals", from_="compare", key="shop", value={"euros": sum_of("euros"), "n": count()}
    )
    builder.sink("compare", print)
    builder.sink("totals.changes", print)
    builder.sink("totals.changes", print, stream="upserts")
    return builder.build(max_attempts=4, max_sink_attempts=1)


def run(orders, tasks, kills, crashes, monkeypatch):
    """Run until the end, with a new driver after each crash; return the run and the sinks."""
    sinks = {name: Replacing() for name in topology().sinks}
    rows = {"orders": pa.Table.from_pylist(orders, ORDER)}
    left, message_ids, executed = [*crashes], {}, defaultdict(Counter)

    def failpoint(name, number=None):
        if left:
            left[0] -= 1
            if left[0] < 0:
                del left[0]
                raise killed(name)

    with TemporaryDirectory() as directory, monkeypatch.context() as patch:
        for module in (act, batch, runs, table_changes):
            patch.setattr(module, "failpoint", failpoint)
        for _ in range(len(crashes) + 1):
            made = topology()
            driver = LocalRuns(made, rows, tasks, Kills(kills, made.bolts), Listeners([]))
            for name, sink in sinks.items():
                driver._topology.sinks[name].writer.write = sink.write
            kills = {}
            driver._message_ids, driver._executed = message_ids, executed
            try:
                return driver.run(Path(directory)), sinks
            except Killed:
                pass
    raise AssertionError("it did not end")


ORDERS = st.lists(
    st.builds(
        lambda shop, euros, fails: {"shop": shop, "euros": euros, "fails": fails},
        st.sampled_from(["north", "south", None]),
        st.integers(-9, 9),
        st.integers(0, 4),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=12, deadline=None)
@given(ORDERS, st.integers(1, 3), st.integers(0, 20), st.lists(st.integers(0, 12), max_size=4))
def test_look_ups_and_changes_are_those_of_the_last_marked_micro_batch(
    orders, tasks, kill, crashes
):
    kills = {"compare": kill} if kill else {}
    with pytest.MonkeyPatch.context() as monkeypatch:
        ran, sinks = run(orders, tasks, kills, crashes, monkeypatch)
    accepted, changes, upserts = (
        sinks[name].rows for name in ("compare", "totals.changes", "totals.changes.upserts")
    )
    table, times = {}, {}
    for number in sorted(accepted):
        before, n_before = dict(table), dict(times)
        for row in accepted[number]:
            assert row["before"] == before.get(row["shop"])
            table[row["shop"]] = table.get(row["shop"], 0) + row["euros"]
            times[row["shop"]] = times.get(row["shop"], 0) + 1
        shops = {row["shop"] for row in accepted[number]}
        expected = {
            (shop, table[shop], times[shop], before.get(shop), n_before.get(shop)) for shop in shops
        }
        found = [tuple(row.values()) for row in changes.get(number, [])]
        assert len(found) == len(shops)
        assert set(found) == expected
        assert [tuple(row.values()) for row in upserts.get(number, [])] == [
            one[:3] for one in found
        ]
    assert changes.keys() == {number for number, rows in accepted.items() if rows}
    at_end = {(row["shop"], row["euros"], row["n"]) for row in ran.tables["totals"].to_pylist()}
    assert at_end == {(shop, euros, times[shop]) for shop, euros in table.items()}
    lived = [one for one in orders if one["fails"] < 4]
    if not kill:
        assert sum(times.values()) == len(lived)
        assert sum(table.values()) == sum(one["euros"] for one in lived)
