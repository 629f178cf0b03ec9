"""The ledger: native against its twin on churning trees, and one ack against a bare dict.

The workload: trees of one INIT and four ACKs, in random order inside each tree and interleaved
over all trees in flight, with the number in flight held steady.  Ledgers are filled and then aged
by five more records per tree in flight before anything is timed: a table that never erased
anything flatters itself.
"""

from __future__ import annotations

import importlib
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from ackcore import ACK, ACKED, Outcomes

CALL = 8192  # rows of one `apply`
RECORDS = 5  # of one tree

#: Trees in flight, and how many times faster than the twin the native ledger has to be.
SIZES = {1_000: 60, 100_000: 150, 1_000_000: 150}
SCALAR_BOUND = 2.5

Int64s = npt.NDArray[np.int64]
Interleaved = Callable[..., dict[str, list[float]]]


@dataclass
class Stream:
    """Records of churning trees, which of them complete one, and how many only age a ledger."""

    root_ids: Int64s
    vals: Int64s
    tasks: npt.NDArray[np.int32]
    completes: npt.NDArray[np.bool_]
    aged: int

    def batch(self, rows: slice) -> Batch:
        """Some rows as the columns of a call."""
        columns = self.root_ids[rows], self.vals[rows], self.tasks[rows]
        return Batch(columns, self.root_ids[rows][self.completes[rows]])


