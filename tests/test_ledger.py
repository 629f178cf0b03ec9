"""The contract, case by case and backend by backend, and what only these two backends owe."""

import re

import contract_folding
import contract_inside
import contract_messages
import contract_refusals
import numpy as np
import pytest
from ledger_scripts import Clock, int32s, int64s

from ackcore._records import RESET
from ackcore.testing import check_backend

#: Every case, in the order of SEMANTICS.
CASES = contract_messages.SCRIPTS + [
    case
    for part in (contract_messages, contract_folding, contract_inside, contract_refusals)
    for name, case in vars(part).items()
    if name.startswith("check_")
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_contract(Ledger, case):
    case(Ledger)


def refuses_nothing(self, root_ids, vals, tasks):
    return type(self).__base__.apply(self, root_ids, vals, np.maximum(tasks, RESET))


@pytest.mark.parametrize(
    ("method", "breakage", "says"),
    [
        ("fail", lambda self, root_id: None, r"\n  fail\(.*\n  .*must give .*gave None"),
        ("rotate", lambda self: None, r"\n  rotate\(\).*\n  then its state\n  the last c.* \{'"),
        ("__contains__", lambda self, root_id: 1 / 0, "gave 'raised ZeroDivisionError'"),
        ("apply", refuses_nothing, r"\n  apply\(<int64 array .* must give 'raised"),
        ("oldest", lambda self, n: self.entries(), r"\n  oldest\("),
        ("ack_many", lambda self, roots, vals: self.fail_many(roots), "thousands|ack_many"),
    ],
)
def test_check_backend_shows_the_calls_up_to_the_difference(
    reference, monkeypatch, method, breakage, says
):
    broken = type("Broken", (reference.Ledger,), {method: breakage, "__module__": __name__})
    monkeypatch.setitem(globals(), "Broken", broken)  # where pickle looks for it
    with pytest.raises(AssertionError, match=r"^Ledger\(") as told:
        check_backend(broken)
    assert re.search(says, str(told.value), re.DOTALL)


@pytest.mark.parametrize(
    "case",
    [
        contract_refusals.check_refusals,
        contract_refusals.check_refused_options,
        contract_refusals.check_refused_times,
        contract_inside.check_max_entries,
    ],
)
def test_both_refuse_in_the_same_words(native, reference, case):
    assert case(native.Ledger) == case(reference.Ledger)


def test_clock_may_use_the_ledger(Ledger):
    """The clock is read before the lock is taken."""
    ledger = Ledger(clock=lambda: len(ledger))
    for root in range(5):
        ledger.ack(root, 1)
    assert [ledger.get(root).first_ms for root in range(5)] == [0, 1, 2, 3, 4]


def test_elapsed_wraps_at_64_bits(Ledger):
    clock = Clock(-(2**63))
    ledger = Ledger(clock=clock)
    ledger.ack(7, 5)
    clock.now_ms = 2**63 - 1
    assert ledger.init(7, 5, 3).elapsed_ms == -1


def test_subclasses_are_themselves(reference):
    class Named(reference.Ledger):
        pass

    ledger = Named.from_entries(reference.Ledger().entries(), buckets=5)
    assert type(ledger) is Named
    assert ledger.buckets == 5


def test_a_ledger_is_no_entries(Ledger, reference):
    for other in (Ledger(), reference.Ledger()):
        with pytest.raises(TypeError, match=r"Entries, got Ledger; pass its entries\(\)$"):
            Ledger().merge(other)


def test_take_picks_rows(Ledger):
    ledger = Ledger()
    ledger.ack_many(np.arange(4), np.arange(4) + 1)
    entries = ledger.oldest(4)
    first, _, third, _ = entries
    assert list(entries.take([2, 0])) == [third, first]
    assert entries.take(entries.root_ids > 1).root_ids.tolist() == [2, 3]
    assert entries.take(slice(1)).first_ms is None


def test_each_ledger_has_an_order_of_its_own(native):
    """An id's home bucket depends on a secret seed, unless one was given."""
    roots = np.arange(1_000)

    def order(**options):
        ledger = native.Ledger(**options)
        ledger.ack_many(roots, roots + 1)
        return tuple(ledger.entries().root_ids.tolist())

    assert len({order() for _ in range(5)}) == 5
    assert len({order(seed=seed) for seed in range(5)}) == 5
    assert len({order(seed=7) for _ in range(5)}) == 1
    assert order(seed=-1) == order(seed=2**64 - 1)


def test_ids_at_even_distances_lie_as_random_ones(native):
    """At any distance and seed few probe past their home bucket; of random ids 3 % do."""
    steps = np.arange(3_000)
    for seed in range(205):
        for exponent in (0, 1, seed % 41, 40):
            ledger = native.Ledger(capacity=len(steps), seed=seed)
            ledger.ack_many(steps << exponent, steps + 1)
            (table,) = ledger.tables
            assert int(table["overflow_count"].sum()) < 0.06 * len(steps), (seed, exponent)


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1, -1])
def test_ids_that_share_a_home_under_a_known_seed(native, seed):
    """Ids that the native hash puts into one bucket: slow is allowed, wrong is not."""
    mask = 2**64 - 1

    def mix(x):
        x ^= x >> 30
        x = x * 0xBF58476D1CE4E5B9 & mask
        x ^= x >> 27
        x = x * 0x94D049BB133111EB & mask
        return x ^ x >> 31

    # As pyx/bucket_ops.h: two rounds of x = (x ^ x >> 32) * multiplier on key ^ flip; the home is
    # the hash's high bits. (The baseline kernel's first round is another, and cannot be undone.)
    flip, *multipliers = (mix(seed + k * 0x9E3779B97F4A7C15 & mask) for k in (1, 2, 3))
    inverses = [pow(multiplier | 1, -1, 2**64) for multiplier in multipliers]

    def key_of(x):
        for inverse in reversed(inverses):
            x = x * inverse & mask
            x ^= x >> 32
        return x ^ flip

    roots = int64s(map(key_of, range(20_000)))
    vals = roots | np.int64(1)
    ledger = native.Ledger(capacity=1, seed=seed)
    tasks = int32s(range(20_000))
    for at in range(0, 20_000, 1_000):
        some = slice(at, at + 1_000)
        assert len(ledger.init_many(roots[some], vals[some], tasks[some])) == 0
    assert set(ledger.entries().root_ids.tolist()) == set(roots.tolist())
    # The table has taken another seed: under this one, all but three would be past one bucket.
    assert max(int(table["overflow_count"].max()) for table in ledger.tables) < 100
    outcomes = ledger.ack_many(roots, vals)
    assert outcomes.root_ids.tolist() == roots.tolist()
    assert outcomes.tasks.tolist() == tasks.tolist()
    assert len(ledger) == 0
