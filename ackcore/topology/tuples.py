"""The objects passed between an engine and a bolt: tuples, reasons of failures, batches of results.

An engine numbers the rows that it passes to one task of a bolt from 0 upwards. This number is the
row's *handle*. The results of a bolt contain handles; only the engine has their roots and edges.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple, NoReturn, final, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ackcore._error_hints import Unquoted, nearest, text_of_error, without_surrogates
from ackcore._records import Int64s
from ackcore.calls.outcomes import Reject, Retry, Unavailable
from ackcore.calls.usage import UsageCounts

#: The maximum number of characters of a message: people read dead letters.
MESSAGE_CHARS = 4096

#: The texts of a `Reason`, in the order of `Reason.encode`. The last may contain `UNIT`.
REASON_TEXTS = ("component", "type", "message")
_texts_of = attrgetter(*REASON_TEXTS)
#: The separator in an encoded reason, a character that is rare in text.
UNIT = "\x1f"
#: The prefix of an encoded reason that counts no attempt.  Final reasons sort first, then those
#: that count, then these: of several reasons for a root, the first in this order is kept.
UNCOUNTED = "~"
#: The start of an encoded reason: "!" if it is final, "-" if it counts an attempt, or "~"; then the
#: shortest delay of the retry in milliseconds, if there is one.
_FLAG = re.compile(r"!|[-~](?:[1-9][0-9]{0,17})?")


class Reason(NamedTuple):
    """The reason why a tuple failed, which is also in the dead letter.

    Attributes
    ----------
    component : str
        The name of the component that failed it.
    type : str
        The class name of the exception, or a word of the engine's: ``"Failed"``, ``"NotAcked"``.
    message : str
        The text of the exception.
    final : bool, default False
        Whether the record is a dead letter at once, without a retry.
    after_ms : int, default 0
        The shortest delay of the retry, in milliseconds after the failure.
    counts : bool, default True
        Whether the failure counts as an attempt. A final one does.
    """

    component: str
    type: str
    message: str
    final: bool = False
    after_ms: int = 0
    counts: bool = True

    @classmethod
    def of(cls, component: str, error: BaseException | str, final: bool = False) -> Reason:
        """Make a reason from an exception, with its class name as type, or from a text: "Failed".

        A `Reject` is final, any other error only with ``final``. A `Retry` that is not final sets
        ``after_ms``, and an `Unavailable` does not count. The text is cut to `MESSAGE_CHARS`. Lone
        surrogates, which are not valid in UTF-8, become question marks.
        """
        if isinstance(error, BaseException):
            kind, text = without_surrogates(type(error).__name__), text_of_error(error)
        else:
            kind, text = "Failed", without_surrogates(error[:MESSAGE_CHARS])
        final = final or isinstance(error, Reject)
        made = cls(component, kind, text[:MESSAGE_CHARS], final)
        if final or not isinstance(error, Retry):
            return made
        # Round up, so that the retry is not due earlier than requested.
        after_ms = math.ceil((error.asked_s or 0.0) * 1000)
        return made._replace(after_ms=after_ms, counts=not isinstance(error, Unavailable))

    def encode(self) -> str:
        """Return the reason as one text, for `decode`. A final reason loses its ``after_ms``."""
        *texts, last = _texts_of(self)
        flag = "!" if self.final else "-" if self.counts else UNCOUNTED
        after = str(self.after_ms) if self.after_ms and not self.final else ""
        return UNIT.join((flag + after, *[text.replace(UNIT, " ") for text in texts], last))

    @classmethod
    def decode(cls, text: str) -> Reason:
        """Return the reason from a text that `encode` returned.

        Raises ValueError if the text is not an encoded reason.
        """
        head, *texts = text.split(UNIT, len(REASON_TEXTS))
        if len(texts) != len(REASON_TEXTS) or _FLAG.fullmatch(head) is None:
            raise ValueError(
                f"Reason.decode() needs a text that Reason.encode() returned, got {text[:80]!r}"
            )
        flag, after_ms = head[0], int(head[1:] or 0)
        named = dict(zip(REASON_TEXTS, texts, strict=True))
        return cls(**named, final=flag == "!", after_ms=after_ms, counts=flag != UNCOUNTED)


class Identity(NamedTuple):
    """The records that the n rows of a batch belong to, in three columns of n values.

    Attributes
    ----------
    message_ids : pyarrow.Array of string, shape (n,)
        The source's id of the record; null for a row without a record.
    attempts : numpy.ndarray of int32, shape (n,)
        The number of earlier attempts of the record, as in `Tuple.attempt`.
    stable_ids : numpy.ndarray of int64, shape (n,)
        An id that is the same for the same row in every attempt: a key for upserts.
    """

    message_ids: pa.Array
    attempts: npt.NDArray[np.int32]
    stable_ids: Int64s

    def part(self, start: int, stop: int) -> Identity:
        """Return the ids and attempts of the rows from ``start`` to ``stop - 1``, not copied."""
        message_ids = self.message_ids.slice(start, stop - start)
        return Identity(message_ids, self.attempts[start:stop], self.stable_ids[start:stop])


@dataclass(slots=True, eq=False)
class Origin:
    """The emitting component, stream, fields and records of a batch, which its tuples share."""

    owner: object  # the collector of the tuples
    #: The source of the tuples.
    component: str
    stream: str
    fields: tuple[str, ...]
    first: int  # the number of the batch's first row in the task
    identity: Identity | None
    _message_ids: list[str | None] | None = None

    def message_id(self, handle: int) -> str | None:
        """Return the message id of a row, by its number in the task; None without one."""
        if self.identity is None:
            return None
        # Most bolts never read it, so the column is converted to text at the first access.
        if self._message_ids is None:
            self._message_ids = self.identity.message_ids.to_pylist()
        return self._message_ids[handle - self.first]


#: The states of a tuple.  HELD: neither acked nor failed when its batch ended.
OPEN, HELD, ACKED, FAILED = range(4)


@final
class Tuple:
    """One input of a bolt: values by position or by field, and the record they come from.

    ``t["word"]``, ``t[0]``, ``len(t)``, ``word, count = t``. Two tuples are equal only if they are
    the same object.

    Attributes
    ----------
    values : tuple
        The values, in the order of ``fields``.
    """

    __slots__ = ("_handle", "_origin", "_state", "values")

    def __init__(self, values: tuple[Any, ...], origin: Origin, handle: int) -> None:
        self.values = values
        self._origin = origin
        self._handle = handle
        self._state = OPEN

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of the values, in their order."""
        return self._origin.fields

    @property
    def component(self) -> str:
        """The name of the component that emitted the tuple."""
        return self._origin.component

    @property
    def stream(self) -> str:
        """The stream to which the component emitted the tuple."""
        return self._origin.stream

    @property
    def message_id(self) -> str | None:
        """The source's id of the record; None without a record, and in `ackcore.spark.attempt`."""
        return self._origin.message_id(self._handle)

    @property
    def attempt(self) -> int:
        """The number of earlier attempts of this record: 0 at the first.

        Failures that count no attempt, such as `Unavailable`, and repeated runs leave it unchanged.
        Always 0 in the function `ackcore.spark.attempt`.
        """
        origin = self._origin
        identity = origin.identity
        return 0 if identity is None else int(identity.attempts[self._handle - origin.first])

    @property
    def stable_id(self) -> int | None:
        """An id of this tuple, equal in every attempt: a key for upserts.

        None in the function `ackcore.spark.attempt`.
        """
        origin = self._origin
        identity = origin.identity
        return None if identity is None else int(identity.stable_ids[self._handle - origin.first])

    @overload
    def __getitem__(self, key: int | str) -> Any: ...
    @overload
    def __getitem__(self, key: slice) -> tuple[Any, ...]: ...
    def __getitem__(self, key: int | str | slice) -> Any:
        if isinstance(key, str):
            fields = self._origin.fields
            try:
                return self.values[fields.index(key)]
            except ValueError:
                near = nearest(key, fields)
                raise KeyError(
                    Unquoted(
                        f"no field {key!r} in a tuple of {self.component}'s stream "
                        f"{self.stream!r}; its fields are {', '.join(fields)}"
                        + (f"; did you mean {near!r}?" if near else "")
                    )
                ) from None
        return self.values[key]

    def __len__(self) -> int:
        return len(self.values)

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values)

    def __repr__(self) -> str:
        pairs = ", ".join(
            f"{name}={value!r}" for name, value in zip(self.fields, self.values, strict=False)
        )
        return f"<Tuple of {self.component}/{self.stream}: {pairs}>"

    # Return the original: a copy would have its own state, which an ack must not change alone.
    def __copy__(self) -> Tuple:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Tuple:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Tuple belongs to one task and cannot be pickled; pickle its values instead"
        )


