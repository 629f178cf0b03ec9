"""A range is read to its very end, whole, once and in order, whatever the brokers do meanwhile."""

from __future__ import annotations

import ctypes
import random
import re
import time
from functools import partial
from types import SimpleNamespace

import pyarrow as pa
import pytest
from confluent_kafka import KafkaError, KafkaException, Message
from mock_broker import library_path
from servers import wait_until

from ackcore import backend
from ackcore.kafka import range_reader, ranges
from ackcore.kafka.client_settings import ClientSettings
from ackcore.kafka.kafka_errors import OffsetsLost, ReadFailed, ReadTimedOut
from ackcore.kafka.range_reader import RangeReader
from ackcore.kafka.ranges import RECORD_SCHEMA, OffsetRange, RecordBuffers
from ackcore.kafka.raw_consumer import RawConsumer

#: A reader with these has little in its queue, so that it sees what happens to the rest.
SMALL_FETCHES = {
    "queued.min.messages": 1,
    "queued.max.messages.kbytes": 1,
    "fetch.message.max.bytes": 1000,
    "fetch.max.bytes": 1000,
    "message.max.bytes": 1000,
}


@pytest.fixture(params=["mock", "objects", pytest.param("real", marks=pytest.mark.broker)])
def kafka(request, monkeypatch):
    """Either, by one interface, and the mock once more by confluent-kafka's consumer."""
    if request.param == "objects":
        monkeypatch.setattr(range_reader, "raw_consumer", no_raw_consumer)
    return request.getfixturevalue("kafka_broker" if request.param == "real" else "mock_kafka")


def no_raw_consumer(conf, heard):
    """Read as on a machine where librdkafka cannot be called."""


def settings_of(kafka, **options):
    quick = {"reconnect.backoff.ms": 20, "reconnect.backoff.max.ms": 100, "log_level": 0}
    return ClientSettings(kafka.bootstrap_servers, {**quick, **options})


def read_range(settings, range_, batch_bytes=1 << 20, **arguments):
    """Yield the batches of one range, by a reader of its own."""
    with RangeReader(settings, batch_bytes=batch_bytes, **arguments) as reader:
        yield from reader.read(range_)


def read(kafka, topic, start, stop, partition=0, **arguments):
    """Return the rows of a range."""
    batches = [
        *read_range(settings_of(kafka), OffsetRange(topic, partition, start, stop), **arguments)
    ]
    return pa.Table.from_batches(batches, RECORD_SCHEMA).to_pylist()


def offsets_of(batches):
    return [offset for batch in batches for offset in batch.column("offset").to_pylist()]


# What is read -------------------------------------------------------------------------------


def test_a_record_is_read_as_it_was_written(kafka):
    topic = kafka.new_topic(partitions=2)
    records = [
        {"value": b"plain"},
        {"value": None, "key": b"deleted"},
        {"value": b"", "key": b""},
        {"value": b"headed", "headers": [("a", b"1"), ("a", None), ("ü", b"")]},
        {"value": b"old", "timestamp": 1},
        {"value": b"timeless", "timestamp": -1},
    ]
    kafka.produce(topic, records, partition=1)
    *rows, timeless = read(kafka, topic, 0, 6, partition=1)
    assert (timeless["value"], timeless["timestamp"]) == (b"timeless", None)
    assert [row["value"] for row in rows] == [b"plain", None, b"", b"headed", b"old"]
    assert [row["key"] for row in rows] == [None, b"deleted", b"", None, None]
    headers = [{"key": "a", "value": b"1"}, {"key": "a", "value": None}, {"key": "ü", "value": b""}]
    assert [row["headers"] for row in rows] == [None, None, None, headers, None]
    assert [row["offset"] for row in rows] == [0, 1, 2, 3, 4]
    assert {(row["topic"], row["partition"]) for row in rows} == {(topic, 1)}
    assert rows[4]["timestamp"].timestamp() == 0.001
    assert rows[3]["timestamp"].year > 2000


