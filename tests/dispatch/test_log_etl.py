"""The example: workers and producer die by kill -9, and the counts balance."""

import subprocess
import sys

from ackcore.examples import log_etl


def test_no_line_is_lost_when_a_worker_and_the_producer_are_killed(tmp_path):
    counts = log_etl.run(tmp_path / "etl", lines=1500)
    assert counts.balance, counts
    assert (counts.lines, counts.loaded, counts.dead, counts.missing) == (1500, 1499, 1, 0)
    assert 0 < counts.resumed_at < 1500
    assert len(counts.by_worker) == log_etl.WORKERS


def test_counts_that_do_not_balance_are_said_not_to():
    counts = log_etl.LogCounts(10, 9, 1, 0, 3, 3, 5, {})
    assert counts.balance
    assert not counts._replace(missing=1).balance
    assert not counts._replace(loaded=8).balance
    assert not counts._replace(twice=4).balance


def test_too_few_lines_are_refused():
    asked = [sys.executable, "-m", "ackcore.examples.log_etl", "--lines", "5"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--lines must be at least 100, got 5" in done.stderr