def tree_stream(in_flight: int, timed_calls: int, seed: int = 3) -> Stream:
    """Records that fill, some that age, and those of ``timed_calls`` calls, all from one seed.

    Each of 1.25 x ``in_flight`` slots holds one tree after the other, and every record is the
    next one of a slot drawn at random.  A fifth of the slots are between two trees.
    """
    rng = np.random.default_rng(seed)
    slots = in_flight * RECORDS // (RECORDS - 1)
    aged = -(-(slots + RECORDS * in_flight) // CALL) * CALL
    later = rng.integers(0, slots, aged - slots + timed_calls * CALL)
    slot = np.concatenate([rng.permutation(slots), later])

    # How often each record's slot was drawn before it.
    by_slot = np.argsort(slot, kind="stable")
    draws = np.bincount(slot, minlength=slots)
    nth = np.empty(len(slot), np.int64)
    nth[by_slot] = np.arange(len(slot)) - np.repeat(np.cumsum(draws) - draws, draws)

    position = nth % RECORDS
    tree_ends = np.cumsum(-(-draws // RECORDS))  # of each slot, numbered on from slot to slot
    tree = np.concatenate([[0], tree_ends[:-1]])[slot] + nth // RECORDS
    trees = int(tree_ends[-1])
    root_of = rng.integers(-(2**63), 2**63, trees)
    edges = rng.integers(-(2**63), 2**63, (trees, RECORDS))
    edges[:, -1] = np.bitwise_xor.reduce(edges[:, :-1], axis=1)
    init_at = rng.integers(0, RECORDS, trees)
    return Stream(
        root_of[tree],
        edges[tree, position],
        np.where(init_at[tree] == position, tree % 64, ACK).astype(np.int32),
        position == RECORDS - 1,
        aged,
    )


def backend_ledger(name: str) -> Any:
    """The Ledger of ``_native`` or ``_reference``; skips where there is none."""
    try:
        return importlib.import_module(f"ackcore.{name}").Ledger
    except (ImportError, AttributeError) as error:
        if os.environ.get("ACKCORE_REQUIRE_NATIVE"):
            raise
        pytest.skip(f"not built: {error}")


class Batch(NamedTuple):
    """The columns of one call, and the roots that it has to ack, in order."""

    columns: tuple[Int64s, Int64s, npt.NDArray[np.int32]]
    acked: Int64s

    def check(self, outcomes: Outcomes) -> None:
        """Exactly the trees that the batch completed came out, in order, all ACKED."""
        np.testing.assert_array_equal(outcomes.root_ids, self.acked)
        assert (outcomes.kinds == ACKED).all()


class Contestant:
    """One backend's ledger, and how far along the stream it is."""

    def __init__(self, backend: str, stream: Stream) -> None:
        self.ledger = backend_ledger(backend)()
        self.stream = stream
        self.at = 0

    def take(self, calls: int) -> list[Batch]:
        """The next ``calls`` batches, their columns views of the stream's."""
        starts = range(self.at, self.at + calls * CALL, CALL)
        self.at = starts.stop
        assert self.at <= len(self.stream.root_ids)
        return [self.stream.batch(slice(start, start + CALL)) for start in starts]

    def run(self, batches: list[Batch]) -> list[Outcomes]:
        """Apply batches: what the ratios time."""
        apply = self.ledger.apply
        return [apply(*batch.columns) for batch in batches]

    def advance(self, at: int) -> None:
        """Go on to row ``at``, checking what comes out."""
        while self.at < at:
            (batch,) = self.take(1)
            batch.check(self.ledger.apply(*batch.columns))


@dataclass
class Arena:
    """Both contestants, aged on the same records."""

    in_flight: int
    native: Contestant
    python: Contestant


@pytest.fixture(scope="module", params=SIZES, ids=lambda size: f"{size}-in-flight")
def arena(request: pytest.FixtureRequest, quick: bool) -> Arena:
    """Both contestants with so many trees in flight, aged."""
    in_flight = request.param
    if quick and in_flight > 100_000:
        pytest.skip("left out by --quick")
    stream = tree_stream(in_flight, timed_calls=128 if quick else 1280)
    contestants = [Contestant(backend, stream) for backend in ("_native", "_reference")]
    for contestant in contestants:
        contestant.advance(stream.aged)
        assert abs(len(contestant.ledger) / in_flight - 1) < 0.1
    return Arena(in_flight, *contestants)


@pytest.mark.benchmark(group="apply, batches of 8192")
@pytest.mark.parametrize("backend", ["native", "python"])
def bench_apply(benchmark: BenchmarkFixture, arena: Arena, backend: str, quick: bool) -> None:
    """One call of `apply` on 8192 records of aged, churning trees."""
    contestant = getattr(arena, backend)
    taken: list[Batch] = []

    def next_call() -> tuple[tuple[object, ...], dict[str, object]]:
        taken.extend(contestant.take(1))
        return taken[-1].columns, {}

    outcomes = benchmark.pedantic(
        contestant.ledger.apply, setup=next_call, rounds=8 if quick else 60, warmup_rounds=2
    )
    taken[-1].check(outcomes)
    if benchmark.stats:  # there are none under --benchmark-disable
        benchmark.extra_info["records_per_s"] = round(CALL / benchmark.stats.stats.median)


def bench_apply_ratio(
    arena: Arena, interleaved: Interleaved, report_ratio: Callable[..., None], quick: bool
) -> None:
    """Time a record, native against twin, a stretch of the stream in turn.

    The native turn has four times the calls: were it as short as the twin's, most of it would
    go by while the caches fill again with what the twin's turn drove out of them.
    """
    rounds = 3 if quick else 9
    calls = {"native": 32, "python": 8} if quick else {"native": 128, "python": 32}
    contestants = {"native": arena.native, "python": arena.python}
    stretches = {n: [c.take(calls[n]) for _ in range(rounds)] for n, c in contestants.items()}
    results: dict[str, list[list[Outcomes]]] = {name: [] for name in contestants}

    def turn(name: str) -> None:
        results[name].append(contestants[name].run(stretches[name][len(results[name])]))

    seconds = interleaved({name: partial(turn, name) for name in contestants}, rounds)
    for name, stretch in stretches.items():
        for batches, outcomes in zip(stretch, results[name], strict=True):
            for batch, outcome in zip(batches, outcomes, strict=True):
                batch.check(outcome)

    per_call = {name: [s / calls[name] for s in taken] for name, taken in seconds.items()}
    rates = {name: CALL / statistics.median(each) / 1e6 for name, each in per_call.items()}
    report_ratio(
        f"apply by {CALL}, {arena.in_flight:,} in flight: python / native "
        f"({rates['python']:.2f}, {rates['native']:.0f} M records/s)",
        [p / n for p, n in zip(per_call["python"], per_call["native"], strict=True)],
        SIZES[arena.in_flight],
    )


@pytest.mark.parametrize("roots", [1_000, 100_000])
def bench_ack_ratio(
    roots: int, interleaved: Interleaved, report_ratio: Callable[..., None], quick: bool
) -> None:
    """One `ack()` against ``d[r] ^= v``, over random roots that stay open.

    The time of the bare loop is measured beside them and taken off both.
    """
    rng = np.random.default_rng(4)
    ids = rng.integers(-(2**63), 2**63, roots)
    picks = rng.integers(0, roots, 20_000 if quick else 200_000)
    # The dict's own key objects: it then finds them by identity, which is its best case.
    keys = ids.tolist()
    roots_of = [keys[pick] for pick in picks.tolist()]
    pairs = list(zip(roots_of, rng.integers(1, 2**62, len(picks)).tolist(), strict=True))
    ledger = backend_ledger("_native")()
    ledger.init_many(ids, np.ones(roots, np.int64), np.zeros(roots, np.int32))
    xors = dict.fromkeys(keys, 1)

    def loop() -> None:
        for _root, _val in pairs:
            pass

    def with_dict() -> None:
        for root, val in pairs:
            xors[root] ^= val

    def with_ledger() -> None:
        ack = ledger.ack
        for root, val in pairs:
            ack(root, val)

    seconds = interleaved(
        {"loop": loop, "dict": with_dict, "ledger": with_ledger}, 3 if quick else 15
    )
    assert all(ledger.get(root).val == val for root, val in xors.items())
    ratios = [
        (ledger_s - loop_s) / (dict_s - loop_s)
        for loop_s, dict_s, ledger_s in zip(*seconds.values(), strict=True)
    ]
    each = (statistics.median(seconds["ledger"]) - statistics.median(seconds["loop"])) / len(pairs)
    report_ratio(
        f"ack() of {roots:,} roots / d[r] ^= v ({each * 1e9:.0f} ns)",
        ratios,
        SCALAR_BOUND,
        at_most=True,
    )
