"""Drivers of windows on real Spark that fail, or are killed at one step after the other."""

from __future__ import annotations

import os
import signal
from collections import Counter, defaultdict
from datetime import UTC, datetime

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from killed_sinks import in_processes
from killed_windows import BATCHES, WINDOWS, drive, take_files

from ackcore.spark.inspect import table_reading

STEPS = ["decided:0", "folded:1", "tables-recorded:1", "changes-recorded:1", "planned:2", "ran:2"]
STEPS += ["in-sink:2", "acted:2", "marked:2", "folded:3", "decided:4"]


@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.faults)])
def test_windows_of_drivers_that_die_close_once_with_the_acked_orders(
    spark, tmp_path, failing_at, killed
):
    (tmp_path / "orders").mkdir()
    for number, orders in enumerate(BATCHES):
        rows = [
            {"shop": shop, "ts": datetime.fromtimestamp(s, UTC), "n": n} for shop, s, n in orders
        ]
        file = tmp_path / "orders" / f"{number}.parquet"
        pq.write_table(pa.Table.from_pylist(rows), file)
        os.utime(file, (number, number))
    if killed:
        driver = in_processes(drive, 240)
        for step in STEPS:
            assert driver(tmp_path, step) == -signal.SIGKILL, step
    else:
        with failing_at("acted:2"):
            take_files(tmp_path, spark)
    assert take_files(tmp_path, spark) in ([[9, "Late", name]] for name in WINDOWS)
    orders = [one for some in BATCHES for one in some if one[2] != 9]
    assert sorted(row["n"] for row in _rows(tmp_path / "rows")) == sorted(n for *_, n in orders)
    tens = [(row["shop"], sorted(row["orders"])) for row in _rows(tmp_path / "tens")]
    enriched = [(row["shop"], sorted(row["orders"])) for row in _rows(tmp_path / "enriched")]
    assert sorted(enriched) == sorted(tens)
    shops = {row["shop"]: row["tens"] for row in _table(tmp_path, "shops")}
    assert shops == Counter(shop for shop, _ in tens)
    direct = {row["shop"]: sorted(row["orders"]) for row in _table(tmp_path, "direct")}
    every = [one for some in BATCHES for one in some]
    assert direct == {shop: sorted(n for one, _, n in every if one == shop) for shop in "ab"}
    for name, expected in (("tens", _tens(orders)), ("visits", _visits(orders))):
        closed = [_key(row) for row in _rows(tmp_path / name)]
        still_open = _table(tmp_path, name)
        found = closed + [_key(row) for row in still_open]
        assert len(closed) >= 3
        assert len(still_open) == 1
        assert sorted(found) == sorted(expected)


def _rows(path):
    files = sorted(path.glob("batch_id=*/*.parquet"))
    return [row for file in files for row in pq.ParquetFile(file).read().to_pylist()]


def _table(path, name):
    rows = table_reading.read_table(
        path / "checkpoint", name, lambda table: table_reading.first_rows(table, 99)
    )
    return rows.to_pylist()


def _key(row):
    bounds = (row[name].replace(tzinfo=UTC).timestamp() for name in ("window_start", "window_end"))
    return (row["shop"], *bounds, sorted(row["orders"]))


def _tens(orders):
    found = defaultdict(list)
    for shop, s, n in orders:
        found[shop, s // 10 * 10].append(n)
    return [(shop, start, start + 10, sorted(some)) for (shop, start), some in found.items()]


def _visits(orders):
    found = []
    for shop, s, n in sorted(orders):
        if found and found[-1][0] == shop and s < found[-1][2]:
            found[-1] = (shop, found[-1][1], s + 4, sorted([*found[-1][3], n]))
        else:
            found.append((shop, s, s + 4, [n]))
    return found
