"""The cost of looking at a checkpoint: a million dead letters, two thousand files of them.

What it costs a query is bench_seen.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from ackcore.spark.base.schemas import (
    ATTEMPT,
    DUE_MS,
    FIRST_MS,
    LAST_MS,
    MESSAGE_ID,
    REASON,
    REPLAYED,
    TRACKING,
)
from ackcore.spark.checkpoint.decisions import ROOT_IDS, BatchDecision
from ackcore.spark.checkpoint.state import State
from ackcore.spark.checkpoint.waiting import Waiting
from ackcore.spark.dead_letters import compaction
from ackcore.spark.dead_letters.reading import dead_letters
from ackcore.spark.dead_letters.store import DeadLetters
from ackcore.topology.tuples import Reason
from bench.processes import cpu_s

TOPOLOGY = SimpleNamespace(
    structure={"spouts": {"lines": {"fields": ["line"]}}, "bolts": {}, "sinks": {}},
    spouts={"lines": SimpleNamespace(tracked=True)},
    fingerprint="0" * 32,
    tables={},
)


@pytest.mark.parametrize("words", ["status", "dead list --limit 50"])
def bench_a_million_dead(words, quick, report_ratio, tmp_path):
    """Commands on a million dead letters, from the start of a process to its end."""
    letters = 50_000 if quick else 1_000_000
    path = tmp_path / "c"
    write_dead_letters(path, letters)
    command = [sys.executable, "-m", "ackcore.cli.entry", *words.split(), str(path), "--json"]
    seconds, cpu = [], []
    for _ in range(1 if quick else 9):
        began, used = time.perf_counter(), cpu_s()
        said = subprocess.run(command, capture_output=True, check=True).stdout
        seconds.append(time.perf_counter() - began)
        cpu.append(cpu_s() - used)
        assert said.count(b"\n") == (1 if words == "status" else 50)
    title = f"ackcore {words}, {letters:,} dead letters"
    report_ratio(f"{title}: wall", seconds, 2.0, at_most=True, unit="s")
    report_ratio(f"{title}: CPU", cpu, unit="s")


@pytest.mark.parametrize("merged", [True, False], ids=["merged", "never merged"])
def bench_many_micro_batches_with_deaths(merged, quick, report_ratio, tmp_path, monkeypatch):
    """From the call of `dead_letters` to their number, in a session that has counted them before.

    Files were never merged by an ackcore that did not yet do so.
    """
    batches = 100 if quick else 2000
    path = tmp_path / "c"
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    if not merged:
        monkeypatch.setattr(compaction, "_FEWEST", batches + 1)
    write_dead_letters(path, 5 * batches, batches)
    conf = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false"}
    spark = SparkSession.builder.master("local[2]").config(map=conf).getOrCreate()
    seconds = []
    try:
        for _ in range(2 if quick else 6):
            began = time.perf_counter()
            assert dead_letters(path, spark).count() == 5 * batches
            seconds.append(time.perf_counter() - began)
    finally:
        spark.stop()
    files = "merged as they are written" if merged else "never merged"
    name = f"dead_letters().count(), {batches:,} micro-batches with deaths, {files}"
    bound = 2.0 if merged else None
    report_ratio(name, seconds[1:], bound, at_most=True, unit="s")


def write_dead_letters(path: Path, letters: int, batches: int = 20) -> None:
    """Make a checkpoint with dead letters of 1 kB, and a reason of its own each."""
    rng = np.random.default_rng(7)
    text = np.array([f"{word:09} " for word in range(1000)], "U10")
    source = pa.schema([("line", pa.string())])
    topology = TOPOLOGY
    with State.open(path, topology, sources={"lines": source}, kind="batch") as state:
        store = DeadLetters.checked(path, state.deployment_key, None, {"lines": source})()
        for number in range(batches):
            n = letters // batches
            reasons = [
                Reason("split", "ValueError", f"no such line: {row}")._asdict() for row in range(n)
            ]
            texts = text[rng.integers(0, len(text), (n, 100))].view("U1000")[:, 0]
            columns = {
                MESSAGE_ID: [f"{number}-{row}" for row in range(n)],
                ATTEMPT: [5] * n,
                DUE_MS: [0] * n,
                FIRST_MS: [7] * n,
                LAST_MS: [9] * n,
                REASON: reasons,
                REPLAYED: [0] * n,
                "line": texts,
            }
            dead = pa.table(columns, schema=pa.schema([*TRACKING, *source]))
            store.write(number, {"lines": dead})
            state.write_plan(state.make_plan(number, number))
            state.write_decision(
                BatchDecision(number, Waiting({}), {"lines": dead}, ROOT_IDS.empty_table())
            )
            state.write_done(number)
