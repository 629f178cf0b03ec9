"""Readers of tables in build(): the tables of bolts, and the sinks of changed rows."""

import pyarrow as pa
import pytest

from ackcore.tables import count, sum_of
from ackcore.topology import BatchBolt, TopologyBuilder
from ackcore.topology.explain import draw

SALE = pa.schema([("shop", pa.string()), ("euros", pa.int64())])


class Source:
    columns = ("shop", "euros")


class Sales(BatchBolt):
    outputs = SALE

    def __init__(self, uses=()):
        self.uses = uses

    def process(self, batch, out):
        pass


def built(*, uses=(), value=None, changes="totals.changes", bolt="sales", **sink):
    builder = TopologyBuilder()
    builder.spout("lines", Source())
    builder.bolt(bolt, Sales(uses)).shuffle("lines")
    value = {"euros": sum_of("euros"), "orders": count()} if value is None else value
    builder.table("totals", from_=bolt, key="shop", value=value)
    builder.sink(changes, lambda frame, number: None, **sink)
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
    assert "sink totals.changes: <lambda>, of changes to totals" in topology.explain()
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
