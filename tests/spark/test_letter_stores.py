"""One contract for dead letters, on a file system and in a bucket."""

from __future__ import annotations

import pytest
from checkpoints import OPEN, died, run_one
from letter_homes import VALUE, Home, asked, contents, every, files_there, listed, named, write

from ackcore.spark.base.clocks import wall_clock_ms
from ackcore.spark.base.errors import CheckpointCorrupt, CheckpointForeign
from ackcore.spark.checkpoint.shared_record import INDEX
from ackcore.spark.dead_letters import compaction
from ackcore.spark.dead_letters.checkpoints import checkpoint_of, store_of
from ackcore.spark.dead_letters.drop import drop
from ackcore.spark.dead_letters.letter_files import batch_rows, read_letters
from ackcore.spark.dead_letters.letter_store import Letters
from ackcore.spark.dead_letters.listing import LetterFilter, LetterId, count_letters, list_letters
from ackcore.spark.dead_letters.notes import notes_of
from ackcore.spark.dead_letters.reading import dead_letters
from ackcore.spark.dead_letters.replay import replay
from ackcore.spark.dead_letters.store import DeadLetters, _new_file
from ackcore.spark.inspect.reason_counts import DeadCounter

pytestmark = pytest.mark.usefixtures("no_syncing")


@pytest.fixture(params=["directory", "bucket", "directory with letters in a bucket"])
def home(request, tmp_path):
    """Each kind of place."""
    if request.param == "directory":
        return Home(str(tmp_path / "checkpoint"))
    bucket = request.getfixturevalue("bucket")
    if request.param == "bucket":
        return Home(bucket)
    return Home(str(tmp_path / "checkpoint"), f"{bucket}/letters")


# -- the contract ---------------------------------------------------------------------------------


def test_what_died_is_listed_counted_and_shown(home):
    state, letters = home.driver()
    with state:
        assert listed(home) == {}
        assert store_of(home.checkpoint).spouts() == ["lines"]
        write(letters, 0, 3)
        # Who reads disturbs no driver, and who wrote needs not end before.
        assert listed(home) == every(3)
        write(letters, 3, 4)
    assert listed(home) == every(4)
    assert count_letters(store_of(home.checkpoint), LetterFilter(component="split")) == 8
    (one,) = list_letters(store_of(home.checkpoint), named(2), 1, payload=True)
    assert (str(one.id), one.payload) == ("lines/2/1", '{"value":"line 5"}')
    counts = DeadCounter().count(store_of(home.checkpoint))
    assert (counts.letters, counts.sent, counts.dropped) == (8, 0, 0)
    assert [each.records for each in counts.reasons] == [8]


def test_a_micro_batch_that_is_written_again_replaces_its_letters(home):
    state, letters = home.driver()
    with state:
        write(letters, 0, 2)
        write(letters, 1, 2)
        assert listed(home) == every(2)
    state, letters = home.driver()
    with state:
        write(letters, 1, 2)
        assert listed(home) == every(2)
        letters.write(1, {"lines": died(90, 1)})
        assert listed(home) == {**every(1), "lines/1/0": "id-90"}


def test_many_files_become_few_and_no_letter_moves(home, monkeypatch):
    monkeypatch.setattr(compaction, "_FEWEST", 4)
    state, letters = home.driver()
    with state:
        for n in range(22):
            write(letters, n, n + 1)
            if n in (4, 5, 20, 21):
                assert listed(home) == every(n + 1)
        files = letters.place.files("lines")
        assert [(file.first, file.last, file.level) for file in files] == [
            (0, 15, 2),
            (16, 19, 1),
            (20, 20, 0),
            (21, 21, 0),
        ]
        said = "micro-batch 15, but the checkpoint is only at"
        with pytest.raises(CheckpointCorrupt, match=said):
            write(letters, 7, 8)


def test_files_that_were_merged_stay_for_an_hour_and_are_then_removed(home, monkeypatch):
    monkeypatch.setattr(compaction, "_FEWEST", 4)
    now = [wall_clock_ms()]
    state, letters = home.driver(lambda: now[0])
    with state:
        write(letters, 0, 4)
        before = files_there(home)
        write(letters, 4, 6)
        assert before < files_there(home)
        now[0] += compaction.KEPT_MS - 60_000
        write(letters, 6, 10)
        assert before < files_there(home)
        now[0] += 120_000
        write(letters, 10, 14)
        assert not before & files_there(home)
        assert listed(home) == every(14)


