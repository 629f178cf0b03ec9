"""A controller under any sequence of calls, against what must hold of it after each."""

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from round_robin import RoundRobin
from simulated import MS, S, SimClock

from ackcore.flow import ByKey, Fixed, FlowController, RttThreshold
from ackcore.flow.choosers import Idlest
from ackcore.flow.consumers import Fate

LIMITS = {"delay": None, "seed": RttThreshold, "fixed": lambda: Fixed(3)}
CHOOSERS = {"idlest": lambda: Idlest(seed=1), "turn": RoundRobin, "key": ByKey}
KEYS = st.integers(0, 5)


class FlowMachine(RuleBasedStateMachine):
    """Items are numbered as they are acquired; each is in one place, and gets to one end."""

    @initialize(
        limit=st.sampled_from(sorted(LIMITS)),
        chooser=st.sampled_from(sorted(CHOOSERS)),
        cap=st.none() | st.integers(1, 5),
    )
    def start(self, limit, chooser, cap):
        self.clock = SimClock()
        self.flow = FlowController(
            limit=LIMITS[limit],
            chooser=CHOOSERS[chooser](),
            max_pending=cap,
            timeout_s=1,
            clock=self.clock,
        )
        self.cap, self.keyed = cap, chooser == "key"
        self.names, self.count, self.paused_until = set(), 0, {}
        self.out, self.waiting, self.ended, self.old = [], {}, set(), []

    @rule(name=st.integers(0, 4))
    def comes(self, name):
        if name not in self.names:
            self.names.add(name)
            self.flow.add(name)

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def goes(self, data):
        name = data.draw(st.sampled_from(sorted(self.names)))
        self.names.remove(name)
        self.paused_until.pop(name, None)
        theirs = [lease for lease in self.out if lease.name == name]
        assert self.flow.remove(name) == sorted(theirs, key=lambda lease: lease.sent_ns)
        for lease in theirs:
            self.came_back(lease, again=True)

    @rule(key=KEYS)
    def acquires(self, key):
        before = {each.name: each for each in self.flow.state()}
        lease = self.flow.try_acquire(self.count, key)
        if lease is None:
            return
        assert before[lease.name].in_flight < before[lease.name].limit
        assert self.clock.now_ns >= self.paused_until.get(lease.name, 0)
        assert lease.name in self.names
        if self.keyed:
            live = [*self.out, *self.waiting.values()]
            assert key not in {each.key for each in live}
        self.count += 1
        self.out.append(lease)

    @rule()
    def again(self):
        lease = self.flow.try_again()
        if lease is not None:
            before = self.waiting.pop(lease.item)
            assert lease.attempt == before.attempt + 1
            assert before.fate is Fate.SENT_AGAIN
            opened = {each.name for each in self.flow.state() if each.is_open}
            failed_at = [each.name for each in before.failed_at]
            assert failed_at[-1] == before.name
            assert lease.name not in failed_at or opened <= {
                *failed_at[failed_at.index(lease.name) :]
            }
            assert self.clock.now_ns >= before.due_ns
            self.out.append(lease)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), delay_s=st.sampled_from([0.001, 0.5, 5]))
    def delays(self, data, delay_s):
        item = data.draw(st.sampled_from(sorted(self.waiting)))
        assert self.flow.delay(self.waiting[item], delay_s)

    def came_back(self, lease, again):
        self.out.remove(lease)
        self.old.append(lease)
        if again:
            self.waiting[lease.item] = lease
        else:
            self.ended.add(lease.item)

    def drawn(self, data):
        return data.draw(st.sampled_from(self.out))

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def acks(self, data):
        lease = self.drawn(data)
        assert self.flow.ack(lease)
        self.came_back(lease, again=False)

    @precondition(lambda self: self.out)
    @rule(data=st.data(), again=st.booleans())
    def fails(self, data, again):
        lease = self.drawn(data)
        assert self.flow.fail(lease, again=again)
        self.came_back(lease, again)

    @precondition(lambda self: self.old)
    @rule(data=st.data())
    def comes_late(self, data):
        lease = data.draw(st.sampled_from(self.old))
        waited = lease.fate is Fate.REQUEUED
        assert not self.flow.fail(lease)
        assert self.flow.ack(lease) is waited
        if waited:
            self.ended.add(lease.item)
            del self.waiting[lease.item]

    @rule(data=st.data())
    def pauses(self, data):
        if self.names:
            name = data.draw(st.sampled_from(sorted(self.names)))
            pause_s = data.draw(st.sampled_from([0.001, 0.5, 5]))
            self.flow.pause(name, pause_s)
            ends_ns = self.clock.now_ns + int(pause_s * S)
            self.paused_until[name] = max(ends_ns, self.paused_until.get(name, 0))

    @rule(passes=st.integers(0, 2 * S) | st.integers(0, 5 * MS))
    def time_passes(self, passes):
        self.clock.now_ns += passes
        for lease in self.flow.expire():
            assert self.clock.now_ns - lease.sent_ns >= S
            self.came_back(lease, again=True)

    @invariant()
    def counts_balance(self):
        assert self.flow.in_flight == len(self.out)
        assert self.flow.requeued == len(self.waiting)
        if self.cap:
            assert len(self.out) <= self.cap
        states = {each.name: each for each in self.flow.state()}
        assert set(states) == self.names
        for name, state in states.items():
            assert state.in_flight == sum(lease.name == name for lease in self.out)
        places = [each.item for each in self.out] + [*self.waiting] + [*self.ended]
        assert sorted(places) == list(range(self.count))


def test_counts_balance_after_any_calls():
    run_state_machine_as_test(FlowMachine)
