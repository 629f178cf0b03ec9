"""The results of an executor in a form for tests."""

from __future__ import annotations

import numpy as np


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
