"""The Spark jobs and source calls of a micro-batch's runs. A test replaces them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import pyarrow as pa

from ackcore._records import Int64s
from ackcore.spark.base.paths import Place
from ackcore.spark.checkpoint.decisions import Plan
from ackcore.spark.run.action import run
from ackcore.spark.run.reread import find_keys, judge
from ackcore.spark.run.setup import RunSetup, setup_on_spark
from ackcore.spark.run.snapshot import load_snapshot, snapshot_inputs
from ackcore.spark.run.types import InputFrame, Obstacle, RunPlan, RunResult
from ackcore.spark.tasks.failed_rows import FailedRows, Rules
from ackcore.topology.builder import Topology
from ackcore.topology.stage_layout import Layout

P = ParamSpec("P")
R = TypeVar("R")
#: A job about a run that was accepted: its setup, its result, and more.
OfRun = Callable[Concatenate[RunSetup, RunResult, P], R]


class PlannedRows(Protocol):
    """Spouts whose rows a plan names, and that may lose them before it is decided."""

    def mended(self, plan: Plan) -> Plan:
        """Return a plan without the rows that are not there any more, the same if all are."""

    def inputs(self, plan: Plan) -> list[InputFrame]:
        """Return the rows that a plan on record names."""

    def replaced(self, plan: Plan) -> str | None:
        """Return which rows have been replaced by others since they were planned, None if none."""

    def unread(self, error: Exception) -> str | None:
        """Return what could not be read, if a run ended for that alone, which is no crash."""

    def obstacle(self, plan: Plan) -> Obstacle | None:
        """Return what keeps the rows of a plan from being read now; None if nothing does."""


@dataclass(frozen=True)
class Jobs:
    """The Spark jobs of a micro-batch; what each of them takes is told where it is defined.

    ``run`` runs it, ``snapshot_inputs`` keeps its new rows, and ``load_snapshot`` finds those that
    were kept before.  Of a run that was accepted ``setup`` returns the setup again, without asking
    Spark once more which spouts were spilled; ``judge`` reads failed records again and judges them,
    and ``find_keys`` finds records by their roots or keys.
    """

    run: Callable[[Topology, Layout, Sequence[InputFrame], RunPlan], RunResult] = run
    snapshot_inputs: Callable[[Sequence[InputFrame], Place, int], list[InputFrame]] = (
        snapshot_inputs
    )
    load_snapshot: Callable[[Sequence[InputFrame], Place], list[InputFrame] | None] = load_snapshot
    setup: Callable[
        [Topology, Layout, Sequence[InputFrame], RunPlan, Collection[str]], RunSetup
    ] = setup_on_spark
    judge: OfRun[[pa.Table, Rules], FailedRows] = judge
    find_keys: OfRun[[Mapping[str, Int64s], Mapping[str, Int64s]], Mapping[str, pa.Table]] = (
        find_keys
    )
