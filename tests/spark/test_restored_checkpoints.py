"""A checkpoint restored from a backup is older than what its sinks have: no row is passed over."""

from __future__ import annotations

import importlib
import shutil

import pyarrow as pa
import pytest
from worlds import LINES, Writing

from ackcore.spark.base.errors import CheckpointForeign
from ackcore.spark.sinks.delta import to_delta
from ackcore.spark.sinks.iceberg import to_iceberg
from ackcore.spark.sinks.postgres import to_postgres


@pytest.fixture
def delta(tmp_path):
    deltalake = pytest.importorskip("deltalake")
    path = tmp_path / "table"
    return to_delta(path), lambda: deltalake.DeltaTable(path).to_pyarrow_table()


@pytest.fixture
def iceberg(tmp_path):
    pytest.importorskip("sqlalchemy")  # of the catalog
    pytest.importorskip("pyiceberg")
    catalogs = importlib.import_module("pyiceberg.catalog")
    uri, warehouse = f"sqlite:///{tmp_path}/catalog.db", f"file://{tmp_path}"
    about = {"name": "test", "type": "sql", "uri": uri, "warehouse": warehouse}
    catalog = catalogs.load_catalog(**about)
    catalog.create_namespace("shop")
    catalog.create_table("shop.lines", LINES)
    yield (
        to_iceberg("shop.lines", about),
        lambda: catalog.load_table("shop.lines").scan().to_arrow(),
    )
    catalog.close()


@pytest.fixture
def table_of_postgres(postgres):
    psycopg = pytest.importorskip("psycopg")
    with psycopg.connect(postgres, autocommit=True) as connection:
        connection.execute("CREATE TABLE lines (line text)")
        sink = to_postgres(postgres, "lines")
        read = "SELECT line FROM lines"
        yield (
            sink,
            lambda: pa.table({"line": [row[0] for row in connection.execute(read).fetchall()]}),
        )
        sink.close()


@pytest.mark.parametrize("target", ["delta", "iceberg", "table_of_postgres"])
def test_other_rows_under_a_number_that_is_written_are_an_error(request, tmp_path, target):
    sink, read = request.getfixturevalue(target)
    checkpoint, backup = tmp_path / "checkpoint", tmp_path / "backup"
    world = Writing(checkpoint, sink)
    world.process(0, ["a"])
    shutil.copytree(checkpoint, backup)
    world.process(1, ["b"])
    shutil.rmtree(checkpoint)
    shutil.copytree(backup, checkpoint)
    # The same again is found there; and other rows, as a source gives them, would be lost.
    world.process(1, ["b"])
    assert sorted(read()["line"].to_pylist()) == ["A", "B"]
    shutil.rmtree(checkpoint)
    shutil.copytree(backup, checkpoint)
    with pytest.raises(CheckpointForeign, match=r"micro-batch 1 of sink 'upper', and 1 comes only"):
        world.process(1, ["c"])
    assert sorted(read()["line"].to_pylist()) == ["A", "B"]
