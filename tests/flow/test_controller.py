"""Acquired tuples return once, failed ones go elsewhere, and silence and time count."""

import numpy as np
import pytest
from round_robin import RoundRobin
from simulated import MS, S, SimClock

from ackcore.flow import Batch, ByKey, DelayTarget, Fixed, FlowController, RttThreshold
from ackcore.flow.consumers import Fate


@pytest.fixture
def clock():
    return SimClock()


@pytest.fixture
def flow(clock):
    return FlowController(
        "abc", limit=lambda: Fixed(2), chooser=RoundRobin(), timeout_s=5, clock=clock
    )


def state(flow, name):
    return next(each for each in flow.state() if each.name == name)


def test_a_lease_comes_back_once(flow):
    lease = flow.try_acquire("item")
    assert (lease.item, lease.name, lease.attempt, lease.fate) == ("item", "a", 0, Fate.OUT)
    assert flow.in_flight == 1
    assert flow.ack(lease)
    assert not flow.ack(lease)
    assert not flow.fail(lease)
    assert not flow.drop(lease)
    assert (flow.in_flight, flow.requeued) == (0, 0)
    assert state(flow, "a").acked == 1


def test_answered_tuples_are_not_kept_behind_a_slow_one(clock):
    flow = FlowController("a", limit=lambda: Fixed(2), timeout_s=3600, clock=clock)
    slow = flow.try_acquire("slow")
    sent = flow._windows.consumers["a"]
    for n in range(1000):
        flow.ack(flow.try_acquire(n))
        clock.now_ns += 3 * MS
        assert len(sent.sent) < 80
    clock.now_ns += 3600 * S
    assert flow.expire() == [slow]


@pytest.mark.parametrize(("consumers", "sweeps"), [(2, 100), (100, 100), (1000, 10), (10_000, 1)])
def test_a_tuple_costs_no_look_at_all_consumers(clock, consumers, sweeps):
    """Such a look takes milliseconds if there are thousands: then it must be due more seldom."""
    flow = FlowController(range(consumers), limit=lambda: Fixed(2), clock=clock)
    looks, sweep = [], flow._windows._sweep
    flow._windows._sweep = lambda now: looks.append(now) or sweep(now)
    for n in range(100):
        clock.now_ns += 2 * MS
        flow.ack(flow.try_acquire(n))
    assert len(looks) == sweeps


def test_one_that_left_and_came_back_is_not_another(clock):
    flow = FlowController("a", limit=lambda: Fixed(2), clock=clock)
    lease = flow.try_acquire("item")
    flow.add("b")
    flow.remove("a")
    flow.add("a")
    assert (lease.fate, flow.try_again().name) == (Fate.REQUEUED, "b")


def test_what_failed_goes_to_another_in_the_order_of_failing(flow):
    leases = [flow.try_acquire(i) for i in range(3)]
    assert flow.try_again() is None
    flow.fail(leases[1])
    flow.fail(leases[0])
    assert (flow.requeued, flow.in_flight) == (2, 1)
    first, second = flow.try_again(), flow.try_again()
    assert [(each.item, each.attempt) for each in (first, second)] == [(1, 1), (0, 1)]
    assert first.name != "b"
    assert second.name != "a"
    assert flow.try_again() is None
    assert leases[0].fate is Fate.SENT_AGAIN
    assert state(flow, "b").failed == state(flow, "a").failed == 1


def test_time_outs_are_found_and_requeued(flow, clock):
    leases = [flow.try_acquire(i) for i in range(3)]
    clock.now_ns += 4 * S
    younger = flow.try_acquire(3)
    flow.ack(leases[1])
    clock.now_ns += S - 1
    assert flow.expire() == []
    clock.now_ns += 1
    assert flow.expire() == [leases[0], leases[2]]
    assert younger.fate is Fate.OUT
    assert (flow.in_flight, flow.requeued) == (1, 2)