class Argument(ctypes.Structure):
    """rd_kafka_vu_t: what a value is, and up to three words of it."""

    _fields_ = (
        ("kind", ctypes.c_int),
        ("words", ctypes.c_void_p * 3),
        ("rest", ctypes.c_char * 40),
    )


def produce_with_header(kafka, topic, name, value):
    """Send a record with a header whose name may be any bytes, which confluent-kafka's cannot."""
    library = ctypes.CDLL(library_path())
    for function in ("conf_new", "new", "produceva"):
        getattr(library, f"rd_kafka_{function}").restype = ctypes.c_void_p
    conf, none = ctypes.c_void_p(library.rd_kafka_conf_new()), ctypes.c_size_t(0)
    servers = kafka.bootstrap_servers.encode()
    library.rd_kafka_conf_set(conf, b"bootstrap.servers", servers, None, none)
    producer = ctypes.c_void_p(library.rd_kafka_new(0, conf, None, none))
    held = [ctypes.c_char_p(each) for each in (topic.encode(), b"headed", name, value)]
    where, what, header, its = [ctypes.cast(each, ctypes.c_void_p).value for each in held]
    words = ctypes.c_void_p * 3
    arguments = (Argument * 3)(
        Argument(1, words(where)),
        Argument(4, words(what, 6)),
        Argument(9, words(header, its, len(value))),
    )
    assert library.rd_kafka_produceva(producer, arguments, ctypes.c_size_t(3)) is None
    assert library.rd_kafka_flush(producer, 20_000) == 0
    library.rd_kafka_destroy(producer)


def test_a_header_whose_name_is_not_utf_8_hides_nothing(kafka, request):
    topic = kafka.new_topic()
    produce_with_header(kafka, topic, b"a\xff", b"1")
    kafka.produce(topic, [{"value": b"behind", "headers": [("b", b"2")]}])
    first, behind = read(kafka, topic, 0, 2)
    assert [first["value"], behind["value"]] == [b"headed", b"behind"]
    assert behind["headers"] == [{"key": "b", "value": b"2"}]
    by_objects = "objects" in request.node.name or backend != "native"
    told = ("ackcore.unreadable", None) if by_objects else (r"a\xff", b"1")
    assert [tuple(header.values()) for header in first["headers"]] == [told]


def test_any_range_is_read_whole_by_one_reader(kafka):
    topic = kafka.new_topic()
    rng = random.Random(5)
    values = [rng.randbytes(rng.choice([0, 1, 30, 400])) for _ in range(700)]
    kafka.produce(topic, values)
    for batch_bytes in (1, 2_000, 1 << 20):
        with RangeReader(settings_of(kafka), batch_bytes=batch_bytes) as reader:
            for _ in range(5):
                start, stop = sorted(rng.choices(range(701), k=2))
                batches = [*reader.read(OffsetRange(topic, 0, start, stop))]
                found = pa.Table.from_batches(batches, RECORD_SCHEMA)
                assert found["value"].to_pylist() == values[start:stop]
                assert found["offset"].to_pylist() == [*range(start, stop)]
                assert all(batch.num_rows for batch in batches)
                # The largest record is 400 bytes: what one is too many was not known before.
                sizes = [batch.column("value").nbytes for batch in batches]
                assert max(sizes, default=0) <= 2 * batch_bytes + 5000


def test_headers_count_among_the_bytes_of_a_batch(mock_kafka):
    """Small records with large headers are held only up to the bytes of a batch."""
    topic = mock_kafka.new_topic()
    header = ("trace", b"h" * 5000)
    mock_kafka.produce(topic, [{"value": b"v", "headers": [header]} for _ in range(600)])
    with RangeReader(settings_of(mock_kafka), batch_bytes=50_000) as reader:
        batches = [*reader.read(OffsetRange(topic, 0, 0, 600))]
    assert offsets_of(batches) == [*range(600)]
    # The first size is a guess, as nothing is known of the records.
    assert max(len(batch) for batch in batches[3:]) <= 20


