"""Commit metadata: what was done above the offset, and nothing that was not."""

import base64
import logging
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ackcore import OffsetTracker, offsets
from ackcore._records import OffsetState
from ackcore._reference.offset_tracker import OffsetTracker as Twin
from ackcore.offsets import KAFKA_LIMIT, Commit, decode_metadata, encode_metadata, encode_state

DEPLOYMENT = -0x5EED


def tracker_of(runs, base=100, failed=(), topic="lines", partition=3):
    """A tracker of runs of holes and of done offsets, in turn."""
    bounds = base + np.cumsum([0, *runs])
    state = OffsetState(
        base,
        int(bounds[-1]),
        bounds[:-1:2].copy(),
        bounds[1::2].copy(),
        np.array([offset for offset, _ in failed], np.int64),
        np.array([attempts for _, attempts in failed], np.int32),
    )
    return OffsetTracker.from_state(topic, partition, 7, state)


def scattered(span, holes, seed=0):
    """Runs of so many holes, by chance."""
    chance = np.random.default_rng(seed)
    offsets = np.append(0, 1 + np.sort(chance.choice(span - 2, holes - 1, replace=False)))
    is_first = np.append(True, np.diff(offsets) > 1)
    starts = offsets[is_first]
    ends = offsets[np.append(is_first[1:], True)] + 1
    return np.diff(np.append(np.column_stack([starts, ends]).ravel(), span)).tolist()


def decoded(commit, topic="lines", partition=3):
    return decode_metadata(topic, partition, commit.offset, commit.metadata)


def same(state, other):
    return all(np.array_equal(one, two) for one, two in zip(state, other, strict=True))


def claims(state):
    """Return the offsets that a state calls done above its offset."""
    done = np.ones(state.end - state.committable, np.bool_)
    for start, end in zip(state.hole_starts.tolist(), state.hole_ends.tolist(), strict=True):
        done[start - state.committable : end - state.committable] = False
    return set((np.flatnonzero(done) + state.committable).tolist())


RUNS = st.lists(
    st.tuples(
        st.sampled_from([1, 1, 1, 2, 3, 500]) | st.integers(1, 40),
        st.sampled_from([1, 2, 30]) | st.integers(1, 5_000),
    ),
    max_size=60,
).map(lambda pairs: [length for pair in pairs for length in pair])


@given(
    RUNS,
    st.sampled_from([0, 5, 2**40]),
    st.dictionaries(st.integers(0, 10_000), st.integers(1, 9), max_size=6),
    st.booleans(),
)
def test_what_goes_in_comes_out(runs, base, failures, wide):
    tracker = tracker_of(runs, base)
    state = tracker.state()
    done = claims(state)
    failed = sorted((base + at, n) for at, n in failures.items() if base + at not in done)
    tracker = tracker_of(runs, base, failed)
    commit = encode_metadata(tracker, DEPLOYMENT, wide=wide)
    found = decoded(commit)
    assert (found.problem, found.deployment, found.generation) == (None, DEPLOYMENT, 7)
    assert same(found.state, tracker.state())
    again = OffsetTracker.from_state("lines", 3, 7, found.state)
    assert encode_metadata(again, DEPLOYMENT, wide=wide) == commit


@pytest.mark.parametrize(
    ("runs", "failed", "metadata"),
    [
        ([], [], "ack1bvJ9UcP///////6ETD4H/4H/4"),
        ([1, 9, 2, 10**9, 1, 3], [], "ack1btNYfSf///////6ETD4WBbkYAAAE3NZQAAAAAYH/4"),
        (
            [1, 9] * 3 + [4, 70],
            [(100, 2), (10**6, 1)],
            "ack1bcROe2P///////6ETD4cA4icMzLBSUQAANB2wG",
        ),
    ],
)
def test_it_is_written_as_it_was(runs, failed, metadata):
    """Groups have it that were committed by former releases."""
    tracker = tracker_of(runs, failed=failed)
    assert encode_metadata(tracker, DEPLOYMENT, wide=False).metadata == metadata


def test_a_state_with_more_runs_than_are_written_is_cut(monkeypatch):
    tracker = tracker_of([1, 2] * 40, failed=[(100, 2), (217, 1)])
    monkeypatch.setattr(offsets, "_MOST_RUNS", 10)
    commit = encode_metadata(tracker, DEPLOYMENT)
    assert encode_state("lines", 3, 7, tracker.state(), DEPLOYMENT) == commit
    assert same(decoded(commit).state, tracker.state(limit=10))


@pytest.mark.parametrize("wide", [True, False])
def test_what_does_not_fit_is_left_out_from_above(wide):
    tracker = tracker_of(scattered(3_000, 900), failed=[(100, 3)])
    whole, done = tracker.state(), claims(tracker.state())
    size, ends = len(encode_metadata(tracker, DEPLOYMENT, wide=wide).metadata), []
    for limit in [*range(64, size, 23), size - 1, size, size + 1]:
        commit = encode_metadata(tracker, DEPLOYMENT, limit=limit, wide=wide)
        found = decoded(commit)
        assert found.problem is None
        assert len(commit.metadata) <= limit
        assert claims(found.state) == {offset for offset in done if offset < found.state.end}
        ends.append(found.state.end)
        # Nearly all of the room is used.
        assert len(commit.metadata) >= min(size, limit) - 3
    assert ends == sorted(ends)
    assert ends[0] > 200
    assert ends[-2] == ends[-1] == whole.end
    assert encode_metadata(tracker, DEPLOYMENT, limit=size, wide=wide).metadata == (
        encode_metadata(tracker, DEPLOYMENT, wide=wide).metadata
    )