def test_letters_are_sent_once_and_a_request_is_made_once(home):
    home.wrote(3)
    assert asked(home) == []
    assert replay(home.checkpoint, where=named(1), dry_run=True).records == {"lines": 2}
    first = replay(home.checkpoint, where=named(1), request="one")
    assert first.records == {"lines": 2}
    assert replay(home.checkpoint, request="one") == first
    assert asked(home) == ["id-2", "id-3"]
    assert replay(home.checkpoint).records == {"lines": 4}
    assert replay(home.checkpoint).records == {}
    assert asked(home) == [f"id-{row}" for row in range(6)]
    assert listed(home, sent=False) == {}
    found = {each.request for each in list_letters(store_of(home.checkpoint), named(1))}
    assert found == {"one"}
    assert DeadCounter().count(store_of(home.checkpoint)).sent == 6
    assert replay(home.checkpoint, again=True, max_replays=1).left_out == {"lines": 6}
    for wrong in ("", "a/b", "a.b", "x" * 65):
        with pytest.raises(ValueError, match="request must be 1 to 64 letters"):
            replay(home.checkpoint, request=wrong)


def test_dropped_letters_are_gone_and_no_other_moves(home, monkeypatch):
    monkeypatch.setattr(compaction, "_FEWEST", 4)
    state, letters = home.driver()
    with state:
        write(letters, 0, 7)  # four of them merged
        assert drop(home.checkpoint, named(1), dry_run=True).records == {"lines": 2}
        assert listed(home) == every(7)
        assert drop(home.checkpoint, named(1, 5)).records == {"lines": 4}
        assert listed(home) == every(7, but=(1, 5))
        write(letters, 7, 12)  # the driver does not know of it, and merges on
        assert listed(home) == every(12, but=(1, 5))
    assert drop(home.checkpoint, named(1, 5)).records == {}
    assert DeadCounter().count(store_of(home.checkpoint)).dropped == 4
    assert replay(home.checkpoint).records == {"lines": 20}
    assert drop(home.checkpoint, LetterFilter()).records == {"lines": 20}
    assert listed(home) == {}
    there = b"".join(contents(home))
    assert b"id-" not in there
    state, letters = home.driver()
    with state:
        write(letters, 12, 14)
        assert set(listed(home)) == {f"lines/{n}/{at}" for n in (12, 13) for at in (0, 1)}


def test_the_store_and_the_checkpoint_are_both_a_way_in(home):
    url = home.wrote(2).place.url
    assert url == store_of(home.checkpoint).url
    assert url == (home.elsewhere or f"{home.checkpoint}/ackcore/dead_letters")
    found = list_letters(store_of(url), LetterFilter())
    assert {str(each.id): each.message_id for each in found} == every(2)
    assert checkpoint_of(store_of(url)).url == home.checkpoint
    with pytest.raises(FileNotFoundError, match="path must be a checkpoint or a store"):
        store_of(f"{home.checkpoint}-other")


def test_two_checkpoints_do_not_share_a_store(home, tmp_path):
    letters = home.wrote(1)
    other = Home(str(tmp_path / "other"), letters.place.url)
    with pytest.raises(CheckpointForeign, match="would overwrite them"):
        other.driver()
    aside = Home(home.checkpoint, f"{letters.place.url}-2")
    with pytest.raises(CheckpointForeign, match="would not find the old ones"):
        aside.driver()


def test_letters_are_a_frame(home, spark, tasks_reach):
    home.wrote(3)
    replay(home.checkpoint, where=named(1), request="r")
    before = dead_letters(home.checkpoint, spark)
    drop(home.checkpoint, named(2))
    assert before.count() == 4
    frame = dead_letters(home.checkpoint, spark)
    rows = {row.message_id: row for row in frame.collect()}
    assert sorted(rows) == ["id-0", "id-1", "id-2", "id-3"]
    assert [rows[f"id-{n}"].replay_request for n in range(4)] == [None, None, "r", "r"]
    assert rows["id-3"].payload.value == "line 3"
    assert rows["id-3"].batch_id == 1
    assert dead_letters(home.checkpoint, spark, "lines", payload="json").count() == 4
    sent = replay(home.checkpoint, spark, where="payload.value = 'line 1'")
    assert sent.records == {"lines": 1}
    assert asked(home) == ["id-1", "id-2", "id-3"]


def test_a_frame_of_no_letters_has_the_columns_of_the_source(home, spark):
    home.wrote(0)
    frame = dead_letters(home.checkpoint, spark)
    assert frame.count() == 0
    assert frame.schema["payload"].dataType.simpleString() == "struct<value:string>"


