"""Plans of a spout that reads Kafka, and its group's commits: without a Kafka."""

from __future__ import annotations

import asyncio
import json
import pickle
from decimal import Decimal
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("confluent_kafka", reason="confluent-kafka is not installed")

from confluent_kafka.serialization import (
    Deserializer,
    IntegerDeserializer,
    IntegerSerializer,
    MessageField,
    SerializationContext,
)
from pyspark import cloudpickle

from ackcore import OffsetTracker
from ackcore.calls import Reject, Retry, Unavailable
from ackcore.kafka import KafkaSpout, commit_metadata
from ackcore.kafka.cluster import PartitionAnswers
from ackcore.kafka.commit_metadata import CommitOrigin
from ackcore.kafka.ranges import RECORD_SCHEMA, OffsetRange
from ackcore.offsets import decode_metadata, encode_state
from ackcore.spark.base.schemas import TRACKING
from ackcore.spark.kafka import plans
from ackcore.spark.kafka.group_commits import GroupCommitter, states
from ackcore.spark.kafka.plans import Intake, OffsetPlan, Position, evenly
from ackcore.spark.kafka.spout_starts import without_deleted
from ackcore.spark.tasks.decoding import ValueDecoder
from ackcore.spark.tasks.record_ids import RefusedOffsets, SpoutSpec
from ackcore.topology.tuples import Reason

RANGES = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 50), st.integers(1, 40)),
    max_size=6,
    unique_by=lambda one: one[0],
)


def plan_of(**positions):
    """A plan of topic t, by partition (``p0=7``) the next offset."""
    return OffsetPlan(
        {
            ("t", int(name[1:])): Position(next_, next_, "earliest")
            for name, next_ in positions.items()
        }
    )


def waiting(*rows):
    """Rows that wait: (partition, offset, attempt, replayed)."""
    names = [*TRACKING.names, *RECORD_SCHEMA.names]
    columns = {name: [None] * len(rows) for name in names}
    columns |= {
        "topic": ["t"] * len(rows),
        "partition": [row[0] for row in rows],
        "offset": [row[1] for row in rows],
        "_ackcore_attempt": [row[2] for row in rows],
        "_ackcore_replayed": [row[3] for row in rows],
    }
    types = {field.name: field.type for field in [*TRACKING, *RECORD_SCHEMA]}
    return pa.table({name: pa.array(column, types[name]) for name, column in columns.items()})


def test_a_plan_is_what_is_on_record():
    plan = OffsetPlan(
        {
            ("a", 0): Position(7, 9, "earliest"),
            ("a", 3): Position(0, 0, "latest"),
            ("b", 0): Position(1, 2, "earliest", 5),
        },
        {"a": "id"},
        ((OffsetRange("a", 0, 0, 5),), (OffsetRange("a", 0, 5, 7), OffsetRange("a", 3, 0, 1))),
        (OffsetRange("a", 1, 0, 3),),
        (RefusedOffsets("a", 1, 0, 3, Reason("s", "LostUpstream", "gone", final=True).encode()),),
    )
    assert OffsetPlan.of(json.loads(json.dumps(plan.body()))) == plan
    assert plan.taking_nothing().positions == plan.positions
    assert not plan.taking_nothing().tasks


