"""Helpers of the builder's tests."""

from __future__ import annotations

import pytest

from ackcore.topology import (
    TopologyError,
)


def refusal(builder):
    """The one thing that is wrong with a topology."""
    with pytest.raises(TopologyError) as caught:
        builder.build()
    (problem,) = caught.value.problems
    assert str(caught.value) == problem
    return problem
