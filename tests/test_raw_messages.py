"""Messages in C are what they are, alike by both backends, and each is let go once."""

from __future__ import annotations

import ctypes

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_record_buffers import row_of, rows_of

from ackcore import _reference
from ackcore._reference import record_buffers as signatures
from ackcore._reference.record_buffers import _Message


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
        return key, value, shown or None, offset, ms if kind else None


EMPTY = ctypes.create_string_buffer(1)


class Librdkafka:
    """The functions that are called, over a queue of records that a test fills."""

    def __init__(self):
        self.queue, self.out, self.kept = [], {}, []
        self.waited = []
        functions = [
            signatures._CONSUME(self.consume),
            signatures._DESTROY(self.destroy),
            signatures._TIMESTAMP(self.timestamp),
            signatures._HEADERS(self.headers),
            signatures._HEADER(self.header),
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


some_bytes = st.none() | st.binary(max_size=9)
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
    for backend in (kafka_native, _reference):
        library, next_ = Librdkafka(), at
        raw = backend.RawMessages(library.addresses, 77)
        of_raw, of_objects = backend.RecordBuffers(most), backend.RecordBuffers(most)
        for some in lists:
            for gap, *rest in some:
                next_ += gap + 1
                library.queue.append(Record(next_, *rest))
            given_ = list(library.queue)
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


def test_batches_grow_from_several_calls(kafka_backend, library):
    raw, buffers = kafka_backend.RawMessages(library.addresses, 77), kafka_backend.RecordBuffers()
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


def test_what_is_asked_for_wrongly_is_refused(kafka_backend, library):
    for functions in ([1, 2, 3, 4], [1, 2, 3, 4, 0]):
        with pytest.raises(ValueError, match="functions must be"):
            kafka_backend.RawMessages(functions, 77)
    with pytest.raises(ValueError, match="queue must be in 1"):
        kafka_backend.RawMessages(library.addresses, 0)
    raw = kafka_backend.RawMessages(library.addresses, 77)
    for most in (0, 2**24 + 1):
        with pytest.raises(ValueError, match=r"most must be in 1\.\."):
            raw.consume(most, 0)
    library.queue += [Record(1), Record(2)]
    raw.consume(5, 0)
    for place in (-1, 2):
        with pytest.raises(IndexError, match=rf"place must be in 0\.\.1, got {place}"):
            raw[place]
    with pytest.raises(IndexError, match=r"place must be in 0\.\.1, got -1"):
        kafka_backend.RecordBuffers().add(raw, -1)
    assert kafka_backend.RecordBuffers().add(raw, 3) == 3
