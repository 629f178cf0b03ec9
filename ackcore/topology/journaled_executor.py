"""Executors of bolts with ``journal = True``, which make each call once, and their answers.

The *answer* to an input is the rows emitted for it, or the reason of its failure. It is written to
a journal when the call returns. If the same input comes again, because Spark runs a task twice or
repeats a run, its answer is read from the journal and no call is made.

An input is identified by its stable id, attempt, component, stream and values. If a source delivers
other rows in a later run, these are other inputs, and never get the answer of an earlier one.

All emissions of the bolt are read from the journal, the first time too. They are therefore the same
to the byte, whichever of two tasks made the call.
"""

from __future__ import annotations

import secrets
import struct
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from ackcore._arrow.record_batches import one_batch
from ackcore._files.journal import MOST_BYTES, JournalAnswers
from ackcore._files.journal_format import KEY_BYTES
from ackcore.calls.outcomes import as_final
from ackcore.calls.usage import USAGE, Budget
from ackcore.topology.bolt_calls import joined
from ackcore.topology.call_executor import CallExecutor, CallInput, Group
from ackcore.topology.components import BasicBolt
from ackcore.topology.failure_reasons import ReasonMaker
from ackcore.topology.row_conversion import Row, RowSchema, stream_title
from ackcore.topology.row_executor import RowExecutor
from ackcore.topology.tuples import (
    ACKED,
    OPEN,
    Anchors,
    Emission,
    Identity,
    Origin,
    Reason,
    Results,
    Tuple,
)

_EMITTED, _FAILED = 0, 1
_HEAD = struct.Struct("<BxxxI")  # the kind of answer, the number of streams
#: A bit of the kind: the calls reported a cost. The cost and its key follow the head.
_PAID = 2
_COST = struct.Struct("<dI")  # the cost, the number of bytes of its key
_STREAM = struct.Struct("<II")  # the stream's index, the number of bytes of its rows


class Cost(NamedTuple):
    """The cost of the calls of an input, and its key of the bolt's ``limit``, as a text."""

    cost: float
    key: str


NO_COST = Cost(0.0, "")


