"""Tests in any framework: topologies run in this process, and the contract of a ledger.

`run` runs a topology on given records without Spark, and returns their outcomes.
`check_backend` checks your own backend against the contract of `ackcore.Ledger`.
"""

from __future__ import annotations

from ackcore.testing.backends import check_backend
from ackcore.testing.results import DeadLetter, Source, TopologyRun
from ackcore.testing.topologies import run

__all__ = ["DeadLetter", "Source", "TopologyRun", "check_backend", "run"]
