"""Bolts that do what a test says, an executor that runs them, and their results."""

import numpy as np
import pyarrow as pa
import pytest

from ackcore.topology import TopologyError
from ackcore.topology.components import BasicBolt, Bolt
from ackcore.topology.tuples import Identity

OUT = pa.schema([("x", pa.int64())])


TWO = {"default": OUT, "side": OUT}


def batch_of(*values):
    return pa.record_batch({"n": pa.array(values, pa.int64())})


def identity_of(rows, attempt=0, stable=None):
    ids = np.arange(rows) if stable is None else np.array(stable)
    messages = pa.array([f"m{n}" for n in ids.tolist()], pa.string())
    return Identity(messages, np.full(rows, attempt, np.int32), ids)


def run(executor, *batches):
    """Process batches of values and flush; return what each call returned."""
    results = [executor.process("src", "default", batch_of(*values), None) for values in batches]
    return [*results, executor.flush()]


class Doing(Bolt):
    """A bolt that does what a test says, by the tuple's value."""

    outputs = TWO

    def __init__(self, execute, flush=None):
        self.do, self.at_end, self.seen = execute, flush, []

    def execute(self, tuple):
        self.seen.append(tuple)
        self.do(self, tuple)

    def flush(self):
        if self.at_end:
            self.at_end(self)


class Basically(BasicBolt):
    outputs = TWO

    def __init__(self, execute):
        self.do = execute

    def execute(self, tuple, collector):
        return self.do(tuple, collector)


def emit_and_ack(bolt, t):
    bolt.collector.emit((t[0] * 10,), t)
    bolt.collector.ack(t)


def raising(error):
    def method(self, *args):
        raise error

    return method


def emitted(results, stream="default", column="x"):
    """Every row with its anchors, in order."""
    rows = []
    for result in results:
        for emission in result.emissions:
            if emission.stream != stream:
                continue
            handles, offsets = emission.anchors
            assert handles.dtype == np.int64
            if offsets is None:
                offsets = np.arange(emission.batch.num_rows + 1)
            assert len(offsets) == emission.batch.num_rows + 1 > 1
            for row, value in enumerate(emission.batch[column].to_pylist()):
                rows.append((value, handles[offsets[row] : offsets[row + 1]].tolist()))
    return rows


def failed(results):
    """Reason by handle; no handle may fail twice."""
    found = {}
    for failure in (f for result in results for f in result.failures):
        reasons = failure.reasons
        if len(reasons) == 1:
            reasons = reasons * len(failure.handles)
        for handle, reason in zip(failure.handles.tolist(), reasons, strict=True):
            assert handle not in found
            found[handle] = reason
    return found


def whys(results):
    """Message by handle."""
    return {handle: reason.message for handle, reason in failed(results).items()}


def refusal(builder):
    """Return the only problem of a topology."""
    with pytest.raises(TopologyError) as caught:
        builder.build()
    (problem,) = caught.value.problems
    assert str(caught.value) == problem
    return problem