def test_who_leaves_leaves_nothing_behind(flow):
    leases = [flow.try_acquire(i) for i in range(6)]
    assert flow.try_acquire() is None
    assert flow.remove("b") == [leases[1], leases[4]]
    assert [each.name for each in flow.state()] == ["a", "c"]
    assert (flow.in_flight, flow.requeued) == (4, 2)
    assert flow.ack(leases[1])  # it lived long enough after all
    flow.add("d")
    assert flow.try_again().name == "d"
    with pytest.raises(
        KeyError, match="no consumer has the name 'b'; the consumers are 'a', 'c', 'd'"
    ):
        flow.remove("b")
    with pytest.raises(ValueError, match="consumer 'd' exists already"):
        flow.add("d")


def test_a_pause_ends_by_itself(flow, clock):
    flow.pause("a", 2)
    flow.pause("a", 0.5)  # shortens nothing
    assert {flow.try_acquire().name for _ in range(4)} == {"b", "c"}
    assert flow.try_acquire() is None
    clock.now_ns += 2 * S - 1
    assert flow.try_acquire() is None
    clock.now_ns += 10 * MS  # within a sweep
    assert flow.try_acquire().name == "a"


def test_what_cannot_be_sent_again_yet_moves_no_turn(clock):
    limit = 1

    def three(**arguments):
        return FlowController(
            "abc", limit=lambda: Fixed(limit), chooser=RoundRobin(), clock=clock, **arguments
        )

    flow = three()  # there is room where it failed, and elsewhere not
    first, second, _ = (flow.try_acquire(i) for i in range(3))
    flow.fail(first)
    assert flow.try_again() is None
    flow.ack(second)
    assert flow.try_acquire("new").name == "a"

    limit = 5  # there is room, and max_pending is reached
    flow = three(max_pending=2)
    flow.fail(flow.try_acquire(0))
    leases = [flow.try_acquire(i) for i in (1, 2)]
    assert flow.try_again() is None
    flow.ack(leases[0])
    assert flow.try_acquire("new").name == "a"


def test_dropped_for_good(flow):
    lease = flow.try_acquire("x")
    assert flow.fail(lease, again=False)
    assert lease.fate is Fate.DROPPED
    lease = flow.try_acquire("y")
    flow.fail(lease)
    assert flow.drop(lease)
    assert flow.try_again() is None
    assert (flow.requeued, flow.in_flight) == (0, 0)


def test_what_failed_waits_for_its_delay_and_may_be_acked_or_split_meanwhile(flow, clock):
    for end in ("due", "late ack", "split"):
        lease = flow.try_acquire(Batch([1, 2]))
        flow.fail(lease)
        parts = flow.split(lease, lease.item.singles()) if end == "split" else [lease]
        assert all(flow.delay(part, 1) for part in parts)
        clock.now_ns += S - 1
        assert (flow.try_again(), flow.requeued) == (None, len(parts))
        if end == "late ack":
            assert flow.ack(lease)
        clock.now_ns += 1
        again = [flow.try_again() for _ in parts]
        if end == "late ack":
            assert (again, flow.requeued) == ([None], 0)
            continue
        assert [list(each.item) for each in again] == ([[1], [2]] if end == "split" else [[1, 2]])
        assert all(each.name != lease.name for each in again)
        assert (flow.requeued, flow.in_flight) == (0, len(again))
        assert all(flow.ack(each) for each in again)
    assert not flow.delay(lease, 1)
    assert not flow.split(lease, [1])
    with pytest.raises(ValueError, match="delay_s must be above 0"):
        flow.delay(lease, 0)


def test_the_last_delay_counts(flow, clock):
    for first, second in ((100, 1), (1, 3)):
        lease = flow.try_acquire(1)
        flow.fail(lease)
        flow.delay(lease, first)
        assert flow.try_again() is None
        flow.delay(lease, second)
        clock.now_ns += second * S - 1
        assert flow.try_again() is None
        clock.now_ns += 1
        again = flow.try_again()
        assert again.attempt == 1
        flow.ack(again)
    clock.now_ns += 100 * S
    assert (flow.try_again(), flow.requeued) == (None, 0)


def test_a_time_out_runs_from_when_the_consumer_begins(clock):
    flow = FlowController("a", limit=lambda: Fixed(2), clock=clock, timeout_s=1)
    first, second = flow.try_acquire(1), flow.try_acquire(2)
    clock.now_ns += S // 2
    flow.begin(first)
    clock.now_ns += S // 2
    assert flow.expire() == [second]  # the consumer has not begun it
    clock.now_ns += S // 2
    assert flow.expire() == [first]


