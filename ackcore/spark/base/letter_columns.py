"""Dead letters: their conversion from dead records, and the writing of their files.

Tasks write the files of many dead letters, and the driver those of few.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ackcore._arrow.record_batches import cast_column, has_type, rebatched
from ackcore.spark.base.reasons import reason_column
from ackcore.spark.base.schemas import (
    ATTEMPT,
    DUE_MS,
    LETTER,
    OF_REASON,
    REASON,
    REPLAYED,
    TRACKED,
    TRACKING,
)

_CODEC = "zstd"
#: Payloads are compressed if a sample of this many bytes, in this many places, shrinks to at most
#: this share.  Smaller savings take longer than the writing.
_SAMPLE_BYTES, _SAMPLES, _WORTH_IT = 1 << 18, 8, 0.75
#: The maximum rows and bytes of a row group, which a reader holds in memory.
GROUP_ROWS, GROUP_BYTES = 1 << 16, 1 << 23


def as_letters(dead: pa.Table, number: int) -> pa.Table:
    """Convert dead records (`TRACKING`, then the source's columns) of a micro-batch to letters."""
    payload = dead.select(dead.column_names[len(TRACKING) :])
    values = {name: pc.struct_field(dead[REASON], field) for name, field in OF_REASON.items()}
    values |= {name: dead[tracked] for name, tracked in TRACKED.items()}
    values["batch_id"] = pa.array(np.full(dead.num_rows, number))
    columns = [values[field.name].cast(field.type) for field in LETTER]
    # Table.to_struct_array() raises before pyarrow 21 if there is no chunk.
    structs = (batch.to_struct_array() for batch in payload.to_batches())
    columns.append(pa.chunked_array(structs, pa.struct(payload.schema)))
    return pa.table(columns, schema=schema_of(payload.schema))


def schema_of(source: pa.Schema) -> pa.Schema:
    """Return the schema of dead letters: `LETTER`, and ``payload``, a struct of the source."""
    return LETTER.append(pa.field("payload", pa.struct(list(source))))


def as_tracked(
    letters: pa.Table, attempts: pa.Array, replayed: pa.Array, *, payload: bool = True
) -> pa.Table:
    """Convert dead letters to records with the `TRACKING` columns, which are due at once.

    ``attempts``, ``replayed``: the values of `ATTEMPT` and `REPLAYED`. ``payload``: whether to add
    the source's columns.
    """
    values = {
        tracked: letters[name].cast(LETTER.field(name).type) for name, tracked in TRACKED.items()
    }
    values |= {ATTEMPT: attempts, REPLAYED: replayed}
    values[DUE_MS] = pa.array(np.zeros(len(letters), np.int64))
    values[REASON] = reason_column({field: letters[name] for name, field in OF_REASON.items()})
    columns = [values[field.name].cast(field.type) for field in TRACKING]
    if not payload:
        return pa.table(columns, schema=TRACKING)
    source = pa.Table.from_struct_array(letters["payload"])
    return pa.table([*columns, *source.columns], schema=pa.schema([*TRACKING, *source.schema]))


def write_letters(file: BinaryIO, schema: pa.Schema, tables: Iterable[pa.Table]) -> None:
    """Write dead letters as Parquet to an open file, which stays open.

    A row group has at most 65,536 rows and about 8 MiB of data before compression. A larger row has
    a row group of its own.
    """
    batches = (batch for table in tables for batch in table.to_batches())
    with letters_writer(file, schema) as writer:
        for batch in rebatched(batches, GROUP_ROWS, GROUP_BYTES):
            writer.write_batch(batch)


def letters_writer(
    file: BinaryIO | pa.NativeFile, schema: pa.Schema, *, compressed: bool = True
) -> pq.ParquetWriter:
    """Return an open Parquet writer, with a row group for each batch; the caller closes it.

    Pages have checksums, so that a flipped bit raises an error. ``compressed``: whether by zstd.
    """
    codec = _CODEC if compressed else "none"
    return pq.ParquetWriter(file, schema, compression=codec, write_page_checksum=True)


def as_written(file: pq.ParquetFile, letters: pa.Table) -> pa.Table:
    """Return columns that were read from a file; maps get the types that were written.

    Before 26, pyarrow reads intervals in maps as integers, though the file has Arrow's schema.
    """
    if not any(has_type(kind, pa.types.is_map) for kind in letters.schema.types):
        return letters
    written = pa.ipc.read_schema(
        pa.py_buffer(base64.b64decode(file.metadata.metadata[b"ARROW:schema"]))
    )
    for at, field in enumerate(letters.schema):
        kind = written.field(field.name).type
        if has_type(kind, pa.types.is_map) and field.type != kind:
            letters = letters.set_column(at, field.with_type(kind), cast_column(letters[at], kind))
    return letters


def worth_compressing(letters: pa.Table) -> bool:
    """Return whether compression shrinks a sample, of one or more payloads, to at most 75 %.

    It does not if the payloads are compressed, encrypted or random. The sample depends only on the
    letters.
    """
    payload = letters.select(["payload"])
    share = min(1.0, _SAMPLE_BYTES / max(1, payload.nbytes))
    rows = max(1, int(len(payload) * share) // _SAMPLES)
    # Each row only once: repeated rows would compress well.
    starts = np.unique(np.linspace(0, len(payload) - rows, _SAMPLES).astype(np.int64))
    parts = [payload.slice(start, rows) for start in starts.tolist()]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, payload.schema) as stream:
        stream.write_table(pa.concat_tables(parts).combine_chunks())
    sample = sink.getvalue()
    # Cut, because one row may be large.
    size = min(sample.size, 2 * _SAMPLE_BYTES)
    sample = sample.slice((sample.size - size) // 2, size)
    return bool(len(pa.Codec(_CODEC).compress(sample)) <= _WORTH_IT * size)
