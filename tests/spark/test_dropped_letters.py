"""Dropped letters leave the disk, whatever dies or is merged meanwhile, and no other one moves."""

from __future__ import annotations

import os
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from checkpoints import OPEN, died, ids, run_one
from letter_homes import active, reader

from ackcore.spark.base import letter_columns
from ackcore.spark.base.errors import CheckpointCorrupt
from ackcore.spark.base.schemas import TRACKING
from ackcore.spark.dead_letters import compaction
from ackcore.spark.dead_letters import drop as dropping
from ackcore.spark.dead_letters.checkpoints import letters_at
from ackcore.spark.dead_letters.drop import drop
from ackcore.spark.dead_letters.letter_files import read_letters
from ackcore.spark.dead_letters.letter_store import Letters
from ackcore.spark.dead_letters.listing import LetterFilter, LetterId, list_letters
from ackcore.spark.dead_letters.reading import dead_letters
from ackcore.spark.dead_letters.replay import replay
from ackcore.spark.dead_letters.store import DeadLetters
from ackcore.topology.tuples import Reason

pytestmark = pytest.mark.usefixtures("no_syncing")


def secret(row):
    """Return a record's contents, which no compression makes small."""
    return "".join(os.urandom(16).hex() for _ in range(64)) + f" {row}"


def write(letters, first, end):
    for n in range(first, end):
        dead = died(4 * n, 4)
        texts = pa.array([secret(row) for row in range(4 * n, 4 * n + 4)])
        letters.write(n, {"lines": dead.set_column(dead.num_columns - 1, "value", texts)})


def named(*numbers):
    """The letters of micro-batches: the first two of each."""
    return LetterFilter(tuple(LetterId("lines", n, at) for n in numbers for at in (0, 1)))


def listed(path):
    found = list_letters(letters_at(str(path)), LetterFilter())
    return {str(each.id): each.message_id for each in found}


def on_disk(path):
    """The message ids of all letters that are in any file, also in those that do not count."""
    return {
        name
        for file in path.glob("**/batch*.parquet")
        for name in pq.read_table(file, partitioning=None)["message_id"].to_pylist()
        if name is not None
    }


def every(batches):
    return {f"lines/{n}/{at}": f"id-{4 * n + at}" for n in range(batches) for at in range(4)}


def left(batches, *dropped):
    gone = {str(each) for each in named(*dropped).ids}
    return {name: row for name, row in every(batches).items() if name not in gone}


@pytest.mark.parametrize("rows", [1, 3, 100])
def test_reasons_are_counted_without_what_was_sent_or_dropped(
    letters, checkpoint, monkeypatch, rows
):
    """Wherever parts of a file begin, in merged files and single ones, some of them rewritten."""
    monkeypatch.setattr(letter_columns, "GROUP_ROWS", rows)
    for n in range(20):
        of_each = [Reason("split", "ValueError", f"{n} {row}") for row in range(4)]
        letters.write(n, {"lines": died(4 * n, 4, of_each)})
    drop(checkpoint, named(3, 17))
    some = [LetterId("lines", n, at) for n, at in [(0, 3), (3, 2), (8, 1), (15, 3), (18, 0)]]
    assert not replay(checkpoint, where=LetterFilter(ids=[])).records
    assert not drop(checkpoint, LetterFilter(ids=[])).records
    assert replay(checkpoint, where=LetterFilter(ids=some)).records == {"lines": 5}
    assert len(active(letters)) == 5
    found = pa.concat_tables(DeadLetters(reader(letters)).reasons())
    counted = sorted((row["error_message"], row["deaths"]) for row in found.to_pylist())
    left = list_letters(reader(letters), LetterFilter(sent=False))
    assert counted == sorted((one.error_message, 1) for one in left)
    assert len(counted) == 80 - 4 - 5


def test_what_was_sent_stays_sent_and_what_is_dropped_is_not_sent(letters, checkpoint):
    write(letters, 0, 17)
    assert replay(checkpoint, where=named(2)).records == {"lines": 2}
    assert replay(checkpoint, where=named(5)).records == {"lines": 2}
    drop(checkpoint, named(5, 6))
    assert replay(checkpoint).records == {"lines": 17 * 4 - 6}
    with OPEN(checkpoint) as state:
        due = state.split_due(state.make_plan(1, 0)).due["lines"]
    # The letters of micro-batch 5 were on their way: they run.
    assert set(ids(due)) == set(left(17, 6).values())


def test_a_merge_empties_what_was_dropped_and_is_whole_in_its_files(
    letters, checkpoint, monkeypatch
):
    write(letters, 0, 16)
    with monkeypatch.context() as patch:
        patch.setattr(dropping, "_empty", lambda store, notes: None)  # it died before
        drop(checkpoint, named(1, 15))
    assert listed(Path(letters.place.url)) == left(16, 1, 15)
    assert on_disk(Path(letters.place.url)) == set(every(16).values())
    write(letters, 16, 17)
    (merged, _) = reader(letters).files("lines")
    assert merged.level == 1
    found = read_letters(merged.path)["message_id"].to_pylist()
    assert [found[4], found[5], found[60], found[61]] == [None] * 4
    # The next drop empties also what the merge left behind.
    drop(checkpoint, named(1))
    assert on_disk(Path(letters.place.url)) == set(left(17, 1, 15).values())
    assert listed(Path(letters.place.url)) == left(17, 1, 15)


