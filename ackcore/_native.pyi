# The names and types of the plain-Python twin; tests/test_parity.py compares the two modules.
from typing import Any

from ackcore._reference import IdSource as IdSource
from ackcore._reference import Ledger as Ledger
from ackcore._reference import OffsetTracker as OffsetTracker
from ackcore._reference import acker_task as acker_task
from ackcore._reference import edge_id as edge_id
from ackcore._reference import edge_ids as edge_ids
from ackcore._reference import fingerprint as fingerprint
from ackcore._reference import gather_binary as gather_binary
from ackcore._reference import hash_binary as hash_binary
from ackcore._reference import hash_fixed as hash_fixed
from ackcore._reference import root_id as root_id
from ackcore._reference import root_ids as root_ids
from ackcore._reference import sort_by_shard as sort_by_shard
from ackcore._reference import split_by_shard as split_by_shard
from ackcore._reference import take_shard as take_shard
from ackcore._reference import xor_by_parent as xor_by_parent

cpu: str

# What unpickling calls.
def restored(arguments: Any, entries: Any, expired: Any, stats: Any) -> Ledger: ...
def restored_tracker(
    key: Any, state: Any, position: Any, waiting: Any, stats: Any
) -> OffsetTracker: ...
