"""Topologies: spouts, bolts, and the streams between them, declared and checked.

Write bolts, declare them to a `TopologyBuilder`, and `build` it:

    builder = TopologyBuilder()
    builder.spout("lines", lines)
    builder.bolt("split", Split()).shuffle("lines")
    builder.bolt("count", Count()).fields("split", "word")
    builder.sink("count", write_counts)
    topology = builder.build(max_attempts=3)
    print(topology.explain())

Nothing in this package runs anything; `ackcore.spark` does.
"""

from ackcore.calls import Reject, Retry, Unavailable
from ackcore.topology.builder import Topology, TopologyBuilder, TopologyError
from ackcore.topology.components import (
    AsyncBolt,
    AsyncCollector,
    BasicBolt,
    BasicCollector,
    BatchBolt,
    BatchOutput,
    Bolt,
    Collector,
    Context,
)
from ackcore.topology.expectations import expect
from ackcore.topology.settings import Settings
from ackcore.topology.tuples import Identity, Reason, Tuple

__all__ = [
    "AsyncBolt",
    "AsyncCollector",
    "BasicBolt",
    "BasicCollector",
    "BatchBolt",
    "BatchOutput",
    "Bolt",
    "Collector",
    "Context",
    "Identity",
    "Reason",
    "Reject",
    "Retry",
    "Settings",
    "Topology",
    "TopologyBuilder",
    "TopologyError",
    "Tuple",
    "Unavailable",
    "expect",
]