class Anchors(NamedTuple):
    """The anchors of the rows of an emission: the inputs on which each row depends."""

    handles: Int64s  # inputs, by their number in the task
    #: None if each row has exactly one anchor, ``handles[i]``. Otherwise the anchors of row i are
    #: ``handles[offsets[i]:offsets[i + 1]]``: none (unanchored), one, or several.
    offsets: Int64s | None


class Emission(NamedTuple):
    """Rows emitted to one stream, in the order of emission, and their anchors."""

    stream: str
    batch: pa.RecordBatch  # the rows, at least one, with exactly the stream's schema
    anchors: Anchors  # the anchors of the rows


class FailedInputs(NamedTuple):
    """Inputs that failed, each once, and the reasons."""

    handles: Int64s  # the inputs, by their number in the task
    reasons: list[Reason]  # one reason per handle, or a single one for all


class Results(NamedTuple):
    """The results of one call of an executor.

    They concern rows in the call's batch, and earlier rows that were neither acked nor failed
    before. A handle is the number of such a row in the task, from 0.
    """

    emissions: list[Emission]  # the emitted rows
    failures: list[FailedInputs]  # the failed inputs
    open: int  # the number of rows that are neither acked nor failed so far
    raised: int = 0  # the number of calls of a `BatchBolt`'s ``process`` that raised
    #: The number of times that a breaker of the bolt's calls opened during the call.
    breaker_trips: int = 0
    #: The usage that the bolt's calls reported, if its limit counts it.
    used: UsageCounts | None = None
