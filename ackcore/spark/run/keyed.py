"""The new records of a run with given keys: those behind a failed one."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import reduce

import pyarrow as pa
from pyspark.sql import DataFrame

from ackcore._records import Int64s
from ackcore.spark.run.collect import collected
from ackcore.spark.run.reread import check_content, in_files
from ackcore.spark.run.setup import RunSetup, setup_on_spark
from ackcore.spark.run.types import InputFrame, RunPlan, RunResult
from ackcore.spark.tasks.key_stage import KeyStage, keyed
from ackcore.spark.tasks.record_ids import RETRIES
from ackcore.spark.tasks.results import RESULT_TYPE, TASK_REPORT, from_stream
from ackcore.spark.tasks.spout_stage import SpoutStage
from ackcore.topology.builder import Topology
from ackcore.topology.stage_layout import Layout


def find_keys(
    topology: Topology,
    layout: Layout,
    inputs: Sequence[InputFrame],
    plan: RunPlan,
    accepted: RunResult,
    keys: Mapping[str, Int64s],
) -> dict[str, pa.Table]:
    """Find the new records of a run that have some keys.

    Parameters
    ----------
    topology, layout, inputs, plan
        As given to `run`.
    accepted : RunResult
        What that returned.
    keys : mapping from str to numpy.ndarray of int64
        Hashes of keys by spout, sorted.

    Returns
    -------
    dict from str to pyarrow.Table
        By spout, `KEYED`.

    Raises
    ------
    RuntimeError
        If the rows are not there any more.
    """
    setup = setup_on_spark(topology, layout, inputs, plan, accepted.spilled)
    return find_records(setup, accepted, keys)


def find_records(
    setup: RunSetup, accepted: RunResult, keys: Mapping[str, Int64s]
) -> dict[str, pa.Table]:
    """Find the new records of a run that have some keys, as `find_keys` does, given its setup."""
    found: dict[str, list[pa.Table]] = defaultdict(list)
    for some in in_files(setup, accepted, keys.keys() & accepted.spilled.keys()):
        if some.partition != RETRIES:
            found[some.source.name].append(pa.Table.from_batches([keyed(some, keys)]))
    if not keys.keys() <= accepted.spilled.keys():
        stages = [
            one.map_in_arrow(
                KeyStage(SpoutStage(setup.spec, setup.sources, one.spout), keys), RESULT_TYPE
            )
            for one in setup.inputs
        ]
        rows, content = collected(reduce(DataFrame.union, stages)), {}
        for kind, blob in zip(rows["kind"].to_pylist(), rows["blob"].to_pylist(), strict=True):
            if kind == TASK_REPORT:
                report = json.loads(blob)
                content[report["partition"]] = report["content"]
                continue
            table = from_stream(blob)
            name = table.schema.metadata[b"spout"].decode()
            if name not in accepted.spilled:
                found[name].append(table)
        check_content(setup, accepted.content, content)
    return {name: pa.concat_tables(some) for name, some in found.items()}