def test_a_batch_ends_behind_so_many_records_of_all_ranges(mock_kafka):
    topic = mock_kafka.topic_of([b"%d" % n for n in range(500)])
    with RangeReader(settings_of(mock_kafka), batch_rows=64) as reader:
        ends = [0]
        for start, stop in [(0, 100), (100, 130), (130, 500)]:
            for batch in reader.read(OffsetRange(topic, 0, start, stop)):
                assert batch.column("offset")[0].as_py() == ends[-1]
                ends.append(ends[-1] + len(batch))
    assert {*range(0, 500, 64), 100, 130, 500} <= {*ends}


def test_a_reader_that_was_left_begins_anew(kafka):
    topic = kafka.topic_of([b"%d" % n for n in range(500)])
    with RangeReader(settings_of(kafka), batch_bytes=50) as reader:
        first = next(reader.read(OffsetRange(topic, 0, 0, 500)))
        assert first.column("offset")[0].as_py() == 0
        assert offsets_of(reader.read(OffsetRange(topic, 0, 100, 103))) == [100, 101, 102]


def test_nothing_is_fetched_while_a_user_has_the_last_batch(mock_kafka, monkeypatch):
    monkeypatch.setattr(range_reader, "raw_consumer", no_raw_consumer)
    topic = mock_kafka.topic_of([b"%d" % n for n in range(500)])
    with RangeReader(settings_of(mock_kafka), batch_bytes=2000) as reader:
        left = 500
        for batch in reader.read(OffsetRange(topic, 0, 0, 500)):
            left -= len(batch)
            assert [one.topic for one in reader._consumer.assignment()] == [topic][: bool(left)]
    assert left == 0


def test_a_reader_reads_one_range_at_a_time(mock_kafka):
    topic = mock_kafka.topic_of([b"%d" % n for n in range(500)])
    with RangeReader(settings_of(mock_kafka), batch_bytes=50) as reader:
        first = reader.read(OffsetRange(topic, 0, 0, 500))
        found = offsets_of([next(first)])
        with pytest.raises(
            RuntimeError, match=rf"\[9, 10\) .* while {topic}-0 \[0, 500\) is being read; .*close"
        ):
            next(reader.read(OffsetRange(topic, 0, 9, 10)))
        assert found + offsets_of(first) == [*range(500)]  # nothing came between
        assert offsets_of(reader.read(OffsetRange(topic, 0, 9, 10))) == [9]


def test_records_that_do_not_fit_into_one_batch_are_all_handed_out(mock_kafka, monkeypatch):
    topic = mock_kafka.new_topic()
    values = [b"x" * (n % 7) for n in range(100)]
    mock_kafka.produce(topic, values)
    # Without a bound an Arrow array has 2 GiB.
    monkeypatch.setattr(ranges, "RecordBuffers", partial(RecordBuffers, 10))
    batches = [*read_range(settings_of(mock_kafka), OffsetRange(topic, 0, 0, 100))]
    assert [value for batch in batches for value in batch.column("value").to_pylist()] == values
    assert offsets_of(batches) == [*range(100)]
    sizes = [sum(map(len, batch.column("value").to_pylist())) for batch in batches]
    assert max(sizes) == 10


def four_transactions(mock_kafka):
    """Return a topic: two records each, and a marker, in which the mock cluster has no checksum."""
    topic = mock_kafka.new_topic()
    mock_kafka.produce_in_transactions(topic, [[b"%d" % n] * 2 for n in range(4)])
    return topic


def test_offsets_without_a_record_are_passed_over(mock_kafka):
    topic = four_transactions(mock_kafka)
    there = [message.offset() for message in mock_kafka.consume(topic)]
    end = there[-1] + 2
    assert len(there) == 8 < end - 1  # markers are between them, and behind the last
    settings = settings_of(mock_kafka, **{"check.crcs": False})
    with RangeReader(settings, timeout_s=5) as reader:
        for start in range(end):
            for stop in range(start, end + 1):
                found = offsets_of(reader.read(OffsetRange(topic, 0, start, stop)))
                assert found == [offset for offset in there if start <= offset < stop]