def test_who_began_to_read_before_a_drop_reads_on(home):
    home.wrote(3)
    store = store_of(home.checkpoint)
    files, notes = store.files("lines"), notes_of(store)
    drop(home.checkpoint, named(1))
    found = [row for file in files for row in LetterFilter().rows(file, "lines", notes).tolist()]
    assert found == [0, 1, 0, 1]


@pytest.mark.parametrize("merges", [0, 1, 2])
def test_who_began_to_read_before_merges_and_a_drop_reads_on(home, monkeypatch, merges):
    """One micro-batch has three files."""
    monkeypatch.setattr(compaction, "_FEWEST", 3)
    state, letters = home.driver()
    with state:
        write(letters, 0, 1)
        new = [_new_file(2 * part, [died(100 + 2 * part, 2)], 1) for part in range(3)]
        letters.place.publish("lines", 1, new)
        write(letters, 2, 3)
        store = store_of(home.checkpoint)
        files, notes = store.files("lines"), notes_of(store)
        write(letters, 3, [3, 4, 12][merges])
    assert store_of(home.checkpoint).files("lines")[0].level == merges
    drop(home.checkpoint, LetterFilter((LetterId("lines", 0, 1), LetterId("lines", 1, 3))))
    for file in files:
        rows = batch_rows(file.path)
        gone = {"batch-0": [1], "batch-1.2": [1]}.get(file.path.name.partition(".e")[0], [])
        found = LetterFilter().rows(file, "lines", notes).tolist()
        assert found == [row for row in (0, 1) if row not in gone]
        names = read_letters(file.path)["message_id"].to_pylist()
        first = 100 if file.first == 1 else 2 * file.first
        for row in found:
            assert names[row] == f"id-{first + rows.position(row)}"


# -- an index of another time ---------------------------------------------------------------------


def index_of(home):
    return home.letters.get(INDEX).data


def put_back(home, index):
    home.letters.replace(INDEX, index, home.letters.get(INDEX).version)


def start(home):
    with OPEN(home.checkpoint) as state:
        DeadLetters.checked(state.url, state.deployment_key, home.elsewhere, VALUE, state.records)()


@pytest.fixture
def three(home):
    """A store with letters of three micro-batches: the last one is not done."""
    state, letters = home.driver()
    with state:
        write(letters, 0, 1)
        older = index_of(home)
        write(letters, 1, 2)
        run_one(state, 1)
        newest = index_of(home)
        write(letters, 2, 3)
    return older, newest


def test_an_older_index_is_refused_if_it_lacks_letters_that_count(home, three):
    older, newest = three
    put_back(home, older)
    (lacking,) = (each for each in files_there(home) if "/batch-1." in each)
    before = files_there(home)
    with pytest.raises(CheckpointCorrupt, match=f"it lacks {lacking}, with letters of micro-") as e:
        start(home)
    assert str(e.value).startswith(f"{store_of(home.checkpoint).url}/{INDEX} is older than")
    assert files_there(home) == before
    # As after a driver that died before it put its index: micro-batch 2 runs again.
    put_back(home, newest)
    start(home)
    assert listed(home) == every(2)
    assert len(files_there(home)) == 2
    # As the error says.
    put_back(home, older)
    home.letters.delete([lacking])
    start(home)
    assert listed(home) == every(1)


def test_an_index_that_is_removed_during_a_run_is_refused_as_missing(home):
    state, letters = home.driver()
    with state:
        write(letters, 0, 1)
        home.letters.delete([INDEX])
        with pytest.raises(CheckpointCorrupt, match=f"{INDEX} was removed while this driver used"):
            write(letters, 1, 2)


@pytest.mark.parametrize("at", [0, 1])
def test_a_driver_that_dies_while_it_gives_a_file_up_leaves_no_older_index(
    home, three, monkeypatch, at
):
    (last,) = (each for each in files_there(home) if "/batch-1." in each)
    put_back(home, three[1])
    home.letters.put(f"{last}.given-up", b"")
    calls = []

    def die(letters, keys, delete=Letters._delete):
        if len(calls) == at:
            raise KeyboardInterrupt
        calls.append(delete(letters, keys))

    with monkeypatch.context() as patch:
        patch.setattr(Letters, "_delete", die)
        with pytest.raises(KeyboardInterrupt):
            start(home)
    start(home)
    assert listed(home) == every(1)
    assert not any("/batch-1." in each.key for each in home.letters.list())