def test_a_pause_may_end_early(flow):
    flow.pause("a", 3600)
    assert not state(flow, "a").is_open
    flow.resume("a")
    assert state(flow, "a").is_open
    with pytest.raises(KeyError, match="no consumer has the name 'z'"):
        flow.resume("z")


def test_only_what_failed_of_a_batch_is_sent_again(flow):
    batch = Batch([f"r{i}" for i in range(10)])
    lease = flow.try_acquire(batch)
    failed = np.zeros(10, bool)
    failed[[3, 7]] = True
    assert flow.fail(lease, failed)
    again = flow.try_again()
    assert list(again.item) == ["r3", "r7"]
    assert again.name != lease.name
    flow.fail(again, b"\x02")
    third = flow.try_again()
    assert (list(third.item), third.attempt) == (["r7"], 2)
    with pytest.raises(ValueError, match="failed= names no record"):
        flow.fail(third, b"\x00")
    with pytest.raises(ValueError, match="must have 1 bytes"):
        flow.fail(third, b"\x00\x01")
    with pytest.raises(TypeError, match="got int64; rows by number"):
        flow.fail(third, [0])
    assert flow.ack(third)
    with pytest.raises(TypeError, match="lease's item is int; omit failed="):
        flow.fail(flow.try_acquire(1), b"\x01")


def test_a_batch_that_failed_in_part_is_no_sign_of_load(clock):
    flow = FlowController("a", limit=lambda: RttThreshold(initial=4), clock=clock)
    flow.fail(flow.try_acquire(Batch([1, 2])), b"\x01")
    assert state(flow, "a").limit == 4
    flow.fail(flow.try_acquire(Batch([1, 2])), b"\x03")
    assert state(flow, "a").limit == 3
    flow.fail(flow.try_acquire("no consumer takes it"), dropped=False, again=False)
    assert state(flow, "a").limit == 3


def test_a_consumer_that_failed_is_tried_again_some_time(clock):
    """With others idle it is not chosen for its failures, and would stay unchosen for ever."""
    flow = FlowController("ab", clock=clock, timeout_s=1)
    tried = []
    for _ in range(4000):
        clock.now_ns += 10 * MS
        flow.expire()
        lease = flow.try_again() or flow.try_acquire()
        if lease.name == "a" and clock.now_ns < 20 * S:
            continue  # dead: nothing comes back
        tried.append((lease.name, clock.now_ns))
        clock.now_ns += 5 * MS
        flow.ack(lease)
    assert state(flow, "a").timed_out < 10 < 1000 < sum(at < 20 * S for _, at in tried)
    assert [name for name, at in tried if at > 40 * S].count("a") > 10
    assert state(flow, "a").service_s == pytest.approx(0.005, rel=0.2)


def test_states_are_readable(clock):
    flow = FlowController(["a"], clock=clock)
    assert state(flow, "a") == ("a", 0, 2, True, 0.0, 0.0, 0.0, 0, 0, 0)
    lease = flow.try_acquire()
    clock.now_ns += 60 * MS
    flow.ack(lease)
    assert state(flow, "a") == ("a", 0, 2, True, 0.06, 0.06, 0.0, 1, 0, 0)
    assert repr(flow) == "FlowController(1 consumers, in_flight=0, requeued=0)"
    assert repr(lease) == "Lease('a', attempt=0, acked)"


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"limit": Fixed(3)}, TypeError, "limit must be callable, got Fixed; each consumer has"),
        ({"clock": 5}, TypeError, "clock must be a callable that returns nanoseconds, got int"),
        ({"chooser": "idlest"}, TypeError, "chooser must be a Chooser, got str; pass an instance"),
        ({"chooser": ByKey}, TypeError, "chooser must be a Chooser, got type; pass an instance"),
        ({"max_pending": 0}, ValueError, "max_pending"),
        ({"timeout_s": 0}, ValueError, "timeout_s must be above 0"),
        ({"timeout_s": "1"}, TypeError, "timeout_s must be a number of seconds, got str"),
        (
            {"limit": object},
            TypeError,
            "limit must return an object with limit and on_sample, such",
        ),
        ({"consumers": "aa"}, ValueError, "consumer 'a' exists already"),
    ],
)
def test_bad_settings_are_named(arguments, error, says):
    with pytest.raises(error) as caught:
        FlowController(**{"consumers": "ab", **arguments})
    assert says in str(caught.value)


