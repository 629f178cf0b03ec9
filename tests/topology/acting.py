"""Bolts that do what a test says, and an executor that runs them."""

import numpy as np
import pyarrow as pa

from ackcore.topology.components import BasicBolt, Bolt
from ackcore.topology.tuples import Identity

OUT = pa.schema([("x", pa.int64())])


TWO = {"default": OUT, "side": OUT}


def batch_of(*values):
    return pa.record_batch({"n": pa.array(values, pa.int64())})


def identity_of(rows):
    ids = pa.array([f"m{row}" for row in range(rows)], pa.string())
    return Identity(ids, np.zeros(rows, np.int32), np.arange(rows, dtype=np.int64))


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