def test_what_is_done_goes_before_how_often_records_failed():
    runs = scattered(3_000, 300)
    plain = tracker_of(runs)
    holes = plain.holes().tolist()
    tracker = tracker_of(runs, failed=[(offset, 2) for offset in holes])
    size = len(encode_metadata(plain, DEPLOYMENT).metadata)
    found = decoded(encode_metadata(tracker, DEPLOYMENT, limit=size + 20))
    assert found.state.end == plain.state().end
    kept = found.state.failed.tolist()
    assert 10 < len(kept) < len(holes)
    assert kept == holes[: len(kept)]
    assert set(found.state.attempts.tolist()) == {2}
    whole = decoded(encode_metadata(tracker, DEPLOYMENT))
    assert whole.state.failed.tolist() == holes


def test_holes_that_touch_are_cut_between():
    """Single holes are written where that is shorter; a cut between two of one run is none."""
    runs = [1, 1, 2, 1] * 400
    tracker = tracker_of(runs)
    done = claims(tracker.state())
    for limit in range(64, 110):
        found = decoded(encode_metadata(tracker, DEPLOYMENT, limit=limit))
        assert found.problem is None
        assert claims(found.state) == {offset for offset in done if offset < found.state.end}


@pytest.mark.parametrize(
    ("span", "holes", "most"),
    [
        (100_000, 1_000, 600),
        (100_000, 3_000, 1_400),
        (1_000_000, 1_000, 850),
        (1_000_000, 3_000, 2_150),
        (10_000_000, 2_000, 2_000),
    ],
)
def test_it_is_short(span, holes, most):
    """Our size stays below parallel-consumer's table, with a tenth to spare."""
    state = tracker_of(scattered(span, holes)).state()
    commit = encode_metadata(OffsetTracker.from_state("lines", 3, 7, state), DEPLOYMENT)
    assert len(commit.metadata) <= most
    assert same(decoded(commit).state, state)


def test_batches_in_flight_are_shorter_still():
    assert len(encode_metadata(tracker_of([500, 4_500] * 100), DEPLOYMENT).metadata) < 200


@pytest.mark.parametrize("far", [10**9, 2**60])
def test_one_jump_among_small_ones_is_short(far):
    tracker = tracker_of([1, 9] * 500 + [1, far, 1, 1])
    commit = encode_metadata(tracker, DEPLOYMENT)
    assert len(commit.metadata) < 500
    assert same(decoded(commit).state, tracker.state())


def test_a_partition_without_holes():
    commit = encode_metadata(tracker_of([]), DEPLOYMENT)
    assert (commit.offset, len(commit.metadata)) == (100, 15)
    assert same(decoded(commit).state, tracker_of([]).state())


@pytest.mark.parametrize("wide", [True, False])
def test_its_characters_are_what_brokers_take(wide):
    """One UTF-16 unit each, no surrogate, nothing that a C string ends at."""
    metadata = encode_metadata(
        tracker_of(scattered(100_000, 3_000)), DEPLOYMENT, wide=wide
    ).metadata
    assert metadata.startswith("ack1u" if wide else "ack1b")
    if wide:
        assert len(metadata.encode("utf-16-le")) == 2 * len(metadata)
        assert all(0x0800 <= ord(character) <= 0xD7FF for character in metadata[5:])
    else:
        assert metadata.isascii()
        assert metadata.isprintable()
    assert metadata.encode().decode() == metadata


def test_a_full_one_is_as_long_as_may_be():
    tracker = tracker_of(scattered(1_000_000, 20_000))
    commit = encode_metadata(tracker, DEPLOYMENT)
    assert KAFKA_LIMIT == 4_095
    assert KAFKA_LIMIT - 2 <= len(commit.metadata) <= KAFKA_LIMIT
    assert decoded(commit).state.end > 400_000


# Whatever else is found says nothing.