def test_a_batch_says_what_is_wrong_with_it():
    with pytest.raises(ValueError, match="records must not be empty"):
        Batch([])
    batch = Batch(np.arange(9))
    with pytest.raises(
        ValueError, match=r"must have 2 bytes and no bit beyond them, got 2.* 1 .*little"
    ):
        batch.failed(b"\x00\x02")
    with pytest.raises(ValueError, match=r"each of the batch.s 9 records, got shape \(3,\)"):
        batch.failed([True] * 3)
    bits = np.arange(9) % 4 == 0
    np.testing.assert_array_equal(
        batch.failed(np.packbits(bits, bitorder="little").tobytes()), bits
    )
    np.testing.assert_array_equal(batch.failed(np.packbits(bits, bitorder="little")), bits)
    with pytest.raises(
        TypeError, match=r"must be bytes \(numpy.packbits\(failed, bitorder='little'"
    ):
        batch.failed([0, 3])
    with pytest.raises(ValueError, match="must have 2 bytes and no bit beyond them, got 9"):
        batch.failed(bits.astype(np.uint8))
    only = batch.only(bits)
    assert only.records.tolist() == [0, 4, 8]
    assert [list(single) for single in only.singles()] == [[0], [4], [8]]
    assert (only[1], len(only), repr(only)) == (4, 3, "Batch(3 records)")


def test_the_default_is_a_delay_target_on_the_controllers_clock(clock):
    flow = FlowController("a", clock=clock)
    consumer = flow._windows.consumers["a"]
    assert type(consumer.limit) is DelayTarget
    assert consumer.limit._clock is clock
    assert consumer.service is consumer.limit


@pytest.mark.parametrize("allowed", [0, -1, 0.5, float("nan"), None, "9"])
@pytest.mark.parametrize("end", ["start", "ack", "fail", "expire"])
def test_a_limit_that_allows_no_tuple_is_an_error(clock, end, allowed):
    """Nothing would be sent, and so the limit would have no other sample."""

    class Shut:
        limit = allowed if end == "start" else np.int64(1)

        def on_sample(self, rtt_ns, in_flight, dropped):
            self.limit = allowed

    def run():
        flow = FlowController("a", limit=Shut, timeout_s=5, clock=clock)
        lease = flow.try_acquire()
        clock.now_ns += 6 * S
        getattr(flow, end)(*([] if end == "expire" else [lease]))

    with pytest.raises(ValueError, match=r"^Shut\.limit must be a number of at least 1, got"):
        run()


def test_a_wait_for_room_looks_at_the_oldest_tuple_of_a_consumer(clock):
    flow = FlowController("a", limit=lambda: Fixed(500), timeout_s=5, clock=clock)
    first, *_ = (flow.try_acquire(n) for n in range(500))
    looks, ends_ns = [], flow._windows._ends_ns
    flow._windows._ends_ns = lambda lease: looks.append(lease) or ends_ns(lease)
    assert (flow._windows.due_ns(), looks) == (5 * S, [first])
    clock.now_ns += S
    flow.begin(first)  # those behind it now time out before it
    assert flow._windows.due_ns() == 4 * S


@pytest.mark.parametrize("chooser", [RoundRobin, ByKey])
def test_without_room_one_requeued_item_is_looked_at(clock, chooser):
    """Otherwise each answer of a `Dispatcher` would take 20 µs for each item that waits."""
    flow = FlowController("ab", limit=lambda: Fixed(9), chooser=chooser(), clock=clock)
    for lease in [flow.try_acquire(n, key=n) for n in range(8)]:
        flow.fail(lease)
    flow.pause("a", 5)
    flow.pause("b", 5)
    looks, lease = [], flow._windows.lease
    flow._windows.lease = lambda item, *args: looks.append(item) or lease(item, *args)
    assert (flow.try_again(), looks) == (None, [0])
    flow.resume("b")
    assert [flow.try_again().item for _ in range(8)] == [*range(8)]
