"""The settings of a topology: retries, sinks and sizes.

They come from the code that builds the topology, or from a TOML file and the environment:

    Settings(max_attempts=3)
    Settings.load("topology.toml")      # the table [ackcore], then ACKCORE_MAX_ATTEMPTS and so on
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from ackcore._error_hints import near_miss, numbered, seconds_hint
from ackcore.topology.failure_reasons import exception_classes

_PREFIX = "ACKCORE_"
#: Variables with that prefix that the package reads elsewhere.
_NOT_SETTINGS = frozenset(
    {"ACKCORE_BACKEND", "ACKCORE_CPU", "ACKCORE_FAILPOINTS", "ACKCORE_UI_TOKEN"}
)

#: A root id has 6 bits for the attempt; the last few are left unused.
MAX_ATTEMPTS = 60
#: A root id has 16 bits for the partition.
MAX_PARALLELISM = 1 << 16
#: No wait is longer than a year, so that sums of waits in milliseconds fit in 64 bits.
MAX_WAIT_S = 366 * 24 * 3600


#: Arguments of `ackcore.spark.start` and `run_batch` that users look for among the settings.
OF_RUNS = (
    *("checkpoint", "max_dead", "max_dead_ratio", "dead_letters", "accept_changes", "trigger"),
    *("listeners",),
)


class _Range(NamedTuple):
    optional: bool
    least: float
    most: int | None = None
    kind: type[int] | type[float] = int

    def __str__(self) -> str:
        size = f"of at least {self.least}" if self.most is None else f"in {self.least}..{self.most}"
        number = "an integer" if self.kind is int else "a number of seconds"
        return f"{number} {size}" + (", or None" if self.optional else "")


#: The range of a time in seconds, for the metadata of a setting.
_WAIT = {"least": 0.001, "most": MAX_WAIT_S, "kind": float}


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a topology, checked.

    Parameters
    ----------
    max_attempts : int, default 5
        The number of times a record is executed, the first time included, before it becomes a
        dead letter.
    backoff_s : float, default 1.0
        The longest delay before the second attempt. It doubles with each further attempt. The
        actual delay is drawn for each message and attempt, from 1 ms up (full jitter). Times are
        in seconds, with a resolution of 1 ms.
    max_backoff_s : float, default 300.0
        The longest delay that this doubling leads to.
    unavailable_timeout_s : float, default 604800.0
        The age of a record, since it was first read, from which failures with `Unavailable` count
        as attempts. Until then they do not, so that no record dies of an outage. The default is a
        week, as long as Kafka keeps records by default. With 0, all failures count.
    max_waiting : int, default 1000000
        The largest number of records that wait for a retry. Further records that fail become dead
        letters. Replayed records count once they have failed. A stream reads no more new records
        from a `KafkaSpout` than could wait if all of them failed, and none while the limit is
        reached. With 0, no record waits, and a stream reads without this limit.
    max_retries_per_batch : int, default 100000
        The largest number of retries and replayed records in a micro-batch, earliest due first.
        The others go into the next one. Beside a `KafkaSpout` that adapts to ``target_batch_s``,
        retries take at most half of the time. The driver has the ids and reasons of those that
        fail again in memory, and their payloads if they are few.
    max_dead_window : int, optional
        The number of latest ended records (ACKED or DEAD) to which ``max_dead`` and
        ``max_dead_ratio`` of `start` apply: those of the last micro-batches that together have at
        least this number. Earlier records do not count. None for all records since the start.
    parallelism : int, optional
        The number of tasks after each exchange; more if a bolt asks for more. None for Spark's
        ``defaultParallelism``.
    chunk_rows : int, default 65536
        The approximate number of rows in the batches that bolts receive: smaller ones are joined.
    reject : list of exception classes or of their names, default ()
        The exceptions that make a record a dead letter at once, in any bolt. A bolt's own
        `reject` and `retry_on` add to them. Names are ``"ValueError"`` or
        ``"package.module.Class"``; the attribute holds classes.
    max_sink_attempts : int, default 5
        The largest number of calls of a sink with one micro-batch. If the last one fails, the query
        ends. The second call follows after 1 s; the delay doubles with each further call, up to
        `max_backoff_s`.
    max_runs : int, default 8
        The number of failed runs of one micro-batch in a row after which the query ends. A run that
        isolates a crashing record further starts the count anew; an outage of Kafka does not count.
    careful_after : int, default 2
        The number of crashed runs of a micro-batch after which suspected records run alone, to find
        the one that crashes its worker process.
    bolt_call_timeout_s : float, optional
        The time limit of one call of a bolt; None for no limit. A call is a batch of about
        `chunk_rows` rows (with `prepare`, at the first), one suspected record, or a flush. At the
        limit the worker process is killed, as if the call had crashed it. A spout's
        ``deserializer`` has the same limit for each batch it decodes.

        In a bolt that processes several inputs at once (an `AsyncBolt`, or ``threads``), it limits
        the time until the next input, in order, is done. An input may take ``wait_in_task_s``, a
        ``timeout_s`` for each call, the wait for its rate, and the pause of an endpoint. The wait
        for input does not count. Storm's message time-out has no counterpart: a tuple tree ends
        with its micro-batch.
    max_restarts : int, default 5
        The largest number of restarts of a stream after temporary errors, without a micro-batch in
        between. After the next error the query ends. The first restart follows after 1 s; the delay
        doubles with each further one, up to `max_backoff_s`.
    trace_per_million : int, default 0
        The number of attempts in a million that are traced, with the bolts they passed and the
        time of each call: `Progress.traces`, and `Query.pending_tree`.

    Raises
    ------
    TypeError
        If a setting has another type.
    ValueError
        If a setting is out of range, or `reject` has an item that is not an exception class.
    """

    max_attempts: int = field(default=5, metadata={"least": 1, "most": MAX_ATTEMPTS})
    backoff_s: float = field(default=1.0, metadata=_WAIT)
    max_backoff_s: float = field(default=300.0, metadata=_WAIT)
    unavailable_timeout_s: float = field(default=604_800.0, metadata=_WAIT | {"least": 0})
    max_waiting: int = field(default=1_000_000, metadata={"least": 0})
    max_retries_per_batch: int = field(default=100_000, metadata={"least": 1})
    max_dead_window: int | None = field(default=None, metadata={"least": 1})
    parallelism: int | None = field(default=None, metadata={"least": 1, "most": MAX_PARALLELISM})
    chunk_rows: int = field(default=1 << 16, metadata={"least": 1})
    reject: tuple[type[Exception], ...] = ()
    max_sink_attempts: int = field(default=5, metadata={"least": 1})
    max_runs: int = field(default=8, metadata={"least": 1})
    careful_after: int = field(default=2, metadata={"least": 0})
    bolt_call_timeout_s: float | None = field(default=None, metadata=_WAIT | {"least": 1})
    max_restarts: int = field(default=5, metadata={"least": 0})
    trace_per_million: int = field(default=0, metadata={"least": 0, "most": 1_000_000})

    def __new__(cls, *args: Any, **keywords: Any) -> Settings:
        """Make the object; raise TypeError, with a suggestion, for a keyword that is no setting."""
        check_keywords(keywords)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for name, allowed in _RANGES.items():
            _check(name, value := getattr(self, name), allowed)
            if allowed.kind is float and value is not None:
                object.__setattr__(self, name, float(value))
        if self.max_backoff_s < self.backoff_s:
            raise ValueError(
                f"max_backoff_s must be at least backoff_s, got {self.max_backoff_s} and "
                f"{self.backoff_s}; increase the first or decrease the second"
            )
        object.__setattr__(self, "reject", exception_classes(self.reject, "reject"))

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of all settings."""
        return tuple(one.name for one in fields(cls))

    @classmethod
    def load(
        cls,
        toml: str | os.PathLike[str] | None = None,
        environ: Mapping[str, str] | None = None,
        **overrides: Any,
    ) -> Settings:
        """Read settings from a TOML file and the environment.

        A keyword overrides a variable, a variable overrides the file, and the file overrides the
        default.

        Parameters
        ----------
        toml : path, optional
            A file with a table ``[ackcore]``. Its other tables are ignored. None for no file.
        environ : mapping from str to str, optional
            The environment, with variables ``ACKCORE_<SETTING>``; None for ``os.environ``. Commas
            separate several names in ``ACKCORE_REJECT``.
        **overrides
            Settings as keywords.

        Raises
        ------
        TypeError
            If a keyword is not a setting, or a setting has another type.
        ValueError
            If the file or the environment has a setting that is unknown or out of range, or the
            file is not TOML or lacks the table.
        OSError
            If the file cannot be read.
        """
        check_keywords(overrides)
        given: dict[str, Any] = {}
        if toml is not None:
            given.update(_from_toml(Path(toml)))
        given.update(_from_environ(os.environ if environ is None else environ))
        return cls(**{**given, **overrides})


#: The range of each setting that is a number. One whose default is None may be None.
_RANGES = {
    one.name: _Range(one.default is None, **one.metadata)
    for one in fields(Settings)
    if one.metadata
}


def _settings_hint(name: str, arguments: Iterable[str] = ()) -> str:
    if name in OF_RUNS:
        return "it is an argument of start() or run_batch(): pass it there"
    return near_miss(name, (*Settings.names(), *arguments), "settings")


def check_keywords(keywords: Iterable[str], arguments: Iterable[str] = ()) -> None:
    """Raise `TypeError` for keywords that are not settings, with a suggestion for each.

    ``arguments``: the other arguments of the function that takes the keywords, which are suggested
    too.
    """
    unknown = [
        f"{name!r} is not a setting; {_settings_hint(name, arguments)}"
        for name in keywords
        if name not in Settings.names()
    ]
    if unknown:
        raise TypeError(numbered(unknown))


def _check(title: str, value: Any, allowed: _Range) -> None:
    if value is None and allowed.optional:
        return
    if isinstance(value, bool) or not isinstance(value, (int, allowed.kind)):
        hint = seconds_hint(value) if allowed.kind is float else ""
        raise TypeError(f"{title} must be {allowed}, got {type(value).__name__} {value!r}{hint}")
    if not value >= allowed.least or (allowed.most is not None and value > allowed.most):
        raise ValueError(f"{title} must be {allowed}, got {value}")


def _check_in_place(name: str, value: Any, title: str) -> None:
    """Raise TypeError or ValueError for a wrong setting, which the error names by ``title``."""
    if name in _RANGES:
        _check(title, value, _RANGES[name])
    else:
        exception_classes(value, title)


def _from_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            document = tomllib.load(file)
    except ValueError as error:  # invalid TOML or invalid UTF-8
        raise ValueError(f"{path} is not TOML: {error}") from None
    table = document.get("ackcore")
    if not isinstance(table, dict):
        raise ValueError(
            f"{path} must have a table [ackcore] with the settings; "
            f"{near_miss('ackcore', list(document), 'top-level names')}"
        )
    unknown = [
        f"{path}: [ackcore] has {name!r}, which is not a setting; {_settings_hint(name)}"
        for name in table
        if name not in Settings.names()
    ]
    if unknown:
        raise ValueError(numbered(unknown))
    for name, value in table.items():
        _check_in_place(name, value, f"{name} in {path}")
    return table


def _from_environ(environ: Mapping[str, str]) -> dict[str, Any]:
    known = {_PREFIX + name.upper(): name for name in Settings.names()}
    found: dict[str, Any] = {}
    problems: list[str] = []
    for variable in sorted(environ):
        if not variable.startswith(_PREFIX) or variable in _NOT_SETTINGS:
            continue
        if variable not in known:
            problems.append(
                f"{variable} in the environment is not a setting; "
                f"{near_miss(variable, [*known, *sorted(_NOT_SETTINGS)], 'variables', _PREFIX)}"
            )
            continue
        name, text = known[variable], environ[variable]
        if name == "reject":
            found[name] = [part.strip() for part in text.split(",") if part.strip()]
            continue
        try:
            found[name] = _RANGES[name].kind(text)
        except ValueError:
            problems.append(
                f"{variable} in the environment must be {_RANGES[name]}, got {text!r}; "
                "unset it for the default"
            )
    if problems:
        raise ValueError(numbered(problems))
    for name, value in found.items():
        _check_in_place(name, value, f"{_PREFIX}{name.upper()} in the environment")
    return found
