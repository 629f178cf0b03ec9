"""The scripts of docs/recipes.md, unchanged, against a server that throttles and charges."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
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
def killed(code, service, folder, budget):
    """Run a recipe in a process, and kill it and its children in the end."""
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
            yield
        finally:
            assert process.poll() is None, (folder / "log").read_text()[-3000:]
            os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture
def run_here(spark, service, monkeypatch):
    """``run_here(code, folder, budget=1000)`` runs a recipe on the session of all tests."""

    def run_here(code, folder, budget=1000):
        for name, value in (("URL", service.url), ("FOLDER", folder), ("BUDGET", budget)):
            monkeypatch.setenv(name, str(value))
        exec(code, {"__name__": "__main__"})

    return run_here


@contextmanager
def stopped(when):
    """Press Ctrl-C in the enclosed code when this function has returned."""

    def press():
        try:
            when()
        finally:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        yield
    thread.join()


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


def test_a_budget_is_kept_although_the_job_is_killed_and_more_of_it_calls_the_rest(
    spark, tmp_path, service, run_here
):
    """An answer costs 0.25. The budget allows 40 answers, then 10 more, then all.

    The job is killed amid its calls, and is stopped when the second budget is spent.
    """
    rows(tmp_path)
    in_flight = 2 * 16

    def spent():
        status = read_status(tmp_path / "checkpoint")
        return 0 if status is None else status.counts.spent.get("classify", 0)

    def paid(budget):
        service.until(lambda charged, found: not found["callers"])
        paid = 0.25 * sum(service.ask()[0].values())
        # The first driver's calls in flight, and those of two tasks when the money ran out.
        assert spent() <= paid <= budget + 0.25 * 2 * in_flight
        return paid

    with killed(CLASSIFY, service, tmp_path, budget=10):
        service.until(lambda charged, _: len(charged) >= 20)
    paid(10)
    with stopped(lambda: service.until(lambda charged, _: charged and spent() >= 12.5)):
        run_here(CLASSIFY, tmp_path, budget=12.5)
    assert spent() >= paid(12.5) - 0.25 * in_flight
    before = len(service.ask()[0])
    assert before < ROWS - len(DEAD)
    run_here(CLASSIFY, tmp_path)
    check(spark, tmp_path)
    charged = service.ask()[0]
    assert sum(charged.values()) - len(charged) <= in_flight


def test_orders_are_enriched_by_an_api_whose_tenants_have_different_limits(
    spark, tmp_path, service, run_here
):
    rows(tmp_path)
    run_here(ENRICH, tmp_path)
    check(spark, tmp_path)
    charged, found = service.ask()
    assert set(charged.values()) == {1}
    assert found["refused"] <= ROWS / 2
