"""The files of dead letters: many become few, and none is lost, doubled or out of sight."""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from checkpoints import OPEN, VALUE, died, ids, run_one, with_dead_letters
from letter_homes import active, path_of, reader, write

from ackcore.spark.base import letter_columns
from ackcore.spark.base.errors import CheckpointCorrupt, CheckpointForeign, StateError
from ackcore.spark.base.schemas import REPLAYED, TRACKING
from ackcore.spark.dead_letters import compaction
from ackcore.spark.dead_letters import replay as replays
from ackcore.spark.dead_letters.checkpoints import letters_at
from ackcore.spark.dead_letters.drop import drop
from ackcore.spark.dead_letters.letter_files import (
    BatchRows,
    batch_rows,
    read_letters,
    read_schema,
    reading_letters,
)
from ackcore.spark.dead_letters.letter_store import kinds_of
from ackcore.spark.dead_letters.listing import LetterFilter, LetterId, list_letters
from ackcore.spark.dead_letters.notes import add_places, notes_of, sent_rows
from ackcore.spark.dead_letters.replay import replay
from ackcore.spark.dead_letters.store import DeadLetters, _new_file

pytestmark = pytest.mark.usefixtures("no_syncing")


def numbers(store, spout="lines"):
    """The letters as (micro-batch, message id), read as a reader does that has only the files."""
    found = []
    for file in letters_at(str(store)).files(spout):
        table = read_letters(file.path)
        pairs = zip(table["batch_id"].to_pylist(), table["message_id"].to_pylist(), strict=True)
        found += pairs
    return found


def wrote(batches):
    """Return the expected letters when each of ``count`` micro-batches left two."""
    return [(n, f"id-{row}") for n in range(batches) for row in (2 * n, 2 * n + 1)]


def names(letters):
    return sorted(os.listdir(Path(letters.place.url) / "lines"))


def test_letters_of_other_columns_stay_in_files_of_their_own(letters):
    write(letters, 0, 8)
    for n in range(8, 40):
        table = died(2 * n, 2).append_column("extra", pa.array([1, 2]))
        letters.write(n, {"lines": table})
    assert numbers(Path(letters.place.url)) == wrote(40)
    assert active(letters)[:8] == [f"batch-{n}.parquet" for n in range(8)]
    assert active(letters)[8] == "batches-8-23.1.parquet"
    kinds = kinds_of(letters.place, None)
    assert [len(kind.files) for kind in kinds] == [8, 17]
    payloads = [read_schema(kind.files[0].path).field("payload").type for kind in kinds]
    assert [payload.num_fields for payload in payloads] == [1, 2]


def test_how_often_letters_came_back_outlasts_merges_and_a_letter_that_is_read_in_parts(
    letters, checkpoint, monkeypatch
):
    place = TRACKING.get_field_index(REPLAYED)
    monkeypatch.setattr(letter_columns, "GROUP_ROWS", 3)
    for n in range(40):
        table = died(2 * n, 2).set_column(
            place, TRACKING.field(place), pa.array([n, 7], pa.int32())
        )
        letters.write(n, {"lines": table})
    assert active(letters)[:2] == ["batches-0-15.1.parquet", "batches-16-31.1.parquet"]
    told = {n: [n, 7] for n in range(40)}
    found = {each.id: each.replays for each in list_letters(letters.place, LetterFilter())}
    assert found == {LetterId("lines", n, at): told[n][at] for n in told for at in (0, 1)}
    sent = replay(checkpoint, max_replays=30, request="r")
    assert (sent.records, sent.left_out) == ({"lines": 70}, {"lines": 10})
    assert replay(checkpoint, request="r") == sent
    with OPEN(checkpoint) as state:
        due = state.split_due(state.make_plan(state.last_done + 1, 0)).due["lines"]
    assert dict(zip(ids(due), due[REPLAYED].to_pylist(), strict=True)) == {
        f"id-{2 * n + at}": told[n][at] + 1 for n in told for at in (0, 1) if told[n][at] < 30
    }


