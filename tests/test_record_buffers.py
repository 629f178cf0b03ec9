"""Messages become columns alike by both backends, up to what is no record and what does not fit."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ackcore import _reference
from ackcore._records import RawMessage


class _Message(ctypes.Structure):
    """The C struct rd_kafka_message_t."""

    _fields_ = (
        ("err", ctypes.c_int),
        ("topic", ctypes.c_void_p),
        ("partition", ctypes.c_int32),
        ("payload", ctypes.c_void_p),
        ("size", ctypes.c_size_t),
        ("key", ctypes.c_void_p),
        ("key_size", ctypes.c_size_t),
        ("offset", ctypes.c_int64),
        ("private", ctypes.c_void_p),
    )


_POINTER = ctypes.c_void_p
_CONSUME = ctypes.CFUNCTYPE(ctypes.c_ssize_t, _POINTER, ctypes.c_int, _POINTER, ctypes.c_size_t)
_DESTROY = ctypes.CFUNCTYPE(None, _POINTER)
_TIMESTAMP = ctypes.CFUNCTYPE(ctypes.c_int64, _POINTER, _POINTER)
_HEADERS = ctypes.CFUNCTYPE(ctypes.c_int, _POINTER, _POINTER)
_HEADER = ctypes.CFUNCTYPE(ctypes.c_int, _POINTER, ctypes.c_size_t, _POINTER, _POINTER, _POINTER)


def message_of(offset, value=b"", key=None, headers=None, timestamp=(1, 5), error=None):
    """A stand-in for confluent-kafka's message, without the client."""
    return RawMessage(offset, error, key, value, headers, timestamp)


def rows_of(found):
    """Return gathered records as tuples of key, value, headers, offset and time."""
    if found is None:
        return []
    n = len(found.offsets)
    assert [column.dtype for column in (found.offsets, found.times_ms)] == [np.int64, np.int64]
    headers = found.headers or [None] * n
    times = found.times_ms.tolist()
    if found.timed is not None:
        assert not found.timed.all()
        times = [ms if there else None for ms, there in zip(times, found.timed, strict=True)]
    sides = [values_of(column, n) for column in (found.keys, found.values)]
    return list(zip(*sides, headers, found.offsets.tolist(), times, strict=True))


def values_of(column, n):
    assert column.offsets.dtype == np.int32
    assert len(column.offsets) == n + 1
    ends = column.offsets.tolist()
    data = column.data.tobytes()
    assert (ends[0], ends[-1]) == (0, len(data))
    valid = np.ones(n, np.uint8) if column.valid is None else column.valid
    assert column.valid is None or not column.valid.all()
    return [data[ends[i] : ends[i + 1]] if valid[i] else None for i in range(n)]


def row_of(message):
    kind, ms = message.timestamp()
    headers = message.headers() or None
    time_ms = ms if kind and ms != -1 else None  # Kafka stores -1 for none
    return message.key(), message.value(), headers, message.offset(), time_ms


some_bytes = st.none() | st.binary(max_size=9)
headers = st.none() | st.lists(st.tuples(st.text(max_size=2), some_bytes), max_size=2)
messages = st.builds(
    message_of,
    st.integers(0, 3),  # the gap before it
    some_bytes,
    some_bytes,
    headers,
    st.tuples(st.integers(0, 2), st.integers(-1, 2**40)),
    st.sampled_from([None, None, None, None, "an event"]),
)


