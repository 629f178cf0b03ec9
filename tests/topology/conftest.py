"""Sources, bolts and writers that are only ever declared, never run."""

from __future__ import annotations

from types import SimpleNamespace

import pyarrow as pa
import pytest

from ackcore.topology import BatchBolt, Bolt, TopologyBuilder

WORDS = pa.schema([("word", pa.string())])
COUNTS = pa.schema([("word", pa.string()), ("n", pa.int64())])


class Frame:
    """A stand-in for the part of a DataFrame that this package reads."""

    def __init__(self, *columns):
        self.columns = list(columns)


class Batches(BatchBolt):
    def __init__(self, outputs=None):
        self.outputs = outputs

    def process(self, batch, out):
        """Never called: nothing here runs."""


class Rows(Bolt):
    def __init__(self, outputs=None):
        self.outputs = outputs

    def execute(self, tuple):
        """Never called: nothing here runs."""


class Split(Batches):
    pass


class Count(Batches):
    pass


def write(frame, batch_id):
    """Stand in for a sink's writer."""


def word_count(lines=("line",), words=WORDS, counts=COUNTS):
    """Declare the word count, perhaps with other fields."""
    builder = TopologyBuilder()
    builder.spout("lines", Frame(*lines))
    builder.bolt("split", Split(words)).shuffle("lines")
    builder.bolt("count", Count(counts)).fields("split", "word")
    builder.sink("count", write, name="counts")
    return builder


@pytest.fixture(scope="session")
def make():
    """Parts of topologies for these tests: ``make.frame("line")``, ``make.batches()``."""
    return SimpleNamespace(
        frame=Frame,
        batches=Batches,
        rows=Rows,
        write=write,
        word_count=word_count,
        words=WORDS,
        counts=COUNTS,
    )


@pytest.fixture
def builder(make):
    """A word count, to be spoilt by one more declaration."""
    return make.word_count()