def test_letters_of_all_spouts_are_listed_by_their_micro_batches(letters):
    for n in range(18):
        letters.write(n, {"clicks": died(2 * n, 2)} if n == 7 else {"lines": died(2 * n, 2)})
    assert active(letters)[0] == "batches-0-16.1.parquet"  # around that of clicks
    found = list(list_letters(letters.place, LetterFilter()))
    assert [each.id.batch_id for each in found] == [n for n in range(17, -1, -1) for _ in (0, 1)]
    assert [each.id.position for each in found] == [1, 0] * 18
    assert list(list_letters(letters.place, LetterFilter(), 21)) == found[:21]


def test_listed_letters_have_intervals_in_maps(letters):
    """Before 26, pyarrow reads them as integers."""
    kind = pa.map_(pa.string(), pa.duration("us"))
    table = died(0, 1).append_column("spans", pa.array([[("a", timedelta(hours=1))]], kind))
    letters.write(0, {"lines": table})
    (found,) = list_letters(letters.place, LetterFilter(), payload=True)
    assert json.loads(found.payload)["spans"] == [["a", "1:00:00"]]


def test_letters_are_noted_as_spans_of_positions():
    rows = BatchRows(np.repeat([3, 5, 9], 4), {3: -2, 5: 4, 9: 8})
    found = {}
    add_places(found, np.array([], np.int64), rows)
    assert found == {}
    add_places(found, np.array([0, 1, 3, 4, 6, 7, 8]), rows)
    assert found == {"3": [[2, 4], [5, 6]], "5": [[0, 1], [2, 4]], "9": [[0, 1]]}
    add_places(found, np.array([1]), BatchRows(np.array([9, 9]), {9: -1}))  # of the next file
    assert found["9"] == [[0, 1], [2, 3]]
    n = 1 << 17  # micro-batches with one letter each, merged into one file
    numbers = np.arange(n)
    start = time.process_time()
    found = {}
    add_places(found, numbers, BatchRows(numbers, dict(zip(range(n), range(n), strict=True))))
    assert found == {str(number): [[0, 1]] for number in range(n)}
    assert (
        time.process_time() - start < 5
    )  # a pass over all rows for each of them takes half a minute


def test_large_files_are_left_alone(letters, monkeypatch):
    monkeypatch.setattr(compaction, "_BYTES", 100)
    write(letters, 0, 20)
    assert len(active(letters)) == 20
    monkeypatch.setattr(compaction, "_BYTES", 1 << 28)
    monkeypatch.setattr(letter_columns, "GROUP_ROWS", 8)  # and files go by row groups
    write(letters, 20, 21)
    assert numbers(Path(letters.place.url)) == wrote(21)
    assert pq.ParquetFile(path_of(letters, active(letters)[0])).num_row_groups == 5


def test_long_letters_are_written_merged_and_sent_a_few_at_a_time(letters, checkpoint, monkeypatch):
    """However many there are."""
    parts = []

    def as_records(part, times):
        records = convert(part, times)
        parts.append((part.nbytes, ids(records)))
        return records

    convert = replays._records
    monkeypatch.setattr(replays, "_records", as_records)
    for number in range(2):
        values = pa.array([f"{row}" * 2_500_000 for row in range(8)])
        table = died(8 * number, 8).drop_columns("value").append_column("value", values)
        letters.write(number, {"lines": table})
    assert pq.ParquetFile(path_of(letters, "batch-0.parquet")).num_row_groups == 3
    monkeypatch.setattr(compaction, "_FEWEST", 2)
    write(letters, 50, 51)
    assert active(letters) == ["batches-0-1.1.parquet", "batch-50.parquet"]
    assert pq.ParquetFile(path_of(letters, "batches-0-1.1.parquet")).num_row_groups == 6
    assert replay(checkpoint).records == {"lines": 18}
    assert [name for _, names in parts for name in names] == [
        *(f"id-{row}" for row in range(16)),
        "id-100",
        "id-101",
    ]
    assert max(size for size, _ in parts) < 1 << 23


def test_a_large_file_does_not_keep_later_ones_apart(letters, monkeypatch):
    """All died of an outage once, and since then there are a few deaths now and then."""
    write(letters, 0, 1)
    letters.write(1, {"lines": died(2, 20_000)})
    large = path_of(letters, "batch-1.parquet").stat().st_size
    monkeypatch.setattr(compaction, "_BYTES", large - 1)
    for n in range(2, 40):
        letters.write(n, {"lines": died(20_000 + n, 1)})
    assert active(letters)[:4] == [
        "batch-0.parquet",
        "batch-1.parquet",
        "batches-2-17.1.parquet",
        "batches-18-33.1.parquet",
    ]
    assert len(numbers(Path(letters.place.url))) == 2 + 20_000 + 38


