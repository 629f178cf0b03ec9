"""The rows of a micro-batch that sinks refused, recorded between its decision and its mark.

Each time that a sink refuses rows, ``batches/N.refused-K`` records them, with K from 0 on.  When
all sinks have returned, ``batches/N.refused`` records the result: the records that are dead now,
and the counts.  From then on no sink is called again.  Each record is written once: if two drivers
write one, the second finds the record of the first and must end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import pyarrow as pa

from ackcore.spark.checkpoint.dead_records import Dead, dead_of
from ackcore.spark.checkpoint.decisions import BatchDecision
from ackcore.spark.checkpoint.records import Records
from ackcore.spark.checkpoint.table_cache import TableCache

#: A refused row: the number of its file among the sink's files, its place in the file, its roots,
#: and an encoded `ackcore.topology.Reason`.
REFUSED = pa.schema(
    [
        pa.field("file", pa.int32(), nullable=False),
        pa.field("place", pa.int64(), nullable=False),
        pa.field("roots", pa.list_(pa.int64()), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
    ]
)


class Refusal(NamedTuple):
    """The rows that a sink refused in one call (``rows``, a table of the schema `REFUSED`).

    ``written``: whether the sink has written all other rows. If not, it is called again without
    the refused ones.
    """

    sink: str
    written: bool
    rows: pa.Table


class Refusals:
    """The rows that sinks refused, as recorded in a checkpoint."""

    def __init__(self, records: Records, cache: TableCache) -> None:
        self._records = records
        self._cache = cache

    def of(self, number: int) -> list[Refusal]:
        """Return the recorded refusals of a micro-batch, in the order of `add`; may be empty."""
        found: list[Refusal] = []
        while (body := self._records.read(f"batches/{number}.refused-{len(found)}")) is not None:
            self._cache.expect(body["table_bytes"])
            rows = self._cache.read(body["rows"])
            found.append(Refusal(body["sink"], body["written"], rows))
        return found

    def add(self, number: int, place: int, refusal: Refusal) -> None:
        """Record rows that a sink refused.

        Raises CheckpointInUse if another driver has taken over, or has recorded this place.

        ``place``: the number of refusals of the micro-batch that are recorded already.
        """
        prefix, rows = self._cache.prefix_of(number), refusal.rows.cast(REFUSED)
        file = self._cache.write_table(prefix, f"refused-{place}", rows)
        self._cache.sync()
        body = {
            "sink": refusal.sink,
            "written": refusal.written,
            "rows": file,
            "table_bytes": self._cache.sizes([file]),
        }
        self._records.write(f"batches/{number}.refused-{place}", body, once=True)

    def close(
        self,
        number: int,
        dead: Mapping[str, pa.Table],
        counts: Mapping[str, Any],
        totals: Mapping[str, Any],
    ) -> None:
        """Record that all sinks of a micro-batch have returned, and the result.

        Raises CheckpointInUse if another driver has taken over, or has recorded the result.

        ``dead``: the records that are dead because sinks refused their rows, by spout, like
        ``BatchDecision.dead``. ``counts``, ``totals``: the new values of ``BatchDecision.counts``
        and ``totals``.
        """
        parts = dead_of(dead).write(self._cache, self._cache.prefix_of(number))
        self._cache.sync()
        body = {
            "dead": parts,
            "table_bytes": self._cache.sizes(
                one["file"] for some in parts.values() for one in some
            ),
            "counts": dict(counts),
            "totals": dict(totals),
        }
        self._records.write(f"batches/{number}.refused", body, once=True)

    def amended(self, decision: BatchDecision) -> BatchDecision:
        """Return the decision with the recorded result of its sinks' refusals, if there is one."""
        body = self._records.read(f"batches/{decision.number}.refused")
        if body is None:
            return decision
        self._cache.expect(body["table_bytes"])
        return replace(
            decision,
            refused=Dead.of(self._cache, body["dead"]),
            counts=body["counts"],
            totals=body["totals"],
            sinks_done=True,
        )
