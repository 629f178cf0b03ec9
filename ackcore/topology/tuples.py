"""The objects passed between an engine and a bolt: tuples, reasons of failures, batches of results.

An engine numbers the rows that it hands to one task of a bolt from 0 upwards; such a number is the
row's *handle*.  Bolts answer in handles; only the engine has their roots and edges.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, final, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ackcore._records import Int64s
from ackcore.topology._words import nearest

#: Characters of a message that a reason keeps: a dead letter is read by people.
MESSAGE_CHARS = 4096

#: Between the parts of an encoded reason; a character that text hardly ever holds.
UNIT = "\x1f"
#: Begins an encoded reason that is no attempt.  What is final sorts before what counts, and that
#: before this: of several reasons for a root the first in this order is kept.
UNCOUNTED = "~"
#: How an encoded reason begins: what it is, and the wait in milliseconds if it asks for one.
_FLAG = re.compile(r"!|[-~](?:[1-9][0-9]{0,17})?")


class Reason(NamedTuple):
    """Why a tuple failed; travels to the dead letter.

    Attributes
    ----------
    component : str
        Name of the component that failed it.
    type : str
        Name of the exception's class, or a word of the engine's: ``"Failed"``, ``"NotAcked"``.
    message : str
        The exception's text.
    final : bool, default False
        True if it is not to be tried again: it goes straight to the dead letters.
    after_ms : int, default 0
        Milliseconds from the failure until its record may be due at the earliest.
    counts : bool, default True
        False if it was no attempt at the record: nothing was taken.  A final one counts.
    """

    component: str
    type: str
    message: str
    final: bool = False
    after_ms: int = 0
    counts: bool = True

    @classmethod
    def of(cls, component: str, error: BaseException | str, final: bool = False) -> Reason:
        """Make the reason that an exception, or a bare text, stands for.

        The text is cut to `MESSAGE_CHARS`, and what no column of text can hold is replaced.
        """
        if isinstance(error, BaseException):
            kind = type(error).__name__
            try:
                text = str(error)
            except KeyboardInterrupt:
                raise
            except BaseException as broken:  # the user's __str__ is user code like any other
                text = f"its text is not to be had: __str__ raised {type(broken).__name__}"
        else:
            kind, text = "Failed", error
        return cls(component, _clean(kind), _clean(text[:MESSAGE_CHARS]), final)

    def encode(self) -> str:
        """Return the reason as one text, which `decode` reads."""
        # Only the last part may hold the separator: decode splits off as many as there must be.
        head = (part.replace(UNIT, " ") for part in (self.component, self.type))
        flag = "!" if self.final else "-" if self.counts else UNCOUNTED
        after = str(self.after_ms) if self.after_ms and not self.final else ""
        return UNIT.join((flag + after, *head, self.message))

    @classmethod
    def decode(cls, text: str) -> Reason:
        """Read what `encode` wrote.

        Raises
        ------
        ValueError
            If the text is not an encoded reason.
        """
        parts = text.split(UNIT, 3)
        if len(parts) != 4 or _FLAG.fullmatch(parts[0]) is None:
            raise ValueError(f"not an encoded reason: {text[:80]!r}; Reason.encode() writes them")
        head, component, kind, message = parts
        flag, after_ms = head[0], int(head[1:] or 0)
        return cls(component, kind, message, flag == "!", after_ms, flag != UNCOUNTED)


def _clean(text: str) -> str:
    """Replace lone surrogates: they are in no UTF-8, so no column of text can hold them."""
    return text.encode("utf-8", "replace").decode("utf-8")


class Identity(NamedTuple):
    """The records of the n rows of a batch: three parallel columns.

    Attributes
    ----------
    message_ids : pyarrow.Array of string, shape (n,)
        What the source calls the record; null for a row that hangs from no record.
    attempts : numpy.ndarray of int32, shape (n,)
        How often the record was tried before: 0 the first time.
    stable_ids : numpy.ndarray of int64, shape (n,)
        The same for the same row in every attempt: a key for upserts.
    """

    message_ids: pa.Array
    attempts: npt.NDArray[np.int32]
    stable_ids: Int64s

    def part(self, start: int, stop: int) -> Identity:
        """Return the identity of rows from ``start`` up to ``stop``."""
        message_ids = self.message_ids.slice(start, stop - start)
        return Identity(message_ids, self.attempts[start:stop], self.stable_ids[start:stop])


class Origin:
    """The fields that the tuples of one batch share; a tuple holds this and its own values."""

    __slots__ = ("_identity", "_message_ids", "component", "fields", "first", "owner", "stream")

    def __init__(
        self,
        owner: object,
        component: str,
        stream: str,
        fields: tuple[str, ...],
        first: int,
        identity: Identity | None,
    ) -> None:
        self.owner = owner
        self.component = component
        self.stream = stream
        self.fields = fields
        self.first = first
        self._identity = identity
        self._message_ids: list[str | None] | None = None

    def message_id(self, handle: int) -> str | None:
        """Message id of the row with this handle."""
        if self._identity is None:
            return None
        # Most bolts never ask: the column becomes text when the first one does.
        if self._message_ids is None:
            self._message_ids = self._identity.message_ids.to_pylist()
        return self._message_ids[handle - self.first]

    def attempt(self, handle: int) -> int:
        """Attempt of the row with this handle."""
        return 0 if self._identity is None else int(self._identity.attempts[handle - self.first])

    def stable_id(self, handle: int) -> int | None:
        """Stable id of the row with this handle."""
        if self._identity is None:
            return None
        return int(self._identity.stable_ids[handle - self.first])


#: What has become of a tuple.  HELD is OPEN in a later batch than the one that brought it.
OPEN, HELD, ACKED, FAILED = range(4)


@final
class Tuple:
    """One input of a bolt: values by position or by field, and which record they come from.

    ``t["word"]``, ``t[0]``, ``len(t)``, ``word, count = t``.  Two tuples are equal only if they are
    the same one.

    Attributes
    ----------
    values : tuple
        Its values, in the order of ``fields``.
    """

    __slots__ = ("_handle", "_origin", "_state", "values")

    def __init__(self, values: tuple[Any, ...], origin: Origin, handle: int) -> None:
        self.values = values
        self._origin = origin
        self._handle = handle
        self._state = OPEN

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of its values."""
        return self._origin.fields

    @property
    def component(self) -> str:
        """Name of the component that emitted it."""
        return self._origin.component

    @property
    def stream(self) -> str:
        """The stream of that component that it was emitted to."""
        return self._origin.stream

    @property
    def message_id(self) -> str | None:
        """The source's name of the record; None for a tuple without a record."""
        return self._origin.message_id(self._handle)

    @property
    def attempt(self) -> int:
        """The number of earlier attempts of this record: 0 at the first."""
        return self._origin.attempt(self._handle)

    @property
    def stable_id(self) -> int | None:
        """A number of this tuple's own that stays the same across attempts: a key for upserts."""
        return self._origin.stable_id(self._handle)

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
                    f"no field {key!r} in a tuple of {self.component}'s stream {self.stream!r}; "
                    f"its fields are {', '.join(fields)}"
                    + (f"; did you mean {near!r}?" if near else "")
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

    # A copy would be acked without the original knowing; there is one of each.
    def __copy__(self) -> Tuple:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Tuple:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Tuple lives in the task that got it; pickle its values instead")


