"""The ranges of the parts of ids, and the errors for parts out of range.

Both backends use these limits and errors.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any, NoReturn

import numpy as np

from ackcore._columns import as_id

PARTITION_BITS = 16
OFFSET_BITS = 42
ATTEMPT_BITS = 6
#: Ordinals are the non-negative numbers of a signed 64-bit column.
ORDINAL_BITS = 63


def is_one_for_all(value: object) -> bool:
    """Return whether a column argument is a single integer for all rows."""
    # Arrays have __index__ too, for arrays with one item.
    return hasattr(value, "__index__") and not isinstance(value, np.ndarray)


def refuse_part(column: Any, name: str, bits: int) -> NoReturn:
    """Raise for the first row of ``column`` that is negative or wider than ``bits`` bits."""
    row = int(np.argmax((column < 0) | (column >= 2**bits)))
    raise ValueError(f"{name} must be in 0..{2**bits - 1}, got {int(column[row])} in row {row}")


def refuse_parent(row: int, parent: int, n: int) -> NoReturn:
    """Raise for a parent that is not one of the ``n`` rows."""
    among = f"0..{n - 1}" if n else "no rows at all (n is 0)"
    raise ValueError(f"parents must be row numbers in {among}, got {parent} in row {row}")


def component_key(component: Any) -> int:
    """Return the signed 64-bit int that represents a component in edge ids.

    Parameters
    ----------
    component : str or int
        A component's name, which is hashed, or a 64-bit int, signed or not, which is used
        unchanged. The result can therefore be passed in place of the name.

    Returns
    -------
    int
        In -2**63..2**63-1.
    """
    if isinstance(component, str):
        return hash_name(component)
    return as_id(component, "component")


@functools.lru_cache(maxsize=1024)
def hash_name(name: str) -> int:
    """Return the hash of a component's name, a signed 64-bit int."""
    digest = hashlib.blake2b(name.encode(), digest_size=8, person=b"ackcore.comp").digest()
    return int.from_bytes(digest, "little", signed=True)
