"""The checked settings of a consumer."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ackcore._columns import as_count, count_or_none, positive
from ackcore._error_hints import refused_call
from ackcore.calls.threads import refuse_lazy
from ackcore.dead_limit import DeadLimit
from ackcore.kafka.client_settings import ClientSettings
from ackcore.kafka.consumer.consumer_records import Failure, KafkaRecord
from ackcore.kafka.consumer.held_partition import Limits
from ackcore.kafka.producing import check_options, check_topic
from ackcore.kafka.start_positions import Start, as_start
from ackcore.retry import Policy

Protocol = Literal["cooperative", "eager", "consumer"]
OutOfRange = Literal["earliest", "latest", "fail"]
OrderedBy = Literal["key", "partition"]
#: Called with the consumer and pairs of topic and partition.
Rebalanced = Callable[[Any, list[tuple[str, int]]], object]
KeepDead = str | Callable[[KafkaRecord, Failure], object]

OTHER_TOPIC = (
    "The consumer would read its own dead letters. Name another topic, or a pattern that does not "
    "match it: '^orders$' does not match orders-dead"
)

#: librdkafka's default.  The group removes a member that does not poll for this long.
_MAX_POLL_MS = 300_000
#: The time that a revocation takes besides the drain, mainly for a commit.
_REVOKE_S = 5.0


@dataclass(frozen=True)
class ConsumerSettings:
    """The checked arguments of a `Consumer`, which describes them and the errors."""

    client: ClientSettings
    group_id: str
    topics: tuple[str, ...]
    partitions: tuple[tuple[str, int], ...]
    protocol: Protocol = "cooperative"
    start: Start = "earliest"
    force_from_start: str | None = None
    max_offset_behind: int | None = None
    tasks: int | None = None
    task: int | None = None
    refresh_s: float = 60.0
    out_of_range: OutOfRange | None = None
    dead_letters: KeepDead | None = None
    max_dead: int | None = None
    max_dead_ratio: float | None = None
    max_dead_window: int | None = 1000
    max_attempts: int = 5
    backoff_s: float = 1.0
    max_backoff_s: float = 300.0
    timeout_s: float | None = None
    unavailable_timeout_s: float = 7 * 24 * 3600.0
    commit_interval_s: float = 1.0
    drain_s: float = 10.0
    on_assign: Rebalanced | None = None
    on_revoke: Rebalanced | None = None
    ordered_by: OrderedBy | None = None
    max_in_flight: int = 10_000
    max_in_flight_bytes: int = 16 << 20
    max_waiting: int = 10_000
    max_waiting_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        if not isinstance(self.group_id, str):
            raise TypeError(f"group_id must be a str, got {type(self.group_id).__name__}")
        if not self.group_id:
            raise ValueError("group_id must not be empty: the offsets of this group are committed")
        self._one_of("protocol", ("cooperative", "eager", "consumer"))
        as_start(self.start, ("earliest", "latest"))
        self._one_of("out_of_range", ("earliest", "latest", "fail", None))
        self._one_of("ordered_by", ("key", "partition", None))
        for name in ("on_assign", "on_revoke"):
            if (called := getattr(self, name)) is not None and not callable(called):
                raise TypeError(
                    f"{name} must be callable, with the consumer and a list of (topic, partition) "
                    f"as arguments; got {type(called).__name__}"
                )
            refuse_lazy(called, name)
        as_count(self.max_attempts, "max_attempts", 1, 2**62)
        for name in ("backoff_s", "max_backoff_s"):
            positive(getattr(self, name), name, 1e9, "seconds")
        for name in ("max_in_flight", "max_in_flight_bytes", "max_waiting", "max_waiting_bytes"):
            as_count(getattr(self, name), name, 1)
        for name, least in (("max_offset_behind", 0), ("max_dead_window", 1)):
            count_or_none(getattr(self, name), name, least)
        self.dead_limit()
        if self.force_from_start is not None and not isinstance(self.force_from_start, str):
            raise TypeError(
                "force_from_start must be a str, the name of this deployment such as 'release 12', "
                f"got {type(self.force_from_start).__name__}; each new name applies start once"
            )
        if self.timeout_s is not None:
            positive(self.timeout_s, "timeout_s", 1e9, "seconds")
        for name in ("unavailable_timeout_s", "commit_interval_s", "refresh_s"):
            positive(getattr(self, name), name, 1e9, "seconds")
        self.check_drain(self.drain_s)
        self._check_topics()
        self._check_tasks()

    def _one_of(self, name: str, choices: tuple[str | None, ...]) -> None:
        value = getattr(self, name)
        if value not in choices:
            raise ValueError(
                f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}"
            )

    def check_drain(self, drain_s: float) -> None:
        """Raise TypeError if ``drain_s`` is no number, and ValueError if it is out of range.

        The longest is 5 s less than ``max.poll.interval.ms``.
        """
        if drain_s != 0:
            positive(drain_s, "drain_s", unit="seconds")
        most_s = self._max_poll_s() - _REVOKE_S
        if drain_s > most_s:
            raise ValueError(
                f"drain_s must be at most {most_s:g}, got {drain_s:g}: the group removes a member "
                f"after max.poll.interval.ms, and the last commit needs {_REVOKE_S:g} s of that; "
                "raise max.poll.interval.ms in options"
            )

    def _max_poll_s(self) -> float:
        given = self.client.options.get("max.poll.interval.ms", _MAX_POLL_MS)
        try:
            return int(str(given)) / 1000
        except ValueError:
            return _MAX_POLL_MS / 1000  # librdkafka refuses the value with its own message

    def _check_topics(self) -> None:
        if bool(self.topics) == bool(self.partitions):
            raise ValueError(
                "topics or partitions must be given, and not both: the group assigns the "
                f"partitions of topics; got topics={self.topics!r} and "
                f"partitions={self.partitions!r}"
            )
        dead = self.dead_letters
        if dead is not None and not isinstance(dead, str) and not callable(dead):
            raise TypeError(
                f"dead_letters must be a topic's name or a callable, got {type(dead).__name__}"
            )
        refuse_lazy(dead, "dead_letters")  # a letter would count as stored
        if callable(dead) and (takes := refused_call(dead, ("record", "failure"))) is not None:
            raise TypeError(
                f"dead_letters must be a function of (record, failure), got a function of {takes}"
            )
        if isinstance(dead, str):
            # The producer of dead letters receives the same options, and does not need this one.
            check_options(self.client, but=["error_cb"])
            check_topic(dead, "dead_letters")
            read = {*self.topics, *(topic for topic, _ in self.partitions)}
            found = next((one for one in sorted(read) if self._fits(one, dead)), None)
            if found is not None:
                pattern = f", which {found!r} matches" if found != dead else ""
                raise ValueError(
                    "dead_letters must not be a topic that the consumer reads, "
                    f"got {dead!r}{pattern}. {OTHER_TOPIC}"
                )

    def _fits(self, name: str, topic: str) -> bool:
        """Return whether ``name``, a topic's name or a pattern, matches ``topic``.

        Python's patterns differ from those of librdkafka (POSIX) and of brokers (RE2/J). If Python
        does not find a match and there is one, the topic is refused when it is assigned.
        """
        if not name.startswith("^"):
            return name == topic
        # A broker matches whole names, librdkafka any part.
        fits = re.fullmatch if self.protocol == "consumer" and self.tasks is None else re.search
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of [[:alpha:]]
            try:
                return fits(name, topic) is not None
            except re.error:
                return False

    def _check_tasks(self) -> None:
        if self.tasks is None and self.task is None:
            return
        if self.tasks is None or self.task is None or not self.topics:
            raise ValueError(
                "tasks and task must be given together, and with topics: task i of T reads the "
                "partitions i, i + T, ... of the topics; "
                f"got tasks={self.tasks!r}, task={self.task!r}, topics={self.topics!r}"
            )
        as_count(self.task, "task", 0, as_count(self.tasks, "tasks", 1) - 1)

    @property
    def policy(self) -> Policy:
        """The attempts of a record, and the delays between them."""
        return Policy.of_seconds(self.max_attempts, self.backoff_s, self.max_backoff_s)

    @property
    def limits(self) -> Limits:
        """The limits on records and bytes in flight and waiting."""
        return Limits(
            self.max_in_flight, self.max_in_flight_bytes, self.max_waiting, self.max_waiting_bytes
        )

    def dead_limit(self) -> DeadLimit:
        """Make the limit for ``max_dead``, ``max_dead_ratio`` and ``max_dead_window``."""
        return DeadLimit(self.max_dead, self.max_dead_ratio, self.max_dead_window)

    @property
    def is_manual(self) -> bool:
        """Whether the consumer assigns its partitions itself: by ``partitions`` or ``tasks``."""
        return bool(self.partitions) or self.tasks is not None

    @property
    def on_out_of_range(self) -> OutOfRange:
        """``out_of_range``. Its default is "earliest" with ``dead_letters``, else "fail"."""
        return self.out_of_range or ("fail" if self.dead_letters is None else "earliest")


def as_topics(topics: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the argument ``topics`` as a tuple of names and patterns, without duplicates.

    Returns () for None. Raises TypeError if a name is empty or no text.
    """
    names = (topics,) if isinstance(topics, str) else tuple(topics or ())
    for name in names:
        if not isinstance(name, str) or not name:
            raise TypeError(
                f"topics must be the name of a topic or a list of names, got {name!r} as a name"
            )
    return tuple(dict.fromkeys(names))


def as_partitions(partitions: Sequence[tuple[str, int]] | None) -> tuple[tuple[str, int], ...]:
    """Return the argument ``partitions`` as a tuple of pairs, without duplicates.

    Returns () for None. Raises TypeError if an element is no pair of a topic and a number, and
    ValueError if the number is out of range.
    """
    found = []
    for each in partitions or ():
        match each:
            case (str(topic), number) if topic:
                found.append((topic, as_count(number, "partitions", 0, 2**31 - 1)))
            case _:
                raise TypeError(
                    "partitions must be pairs of topic and number, such as ('orders', 0), "
                    f"got {each!r}"
                )
    return tuple(dict.fromkeys(found))
