"""The errors of requests to Kafka and of reading it. None contains a secret."""

from __future__ import annotations

from typing import Any

from confluent_kafka import KafkaError, KafkaException

from ackcore.kafka.client_settings import ClientSettings
from ackcore.kafka.ranges import OffsetRange


def is_fatal(error: KafkaError) -> bool:
    """Return whether a client has ended with this error.

    The errors in answers and messages have no fatal flag, so their code is checked. The error of a
    second process with the same ``group.instance.id`` is fatal, too.
    """
    return error.fatal() or error.code() in (KafkaError._FATAL, KafkaError.FENCED_INSTANCE_ID)


class ConsumerError(RuntimeError):
    """The error that ended a `Consumer`."""


class OffsetsOutOfRange(ConsumerError):
    """The next offset to read was deleted, or does not exist yet."""


class OffsetsLost(RuntimeError):
    """Offsets of a range no longer exist in the partition, or do not exist again yet.

    Attributes
    ----------
    range : OffsetRange
        The part of the range that was not read yet. All before it was read.
    low, high : int
        The first offset of the partition, and the offset of its next record. The lost offsets are
        those below ``low``. If ``range.start`` is above ``high``, the partition was truncated or
        its topic created again, and ``low`` has no meaning.
    """

    def __init__(self, range: OffsetRange, low: int, high: int) -> None:
        super().__init__(range, low, high)
        self.range, self.low, self.high = range, low, high

    def __str__(self) -> str:
        if self.range.start > self.high:
            return (
                f"{self.range} cannot be read: the partition ends at offset {self.high}; it was "
                "truncated, or its topic was deleted and created again"
            )
        return (
            f"{self.range} cannot be read: offsets below {self.low} were deleted, by the topic's "
            "retention or by hand"
        )


class ReadTimedOut(TimeoutError):
    """A read of a range has timed out, because no record came.

    Attributes
    ----------
    range : OffsetRange
        The part of the range that was not read yet.
    timeout_s : float
        The time without a record, in seconds.
    cause : str
        The last message about the brokers.
    """

    def __init__(self, range: OffsetRange, timeout_s: float, cause: str) -> None:
        super().__init__(range, timeout_s, cause)
        self.range, self.timeout_s, self.cause = range, timeout_s, cause

    def __str__(self) -> str:
        return f"no record of {self.range} has come for {self.timeout_s:g} s: {self.cause}"


class ReadFailed(RuntimeError):
    """A range cannot be read, and waiting would not help.

    The code is ``_AUTO_OFFSET_RESET`` or ``_LOG_TRUNCATION`` if the log of the partition was
    truncated below ``range.start`` and written again. It is then not known which of its records
    were read before. In contrast, after `OffsetsLost` all offsets that are left are unchanged.

    Attributes
    ----------
    range : OffsetRange
        The part of the range that was not read yet.
    code : str
        librdkafka's name of the error, for example ``TOPIC_AUTHORIZATION_FAILED``.
    cause : str
        librdkafka's message.
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
    """Return a confluent-kafka exception's message with the name that its documentation uses."""
    cause = error.args[0] if error.args else None
    return error_text(cause) if isinstance(cause, KafkaError) else str(error)


def shown_error(error: BaseException) -> str:
    """Return the text of an error, also if its ``__str__``, which is user code, raises."""
    try:
        return str(error)
    except Exception as broken:
        return f"no text, because __str__ of the error raised {type(broken).__name__}"


def redacted_error(error: BaseException, settings: ClientSettings) -> BaseException:
    """Return an error without the secrets of settings: the same object if it contains none.

    Otherwise it is a new error, of the same class if that class takes a text. It has no cause,
    since the cause may contain secrets as well. An error of confluent-kafka keeps its code.
    """
    shown = [shown_error(each) for each in (error, *_chain(error))]
    if all(settings.redacted(text) == text for text in shown):
        return error
    cause = error.args[0] if error.args else None
    told: Any
    if isinstance(error, KafkaException) and isinstance(cause, KafkaError):
        told = KafkaError(cause.code(), settings.redacted(cause.str()), cause.fatal())
    else:
        told = settings.redacted(shown_error(error))
    try:
        other = type(error)(told)
    except TypeError:
        other = RuntimeError(f"{type(error).__name__}: {told}")
    return other.with_traceback(error.__traceback__)


def _chain(error: BaseException) -> list[BaseException]:
    """Return the causes of an error, in order."""
    found: list[BaseException] = []
    behind = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    while behind is not None and behind not in found:
        found.append(behind)
        behind = behind.__cause__ or (None if behind.__suppress_context__ else behind.__context__)
    return found
