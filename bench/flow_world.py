"""The consumers of `tests/flow/simulated.py`, for real servers."""

from __future__ import annotations

from functools import cache
from typing import Any

from tests.flow.simulated import World

SLOWEST_PER_S = 8.0  # of 12, the fastest 64: some 300 requests a second, a fraction of a core


@cache
def world_of(seed: int, seconds: float) -> Any:
    """The world of a seed, its fastest consumer dead for a quarter of what is counted."""
    return World(seed, seconds, fastest_dead=True, slowest_per_s=SLOWEST_PER_S)