def test_what_a_driver_merges_meanwhile_is_looked_at_again(letters, checkpoint, monkeypatch):
    """It had read the notes before, and replaces what the drop was about to write again."""
    write(letters, 0, 16)
    rewrite, merging = Letters.rewrite, [True]

    def rewritten(*given):
        if merging:
            merging.clear()
            with monkeypatch.context() as patch:
                patch.setattr(compaction, "notes_of", lambda store: [])
                write(letters, 16, 17)
        return rewrite(*given)

    monkeypatch.setattr(Letters, "rewrite", rewritten)
    drop(checkpoint, named(0, 7))
    assert active(letters) == ["batches-0-15.1.parquet", "batch-16.parquet"]
    assert on_disk(Path(letters.place.url)) == set(left(17, 0, 7).values())


@pytest.mark.parametrize("how", [drop, lambda path, some: replay(path, where=some)])
def test_a_note_is_not_about_letters_that_are_written_later(letters, checkpoint, how):
    """A restored checkpoint runs the micro-batch of the noted letters again."""
    letters.write(0, {"lines": died(0, 4)})
    letters.write(1, {"lines": died(4, 4)})
    how(checkpoint, named(1))
    before = active(letters), listed(letters.place.url), on_disk(Path(letters.place.url))
    # A driver that died writes the same letters again.
    DeadLetters(reader(letters)).write(1, {"lines": died(4, 4)})
    after = active(letters), listed(letters.place.url), on_disk(Path(letters.place.url))
    assert after == before
    with pytest.raises(CheckpointCorrupt, match="has letters of micro-batch 1 that were") as caught:
        letters.write(1, {"lines": died(50, 4)})
    assert "newer than the checkpoint" in str(caught.value)
    assert "set dead_letters= to a new directory" in str(caught.value)
    assert (active(letters), listed(letters.place.url)) == before[:2]
    letters.write(2, {"lines": died(8, 4)})


@pytest.mark.parametrize("replayed", [False, True])
@pytest.mark.parametrize("batches", [15, 16, 18])
def test_a_dataframe_made_before_a_drop_has_what_is_left(
    letters, checkpoint, spark, conf, replayed, batches
):
    """Also if its files were merged before the drop (15 and 16)."""
    write(letters, 0, batches)
    if replayed:
        replay(checkpoint, where=named(2, batches - 1))
    conf("spark.sql.files.maxPartitionBytes", "1000")  # a file is read by many tasks
    frame = dead_letters(checkpoint, spark)
    if batches < 18:
        write(letters, batches, 18)
    drop(checkpoint, named(3, batches - 1))
    there = left(batches, 3, batches - 1)
    rows = frame.collect()
    assert {row.message_id for row in rows} == set(there.values())
    assert len(rows) == frame.count() == len(there)
    assert sum(row.replayed for row in rows) == (2 if replayed else 0)


def test_columns_that_may_not_be_null_are_emptied_as_well(checkpoint, spark):
    kinds = [
        pa.string(), pa.int64(), pa.bool_(), pa.float64(), pa.binary(), pa.date32(),
        pa.timestamp("us", "UTC"), pa.decimal128(9, 2), pa.list_(pa.string()),
        pa.map_(pa.string(), pa.int32()),
        pa.struct([pa.field("a", pa.string(), nullable=False), pa.field("b", pa.int8())]),
    ]  # fmt: skip
    values = ["secret", 7, True, 7.5, b"secret", 7, 7, Decimal(7), ["secret"], [("secret", 7)]]
    values.append({"a": "secret", "b": 7})
    source = pa.schema([pa.field(f"c{n}", kind, nullable=False) for n, kind in enumerate(kinds)])
    with OPEN(checkpoint) as state:
        run_one(state, 0)
        letters = DeadLetters.checked(checkpoint, state.deployment_key, None, {"lines": source})()
    columns = [pa.array([value] * 3, kind) for value, kind in zip(values, kinds, strict=True)]
    rows = died(0, 3).drop_columns("value")
    dead = pa.table([*rows.columns, *columns], schema=pa.schema([*TRACKING, *source]))
    letters.write(0, {"lines": dead})
    assert drop(checkpoint, named(0)).records == {"lines": 2}
    (file,) = reader(letters).files("lines")
    found = read_letters(file.path)
    assert found["message_id"].to_pylist() == [None, None, "id-2"]
    assert "secret" not in str(found["payload"].to_pylist()[:2])
    (row,) = dead_letters(checkpoint, spark).collect()
    assert (row.message_id, row.payload.c0) == ("id-2", "secret")
    assert replay(checkpoint).records == {"lines": 1}
