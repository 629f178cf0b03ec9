"""The job whose checkpoints, as earlier commits of ackcore left them, are in ``tests/data``.

Each was made by this module, on a tree at the commit that it is named after, in a driver that a
failpoint kills::

    at=/tmp/ackcore-checkpoint-f216154
    ACKCORE_FAILPOINTS=decided:2 python tests/spark/old_checkpoint.py batch $at
    tar -C $at --exclude=lock --exclude='*.crc' --sort=name --mtime=@0 --owner=0 --group=0 \\
        --numeric-owner -c . | gzip -9n > tests/data/checkpoint-f216154-decided.tar.gz

The others are ``planned:3`` of ``batch`` and ``marked:2`` of ``stream``.  Each has records that
are ACKED, that wait at attempts 1 and 2, and that are dead; the stream has one file left to read.
A change of ``FORMAT`` needs three more, made before it is changed again, and so does a release.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tarfile
from hashlib import blake2b
from pathlib import Path

import pyarrow as pa
from pyspark import cloudpickle

from ackcore.spark.query import run_batch, start
from ackcore.spark.sinks.parquet import to_parquet
from ackcore.topology import BatchBolt, Bolt, Reject, TopologyBuilder

# What the workers get of this module goes along with the job: they cannot import it.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

#: Where the checkpoints were made: their records name files below it.
MADE_AT = re.compile(rb"/tmp/ackcore-checkpoint-[0-9a-f]{7}")
FILES, RECORDS = 4, 40
WORDS = pa.schema([("id", pa.int64()), ("word", pa.string())])


class Split(BatchBolt):
    """A record's text becomes its words."""

    outputs = WORDS

    def process(self, batch, out):
        rows = [
            (i, row["id"], word)
            for i, row in enumerate(batch.to_pylist())
            for word in row["text"].split()
        ]
        out.emit(
            pa.RecordBatch.from_pylist([{"id": key, "word": word} for _, key, word in rows], WORDS),
            parents=[i for i, _, _ in rows],
        )


class Try(Bolt):
    """Fails record k at its first k % 10 attempts, for 4 refuses and for 5 always fails it."""

    outputs = WORDS

    def execute(self, tuple):
        kind = tuple["id"] % 10
        if kind == 4:
            raise Reject("refused")
        if kind == 5 or tuple.attempt < kind < 4:
            raise ValueError(f"fails at attempt {tuple.attempt}")
        self.collector.emit((tuple["id"], tuple["word"]), anchors=tuple)
        self.collector.ack(tuple)


def text_of(key):
    return " ".join(f"{key}-{word}" for word in range(key % 3 + 1))


#: What the sink must have in the end, and who must be dead, each once.
ROWS = sorted(
    (key, word) for key in range(RECORDS) if key % 10 not in (4, 5) for word in text_of(key).split()
)
DEAD = [key for key in range(RECORDS) if key % 10 in (4, 5)]


def stage(directory):
    """Write the records to files, which a stream reads one at a time."""
    (directory / "in").mkdir(parents=True)
    for file in range(FILES):
        rows = [{"id": key, "text": text_of(key)} for key in range(file, RECORDS, FILES)]
        path = directory / f"in/{file}.json"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        os.utime(path, (file + 1, file + 1))


def topology_of(spark, directory, kind, **settings):
    """The same in all checkpoints, but for what kind of source it reads."""
    read = spark.read if kind == "batch" else spark.readStream.option("maxFilesPerTrigger", 1)
    builder = TopologyBuilder()
    builder.spout("lines", read.schema("id bigint, text string").json(f"{directory}/in"))
    builder.bolt("split", Split()).shuffle("lines")
    builder.bolt("try", Try()).fields("split", "word")
    builder.sink("try", to_parquet(f"{directory}/sink"))
    return builder.build(max_attempts=4, parallelism=2, **settings)


def unpack(archive, directory):
    """Unpack a checkpoint with its source and sink, and have its records name the new place."""
    with tarfile.open(archive) as packed:
        packed.extractall(directory, filter="data")
    for path in directory.rglob("*"):
        data = path.read_bytes() if path.is_file() else b""
        if MADE_AT.search(data):
            line, end, rest = MADE_AT.sub(os.fsencode(directory), data).partition(b"\n")
            if rest.startswith(b"blake2b "):
                rest = b"blake2b %s\n" % blake2b(line, digest_size=16).hexdigest().encode()
            path.write_bytes(line + end + rest)


class Clock:
    """Goes on by 6 s with each micro-batch that is done, and whenever somebody waits."""

    def __init__(self, directory):
        self.done, self.waited = directory / "cp/ackcore/batches", 0

    def __call__(self):
        numbers = [int(path.stem) for path in self.done.glob("*.done")]
        return 1_000_000 + 6000 * max(numbers, default=0) + self.waited

    def wait(self, seconds):
        self.waited += max(6000, round(1000 * seconds))


def main(kind, directory):
    # Not needed by who goes on with them.
    from ackcore.examples.quiet_spark import spark_session  # noqa: PLC0415

    stage(directory)
    clock = Clock(directory)
    with spark_session("local[2]") as (spark, _):
        topology = topology_of(spark, directory, kind, backoff_ms=10_000)
        if kind == "batch":
            run_batch(topology, spark, directory / "cp", clock=clock, wait=clock.wait)
        else:
            start(topology, spark, directory / "cp", clock=clock).await_termination()
    raise AssertionError("no failpoint was reached")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