def test_a_damaged_file_is_told_once_and_does_not_stop_the_dead(letters, checkpoint, caplog):
    write(letters, 0, 15)
    path = path_of(letters, "batch-3.parquet")
    path.write_bytes(path.read_bytes()[:-9])
    with caplog.at_level(logging.WARNING, "ackcore"):
        write(DeadLetters(reader(letters)), 15, 20)
    (told,) = [record.getMessage() for record in caplog.records]
    assert "were not merged" in told
    assert f"{path} is damaged" in told
    assert len(active(letters)) == 20
    # It costs no checkpoint.
    with pytest.raises(CheckpointCorrupt, match=r"batch-3\..*parquet is damaged") as caught:
        list(DeadLetters(reader(letters)).reasons())
    assert "Put the file back" in str(caught.value)
    assert "Restore" not in str(caught.value)
    wanted = str(caught.value).partition("with the name ")[2].partition(" ")[0]
    path.with_name(wanted).touch()
    with OPEN(checkpoint) as state:
        letters = DeadLetters.checked(checkpoint, state.deployment_key, None, {"lines": VALUE})()
    assert sum(pc.sum(some["deaths"]).as_py() for some in letters.reasons()) == 38
    assert len(numbers(Path(letters.place.url))) == 38
    assert not path.with_name(wanted).exists()


@pytest.mark.parametrize("error", [pa.ArrowMemoryError, pa.ArrowCancelled])
def test_a_file_for_which_there_is_no_memory_is_not_damaged(letters, error):
    write(letters, 0, 1)
    (file,) = reader(letters).files("lines")
    with pytest.raises(error), reading_letters(file.path):
        raise error("no more")


@pytest.mark.parametrize("ahead", ["not merged", "merged", "of another spout", "dropped"])
def test_letters_that_are_newer_than_the_checkpoint_are_refused_at_the_first_write(
    checkpoint, tmp_path, ahead
):
    there, new = tmp_path / "there", tmp_path / "new"
    with OPEN(checkpoint) as state:
        run_one(state, 0)
        letters = DeadLetters.checked(checkpoint, state.deployment_key, there)()
    last = 25 if ahead == "not merged" else 26
    write(letters, 10, last + 1)
    if ahead == "dropped":
        chosen = [LetterId("lines", n, at) for n in range(10, 26) for at in (0, 1)]
        drop(there, LetterFilter(chosen))
    before = names(letters), active(letters)
    # Its driver may have died before the last micro-batch was done.
    write(letters, last, last + 1)
    assert (names(letters), active(letters)) == before
    spout = "clicks" if ahead == "of another spout" else "lines"
    for number in (5, 10, 24, last - 1):
        with pytest.raises(CheckpointCorrupt, match="newer than the checkpoint") as caught:
            letters.write(number, {spout: died(100, 2)})
        assert f"only at micro-batch {number}" in str(caught.value)
        assert "move the letters away" in str(caught.value)
        assert "set dead_letters= to a new directory" in str(caught.value)
    assert (names(letters), active(letters)) == before
    # The letters can be moved away, as the error says.
    there.rename(tmp_path / "away")
    with OPEN(checkpoint) as state:
        letters = DeadLetters.checked(checkpoint, state.deployment_key, new)()
    write(letters, 5, 6)
    assert numbers(new) == [(5, "id-10"), (5, "id-11")]
    if ahead != "dropped":
        assert numbers(tmp_path / "away")[:2] == [(10, "id-20"), (10, "id-21")]
    assert DeadLetters.checked(checkpoint, state.deployment_key)().place.url == str(new)


