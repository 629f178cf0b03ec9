"""The sources that a run reads a second time, and those that spill their rows."""

from __future__ import annotations

import json
import sys
import uuid
from dataclasses import replace

import pyarrow as pa
import pytest
from one_run import LINES, TEXTS, Split, by_word, fetched, lines
from pyspark import cloudpickle
from pyspark.sql import functions as F
from streams import in_line

from ackcore.retry import Policy
from ackcore.spark.engine import reread
from ackcore.spark.engine.action import run
from ackcore.spark.engine.setup import InputFrame, RunPlan, RunResult, setup_on_spark
from ackcore.spark.tasks.failed_rows import Rules
from ackcore.spark.tasks.row_files import PLACE
from ackcore.topology import TopologyBuilder
from ackcore.topology.stage_layout import Layout

# What the workers get of this module goes along with the job: they cannot import it.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.mark.parametrize("in_plan", [False, True], ids=["range", "values"])
def test_a_source_that_is_cut_otherwise_the_second_time_is_noticed(spark, tmp_path, in_plan):
    """A place in a partition would be another record's."""

    def frame(partitions):
        some = spark.range(9, numPartitions=partitions)
        if in_plan and partitions == 2:  # rows that the plan holds, in as many partitions as cores
            some = spark.sql(f"VALUES {', '.join(f'({n}L)' for n in range(9))} AS t(id)")
        return some.selectExpr("id", "if(id % 4 = 2, 'bad', 'a') AS text")

    builder = TopologyBuilder()
    builder.spout("lines", frame(2))
    builder.bolt("split", Split()).shuffle("lines")
    topology = builder.build()
    layout = Layout.of(topology)
    plan = RunPlan(number=0, now_ms=0, key=5, work=str(tmp_path), journal=str(tmp_path))
    ran = run(topology, layout, [InputFrame(frame(2), "lines")], plan)
    roots = ran.failed["root_id"].to_numpy()

    def again(partitions, done, roots=roots, topology=topology):
        inputs = [InputFrame(frame(partitions), "lines")]
        setup = setup_on_spark(topology, layout, inputs, plan, done.spilled)
        return sorted(fetched(setup, done, roots)["lines"]["id"].to_pylist())

    # The tasks had few rows: these are in files, which are read without a job.
    assert again(3, ran) == [2, 6]
    unkept = replace(ran, kept={})
    assert again(2, unkept) == [2, 6]
    assert sorted(again(2, unkept, roots[i : i + 1]) for i in (0, 1)) == [[2], [6]]
    with pytest.raises(RuntimeError, match="has other rows than when the micro-batch first"):
        again(3, unkept)
    # Speculative copies are no crashed attempts, however the setting is spelled.
    for value, isolates in (("false", True), ("True", False)):
        settings = spark._jsparkSession.sessionState().conf()
        settings.setConfString("spark.speculation", value)
        setup = setup_on_spark(topology, layout, [InputFrame(frame(2), "lines")], plan)
        settings.unsetConf("spark.speculation")
        assert setup.spec.isolates == isolates
        assert setup.spec.readers is None
    known = [InputFrame(frame(2), "lines", tasks=2)]
    assert setup_on_spark(topology, layout, known, plan).spec.readers == 2
    # A later driver may cut the rows into other chunks.
    recorded = json.loads(json.dumps(ran.to_reread()))
    decided, cut = RunResult.of_decided(ran.files, recorded), builder.build(chunk_rows=2)
    assert again(2, decided, topology=cut) == [2, 6]
    with pytest.raises(RuntimeError, match="has other rows than when the micro-batch first"):
        again(3, decided, topology=cut)


def test_sources_in_no_fixed_order_spill_their_input(spark, execute):
    assert execute(by_word(spark, TEXTS, shuffled=True)).run.spilled
    ranged = spark.range(4).selectExpr("id", "if(id = 2, 'bad', 'a') AS text")
    result = execute(in_line({"lines": ranged, "split": Split()}))
    assert not result.run.spilled
    assert [row["text"] for _, row in result.failed.values()] == ["bad"]


