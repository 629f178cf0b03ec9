"""The errors of reading from and asking Kafka. None holds a secret."""

from __future__ import annotations

from typing import Any

from confluent_kafka import KafkaError, KafkaException

from ackcore.kafka.ranges import OffsetRange
from ackcore.kafka.settings import ClientSettings


def is_fatal(error: KafkaError) -> bool:
    """Whether a client has ended with it, which answers and messages of it do not say themselves.

    Another process that has its ``group.instance.id`` is such an error, too.
    """
    return error.fatal() or error.code() in (KafkaError._FATAL, KafkaError.FENCED_INSTANCE_ID)


class OffsetsLost(RuntimeError):
    """Offsets that were to be read are not there any more, or not yet again.

    Attributes
    ----------
    range : OffsetRange
        What was still to be read when it was noticed; all before it was read.
    low, high : int
        The partition has offsets from ``low``, and its next record will get ``high``.  So what is
        lost is up to ``low``; where ``range.start`` is above ``high``, the partition was truncated
        or its topic made anew, and ``low`` says nothing.
    """

    def __init__(self, range: OffsetRange, low: int, high: int) -> None:
        super().__init__(range, low, high)
        self.range, self.low, self.high = range, low, high

    def __str__(self) -> str:
        if self.range.start > self.high:
            return (
                f"{self.range} cannot be read: the partition ends at offset {self.high}; it was "
                "truncated, or its topic was deleted and made again"
            )
        return (
            f"{self.range} cannot be read: offsets below {self.low} were deleted, by the topic's "
            "retention or by hand"
        )


class LogTruncated(RuntimeError):
    """The log of a partition was truncated below what was to be read, and written anew.

    Nothing tells which of its records were read before: this is no `OffsetsLost`, whose offsets up
    to ``low`` are gone and whose others are as they were.

    Attributes
    ----------
    range : OffsetRange
        What was still to be read when it was noticed.
    low, high : int
        The partition has offsets from ``low``, and its next record will get ``high``;
        ``range.start`` is among them.
    cause : str
        What librdkafka says.
    """

    def __init__(self, range: OffsetRange, low: int, high: int, cause: str) -> None:
        super().__init__(range, low, high, cause)
        self.range, self.low, self.high, self.cause = range, low, high, cause

    def __str__(self) -> str:
        return (
            f"{self.range} cannot be read: offset {self.range.start} was refused, and the "
            f"partition has offsets [{self.low}, {self.high}); its log was truncated and written "
            f"anew, so that other records may have the offsets now: {self.cause}"
        )


class ReadTimedOut(TimeoutError):
    """Nothing of a range has come for too long.

    Attributes
    ----------
    range : OffsetRange
        What is still to be read.
    timeout_s : float
        For how long nothing came.
    cause : str
        What was heard last of the brokers.
    """

    def __init__(self, range: OffsetRange, timeout_s: float, cause: str) -> None:
        super().__init__(range, timeout_s, cause)
        self.range, self.timeout_s, self.cause = range, timeout_s, cause

    def __str__(self) -> str:
        return f"nothing of {self.range} has come for {self.timeout_s:g} s: {self.cause}"


class ReadFailed(RuntimeError):
    """A range cannot be read, and waiting would not help.

    Attributes
    ----------
    range : OffsetRange
        What is still to be read.
    code : str
        librdkafka's name for what is wrong, as ``TOPIC_AUTHORIZATION_FAILED``.
    cause : str
        What it says.
    """

    def __init__(self, range: OffsetRange, code: str, cause: str) -> None:
        super().__init__(range, code, cause)
        self.range, self.code, self.cause = range, code, cause

    def __str__(self) -> str:
        return f"{self.range} cannot be read: {self.cause}"


def error_text(error: KafkaError) -> str:
    """Return a client's error message with the name that its documentation uses."""
    return f"{error.str()} ({error.name()})"


def exception_text(error: KafkaException) -> str:
    """The same of an exception of confluent-kafka's."""
    cause = error.args[0] if error.args else None
    return error_text(cause) if isinstance(cause, KafkaError) else str(error)


def redacted_error(error: BaseException, settings: ClientSettings) -> BaseException:
    """Return an error without the secrets of settings: the very same if there are none in it.

    Another one is of the same class if that takes a text, without what led to it, as that may have
    them as well; one of confluent-kafka's keeps its code.
    """
    shown = [str(error), *(str(each) for each in _chain(error))]
    if all(settings.redacted(text) == text for text in shown):
        return error
    cause = error.args[0] if error.args else None
    told: Any
    if isinstance(error, KafkaException) and isinstance(cause, KafkaError):
        told = KafkaError(cause.code(), settings.redacted(cause.str()), cause.fatal())
    else:
        told = settings.redacted(str(error))
    try:
        other = type(error)(told)
    except TypeError:
        other = RuntimeError(f"{type(error).__name__}: {told}")
    return other.with_traceback(error.__traceback__)


def _chain(error: BaseException) -> list[BaseException]:
    """Return an error with its causes, up to a depth."""
    found: list[BaseException] = []
    behind = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    while behind is not None and behind not in found:
        found.append(behind)
        behind = behind.__cause__ or (None if behind.__suppress_context__ else behind.__context__)
    return found
