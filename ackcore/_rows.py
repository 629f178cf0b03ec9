"""Hashes of rows, runs of edges, gathers and fingerprints, from the backend that runs.

`ackcore.arrow.hash_columns` is made of `hash_fixed` and `hash_binary`, and `take_rows` there of
`gather_binary`; `pack_runs` is the core of a shuffle that carries one run of edges instead of an
edge per row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ackcore._backend import implementation

if TYPE_CHECKING:
    from ackcore._reference.rows import (
        fingerprint,
        gather_binary,
        hash_binary,
        hash_fixed,
        pack_runs,
    )
else:
    fingerprint = implementation.fingerprint
    gather_binary = implementation.gather_binary
    hash_binary = implementation.hash_binary
    hash_fixed = implementation.hash_fixed
    pack_runs = implementation.pack_runs

__all__ = ["fingerprint", "gather_binary", "hash_binary", "hash_fixed", "pack_runs"]
