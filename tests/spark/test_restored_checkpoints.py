"""A checkpoint restored from a backup is older than what its sinks have: no row is passed over.

For other sinks: test_sink_contract.py. Here the rows come from runs of the engine.
"""

from __future__ import annotations

import shutil

import pytest
from worlds import Writing

from ackcore.spark import to_delta
from ackcore.spark.base.errors import CheckpointForeign

deltalake = pytest.importorskip("deltalake")


def written(path):
    return sorted(deltalake.DeltaTable(path).to_pyarrow_table()["line"].to_pylist())


def test_other_rows_under_a_number_that_is_written_are_an_error(tmp_path):
    path = tmp_path / "table"
    sink = to_delta(path)
    checkpoint, backup = tmp_path / "checkpoint", tmp_path / "backup"
    world = Writing(checkpoint, sink)
    world.process(0, ["a"])
    shutil.copytree(checkpoint, backup)
    world.process(1, ["b"])
    shutil.rmtree(checkpoint)
    shutil.copytree(backup, checkpoint)
    # The same again is found there; and other rows, as a source gives them, would be lost.
    world.process(1, ["b"])
    assert written(path) == ["A", "B"]
    shutil.rmtree(checkpoint)
    shutil.copytree(backup, checkpoint)
    said = r"micro-batch 1 of sink 'upper', .* is at micro-batch 1 with"
    with pytest.raises(CheckpointForeign, match=said):
        world.process(1, ["c"])
    assert written(path) == ["A", "B"]