@given(st.lists(st.lists(messages, max_size=12), max_size=6), st.data())
def test_records_are_gathered_up_to_what_is_none_or_does_not_fit(kafka_native, lists, data):
    at = data.draw(st.integers(0, 2**40))
    stop = at + data.draw(st.integers(0, 120))
    most = data.draw(st.integers(9, 60))
    twins = [backend.RecordBuffers(most) for backend in (kafka_native, _reference)]
    for some in lists:
        for number, message in enumerate(some):
            at += message.offset() + 1
            some[number] = message._replace(offset_=at)
        for place in range(len(some) + 1):
            before = twins[0].rows
            (place_after, *others) = [twin.add(some, place, stop) for twin in twins]
            assert others == [place_after]
            assert {twin.rows for twin in twins} == {before + place_after - place}
            (held,) = {twin.bytes for twin in twins}
            added = some[place:place_after]
            assert all(one.error() is None and one.offset() < stop for one in added)
            if data.draw(st.booleans()):
                rows = [rows_of(twin.taken()) for twin in twins]
                assert rows[0] == rows[1]
                assert rows[0][before:] == [row_of(one) for one in added]
                pairs = [pair for row in rows[0] for pair in row[2] or ()]
                sizes = [len(of or b"") for row in rows[0] for of in row[:2]]
                assert held == sum(sizes) + sum(len(name) + len(of or b"") for name, of in pairs)
                assert all(twin.taken() is None for twin in twins)
                if place_after < len(some) and not before:
                    left = some[place_after]
                    sizes = [
                        sum(len(side or b"") for side in (row[number] for row in rows[0]))
                        + len(of or b"")
                        for number, of in enumerate((left.key(), left.value()))
                    ]
                    assert left.error() or left.offset() >= stop or max(sizes) > most


def test_columns_that_were_taken_are_not_written_to_again(kafka_backend):
    buffers = kafka_backend.RecordBuffers()
    assert buffers.add([message_of(n, b"%03d" % n) for n in range(100)]) == 100
    first = buffers.taken()
    assert buffers.add([message_of(n, b"xxx") for n in range(100)]) == 100
    assert first.values.data.tobytes() == b"".join(b"%03d" % n for n in range(100))
    assert buffers.taken().values.data.tobytes() == b"xxx" * 100
    assert first.offsets.tolist() == [*range(100)]


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (message_of(8, "text"), "the value of message 1 must be bytes or None, got str"),
        (message_of(8, key=bytearray()), "the key of message 1 must be .*, got bytearray"),
        (message_of(None), "NoneType|integer"),
        (message_of(8, timestamp=None), "None"),
    ],
)
def test_what_is_no_message_of_the_client_adds_nothing(kafka_backend, message, says):
    buffers = kafka_backend.RecordBuffers()
    with pytest.raises(TypeError, match=says):
        buffers.add([message_of(7, b"seven"), message, message_of(10)])
    assert (buffers.rows, buffers.bytes, buffers.taken()) == (0, 0, None)
    for most, kind in [(-1, ValueError), (2**31, ValueError), ("1", TypeError)]:
        with pytest.raises(kind, match="most_bytes"):
            kafka_backend.RecordBuffers(most)


