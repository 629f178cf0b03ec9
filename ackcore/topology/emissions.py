"""Joining of emissions, and the error for an undeclared stream, for all shapes of bolts.

Small emissions are joined into few large ones, because later steps work by the batch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

import numpy as np
import pyarrow as pa

from ackcore._arrow import offsets_of
from ackcore.topology._words import near_miss
from ackcore.topology.tuples import Anchors, Emission

#: The maximum number of joined bytes: an Arrow array of text holds up to 2 GiB.
JOIN_BYTES = 1 << 30


def joined(stream: str, pieces: Sequence[tuple[pa.RecordBatch, Anchors]]) -> list[Emission]:
    """Join the emissions to one stream, in order, into as few as possible."""
    emissions: list[Emission] = []
    starts, room = [0], JOIN_BYTES
    for index, (batch, _) in enumerate(pieces):
        if batch.nbytes > room and index > starts[-1]:
            starts.append(index)
            room = JOIN_BYTES
        room -= batch.nbytes
    for start, stop in pairwise([*starts, len(pieces)]):
        group = pieces[start:stop]
        if len(group) > 1:
            try:
                batch = pa.concat_batches([batch for batch, _ in group])
            except pa.ArrowException:  # dictionaries that do not fit into one
                emissions += [Emission(stream, *piece) for piece in group]
                continue
            group = [(batch, join_anchors([anchors for _, anchors in group]))]
        emissions += [Emission(stream, *piece) for piece in group]
    return emissions


def join_anchors(parts: Sequence[Anchors]) -> Anchors:
    """Join the anchors of several emissions into those of one."""
    handles = np.concatenate([part.handles for part in parts])
    if all(part.offsets is None for part in parts):
        return Anchors(handles, None)
    counts = [
        np.ones(len(part.handles), np.int64) if part.offsets is None else np.diff(part.offsets)
        for part in parts
    ]
    return Anchors(handles, offsets_of(np.concatenate(counts)))


def no_stream(component: str, stream: object, declared: Collection[str]) -> ValueError:
    """Return the error for a stream that a bolt does not declare."""
    if not declared:
        return ValueError(
            f"{component} declares no outputs, so that it cannot emit; set "
            "outputs = pa.schema([...]) on the bolt"
        )
    return ValueError(
        f"stream must be one of {component}'s outputs, got {stream!r}; "
        + near_miss(str(stream), tuple(declared), "streams")
    )
