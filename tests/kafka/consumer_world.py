"""A group of consumers, and the logs that change under it: what happens, and what is promised.

All that a `Consumer` has but its threads and its client is the real thing; the client reads a
cluster in memory.  Nothing happens by itself: each step is called, and time is a number.
"""

import re
from collections import deque
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError, KafkaException
from fake_cluster import At, FakeClient, FakeCluster

from ackcore.kafka.client_settings import ClientSettings
from ackcore.kafka.commit_metadata import CommitOrigin
from ackcore.kafka.consumer import client_thread, consumer_starts, partition_reading, topic_watch
from ackcore.kafka.consumer.client_thread import ClientThread
from ackcore.kafka.consumer.consumer_letters import PendingLetters
from ackcore.kafka.consumer.consumer_records import Failure
from ackcore.kafka.consumer.consumer_settings import ConsumerSettings
from ackcore.kafka.consumer.held_partition import DYING, FRESH, OUT
from ackcore.kafka.consumer.held_records import HeldRecords
from ackcore.kafka.kafka_errors import OffsetsOutOfRange
from ackcore.offsets import decode_metadata

NO = Failure("ValueError", "no")
TOPIC = "t"
#: Longer than any time-out, back-off and refresh.
LONG_MS = 20_000
#: Records of a partition.
MOST_OUT = 3
MAX_ATTEMPTS = 2
_NAMED = re.compile(r"(\d+)(?: to (\d+))?[, ]")


class AtOnce:
    """A thread that has run when it is started."""

    def __init__(self, target, name, daemon):
        self.start = target


class Changed:
    """A condition for one thread."""

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def wait(self, timeout):
        pass

    def notify_all(self):
        pass


class Noticed(dict):
    """Says when a partition's log is known to be another one, and from where."""

    def __init__(self, notice):
        self._notice = notice

    def __setitem__(self, key, offset):
        self._notice(key, offset)
        super().__setitem__(key, offset)


def claims(at):
    """Return the offsets that a commit calls done, as a predicate, and one above the last."""
    state = decode_metadata(at.topic, at.partition, at.offset, at.metadata).state
    holes = set()
    for start, end in zip(state.hole_starts.tolist(), state.hole_ends.tolist(), strict=True):
        holes |= set(range(start, end))
    return (lambda offset: offset < state.end and offset not in holes), state.end


class Member:
    """A process with a consumer."""

    def __init__(self, world, protocol, policy, start):
        by_hand = protocol == "tasks"
        settings = ConsumerSettings(
            *(ClientSettings("x"), "g", (TOPIC,), ()),
            protocol="eager" if by_hand else protocol,
            tasks=1 if by_hand else None,
            task=0 if by_hand else None,
            **{"start": start, "out_of_range": policy, "dead_letters": print},
            **{"max_attempts": MAX_ATTEMPTS, "backoff_s": 0.01, "timeout_s": 5.0},
            **{"commit_interval_s": 0.02, "drain_s": 0, "refresh_s": 1.0},
            **{"max_in_flight": MOST_OUT, "max_waiting": 4},
        )
        self.policy, self.by_hand, self.fenced = policy, by_hand, False
        self.belief = {}  # by partition: which log it reads, as far as it can know
        self.knows = {}  # how many partitions a topic had, by its id, when it was asked for first
        self.history = []
        world.making = self
        limits = settings.limits._replace(ahead=5)
        self.held = HeldRecords(
            settings.policy, limits=limits, timeout_ms=5000, ordered_by=world.ordered_by
        )
        # It is never started: its steps are called one by one.
        self.thread = ClientThread(settings, self.held, Changed(), object)
        self.client = self.thread._client
        self.reading = self.thread._reading
        self.reading._other_logs = Noticed(lambda *noticed: world.noticed(self, *noticed))
        self.letters = []

    def behind(self, record, ordered_by):
        """Return the records of a record's order that are held, with smaller offsets."""
        found = self.held._partitions[record.topic, record.partition]
        return [
            each.record
            for offset, each in found.held.items()
            if offset < record.offset and offset not in found.lost
            if ordered_by == "partition"
            or (ordered_by == "key" and each.record.key == record.key is not None)
        ]

    def is_out(self, record):
        found = self.held._partitions.get((record.topic, record.partition))
        held = None if found is None else found.held.get(record.offset)
        return (
            held is not None
            and found.generation == record.generation
            and held.status == OUT
            and held.delivery == record.delivery
        )


