"""The example: workers and producer die by kill -9, and the books balance."""

import subprocess
import sys

from ackcore.examples import log_etl


def test_no_line_is_lost_when_a_worker_and_the_producer_are_killed(tmp_path):
    books = log_etl.run(tmp_path / "etl", lines=1500)
    assert books.balance, books
    assert (books.lines, books.loaded, books.dead, books.missing) == (1500, 1499, 1, 0)
    assert 0 < books.resumed_at < 1500
    assert len(books.by_worker) == log_etl.WORKERS


def test_books_that_do_not_balance_are_said_not_to():
    books = log_etl.Books(10, 9, 1, 0, 3, 3, 5, {})
    assert books.balance
    assert not books._replace(missing=1).balance
    assert not books._replace(loaded=8).balance
    assert not books._replace(twice=4).balance


def test_too_few_lines_are_refused():
    asked = [sys.executable, "-m", "ackcore.examples.log_etl", "--lines", "5"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--lines must be at least 100, got 5" in done.stderr
