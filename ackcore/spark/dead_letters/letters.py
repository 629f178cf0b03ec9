"""A file of dead letters: its columns, and how it is written and read."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ackcore._records import Int64s
from ackcore.spark.base.errors import corrupt
from ackcore.spark.base.schemas import ATTEMPT, FIRST_MS, LAST_MS, MESSAGE_ID, REASON, TRACKING
from ackcore.topology.tuples import Reason

TIME = pa.timestamp("ms", "UTC")
#: What every letter has beside its payload.
LETTER = pa.schema(
    [
        pa.field("message_id", pa.string()),
        pa.field("attempts", pa.int32()),
        pa.field("error_type", pa.string()),
        pa.field("error_message", pa.string()),
        pa.field("component", pa.string()),
        pa.field("first_ms", TIME),
        pa.field("last_ms", TIME),
        pa.field("batch_id", pa.int64()),
    ]
)
#: Pages carry checksums, so that a flipped bit is an error and not another letter.
WRITING: dict[str, Any] = {"write_page_checksum": True, "compression": "zstd"}


def as_letters(dead: pa.Table, number: int) -> pa.Table:
    """Return the dead of a micro-batch, in `TRACKING` and the source's columns, as letters."""
    decode = cache(Reason.decode)  # many die of one cause
    reasons = [decode(text) for text in dead[REASON].to_pylist()]
    payload = dead.select(dead.column_names[len(TRACKING) :])
    columns = [
        dead[MESSAGE_ID],
        dead[ATTEMPT],
        pa.array([reason.type for reason in reasons], pa.string()),
        pa.array([reason.message for reason in reasons], pa.string()),
        pa.array([reason.component for reason in reasons], pa.string()),
        dead[FIRST_MS].cast(TIME),
        dead[LAST_MS].cast(TIME),
        pa.array(np.full(dead.num_rows, number)),
        payload.to_struct_array(),
    ]
    return pa.table(columns, schema=schema_of(payload.schema))


def schema_of(source: pa.Schema) -> pa.Schema:
    """Return the schema of letters from a source of these columns."""
    return LETTER.append(pa.field("payload", pa.struct(list(source))))


def read_letters(path: Path, columns: list[str] | None = None) -> pa.Table:
    """Read a file of letters.

    Raises
    ------
    CheckpointCorrupt
        If it is damaged or missing.
    """
    try:
        return pq.read_table(
            path, columns=columns, page_checksum_verification=True, partitioning=None
        )
    except (pa.ArrowException, OSError) as error:
        raise corrupt(path, f"is damaged: {error}") from error


def read_schema(path: Path) -> pa.Schema:
    """Return the columns of a file of letters, as Arrow had them.

    Raises
    ------
    CheckpointCorrupt
        If it is damaged or missing.
    """
    try:
        return pq.read_schema(path)
    except (pa.ArrowException, OSError) as error:
        raise corrupt(path, f"is damaged: {error}") from error


def starts_of(batch_ids: Int64s) -> dict[int, int]:
    """Return where the letters of each micro-batch begin in a file."""
    numbers, starts = np.unique(batch_ids, return_index=True)
    return dict(zip(numbers.tolist(), starts.tolist(), strict=True))
