"""The backend in plain Python: what is correct.

The twin of ``ackcore._native``, which must do exactly the same, only faster: the contract tests
hold both to SEMANTICS, and the model tests compare them step by step.
"""

from ackcore._reference.ids import (
    IdSource,
    acker_task,
    edge_id,
    edge_ids,
    root_id,
    root_ids,
    xor_by_parent,
)
from ackcore._reference.ledger import Ledger
from ackcore._reference.offsets import OffsetTracker
from ackcore._reference.pack import sort_by_shard, split_by_shard, take_shard
from ackcore._reference.raw_messages import RawMessages
from ackcore._reference.record_buffers import RecordBuffers
from ackcore._reference.rows import (
    fingerprint,
    gather_binary,
    hash_binary,
    hash_fixed,
    pack_runs,
)

__all__ = [
    "IdSource",
    "Ledger",
    "OffsetTracker",
    "RawMessages",
    "RecordBuffers",
    "acker_task",
    "edge_id",
    "edge_ids",
    "fingerprint",
    "gather_binary",
    "hash_binary",
    "hash_fixed",
    "pack_runs",
    "root_id",
    "root_ids",
    "sort_by_shard",
    "split_by_shard",
    "take_shard",
    "xor_by_parent",
]
