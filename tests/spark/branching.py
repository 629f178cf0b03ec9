"""Bolts that branch and fail as their values have it, topologies of them, what must come out."""

from __future__ import annotations

import collections

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

from ackcore.spark.tasks.exchange_format import HEAD
from ackcore.testing import Source
from ackcore.topology import BatchBolt, Bolt, TopologyBuilder

ROWS = pa.schema([("record", pa.int64()), ("value", pa.int64())])
#: Tasks behind an exchange.
DESTS = 3


def scramble(*numbers):
    """A small number that depends on all of these; the same everywhere."""
    total = 17
    for number in numbers:
        total = (total * 1_000_003 ^ number) % (2**31 - 1)
    return total


class Branch(BatchBolt):
    """Emits 0 to 2 rows for each, and fails some, as their values have it."""

    outputs = ROWS

    def __init__(self, number, fails_in, shift=0):
        self.number, self.fails_in, self.shift = number, fails_in, shift

    def children(self, value):
        return [scramble(self.number, value, j) for j in range(scramble(self.number, value) % 3)]

    def fails(self, value):
        return self.fails_in > 0 and scramble(value, self.number, 5) % self.fails_in == 0

    def process(self, batch, out):
        records, values = (column.to_pylist() for column in batch.columns)
        found = [(i, child) for i, value in enumerate(values) for child in self.children(value)]
        columns = [[records[i] + self.shift for i, _ in found], [child for _, child in found]]
        out.emit(columns, parents=np.array([i for i, _ in found], np.int64))
        bad = [i for i, value in enumerate(values) if self.fails(value)]
        out.fail(bad, [ValueError(f"value {values[i]}") for i in bad])


class RowBranch(Bolt):
    """The same a row at a time; an odd value is acked with the next even one or in flush."""

    outputs = ROWS
    children, fails = Branch.children, Branch.fails

    def __init__(self, number, fails_in):
        self.number, self.fails_in = number, fails_in

    def prepare(self, context):
        self.open = []

    def execute(self, tuple):
        children = self.children(tuple["value"])
        for child in children[:1]:
            self.collector.emit((tuple["record"], child), anchors=tuple)
        self.open.append((tuple, children[1:]))
        if tuple["value"] % 2 == 0:
            self.flush()

    def flush(self):
        for tuple, children in self.open:
            for child in children:
                self.collector.emit((tuple["record"], child), anchors=tuple)
            if self.fails(tuple["value"]):
                self.collector.fail(tuple, "no")
            else:
                self.collector.ack(tuple)
        self.open = []


@st.composite
def topologies(draw):
    """A spout, and bolts that each read one or two components before them."""
    builder = TopologyBuilder()
    builder.spout("spout", Source(ROWS))
    names = ["spout"]
    for number in range(draw(st.integers(1, 5))):
        kind = draw(st.sampled_from([Branch, Branch, RowBranch]))
        bolt = kind(number, draw(st.sampled_from([0, 7, 30])))
        declared = builder.bolt(f"b{number}", bolt, parallelism=draw(st.sampled_from([None, 2])))
        for source in draw(st.sets(st.sampled_from(names), min_size=1, max_size=2)):
            how = draw(st.sampled_from(["shuffle", "fields", "local_or_shuffle", "global_", "all"]))
            fields = ("value",) if how == "fields" else ()
            getattr(declared, how)(source, *fields)
        names.append(f"b{number}")
    for name in names[1:]:
        builder.sink(name, lambda frame, number: None)
    return builder.build(chunk_rows=draw(st.sampled_from([1, 4, 1000])))


def expected(topology, layout, values):
    """Return the failing records, and the rows of the others by component, word by word."""
    failed, rows = set(), collections.defaultdict(collections.Counter)

    def visit(component, record, value):
        for sub in layout.out(component):
            bolt = topology.bolts[sub.target].component
            copies = 1
            if sub.grouping.name == "all" and sub.level_to > sub.level_from:
                copies = min(sub.parallelism or DESTS, DESTS)
            for _ in range(copies):
                if bolt.fails(value):
                    failed.add(record)
                for child in bolt.children(value):
                    rows[sub.target, record][record, child] += 1
                    visit(sub.target, record, child)

    for record, value in enumerate(values):
        visit("spout", record, value)
    kept = collections.defaultdict(collections.Counter)
    for (component, record), found in rows.items():
        if record not in failed:
            kept[component] += found
    return failed, kept


def with_head(row):
    """Return a row of an exchange as a dict that also has the parts of its head."""
    level, kind, *_ = HEAD.unpack_from(row["head"])
    return row | {"level": level, "kind": kind, "side": row["head"][HEAD.size :]}
