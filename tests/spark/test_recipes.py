"""The scripts of docs/recipes.md, unchanged, against a server that throttles and charges."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ackcore.spark import dead_letters
from ackcore.spark.inspect.status import read_status

ROOT = Path(__file__).parents[2]
ROWS = 160
DEAD = {n for n in range(ROWS) if n % 50 == 49}
CLASSIFY, ENRICH = re.findall(
    r"^```python\n(.*?)^```", (ROOT / "docs" / "recipes.md").read_text("utf-8"), re.M | re.S
)


class Service:
    """The address of a paid server, and its charges."""

    def __init__(self, port):
        self.url = f"http://127.0.0.1:{port}/"

    def ask(self):
        with urllib.request.urlopen(self.url, data=b'{"ask": 1}') as answer:
            found = json.loads(answer.read())
        return {int(n): times for n, times in found["charged"].items()}, found

    def until(self, condition):
        end = time.monotonic() + 120
        while not condition(*self.ask()):
            assert time.monotonic() < end, self.ask()
            time.sleep(0.02)


@pytest.fixture
def service():
    command = [sys.executable, str(Path(__file__).with_name("paid_server.py"))]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield Service(int(process.stdout.readline()))
        process.stdin.close()


@contextmanager
def script(code, service, folder, budget=1000):
    """Run a recipe in a process, and kill it and its children if it still runs at the end."""
    path = folder / "recipe.py"
    path.write_text(code)
    env = os.environ | {
        "URL": service.url,
        "FOLDER": str(folder),
        "BUDGET": str(budget),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ["PYTHONPATH"]]),
        "PYSPARK_SUBMIT_ARGS": "--master local[2] --conf spark.ui.enabled=false "
        "--conf spark.sql.shuffle.partitions=2 pyspark-shell",
    }
    with (
        open(folder / "log", "a") as log,
        subprocess.Popen(
            [sys.executable, str(path)],
            env=env,
            cwd=folder,
            stdout=log,
            stderr=log,
            start_new_session=True,
        ) as process,
    ):
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def rows(folder):
    tenants = ["small", "middle", "large", "large", "large", "large", "large", "large"]
    table = pa.table(
        {
            "id": range(ROWS),
            "text": [f"text {n}" for n in range(ROWS)],
            "tenant": [tenants[n % 8] for n in range(ROWS)],
        }
    )
    (folder / "rows").mkdir()
    for part in range(2):
        pq.write_table(table.slice(part * 80, 80), folder / "rows" / f"{part}.parquet")


def check(spark, folder):
    """Assert that each row has one label, or is a dead letter."""
    labels = spark.read.parquet(f"{folder}/labels").select("id", "label").collect()
    assert sorted(map(tuple, labels)) == [(n, f"label {n}") for n in range(ROWS) if n not in DEAD]
    dead = dead_letters(folder / "checkpoint", spark).collect()
    assert {int(letter.message_id) for letter in dead} == DEAD


def finished(code, service, folder):
    with script(code, service, folder) as process:
        assert process.wait(300) == 0, (folder / "log").read_text()[-3000:]


def test_a_budget_is_kept_although_the_job_is_killed_and_more_of_it_calls_the_rest(
    spark, tmp_path, service
):
    """An answer costs 0.25. The budget allows 40 answers, then 10 more, then all.

    The job is killed amid its calls, and again when the second budget is spent.
    """
    rows(tmp_path)
    in_flight = 2 * 16

    def spent():
        status = read_status(tmp_path / "checkpoint")
        return 0 if status is None else status.counts.spent.get("classify", 0)

    for budget, amid_calls in ((10, True), (12.5, False)):
        with script(CLASSIFY, service, tmp_path, budget):
            if amid_calls:
                service.until(lambda charged, _: len(charged) >= 20)
            else:
                service.until(lambda charged, _, budget=budget: charged and spent() >= budget)
        service.until(lambda charged, found: not found["callers"])
        paid = 0.25 * sum(service.ask()[0].values())
        # The first driver's calls in flight, and those of two tasks when the money ran out.
        assert paid <= budget + 0.25 * 2 * in_flight
        assert spent() <= paid
        if not amid_calls:  # a killed micro-batch has no report yet
            assert spent() >= paid - 0.25 * in_flight
    before = len(service.ask()[0])
    assert before < ROWS - len(DEAD)
    finished(CLASSIFY, service, tmp_path)
    check(spark, tmp_path)
    charged = service.ask()[0]
    assert sum(charged.values()) - len(charged) <= in_flight


def test_orders_are_enriched_by_an_api_whose_tenants_have_different_limits(
    spark, tmp_path, service
):
    rows(tmp_path)
    finished(ENRICH, service, tmp_path)
    check(spark, tmp_path)
    charged, found = service.ask()
    assert set(charged.values()) == {1}
    assert found["refused"] <= ROWS / 2