@given(RANGES, st.integers(1, 5))
def test_ranges_are_dealt_out_evenly_and_whole(found, tasks):
    ranges = [OffsetRange("t", partition, start, start + n) for partition, start, n in found]
    before, plans.LEAST = plans.LEAST, 1
    try:
        dealt = evenly(ranges, tasks)
    finally:
        plans.LEAST = before
    sizes = [sum(one.size for one in some) for some in dealt]
    assert all(sizes)
    assert len(dealt) <= tasks
    assert max(sizes, default=0) <= -(-sum(sizes) // max(1, min(tasks, sum(sizes))))
    offsets = [(one.partition, at) for some in dealt for one in some for at in range(*one[2:])]
    assert offsets == [(one.partition, at) for one in ranges for at in range(*one[2:])]


def test_few_records_are_one_task():
    assert len(evenly([OffsetRange("t", p, 0, 10) for p in range(4)], 4)) == 1


OFFSETS = st.sets(st.integers(0, 30), max_size=20)


@given(st.integers(0, 31), OFFSETS, OFFSETS)
def test_what_is_committed_is_what_a_tracker_says(next_, wait, replayed):
    """All offsets below `next_` are emitted, and acked unless they wait.

    What waits from there on is of a topic that was before.
    """
    former = sorted(offset for offset in wait if offset >= next_)
    wait = sorted(offset for offset in wait if offset < next_)
    replayed = sorted(offset for offset in replayed if offset < next_)
    oracle = OffsetTracker("t", 0, 0, 0)
    oracle.emitted(np.arange(next_))
    oracle.acked(np.array(sorted({*range(next_)} - {*wait}), np.int64))
    table = waiting(*((0, at, 1, 0) for at in wait + former), *((0, at, 0, 2) for at in replayed))
    (((topic, partition), state),) = states(plan_of(p0=next_), [table]).items()
    assert (topic, partition) == ("t", 0)
    expected = oracle.state()
    assert [np.asarray(each).tolist() for each in state] == [
        np.asarray(each).tolist() for each in expected
    ]
    commit = encode_state("t", 0, 0, state, 7)
    restored = decode_metadata("t", 0, *commit)
    assert restored.deployment == 7
    assert restored.state.hole_starts.tolist() == expected.hole_starts.tolist()


class Group:
    """A group of a cluster that takes all commits; it is a cluster for `GroupCommitter`."""

    def __init__(self):
        self.committer, self.committed = GroupCommitter("s", "g", 7), {}

    def commit(self, group_id, commits):
        self.committed |= commits
        return PartitionAnswers(commits, {})

    def told(self, done, topic_id):
        """The commits of these partitions when all of ``done`` was."""
        self.committer.commit(self, done, {"t": topic_id})
        return {each: self.committed[each] for each in done}


WAITS = st.dictionaries(st.integers(0, 6), st.integers(0, 2), max_size=4)


@given(st.lists(st.lists(st.tuples(st.integers(7, 9), WAITS), max_size=3), max_size=4))
def test_a_partition_is_committed_as_it_is_now_whatever_it_was(batches):
    """The next offset, what waits and its attempts, in each partition and micro-batch."""
    group, whose = Group(), CommitOrigin.of("one", f"{7:016x}").deployment
    for found in batches:
        plan = plan_of(**{f"p{n}": next_ for n, (next_, _) in enumerate(found)})
        rows = [(n, *row, 0) for n, (_, wait) in enumerate(found) for row in wait.items()]
        done = states(plan, [waiting(*rows)])
        expected = {each: encode_state(*each, 0, state, whose) for each, state in done.items()}
        assert group.told(done, "one") == expected


def test_a_partition_that_did_not_change_is_not_encoded_again(monkeypatch):
    encoded = []

    def noted(topic, partition, *rest, **how):
        encoded.append(partition)
        return encode_state(topic, partition, *rest, **how)

    monkeypatch.setattr(commit_metadata, "encode_state", noted)
    group, rows = Group(), [(0, 3, 1, 0), (1, 4, 1, 0)]
    some = [rows[0], (1, 5, 1, 0)]
    for now, topic_id in ((rows, "one"), (rows, "one"), (some, "one"), (some, "two")):
        group.told(states(plan_of(p0=9, p1=9), [waiting(*now)]), topic_id)
    assert encoded == [0, 1, 1, 0, 1]


def test_each_partition_has_what_waits_of_it():
    tables = [waiting((1, 5, 2, 0), (0, 3, 0, 0)), waiting((1, 4, 1, 0))]
    found = {p: state for (_, p), state in states(plan_of(p0=9, p1=6, p2=4), tables).items()}
    assert {p: (state.committable, state.end) for p, state in found.items()} == {
        0: (3, 9),
        1: (4, 4),
        2: (4, 4),
    }


# ---------------------------------------------------------------------------------- what is emitted


def records(*values):
    rows = [{"value": v, "topic": "t", "partition": 0, "offset": i} for i, v in enumerate(values)]
    return pa.RecordBatch.from_pylist(rows, RECORD_SCHEMA)


def test_a_value_is_what_the_deserializer_makes_of_it():
    decode = ValueDecoder("s", json.loads, pa.int64())
    batch, failed = decode(records(b"1", None, b"oh", b'"text"', b"5"))
    assert batch.column("value").to_pylist() == [1, None, None, None, 5]
    assert batch.column("offset").to_pylist() == [0, 1, 2, 3, 4]
    assert {row: reason.type for row, reason in failed.items()} == {
        2: "JSONDecodeError",
        3: "ValueError",
    }
    assert failed[2].component == "s"
    title = "'value' of the deserializer of 's'"
    said = f"{title} must be int64, got str: 'text' does not fit; convert it, or declare another "
    assert failed[3].message == f"{said}type"


@pytest.mark.parametrize(
    ("value_type", "kept", "lost", "words"),
    [
        (pa.int64(), [2, 2.0], [1.5, -0.5], "would become"),
        (pa.list_(pa.int64()), [[1], [2.0]], [[1.5]], "would become"),
        (pa.float32(), [0.5], [1e300, 0.1], "would become"),
        (pa.timestamp("us", "UTC"), [None], [1700000000, 1700000000.25], "must be timestamp"),
        (pa.struct([("at", pa.date32())]), [{"at": None}], [{"at": 19000}], "would become"),
        (pa.decimal128(10, 2), [Decimal("1.25")], [Decimal("1.005")], "Decimal('1.005')"),
        (pa.string(), ["ok"], ["\ud83d", 5], "must be string, got"),
    ],
    ids=str,
)
def test_a_deserializer_is_held_to_its_type_as_a_bolt_is(value_type, kept, lost, words):
    decode = ValueDecoder("s", pickle.loads, value_type)
    values = [*kept, *lost, kept[0]]
    batch, failed = decode(records(*map(pickle.dumps, values)))
    column = batch.column("value").to_pylist()
    assert column == [*kept, *(None for _ in lost), kept[0]]
    assert sorted(failed) == list(range(len(kept), len(kept) + len(lost)))
    assert all(words in reason.message for reason in failed.values())


def test_the_field_of_a_struct_that_does_not_fit_is_named_with_its_value():
    inner = pa.struct([("at", pa.timestamp("us", "UTC")), ("n", pa.int64())])
    decode = ValueDecoder("s", json.loads, pa.struct([("text", pa.string()), ("in", inner)]))
    long = b'{"text": "%s", "in": {"%s": %s}}'
    values = [long % (b"x" * 500, *each) for each in [(b"at", b"1.5"), (b"n", b"%d" % 2**70)]]
    _, failed = decode(records(*values, rb'{"text": "\ud83d"}'))
    messages = [reason.message.partition(", got dict: ")[2] for reason in failed.values()]
    messages = [message.partition("; convert it, ")[0] for message in messages]
    assert messages[0].startswith("field 'in': field 'at': 1.5 would become datetime")
    assert messages[1:] == [
        f"field 'in': field 'n': {2**70} does not fit",
        "field 'text': '\\ud83d' does not fit",
    ]


def test_messages_may_have_more_fields_than_the_type_or_fewer():
    inner = pa.struct([("x", pa.int64())])
    decode = ValueDecoder("s", json.loads, pa.struct([("id", pa.int64()), ("in", pa.list_(inner))]))
    values = [b'{"id": 1, "new": true}', b'{"in": [{"x": 2, "y": 3}, {}]}', b"{}", b'{"id": 1.5}']
    batch, failed = decode(records(*values))
    assert batch.column("value").to_pylist() == [
        {"id": 1, "in": None},
        {"id": None, "in": [{"x": 2}, {"x": None}]},
        {"id": None, "in": None},
        None,
    ]
    assert [*failed] == [3]


class Panic(BaseException):
    """An error of an extension, as PyO3 raises it."""


RAISED = [Panic("index"), SystemExit(3), asyncio.CancelledError(), GeneratorExit(), StopIteration()]
RAISED += [Reject("no JSON"), Retry(after_s=5), Unavailable("no registry")]


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_whatever_a_deserializer_raises_fails_its_record_alone(error):
    def strict(value):
        if value == b"bad":
            raise error
        return value.decode()

    batch, failed = ValueDecoder("s", strict, pa.string())(records(b"a", b"bad", b"b"))
    assert batch.column("value").to_pylist() == ["a", None, "b"]
    assert {row: reason.type for row, reason in failed.items()} == {1: type(error).__name__}
    fate = failed[1].final, failed[1].after_ms, failed[1].counts
    assert fate == {
        "Reject": (True, 0, True),
        "Retry": (False, 5000, True),
        "Unavailable": (False, 0, False),
    }.get(failed[1].type, (False, 0, True))


def test_an_interrupt_in_a_deserializer_is_an_interrupt():
    def interrupted(value):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ValueDecoder("s", interrupted, pa.string())(records(b"a"))


class Slow:
    """A deserializer that has to be prepared, which may fail."""

    def __init__(self, fails):
        self.fails = fails
        self.prepared = 0

    def prepare(self):
        self.prepared += 1
        if self.prepared <= self.fails:
            raise ConnectionError("no registry")

    def __call__(self, value):
        return len(value)


def test_a_deserializer_is_prepared_once_it_can_be():
    slow = Slow(fails=1)
    decode = ValueDecoder("s", slow, pa.int64())
    batch, failed = decode(records(b"12", None))
    assert batch.column("value").to_pylist() == [None, None]
    assert {row: reason.message for row, reason in failed.items()} == {0: "no registry"}
    for _ in range(2):
        assert decode(records(b"12"))[0].column("value").to_pylist() == [2]
    assert slow.prepared == 2


class Noted(Deserializer):
    """One of confluent-kafka's kind, which is told where a value is from."""

    def __call__(self, value, ctx=None):
        return f"{ctx.topic} {ctx.field} {ctx.headers} {value.decode()}"


def test_a_deserializer_of_confluent_kafkas_is_told_where_a_value_is_from():
    batch = records(b"a", b"b")
    headers = [[{"key": "h", "value": b"1"}, {"key": "h", "value": None}], None]
    place = batch.schema.get_field_index("headers")
    batch = batch.set_column(
        place, batch.schema.field(place), pa.array(headers, batch.schema.field(place).type)
    )
    found, failed = ValueDecoder("s", Noted(), pa.string())(batch)
    assert found.column("value").to_pylist() == [
        "t value [('h', b'1'), ('h', None)] a",
        "t value [] b",
    ]
    assert not failed


def test_deserializers_that_confluent_kafka_brings_are_called_as_they_are_to_be():
    values = IntegerSerializer()(7), b"\0"
    batch, failed = ValueDecoder("s", IntegerDeserializer(), pa.int64())(records(*values))
    assert batch.column("value").to_pylist() == [7, None]
    assert {row: reason.type for row, reason in failed.items()} == {1: "SerializationError"}


SCHEMA = '{"title": "order", "type": "object", "properties": {"id": {"type": "integer"}}}'


class FromRegistry(Deserializer):
    """Pickle the arguments of a registry's client, as docs/tutorial-kafka.md does."""

    def __init__(self, registry):
        self.registry = registry

    def prepare(self):
        from confluent_kafka.schema_registry import SchemaRegistryClient  # noqa: PLC0415
        from confluent_kafka.schema_registry.json_schema import JSONDeserializer  # noqa: PLC0415

        self.client = SchemaRegistryClient.new_client(self.registry)
        self.read = JSONDeserializer(None, schema_registry_client=self.client)

    def __call__(self, value, ctx=None):
        return self.read(value, ctx)


def test_values_of_a_schema_registry_are_read():
    for name in ("authlib", "httpx", "jsonschema"):
        pytest.importorskip(name, reason="confluent-kafka[schemaregistry,json] is not installed")
    from confluent_kafka.schema_registry import Schema  # noqa: PLC0415
    from confluent_kafka.schema_registry.json_schema import JSONSerializer  # noqa: PLC0415

    spout = KafkaSpout(
        "t",
        bootstrap_servers="nowhere:1",
        deserializer=FromRegistry({"url": "mock://tests"}),
        value_type=pa.struct([("id", pa.int64())]),
    )
    spout = pickle.loads(cloudpickle.dumps(spout))
    decode = ValueDecoder("s", spout.deserializer, spout.value_type)
    decode(records(None))  # it is prepared
    client = spout.deserializer.client
    client.register_schema("t-value", Schema(SCHEMA, "JSON"))
    sent = JSONSerializer(SCHEMA, client)({"id": 3}, SerializationContext("t", MessageField.VALUE))
    batch, failed = decode(records(sent, b"no magic byte", sent[:5] + b'{"id": "text"}'))
    assert batch.column("value").to_pylist() == [{"id": 3}, None, None]
    assert {row: reason.type for row, reason in failed.items()} == {
        1: "SerializationError",
        2: "SerializationError",
    }


def test_refused_offsets_fail_where_they_are():
    reason = Reason("s", "TooFarBehind", "late", final=True)
    spec = SpoutSpec(
        "s", 0, RECORD_SCHEMA, (), True, False, False, 1,
        refused=(
            RefusedOffsets("t", 0, 1, 3, reason.encode()),
            RefusedOffsets("u", 0, 0, 9, reason.encode()),
        ),
    )  # fmt: skip
    assert spec.refusals(records(b"", b"", b"", b"")) == {1: reason, 2: reason}


@given(
    ranges=RANGES,
    tasks=st.integers(1, 5),
    lows=st.dictionaries(st.integers(0, 5), st.integers(0, 100)),
    anew=st.booleans(),
)
def test_of_a_plan_what_is_gone_is_lost_and_the_rest_is_read(ranges, tasks, lows, anew):
    """Each offset once: read, or in the one range of its partition that is lost."""
    planned = [OffsetRange("tu"[one[0] % 2], one[0], one[1], one[1] + one[2]) for one in ranges]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "LEAST", 1)
        before = OffsetPlan(topic_ids={"u": "first"}, tasks=evenly(planned, tasks))
    found = {("tu"[p % 2], p): low for p, low in lows.items()}
    ids = {"t": None, "u": "second" if anew else "first"}
    after, lost = without_deleted(before, "lines", found, ids)

    def offsets(ranges):
        return [(one.topic, one.partition, n) for one in ranges for n in range(one.start, one.stop)]

    def is_gone(topic, partition, offset):
        return (anew and topic == "u") or offset < found.get((topic, partition), 0)

    read = [one for some in after.tasks for one in some]
    assert all(after.tasks)
    assert sorted(offsets(read)) == sorted(o for o in offsets(planned) if not is_gone(*o))
    assert sorted(offsets(after.lost)) == sorted(o for o in offsets(planned) if is_gone(*o))
    assert len({one[:2] for one in after.lost}) == len(after.lost)
    assert [tuple(one[:4]) for one in after.refused] == [tuple(one) for one in after.lost]
    assert {one.kind for one in lost} <= {"LostUpstream"}


