"""The example of windows on real Spark, against plain Python."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from ackcore.examples import storm_windows


def test_the_rolling_top_words(spark, monkeypatch, tmp_path, capsys):
    @contextmanager
    def one_session(master):
        yield spark, str(tmp_path)

    monkeypatch.setattr(storm_windows, "spark_session", one_session)
    storm_windows.main()
    out = capsys.readouterr().out
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
