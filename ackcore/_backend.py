"""The backend that runs, the interface of a backend, and the look-up of others.

With ``ACKCORE_BACKEND=native`` or ``python``, importing ackcore fails if that backend cannot be
loaded. If the variable is unset or empty, ackcore uses native; if that cannot be loaded, it uses
python, with a warning that gives the cause.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ackcore._records import Entries, Entry, Outcome, Outcomes, Settled, Stats

#: The entry-point group under which other packages register a factory of ledgers.
ENTRY_POINTS = "ackcore.backends"

_OURS = {"native": "ackcore._native", "python": "ackcore._reference"}


def _load(name: str) -> ModuleType:
    module = importlib.import_module(_OURS[name])
    for cls in ("Ledger", "OffsetTracker"):
        if not hasattr(module, cls):
            raise ImportError(
                f"{_OURS[name]} has no {cls}, so it was compiled from another version of ackcore; "
                "reinstall ackcore"
            )
    return module


_HINT = ". Reinstall ackcore, or unset ACKCORE_BACKEND: ackcore then runs on the backend that loads"


def _choose() -> tuple[str, ModuleType]:
    order = os.environ.get("ACKCORE_BACKEND") or None
    if order is not None:
        if order not in _OURS:
            raise ImportError(f"ACKCORE_BACKEND must be 'native' or 'python', got {order!r}")
        try:
            return order, _load(order)
        except Exception as error:
            # A numpy of another ABI raises ValueError or RuntimeError, not ImportError.
            raise ImportError(
                f"ACKCORE_BACKEND={order} cannot be loaded: {type(error).__name__}: {error}{_HINT}"
            ) from error
    try:
        return "native", _load("native")
    except Exception as error:
        warnings.warn(
            "ackcore runs on its slow Python backend, because the native one cannot be loaded: "
            f"{type(error).__name__}: {error}. "
            "Set ACKCORE_BACKEND=python to accept that, ACKCORE_BACKEND=native for an error",
            RuntimeWarning,
            stacklevel=2,
        )
    return "python", _load("python")


if TYPE_CHECKING:
    from ackcore import _reference

    backend: str
    implementation = _reference
else:
    #: "native" or "python", and the module of that backend.
    backend, implementation = _choose()


def kafka_implementation() -> ModuleType:
    """Return the module with the `RecordBuffers` of the backend that runs.

    Only ``ackcore._kafka_native`` also has `RawMessages`, which replaces confluent-kafka's message
    objects. If the native backend runs and this module cannot be imported, this warns and returns
    the Python one, or raises ImportError if ``ACKCORE_BACKEND=native`` is set.
    """
    if backend == "python":
        return implementation
    try:
        return importlib.import_module("ackcore._kafka_native")
    except Exception as error:  # a numpy of another ABI raises ValueError or RuntimeError
        if os.environ.get("ACKCORE_BACKEND"):
            raise ImportError(
                f"ACKCORE_BACKEND=native cannot be loaded: {type(error).__name__}: {error}{_HINT}"
            ) from error
        warnings.warn(
            f"ackcore.kafka reads in Python, which is slow: {type(error).__name__}: {error}. "
            "Install a wheel of ackcore, or a C compiler before you install from source",
            RuntimeWarning,
            stacklevel=2,
        )
        return importlib.import_module("ackcore._reference")


Ledger = implementation.Ledger
OffsetTracker = implementation.OffsetTracker
fingerprint = implementation.fingerprint
gather_binary = implementation.gather_binary
hash_binary = implementation.hash_binary
hash_fixed = implementation.hash_fixed
sort_by_shard = implementation.sort_by_shard
split_by_shard = implementation.split_by_shard
take_shard = implementation.take_shard


@runtime_checkable
class AckerBackend(Protocol):
    """The methods of a ledger, for a backend of your own. `ackcore.Ledger` describes them fully.

    An object with these methods that passes `ackcore.testing.check_backend` can replace a ledger.
    ``isinstance`` checks only that the names exist, not that they work. A row of `Entries` is an
    `Entry`.

    Notes
    -----
    Columns are buffers, contiguous, aligned and of one length: ids of 64 bits, tasks of 32. A type
    that is not supported, such as a list or a masked array, raises TypeError. A length or value
    that is not raises ValueError, and an id beyond 64 bits OverflowError. A call that raises
    applies nothing. The clock is read once in each call with messages, and `LedgerFull` is raised
    after that. Times wrap at 64 bits. A capacity above the largest table's raises MemoryError.
    """

    @property
    def buckets(self) -> int:
        """The number of calls of `rotate` after which an entry expires."""

    @property
    def refresh_on_ack(self) -> bool:
        """Whether every message moves its entry to the newest bucket."""

    @property
    def clock(self) -> Callable[[], int] | None:
        """The callable that returns the time in milliseconds, or None."""

    @property
    def max_entries(self) -> int | None:
        """The limit on the number of entries, or None."""

    @property
    def capacity(self) -> int:
        """The number of entries that fit before the table grows."""

    @property
    def nbytes(self) -> int:
        """The size of the table in bytes of memory."""

    @property
    def stats(self) -> Stats:
        """Counters since the ledger was made."""

    @property
    def tables(self) -> tuple[Any, ...]:
        """Read-only views of the table's memory; empty if the backend has none."""

    def apply(self, root_ids: Any, vals: Any, tasks: Any) -> Outcomes:
        """Apply a mixed batch of messages, in order; return their outcomes.

        ``tasks``: the number of the spout task for an INIT; ACK, FAIL or RESET for the others.
        """

    def init_many(self, root_ids: Any, init_vals: Any, tasks: Any) -> Outcomes:
        """Apply a column of INITs; return their outcomes."""

    def ack_many(self, root_ids: Any, ack_vals: Any) -> Outcomes:
        """Apply a column of ACKs; return their outcomes."""

    def fail_many(self, root_ids: Any) -> Outcomes:
        """Apply a column of FAILs; return their outcomes."""

    def reset_timeout_many(self, root_ids: Any) -> Outcomes:
        """Apply a column of RESETs; return their outcomes."""

    def init(self, root_id: int, init_val: int, task: int) -> Outcome | None:
        """Apply one INIT; return its outcome, or None if it has none."""

    def ack(self, root_id: int, ack_val: int) -> Outcome | None:
        """Apply one ACK; return its outcome, or None if it has none."""

    def fail(self, root_id: int) -> Outcome | None:
        """Apply one FAIL; return its outcome, or None if it has none."""

    def reset_timeout(self, root_id: int) -> Outcome | None:
        """Apply one RESET; return its outcome, or None if it has none."""

    def rotate(self) -> None:
        """Make every entry one bucket older; those of the oldest bucket expire.

        Entries that expired at the call before and were not taken with `expired` are dropped.
        """

    def expired(self, limit: int | None = None) -> Entries:
        """Remove and return entries that expired in the last `rotate`, at most ``limit``."""

    def merge(self, entries: Entries) -> None:
        """Combine another ledger's entries with the pending ones; each keeps its newer bucket.

        Nothing completes.
        """

    def fold(self, root_ids: Any, vals: Any, tasks: Any, times_ms: Any = None) -> None:
        """Combine messages, as in `apply`, with the pending entries; `settle` decides them.

        A message of any kind moves its entry to the newest bucket. ``times_ms``: the time of each
        message; by default the clock's.
        """

    def settle(self, now_ms: int | None = None, timeout_ms: int | None = None) -> Settled:
        """Give each entry a `Status`; remove and return those that are not OPEN.

        ``now_ms``: the time; the clock's by default. ``timeout_ms``: an entry whose last message is
        older is EXPIRED if it would be OPEN, or ORPHAN without an INIT; by default none is.
        """

    def entries(self) -> Entries:
        """Return the pending entries, in any order. They stay in the ledger."""

    @classmethod
    def from_entries(cls, entries: Entries, **arguments: Any) -> AckerBackend:
        """Make a ledger with these entries; the other arguments are those of the factory."""

    def get(self, root_id: int) -> Entry | None:
        """Return the entry of a root, or None if the root is not pending."""

    def oldest(self, n: int) -> Entries:
        """Return the ``n`` entries that expire next, or all if they are fewer. They stay."""

    def __len__(self) -> int: ...

    def __contains__(self, root_id: object) -> bool: ...


