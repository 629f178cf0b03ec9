"""Readers of tables on real Spark: bolts, sinks of changed rows, DataFrames, the command line."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pyarrow as pa
import pytest
import test_table_readers_crash
from pyspark import cloudpickle
from test_table_readers_crash import SEEN, Rate
from typer.testing import CliRunner

from ackcore.cli.reporting import app_of
from ackcore.spark import run_batch, table, to_parquet
from ackcore.spark.base.errors import CheckpointCorrupt
from ackcore.spark.inspect.status import read_status
from ackcore.spark.sinks.rejects import InvalidRejects, SinkRejects, TooManyRefused
from ackcore.spark.sinks.sink import Sink
from ackcore.tables import count, mean_of, sum_of
from ackcore.topology import BatchBolt, TopologyBuilder

for module in (sys.modules[__name__], test_table_readers_crash):
    cloudpickle.register_pickle_by_value(module)


class Again(BatchBolt):
    outputs = SEEN
    uses = ("totals",)

    def process(self, batch, out):
        found = self.tables["totals"].lookup(batch)
        columns = {"shop": batch["shop"], "euros": batch["euros"], "before": found["euros"]}
        out.emit(columns, parents=range(len(batch)))


ORDERS = [("north", 5, 0), ("south", 7, 0), ("north", 10, 1), ("north", 20, 2), ("west", 1, 9)]


def topology(spark, tmp_path, changes=None, writer=None):
    builder = TopologyBuilder()
    orders = spark.createDataFrame(ORDERS, "shop string, euros long, fails int")
    builder.spout("orders", orders)
    builder.bolt("rate", Rate()).shuffle("orders")
    builder.bolt("again", Again()).fields("rate", "shop")
    value = {"euros": sum_of("euros"), "n": count(), "mean": mean_of("euros")}
    builder.table("totals", from_="again", key="shop", value=value)
    builder.sink("again", writer or to_parquet(tmp_path / "rows"))
    builder.sink("totals.changes", changes or to_parquet(tmp_path / "changes"))
    return builder.build(max_attempts=3, backoff_s=0.01, max_sink_attempts=1)


AT_END = [("north", 35, 3, 35 / 3), ("south", 7, 1, 7.0)]


@pytest.fixture(scope="module")
def done(live_spark, tmp_path_factory):
    """The directory of a query that has ended."""
    spark = live_spark.session
    path = tmp_path_factory.mktemp("tables")
    counts = run_batch(topology(spark, path), spark, path / "checkpoint")
    assert (counts.acked, counts.dead) == (4, 1)
    return path


def rows_of(spark, path):
    return spark.read.parquet(str(path)).orderBy("euros").collect()


def test_bolts_and_sinks_see_the_table_before_each_micro_batch(spark, done):
    found = [(row.euros, row.before) for row in rows_of(spark, done / "rows")]
    assert found == [(5, None), (7, None), (10, 5), (20, 15)]
    changes = [
        (row.shop, row.euros, row.n, row.old_euros, row.old_n, row.old_mean)
        for row in rows_of(spark, done / "changes")
    ]
    assert changes == [
        ("north", 5, 1, None, None, None),
        ("south", 7, 1, None, None, None),
        ("north", 15, 2, 5, 1, 5.0),
        ("north", 35, 3, 15, 2, 7.5),
    ]


def test_a_table_is_a_dataframe(spark, done):
    frame = table(done / "checkpoint", "totals", spark)
    assert frame.schema.simpleString() == "struct<shop:string,euros:bigint,n:bigint,mean:double>"
    assert sorted(map(tuple, frame.collect())) == AT_END
    with pytest.raises(ValueError, match="'total'; did you mean 'totals'"):
        table(done / "checkpoint", "total", spark)
    with pytest.raises(FileNotFoundError, match=r"has no ackcore/head\.json in it"):
        table(done, "totals", spark)


def test_the_command_line_shows_rows_and_sizes(done):
    app = app_of(["checkpoint_commands"])

    def ackcore(*words, code=0):
        ended = CliRunner().invoke(app, list(map(str, words)))
        assert ended.exit_code == code, ended.output
        return ended.output

    where = ("table", "show", done / "checkpoint", "totals")
    assert json.loads(ackcore(*where, "--key", "south", "--json")) == {
        "shop": "south",
        "euros": 7,
        "n": 1,
        "mean": 7.0,
    }
    lines = ackcore(*where, "--json").splitlines()
    assert sorted(json.loads(line)["shop"] for line in lines) == ["north", "south"]
    assert len(ackcore(*where, "--json", "--limit", 1).splitlines()) == 1
    shown = ackcore(*where)
    assert "north" in shown
    assert "35" in shown
    assert re.match(r"table totals: 2 rows *\n", shown)
    limited = ackcore(*where, "--limit", 1)
    assert re.match(r"table totals: 1 row of 2; --limit shows more *\n", limited)
    ackcore(*where, "--key", "west", code=1)
    for batches in (5, 0):  # also at the end of `ackcore run`, which has shown the micro-batches
        said = ackcore("status", done / "checkpoint", "--batches", batches)
        assert "\ntable totals: 2 rows, " in said
        assert ("the last micro-batches" in said) == bool(batches)
    assert "one value for each of shop" in ackcore(*where, "--key", "a", "--key", "b", code=2)
    size = read_status(done / "checkpoint").to_json()["tables"]["totals"]
    assert size["rows"] == 2
    assert size["bytes"] > 0


class Refusing(Sink):
    def write(self, batch):
        rows = pa.Table.from_batches(batch.record_batches())
        return SinkRejects(rows.select(["shop"]), "too long")


def test_a_refused_change_ends_the_query_by_name_and_a_new_sink_gets_the_same_rows(spark, tmp_path):
    with pytest.raises(TooManyRefused, match=r"'totals.changes' refuses changed rows.*too long"):
        run_batch(topology(spark, tmp_path, Refusing()), spark, tmp_path / "checkpoint")
    run_batch(topology(spark, tmp_path), spark, tmp_path / "checkpoint")
    assert len(rows_of(spark, tmp_path / "changes")) == 4
    assert sorted(map(tuple, table(tmp_path / "checkpoint", "totals", spark).collect())) == AT_END


class Mistaken(Sink):
    def __init__(self, answer):
        self.answer = answer

    def write(self, batch):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (7, "must return SinkRejects or None, got int"),
        ([], "must return SinkRejects or None, got list"),
        (SinkRejects(pa.table({"shop": pa.array([], pa.string())}), "why"), "without any row"),
    ],
)
def test_a_sink_of_changes_that_answers_wrongly_ends_the_query_at_once(
    spark, tmp_path, answer, says
):
    with pytest.raises(InvalidRejects, match=rf"'totals.changes' refused rows.*{says}"):
        run_batch(topology(spark, tmp_path, Mistaken(answer)), spark, tmp_path / "checkpoint")


class Damaging(Sink):
    """A sink of changes that damages the table's file, after the fold and before the mark."""

    def __init__(self, directory):
        self.directory = Path(directory)

    def write(self, batch):
        for file in self.directory.glob("*.arrow"):
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 1
            file.unlink()  # the driver has mapped it
            file.write_bytes(data)


def test_a_damaged_table_ends_the_query_by_name_and_no_record_fails_for_it(spark, tmp_path):
    checkpoint = tmp_path / "checkpoint"
    damaging = Damaging(checkpoint / "ackcore/tables/totals")
    with pytest.raises(CheckpointCorrupt, match=r"tables/totals/0\.e1\..*checksum"):
        run_batch(topology(spark, tmp_path, damaging), spark, checkpoint)
    status = read_status(checkpoint)
    assert (status.counts.acked, status.counts.waiting) == (2, 3)
    assert status.under_way.decided is False
    with pytest.raises(Exception, match=r"call table\(\) again"):
        table(checkpoint, "totals", spark).collect()