class Anchors(NamedTuple):
    """The input rows that the rows of an emission are anchored to.

    Attributes
    ----------
    handles : numpy.ndarray of int64
        Handles of inputs.
    offsets : numpy.ndarray of int64, optional
        None: ``handles`` has exactly one per row.  Else row i hangs from
        ``handles[offsets[i]:offsets[i + 1]]``: from none (unanchored), one, or several.
    """

    handles: Int64s
    offsets: Int64s | None


class Emission(NamedTuple):
    """Rows emitted to one stream, in order of emission.

    Attributes
    ----------
    stream : str
    batch : pyarrow.RecordBatch
        Of exactly the stream's declared schema; never without rows.
    anchors : Anchors
    """

    stream: str
    batch: pa.RecordBatch
    anchors: Anchors


class Failure(NamedTuple):
    """Inputs that failed; no handle is ever named twice.

    Attributes
    ----------
    handles : numpy.ndarray of int64
    reasons : list of Reason
        One per handle, or a single one for them all.
    """

    handles: Int64s
    reasons: list[Reason]


@dataclass(frozen=True)
class Raised:
    """The exception that a `BatchBolt` raised from ``process``, in a batch that is then bisected.

    Attributes
    ----------
    calls : int
        That raised.
    rows : int
        That raised by themselves.
    types : collections.Counter of str
        How many of these rows raised which type of exception.
    """

    calls: int = 0
    rows: int = 0
    types: Counter[str] = field(default_factory=Counter)

    def __add__(self, other: Raised) -> Raised:
        types = self.types + other.types
        return Raised(self.calls + other.calls, self.rows + other.rows, types)

    def to_json(self) -> list[Any]:
        """Return what `from_json` reads, with no more than the commonest types.

        The order is that of the counts and names, and no matter of what came first.
        """
        pairs = sorted(self.types.items(), key=lambda pair: (-pair[1], pair[0]))
        return [self.calls, self.rows, pairs[:_MOST_TYPES]]

    @classmethod
    def from_json(cls, said: list[Any]) -> Raised:
        """Return what `to_json` wrote."""
        calls, rows, pairs = said
        return cls(calls, rows, Counter(dict(pairs)))


#: Types of exceptions that a task tells of: a bolt may make new ones as it goes.
_MOST_TYPES = 8


class Results(NamedTuple):
    """The results of one call of an executor.

    It names no handles but those of the batch it answers and those that were open before it.

    Attributes
    ----------
    emissions : list of Emission
    failures : list of Failure
    open : int
        Handles that are neither acked nor failed so far.
    raised : Raised, optional
        What a `BatchBolt` raised, if it did.
    breaker_trips : int, default 0
        How often a breaker of its calls opened meanwhile.
    """

    emissions: list[Emission]
    failures: list[Failure]
    open: int
    raised: Raised | None = None
    breaker_trips: int = 0
