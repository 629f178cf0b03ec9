"""The backend in plain Python, which defines the correct results.

``ackcore._native`` is its faster twin and must return the same results. The contract tests check
both against SEMANTICS, and the model tests compare them step by step.
"""

from ackcore._reference.id_hashes import (
    IdSource,
    acker_task,
    edge_id,
    edge_ids,
    root_id,
    root_ids,
    xor_by_parent,
)
from ackcore._reference.ledger import Ledger
from ackcore._reference.offset_tracker import OffsetTracker
from ackcore._reference.record_buffers import RecordBuffers
from ackcore._reference.rows import (
    fingerprint,
    gather_binary,
    hash_binary,
    hash_fixed,
    sort_by_shard,
    split_by_shard,
    take_shard,
)

__all__ = [
    "IdSource",
    "Ledger",
    "OffsetTracker",
    "RecordBuffers",
    "acker_task",
    "edge_id",
    "edge_ids",
    "fingerprint",
    "gather_binary",
    "hash_binary",
    "hash_fixed",
    "root_id",
    "root_ids",
    "sort_by_shard",
    "split_by_shard",
    "take_shard",
    "xor_by_parent",
]