@pytest.mark.parametrize(
    "error", [SystemError("no result"), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no")]
)
def test_headers_that_the_client_cannot_read_are_named(kafka_backend, error):
    """The record is read all the same, or nothing behind it ever would be."""

    class Unreadable(RawMessage):
        def headers(self):
            raise error

    buffers = kafka_backend.RecordBuffers()
    two = [Unreadable(*message_of(7, b"a")), Unreadable(*message_of(8, b"b"))]
    assert buffers.add(two) == 2
    rows = rows_of(buffers.taken())
    assert rows == [
        (None, b"a", [("ackcore.unreadable", None)], 7, 5),
        (None, b"b", [("ackcore.unreadable", None)], 8, 5),
    ]


# --- Messages in C are what they are, alike by both backends, and each is let go once.


class Record:
    """A message as librdkafka has it: what is not None lies in memory of its own."""

    def __init__(self, offset, value=b"", key=None, headers=(), timestamp=(1, 5), error=0):
        self.given = offset, value, key, headers, timestamp, error
        self.held = [each and ctypes.create_string_buffer(each, len(each)) for each in (value, key)]
        at = [
            None if each is None else ctypes.addressof(buffer) if each else ctypes.addressof(EMPTY)
            for each, buffer in zip((value, key), self.held, strict=True)
        ]
        self.message = _Message(
            err=error,
            payload=at[0],
            size=len(value or b""),
            key=at[1],
            key_size=len(key or b""),
            offset=offset,
        )
        self.headers, self.timestamp = list(headers), timestamp

    def row(self):
        offset, value, key, headers, (kind, ms), _ = self.given
        shown = [(name.decode("utf-8", "backslashreplace"), value) for name, value in headers]
        return key, value, shown or None, offset, ms if kind and ms != -1 else None


EMPTY = ctypes.create_string_buffer(1)


def varint(value):
    """Return an integer as a zigzag varint."""
    left, found = (value << 1) ^ (value >> 63), bytearray()
    while left > 127:
        found.append(left & 127 | 128)
        left >>= 7
    return bytes([*found, left])


def sized(value):
    """Return bytes or None with their length."""
    return varint(-1) if value is None else varint(len(value)) + value


def put_together(some, wrong=0):
    """Move the keys and values of records into one buffer, in Kafka's message format 2.

    The lengths of the records are too large by ``wrong``.
    """
    whole, places = bytearray(), []
    for number, record in enumerate(some):
        _, value, key, headers, (_, ms), _ = record.given
        parts = [b"\0", varint(ms), varint(number), sized(key), sized(value), varint(len(headers))]
        body = b"".join([*parts, *(sized(name) + sized(of) for name, of in headers)])
        whole += varint(len(body) + wrong)
        ends = [len(whole) + len(b"".join(parts[:n])) for n in (4, 5)]
        whole += body
        places.append(
            [end - len(each or b"") for end, each in zip(ends, (key, value), strict=True)]
        )
    memory = ctypes.create_string_buffer(bytes(whole), len(whole))
    for record, (key_at, value_at) in zip(some, places, strict=True):
        record.held.append(memory)
        if record.message.key_size:
            record.message.key = ctypes.addressof(memory) + key_at
        if record.message.size:
            record.message.payload = ctypes.addressof(memory) + value_at


class Librdkafka:
    """The functions that are called, over a queue of records that a test fills."""

    def __init__(self):
        self.queue, self.out, self.kept = [], {}, []
        self.waited = []
        self.headers_asked = 0
        functions = [
            _CONSUME(self.consume),
            _DESTROY(self.destroy),
            _TIMESTAMP(self.timestamp),
            _HEADERS(self.headers),
            _HEADER(self.header),
        ]
        self.functions = functions
        self.addresses = [ctypes.cast(each, ctypes.c_void_p).value for each in functions]

    def consume(self, queue, wait_ms, room, most):
        assert queue == 77
        self.waited.append((wait_ms, most))
        some, self.queue = self.queue[:most], self.queue[most:]
        into = (ctypes.c_void_p * most).from_address(room)
        for place, record in enumerate(some):
            into[place] = ctypes.addressof(record.message)
            self.out[into[place]] = record
        return len(some)

    def destroy(self, at):
        record = self.out.pop(at)  # which fails if it is let go twice
        ctypes.memset(at, 0xFF, ctypes.sizeof(_Message))
        self.kept.append(record)  # its memory is nobody else's in this test

    def timestamp(self, at, kind):
        ctypes.c_int.from_address(kind).value = self.out[at].timestamp[0]
        return self.out[at].timestamp[1]

    def headers(self, at, found):
        self.headers_asked += 1
        if not self.out[at].headers:
            return -156  # there are none
        ctypes.c_void_p.from_address(found).value = at
        return 0

    def header(self, at, number, name, value, size):
        headers = self.out[at].headers
        if number >= len(headers):
            return -156
        held = [ctypes.create_string_buffer(each or b"") for each in headers[number]]
        self.kept.append(held)
        ctypes.c_void_p.from_address(name).value = ctypes.addressof(held[0])
        is_there = headers[number][1] is not None
        ctypes.c_void_p.from_address(value).value = ctypes.addressof(held[1]) if is_there else None
        ctypes.c_size_t.from_address(size).value = len(headers[number][1] or b"")
        return 0


@pytest.fixture
def library():
    return Librdkafka()


names = st.sampled_from([b"", b"a", "ü".encode(), b"\xff"])
records = st.tuples(
    st.integers(0, 3),  # the gap before it
    some_bytes,
    some_bytes,
    st.lists(st.tuples(names, some_bytes), max_size=2),
    st.tuples(st.integers(0, 2), st.integers(-1, 2**40)),
    st.sampled_from([0, 0, 0, 0, -191]),
)


@given(st.lists(st.lists(records, max_size=12), max_size=5), st.data())
def test_messages_in_c_become_the_columns_that_objects_become(kafka_native, lists, data):
    at = data.draw(st.integers(0, 2**40))
    stop = at + data.draw(st.integers(0, 120))
    most = data.draw(st.integers(9, 60))
    together, wrong = data.draw(st.booleans()), data.draw(st.sampled_from([0, 0, 1, -1]))
    library, next_ = Librdkafka(), at
    raw = kafka_native.RawMessages(library.addresses, 77)
    of_raw, of_objects = kafka_native.RecordBuffers(most), kafka_native.RecordBuffers(most)
    for some in lists:
        for gap, *rest in some:
            next_ += gap + 1
            library.queue.append(Record(next_, *rest))
        given_ = list(library.queue)
        if together:
            put_together(given_, wrong)
        raw.consume(20, 0.5)
        assert len(raw) == len(given_) == len(library.out)
        objects = [raw[place] for place in range(len(raw))]
        for record, message in zip(given_, objects, strict=True):
            if record.given[-1]:
                assert message.error() == (
                    -191,
                    (record.given[1] or b"").rstrip(b"\0").decode("utf-8", "replace"),
                )
                assert message.offset() == record.given[0]
            else:
                assert message.error() is None
                assert row_of(message) == record.row()
        place = 0
        while True:
            after = of_raw.add(raw, place, stop)
            assert of_objects.add(objects, place, stop) == after
            assert (of_raw.rows, of_raw.bytes) == (of_objects.rows, of_objects.bytes)
            added = [one.row() for one in given_[place:after]]
            rows = rows_of(of_raw.taken())
            assert rows == rows_of(of_objects.taken())
            assert rows == added
            place = after + (after == place)  # an event, or what does not fit: go on behind it
            if place >= len(given_):
                break
    raw.clear()
    assert not library.out
    assert len(raw) == 0


@pytest.mark.parametrize(
    ("key", "wrong", "asked"), [(b"k" * 70, 0, 3), (None, 0, 3), (b"k", 1, 90)]
)
def test_records_in_one_buffer_are_not_asked_for_headers(kafka_native, library, key, wrong, asked):
    raw, buffers = kafka_native.RawMessages(library.addresses, 77), kafka_native.RecordBuffers()
    many = [Record(n, None if n == 70 else b"v" * (n + 1), key) for n in range(90)]
    put_together(many, wrong)
    library.queue += many
    raw.consume(90, 0)
    assert buffers.add(raw) == 90
    assert library.headers_asked == asked  # the first record, the one without a value, the next one
    assert rows_of(buffers.taken()) == [one.row() for one in many]


def test_batches_grow_from_several_calls(kafka_native, library):
    raw, buffers = kafka_native.RawMessages(library.addresses, 77), kafka_native.RecordBuffers()
    many = [
        Record(n, b"%d" % n, None if n % 3 else b"k", [(b"h", None)] * (n == 70)) for n in range(90)
    ]
    library.queue += many
    for _ in range(9):
        raw.consume(10, 0.25)
        assert buffers.add(raw) == 10
        assert len(library.out) == 10  # those before are let go
    del raw
    assert not library.out
    assert library.waited == [(250, 10)] * 9
    assert rows_of(buffers.taken()) == [one.row() for one in many]


def test_what_is_asked_for_wrongly_is_refused(kafka_native, library):
    for functions in ([1, 2, 3, 4], [1, 2, 3, 4, 0]):
        with pytest.raises(ValueError, match="functions must be"):
            kafka_native.RawMessages(functions, 77)
    with pytest.raises(ValueError, match="queue must be in 1"):
        kafka_native.RawMessages(library.addresses, 0)
    raw = kafka_native.RawMessages(library.addresses, 77)
    for most in (0, 2**24 + 1):
        with pytest.raises(ValueError, match=r"most must be in 1\.\."):
            raw.consume(most, 0)
    with pytest.raises(IndexError, match="index must be at least 0 and below 0, got 0"):
        raw[0]
    library.queue += [Record(1), Record(2)]
    raw.consume(5, 0)
    for place in (-1, 2):
        with pytest.raises(IndexError, match=f"index must be at least 0 and below 2, got {place}"):
            raw[place]
    with pytest.raises(IndexError, match="index must be at least 0, got -1"):
        kafka_native.RecordBuffers().add(raw, -1)
    assert kafka_native.RecordBuffers().add(raw, 3) == 3