def missing_from(ledger: object) -> list[str]:
    """Return the methods and properties of `AckerBackend` that an object lacks; [] if none."""
    names = [name for name in vars(AckerBackend) if not name.startswith("_")]
    return [name for name in [*names, "__len__", "__contains__"] if not hasattr(ledger, name)]


#: Makes a ledger; takes the arguments of `ackcore.Ledger`.
BackendFactory = Callable[..., AckerBackend]


def load_backend(name: str) -> BackendFactory:
    """Return the factory that makes the ledgers of a backend.

    Raises ValueError if no backend has this name, or it was registered with two values. Raises
    ImportError if it cannot be loaded; the cause is in the message and attached. Raises TypeError
    if the registered object is not callable.

    ``name``: ``"native"``, ``"python"``, or a name that an installed package registered under the
    entry-point group ``ackcore.backends``.
    """
    point = None if name in _OURS else _registered(name)
    try:
        factory = _load(name).Ledger if point is None else point.load()
    except Exception as error:  # a numpy of another ABI raises ValueError or RuntimeError
        raise ImportError(
            f"backend {name!r} cannot be loaded: {type(error).__name__}: {error}; reinstall the "
            "package that provides it"
        ) from error
    if not callable(factory):
        raise TypeError(f"backend {name!r} must be a callable that makes ledgers, got {factory!r}")
    return factory  # type: ignore[no-any-return]


def _registered(name: str) -> importlib.metadata.EntryPoint:
    points = importlib.metadata.entry_points(group=ENTRY_POINTS)
    # A package that is twice on the path gives equal entry points, which do not conflict.
    found = {point.value: point for point in points.select(name=name)}
    if len(found) == 1:
        return next(iter(found.values()))
    if found:
        raise ValueError(
            f"backend {name!r} is registered more than once: {', '.join(sorted(found))}; "
            "uninstall the other packages, or remove the other entry points of the package"
        )
    known = sorted({*_OURS, *points.names})
    raise ValueError(f"no backend has the name {name!r}; the known names are {', '.join(known)}")