def spout(**settings):
    return KafkaSpout("t", bootstrap_servers="x", **settings)


def clocked(monkeypatch):
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr(plans.time, "monotonic", lambda: now.s)
    return now


def test_a_slow_micro_batch_shrinks_the_next(monkeypatch):
    now = clocked(monkeypatch)
    intake = Intake(spout(target_batch_s=10))
    assert intake.most == 100_000
    intake.planned(100_000)
    now.s += 100
    intake.done(waiting=0)
    assert intake.most == 10_000
    for expected in (20_000, 40_000):
        intake.planned(intake.most)
        now.s += 1
        intake.done(waiting=0)
        assert intake.most == expected
    # One that had less than it might have taken tells nothing of what it can take.
    intake.planned(5)
    now.s += 0.01
    intake.done(waiting=0)
    assert intake.most == 40_000


@pytest.mark.parametrize(
    ("fixed_s", "each_s", "batch_s"),
    [(0, 1e-3, 10), (6, 1e-4, 12), (15, 1e-4, 30), (10.5, 1e-3, 21)],
)
def test_what_a_micro_batch_costs_by_itself_shrinks_nothing(monkeypatch, fixed_s, each_s, batch_s):
    """It takes its time, or twice what it costs without a record: not one record for ever."""
    now = clocked(monkeypatch)
    intake = Intake(spout(target_batch_s=10))
    for _ in range(60):
        intake.planned(intake.most)
        now.s += fixed_s + each_s * intake.most
        intake.done(waiting=0)
    assert fixed_s + each_s * intake.most == pytest.approx(batch_s, rel=0.1)


