"""Rows for a sink as a run leaves them: files, and what names them."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from small_disk import SmallDisk

from ackcore._arrow.shown import text_of
from ackcore.spark import SinkUnavailable
from ackcore.spark.sinks.rejects import SinkRejects
from ackcore.spark.sinks.sink_batch import BatchFile, SinkBatch, files_and_places
from ackcore.spark.tasks.row_files import ROOT, ROOTS, RowFileWriter

WORDS = pa.schema([("word", pa.string()), ("n", pa.int64())])


def columns_file(directory, schema, *batches, partition=0):
    """Write batches of columns; the last column of the schema is that of roots."""
    file = RowFileWriter(str(directory), schema, partition)
    for columns in batches:
        arrays = [
            column if isinstance(column, pa.Array) else pa.array(column, field.type)
            for column, field in zip(columns, schema, strict=True)
        ]
        file.write(pa.RecordBatch.from_arrays(arrays, schema=schema))
    name, n, _ = file.finish()
    return BatchFile(str(directory / name), n)


def row_file(directory, rows, partition=0, schema=WORDS, batch=2):
    """Write rows of (columns..., root or list of roots)."""
    shared = any(isinstance(row[-1], list) for row in rows)
    roots = pa.field(ROOTS, pa.list_(pa.int64())) if shared else pa.field(ROOT, pa.int64())
    parts = [zip(*rows[at : at + batch], strict=True) for at in range(0, len(rows), batch)]
    return columns_file(directory, schema.append(roots), *parts, partition=partition)


def latin_file(directory):
    """Write words, of which the third is Latin-1 and no UTF-8, and the second is not ACKED."""
    words = text_of([b"a", b"b", b"caf\xe9", b"d"])
    schema = WORDS.append(pa.field(ROOT, pa.int64()))
    return columns_file(directory, schema, [words, [1, 2, 3, 4], [10, 11, None, 10]])


def two_files(directory):
    """Write words, of which those of root 11 are not ACKED; "a" is there twice."""
    return (
        row_file(directory, [("a", 1, 10), ("b", 2, 11), ("c", 3, None)]),
        row_file(directory, [("d", 4, 10), ("a", 5, 12)], 1),
    )


def refused(rejects):
    """Rows that a sink refuses, by file and place, and why."""
    places = (column.tolist() for column in files_and_places(rejects.numbers))
    why = [rejects.reasons[number] for number in rejects.reason_of]
    return dict(zip(zip(*places, strict=True), why, strict=True))


def kinds(told):
    """The types of the errors for which rows were refused."""
    return {at: type(error).__name__ for at, error in told.items()}


def written_without_refused(sink, batch):
    """Write; return why rows are refused, by file and place, having written the others then."""
    with pytest.raises(SinkRejects) as raised:
        sink.write(batch)
    why = refused(raised.value)
    known = tuple(
        file._replace(refused=np.sort([at for of, at in why if of == number]).astype(np.int64))
        for number, file in enumerate(batch.files)
    )
    for _ in range(2):
        assert sink.write(replace(batch, files=known)) is None
    return why


def check_full_disk(tmp_path, on_disk):
    """Check that a table is as it was while its disk is full, and gets the rows once it is not.

    ``on_disk(directory)`` makes a sink there, and a function that returns the table's rows.
    """
    texts = random.Random(7)  # that cannot be compressed
    some = [(texts.randbytes(32).hex(), n, None) for n in range(60_000)]
    file = row_file(tmp_path, some, batch=10_000)
    disk = SmallDisk(tmp_path / "disk", 1)
    try:
        sink, rows = on_disk(disk.path)
        for _ in range(2):
            with pytest.raises(SinkUnavailable, match="No space left"):
                sink.write(accepted([file]))
            assert (found := rows()) == [], found
        disk.resize(64)
        for _ in range(2):
            sink.write(accepted([file]))
        assert (n := len(rows())) == 60_000, n
    finally:
        disk.remove()


def accepted(files, batch_id=0, nonacked=(11,), **changes):
    about = {"spark": None, "sink": "count", "deployment": "abc", "checkpoint": "/cp"}
    rows = {"files": tuple(files), "nonacked": np.array(sorted(nonacked), np.int64)}
    return SinkBatch(batch_id=batch_id, **{**about, **rows, **changes})


def release_all(sink):
    """Close all connections of a sink."""
    for deployment, name in list(sink._live._open):
        sink.release(name, deployment)
