"""The ranges of the parts of ids, and the errors of a part outside them.

Both backends check with these limits and refuse in these words.
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
#: Ordinals are what is left of a signed 64-bit column.
ORDINAL_BITS = 63


def is_one_for_all(value: object) -> bool:
    """Whether a column argument is a single integer that stands for every row."""
    # Arrays have __index__ as well, for the sake of those with one item.
    return hasattr(value, "__index__") and not isinstance(value, np.ndarray)


def refuse_part(column: Any, name: str, bits: int) -> NoReturn:
    """Raise for the first row of ``column`` that is negative or wider than ``bits`` bits."""
    row = int(np.argmax((column < 0) | (column >= 2**bits)))
    raise ValueError(f"{name} must be in 0..{2**bits - 1}, got {int(column[row])} in row {row}")


def refuse_parent(row: int, parent: int, n: int) -> NoReturn:
    """Raise for a parent that is none of the ``n`` rows."""
    among = f"0..{n - 1}" if n else "no rows at all (n is 0)"
    raise ValueError(f"parents must be row numbers in {among}, got {parent} in row {row}")


def component_key(component: Any) -> int:
    """Return the 64-bit int (signed) that stands for a component in edge ids.

    Parameters
    ----------
    component : str or int
        A component's name, which is hashed, or 64 bits in either sign, which are taken as
        they are: so the result may be passed wherever the name may.

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
    """Return the 64 bits, signed, that a component's name is hashed to."""
    digest = hashlib.blake2b(name.encode(), digest_size=8, person=b"ackcore.comp").digest()
    return int.from_bytes(digest, "little", signed=True)