FOREIGN = {
    "Storm's": '{"topologyId":"etl-1-1600000000","taskId":4,"threadName":"Thread-14"}',
    "Kafka Streams', 1": base64.b64encode(b"\1" + (1_600_000_000_000).to_bytes(8)).decode(),
    "Kafka Streams', 2": base64.b64encode(
        b"\2" + (1_600_000_000_000).to_bytes(8) + bytes(4)
    ).decode(),
    "parallel-consumer's bits": base64.b64encode(b"L" + b"\0\x10" + bytes(90)).decode(),
    "parallel-consumer's runs": base64.b64encode(b"J" + b"\0\x10" * 30).decode(),
    "parallel-consumer's, packed": base64.b64encode(b"o" + zlib.compress(bytes(90))).decode(),
    "a person's": "reset by hand, ticket 4711",
    "like ours": "ack",
    "like ours, too": "ack1",
    "nothing behind": "ack1u",
    "nothing behind, in base64": "ack1b",
    "another letter": "ack1x" + chr(0x900) * 20,
    "ASCII where it is not": "ack1u" + "A" * 40,
    "no base64": "ack1b" + "=" * 40,
    "cut base64": "ack1bAAAAA",
    "not ASCII where it is": "ack1b" + chr(0x900) * 40,
    "a lone surrogate": "ack1u" + chr(0xD800) * 20,
    "zeros": "ack1u" + chr(0x800) * 20,
    "ones": "ack1u" + chr(0x800 + 2**15 - 1) * 20,
    "NUL": "\0",
}


@pytest.mark.parametrize("metadata", FOREIGN.values(), ids=FOREIGN)
def test_what_is_not_ours_leaves_the_offset_and_a_warning(metadata, caplog):
    with caplog.at_level(logging.WARNING, "ackcore"):
        found = decode_metadata("lines", 3, 100, metadata)
    assert (found.deployment, found.generation) == (None, None)
    assert found.problem
    assert same(found.state, tracker_of([]).state())
    assert OffsetTracker.from_state("lines", 3, 8, found.state).committable == 100
    [record] = caplog.records
    assert record.getMessage().startswith("lines-3: the metadata of the committed offset 100 is")
    assert found.problem in record.getMessage()


@pytest.mark.parametrize("metadata", [None, ""])
def test_nothing_is_no_cause_for_a_warning(metadata, caplog):
    found = decode_metadata("lines", 3, 100, metadata)
    assert same(found.state, tracker_of([]).state())
    assert found.problem == "the metadata is empty"
    assert not caplog.records


def test_a_later_version_is_named():
    commit = encode_metadata(tracker_of([1, 5]), DEPLOYMENT)
    found = decoded(Commit(commit.offset, "ack2" + commit.metadata[4:]))
    assert "version '2'" in found.problem


@given(st.text(max_size=200) | st.binary(max_size=200).map(lambda b: "ack1b" + b.hex()))
def test_garbage_says_nothing(metadata):
    found = decode_metadata("lines", 3, 100, metadata)
    assert found.problem
    assert found.state.end == 100


@pytest.mark.parametrize("wide", [True, False])
def test_any_damage_is_noticed(wide, caplog):
    caplog.set_level(logging.CRITICAL)
    tracker = tracker_of(scattered(2_000, 60), failed=[(100, 2)])
    commit = encode_metadata(tracker, DEPLOYMENT, wide=wide)
    text = commit.metadata
    others = [text[:at] for at in range(len(text))]
    others += [text[:at] + text[at + 1 :] for at in range(len(text))]
    for at in range(len(text)):
        for other in ("A", chr(0x800), chr(ord(text[at]) ^ 1)):
            if other != text[at]:
                others.append(text[:at] + other + text[at + 1 :])
    others += [text + text[-1], text + chr(0x800), text[:5] + text[5:][::-1]]
    for other in others:
        found = decoded(Commit(commit.offset, other))
        assert found.problem, other
        assert found.state.end == commit.offset


def test_it_is_of_one_partition_and_offset(caplog):
    caplog.set_level(logging.CRITICAL)
    commit = encode_metadata(tracker_of([1, 5]), DEPLOYMENT)
    assert decoded(commit).problem is None
    for topic, partition, offset in [("line", 3, 100), ("lines", 4, 100), ("lines", 3, 99)]:
        found = decode_metadata(topic, partition, offset, commit.metadata)
        assert "another partition or offset" in found.problem
        assert (found.state.committable, found.state.end) == (offset, offset)


def test_bad_arguments_are_refused():
    tracker = tracker_of([])
    with pytest.raises(ValueError, match="limit must be at least 64, got 63"):
        encode_metadata(tracker, DEPLOYMENT, limit=63)
    with pytest.raises(TypeError, match="deployment must be an integer, got str"):
        encode_metadata(tracker, "etl")
    with pytest.raises(ValueError, match=r"base must be in .* got -1001; negative"):
        decode_metadata("lines", 3, -1001, "")
    with pytest.raises(TypeError, match="topic must be a string"):
        decode_metadata(3, 3, 0, "")


@pytest.mark.parametrize("hole", [2**33, 2**45, 2**62])
def test_a_hole_that_no_tracker_had_is_not_believed(hole, caplog):
    """Whoever may commit can write it with a right checksum; a tracker has a bit for each."""
    caplog.set_level(logging.CRITICAL)
    none = np.empty(0, np.int64)
    state = OffsetState(
        7, 8 + hole, np.array([7]), np.array([7 + hole]), none, none.astype(np.int32)
    )
    forged = encode_metadata(Twin.from_state("lines", 3, 1, state), DEPLOYMENT)
    found = decode_metadata("lines", 3, 7, forged.metadata)
    assert "has more than 4294967296 open offsets" in found.problem
    assert found.state.end == 7
