"""The Spark job of a stream whose tasks read the rows themselves, kept for the next micro-batch.

To build and analyse the DataFrame of a small job takes a third of its CPU time.  Without an
exchange and without due retries, two micro-batches of such a stream differ in a few numbers, paths
and offsets only.  So the DataFrame is kept, with a function of the first micro-batch.  What differs
is in a local property of each job, and Spark passes it to the tasks.

Spark writes local properties to its event log.  So they must not hold anything of the user:
the connection to the source and the bolts are in the function alone.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from pyspark import TaskContext
from pyspark.sql import DataFrame

from ackcore.spark.base.arrow_batches import Batches
from ackcore.spark.base.session import LOST, is_connect
from ackcore.spark.base.versions import pins_threads
from ackcore.spark.engine.setup import InputFrame, PlannedReader, RunSetup
from ackcore.spark.tasks.spec import TaskSpec
from ackcore.spark.tasks.spout_stage import SpoutStage
from ackcore.spark.tasks.task import RESULT_TYPE

#: The local property, and its largest length: each task gets a copy.
_PROPERTY, _LONGEST = "ackcore.run", 1 << 14


#: The kept jobs, by their frames of task numbers. Each has the values that all its runs share (the
#: settings of tasks and spout, and `PlannedReader.fixed`), and its DataFrame.
_KEPT: WeakKeyDictionary[DataFrame, tuple[tuple[object, ...], DataFrame]] = WeakKeyDictionary()


class KeptJob(NamedTuple):
    """The job of a run: a DataFrame, and the text that its tasks need."""

    frame: DataFrame
    text: str

    @contextlib.contextmanager
    def sent(self) -> Iterator[None]:
        """Pass the text to the tasks of all jobs that this thread starts in the ``with`` block."""
        context = self.frame.sparkSession.sparkContext
        context.setLocalProperty(_PROPERTY, self.text)
        try:
            yield
        finally:
            # A context that was stopped meanwhile has no properties: the job's own error counts.
            with contextlib.suppress(*LOST):
                context.setLocalProperty(_PROPERTY, None)  # type: ignore[arg-type]


def kept_job(setup: RunSetup, inputs: Sequence[InputFrame]) -> KeptJob | None:
    """Return the kept job of a run without exchange and retries, which is made if there is none.

    Returns None if the run's job cannot be kept: it has several inputs or tables, the text for its
    tasks is long, or the session is of Spark Connect, for example.
    """
    if len(inputs) != 1 or inputs[0].snapshot is None or inputs[0].spout is None:
        return None
    ids, read, _ = inputs[0].snapshot
    if not isinstance(read, PlannedReader) or is_connect(ids) or not pins_threads():
        return None
    spec, source = setup.spec, setup.sources[inputs[0].spout]
    # These may differ in each run, and hold arrays.
    if spec.tables or source.refused or source.blocked is not None:
        return None
    of_run = {name: getattr(spec, name) for name in _NO_RUN}
    text = json.dumps([of_run, source.key, read.to_json()])
    if len(text) > _LONGEST:
        return None
    fixed = _in_run(spec, _NO_RUN), replace(source, key=0), read.fixed
    kept = _KEPT.get(ids)
    if kept is None or kept[0] != fixed:
        stage = KeptStage(SpoutStage(spec, setup.sources, source.name), read)
        kept = _KEPT[ids] = fixed, ids.mapInArrow(stage, RESULT_TYPE)
    return KeptJob(kept[1], text)


@dataclass(frozen=True)
class KeptStage:
    """The mapInArrow function of a kept job.

    It has the stage of the first run, and makes the stage of the present run from it and a local
    property of the job.
    """

    stage: SpoutStage
    read: PlannedReader

    def __call__(self, batches: Batches) -> Batches:
        """Read and process the rows of the task numbers in ``batches``, by the job's property."""
        context = TaskContext.get()
        assert context is not None
        text = context.getLocalProperty(_PROPERTY)
        assert text is not None
        of_run, key, rows = json.loads(text)
        name = self.stage.spout
        assert name is not None
        stage = replace(
            self.stage,
            spec=_in_run(self.stage.spec, of_run),
            sources={**self.stage.sources, name: replace(self.stage.sources[name], key=key)},
        )
        yield from stage(self.read.planned(rows)(batches))


#: What differs from run to run, for JSON: fields of the spec, with the values for a comparison of
#: two specs.
_NO_RUN = {"key": 0, "number": 0, "now_ms": 0, "work": "", "journal": "", "spent": {}}


def _in_run(spec: TaskSpec, of_run: Mapping[str, Any]) -> TaskSpec:
    """Return the spec of a kept stage with the values of another run, those of `_NO_RUN`."""
    now_ms = of_run["now_ms"]
    rules = spec.rules and replace(spec.rules, now_ms=now_ms, ended_ms=now_ms)
    return replace(spec, rules=rules, **of_run)
