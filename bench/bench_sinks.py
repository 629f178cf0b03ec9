"""`to_postgres` against a bare COPY of the same rows into the same table.

A million rows of (key, text, number, time), their keys in random order, into a table with a
primary key; the rows lie in eight files, as a micro-batch leaves them. Both sides send the same
CSV, made of Arrow by the same function, in one transaction; wall time, since most of it passes in
the server. The table is made anew for each turn, so that a bare COPY, which cannot replace rows,
can run at all; what it costs to replace every row stands beside it, without a bound.
"""

from __future__ import annotations

import socket
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from ackcore.spark import to_postgres
from ackcore.spark.sinks.copy_format import as_csv
from ackcore.spark.sinks.sink_batch import BatchFile, SinkBatch, read_sink_file
from ackcore.spark.tasks.row_files import ROOT, RowFileWriter
from bench.compiled import Unavailable

psycopg = pytest.importorskip("psycopg")

FILES, BATCH_ROWS = 8, 10_000
SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("word", pa.string()),
        ("amount", pa.float64()),
        ("at", pa.timestamp("us")),
        (ROOT, pa.int64()),
    ]
)
TABLE = "id bigint PRIMARY KEY, word text, amount double precision, at timestamp"


@pytest.fixture(scope="module")
def rows(quick: bool) -> int:
    """How many rows there are."""
    return 20_000 if quick else 1_000_000


@pytest.fixture(scope="module")
def dsn():
    """A database of a PostgreSQL of our own."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    try:
        import postgres_server  # noqa: PLC0415

        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        server = postgres_server.PostgresServer(port)
    except (ImportError, RuntimeError) as error:
        raise Unavailable(str(error)) from error
    finally:
        sys.path.pop(0)
    try:
        yield server.start().new_database()
    finally:
        server.remove()


@pytest.fixture(scope="module")
def accepted(rows, tmp_path_factory) -> SinkBatch:
    """A micro-batch."""
    directory = str(tmp_path_factory.mktemp("rows"))
    rng = np.random.default_rng(7)
    ids = rng.permutation(rows * 8)[:rows] * 1_000_003
    files = []
    for number, part in enumerate(np.array_split(ids, FILES)):
        file = RowFileWriter(directory, SCHEMA, number)
        for some in np.array_split(part, max(1, len(part) // BATCH_ROWS)):
            n = len(some)
            columns = [
                pa.array(some),
                pa.array(np.char.add("word", rng.integers(0, 10_000, n).astype(str))),
                pa.array(rng.random(n).round(2)),
                pa.array(rng.integers(0, 10**15, n)).cast(pa.timestamp("us")),
                pa.array(np.zeros(n, np.int64)),
            ]
            file.write(pa.RecordBatch.from_arrays(columns, schema=SCHEMA))
        name, n, _ = file.finish()
        files.append(BatchFile(f"{directory}/{name}", n))
    nothing = np.empty(0, np.int64)
    return SinkBatch(None, "out", "bench", directory, 0, tuple(files), nothing)  # type: ignore[arg-type]


def bench_to_postgres_against_a_bare_copy(dsn, accepted, rows, quick, interleaved, report_ratio):
    """Upserts by a key into an empty table, then of all rows again; and rows appended."""
    upsert, append = to_postgres(dsn, "rows", keys="id"), to_postgres(dsn, "rows")
    contestants = {
        "bare COPY": lambda: copy(dsn, accepted),
        "appended": written_by(append, accepted),
        "upsert": written_by(upsert, accepted),
        "every row replaced": written_by(upsert, accepted),
    }
    fresh = fresh_by(dsn, upsert)
    taken = interleaved(contestants, 1 if quick else 7, time.perf_counter, before=fresh)
    report(report_ratio, "to_postgres", taken, dsn, rows)
    for sink in (upsert, append):
        sink.release("out", "bench")


def fresh_by(dsn, sink):
    """Return what makes the table anew before each turn but the one that replaces every row."""

    def fresh(name: str) -> None:
        with closing(psycopg.connect(dsn, autocommit=True)) as connection:
            if name != "every row replaced":
                connection.execute("DROP TABLE IF EXISTS rows")
                connection.execute(f"CREATE TABLE rows ({TABLE})")
            connection.execute("CHECKPOINT")
        sink.claim("out", "bench", "")

    return fresh


def copy(dsn: str, accepted: SinkBatch) -> None:
    """Copy the rows, by one connection."""
    with closing(psycopg.connect(dsn)) as connection:
        with connection.cursor().copy("COPY rows FROM STDIN (FORMAT csv)") as out:
            for file in accepted.files:
                for batch in read_sink_file(file, accepted.nonacked):
                    out.write(as_csv(batch, [False] * 4))
        connection.commit()


_numbers = iter(range(1 << 30))


def written_by(sink, accepted):
    """Return what has a sink write the rows, under a number of its own each time."""

    def write() -> None:
        batch = replace(accepted, batch_id=next(_numbers))
        assert sink.write(batch) is None

    return write


def report(report_ratio, sink, taken, dsn, rows):
    """See that all rows are there, and report how fast they went there."""
    with closing(psycopg.connect(dsn)) as connection:
        assert connection.execute("SELECT count(*) FROM rows").fetchone() == (rows,)
    for name, bound in (("appended", 0.7), ("upsert", 0.7), ("every row replaced", None)):
        pairs = zip(taken["bare COPY"], taken[name], strict=True)
        report_ratio(f"{sink}, {name}, against a bare COPY", [a / b for a, b in pairs], bound)
