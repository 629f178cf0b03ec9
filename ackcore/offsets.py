"""Commits of a Kafka group: the lowest offset that is not done, and metadata about higher ones.

The offset is where a reader begins again. The metadata beside it, a string of at most 4,095
characters, lists the offsets above it that are done, so that they are not processed again.
`encode_metadata` makes both from an `OffsetTracker`, and `decode_metadata` reads them. It accepts
any string: metadata that is damaged or not ackcore's is treated as empty.

The metadata is ``ack``, a digit for the version of the rest, a letter for the encoding of bits as
characters, and the bits: CRC-32, deployment, generation, and four columns of small numbers, Rice
coded. Two columns are the lengths of the runs of holes (or single holes, where that is shorter),
and the number of done offsets after each. The other two are the distances between failed offsets,
and the number of failures of each. (R. F. Rice, "Some practical universal noiseless coding
techniques", 1979. Quotients and remainders are stored apart, so that numpy can read and write each
at once.)
"""

from __future__ import annotations

import base64
import binascii
import logging
from functools import lru_cache
from typing import NamedTuple
from zlib import crc32

import numpy as np
import numpy.typing as npt

from ackcore._arguments import check_state, tracker_key
from ackcore._backend import OffsetTracker
from ackcore._columns import as_count, as_id, signed
from ackcore._records import Int64s, OffsetState

__all__ = ["decode_metadata", "encode_metadata"]

_log = logging.getLogger(__name__)

#: The maximum number of characters of metadata with librdkafka, which appends one. A broker's
#: default limit (``offset.metadata.max.bytes``, in UTF-16 units despite its name) is 4,096.
KAFKA_LIMIT = 4095
#: Room for any header in base64, and for one or two holes.
LEAST_LIMIT = 64

_MAGIC = "ack"
_VERSION = "1"
#: A character of U+0800..U+87FF carries 15 bits: one UTF-16 unit, never a surrogate.
_WIDE, _BASE64 = "u", "b"
_FIRST_WIDE = 0x0800
_WIDE_BITS, _BASE64_BITS = 15, 6

_CRC_BITS, _ID_BITS = 32, 64
#: The maximum number of runs, written or read: if all numbers are 0, a run takes no bit.
_MOST_RUNS = 1 << 18
#: The maximum number of open offsets that is read: a tracker has a bit for each.
_MOST_OPEN = 1 << 32

#: Bits to read: an array of 0 and 1.
Bits = npt.NDArray[np.uint8]
#: Bits to write: the characters 0 and 1.
Digits = bytes

_SIZE_BITS = 6
#: Replaces the Rice parameter of a column whose numbers are all 0; no bits follow.
_ALL_ZERO = 63
#: A quotient of at least _ESCAPE is written separately in _FULL_BITS bits. Otherwise one jump of
#: 10**9 among small numbers would take 10**9 bits.
_ESCAPE, _FULL_BITS = 40, 63


class Commit(NamedTuple):
    """The commit of a partition: the next offset to read, and the metadata."""

    offset: int
    metadata: str


class Restored(NamedTuple):
    """The contents of a commit. ``state`` can always be passed to `OffsetTracker.from_state`.

    ``deployment``, ``generation``: those that were encoded. ``problem``: the reason why only the
    offset counts; the two are then None, and ``state`` has neither holes nor failures. It is None
    if the metadata counts.
    """

    state: OffsetState
    deployment: int | None
    generation: int | None
    problem: str | None


class _Damaged(ValueError):
    """Metadata that is missing, damaged or not written by ackcore; the text is the cause."""


# Encoding -----------------------------------------------------------------------------------


