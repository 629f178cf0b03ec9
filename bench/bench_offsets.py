"""Offset trackers: what an offset costs, what the commit point does, and commit metadata."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ackcore.offsets import decode_metadata, encode_metadata
from bench.contest import Interleaved

BATCH = 10_000  # offsets a call; and acks come in random order within so many


def native() -> Any:
    """The compiled class, whatever ACKCORE_BACKEND says."""
    try:
        return importlib.import_module("ackcore._native").OffsetTracker
    except ImportError as error:
        if os.environ.get("ACKCORE_REQUIRE_NATIVE"):
            raise
        pytest.skip(f"not built: {error}")


def columns(batches: int) -> tuple[list[Any], list[Any]]:
    """Offsets as they are read, and as they finish: in random order, a batch behind."""
    chance = np.random.default_rng(8)
    read = [np.arange(at, at + BATCH) for at in range(0, batches * BATCH, BATCH)]
    return read, [chance.permutation(batch) for batch in read]


class SetOfOffsets:
    """The usual hand-written tracker: the offsets in flight as a sorted set, here a dict."""

    def __init__(self) -> None:
        self.open: dict[int, None] = {}

    def emitted(self, offsets: list[int]) -> None:
        """Take in what was read, in order."""
        self.open.update(dict.fromkeys(offsets))

    def acked(self, offsets: list[int]) -> None:
        """Take in what is done."""
        for offset in offsets:
            self.open.pop(offset, None)

    @property
    def committable(self) -> int:
        """The lowest that is not done."""
        return min(self.open)


def bench_emit_and_ack(
    interleaved: Interleaved, report_ratio: Callable[..., None], quick: bool
) -> None:
    """Columns of 10,000, acked in random order a batch behind; the commit point after each.

    One offset in a hundred fails first in a contestant of its own. The dict has lists of ints.
    """
    batches = 20 if quick else 100
    read, done = columns(batches)
    failing = [np.sort(batch[::100]) for batch in done]
    lists = [(one.tolist(), other.tolist()) for one, other in zip(read, done, strict=True)]

    def tracked(failures: bool) -> None:
        tracker = native()("lines", 0, 0, 0)
        for at in range(batches):
            tracker.emitted(read[at])
            if failures:
                tracker.failed(failing[at])
                tracker.emitted(failing[at])
            if at:
                tracker.acked(done[at - 1])
            assert tracker.committable == max(0, at) * BATCH

    def with_dict() -> None:
        offsets = SetOfOffsets()
        for at in range(batches):
            offsets.emitted(lists[at][0])
            if at:
                offsets.acked(lists[at - 1][1])
            assert offsets.committable == max(0, at) * BATCH

    contestants = {
        "columns": lambda: tracked(False),
        "failing": lambda: tracked(True),
        "dict": with_dict,
    }
    seconds = interleaved(contestants, 3 if quick else 15)
    each = {name: [s / batches / BATCH * 1e9 for s in row] for name, row in seconds.items()}
    report_ratio("offsets: emit + ack in columns", each["columns"], 10, at_most=True, unit="ns")
    report_ratio("offsets: the same, one in 100 fails", each["failing"], unit="ns")
    ratios = [d / c for d, c in zip(each["dict"], each["columns"], strict=True)]
    report_ratio("offsets: a dict of ints / the tracker", ratios)


def bench_scalar(interleaved: Interleaved, report_ratio: Callable[..., None], quick: bool) -> None:
    """One `emitted()` and one `acked()` of an int, less the loop."""
    offsets = list(range(20_000 if quick else 200_000))

    def loop() -> None:
        for _offset in offsets:
            pass

    def scalars() -> None:
        tracker = native()("lines", 0, 0, 0)
        emitted, acked = tracker.emitted, tracker.acked
        for offset in offsets:
            emitted(offset)
        for offset in offsets:
            acked(offset)
        assert tracker.committable == len(offsets)

    seconds = interleaved({"loop": loop, "scalars": scalars}, 3 if quick else 15)
    each = [(s - 2 * bare) / len(offsets) * 1e9 for bare, s in zip(*seconds.values(), strict=True)]
    report_ratio("offsets: emitted() + acked() of an int", each, unit="ns")


def bench_bytes(report_ratio: Callable[..., None], quick: bool) -> None:
    """Memory of a million offsets in flight, and of 5 M behind one that is not done."""
    n = 10 if quick else 100
    read, _ = columns(n)
    tracker = native()("lines", 0, 0, 0)
    for batch in read:
        tracker.emitted(batch)
    report_ratio(
        "offsets: bytes an offset in flight",
        [tracker.nbytes / n / BATCH],
        0.2,
        at_most=True,
        unit="B",
    )
    tracker, most = native()("lines", 0, 0, 0), 0
    for at in range(0, 5 * n * BATCH, BATCH):
        tracker.emitted(np.arange(at, at + BATCH))
        tracker.acked(np.arange(max(at, 1), at + BATCH))
        most = max(most, tracker.nbytes)
    assert tracker.committable == 0
    report_ratio(
        "offsets: kB of 5 M done behind one that is not",
        [most / 1e3],
        1_000,
        at_most=True,
        unit="kB",
    )


def bench_commit_point(
    interleaved: Interleaved, report_ratio: Callable[..., None], quick: bool
) -> None:
    """The ack of the lowest of 100,000, the others done but the last, and what it commits."""
    trackers: list[Any] = []
    read, _ = columns(10)

    def fill(_name: str) -> None:
        trackers[:] = [native()("lines", 0, 0, 0) for _ in range(20)]
        for tracker in trackers:
            for batch in read:
                tracker.emitted(batch)
                tracker.acked(batch[(batch > 0) & (batch < 99_999)])

    def commit() -> None:
        for tracker in trackers:
            tracker.acked(0)
            assert tracker.committable == 99_999

    seconds = interleaved({"commit": commit}, 3 if quick else 15, before=fill)
    each = [s / 20 * 1e6 for s in seconds["commit"]]
    report_ratio("offsets: commit point at a span of 100,000", each, 2, at_most=True, unit="us")


@pytest.mark.parametrize("span", [100_000, 1_000_000])
def bench_metadata(
    span: int, interleaved: Interleaved, report_ratio: Callable[..., None], quick: bool
) -> None:
    """3,000 holes in that span by chance: out of the tracker and into metadata, and back."""
    chance = np.random.default_rng(9)
    tracker = native()("lines", 0, 0, 0)
    tracker.emitted(np.arange(span))
    is_done = np.ones(span, np.bool_)
    is_done[chance.choice(span - 1, 3_000, replace=False)] = False
    tracker.acked(np.flatnonzero(is_done))
    commit = encode_metadata(tracker, 5)
    assert len(commit.metadata) < 4_095
    assert decode_metadata("lines", 0, *commit).problem is None
    contestants = {
        "encode": lambda: encode_metadata(tracker, 5),
        "decode": lambda: decode_metadata("lines", 0, *commit),
    }
    seconds = interleaved(contestants, 5 if quick else 31)
    size = f"3,000 holes in {span:,} ({len(commit.metadata):,} characters)"
    for name, row in seconds.items():
        bound = 1 if name == "encode" and span == 100_000 else None
        milliseconds = [s * 1e3 for s in row]
        report_ratio(f"metadata: {name}, {size}", milliseconds, bound, at_most=True, unit="ms")
