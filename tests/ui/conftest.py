"""A checkpoint to look at, whose records and errors are as hostile as they come."""

from __future__ import annotations

import os

import pytest
from checkpoints import with_dead_letters

from ackcore.spark.checkpoint.progress_log import ProgressLog
from ackcore.spark.engine.progress import Percentiles, Progress
from ackcore.ui.server import PageServer

ATTACK = (
    "</td><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
)
TOKEN = "a token ☠ of 24 letters"


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    path = with_dead_letters(tmp_path / "checkpoint", ATTACK, ATTACK)
    log = ProgressLog(path / "ackcore")
    now = 1_790_000_000_000
    for number in range(60):
        run_ms = 400 + 37 * (number * number % 29)
        log.append(
            {
                "at_ms": now + number * 2500,
                **Progress(
                    number,
                    records=1000,
                    acked=990,
                    failed=10,
                    latency_s=Percentiles(run_ms / 1e3, 1.4e-3 * run_ms, 2.2e-3 * run_ms),
                    duration_s=(run_ms + 300) / 1e3,
                    records_per_s=1e6 / (run_ms + 300),
                    runs=1,
                    emitted={"lines": {"default": 1000}, "split": {"default": 3800}},
                    expectations={"lines": {"line <> ''": {"passed": 990, "failed": 10}}},
                    spent={"ask": {"<b>a</b>": 0.25, "b": 0.5}},
                    tokens={"ask": {"b": 100.0}},
                    steps_s={
                        "plan": 0.005,
                        "run": run_ms / 1e3,
                        "check": 0.04,
                        "decide": 0.03,
                        "act": 0.16,
                    },
                ).to_json(),
            }
        )
    return path


@pytest.fixture
def server(checkpoint):
    with PageServer([checkpoint], token=TOKEN) as served:
        yield served