@pytest.mark.parametrize("kind", ["python", "time"])
def test_sources_that_may_compute_other_rows_spill_their_input(spark, execute, kind):
    """A record that fails is the one that was run, though there is no such row any more."""
    ranged = spark.range(4, numPartitions=2)
    if kind == "python":
        answer = F.udf(lambda i: uuid.uuid4().hex + (" bad" if i == 2 else ""))
        frame = ranged.withColumn("text", answer("id"))
    else:
        text = "concat(unix_micros(current_timestamp()), if(id = 2, ' bad', ' x')) AS text"
        frame = ranged.selectExpr("id", text)
    result = execute(in_line({"lines": frame, "split": Split()}))
    assert result.run.spilled
    ((_, row),) = result.failed.values()
    assert row["id"] == 2
    assert row["text"].endswith(" bad")


@pytest.mark.parametrize("kind", ["rdd", "frame of an rdd"])
def test_python_code_that_answers_otherwise_gives_no_record_anothers_payload(
    spark, execute, tmp_path, kind
):
    """It begins and ends with the same rows each time, which is all that is compared of them."""
    read = tmp_path / "read"

    def rows(_):
        order = [0, 2, 1, 3] if read.exists() else [0, 1, 2, 3]
        read.touch()
        return [(i, "bad" if i == 1 else "a") for i in order]

    frame = spark.createDataFrame(spark.sparkContext.parallelize([0], 1).mapPartitions(rows), LINES)
    frame = frame if kind == "rdd" else frame.where("id >= 0").select("*")
    result = execute(in_line({"lines": frame, "split": Split()}))
    ((_, row),) = result.failed.values()
    assert (row["id"], row["text"]) == (1, "bad")
    assert result.run.spilled


@pytest.mark.parametrize("spark", ["connect"], indirect=True)
def test_roots_of_an_unknown_spout_are_looked_for_in_all(spark, tmp_path):
    """A row that hangs from several roots does not say whose they are."""
    builder = TopologyBuilder()
    builder.spout("lines", lines(spark, ["bad", "a"]))
    builder.spout("more", lines(spark, ["b", "bad", "bad"]))
    builder.bolt("split", Split()).fields("lines", "id").fields("more", "id")
    topology = builder.build(parallelism=2)
    inputs = [InputFrame(spout.source, spout.name) for spout in topology.spouts.values()]
    layout = Layout.of(topology)
    plan = RunPlan(number=0, now_ms=0, key=5, work=str(tmp_path), journal=str(tmp_path))
    done = run(topology, layout, inputs, plan)
    nobody = pa.nulls(len(done.failed), pa.string()).dictionary_encode()
    unowned = done.failed.set_column(1, "spout", nobody)
    setup = setup_on_spark(topology, layout, inputs, plan, done.spilled)
    rules = Rules(0, 0, Policy(), 1e12)
    rows = reread.judge(setup, done, unowned, rules)
    assert {name: table["id"].to_pylist() for name, table in rows.waits.items()} == {
        "lines": [0],
        "more": [1, 2],
    }
    gone = pa.table([[12345], ["lines"], done.failed["reason"][:1]], schema=done.failed.schema)
    with pytest.raises(RuntimeError, match="the spouts' sources lacks 1; "):
        reread.judge(setup, done, gone, rules)


def test_records_that_failed_again_need_no_second_job(monkeypatch, spark, execute, due):
    """Their rows are in the file of those that were due."""
    retries = due([("m", 2, 4, "a"), ("m", 2, 5, "bad")])
    monkeypatch.setattr(reread, "RereadStage", None)
    result = execute(by_word(spark, ["a"]), retries={"lines": retries})
    assert [(row["id"], row[PLACE]) for _, row in result.failed.values()] == [(5, 1)]
