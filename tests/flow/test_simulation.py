"""The law and the choice together, in simulated time: what they must reach (`simulated.py`).

``pytest -s tests/flow/test_simulation.py`` prints the table.
"""

from itertools import chain

import pytest
from round_robin import RoundRobin
from simulated import World, controllers, ideal, run

from ackcore.flow import Fixed, RttThreshold
from ackcore.flow.choosers import Idlest

SEEDS = (1, 2)
TARGET_MS = 50


class Pooled:
    """The runs of several seeds as one."""

    def __init__(self, results):
        self.efficiency = sum(r.efficiency for r in results) / len(results)
        ordered = sorted(chain.from_iterable(r.latencies_ms for r in results))
        self.p50, self.p99 = (ordered[int(len(ordered) * part)] for part in (0.5, 0.99))
        self.duplicates = sum(r.duplicates for r in results)
        self.lost = max(0, sum(r.missing for r in results))

    def print(self, name):
        print(
            f"{name:44} {self.efficiency:6.1%} of capacity, p50 {self.p50:7.1f} ms, "
            f"p99 {self.p99:7.1f} ms, {self.duplicates} twice, {self.lost} lost"
        )


@pytest.fixture(scope="module")
def worlds():
    return [World(seed, seconds=14) for seed in SEEDS]


def pooled(worlds, name, make, **arguments):
    result = Pooled([run(world, make, **arguments) for world in worlds])
    result.print(name)
    return result


def default(producers):
    return controllers(producers, chooser=lambda: Idlest(seed=1))


def mean_service_ms(worlds):
    """The time of service of a tuple, on whichever consumer."""
    per_s = [world.capacity / (world.end_ns - world.begin_ns) * 1e9 for world in worlds]
    return 1e3 * World.N / (sum(per_s) / len(per_s))


# Each of four producers has two tuples at least with a consumer that is slower than the target.
@pytest.mark.parametrize(("producers", "bound"), [(1, 3), (4, 4.5)])
def test_saturated_consumers_never_idle(worlds, producers, bound):
    result = pooled(worlds, f"saturated, {producers} producers", default(producers))
    assert result.efficiency >= 0.97
    assert result.p99 <= bound * (TARGET_MS + mean_service_ms(worlds))
    assert result.duplicates == result.lost == 0


def test_blind_choices_waste_most_of_it(worlds):
    """One cap for all consumers, as before flow control."""
    blind = controllers(
        1, limit=lambda clock: lambda: Fixed(10**6), chooser=RoundRobin, max_pending=768
    )
    assert pooled(worlds[:1], "saturated, blindly by turn", blind).efficiency < 0.5


def test_below_saturation_it_is_nearly_the_ideal_queue(worlds):
    best = Pooled([ideal(world, 0.7) for world in worlds])
    best.print("70 % load, ideal central queue")
    result = pooled(worlds, "70 % load", default(1), load=0.7)
    assert result.p50 <= 1.6 * best.p50
    assert result.p99 <= 1.3 * best.p99
    assert result.duplicates == result.lost == 0


def test_the_seeds_round_robin_queues_several_times_as_long(worlds):
    make = controllers(1, limit=lambda clock: lambda: RttThreshold(0.1), chooser=RoundRobin)
    result = pooled(worlds[:1], "70 % load, RttThreshold and round robin", make, load=0.7)
    assert result.p50 > 15


def test_the_fastest_may_die(worlds):
    dead = [World(seed, seconds=14, fastest_dead=True) for seed in SEEDS]
    result = pooled(dead, "saturated, the fastest dead for a quarter", default(1))
    assert result.efficiency >= 0.95
    assert result.duplicates == result.lost == 0
