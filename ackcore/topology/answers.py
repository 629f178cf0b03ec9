"""The answers to a bolt's calls by input, so that each call is made and paid for once.

A bolt with ``journal = True`` calls something outside with each of its inputs.  What a call came
to, the rows that were emitted for the input or the reason why it failed, is written to a journal
as soon as it is known; where the same input comes again, because Spark runs a task twice or a run
is repeated, it is taken from there and no call is made.

An input is known again by its stable id, its attempt, where it comes from, and its values: where a
source gives other rows in its place the next time, they are other inputs, and never get an answer
that is not theirs.

Whatever a bolt emits leaves by the journal, also the first time: so it is the same to the byte
whichever of two tasks made the call.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from ackcore._files.journal import MOST_BYTES, Answered
from ackcore._files.journal_format import KEY_BYTES
from ackcore.topology.emissions import joined
from ackcore.topology.failure_reasons import Reasons
from ackcore.topology.row_conversion import Row, RowSchema
from ackcore.topology.tuples import Anchors, Emission, Reason, Tuple

_EMITTED, _FAILED = 0, 1
_HEAD = struct.Struct("<BxxxI")  # which of the two, and how many streams
_STREAM = struct.Struct("<II")  # the stream's place among the declared ones, bytes of its rows


class Answer(NamedTuple):
    """The result of a call: a batch for each stream that it emitted to, or a reason."""

    batches: Mapping[str, pa.RecordBatch]
    reason: Reason | None


class _Seen:
    """Integers of 64 bits that were added, in little more than 8 bytes each.

    A set takes 70 to 80, and there is one for each input until the micro-batch ends.  The last ones
    are in a set; when they are a part of all, they are merged into a sorted column.
    """

    _FEW = 1 << 14

    def __init__(self) -> None:
        self._last: set[int] = set()
        self._sorted = array("Q")

    def add(self, value: int) -> bool:
        """Add one; return whether it is new."""
        column = self._sorted
        at = bisect_left(column, value)
        if value in self._last or (at < len(column) and column[at] == value):
            return False
        self._last.add(value)
        if len(self._last) > max(self._FEW, len(column) >> 4):
            last = np.fromiter(self._last, np.uint64, len(self._last))
            merged = np.concatenate([np.frombuffer(column, np.uint64), last])
            merged.sort(kind="stable")
            self._sorted = array("Q", merged.tobytes())
            self._last.clear()
        return True


class Answers:
    """The answers of one bolt in one task, whichever instances of the bolt make the calls.

    Threads may share one, but for `key_of` and `settled`.

    Parameters
    ----------
    component : str
        The bolt's name.
    schemas : mapping of str to pyarrow.Schema
        What it may emit.
    journal : Answered
        Of a place of the bolt's own, and of `context_of` the same arguments.
    """

    def __init__(self, component: str, schemas: Mapping[str, pa.Schema], journal: Answered) -> None:
        self._component = component
        self._streams = {
            name: RowSchema(component, name, schema) for name, schema in schemas.items()
        }
        self._names = tuple(schemas)
        self._journal = journal
        # Inputs that are alike in all are told apart by their number; it does not matter which has
        # which.  Their first eight bytes are enough to tell that most are the first.
        self._seen = _Seen()
        self._repeats = Counter[bytes]()

    def key_of(self, one: Tuple) -> bytes:
        """Return the key of an input, which is to be asked for once."""
        origin = (one.component, one.stream, one.stable_id, one.attempt)
        text = f"{origin!r}{one.values!r}".encode("utf-8", "surrogatepass")
        key = _digest(text)
        if self._seen.add(int.from_bytes(key[:8], "little")):
            return key
        self._repeats[key] += 1
        return _digest(key + self._repeats[key].to_bytes(8, "little"))

    def known(self, key: bytes) -> bool:
        """Whether a call with this input was made and its answer is there."""
        return self._journal.get(key) is not None

    def emitted(self, key: bytes, rows: Mapping[str, Sequence[Row]], reasons: Reasons) -> None:
        """Write down the rows that a call emitted; what does not fit its schema is a failure.

        Parameters
        ----------
        key : bytes
            Of the input.
        rows : mapping of str to sequence of tuple
            By stream, as `RowSchema.row` returns them.
        reasons : Reasons
            Of the component.
        """
        parts = []
        try:
            for place, name in enumerate(self._names):
                if rows.get(name):
                    data = self._streams[name].batch(rows[name]).serialize()
                    parts += [_STREAM.pack(place, data.size), data.to_pybytes()]
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a value's own methods are user code
            self.failed(key, reasons.of(error))
            return
        answer = b"".join([_HEAD.pack(_EMITTED, len(parts) // 2), *parts])
        if len(answer) >= MOST_BYTES:
            text = f"its call emitted {len(answer)} bytes, and a journal takes {MOST_BYTES - 1}"
            self.failed(key, Reason(self._component, "AnswerTooLarge", text))
            return
        self._journal.append(key, answer)

    def failed(self, key: bytes, reason: Reason) -> None:
        """Write down why a call failed."""
        self._journal.append(key, _HEAD.pack(_FAILED, 0) + reason.encode().encode())

    def settled(
        self, inputs: Sequence[tuple[bytes, int]]
    ) -> tuple[list[Emission], dict[int, Reason]]:
        """Agree with all other tasks on the answers to some inputs, and return them.

        Parameters
        ----------
        inputs : sequence of (bytes, int)
            Keys and handles of inputs, in order.  Each key is known.

        Returns
        -------
        emissions : list of Emission
            What came of them, in the order of the inputs.
        failures : dict of int to Reason
            By handle.

        Raises
        ------
        RuntimeError
            If an answer is not there any more, or is damaged.
        OSError
            If the journal cannot be written.
        """
        self._journal.sync()
        pieces: dict[str, list[tuple[pa.RecordBatch, Anchors]]] = {name: [] for name in self._names}
        failures: dict[int, Reason] = {}
        for key, handle in inputs:
            data = self._journal.get(key)
            if data is None:
                raise RuntimeError(
                    f"the answer to an input of {self._component} was in its journal a moment ago, "
                    "and is damaged now; the task has to be run again"
                )
            answer = self._read(data)
            if answer.reason is not None:
                failures[handle] = answer.reason
            for name, batch in answer.batches.items():
                pieces[name].append((batch, Anchors(np.full(len(batch), handle), None)))
        self._journal.forget(key for key, _ in inputs)
        return [one for name, some in pieces.items() for one in joined(name, some)], failures

    def _read(self, data: bytes) -> Answer:
        kind, streams = _HEAD.unpack_from(data)
        if kind == _FAILED:
            return Answer({}, Reason.decode(data[_HEAD.size :].decode()))
        batches, at, whole = {}, _HEAD.size, pa.py_buffer(data)
        for _ in range(streams):
            place, size = _STREAM.unpack_from(data, at)
            at += _STREAM.size
            name = self._names[place]
            schema = self._streams[name].schema
            batches[name] = pa.ipc.read_record_batch(whole.slice(at, size), schema)
            at += size
        return Answer(batches, None)


def context_of(key: int, component: str, schemas: Mapping[str, pa.Schema]) -> bytes:
    """Return what the answers of a bolt are to.

    Parameters
    ----------
    key : int
        The micro-batch's, of 64 bits.
    component : str
        The bolt's name.
    schemas : mapping of str to pyarrow.Schema
        What it may emit.
    """
    text = f"{key:x}/{component}/".encode()
    for name, schema in schemas.items():
        text += f"{name}/".encode() + schema.serialize().to_pybytes()
    return _digest(text)


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=KEY_BYTES, person=b"ackcore.answers").digest()
