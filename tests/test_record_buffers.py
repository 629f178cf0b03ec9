"""Messages become columns alike by both backends, up to what is no record and what does not fit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ackcore import _reference


class FakeMessage:
    """A stand-in for confluent-kafka's message, without the client."""

    def __init__(self, offset, value=b"", key=None, headers=None, timestamp=(1, 5), error=None):
        self._answers = offset, value, key, headers, timestamp, error

    def offset(self):
        return self._answers[0]

    def value(self):
        return self._answers[1]

    def key(self):
        return self._answers[2]

    def headers(self):
        return self._answers[3]

    def timestamp(self):
        return self._answers[4]

    def error(self):
        return self._answers[5]


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
    return message.key(), message.value(), headers, message.offset(), ms if kind else None


some_bytes = st.none() | st.binary(max_size=9)
headers = st.none() | st.lists(st.tuples(st.text(max_size=2), some_bytes), max_size=2)
messages = st.builds(
    FakeMessage,
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
        for message in some:
            _, *rest = message._answers
            at += message.offset() + 1
            message.__init__(at, *rest)
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
    assert buffers.add([FakeMessage(n, b"%03d" % n) for n in range(100)]) == 100
    first = buffers.taken()
    assert buffers.add([FakeMessage(n, b"xxx") for n in range(100)]) == 100
    assert first.values.data.tobytes() == b"".join(b"%03d" % n for n in range(100))
    assert buffers.taken().values.data.tobytes() == b"xxx" * 100
    assert first.offsets.tolist() == [*range(100)]


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (FakeMessage(8, "text"), "the value of message 1 must be bytes or None, got str"),
        (FakeMessage(8, key=bytearray()), "the key of message 1 must be .*, got bytearray"),
        (FakeMessage(None), "NoneType|integer"),
        (FakeMessage(8, timestamp=None), "None"),
    ],
)
def test_what_is_no_message_of_the_client_adds_nothing(kafka_backend, message, says):
    buffers = kafka_backend.RecordBuffers()
    with pytest.raises(TypeError, match=says):
        buffers.add([FakeMessage(7, b"seven"), message, FakeMessage(10)])
    assert (buffers.rows, buffers.bytes, buffers.taken()) == (0, 0, None)
    for most, kind in [(-1, ValueError), (2**31, ValueError), ("1", TypeError)]:
        with pytest.raises(kind, match="most_bytes"):
            kafka_backend.RecordBuffers(most)


@pytest.mark.parametrize(
    "error", [SystemError("no result"), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no")]
)
def test_headers_that_the_client_cannot_read_are_named(kafka_backend, error):
    """The record is read all the same, or nothing behind it ever would be."""

    class Unreadable(FakeMessage):
        def headers(self):
            raise error

    buffers = kafka_backend.RecordBuffers()
    assert buffers.add([Unreadable(7, b"a"), Unreadable(8, b"b")]) == 2
    rows = rows_of(buffers.taken())
    assert rows == [
        (None, b"a", [("ackcore.unreadable", None)], 7, 5),
        (None, b"b", [("ackcore.unreadable", None)], 8, 5),
    ]