def encode_metadata(
    tracker: OffsetTracker, deployment: int, *, limit: int = KAFKA_LIMIT, wide: bool = True
) -> Commit:
    """Return the commit for a partition.

    ``tracker``: the tracker of the partition. ``deployment``: 64 bits, signed or not, that identify
    the deployment, as in `spout_key`. ``wide``: whether a character carries 15 bits, which Kafka's
    brokers count as one character. False, for brokers that count bytes or refuse non-ASCII text,
    means base64: 6 bits a character.

    ``limit``: the maximum number of characters of the metadata, at least 64. If the state does not
    fit, the failures of the highest offsets are left out first, then the highest holes with all
    done offsets above them. A restart then repeats more work, but never takes an open offset for
    done.

    Returns the committable offset and the metadata, from the same moment. Raises TypeError,
    ValueError or OverflowError if ``limit`` or ``deployment`` is no integer or out of range.
    """
    state = tracker.state(limit=_MOST_RUNS)
    of = tracker.topic, tracker.partition, tracker.generation
    return encode_state(*of, state, deployment, limit=limit, wide=wide)


def encode_state(
    topic: str,
    partition: int,
    generation: int,
    state: OffsetState,
    deployment: int,
    *,
    limit: int = KAFKA_LIMIT,
    wide: bool = True,
) -> Commit:
    """Return the commit of a partition in a state, as `encode_metadata` does for a tracker.

    ``generation``: the number of the partition's assignment. ``state``: the result of
    `OffsetTracker.state`; its parts are not compared. ``deployment``, ``limit``, ``wide``, and the
    errors: see `encode_metadata`.
    """
    limit = as_count(limit, "limit", LEAST_LIMIT)
    deployment = as_id(deployment, "deployment")
    if len(state.hole_starts) > _MOST_RUNS:
        whole = OffsetTracker.from_state(topic, partition, generation, state)
        state = whole.state(limit=_MOST_RUNS)
    per_character = _WIDE_BITS if wide else _BASE64_BITS
    room = (limit - len(_prefix(wide))) * per_character
    whose = deployment % 2**_ID_BITS, generation
    if len(state.hole_starts) or len(state.failed):
        fixed = _fixed(*whose)
        content = _padded([fixed, *_fitting(state, room - _CRC_BITS - len(fixed))], per_character)
    else:
        content = _all_done(*whose, per_character)
    check_sum = crc32(_packed(content), _key(topic, partition, state.committable))
    bits = _field(check_sum, _CRC_BITS) + content
    return Commit(state.committable, _prefix(wide) + (_to_wide if wide else _to_base64)(bits))


def _fixed(deployment: int, generation: int) -> Digits:
    return _field(deployment, _ID_BITS) + _number(generation)


def _padded(pieces: list[Digits], per_character: int) -> Digits:
    """Join pieces; add zeros so that they and the checksum, before them, fill characters."""
    content = b"".join(pieces)
    return content + b"0" * (-(len(content) + _CRC_BITS) % per_character)


@lru_cache(maxsize=1024)
def _all_done(deployment: int, generation: int, per_character: int) -> Digits:
    """Encode all bits after the checksum for a partition without open or failed offsets."""
    none = np.empty(0, np.int64)
    nothing = OffsetState(0, 0, none, none, none, np.empty(0, np.int32))
    fixed = _fixed(deployment, generation)
    return _padded([fixed, *_fitting(nothing, LEAST_LIMIT * per_character)], per_character)


def _prefix(wide: bool) -> str:
    return _MAGIC + _VERSION + (_WIDE if wide else _BASE64)


def _key(topic: str, partition: int, offset: int) -> int:
    """Return the initial value of the checksum, so that it fits only this partition and offset."""
    return crc32(f"{topic}\0{partition}\0{offset}".encode())