def by_id(letters, **which):
    found = list_letters(reader(letters), LetterFilter(**which))
    return {str(one.id): one.message_id for one in found}


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_part_that_is_given_up_moves_no_other_letter_when_files_are_merged(
    letters, checkpoint, lost
):
    """A micro-batch of three files: its letters, the next one's, and the notes of both stay."""
    write(letters, 0, 1)
    new = [_new_file(3 * part, [died(100 + 3 * part, 3)], 1) for part in range(3)]
    letters.place.publish("lines", 1, new)
    write(letters, 2, 4)
    dropped = [LetterId("lines", 1, at) for at in (0, 3, 6, 8)]
    drop(checkpoint, LetterFilter(dropped))
    chosen = [LetterId("lines", 1, at) for at in (1, 4, 7)]
    assert replay(checkpoint, where=LetterFilter([*chosen, LetterId("lines", 2, 1)])).records
    before = by_id(letters)
    path = reader(letters).files("lines")[1 + lost].path
    Path(path).write_bytes(b"damaged")
    Path(f"{os.fspath(path)}.given-up").touch()
    with OPEN(checkpoint) as state:
        letters = DeadLetters.checked(checkpoint, state.deployment_key, None, {"lines": VALUE})()
    left = {
        name: one
        for name, one in before.items()
        if not name.startswith("lines/1/") or int(name[8:]) // 3 != lost
    }
    assert by_id(letters) == left
    was = by_id(letters, sent=True)
    write(letters, 4, 18)
    assert active(letters)[0] == "batches-0-15.1.parquet"
    later = {f"lines/{n}/{at}": f"id-{2 * n + at}" for n in range(4, 18) for at in (0, 1)}
    assert by_id(letters) == left | later
    assert by_id(letters, sent=True) == was
    drop(checkpoint, LetterFilter((LetterId("lines", 4, 0),)))
    del later["lines/4/0"]
    assert by_id(letters) == left | later
    assert replay(checkpoint).records == {"lines": len(left | later) - len(was)}


def sent(letters):
    """The message ids that were sent again, and how often, by what the files say now."""
    notes = notes_of(reader(letters))
    found = {}
    for file in reader(letters).files("lines"):
        table = read_letters(file.path)
        times, newest = sent_rows(batch_rows(file.path), "lines", notes)
        names = np.array(table["message_id"].to_pylist())
        found |= dict(zip(names[times > 0].tolist(), times[times > 0].tolist(), strict=True))
        assert ((newest >= 0) == (times > 0)).all()
    return found


def test_what_was_sent_stays_sent_when_files_are_put_together(letters, checkpoint):
    write(letters, 0, 5)
    assert replay(checkpoint, request="one").records == {"lines": 10}
    write(letters, 5, 17)
    expected = {f"id-{row}": 1 for row in range(10)}
    assert active(letters)[0] == "batches-0-15.1.parquet"
    assert sent(letters) == expected
    assert replay(checkpoint, request="two").records == {"lines": 24}
    write(letters, 17, 40)
    expected |= {f"id-{row}": 1 for row in range(10, 34)}
    assert sent(letters) == expected
    assert replay(checkpoint, again=True).records == {"lines": 80}
    assert replay(checkpoint).records == {}
    with OPEN(checkpoint) as state:
        due = state.split_due(state.make_plan(1, 0)).due["lines"]
    everyone = [f"id-{row}" for row in range(80)]
    assert sorted(ids(due)) == sorted([*everyone, *everyone[:10], *everyone[10:34]])


def test_requests_stay_in_their_order_when_the_clock_is_set_back(letters, checkpoint, monkeypatch):
    write(letters, 0, 1)
    for now_ms, request in ((2_000_000, "one"), (1_000_000, "two"), (1_000_000, "three")):
        with monkeypatch.context() as patch:
            patch.setattr(time, "time_ns", lambda now_ms=now_ms: now_ms * 1_000_000)
            replay(checkpoint, request=request, again=True)
    notes = notes_of(reader(letters))
    assert [note.request for note in notes] == ["one", "two", "three"]
    (file,) = reader(letters).files("lines")
    _, newest = sent_rows(batch_rows(file.path), "lines", notes)
    assert newest.tolist() == [2, 2]


# -- where it is ----------------------------------------------------------------------------------