def test_a_wrong_checksum_is_no_gap(mock_kafka):
    topic = four_transactions(mock_kafka)
    with RangeReader(settings_of(mock_kafka), timeout_s=5) as reader:
        for stop in range(3, 12):
            batches, found = reader.read(OffsetRange(topic, 0, 0, stop)), []
            with pytest.raises(ReadFailed, match=r"offset 2 .* failed CRC32C") as caught:
                found.extend(offset for batch in batches for offset in offsets_of([batch]))
            assert found == [0, 1]
            assert caught.value.range == OffsetRange(topic, 0, 2, stop)


@pytest.mark.broker
def test_a_range_ends_behind_markers_and_aborted_records(kafka_broker):
    topic = kafka_broker.new_topic()
    values = [[b"%d-0" % n, b"%d-1" % n] for n in range(6)]
    kafka_broker.produce_in_transactions(topic, values, aborted={1, 3, 5})
    # 2 records and a marker each: the last that can be read is 13, and the partition ends at 18.
    committed = [0, 1, 6, 7, 12, 13]
    for start, stop in [(0, 18), (2, 6), (3, 12), (13, 18), (14, 18), (17, 18)]:
        found = [row["offset"] for row in read(kafka_broker, topic, start, stop, timeout_s=5)]
        assert found == [offset for offset in committed if start <= offset < stop]
    uncommitted = settings_of(kafka_broker, **{"isolation.level": "read_uncommitted"})
    found = offsets_of(read_range(uncommitted, OffsetRange(topic, 0, 0, 18)))
    assert found == [offset for offset in range(18) if offset % 3 != 2]


@pytest.mark.broker
def test_a_range_ends_where_its_last_offsets_were_compacted_away(kafka_broker):
    topic = kafka_broker.compacted_topic()
    keyed = [{"key": b"%d" % (n % 3), "value": b"%d" % n} for n in range(30)]
    for n in range(0, 30, 10):
        kafka_broker.produce(topic, keyed[n : n + 10])
    # The last segment is never compacted.
    kafka_broker.produce(topic, [{"key": b"last", "value": b"30"}])

    def compacted():
        left = [message.offset() for message in kafka_broker.consume(topic)]
        return left if len(left) <= 4 else None

    left = wait_until(compacted, "the partition is compacted")
    assert left == [27, 28, 29, 30]
    for start, stop in [(0, 31), (0, 20), (0, 27), (5, 28), (29, 31)]:
        found = [row["offset"] for row in read(kafka_broker, topic, start, stop, timeout_s=5)]
        assert found == [offset for offset in left if start <= offset < stop]


# What is not there --------------------------------------------------------------------------


def test_offsets_that_were_deleted_are_an_error(kafka):
    topic = kafka.topic_of([b"x"] * 10)
    kafka.delete_records(topic, before=6)
    with pytest.raises(OffsetsLost, match="below 6 were deleted") as caught:
        read(kafka, topic, 3, 9)
    assert caught.value.range == OffsetRange(topic, 0, 3, 9)
    assert (caught.value.low, caught.value.high) == (6, 10)
    assert [row["offset"] for row in read(kafka, topic, 6, 9)] == [6, 7, 8]


def test_offsets_that_are_deleted_meanwhile_are_an_error(kafka):
    topic = kafka.new_topic()
    for n in range(0, 100, 5):
        kafka.produce(topic, [b"%d" % at * 100 for at in range(n, n + 5)])
    settings = settings_of(kafka, **SMALL_FETCHES)
    batches = read_range(settings, OffsetRange(topic, 0, 0, 100), 500)
    found = offsets_of([next(batches)])
    kafka.delete_records(topic, before=90)
    with pytest.raises(OffsetsLost) as caught:
        found.extend(offset for batch in batches for offset in offsets_of([batch]))
    # What was read and what is said to be lost are all there was.
    assert found == [*range(caught.value.range.start)]
    assert len(found) < 90
    assert caught.value.low == 90


