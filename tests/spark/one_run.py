"""One run of a micro-batch on Spark, for tests: bolts, a topology, what it left."""

from __future__ import annotations

import collections
import sys
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from checkpoints import tracked
from pyspark import cloudpickle
from pyspark.sql import functions as F
from pyspark.sql.types import LongType, StringType, StructField, StructType

from ackcore.spark.engine import reread
from ackcore.spark.engine.action import run
from ackcore.spark.engine.setup import InputFrame, RunPlan, setup_on_spark
from ackcore.spark.sinks.sink_batch import BatchFile, read_sink_file
from ackcore.spark.tasks.record_ids import pick
from ackcore.spark.tasks.row_files import ROOT_ID, RowFile, RowFileWriter
from ackcore.topology import BatchBolt, Reason, TopologyBuilder
from ackcore.topology.stage_layout import Layout

# What the workers get of this module goes along with the job: they cannot import it.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

LINES = StructType([StructField("id", LongType()), StructField("text", StringType())])
WORDS = pa.schema([("id", pa.int64()), ("word", pa.string())])


class Split(BatchBolt):
    """A row for each word; lines with "bad" fail."""

    outputs = WORDS

    def process(self, batch, out):
        texts = batch.column("text").to_pylist()
        words = [(text or "").split() for text in texts]
        parents = np.repeat(np.arange(len(batch)), [len(some) for some in words])
        ids = batch.column("id").take(pa.array(parents))
        out.emit(
            [ids, pa.array([word for some in words for word in some], pa.string())], parents=parents
        )
        bad = [i for i, some in enumerate(words) if "bad" in some]
        out.fail(bad, [ValueError(f"line {texts[i]}") for i in bad])


class Pass(BatchBolt):
    """Hands on every word; "poison" raises."""

    outputs = WORDS

    def process(self, batch, out):
        if "poison" in batch.column("word").to_pylist():
            raise RuntimeError("poison")
        out.emit(batch, parents=np.arange(len(batch)))


def hashable(value):
    return tuple(value) if isinstance(value, list) else value


class Result(NamedTuple):
    run: object
    failed: dict  # root id: reason and row
    rows: dict  # (component, stream): Counter of the rows of ACKED roots


def lines(spark, texts, partitions=3):
    """Rows in the order of their texts, in ranges."""
    column = F.array(*[F.lit(text).cast("string") for text in texts])[F.col("id").cast("int")]
    return spark.range(0, len(texts), 1, partitions).select("id", column.alias("text"))


TEXTS = ["a b c", "bad one", "", None, "a poison", "x x x x", "no way", "lost it", "too late b"] * 7


def by_word(spark, texts, shuffled=False, **options):
    """lines -> split -> pass, by word -> a sink.  A shuffle has no fixed order: it is spilled."""
    source = lines(spark, texts)
    builder = TopologyBuilder()
    builder.spout("lines", source.repartition(3) if shuffled else source, **options)
    builder.bolt("split", Split()).shuffle("lines")
    builder.bolt("pass", Pass()).fields("split", "word")
    builder.sink("pass", lambda frame, number: None)
    return builder.build(parallelism=3, chunk_rows=4)


def fetched(setup, done, roots):
    """Return the records of roots, by spout, as they are read again to be judged."""
    sought = dict.fromkeys(setup.sources, np.sort(roots))
    function = partial(pick, roots=sought, claims={}, number=setup.plan.number)
    return reread._picked(setup, done, sought, [roots], function)


def executing_in(directory):
    """``execute(topology, **plan)`` runs a micro-batch and reads all that it left."""
    runs = []

    def execute(topology, inputs=None, **plan):
        work = directory / f"work-{len(runs)}"
        work.mkdir()
        runs.append(work)
        layout = Layout.of(topology)
        if inputs is None:
            inputs = [InputFrame(spout.source, spout.name) for spout in topology.spouts.values()]
        given = {"number": 3, "now_ms": 0, "key": 77, "work": str(work), **plan}
        plan = RunPlan(journal=f"{work}.journal", **given)
        # Without the kept files, so that sources are read again.
        done = replace(run(topology, layout, inputs, plan), kept={})
        assert done.problems == ()
        setup = setup_on_spark(topology, layout, inputs, plan, done.spilled)
        payload = fetched(setup, done, done.failed["root_id"].to_numpy())
        reasons = dict(
            zip(
                done.failed["root_id"].to_pylist(),
                map(Reason.decode, done.failed["reason"].to_pylist()),
                strict=True,
            )
        )
        assert len(reasons) == len(done.failed)
        failed = {}
        for spout, table in payload.items():
            for row in table.to_pylist():
                failed[row[ROOT_ID]] = (reasons[row[ROOT_ID]], row | {"spout": spout})
        assert len(failed) == len(reasons)
        bad = np.sort(done.failed["root_id"].to_numpy())
        rows = collections.defaultdict(collections.Counter)
        for file in done.files:
            for batch in read_sink_file(BatchFile(str(work / file.path), file.rows), bad):
                columns = [map(hashable, column.to_pylist()) for column in batch.columns]
                rows[file.component, file.stream].update(zip(*columns, strict=True))
        return Result(done, failed, rows)

    return execute


def due_in(directory):
    """``due(rows)`` makes a file of records that are due: (message id, attempt, id, text)."""

    def due(rows):
        ids, attempts, *columns = (list(column) for column in zip(*rows, strict=True))
        source = pa.table(columns, pa.schema([("id", pa.int64()), ("text", pa.string())]))
        table = tracked(source, message_id=ids, attempt=attempts)
        file = RowFileWriter(str(directory), table.schema, 0)
        file.write(*table.to_batches())
        name, n, _ = file.finish()
        return RowFile(str(directory / name), n)

    return due
