"""The Spark jobs and source calls of a micro-batch's runs. A test replaces them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import pyarrow as pa

from ackcore._records import Int64s
from ackcore.spark.base.paths import Place
from ackcore.spark.checkpoint.decisions import Plan
from ackcore.spark.engine.action import run
from ackcore.spark.engine.reread import find_keys, judge
from ackcore.spark.engine.setup import RunSetup, setup_on_spark
from ackcore.spark.engine.snapshot import load_snapshot, snapshot_inputs
from ackcore.spark.engine.types import InputFrame, Obstacle, RunPlan, RunResult
from ackcore.spark.tasks.failed_rows import FailedRows, Rules
from ackcore.topology.builder import Topology
from ackcore.topology.stage_layout import Layout

P = ParamSpec("P")
R = TypeVar("R")
#: A job about an accepted run, given the run's setup, its result, and more.
OfRun = Callable[Concatenate[RunSetup, RunResult, P], R]


class PlannedRows(Protocol):
    """Spouts whose rows a plan names, and which may lose the rows before the decision."""

    def mended(self, plan: Plan) -> Plan:
        """Return the plan without the rows that are lost; the same plan if none is."""

    def inputs(self, plan: Plan) -> list[InputFrame]:
        """Return the rows that a recorded plan names."""

    def replaced(self, plan: Plan) -> str | None:
        """Return a description of rows that were replaced since the plan was made, or None."""

    def unread(self, error: Exception) -> str | None:
        """Return which rows could not be read if only that ended a run (no crash), or None."""

    def obstacle(self, plan: Plan) -> Obstacle | None:
        """Return the reason why the rows of a plan cannot be read now, or None if they can."""


@dataclass(frozen=True)
class Jobs:
    """The Spark jobs of a micro-batch; their arguments are documented where each is defined.

    ``run`` runs the micro-batch, ``snapshot_inputs`` saves its new rows, and ``load_snapshot``
    finds rows that were saved before.  The other jobs concern an accepted run: ``setup`` returns
    its setup again, without a query to Spark about the spilled spouts; ``judge`` reads failed
    records again and judges them; ``find_keys`` finds records by their roots or keys.
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