class Keeper:
    """Keeps dead letters when it is told to."""

    def __init__(self, member):
        self._member = member

    def store(self, letter, report):
        self._member.letters.append((letter, report))

    def poll(self):
        pass

    def close(self):
        pass


class World:
    """A cluster, a group and its members, and what has become of each record."""

    def __init__(self, protocol, has_ids, policy, start, metadata_limit, ordered_by=None):
        self.cluster = FakeCluster(has_ids=has_ids, metadata_limit=metadata_limit)
        self.cluster.create(TOPIC, 2)
        self.how = protocol, policy, start
        self.ordered_by = ordered_by
        self.now = 1000
        self.ended = set()  # numbers of records that were acked, or have a dead letter
        self.excused = {}  # offsets by a log's version, of records that nobody has to read
        self.ahead = set()  # partitions of which more may be taken for done than there is
        self.faults = deque()
        self.slow = False
        self.on_the_way = []  # commits
        self.owner = {}
        self.read_by = {}  # by partition: which log is meant by what is committed of it
        self.making = None

    def begin(self):
        self.members = [Member(self, *self.how)]
        self.members[0].thread._subscribe()
        if not self.members[0].by_hand:
            self.members.append(Member(self, *self.how))
            self.members[1].thread._subscribe()
            self.owner = {key: self.members[key[1] % 2] for key in self.cluster.logs}
        self.rebalance()

    # What the modules are given.

    def make_client(self, settings, on_commit):
        client = FakeClient(self.cluster, on_commit, self.commit)
        client.member = self.making
        return client

    def asked(self, settings):
        member = self.making

        def partitions(*arguments, **options):
            found = self.cluster.partitions(*arguments, **options)
            for each in found:
                member.knows.setdefault(each.topic_id, len(found))
            return found

        def watermarks(keys, positions):
            return {
                key: (self.cluster.logs[key].start, self.cluster.logs[key].end) for key in keys
            }, {}

        return SimpleNamespace(partitions=partitions, watermarks=watermarks, close=lambda: None)

    def truncations(self, settings, asked, timeout_s):
        if asked and self.faults and self.faults[0] == "nobody says":
            self.faults.popleft()
            self.silent = True
            raise ConnectionError("nobody says")
        found = {key: self.cluster.logs[key].truncated_at(*of) for key, of in asked.items()}
        return {key: offset for key, offset in found.items() if offset is not None}

    def began(self, client, settings, partitions, *arguments):
        """See `begin`, and the facts that a member can know of the logs that it begins to read."""
        begun = self.begin_partitions(client, settings, partitions, *arguments)
        for each in begun:
            log = self.cluster.logs[each.key]
            at, version = self.cluster.committed.get(each.key), self.read_by.get(each.key)
            client.member.belief[each.key] = log.version
            if each.committed and version != log.version:
                says, end = claims(at)
                if end <= log.end:  # between two runs nobody sees that it is another log
                    self.excuse(each.key, filter(says, range(end)))
                else:
                    client.member.belief[each.key] = version
            elif settings.on_out_of_range == "latest" and at and claims(at)[1] > log.end:
                self.excuse(each.key, log.there())
            elif settings.start == "latest" and at is None and self.may_begin_at_end(client, each):
                self.excuse(each.key, range(each.restored.state.committable))
        return begun

    def may_begin_at_end(self, client, begun):
        """Whether nobody can say that a partition, or its topic, is new."""
        knows, now = client.member.knows, self.cluster.ids[TOPIC]
        if not self.cluster.has_ids:
            return True
        return not set(knows) - {now} and begun.key[1] < knows.get(now, 99)

    # What is promised.

    def excuse(self, key, offsets):
        self.excused.setdefault(self.cluster.logs[key].version, set()).update(offsets)

    def left(self, key, offsets):
        """Those of offsets whose records have neither ended nor are excused."""
        log = self.cluster.logs[key]
        excused = self.excused.get(log.version, ())
        return [
            offset
            for offset in offsets
            if log.records[offset][0] not in self.ended and offset not in excused
        ]

    def noticed(self, member, key, offset):
        log = self.cluster.logs[key]
        member.belief[key] = log.version
        if member.policy == "latest" and offset == log.end:
            self.excuse(key, range(log.end))

    def hold_to(self, member, at):
        """Check that offsets which a commit calls done are done in the log that is there."""
        key = at.topic, at.partition
        log = self.cluster.logs[key]
        named = CommitOrigin.read(decode_metadata(*key, at.offset, at.metadata).deployment)
        if self.cluster.has_ids and named.is_other_topic(
            CommitOrigin.of(self.cluster.ids[TOPIC], None)
        ):
            return
        if member.belief.get(key) == log.version:
            says, _ = claims(at)
            left = self.left(key, filter(says, log.there()))
            assert not left, f"{key}: {left} are not done, and {at} says so"

    # Commits.

    def commit(self, client, offsets, asynchronous):
        sent = [At(at.topic, at.partition, at.offset, at.metadata) for at in offsets]
        for at in sent:
            self.hold_to(client.member, at)
        tags = [client.member.belief.get((at.topic, at.partition)) for at in sent]
        if asynchronous:
            self.on_the_way.append((client.member, sent, tags))
            if not self.slow:
                self.arrive()
            return None
        self.arrive()
        error, answer = self.take(client.member, sent, tags)
        if error is not None:
            raise KafkaException(error)
        return answer

    def arrive(self):
        while self.on_the_way:
            member, sent, tags = self.on_the_way.pop(0)
            member.client.answer(*self.take(member, sent, tags))

    def take(self, member, sent, tags):
        """Return the coordinator's answer to a commit."""
        fault = self.faults.popleft() if self.faults else ""
        keys = [(at.topic, at.partition) for at in sent]
        if member.fenced or any(self.owner.get(key, member) is not member for key in keys):
            return KafkaError(KafkaError.ILLEGAL_GENERATION), sent
        if fault == "refused":
            return KafkaError(KafkaError.COORDINATOR_LOAD_IN_PROGRESS), sent
        answer = []
        for key, at, tag in zip(keys, sent, tags, strict=True):
            if len(at.metadata) > self.cluster.metadata_limit:
                error = KafkaError(KafkaError.OFFSET_METADATA_TOO_LARGE)
                answer.append(At(*key, at.offset, error=error))
                continue
            answer.append(at)
            if key in self.cluster.logs:
                self.cluster.committed[key], self.read_by[key] = at, tag
        return (KafkaError(KafkaError._TIMED_OUT) if fault == "lost" else None), answer

    # The group.

    def turn(self, member):
        self.now += 1
        self.silent = False
        try:
            member.thread._turn()
        except OffsetsOutOfRange as error:
            if member.policy != "fail":
                raise
            self.end(member, error)
            return
        assert member.thread.error is None, member.thread.error

    def rebalance(self):
        """Each partition is taken from who has it no more, and then given to who is to have it."""
        before = list(self.members)
        if not before[0].by_hand:
            for member in before:
                self.revoke(member)
        for member in before:
            if member in self.members:
                self.turn(member)

    def revoke(self, member):
        client, eager = member.client, self.how[0] == "eager"
        wanted = [key for key, owner in self.owner.items() if owner is member]
        gone = [key for key in client.fetches if eager or key not in wanted]

        def revoked():
            if gone:
                client.on_revoke(client, [At(*key) for key in gone])
                for key in gone:
                    client.incremental_unassign([At(*key)] if key in client.fetches else [])

        def assigned():
            new = [key for key in wanted if key not in client.fetches]
            if new:
                client.on_assign(client, [At(*key) for key in new])

        revoked()
        client.events.append(assigned)

    def crash(self, member, policy=None):
        """It is gone, and what it had is given to a new one."""
        protocol, was, start = self.how
        self.on_the_way = [each for each in self.on_the_way if each[0] is not member]
        policy = policy or was
        new = Member(self, protocol, policy, start)
        self.members[self.members.index(member)] = new
        self.owner = {key: new if owner is member else owner for key, owner in self.owner.items()}
        try:
            new.thread._subscribe()
        except OffsetsOutOfRange as error:
            self.end(new, error)
            return
        self.rebalance()

    def end(self, member, error):
        """It ends by itself, and is told to go on when it is started again."""
        (partition,) = re.findall(rf"{TOPIC}-(\d+)", str(error))
        key = TOPIC, int(partition)
        fetch, begun = member.client.fetches.get(key), member.reading._begun.get(key)
        if fetch and fetch.read and begun and begun.topic_id and not self.silent:
            member.belief[key] = self.cluster.logs[key].version  # it is noticed
        member.thread._set_error(error)
        member.thread._end()
        self.how = self.how[0], "earliest", self.how[2]
        self.crash(member)

    # Steps: (name, a, b).

    def key(self, a):
        keys = sorted(self.cluster.logs)
        return keys[a % len(keys)]

    def member(self, a):
        return self.members[a % len(self.members)]

    def do_produce(self, a, b):
        self.cluster.produce(self.key(a), 1 + b % 4)

    def do_turn(self, a, b):
        self.turn(self.member(a))

    def do_work(self, a, b):
        """Records are read, taken and acked, but the first."""
        member = self.member(a)
        self.turn(member)
        self.do_take(a, b)
        for record in member.history[-3:][b % 3 :]:
            self.ack(member, record)

    def do_take(self, a, b):
        member, most = self.member(a), 1 + b % 5
        taken = member.held.take(most, self.now)
        for record in taken:
            same = [one for one in member.history if one.value == record.value]
            assert not any(map(member.is_out, same)), f"{record} is out already"
            assert not member.behind(record, self.ordered_by), f"{record} is not the next one"
            assert record.attempt < MAX_ATTEMPTS
            member.history.append(record)
        for one in member.held.partition_stats(self.now, {}):
            held = member.held._partitions[one.topic, one.partition].held
            assert one.out <= MOST_OUT
            assert one.fresh + one.out + one.waiting + one.dying == len(held)
        if len(taken) < most:
            self.hold_to_rest(member)

    def hold_to_rest(self, member):
        """Check that `take` left no record for which there is room."""
        assert member.held.due_in_ms(self.now) != 0
        for found in member.held._partitions.values():
            if found.numbers[OUT] + found.numbers[DYING] < MOST_OUT and not found.closing:
                for each in found.held.values():
                    ready = each.status == FRESH and not member.behind(each.record, self.ordered_by)
                    assert not ready, f"{each.record} is not delivered"

    def ack(self, member, record):
        was_out = member.is_out(record)
        if member.held.ack(record):
            self.ended.add(int(record.value))
        else:
            assert not was_out, f"the first answer to {record} does not count"

    def picked(self, a, b):
        member = self.member(a)
        return member, member.history[-1 - b : len(member.history) - b]

    def do_ack(self, a, b):
        member, records = self.picked(a, b)
        for record in records:
            self.ack(member, record)

    def do_fail(self, a, b):
        member, records = self.picked(a, b)
        for record in records:
            was_out = member.is_out(record)
            how = {"final": a % 3 == 0, "counts": a % 4 != 1}
            assert member.held.fail(record, NO, self.now, **how) == was_out, f"{record} fails"

    def do_pass_time(self, a, b):
        self.now += (10, 100, 1000, 6000)[a % 4]

    def do_keep(self, a, b):
        """Letters are kept, or not."""
        for member in self.members:
            while member.letters:
                self.keep(*member.letters.pop(0), None if b % 3 else "the disk is full")

    def keep(self, letter, report, error):
        record = letter.record
        if error is None and record.value is not None:
            self.ended.add(int(record.value))
        elif error is None:
            log = self.cluster.logs[record.topic, record.partition]
            for first, last in _NAMED.findall(letter.failure.message):
                offsets = range(int(first), int(last or first) + 1)
                self.ended |= {log.records[each][0] for each in offsets if each < log.end}
        report(letter, error)

    def do_make_anew(self, a, b):
        """A topic is made anew, and has become longer than the one before, or not."""
        before = {key: self.reached(key) for key in self.cluster.logs}
        self.cluster.create(TOPIC, len(before))
        for key, reached in before.items():
            self.cluster.produce(key, b)
            if self.nobody_knows_id(key):
                self.excuse(key, range(reached))
                self.ahead.add(key)
        if a % 2:
            self.cluster.committed = {}

    def nobody_knows_id(self, key):
        """Whether nobody can say that its topic is another one."""
        if not self.cluster.has_ids:
            return True
        begun = [member.reading._begun.get(key) for member in self.members]
        return any(each and not each.origin.topic for each in begun)

    def reached(self, key):
        """Up to where somebody has read, or says so."""
        committed = self.cluster.committed.get(key)
        found = [0 if committed is None else claims(committed)[1]]
        for member in self.members:
            found.append(member.client.fetched(key))
            if (held := member.held._partitions.get(key)) is not None:
                found += [held.tracker.position, held.tracker.state().end]
        return max(found)

    def do_truncate(self, a, b):
        key = self.key(a)
        log = self.cluster.logs[key]
        at = max(log.start, log.end - 1 - a)
        if at >= log.end:
            return
        kept = {
            offset
            for offset in self.excused.get(log.version, ())
            if offset < at or not self.cluster.has_ids
        }
        self.cluster.truncate(key, at)
        self.excuse(key, kept)
        for member in self.members:
            found = member.held._partitions.get(key)
            if found is None:
                continue
            end = found.tracker.state().end
            fetch = member.client.fetches.get(key)
            # Nothing was read of it since it was assigned, or sought in.
            if fetch is None or fetch.read is None or found.sought:
                self.excuse(key, range(at, max(end, found.tracker.position)))
            elif end > found.tracker.position:
                # What was done before this run is taken for done.
                self.ahead.add(key)
                self.excuse(key, range(max(at, found.tracker.position), end))
        self.cluster.produce(key, max(0, b - 3))

    def do_delete(self, a, b):
        log = self.cluster.logs[self.key(a)]
        log.start = min(log.end, log.start + b)

    def do_add_partition(self, a, b):
        if len(self.cluster.logs) < 4:
            key = self.cluster.add_partition(TOPIC)
            self.cluster.produce(key, b)
            if not self.members[0].by_hand:
                for member in self.members:
                    self.turn(member)
                self.owner[key] = self.member(a)
                self.rebalance()

    def do_fault(self, a, b):
        self.faults.append(("refused", "lost", "nobody says")[a % 3])

    def do_hide(self, a, b):
        self.cluster.hidden = a % 3

    def do_slow(self, a, b):
        self.slow = not self.slow
        if not self.slow:
            self.arrive()

    def do_move(self, a, b):
        if not self.members[0].by_hand:
            self.owner[self.key(a)] = self.member(b)
            self.rebalance()

    def do_lose(self, a, b):
        """The group takes a member for dead, and it comes back."""
        member = self.member(a)
        keys = [key for key, owner in self.owner.items() if owner is member]
        if member.by_hand or not keys:
            return
        member.fenced = True
        self.arrive()
        member.fenced = False
        member.client.on_lost(member.client, [At(*key) for key in keys])
        member.client.assign([])
        self.rebalance()

    def do_seek(self, a, b):
        """Seek: offsets below it need not be read, and all from there on are read again."""
        member, key = self.member(a), self.key(a)
        log = self.cluster.logs[key]
        offset = min(log.start + b, log.end)
        found = member.held._partitions.get(key)
        assert member.held.seek(key, offset) == (found is not None)
        if found is not None:
            self.excuse(key, range(offset))

    def do_crash(self, a, b):
        self.crash(self.member(a))

    # At rest.

    def finish(self):
        """All goes well from now on: each record is read, and there is no lag."""
        self.faults.clear()
        self.cluster.hidden, self.slow = 0, False
        self.arrive()
        for _ in range(60):
            self.now += LONG_MS
            for member in list(self.members):
                if member not in self.members:
                    continue
                self.turn(member)
                if member not in self.members:  # it has ended
                    continue
                for record in member.history:
                    self.ack(member, record)
                self.do_take(self.members.index(member), 4)
                for record in member.history[-5:]:
                    self.ack(member, record)
            self.do_keep(0, 1)
        for key, log in self.cluster.logs.items():
            assert not self.left(key, log.there()), f"{key} of {log}"
            at = self.cluster.committed.get(key)
            if at is not None or self.cluster.has_ids:  # else a broker dropped it, with a topic
                assert at.offset == log.end or key in self.ahead, f"{key}: {at} of {log}"


@contextmanager
def world_of(*arguments):
    world = World(*arguments)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client_thread, "make_client", world.make_client)
        patch.setattr(client_thread, "now_ms", lambda: world.now)
        patch.setattr(client_thread, "_LEAVE_S", 0.0)
        patch.setattr(client_thread, "wait_until_known", lambda *_: True)
        patch.setattr(
            client_thread, "dead_letters_of", lambda settings: PendingLetters(Keeper(world.making))
        )
        world.begin_partitions = client_thread.decide_starts
        patch.setattr(client_thread, "decide_starts", world.began)
        patch.setattr(partition_reading, "now_ms", lambda: world.now)
        patch.setattr(partition_reading, "truncations", world.truncations)
        # By the clock, of which all have one and the same.
        clock = SimpleNamespace(time_ns=lambda: world.now * 1_000_000)
        patch.setattr(partition_reading, "time", clock)
        patch.setattr(topic_watch, "Cluster", world.asked)
        patch.setattr(consumer_starts, "Cluster", world.asked)
        lock = topic_watch.threading.Lock
        patch.setattr(topic_watch, "threading", SimpleNamespace(Thread=AtOnce, Lock=lock))
        world.begin()
        yield world