def test_a_store_elsewhere_is_remembered(checkpoint, tmp_path):
    with OPEN(checkpoint) as state:
        key = state.deployment_key
        DeadLetters.checked(checkpoint, key, tmp_path / "there")().write(0, {"lines": died(0, 2)})
        assert DeadLetters.checked(checkpoint, key)().place.url == str(tmp_path / "there")
        said = "Move the whole old directory there first"
        with pytest.raises(CheckpointForeign, match=said) as caught:
            DeadLetters.checked(checkpoint, key, tmp_path / "elsewhere")()
        assert str(tmp_path / "there") in str(caught.value)
        assert str(tmp_path / "elsewhere") in str(caught.value)
        assert not (tmp_path / "elsewhere").exists()
        # It was moved, as the error says; or there is nothing in it that would be out of sight.
        (tmp_path / "there").rename(tmp_path / "elsewhere")
        with pytest.raises(StateError, match="its file system is not mounted") as caught:
            DeadLetters.checked(checkpoint, key)()
        assert str(tmp_path / "there") in str(caught.value)
        moved = DeadLetters.checked(checkpoint, key, tmp_path / "elsewhere")()
        assert numbers(Path(moved.place.url)) == [(0, "id-0"), (0, "id-1")]
        assert DeadLetters.checked(checkpoint, key)().place.url == str(tmp_path / "elsewhere")
        inside = checkpoint / "ackcore/dead_letters"
        Path(moved.place.url).rename(inside)
        assert DeadLetters.checked(checkpoint, key, inside)().place.url == str(inside)
    checkpoint.rename(tmp_path / "moved")
    with OPEN(tmp_path / "moved") as state:
        found = DeadLetters.checked(tmp_path / "moved", state.deployment_key)()
        assert numbers(Path(found.place.url)) == [(0, "id-0"), (0, "id-1")]


def test_a_store_that_was_removed_from_its_checkpoint_is_missed(checkpoint):
    with_dead_letters(checkpoint)
    inside = checkpoint / "ackcore/dead_letters"
    shutil.rmtree(inside)
    with OPEN(checkpoint) as state:
        key = state.deployment_key
        with pytest.raises(StateError, match=r"counted 7 dead records, and .* was removed") as told:
            DeadLetters.checked(checkpoint, key, records=state.records)()
        assert str(inside) in str(told.value)
        assert not inside.exists()
        # As the error says, for letters that are lost.
        DeadLetters.checked(checkpoint, key, inside, records=state.records)()
        assert DeadLetters.checked(checkpoint, key, records=state.records)().place.url == str(
            inside
        )


def test_a_store_that_was_removed_elsewhere_is_missed_though_each_start_names_it(
    checkpoint, tmp_path
):
    with_dead_letters(checkpoint)
    there, other = tmp_path / "there", tmp_path / "other"
    (checkpoint / "ackcore/dead_letters").rename(there)
    with OPEN(checkpoint) as state:
        key = state.deployment_key
        for _ in range(2):
            DeadLetters.checked(checkpoint, key, there, records=state.records)()
        shutil.rmtree(there)
        with pytest.raises(StateError, match="set dead_letters= to another directory, for new"):
            DeadLetters.checked(checkpoint, key, there, records=state.records)()
        assert not there.exists()
        for _ in range(2):
            DeadLetters.checked(checkpoint, key, other, records=state.records)()


# -- columns --------------------------------------------------------------------------------------


def test_the_columns_of_the_sources_are_those_of_the_last_start(letters, checkpoint):
    path = Path(letters.place.columns("lines"))
    both = {"lines": VALUE, "clicks": pa.schema([("n", pa.int64())])}
    with OPEN(checkpoint) as state:
        DeadLetters.checked(checkpoint, state.deployment_key, None, both)()
        assert Path(reader(letters).columns("lines")) == path  # nothing new, nothing written
        path.write_bytes(b"PAR1")
        DeadLetters.checked(checkpoint, state.deployment_key, None, both)()
        path = reader(letters).columns("lines")
        assert read_schema(path).field("payload").type == pa.struct(list(VALUE))
        only = {"clicks": pa.schema([("n", pa.int32())])}
        DeadLetters.checked(checkpoint, state.deployment_key, None, only)()
    assert reader(letters).columns("lines") is None
    path = reader(letters).columns("clicks")
    assert read_schema(path).field("payload").type == pa.struct([("n", pa.int32())])