def test_offsets_above_the_end_are_lost_or_waited_for(kafka):
    topic = kafka.topic_of([b"x"] * 10)
    with pytest.raises(OffsetsLost, match="ends at offset 10; it was truncated"):
        read(kafka, topic, 11, 20)
    with pytest.raises(ReadTimedOut, match=r"\[10, 20\) .* 1 s: the partition ends at offset 10"):
        read(kafka, topic, 5, 20, timeout_s=1)


def test_a_topic_that_may_not_be_read_is_an_error(mock_kafka):
    topic = mock_kafka.topic_of([b"x"])
    mock_kafka.topic_set_error(topic, 29)
    with pytest.raises(ReadFailed, match="TOPIC_AUTHORIZATION_FAILED") as caught:
        read(mock_kafka, topic, 0, 1, timeout_s=20)
    assert caught.value.code == "TOPIC_AUTHORIZATION_FAILED"


@pytest.mark.parametrize("slow_s", [2.0, 61.0])
def test_offsets_whose_bounds_come_late_are_lost_all_the_same(mock_kafka, monkeypatch, slow_s):
    topic = mock_kafka.topic_of([b"x"] * 10)
    mock_kafka.delete_records(topic, before=6)
    waits, ask = [], RawConsumer.get_watermark_offsets

    def late(consumer, partition, timeout):
        waits.append(slow_s)
        return ask(consumer, partition, timeout)

    monkeypatch.setattr(RawConsumer, "get_watermark_offsets", late)
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + sum(waits))
    monkeypatch.setattr(range_reader, "time", clock)
    with pytest.raises(OffsetsLost, match="below 6 were deleted"):
        read(mock_kafka, topic, 0, 9, timeout_s=10.0)


def test_bounds_that_may_not_be_read_are_an_error(mock_kafka, monkeypatch):
    topic = mock_kafka.topic_of([b"x"] * 10)
    mock_kafka.delete_records(topic, before=6)
    refuse_bounds(monkeypatch, KafkaError.TOPIC_AUTHORIZATION_FAILED)
    with pytest.raises(ReadFailed, match="TOPIC_AUTHORIZATION_FAILED") as caught:
        read(mock_kafka, topic, 0, 9)
    assert caught.value.code == "TOPIC_AUTHORIZATION_FAILED"


def test_bounds_that_cannot_be_read_yet_are_requested_again_until_time_is_up(
    mock_kafka, monkeypatch
):
    topic = mock_kafka.topic_of([b"x"] * 10)
    mock_kafka.delete_records(topic, before=6)
    code = KafkaError.COORDINATOR_LOAD_IN_PROGRESS
    waits = refuse_bounds(monkeypatch, code)
    with pytest.raises(OffsetsLost, match="below 6 were deleted"):
        read(mock_kafka, topic, 0, 9)
    assert len(waits) == 1
    waits = refuse_bounds(monkeypatch, *[code] * 100)
    with pytest.raises(ReadTimedOut, match=r"for 60 s: .*COORDINATOR_LOAD_IN_PROGRESS"):
        read(mock_kafka, topic, 0, 9)
    assert 58 < sum(waits) <= 60


def refuse_bounds(monkeypatch, *codes):
    """Refuse the next requests for bounds; return the list of waits, in simulated time."""
    codes, waits, ask = list(codes), [], RawConsumer.get_watermark_offsets

    def refused(consumer, partition, timeout):
        if codes:
            raise KafkaException(KafkaError(codes.pop(0)))
        return ask(consumer, partition, timeout)

    monkeypatch.setattr(RawConsumer, "get_watermark_offsets", refused)
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + sum(waits), sleep=waits.append)
    monkeypatch.setattr(range_reader, "time", clock)
    return waits


