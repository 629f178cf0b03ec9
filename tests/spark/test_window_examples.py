"""The examples of windows on real Spark, against plain Python."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from ackcore.examples import click_sessions, storm_windows


@pytest.fixture
def said(spark, monkeypatch, tmp_path, capsys):
    """``said(example)`` runs an example, and returns what it prints."""

    @contextmanager
    def one_session(master):
        yield spark, str(tmp_path)

    def run(example):
        monkeypatch.setattr(example, "spark_session", one_session)
        example.main()
        return capsys.readouterr().out

    return run


def test_the_rolling_top_words(said, tmp_path):
    out = said(storm_windows)
    assert "300 sentences: 250 acked, 50 dead" in out
    assert "50 executed a second time" in out
    expected = {}
    for n, text in enumerate([*storm_windows.SENTENCES, ""] * 50):
        at = n / 10
        for start in range(int(at // 3) * 3 - 6, int(at // 3) * 3 + 1, 3):
            end = storm_windows.BEGIN + timedelta(seconds=start + 9)
            expected.setdefault(end, Counter()).update(text.split())
    found = storm_windows.top_words(Path(tmp_path, "words"), 1000)
    assert {end: dict(words) for end, words in found.items()} == expected
    assert "9 s until 00:00:09: the 60, and 30, seven 30\n" in out


def test_the_sessions_of_visitors(said):
    out = said(click_sessions)
    assert "8 clicks: 7 acked, 1 dead" in out
    assert [line.strip() for line in out.splitlines() if "-0" in line] == [
        "ann 00:00-01:30: 4 from home to paid",
        "bob 00:05-00:35: 1 from home to home",
        "bob 02:00-02:35: 2 from help to home",
    ]
