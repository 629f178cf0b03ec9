"""Drivers that are killed, by SIGKILL, at each step of a micro-batch for a real table."""

from __future__ import annotations

import json
import signal
from contextlib import ExitStack

import pytest
from jdbc_postgres import forwarded, jars_of_postgres
from killed_sinks import BATCHES, DEAD, KEPT, STEPS, in_processes
from killed_tables import drive

#: Only a sink that refuses rows meets these.
OF_REFUSALS = {"refused", "refusals-closed"}


@pytest.fixture
def table(request, tmp_path):
    """A table for `drive`: its kind, its place, and Spark's needs for it."""
    kind, _, on = request.param.partition("-")
    if kind in ("delta", "iceberg"):
        pytest.importorskip({"delta": "deltalake", "iceberg": "pyiceberg"}[kind])
        pytest.importorskip("sqlalchemy")  # of Iceberg's catalog
        yield kind, (), None
        return
    if on == "derby":
        yield kind, (f"jdbc:derby:{tmp_path}/db;create=true", {}), {}
        return
    psycopg = pytest.importorskip("psycopg")
    dsn = request.getfixturevalue("postgres")
    if kind == "postgres":
        yield kind, (dsn,), None
        return
    about = psycopg.conninfo.conninfo_to_dict(dsn)
    properties = {"user": about["user"], "driver": "org.postgresql.Driver"}
    with ExitStack() as stack:
        path = f"{about['host']}/.s.PGSQL.{about.get('port', 5432)}"
        port = stack.enter_context(forwarded(path))
        url = f"jdbc:postgresql://127.0.0.1:{port}/{about['dbname']}"
        yield kind, (url, properties), {"spark.jars": jars_of_postgres()}


@pytest.fixture(scope="module")
def driver():
    """``driver(path, kind, of, conf, points)`` runs one, and returns what it ended with."""
    return in_processes(drive, 240)


FAULTS = pytest.mark.faults


@pytest.mark.parametrize(
    ("table", "steps"),
    [
        ("delta", ["in-transaction"]),
        ("postgres", ["refused", "in-transaction", "in-sink"]),
        pytest.param("delta", STEPS, marks=FAULTS),
        pytest.param("iceberg", STEPS, marks=FAULTS),
        pytest.param("postgres", STEPS, marks=FAULTS),
        pytest.param("jdbc-derby", STEPS, marks=FAULTS),
        pytest.param("jdbc-postgres", STEPS, marks=FAULTS),
    ],
    ids=lambda of: of if isinstance(of, str) else "each" if of is STEPS else "quick",
    indirect=["table"],
)
def test_killed_at_every_step_a_table_holds_each_row_once(tmp_path, driver, table, steps):
    """One driver after the other dies a step further on, in both micro-batches."""
    if table[0] in ("delta", "iceberg"):
        steps = [step for step in steps if step not in OF_REFUSALS]
    for number in range(len(BATCHES)):
        for step in steps:
            assert driver(tmp_path, *table, f"{step}:{number}") == -signal.SIGKILL, (step, number)
            lines = said(tmp_path)["lines"]  # as the driver before left it
            assert lines == sorted(set(lines) & set(KEPT))
    assert driver(tmp_path, *table, "") == 0
    told = said(tmp_path)
    assert told == {"lines": KEPT, "counts": [8, 5, 3, 0], "balanced": True}
    letters = [json.loads(file.read_text()) for file in sorted(tmp_path.glob("dead-*.json"))]
    assert sorted(line for lines in letters for line in lines) == DEAD


def said(path):
    """The state that the last driver found, or left if it came to the end."""
    return json.loads((path / "said.json").read_text())