def test_a_topic_that_is_not_there_is_an_error(kafka_broker):
    with pytest.raises(ReadFailed, match="UNKNOWN_TOPIC_OR_PART"):
        read(kafka_broker, "no-such-topic", 0, 1, timeout_s=20)


def test_brokers_that_are_not_there_are_named_when_time_is_up(mock_kafka):
    topic = mock_kafka.topic_of([b"x"])
    mock_kafka.broker_set_down(-1)
    with pytest.raises(ReadTimedOut, match=r"brokers are down|refused|Disconnected"):
        read(mock_kafka, topic, 0, 1, timeout_s=1)


def test_settings_that_librdkafka_refuses_show_no_secret():
    # What librdkafka shows of such settings is a name that it does not know.
    secret = {"ssl.key.password": "hunter2", "hunter2": "ssl.key.password"}
    with pytest.raises(ValueError, match=r'librdkafka: .* property: "\[redacted\]"') as caught:
        RangeReader(ClientSettings("h:1", secret))
    assert "hunter2" not in str(caught.value)
    with pytest.raises(ValueError, match='No such configuration property: "x"'):
        RangeReader(ClientSettings("h:1", {"x": 1}))


# What librdkafka says -----------------------------------------------------------------------


class Script:
    """A consumer whose calls return what is scripted: an offset is a record, a pair an event."""

    def __init__(self, calls, watermarks=(0, 0)):
        self.calls = [[self.message(entry) for entry in call] for call in calls]
        self.watermarks = watermarks

    def __call__(self, conf):
        self.conf = conf
        return self

    @staticmethod
    def message(entry):
        if isinstance(entry, int):
            return Message("t", 0, entry, value=b"%d" % entry, timestamp=(1, 1))
        code, offset = entry
        return Message("t", 0, offset, error=KafkaError(code, f"says hunter2 at {offset}"))

    def consume(self, n, timeout):
        return self.calls.pop(0)

    def get_watermark_offsets(self, partition, timeout):
        return self.watermarks

    def assign(self, partitions):
        pass

    unassign = close = lambda self: None


def read_script(monkeypatch, script, start, stop, **options):
    """Return the offsets that are read of a script, and the error at their end."""
    monkeypatch.setattr(range_reader, "Consumer", script)
    monkeypatch.setattr(range_reader, "raw_consumer", no_raw_consumer)
    settings = ClientSettings("h:1", {"sasl.password": "hunter2", **options})
    found = []
    try:
        for batch in read_range(settings, OffsetRange("t", 0, start, stop)):
            found += offsets_of([batch])
    except Exception as error:
        return found, error
    return found, None


EOF = KafkaError._PARTITION_EOF
UNREADABLE = [KafkaError._BAD_MSG, KafkaError._NOT_IMPLEMENTED, KafkaError._BAD_COMPRESSION]


@pytest.mark.parametrize("code", UNREADABLE)
@pytest.mark.parametrize("stop", [150, 400])
@pytest.mark.parametrize("cut", [0, 100, 101, 201])
def test_what_cannot_be_read_is_no_gap(monkeypatch, code, stop, cut):
    # 100 to 199 are one batch, which librdkafka skips; it says so once, among the records.
    there = [*range(100), (code, 100), *range(200, 300)]
    found, error = read_script(monkeypatch, Script([there[:cut], there[cut:]]), 0, stop)
    assert found == [*range(100)]
    assert isinstance(error, ReadFailed)
    assert error.range == OffsetRange("t", 0, 100, stop)
    assert error.code == KafkaError(code).name()
    assert "[redacted] at 100" in str(error)


def test_events_that_end_nothing_are_passed_in_order(monkeypatch):
    lost = KafkaError._TRANSPORT
    there = [[0, (EOF, 1), 1, 2, (lost, 3), 3], [(EOF, 4), 4, 7, (EOF, 8)]]
    assert read_script(monkeypatch, Script(there), 0, 8) == ([0, 1, 2, 3, 4, 7], None)
    # What cannot be read behind the end of a range is nobody's concern here.
    bad = KafkaError._BAD_MSG
    for ends in ([0, 1, 2, (bad, 3)], [0, 1, 2, 3, (bad, 4)], [0, 1, 2, 5, (bad, 6)]):
        assert read_script(monkeypatch, Script([ends]), 0, 3) == ([0, 1, 2], None)
    assert read_script(monkeypatch, Script([[0, (EOF, 3), (bad, 3)]]), 0, 3) == ([0], None)


