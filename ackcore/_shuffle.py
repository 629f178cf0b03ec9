"""The backend functions of a shuffle: hashes, shards, fingerprints.

`ackcore._arrow.hash_columns` uses `hash_fixed` and `hash_binary`; `ackcore._arrow.take_rows`
uses `gather_binary`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ackcore._backend import implementation

if TYPE_CHECKING:
    from ackcore._reference import (
        fingerprint,
        gather_binary,
        hash_binary,
        hash_fixed,
        sort_by_shard,
        split_by_shard,
        take_shard,
    )
else:
    fingerprint = implementation.fingerprint
    gather_binary = implementation.gather_binary
    hash_binary = implementation.hash_binary
    hash_fixed = implementation.hash_fixed
    sort_by_shard = implementation.sort_by_shard
    split_by_shard = implementation.split_by_shard
    take_shard = implementation.take_shard

__all__ = [
    "fingerprint",
    "gather_binary",
    "hash_binary",
    "hash_fixed",
    "sort_by_shard",
    "split_by_shard",
    "take_shard",
]
