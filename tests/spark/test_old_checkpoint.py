"""Checkpoints that earlier commits of ackcore left in the middle of retries are read and go on."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import old_checkpoint
import pytest

from ackcore.spark import replay
from ackcore.spark.base.checksummed import FORMAT
from ackcore.spark.dead_letters.reading import dead_letters
from ackcore.spark.inspect.status import read_status
from ackcore.spark.query import run_batch, start

DATA = Path(__file__).parent.parent / "data"
#: The last commit before each change of the format, and one with today's.
COMMITS = {"fb85146": 1, "f216154": 4}


def test_there_is_a_checkpoint_of_todays_format():
    for commit, known in COMMITS.items():
        archives = sorted(DATA.glob(f"checkpoint-{commit}-*.tar.gz"))
        assert len(archives) == 3
        for archive in archives:
            with tarfile.open(archive) as packed:
                meta = packed.extractfile("./cp/ackcore/meta.json").read()
            assert json.loads(meta.splitlines()[0])["format"] == known
    assert FORMAT in COMMITS.values()


@pytest.mark.parametrize("commit", COMMITS)
@pytest.mark.parametrize(
    ("killed", "kind", "records"),
    [("decided", "batch", 40), ("planned", "batch", 40), ("marked", "stream", 30)],
)
def test_an_old_checkpoint_is_looked_at_and_goes_on(spark, tmp_path, commit, killed, kind, records):
    old_checkpoint.unpack(DATA / f"checkpoint-{commit}-{killed}.tar.gz", tmp_path)
    status = read_status(tmp_path / "cp")
    assert (status.kind, status.holder) == (kind, None)
    account = status.books.spouts["lines"]
    assert account.records == records
    assert account.waiting > 0
    assert status.books.balanced
    # Settings are no part of a checkpoint: what waits need not wait for longer.
    topology = old_checkpoint.topology_of(spark, tmp_path, kind, backoff_ms=1)
    if kind == "batch":
        books = run_batch(topology, spark, tmp_path / "cp")
    else:
        query = start(topology, spark, tmp_path / "cp", trigger={"availableNow": True})
        assert query.await_termination(300)
        books = query.books
    rows = spark.read.parquet(f"{tmp_path}/sink").select("id", "word").collect()
    assert sorted(map(tuple, rows)) == old_checkpoint.ROWS
    letters = dead_letters(tmp_path / "cp", spark).collect()
    assert sorted(letter.payload.id for letter in letters) == old_checkpoint.DEAD
    assert {(letter.payload.id % 10, letter.attempts) for letter in letters} == {(4, 1), (5, 4)}
    account = books.spouts["lines"]
    assert (account.records, account.replayed, account.waiting) == (old_checkpoint.RECORDS, 0, 0)
    assert account.dead == len(old_checkpoint.DEAD)
    assert account.acked == old_checkpoint.RECORDS - account.dead
    # 4 of each kind were retried as often as they failed before, and 5 until it died.
    assert account.retried == 4 * (1 + 2 + 3 + 3)
    if kind == "batch":
        # What is sent again dies again.
        assert replay(tmp_path / "cp", spark).records == {"lines": len(old_checkpoint.DEAD)}
        books = run_batch(topology, spark, tmp_path / "cp", max_dead=None)
        assert books.replayed == len(old_checkpoint.DEAD)
        assert (books.dead, books.waiting) == (2 * len(old_checkpoint.DEAD), 0)