def _packed(digits: Digits) -> bytes:
    """Return digits as bytes, eight each; zeros fill the last byte."""
    return int(digits + b"0" * (-len(digits) % 8), 2).to_bytes(-(-len(digits) // 8))


class _RiceNumbers:
    """A column of numbers of 0 or more, and the parameter of its shortest Rice code."""

    def __init__(self, numbers: Int64s) -> None:
        self.numbers = numbers
        self.parameter, self.size = _ALL_ZERO, _SIZE_BITS
        if numbers.any():
            sizes = {guess: _rice_bits(numbers, guess) for guess in _guesses(numbers)}
            self.parameter = min(sizes, key=sizes.__getitem__)
            self.size += sizes[self.parameter]

    def first(self, n: int) -> _RiceNumbers:
        return self if n == len(self.numbers) else _RiceNumbers(self.numbers[:n])

    def bits(self) -> list[Digits]:
        """Return the digits of the parameter, the quotients in unary, the remainders, and the
        escaped quotients.
        """
        parameter = self.parameter
        pieces = [_field(parameter, _SIZE_BITS)]
        if parameter == _ALL_ZERO:
            return pieces
        quotients = self.numbers >> parameter
        escaped = quotients[quotients >= _ESCAPE]
        stops = np.cumsum(np.minimum(quotients, _ESCAPE) + 1) - 1
        unary = np.full(int(stops[-1]) + 1, ord("0"), np.uint8)
        unary[stops] = ord("1")
        remainders = _fields(self.numbers & ((1 << parameter) - 1), parameter)
        return [
            *pieces,
            unary.tobytes(),
            _digits(remainders),
            _digits(_fields(escaped, _FULL_BITS)),
        ]


def _guesses(numbers: Int64s) -> list[int]:
    """Return a few Rice parameters; one of them gives a shortest code."""
    typical = [int(numbers.mean())]
    if numbers.max() > 64 * typical[0]:
        typical.append(int(np.median(numbers)))  # a few are far above all others
    return sorted({max(0, one.bit_length() - by) for one in typical for by in (1, 2)})


def _rice_bits(numbers: Int64s, parameter: int) -> int:
    """Return the size of a column's code with this parameter, in bits."""
    quotients = numbers >> parameter
    escaped = int(np.count_nonzero(quotients >= _ESCAPE))
    unary = int(np.minimum(quotients, _ESCAPE).sum()) + len(numbers)
    return unary + parameter * len(numbers) + escaped * _FULL_BITS


def _fields(numbers: Int64s, width: int) -> Bits:
    """Return the lowest ``width`` bits of all numbers in one array, each highest bit first."""
    shifts = np.arange(width - 1, -1, -1, dtype=np.int64)
    return ((numbers[:, None] >> shifts) & 1).astype(np.uint8).ravel()


def _digits(bits: Bits) -> Digits:
    return (bits | ord("0")).tobytes()


def _field(value: int, width: int) -> Digits:
    """Return the bits of a number, with zeros before them, as ``width`` digits."""
    return f"{value:0{width}b}".encode() if width else b""


def _number(value: int) -> Digits:
    """Encode a number below 2**63 of unknown width: the width, then that many bits."""
    width = value.bit_length()
    return _field(width, _SIZE_BITS) + _field(value, width)


class _Pair:
    """Two columns of the same length, which are encoded with one length."""

    def __init__(self, one: _RiceNumbers, other: _RiceNumbers) -> None:
        self.one, self.other = one, other
        self.head = _number(len(one.numbers))
        self.size = len(self.head) + one.size + other.size

    def first(self, n: int) -> _Pair:
        return _Pair(self.one.first(n), self.other.first(n))

    def fitting(self, room: int) -> _Pair:
        """Return the first numbers of both columns, as many as fit into ``room`` bits or slightly
        fewer.
        """
        if self.size <= room:
            return self
        least, most = 0, len(self.one.numbers)  # least fits, most does not
        while most - least > 1:
            middle = (least + most) // 2
            least, most = (middle, most) if self.first(middle).size <= room else (least, middle)
        return self.first(least)

    def bits(self) -> list[Digits]:
        return [self.head, *self.one.bits(), *self.other.bits()]


def _fitting(state: OffsetState, room: int) -> list[Digits]:
    """Encode the lowest holes, then the lowest failures, as many as fit into ``room`` bits."""
    holes, failed = _holes_of(state), _failed_of(state)
    if holes.size + failed.size > room:
        holes = holes.fitting(room - failed.first(0).size)
        failed = failed.fitting(room - holes.size)
    return [*holes.bits(), *failed.bits()]


def _holes_of(state: OffsetState) -> _Pair:
    """Return the lengths of runs of holes, less 1, and the number of done offsets after each.

    If the code then takes fewer bits, each hole is a run of its own.
    """
    starts, ends = state.hole_starts, state.hole_ends
    lengths = ends - starts
    done = np.append(starts, state.end)[1:] - ends
    runs = _Pair(_RiceNumbers(lengths - 1), _RiceNumbers(done))
    if runs.one.size == _SIZE_BITS or lengths.sum() > min(2 * len(lengths), _MOST_RUNS):
        return runs
    # Single holes have no lengths to write; the length of a run takes at least one bit.
    each = np.zeros(int(lengths.sum()), np.int64)
    each[np.cumsum(lengths) - 1] = done
    singles = _Pair(_RiceNumbers(np.zeros_like(each)), _RiceNumbers(each))
    return min(runs, singles, key=lambda pair: pair.size)


def _failed_of(state: OffsetState) -> _Pair:
    """Return the numbers of offsets before each failed one, and of its failures, less 1.

    The offsets count from the failed one before; before the first, from the committable offset.
    """
    failed = state.failed[:_MOST_RUNS]
    distances = failed.copy()
    distances[:1] -= state.committable
    distances[1:] -= failed[:-1] + 1
    attempts = state.attempts[:_MOST_RUNS].astype(np.int64) - 1
    return _Pair(_RiceNumbers(distances), _RiceNumbers(attempts))


def _to_wide(digits: Digits) -> str:
    powers = 1 << np.arange(_WIDE_BITS - 1, -1, -1, dtype=np.int64)
    bits = np.frombuffer(digits, np.uint8) & 1
    units = bits.reshape(-1, _WIDE_BITS) @ powers + _FIRST_WIDE
    return units.astype("<u2").tobytes().decode("utf-16-le")


def _to_base64(digits: Digits) -> str:
    return base64.b64encode(_packed(digits)).decode().rstrip("=")[: len(digits) // 6]


# Decoding -----------------------------------------------------------------------------------


def decode_metadata(topic: str, partition: int, offset: int, metadata: str | None) -> Restored:
    """Return the contents of a partition's commit.

    Raises TypeError or ValueError for a wrong topic, partition or offset, never for metadata.

    ``offset``: the committed offset. ``metadata``: the committed metadata, by any program. Only the
    offset counts if the metadata is empty or None, is not ackcore's, was written for another
    partition or offset, or is damaged. ``problem`` is then the cause, which is also logged as a
    warning unless the metadata was empty.
    """
    topic, partition, _, offset = tracker_key(topic, partition, 0, offset)
    try:
        deployment, generation, state = _decoded(topic, partition, offset, metadata)
    except _Damaged as damaged:
        if metadata:
            _log.warning(
                "%s-%d: the metadata of the committed offset %d is ignored, because %s; "
                "records above that offset are processed again, even those that were done",
                *(topic, partition, offset, damaged),
            )
        none = np.empty(0, np.int64)
        nothing = OffsetState(offset, offset, none, none, none, np.empty(0, np.int32))
        return Restored(check_state(nothing), None, None, str(damaged))
    return Restored(state, deployment, generation, None)


def _decoded(
    topic: str, partition: int, offset: int, metadata: str | None
) -> tuple[int, int, OffsetState]:
    if not metadata:
        raise _Damaged("the metadata is empty")
    start = len(_MAGIC)
    if metadata[:start] != _MAGIC or metadata[start + 1 : start + 2] not in (_WIDE, _BASE64):
        raise _Damaged(f"the metadata is not ackcore's: {metadata[:40]!r}")
    if metadata[start] != _VERSION:
        raise _Damaged(
            f"the metadata has version {metadata[start]!r}, and this ackcore reads version "
            f"{_VERSION}"
        )
    bits = (_from_wide if metadata[start + 1] == _WIDE else _from_base64)(metadata[start + 2 :])
    reader = _Reader(bits)
    check_sum, content = reader.field(_CRC_BITS), bits[_CRC_BITS:]
    if check_sum != crc32(np.packbits(content).tobytes(), _key(topic, partition, offset)):
        raise _Damaged(
            "the metadata has a wrong checksum: it is damaged, or was written for another partition"
            " or offset"
        )
    deployment, generation = signed(reader.field(_ID_BITS)), reader.number()
    holes, done = reader.pair()
    failed, attempts = reader.pair()
    reader.finish()
    # The lengths of runs of holes and of done offsets, alternating, up to the last done one.
    n = int(np.max(np.flatnonzero(done), initial=-1)) + 1
    holes, done = holes[:n], done[:n]
    if holes.sum(dtype=np.float64) > _MOST_OPEN:
        raise _Damaged(f"the metadata has more than {_MOST_OPEN} open offsets")
    lengths = np.column_stack([holes + 1, done]).ravel()
    bounds = offset + np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    starts, ends = bounds[:-1:2], bounds[1::2]
    apart = starts[1:] != ends[:-1]
    state = OffsetState(
        offset,
        int(bounds[-1]),
        starts[np.append(np.ones(min(1, len(starts)), np.bool_), apart)],
        ends[np.append(apart, np.ones(min(1, len(ends)), np.bool_))],
        offset - 1 + np.cumsum(failed + 1),
        np.minimum(attempts + 1, 2**31 - 1).astype(np.int32),
    )
    try:
        return deployment, generation, check_state(state)
    except (ValueError, TypeError) as error:
        raise _Damaged(f"the metadata is inconsistent: {error}") from error


def _from_wide(text: str) -> Bits:
    try:
        units = np.frombuffer(text.encode("utf-16-le"), "<u2").astype(np.int64) - _FIRST_WIDE
    except UnicodeEncodeError:
        raise _Damaged("the metadata has lone surrogates, which ackcore does not write") from None
    if ((units < 0) | (units >= 1 << _WIDE_BITS)).any():
        raise _Damaged("the metadata has characters that ackcore does not write")
    return _fields(units, _WIDE_BITS)


def _from_base64(text: str) -> Bits:
    try:
        data = base64.b64decode(text + "A" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise _Damaged("the metadata has characters that ackcore does not write") from None
    return np.unpackbits(np.frombuffer(data, np.uint8))[: len(text) * _BASE64_BITS]


class _Reader:
    """Reader of the bits that `_fixed` and `_Pair.bits` encode; raises `_Damaged`."""

    def __init__(self, bits: Bits) -> None:
        self._bits = bits
        self._at = 0

    def _take(self, n: int) -> Bits:
        if n > len(self._bits) - self._at:
            raise _Damaged("the metadata ends too early")
        self._at += n
        return self._bits[self._at - n : self._at]

    def field(self, width: int) -> int:
        """Return the next ``width`` bits as a number."""
        return int.from_bytes(np.packbits(self._take(width)).tobytes()) >> (-width % 8)

    def number(self) -> int:
        return self.field(self.field(_SIZE_BITS))

    def fields(self, n: int, width: int) -> Int64s:
        bits = self._take(n * width).reshape(n, width).astype(np.int64)
        return bits @ (1 << np.arange(width - 1, -1, -1, dtype=np.int64))

    def pair(self) -> tuple[Int64s, Int64s]:
        n = self.number()
        return self._column(n), self._column(n)

    def _column(self, n: int) -> Int64s:
        parameter = self.field(_SIZE_BITS)
        if parameter == _ALL_ZERO:
            if n > _MOST_RUNS:
                raise _Damaged(f"the metadata has {n} holes or failures, over {_MOST_RUNS}")
            return np.zeros(n, np.int64)
        stops = np.flatnonzero(self._bits[self._at :])[:n]
        if len(stops) < n:
            raise _Damaged("the metadata ends too early")
        self._take(int(stops[-1]) + 1 if n else 0)
        quotients = np.diff(stops, prepend=-1).astype(np.int64) - 1
        remainders = self.fields(n, parameter)
        escaped = quotients >= _ESCAPE
        quotients[escaped] = self.fields(int(np.count_nonzero(escaped)), _FULL_BITS)
        return (quotients << parameter) | remainders

    def finish(self) -> None:
        """Raise if more is left than the zeros that fill the last character."""
        rest = self._bits[self._at :]
        if len(rest) >= _WIDE_BITS or rest.any():
            raise _Damaged("the metadata has data after its end")
