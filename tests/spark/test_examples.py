"""The other examples, small: a port of a Storm topology, and a foreign ack log."""

from __future__ import annotations

import datetime
import random
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from ackcore.examples import settle_table, storm_port


def test_the_storm_port(spark, tmp_path):
    sentences = [*storm_port.SENTENCES, "moon"] * 3
    counts, words = storm_port.run(spark, tmp_path, sentences, ["moon", "seven"])
    assert (counts.records, counts.acked, counts.dead) == (18, 18, 0)
    assert counts.retried == 12  # a fourth of these sentences has none of both words
    assert words == Counter(f"{word}!" for sentence in sentences for word in sentence.split())


def test_the_storm_port_from_a_shell(spark, monkeypatch, tmp_path, capsys):
    @contextmanager
    def session(master):
        yield spark, str(tmp_path)

    monkeypatch.setattr(storm_port, "spark_session", session)
    monkeypatch.setattr(storm_port, "SENTENCES", storm_port.SENTENCES[:3])
    storm_port.main()
    said = capsys.readouterr().out
    assert "exclaim" in said
    assert "600 sentences: 600 acked, 0 dead" in said
    assert "400 executed a second time" in said
    assert "the!         600" in said


START = datetime.datetime(2024, 5, 1, 10, tzinfo=datetime.UTC)


class Log:
    """A log as another system would write it, and what is to come out of it."""

    def __init__(self, seed):
        self.draw = random.Random(seed)
        self.rows, self.expected = [], {}

    def event(self, second, what, root, val=None, task=None, why=None):
        at = START + datetime.timedelta(seconds=second)
        self.rows.append((at, what, f"{root:x}", None if val is None else f"{val:x}", task, why))

    def tree(self, second, kind):
        """A tree of a few edges; kind says what happens to it."""
        root = self.draw.getrandbits(64)
        edges = [self.draw.getrandbits(64) for _ in range(self.draw.randrange(1, 4))]
        chain = [a ^ b for a, b in zip([0, *edges], [*edges, 0], strict=True)]
        events = [("init", chain[0], self.draw.randrange(8), None)]
        events += [("ack", val, None, None) for val in chain[1:]]
        if kind == "FAILED":
            events[-1] = ("fail", None, None, "Connection refused, twice")
        if kind in ("OPEN", "EXPIRED"):
            events.pop()
        self.draw.shuffle(events)
        for what, val, task, why in events:
            self.event(second + self.draw.random(), what, root, val, task, why)
        self.expected[f"{root:X}".lower()] = kind
        return root

    def write(self, path):
        names = ["at", "what", "root", "val", "task", "why"]
        columns = [list(column) for column in zip(*self.rows, strict=True)]
        types = [pa.timestamp("us", "UTC"), *[pa.string()] * 3, pa.int32(), pa.string()]
        arrays = [pa.array(column, kind) for column, kind in zip(columns, types, strict=True)]
        if path.suffix == ".parquet":
            pq.write_table(pa.table(arrays, names=names), path)
            return str(path)
        lines = [",".join(names)]
        for at, *others in self.rows:
            quoted = ("" if each is None else f'"{each}"' for each in others)
            lines.append(",".join([at.isoformat(), *quoted]))
        path.write_text("\n".join(lines) + "\n")
        return str(path)


@pytest.mark.parametrize("name", ["log.csv", "log.parquet"])
def test_a_foreign_log(spark, tmp_path, name):
    log = Log(5)
    for _ in range(20):
        log.tree(0, "ACKED")
        log.tree(1, "FAILED")
        log.tree(2, "EXPIRED")
        log.tree(3600, "OPEN")
    rows = settle_table.settle_log(
        settle_table.read_log(spark, log.write(tmp_path / name)), timeout_s=60
    ).collect()
    assert {row.root.rjust(1, "0"): row.status for row in rows} == log.expected
    reasons = {row.status: row.reason for row in rows}
    assert reasons["FAILED"] == "Connection refused, twice"
    assert reasons["ACKED"] is None


@pytest.fixture
def typed(monkeypatch, spark, tmp_path):
    @contextmanager
    def session(master):
        yield spark, str(tmp_path)

    def typed(*arguments):
        monkeypatch.setattr(settle_table, "spark_session", session)
        return CliRunner().invoke(settle_table.app, [str(argument) for argument in arguments])

    return typed


def test_from_one_day_to_the_next(typed, tmp_path):
    monday, tuesday = Log(1), Log(2)
    for _ in range(3):
        monday.tree(0, "ACKED")
    late, never = 0xFEDC << 48, 7
    monday.event(5, "init", late, 0xABC, 3)
    monday.event(6, "init", never, 1, 0)
    tuesday.event(86_400, "ack", late, 0xABC)
    tuesday.event(86_401, "fail", 99, None, None, "too late")
    first = typed(monday.write(tmp_path / "monday.csv"), "--state", tmp_path / "monday")
    assert first.exit_code == 0, first.output
    assert first.output.split()[3:] == ["ACKED", "3", "OPEN", "2"]
    options = ["--before", tmp_path / "monday", "--timeout", 3600]
    second = typed(tuesday.write(tmp_path / "tuesday.parquet"), *options)
    assert second.exit_code == 0, second.output
    said = second.output.split()
    assert said[3:7] == ["ACKED", "1", "EXPIRED", "1"]
    assert said[7:] == ["OPEN", "too", "late", "1"]


def test_a_log_of_another_shape_is_refused(typed, tmp_path):
    log = Log(1)
    log.event(0, "reset", 1)
    result = typed(log.write(tmp_path / "log.csv"))
    assert result.exit_code == 1
    assert "the log was not settled: " in result.output
    assert "unknown kind of event: reset" in result.output


ROOT = Path(settle_table.__file__).parents[2]


@pytest.mark.spark
def test_errors_of_spark_are_told_though_its_jvm_is_gone(tmp_path):
    command = [sys.executable, "-m", "ackcore.examples.settle_table", str(tmp_path / "nowhere")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert ran.returncode == 1
    (line,) = ran.stdout.splitlines()
    assert line.startswith("the log was not settled: Path does not exist: ")
    assert "Traceback" not in ran.stderr
