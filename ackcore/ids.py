"""Ids that are pure functions of their position, routing, and XORs in bulk.

Work that runs twice must derive the same ids, so no id is random. A root id is a function of (key,
partition, offset, attempt), an edge id one of (key, root id, component, parent edge, ordinal). All
ids are 64-bit patterns: arguments may be signed or unsigned, results are signed. The functions
never change, because checkpoints contain their results.

Columns are the same as for `ackcore.Ledger`: one-dimensional, C-contiguous buffers of integers in
native byte order (numpy arrays, ``memoryview``, ``array.array``), and Arrow arrays without nulls.
The integers have 64 bits, signed or not; ``partitions`` and ``attempts`` are int32. Columns are
read in place. Results are new numpy arrays. A wrong type or width raises `TypeError`. A wrong shape
or length, or a value out of range, raises `ValueError`; the latter names the row. An integer of
more than 64 bits raises `OverflowError`.

The mixer is the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom
number generators", OOPSLA 2014) with the constants of Stafford's variant 13 of MurmurHash3's
("Better bit mixing", 2011); subkeys are the outputs of SplitMix64 started at the key.  Names are
hashed by BLAKE2b.  The mixing spreads ids, so that derived ids collide only by chance. It is not a
cipher: an attacker can choose ids that collide.
"""

from __future__ import annotations

import hashlib

from ackcore._arguments import component_key
from ackcore._backend import implementation
from ackcore._columns import as_count, as_id

IdSource = implementation.IdSource
acker_task = implementation.acker_task
edge_id = implementation.edge_id
edge_ids = implementation.edge_ids
root_id = implementation.root_id
root_ids = implementation.root_ids
xor_by_parent = implementation.xor_by_parent

__all__ = [
    "IdSource",
    "acker_task",
    "component_key",
    "edge_id",
    "edge_ids",
    "root_id",
    "root_ids",
    "spout_key",
    "xor_by_parent",
]


def spout_key(deployment_key: int, component: str, topic: str, generation: int) -> int:
    """Return the key from which one spout derives its ids.

    ``deployment_key``: 64 bits, signed or not: the secret that a deployment keeps in its
    checkpoint. ``component``, ``topic``: the name of the spout, and of the topic or table that it
    reads. ``generation``: 0..2**63-1. Increase it when the same offsets denote other records,
    because a topic was deleted and created again.

    Returns an int in -2**63..2**63-1. Raises TypeError if an argument has another type, ValueError
    if ``generation`` is out of range or a name is not valid Unicode, and OverflowError if
    ``deployment_key`` has more than 64 bits.
    """
    secret = (as_id(deployment_key, "deployment_key") & (2**64 - 1)).to_bytes(8, "little")
    digest = hashlib.blake2b(digest_size=8, key=secret, person=b"ackcore.spout")
    for name, value in (("component", component), ("topic", topic)):
        if not isinstance(value, str):
            raise TypeError(f"{name} must be a str, got {type(value).__name__}")
        text = value.encode()
        # Each part is preceded by its length, so two lists of parts never give the same text.
        digest.update(len(text).to_bytes(8, "little"))
        digest.update(text)
    digest.update(as_count(generation, "generation", 0, 2**63 - 1).to_bytes(8, "little"))
    return int.from_bytes(digest.digest(), "little", signed=True)
