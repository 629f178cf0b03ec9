"""Ids that are pure functions of their position, routing, and XORs in bulk.

Work that runs twice must derive the same ids, so none is drawn at random: a root id is a
function of (key, partition, offset, attempt), an edge id one of (key, root id, component, parent
edge, ordinal).  All are 64-bit patterns: arguments may be given in either sign, results are
signed.  The functions never change: checkpoints hold their results.

=======================  =========================================================================
`spout_key`              the key of one spout, from the deployment's
`root_id`, `root_ids`    a keyed bijection of partition < 2**16, offset < 2**42, attempt < 2**6
`edge_id`, `edge_ids`    a keyed hash, never 0
`component_key`          what a component's name is hashed to
`xor_by_parent`          the XOR of the edges that each input emitted
`acker_task`             which acker a root belongs to, as Storm routes it
`IdSource`               ids for use within one process: a counter through a keyed bijection
=======================  =========================================================================

Columns are what `ackcore.Ledger` takes: anything with the buffer protocol that holds integers of
native order, one-dimensional and C-contiguous (numpy arrays, ``memoryview``, ``array.array``),
and Arrow arrays without nulls; 64-bit signed or not, but int32 for ``partitions`` and
``attempts``.  They are read in place.  Results are new numpy arrays.  A column of another type
or width is refused with `TypeError`; one of another shape or length, and a value out of range
with its row, with `ValueError`; an integer of more than 64 bits with `OverflowError`.

The mixer is the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom
number generators", OOPSLA 2014) with the constants of Stafford's variant 13 of MurmurHash3's
("Better bit mixing", 2011); subkeys are the outputs of SplitMix64 started at the key.  Names are
hashed by BLAKE2b.  The mixing spreads ids, so that honest ones meet by chance alone; it is no
cipher, and ids can be chosen so that they collide.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from ackcore._backend import implementation
from ackcore._columns import as_count, as_id
from ackcore._id_arguments import component_key

if TYPE_CHECKING:
    from ackcore._reference import (
        IdSource,
        acker_task,
        edge_id,
        edge_ids,
        root_id,
        root_ids,
        xor_by_parent,
    )
else:
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
    """Return the key under which one spout derives its ids.

    Parameters
    ----------
    deployment_key : int
        64 bits in either sign: the secret that a deployment keeps in its checkpoint.
    component, topic : str
        The spout's name, and the name of what it reads.
    generation : int
        0..2**63-1.  Goes up when the same offsets come to mean other records (a topic that
        was deleted and made again).

    Returns
    -------
    int
        In -2**63..2**63-1.

    Raises
    ------
    TypeError
        If an argument is not of its type.
    ValueError
        If ``generation`` is out of range, or a name is not valid Unicode.
    OverflowError
        If ``deployment_key`` has more than 64 bits.
    """
    secret = (as_id(deployment_key, "deployment_key") & (2**64 - 1)).to_bytes(8, "little")
    digest = hashlib.blake2b(digest_size=8, key=secret, person=b"ackcore.spout")
    for name, value in (("component", component), ("topic", topic)):
        if not isinstance(value, str):
            raise TypeError(f"{name} must be a str, got {type(value).__name__}")
        text = value.encode()
        # With its length before it, no part can pass for the end of the one before.
        digest.update(len(text).to_bytes(8, "little"))
        digest.update(text)
    digest.update(as_count(generation, "generation", 0, 2**63 - 1).to_bytes(8, "little"))
    return int.from_bytes(digest.digest(), "little", signed=True)
