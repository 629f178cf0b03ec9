"""Ranges of offsets, which name records before they are read."""

from __future__ import annotations

from typing import NamedTuple

import pyarrow as pa

#: The columns of a record.  ``timestamp`` is null if the topic stores none.  ``headers`` may be
#: null if a record has none, and so may a header's value.
RECORD_SCHEMA = pa.schema(
    [
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field(
            "headers",
            pa.list_(
                pa.struct([pa.field("key", pa.string(), False), pa.field("value", pa.binary())])
            ),
        ),
        pa.field("topic", pa.string(), False),
        pa.field("partition", pa.int32(), False),
        pa.field("offset", pa.int64(), False),
        pa.field("timestamp", pa.timestamp("ms", "UTC")),
    ]
)


class OffsetRange(NamedTuple):
    """The offsets of a partition from ``start`` up to, but not including, ``stop``."""

    topic: str
    partition: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """The number of offsets, which is the maximum number of records."""
        return max(0, self.stop - self.start)

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition} [{self.start}, {self.stop})"