def test_a_full_waiting_store_shrinks_what_is_taken():
    intake = Intake(spout(max_records=1_000))
    found = []
    for waiting in (0, 0.5, 0.75, 1.0, 1.5):
        intake.planned(1_000)
        intake.done(waiting)
        found.append(intake.most)
    assert found == [1_000, 1_000, 500, 0, 0]


@pytest.mark.parametrize("each_s", [1e-4, 1e-3, 1e-2])
def test_new_records_do_not_wait_for_all_that_fail(monkeypatch, each_s):
    """However many are due: half of what a micro-batch has time for is new, and it ends in time."""
    now = clocked(monkeypatch)
    intake = Intake(spout(target_batch_s=10))
    for _ in range(20):
        new, retries = intake.most, min(100_000, intake.most_retries)
        intake.planned(new)
        now.s += each_s * (new + retries)
        intake.done(0, retries)
    assert each_s * (new + retries) == pytest.approx(10, rel=0.1)
    assert new >= 0.45 * (new + retries)
    # None is due any more.
    for _ in range(5):
        intake.planned(intake.most)
        now.s += each_s * intake.most
        intake.done(0, 0)
    assert each_s * intake.most == pytest.approx(10, rel=0.1)


def test_where_max_records_is_given_retries_are_bounded_by_their_setting_alone():
    intake = Intake(spout(max_records=10))
    intake.planned(10)
    intake.done(0, 1_000)
    assert (intake.most, intake.most_retries) == (10, None)