def test_checksums_are_checked_unless_an_option_says_otherwise(monkeypatch):
    script = Script([[0], [0]])
    read_script(monkeypatch, script, 0, 1)
    assert script.conf["check.crcs"] is True
    read_script(monkeypatch, script, 0, 1, **{"check.crcs": False})
    assert script.conf["check.crcs"] is False


@pytest.mark.parametrize("code", [KafkaError._AUTO_OFFSET_RESET, KafkaError._LOG_TRUNCATION])
@pytest.mark.parametrize(
    ("low", "high", "kind", "says"),
    [
        (6, 10, OffsetsLost, "below 6 were deleted"),
        (0, 4, OffsetsLost, "ends at offset 4; it was truncated"),
        (0, 5, ReadFailed, r"offset 5 was refused, .* \[0, 5\); its log was truncated"),
        (5, 9, ReadFailed, r"\[5, 9\); .* written anew, .*: says \[redacted\] at 5"),
    ],
)
def test_a_log_that_was_written_anew_is_told_from_a_deletion(
    monkeypatch, code, low, high, kind, says
):
    script = Script([[4, (code, 5), 7]], watermarks=(low, high))
    found, error = read_script(monkeypatch, script, 4, 9)
    assert found == [4]
    assert type(error) is kind
    assert error.range == OffsetRange("t", 0, 5, 9)
    if kind is OffsetsLost:
        assert (error.low, error.high) == (low, high)
    assert re.search(says, str(error))


# What happens meanwhile ---------------------------------------------------------------------


def test_nothing_is_lost_nor_doubled_while_leaders_move(mock_kafka):
    topic = mock_kafka.new_topic()
    n = 2000
    for at in range(0, n, 20):
        mock_kafka.produce(topic, [b"%d" % value for value in range(at, at + 20)])
    faults = [
        lambda: mock_kafka.partition_set_leader(topic, 0, 2),
        lambda: (mock_kafka.broker_set_down(2), mock_kafka.partition_set_leader(topic, 0, 3)),
        lambda: mock_kafka.broker_set_up(2),
        lambda: mock_kafka.fail_requests(1, 6, -195, 3, 5, 7),  # fetches
        lambda: mock_kafka.broker_set_rtt(3, 100),
        lambda: (mock_kafka.broker_set_rtt(3, 0), mock_kafka.partition_set_leader(topic, 0, 1)),
    ]
    found = []
    settings = settings_of(mock_kafka, **SMALL_FETCHES)
    for batch in read_range(settings, OffsetRange(topic, 0, 0, n), 300):
        found += batch.column("value").to_pylist()
        if faults and len(found) > (7 - len(faults)) * 250:
            faults.pop(0)()
    assert not faults
    assert found == [b"%d" % value for value in range(n)]


@pytest.mark.faults
def test_a_reader_goes_on_when_its_broker_was_killed(own_kafka_broker):
    topic = own_kafka_broker.new_topic()
    n = 2000
    for at in range(0, n, 100):
        own_kafka_broker.produce(topic, [b"%d" % value for value in range(at, at + 100)])
    settings = settings_of(own_kafka_broker, **SMALL_FETCHES)
    found, killed = [], False
    for batch in read_range(settings, OffsetRange(topic, 0, 0, n), 300):
        found += batch.column("value").to_pylist()
        if len(found) > n // 2 and not killed:
            killed = True
            own_kafka_broker.kill()
            own_kafka_broker.restart()
            assert own_kafka_broker.produce(topic, [b"behind what it had"]) == [n]
    assert killed
    assert found == [b"%d" % value for value in range(n)]
