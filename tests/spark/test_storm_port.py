"""The port of a Storm topology."""

from __future__ import annotations

from contextlib import contextmanager

from ackcore.examples import storm_port


def test_the_storm_port(spark, monkeypatch, tmp_path, capsys):
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
