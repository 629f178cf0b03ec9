"""Checks of the numbers in the settings of flow control."""

from __future__ import annotations

import math
from decimal import Decimal
from numbers import Real
from typing import Any


def real(value: Any, name: str, unit: str = "") -> float:
    """Return a real number of any type, such as a `decimal.Decimal` or one of numpy's, as a float.

    Raises TypeError if it is not a number, or a bool.

    ``unit``: the unit of the value, for the message.
    """
    if isinstance(value, bool) or not isinstance(value, (Real, Decimal)):
        of_unit = f" of {unit}" if unit else ""
        raise TypeError(f"{name} must be a number{of_unit}, got {type(value).__name__} {value!r}")
    number: Any = value
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf
    except ValueError:  # a signaling NaN
        return math.nan


def positive(value: Any, name: str, most: float = math.inf, unit: str = "") -> float:
    """Return a number above 0 as a float.

    Raises TypeError like `real`. Raises ValueError if it is out of range.

    ``most``: the largest allowed value. Infinity itself is never allowed.
    """
    number = real(value, name, unit)
    if not 0 < number <= most or number == math.inf:
        high = f" and at most {most:g}" if most < math.inf else " and finite"
        raise ValueError(f"{name} must be above 0{high}, got {value}")
    return number


def nanoseconds(value: Any, name: str) -> int:
    """Return a number of seconds above 0 as whole nanoseconds, at least 1; errors as `positive`."""
    # 1e9 s are 31 years: floats of that size are exact to the millisecond.
    return max(1, round(positive(value, name, 1e9, "seconds") * 1e9))
