"""Pieces of emissions become as few as there can be."""

import numpy as np
import pyarrow as pa

from ackcore.topology.bolt_calls import joined
from ackcore.topology.tuples import Anchors


def piece(*values, offsets=None):
    handles = np.arange(len(values) if offsets is None else offsets[-1])
    return (
        pa.record_batch({"n": list(values)}),
        Anchors(handles, None if offsets is None else np.array(offsets)),
    )


def test_pieces_become_one_emission():
    (one,) = joined("s", [piece(1, 2), piece(3)])
    assert one.batch.to_pydict() == {"n": [1, 2, 3]}
    assert (one.anchors.handles.tolist(), one.anchors.offsets) == ([0, 1, 0], None)
    (one,) = joined("s", [piece(1), piece(2, 3, offsets=[0, 0, 2]), piece(4)])
    assert one.anchors.handles.tolist() == [0, 0, 1, 0]
    assert one.anchors.offsets.tolist() == [0, 1, 1, 3, 4]
    assert joined("s", []) == []


def test_pieces_that_are_too_large_to_join_stay_apart(monkeypatch):
    monkeypatch.setattr("ackcore.topology.bolt_calls.JOIN_BYTES", 16)
    parts = joined("s", [piece(1), piece(2), piece(3), piece(4, 5, 6), piece(7)])
    assert [part.batch["n"].to_pylist() for part in parts] == [[1, 2], [3], [4, 5, 6], [7]]


def test_dictionaries_that_do_not_fit_into_one_stay_apart():
    kind = pa.dictionary(pa.int8(), pa.string())
    columns = [
        pa.array([f"{part}-{n}" for n in range(100)]).dictionary_encode().cast(kind)
        for part in range(2)
    ]
    anchors = Anchors(np.arange(100), None)
    parts = joined("s", [(pa.record_batch({"w": column}), anchors) for column in columns])
    assert [part.batch["w"].to_pylist() for part in parts] == [c.to_pylist() for c in columns]
