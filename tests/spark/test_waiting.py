"""Records that wait for a retry: who is due, what is written, and what their columns may become."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pyarrow as pa
import pytest
from checkpoints import OPEN, Killed, Killer, ask, end_one, ids, recorded, records, roots, run_one
from hypothesis import given
from hypothesis import strategies as st

from ackcore.spark.base.errors import CheckpointForeign
from ackcore.spark.base.schemas import TRACKING
from ackcore.spark.checkpoint import segments, waiting
from ackcore.spark.checkpoint.schema_changes import ColumnsChanged
from ackcore.spark.checkpoint.table_cache import TableCache
from ackcore.spark.stores.local import LocalStore

# -- columns ----------------------------------------------------------------------------------


pytestmark = pytest.mark.usefixtures("no_syncing")


def with_numbers(table, kind):
    """Records whose value is a number of their own."""
    numbers = pa.array(range(len(table)), kind)
    return table.set_column(len(TRACKING), pa.field("value", kind), numbers)


def schema(**columns):
    return {"lines": pa.schema(list(columns.items()))}


def test_who_waits_has_the_columns_that_the_source_has_now(checkpoint):
    with OPEN(checkpoint, sources=schema(value=pa.int64())) as state:
        run_one(state, 0, {"lines": with_numbers(records(0, 4), pa.int64())})
    now = schema(more=pa.string(), value=pa.int32())
    with OPEN(checkpoint, sources=now) as state:
        plan = state.make_plan(1, 1001)
        state.write_plan(plan)
        due = state.split_due(plan).due["lines"]
        assert due.schema.equals(pa.schema([*TRACKING, *now["lines"]]))
        assert due.select(["more", "value"]).to_pylist() == [
            {"more": None, "value": 0},
            {"more": None, "value": 1},
        ]


@pytest.mark.parametrize(
    ("now", "words"),
    [
        ({"value": pa.date32()}, r"'value' was int64 and is date32\[day\] now"),
        ({"value": pa.int8()}, r"'value' was int64 and is int8 now"),
        ({"other": pa.int64()}, r"'value', int64, is not there any more"),
    ],
)
def test_columns_that_would_change_a_value_are_refused_before_there_is_a_plan(
    checkpoint, now, words
):
    with OPEN(checkpoint, sources=schema(value=pa.int64())) as state:
        run_one(state, 0, {"lines": with_numbers(records(0, 200), pa.int64())})
    with pytest.raises(ColumnsChanged, match=rf"200 records of spout 'lines' .*{words}") as told:
        OPEN(checkpoint, sources=schema(**now))
    assert isinstance(told.value, CheckpointForeign)
    assert "Run the former source until no record waits" in str(told.value)
    assert recorded(checkpoint).read("batches/1.plan") is None
    with OPEN(checkpoint, sources=schema(value=pa.int64())) as state:
        assert state.split_due(state.make_plan(1, 10**9)).due["lines"].num_rows == 200


# -- what is written ----------------------------------------------------------------------------


def written(root, before=frozenset()):
    """Files of who waits that were not there before, and their bytes."""
    files = set(root.glob("ackcore/state/*.waiting-*.arrow")) - before
    return files, sum(file.stat().st_size for file in files)


def micro_batch(state, number, now_ms, fails=(), most=None):
    """Take what is due, of which nothing fails, and have other records fail."""
    plan = state.make_plan(number, now_ms, most)
    state.write_plan(plan)
    due, rest, _ = state.split_due(plan)
    for spout, table in fails:
        rest = rest.plus(spout, table)
    end_one(state, number, rest, prune=True)
    return due


def test_only_what_changed_is_written(checkpoint):
    """Others wait for long while a few fail and are due again with each micro-batch."""
    with OPEN(checkpoint) as state:
        run_one(state, 0, {"lines": records(0, 20_000, due_ms=10**9)})
        files, whole = written(checkpoint)
        for number in range(1, 40):
            fails = [("lines", records(10**6 + 5 * number, 5, due_ms=number - 10**6))]
            due = micro_batch(state, number, 6 * number, fails)
            assert len(due.get("lines", ())) > 0 or number == 1
            found, size = written(checkpoint, files)
            assert size < whole / 10
            files |= found
        assert state.waiting(39).rows() > 20_000
        assert len(written(checkpoint)[0]) < 20


def test_a_row_is_written_again_a_few_times_only(checkpoint, monkeypatch):
    rows = []

    def count(reader, directory, spout, parts):
        rows.append(sum(map(len, parts)))
        return write(reader, directory, spout, parts)

    write = waiting.write_segment
    monkeypatch.setattr(waiting, "write_segment", count)
    with OPEN(checkpoint) as state:
        for number in range(200):
            micro_batch(state, number, 0, [("lines", records(10 * number, 10, due_ms=10**9))])
        segments = state.waiting(199).segments()["lines"]
        assert ids(state.waiting(199)["lines"]) != []
        assert len({*ids(state.waiting(199)["lines"])}) == state.waiting(199).rows() == 2000
    assert len(segments) < 7 * 4  # of each of the sizes 8, 64, 512
    assert sum(rows) <= 2000 * 4


def test_a_file_of_which_most_is_gone_is_written_anew(checkpoint):
    with OPEN(checkpoint) as state:
        run_one(state, 0, {"lines": records(0, 4000)})
        (segment,) = state.waiting(0).segments()["lines"]
        micro_batch(state, 1, 1000 + 2899)
        (kept,) = state.waiting(1).segments()["lines"]
        assert (kept.file, kept.start, len(kept)) == (segment.file, 2900, 1100)
        assert (kept.next_due_ms, kept.oldest_ms) == (3900, 2900)
        micro_batch(state, 2, 1000 + 2999)
        (anew,) = state.waiting(2).segments()["lines"]
        assert (anew.start, anew.rows, anew.next_due_ms) == (0, 1000, 4000)
        assert state.waiting(2)["lines"].equals(records(0, 4000).slice(3000))


def test_nothing_is_opened_in_which_nothing_is_due(checkpoint, monkeypatch):
    with OPEN(checkpoint) as state:
        run_one(state, 0, {"lines": records(0, 10, due_ms=10**9), "clicks": records(0, 10)})
        opened = []
        monkeypatch.setattr(TableCache, "_data", lambda cache, file, nbytes: opened.append(file))
        state.split_due(state.make_plan(1, 999))
        micro_batch(state, 1, 999, [("lines", records(50, 5, due_ms=10**9))])
        assert opened == []


def test_what_the_cache_of_tables_remembers_does_not_grow(checkpoint):
    with OPEN(checkpoint) as state:
        sizes = []
        for number in range(60):
            plan = state.make_plan(number, 0)
            state.write_plan(plan)
            rest = state.split_due(plan).rest.plus("lines", records(number, 1, due_ms=10**9))
            dead = {"clicks": records(number, 1)}
            end_one(state, number, rest, dead, nonacked=roots(number), prune=True)
            cache = state._cache
            sizes.append((len(cache._verified) + len(cache._mapped), len(state._decisions)))
        # What waits in a few segments; the dead and the roots of two micro-batches.
        assert max(files for files, _ in sizes) < 40
        assert max(decisions for _, decisions in sizes) <= 3


def test_nothing_is_removed_that_is_mapped(checkpoint, monkeypatch):
    """NFS would keep it under another name, and so the directory, which cannot be removed then."""
    removed = []

    def delete(store, keys):
        keys = [*keys]
        removed.extend(map(store.path, keys))
        maps = Path("/proc/self/maps").read_text()
        assert not [key for key in keys if f"{store.path(key)}\n" in maps]
        whole(store, keys)

    whole = LocalStore.delete

    monkeypatch.setattr(LocalStore, "delete", delete)
    with OPEN(checkpoint) as state:
        run_one(state, 0, {"lines": records(0, 2000)})
        (file,) = (checkpoint / "ackcore/state").glob("0.*.waiting-lines.*")
        for number in range(1, 4):
            micro_batch(state, number, 5000)
    assert file in removed


def test_large_rows_are_cut_where_a_column_would_be_too_long(checkpoint, monkeypatch):
    monkeypatch.setattr(segments, "_WINDOW_BYTES", 1000)
    monkeypatch.setattr(segments, "_WINDOW_ROWS", 64)
    table = records(0, 300, due_ms=10**6, step=-7)
    with OPEN(checkpoint) as state:
        run_one(state, 0, {"lines": table})
        found = state.waiting(0)["lines"]
        assert found.column(0).num_chunks > 10
        assert ids(found) == ids(table)[::-1]
        for chunk in found.to_batches():
            assert len(chunk) == 1 or chunk.nbytes <= 1000


# -- who is due ---------------------------------------------------------------------------------


def test_a_micro_batch_takes_so_many_retries_and_the_earliest_first(checkpoint):
    with OPEN(checkpoint) as state:
        run_one(
            state,
            0,
            {"lines": records(0, 10, due_ms=1000, step=2), "clicks": records(0, 10, due_ms=1001)},
        )
        plan = state.make_plan(1, 5000, 5)
        assert (plan.due, plan.max_retries) == (20, 5)
        due = micro_batch(state, 1, 5000, most=5)
        assert {name: ids(table) for name, table in due.items()} == {
            "lines": ["id-0", "id-1"],
            "clicks": ["id-0", "id-1", "id-2"],
        }
        # What is left is due at once.
        assert state.decision(1).waiting.next_due_ms == 1004
        assert micro_batch(state, 2, 5000, most=1)["lines"]["_ackcore_due_ms"].to_pylist() == [1004]
        assert sum(map(len, micro_batch(state, 3, 5000).values())) == 14


def test_a_replay_that_is_too_large_is_taken_once_and_waits_for_its_turn(checkpoint):
    with OPEN(checkpoint) as state:
        run_one(state, 0, {"lines": records(0, 2)})
        ask(checkpoint, table=records(100, 6, attempt=0))
        plan = state.make_plan(1, 5000, 3)
        state.write_plan(plan)
        due, rest, asked = state.split_due(plan)
        assert asked == {"lines": 6}
        assert ids(due["lines"]) == ["id-0", "id-1", "id-100"]
        assert rest["lines"]["_ackcore_due_ms"].to_pylist() == [5000] * 5
        end_one(state, 1, rest, prune=True)
    with OPEN(checkpoint) as state:
        assert state.pending_replays() == ()
        plan = state.make_plan(2, 5000, 3)
        assert (plan.due, plan.replays) == (5, ())
        assert ids(micro_batch(state, 2, 5000, most=3)["lines"]) == ["id-101", "id-102", "id-103"]
        assert ids(micro_batch(state, 3, 5000, most=3)["lines"]) == ["id-104", "id-105"]
        assert micro_batch(state, 4, 5000, most=3) == {}


# -- any sequence of events ---------------------------------------------------------------------

KILLER = Killer()
FAILURES = st.lists(st.tuples(st.sampled_from(["lines", "clicks"]), st.integers(1, 60)), max_size=9)
STEPS = st.tuples(
    st.integers(0, 30),  # by how much time goes on
    FAILURES,  # whose records fail, and how long they wait
    st.integers(0, 5),  # how many dead letters are asked for again
    st.sampled_from([None, 1, 4]),  # max_retries
    st.none() | st.integers(0, 25),  # at which operation on a file the driver dies
)


@given(st.lists(STEPS, max_size=25))
def test_the_store_does_as_a_list_would(tmp_path_factory, steps):
    """Whatever fails, is due and dies: who waits, and who is taken, is what a plain list says."""
    checkpoint = tmp_path_factory.mktemp("model") / "checkpoint"
    model, now, born = {}, 0, 0  # by id: (spout, due)
    state = OPEN(checkpoint)
    for number, (later, failures, asks, most, dies) in enumerate(steps):
        now += later
        request = {}
        for _ in range(asks):
            born += 1
            request[f"id-{born}"] = ("lines", now)
        if request:
            table = records(born - asks + 1, asks, attempt=0)
            ask(checkpoint, f"r{number}", "lines", table)
        state.write_plan(state.make_plan(number, now, most))
        due = state.split_due(state.plan(number)).due
        taken = {name: (spout, None) for spout in due for name in ids(due[spout])}
        everybody = model | request
        for name, (spout, _) in taken.items():
            assert everybody[name][0] == spout
        may = sorted(at for _, at in everybody.values() if at <= now)
        assert sorted(everybody[name][1] for name in taken) == may[:most]
        model = {name: row for name, row in everybody.items() if name not in taken}
        new = []
        for spout, wait in failures:
            born += 1
            model[f"id-{born}"] = (spout, now + wait)
            new.append((spout, records(born, 1, due_ms=now + wait - born)))
        if dies is not None:
            KILLER.arm(dies)
            try:
                with contextlib.suppress(Killed):
                    decide_and_mark(state, number, new)
            finally:
                KILLER.disarm()
            state.close()
            state = OPEN(checkpoint)
            if state.last_done != number and state.decision(number) is None:
                # Another driver finds the same rows in the same order.
                again = state.split_due(state.plan(number)).due
                assert {n: t.to_pylist() for n, t in again.items()} == {
                    n: t.to_pylist() for n, t in due.items()
                }
        decide_and_mark(state, number, new)
        found = state.waiting(number)
        assert {
            name: (spout, at)
            for spout in found
            for name, at in zip(
                ids(found[spout]), found[spout]["_ackcore_due_ms"].to_pylist(), strict=True
            )
        } == model
        assert found.rows() == len(model)
        assert found.next_due_ms == min((at for _, at in model.values()), default=None)
        for some in found.segments().values():
            for segment in some:
                dues = segment.table()["_ackcore_due_ms"].to_pylist()
                assert dues == sorted(dues)
                assert segment.oldest_ms == min(segment.table()["_ackcore_first_ms"].to_pylist())
    state.close()


def decide_and_mark(state, number, new):
    if state.last_done != number and state.decision(number) is None:
        rest = state.split_due(state.plan(number)).rest
        for spout, table in new:
            rest = rest.plus(spout, table)
        end_one(state, number, rest)
    elif state.last_done != number:
        state.write_done(number)
    state.prune(number)
