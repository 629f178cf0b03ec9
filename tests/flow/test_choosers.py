"""Each chooser picks as it says, and none without room."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from round_robin import RoundRobin
from simulated import MS, SimClock

from ackcore.flow import ByKey, Fixed, FlowController
from ackcore.flow.choosers import Idlest

CHOOSERS = {"idlest": lambda: Idlest(seed=1), "round robin": RoundRobin, "by key": ByKey}


@pytest.fixture
def clock():
    return SimClock()


def flow_of(clock, chooser, names="abc", limit=4, **arguments):
    return FlowController(
        names, limit=lambda: Fixed(limit), chooser=chooser, clock=clock, **arguments
    )


@pytest.mark.parametrize("name", CHOOSERS)
def test_all_room_is_given_out_and_no_more(clock, name):
    flow = flow_of(clock, CHOOSERS[name]())
    leases = [flow.try_acquire(i, key=i) for i in range(500)]
    counts = Counter(lease.name for lease in leases if lease)
    assert counts == {"a": 4, "b": 4, "c": 4}
    assert flow.in_flight == 12


@pytest.mark.parametrize("name", CHOOSERS)
def test_without_consumers_there_is_no_room(clock, name):
    flow = flow_of(clock, CHOOSERS[name](), "")
    assert flow.try_acquire(key=1) is None
    flow.add("a")
    assert flow.try_acquire(key=1).name == "a"


@pytest.mark.parametrize("name", CHOOSERS)
@given(moves=st.lists(st.integers(0, 9), min_size=30, max_size=30))
def test_slots_of_those_that_left_are_used_again(name, moves):
    """A chooser follows consumers that come and go, and never names one that is gone."""
    flow = flow_of(SimClock(), CHOOSERS[name](), "", limit=2)
    there = []
    for step, move in enumerate(moves):
        if move < 5 or not there:
            there.append(step)
            flow.add(step)
        else:
            flow.remove(there.pop((move - 5) % len(there)))
        leases = [flow.try_acquire(key=(step, i)) for i in range(2 * len(there) + 1)]
        assert {lease.name for lease in leases if lease} <= set(there)
        for lease in filter(None, leases):
            flow.ack(lease)
    assert flow.in_flight == 0


def test_round_robin_goes_on_past_the_full(clock):
    flow = flow_of(clock, RoundRobin(), limit=2)
    assert "".join(flow.try_acquire().name for _ in range(4)) == "abca"
    b, _ = (flow.try_acquire() for _ in range(2))
    assert flow.try_acquire() is None
    flow.ack(b)
    assert flow.try_acquire().name == "b"


def taught(flow, clock, services):
    """Teach a controller how long each consumer takes, in ms."""
    for _ in range(60):
        leases = []
        while lease := flow.try_acquire():
            leases.append(lease)
        for lease in leases:
            clock.now_ns = lease.sent_ns + services[lease.name] * MS
            flow.ack(lease)
        clock.now_ns += MS


def test_idlest_weighs_load_by_the_root_of_the_service_time(clock):
    flow = flow_of(clock, Idlest(seed=1), "ab", limit=200)
    taught(flow, clock, {"a": 1, "b": 9})
    by_service = {state.name: state.service_s for state in flow.state()}
    assert by_service["b"] > 2 * by_service["a"]
    counts = Counter(flow.try_acquire().name for _ in range(160))
    expected = (by_service["b"] / by_service["a"]) ** 0.5
    assert counts["a"] / counts["b"] == pytest.approx(expected, rel=0.1)


def test_idlest_leaves_the_silent_alone_before_they_time_out(clock):
    flow = flow_of(clock, Idlest(seed=1), "ab", limit=50)
    for _ in range(20):
        for lease in [flow.try_acquire() for _ in range(2)]:
            clock.now_ns += 2 * MS
            flow.ack(lease)
    first = {}
    while len(first) < 2:
        lease = flow.try_acquire()
        first.setdefault(lease.name, lease)
    for _ in range(20):  # b answers, a does not
        clock.now_ns += 2 * MS
        flow.ack(first["b"])
        while (lease := flow.try_acquire()).name != "b":
            pass
        first["b"] = lease
    state = {each.name: each for each in flow.state()}
    assert state["a"].silence_s == pytest.approx(0.04, abs=0.006)
    assert state["b"].silence_s == 0
    before = state["a"].in_flight
    counts = Counter(flow.try_acquire().name for _ in range(3))
    assert counts["b"] == 3, (before, counts)
    flow.ack(first["a"])
    assert next(each for each in flow.state() if each.name == "a").silence_s == 0


def test_a_consumer_that_fails_at_once_is_not_the_idlest(clock):
    flow = flow_of(clock, Idlest(seed=1), "ab", limit=1)
    bad = flow.try_acquire()
    good = flow.try_acquire()
    clock.now_ns += 1000
    flow.fail(bad, again=False)
    clock.now_ns += 5 * MS
    flow.ack(good)
    for _ in range(4):
        if (lease := flow.try_acquire()).name == good.name:
            break
        clock.now_ns += 1000
        flow.fail(lease, again=False)
    assert lease.name == good.name  # though it takes 5 ms


def test_ties_differ_from_producer_to_producer(clock):
    firsts = {flow_of(clock, Idlest(seed=i)).try_acquire().name for i in range(20)}
    assert firsts == set("abc")


def test_by_key_is_always_the_same_and_moves_only_what_must(clock):
    flow = flow_of(clock, ByKey(), "abcd", limit=1000)

    def homes():
        found = {}
        for key in range(400):
            lease = flow.try_acquire(key=key)
            found[key] = lease.name
            flow.ack(lease)
        return found

    before = homes()
    assert min(Counter(before.values()).values()) > 60
    flow.remove("c")
    after = homes()
    assert all(after[key] == name for key, name in before.items() if name != "c")
    flow.add("c")
    assert homes() == before


def test_by_key_keeps_the_order_of_a_key_through_failures(clock):
    flow = flow_of(clock, ByKey(), limit=1000)
    one = flow.try_acquire("first", key="k")
    assert flow.try_acquire("second", key="k") is None
    assert flow.try_acquire("other", key="l") is not None
    flow.fail(one)
    assert flow.try_acquire("second", key="k") is None
    again = flow.try_again()
    assert (again.item, again.key, again.attempt) == ("first", "k", 1)
    assert again.name != one.name
    assert flow.try_acquire("second", key="k") is None
    flow.ack(again)
    assert flow.try_acquire("second", key="k").name == one.name


def test_by_key_lets_the_next_one_go_when_one_is_dropped(clock):
    flow = flow_of(clock, ByKey())
    for end in ("ack", "fail", "drop", "late ack"):
        lease = flow.try_acquire(end, key="k")
        assert lease is not None, end
        if end == "ack":
            flow.ack(lease)
        elif end == "fail":
            flow.fail(lease, again=False)
        else:
            flow.fail(lease)
            flow.drop(lease) if end == "drop" else flow.ack(lease)
    assert flow.try_acquire("last", key="k") is not None


def test_a_chooser_is_one_controllers(clock):
    chooser = Idlest()
    flow_of(clock, chooser)
    with pytest.raises(
        ValueError, match="this chooser belongs to another FlowController; create one for"
    ):
        flow_of(clock, chooser)


def test_by_key_asks_for_a_key(clock):
    with pytest.raises(TypeError, match="the key must not be None: the chooser selects"):
        flow_of(clock, ByKey()).try_acquire("item")


def test_by_key_what_failed_everywhere_does_not_wait_for_the_paused(clock):
    flow = flow_of(clock, ByKey(), "ab", limit=1)
    lease = flow.try_acquire(key=1)
    home, other = lease.name, "ab".replace(lease.name, "")
    flow.pause(home, 3600)
    for _ in range(2):  # the second time it has failed at both
        flow.fail(lease)
        lease = flow.try_again()
        assert lease.name == other


@pytest.mark.parametrize("name", CHOOSERS)
def test_what_failed_goes_elsewhere_while_another_is_open(clock, name):
    flow = flow_of(clock, CHOOSERS[name](), "ab", limit=1)
    lease = flow.try_acquire("x", key=1)
    other = next(n for n in "ab" if n != lease.name)
    flow.fail(lease)
    blocking = flow.try_acquire("y", key=2) or flow.try_acquire("y", key=3)
    if blocking.name != other:
        flow.fail(blocking, again=False, dropped=False)
        blocking = None
    again = flow.try_again()
    if blocking is not None and blocking.name == other:
        assert again is None  # its room is waited for
        flow.ack(blocking)
        again = flow.try_again()
    assert again.name == other
    if name == "by key":
        return  # which waits for the key's own
    flow.fail(again)
    flow.pause(lease.name, 10)
    assert flow.try_again().name == other  # there is no other