class _Seen:
    """A set of unsigned 64-bit integers that takes little more than 8 bytes for each.

    A Python set takes 70 to 80. The latest integers are in one, and the others in a sorted column.
    """

    _FEW = 1 << 14

    def __init__(self) -> None:
        self._last: set[int] = set()
        self._sorted = array("Q")

    def add(self, value: int) -> bool:
        """Add an integer; return whether it is new."""
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
    """The answers to the inputs of one bolt in one task, read from a journal and written to it.

    The answer is the rows that the call emitted for the input, or the reason of its failure.
    Several threads may use it at once, except for `key_of` and `settled`.

    ``component``: the bolt's name. ``schemas``: the schema of each stream that the bolt emits.
    ``journal``: the journal in a directory of the bolt's own, with the context that `context_of`
    returns for the same arguments. ``budget``: the money that the calls may cost, to which the
    constructor adds the costs in the journal.
    """

    def __init__(
        self,
        component: str,
        schemas: Mapping[str, pa.Schema],
        journal: JournalAnswers,
        budget: Budget | None = None,
    ) -> None:
        self._component = component
        self._streams = {
            name: RowSchema(stream_title(component, name), schema)
            for name, schema in schemas.items()
        }
        self._names = tuple(schemas)
        self._journal = journal
        self.budget = budget
        self._counted: set[bytes] = set()  # keys whose cost has been added to the budget
        self._paid: list[bytes] = []  # keys that `paid` has written
        if budget is not None:
            for key in journal.known_keys():
                self._count(key, journal.get(key))
        # The keys of equal inputs differ by a number, in any order.  The first eight bytes of a key
        # suffice to see that an input is not repeated, as most are not.
        self._seen = _Seen()
        self._repeats = Counter[bytes]()

    def key_of(self, one: Tuple) -> bytes:
        """Return the key of an input, the same in every run of the task. Call it once per input.

        Equal inputs have different keys: that of the n-th one depends on n.
        """
        origin = (one.component, one.stream, one.stable_id, one.attempt)
        text = f"{origin!r}{one.values!r}".encode("utf-8", "surrogatepass")
        key = _digest(text)
        if self._seen.add(int.from_bytes(key[:8], "little")):
            return key
        self._repeats[key] += 1
        return _digest(key + self._repeats[key].to_bytes(8, "little"))

    def known(self, key: bytes) -> bool:
        """Return whether the journal has an answer to this input, so that no call is needed."""
        return self._journal.get(key) is not None

    def _count(self, key: bytes, data: bytes | None) -> None:
        """Add the cost of an answer to the budget, unless it was added before.

        ``data``: the bytes of the answer, None without one.
        """
        if self.budget is None or data is None or key in self._counted:
            return
        if _HEAD.unpack_from(data)[0] & _PAID:
            cost, size = _COST.unpack_from(data, _HEAD.size)
            text = data[_HEAD.size + _COST.size :][:size].decode("utf-8", "surrogatepass")
            self._counted.add(key)
            self.budget.add(cost, text)

    def emitted(
        self,
        key: bytes,
        rows: Mapping[str, Sequence[Row]],
        reasons: ReasonMaker,
        cost: Cost = NO_COST,
    ) -> None:
        """Write the rows that a call emitted as the answer to its input.

        If they do not fit a schema, or take 1 GiB or more, a final failure is written instead. An
        answer that the journal already has to this input is kept. Raises OSError if the journal
        cannot be written.

        ``key``: the key of the input. ``rows``: the rows of each stream, with values in the order
        of its schema. ``reasons``: makes the reason of the failure. ``cost``: the cost of the call,
        which the caller has added to the budget.
        """
        parts = []
        try:
            for place, name in enumerate(self._names):
                if rows.get(name):
                    batches, misfits = self._streams[name].batches(rows[name])
                    if misfits:
                        raise misfits[0].error
                    data = one_batch([batch for _, batch in batches]).serialize()
                    parts += [_STREAM.pack(place, data.size), data.to_pybytes()]
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a value's own methods are user code
            self.failed(key, reasons.of(as_final(error)), cost)
            return
        answer = b"".join([self._head(key, _EMITTED, len(parts) // 2, cost), *parts])
        if len(answer) >= MOST_BYTES:
            text = f"its call emitted {len(answer)} bytes, and the limit is {MOST_BYTES - 1}"
            text += "; emit a path or a key instead"
            self.failed(key, Reason(self._component, "AnswerTooLarge", text, True), cost)
            return
        self._journal.append(key, answer)

    def failed(self, key: bytes, reason: Reason, cost: Cost = NO_COST) -> None:
        """Write the reason of a failure as the answer to an input, under the rules of `emitted`.

        ``cost``: the cost of the call, which the caller has added to the budget.
        """
        head = self._head(key, _FAILED, 0, cost)
        self._journal.append(key, head + reason.encode().encode())

    def paid(self, cost: Cost) -> None:
        """Write the cost of a failed call at once: its input may be called again before it has an
        answer. The caller has added the cost to the budget.
        """
        key = secrets.token_bytes(KEY_BYTES)  # that of no input
        self._paid.append(key)
        self._journal.append(key, self._head(key, _FAILED, 0, cost))

    def _head(self, key: bytes, kind: int, streams: int, cost: Cost) -> bytes:
        """Return the first bytes of an answer; remember that its cost is in the budget.

        ``kind``: `_EMITTED` or `_FAILED`. ``streams``: the number of streams in the answer.
        """
        if not cost.cost:
            return _HEAD.pack(kind, streams)
        self._counted.add(key)
        text = cost.key.encode("utf-8", "surrogatepass")
        return _HEAD.pack(kind | _PAID, streams) + _COST.pack(cost.cost, len(text)) + text

    def settled(
        self, inputs: Sequence[tuple[bytes, int]]
    ) -> tuple[list[Emission], dict[int, Reason]]:
        """Sync the journal, and return the answers to some inputs; then forget these inputs.

        Call it once per input. Another task that repeats these inputs gets the same answers.

        Raises RuntimeError if an answer is missing or damaged. Raises OSError if the journal cannot
        be written.

        ``inputs``: the key of each input, and its number in the task, in order. Each key has an
        answer. Returns the emissions, those of each stream in the order of the inputs, and the
        reasons of the failed inputs by number.
        """
        self._journal.sync()
        pieces: dict[str, list[tuple[pa.RecordBatch, Anchors]]] = {name: [] for name in self._names}
        failures: dict[int, Reason] = {}
        for key, handle in inputs:
            data = self._journal.get(key)
            if data is None:
                raise RuntimeError(
                    f"the journal of bolt {self._component!r} no longer has a readable answer to "
                    "an input, although its call has returned: a file is damaged or was removed; "
                    "Spark runs the task again, which repeats the call"
                )
            self._count(key, data)  # another attempt of this task may have written it
            answer = self._read(data)
            if isinstance(answer, Reason):
                failures[handle] = answer
                continue
            for name, batch in answer.items():
                pieces[name].append((batch, Anchors(np.full(len(batch), handle), None)))
        done, self._paid = [*(key for key, _ in inputs), *self._paid], []
        self._journal.forget(done)
        self._counted.difference_update(done)
        return [one for name, some in pieces.items() for one in joined(name, some)], failures

    def _read(self, data: bytes) -> dict[str, pa.RecordBatch] | Reason:
        kind, streams = _HEAD.unpack_from(data)
        at = _HEAD.size
        if kind & _PAID:
            at += _COST.size + _COST.unpack_from(data, at)[1]
        if kind & ~_PAID == _FAILED:
            return Reason.decode(data[at:].decode())
        batches, whole = {}, pa.py_buffer(data)
        for _ in range(streams):
            place, size = _STREAM.unpack_from(data, at)
            at += _STREAM.size
            name = self._names[place]
            schema = self._streams[name].schema
            batches[name] = pa.ipc.read_record_batch(whole.slice(at, size), schema)
            at += size
        return batches


def context_of(key: int, component: str, schemas: Mapping[str, pa.Schema]) -> bytes:
    """Return the context of a journal: a digest of a micro-batch, a bolt and its schemas.

    Answers that were written with one context are never returned for another.

    ``key``: the key of the micro-batch, of 64 bits. ``schemas``: the schema of each stream that the
    bolt emits.
    """
    text = f"{key:x}/{component}/".encode()
    for name, schema in schemas.items():
        text += f"{name}/".encode() + schema.serialize().to_pybytes()
    return _digest(text)


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=KEY_BYTES, person=b"ackcore.answers").digest()


class _Journaled(RowExecutor):
    """The common part of `JournaledExecutor` and `JournaledCallExecutor`.

    It executes only inputs without an answer, and returns all answers as results. The bolt is
    prepared before its first call, and not at all if all answers are in the journal. An exception
    of ``prepare`` is not written: all inputs without an answer fail with it.

    ``answers``: those of the bolt in this task. The other parameters are those of the base class.
    """

    _keys: dict[int, bytes]

    def __init__(self, *args: Any, answers: Answers) -> None:
        super().__init__(*args)
        self._answers = answers

    def process(
        self, source: str, stream: str, batch: pa.RecordBatch, identity: Identity | None
    ) -> Results:
        """Run the bolt on those rows of a batch that have no answer; return all rows' answers.

        Raises RuntimeError or OSError if the journal fails.
        """
        fields = tuple(batch.schema.names)
        origin = Origin(self.collector, source, stream, fields, self._seen, identity)
        self._seen += batch.num_rows
        inputs: list[tuple[bytes, int]] = []
        failures: dict[int, Reason] = {}
        self._keys = {}
        asked = self._unanswered(self._slices(origin, batch), inputs)
        head = next(asked, None)
        if head is not None:
            if not self._prepared:
                self._prepare()
            asked = chain([head], asked)
            if self._broken:
                failures = {one._handle: self._broken for some in asked for one in some}
            else:
                self._run_all(asked)
        # If a thread of the bolt emitted too late, the input fails even if it has an answer.
        _, others, _ = self.collector._end_window(self._seen)
        failures |= others
        inputs += [
            (key, handle)
            for handle, key in self._keys.items()
            if handle not in failures or self._answers.known(key)
        ]
        inputs.sort(key=lambda one: one[1])
        emissions, failed = self._answers.settled(inputs)
        return self._results(emissions, dict(sorted({**failed, **failures}.items())))

    def _unanswered(
        self, slices: Iterator[list[Tuple]], inputs: list[tuple[bytes, int]]
    ) -> Iterator[list[Tuple]]:
        """Yield the inputs of each list that have no answer, and store their keys in `_keys`.

        Adds the key of each other input, and its number in the task, to ``inputs``.
        """
        for tuples in slices:
            some = []
            for one in tuples:
                key = self._answers.key_of(one)
                if self._answers.known(key):
                    inputs.append((key, one._handle))
                else:
                    self._keys[one._handle] = key
                    some.append(one)
            if some:
                yield some


class JournaledExecutor(_Journaled):
    """The `Executor` of one task of a `BasicBolt` with ``journal = True`` and one thread."""

    def _execute_basic(self, bolt: BasicBolt, tuples: list[Tuple]) -> None:
        for one in tuples:
            super()._execute_basic(bolt, [one])
            with self.collector._lock:
                rows, reason = self.collector._pop_result(one)
            if reason is not None:
                self._answers.failed(self._keys[one._handle], reason)
            else:
                self._answers.emitted(self._keys[one._handle], rows, self.reasons)


class JournaledCallExecutor(_Journaled, CallExecutor):
    """The `Executor` of one task of a journaled `AsyncBolt`, or `BasicBolt` with several threads.

    The rows of a call are written when it returns, whether or not earlier inputs are done. The
    reason of a failed call is written once all earlier inputs are done.
    """

    def __init__(self, *args: Any, answers: Answers) -> None:
        super().__init__(*args, answers=answers)
        self._unwritten: OSError | None = None
        if answers.budget is not None:
            self._refusal = answers.budget.refusal

    def _async_call(self) -> Callable[..., Awaitable[None]]:
        execute = super()._async_call()

        async def call(group: Group, endpoint: object = None) -> None:
            try:
                await execute(group, endpoint)
            except BaseException:
                self._pay()
                raise
            cost = self._cost_of()
            for input in group:
                self._write_down(input, cost)
                cost = NO_COST

        return call

    def _cost_of(self) -> Cost:
        """Return the cost that this call reported, and add it to the budget. Later reports raise.

        Returns `NO_COST` without a budget or a report.
        """
        budget, usage = self._answers.budget, USAGE.get()
        if budget is None or usage is None:
            return NO_COST
        usage.close()  # a later report would not be in the journal
        if not usage.cost:
            return NO_COST
        budget.add(usage.cost, usage.key)
        return Cost(usage.cost, usage.key)

    def _pay(self) -> None:
        """Write the cost of this call, which raised, to the journal.

        If the journal cannot be written, `_end` raises the OSError.
        """
        cost = self._cost_of()
        if cost.cost:
            try:
                self._answers.paid(cost)
            except OSError as error:
                self._unwritten = error  # as in `_write_down`

    def _execute_in_thread(self, group: Group) -> None:
        super()._execute_in_thread(group)
        if group[0].stopped is None:
            self._write_down(group[0])

    def _write_down(self, input: CallInput, cost: Cost = NO_COST) -> None:
        key = self._keys[input.tuple._handle]
        rows = {
            name: [row for row, _ in input.emitted.get(out, ())]
            for name, out in self.collector._streams.items()
        }
        try:
            if input.misfit is not None:
                self._answers.failed(key, self.reasons.of(input.misfit), cost)
            else:
                self._answers.emitted(key, rows, self.reasons, cost)
        except OSError as error:
            # A failure of the journal, not of the call that this runs in.
            self._unwritten = self._unwritten or error

    def _end(self, input: CallInput, error: BaseException | None) -> None:
        if self._unwritten is not None:
            raise self._unwritten
        one = input.tuple
        if error is not None:
            # If the call did return, the journal has its answer already, and keeps the first.
            self._answers.failed(self._keys[one._handle], self.reasons.of(error))
        with self.collector._lock:
            if one._state == OPEN:
                one._state = ACKED  # so that it takes no more emissions
