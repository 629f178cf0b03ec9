"""A checkpoint that ackcore of commit fb85146 left in the middle of retries goes on."""

from __future__ import annotations

from pathlib import Path

import old_checkpoint
import pytest

from ackcore.spark.dead_letters.reading import dead_letters
from ackcore.spark.query import run_batch, start

DATA = Path(__file__).parent.parent / "data"


@pytest.mark.parametrize(
    ("killed", "kind"), [("decided", "batch"), ("planned", "batch"), ("marked", "stream")]
)
def test_a_checkpoint_of_fb85146_goes_on(spark, tmp_path, killed, kind):
    old_checkpoint.unpack(DATA / f"checkpoint-fb85146-{killed}.tar.gz", tmp_path)
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
