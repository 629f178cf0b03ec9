"""Errors of consumers and of readers of Kafka, and their texts."""

from __future__ import annotations

from typing import Any

from confluent_kafka import KafkaError, KafkaException

from ackcore._error_hints import text_of_error
from ackcore.kafka.client_settings import ClientSettings
from ackcore.kafka.ranges import OffsetRange


def is_fatal(error: KafkaError) -> bool:
    """Return whether a client can do nothing more after this error.

    An error in an answer or a message lacks the flag, so its code is checked. The code
    FENCED_INSTANCE_ID means that another process has the same ``group.instance.id``.
    """
    return error.fatal() or error.code() in (KafkaError._FATAL, KafkaError.FENCED_INSTANCE_ID)


class ConsumerError(RuntimeError):
    """The error that ended a `Consumer`."""


class OffsetsOutOfRange(ConsumerError):
    """With ``out_of_range="fail"``: offsets to read are deleted, replaced or too far behind."""


class NoToken(KafkaException):
    """The user's ``oauth_cb`` gave a new client no token within 10 s. No broker was asked."""

    def __str__(self) -> str:
        return str(self.args[0].str())


class OffsetsLost(RuntimeError):
    """Offsets of a range were deleted, or the partition now ends before the range.

    Attributes: ``range``: the part of the range that was not read yet; all before it was read.
    ``low``, ``high``: the first offset of the partition, and its end. The lost offsets are those
    below ``low``. If ``range.start`` is above ``high``, the partition was truncated or its topic
    created again, and it is unknown which records are lost.
    """

    def __init__(self, range: OffsetRange, low: int, high: int) -> None:
        super().__init__(range, low, high)
        self.range, self.low, self.high = range, low, high

    def __str__(self) -> str:
        if self.range.start > self.high:
            return (
                f"{self.range} cannot be read: the partition ends at offset {self.high}; it was "
                "truncated, or its topic was deleted and created again. Begin at an offset that "
                "it has"
            )
        return (
            f"{self.range} cannot be read: offsets below {self.low} were deleted, by the topic's "
            "retention or by hand; begin there, and let the topic keep its records for longer"
        )


class ReadTimedOut(TimeoutError):
    """No record of a range came within the reader's time-out.

    Attributes: ``range``: the part of the range that was not read yet. ``timeout_s``: the time-out,
    in seconds. ``cause``: the last event that the client reported, as a text: an error, or the end
    of the partition. Without an event it is "no broker has sent a reason".
    """

    def __init__(self, range: OffsetRange, timeout_s: float, cause: str) -> None:
        super().__init__(range, timeout_s, cause)
        self.range, self.timeout_s, self.cause = range, timeout_s, cause

    def __str__(self) -> str:
        return (
            f"no record of {self.range} has come for {self.timeout_s:g} s: {self.cause}; check "
            "that the partition has a leader, and that this host can reach it"
        )


class ReadFailed(RuntimeError):
    """A range cannot be read, and a retry would not help.

    The code is ``_AUTO_OFFSET_RESET`` or ``_LOG_TRUNCATION`` if the partition was truncated below
    ``range.start`` and written anew, so that records which were read have been replaced by others.

    Attributes: ``range``: the part of the range that was not read yet. ``code``: librdkafka's name
    of the error, for example ``TOPIC_AUTHORIZATION_FAILED``. ``cause``: the text of the error.
    """

    def __init__(self, range: OffsetRange, code: str, cause: str) -> None:
        super().__init__(range, code, cause)
        self.range, self.code, self.cause = range, code, cause

    def __str__(self) -> str:
        return (
            f"{self.range} cannot be read: {self.cause}; check the topic's name, its data on the "
            "brokers, and the permissions of this user"
        )


def error_text(error: KafkaError) -> str:
    """Return an error's message with its name, such as "Local: Timed out (_TIMED_OUT)"."""
    return f"{error.str()} ({error.name()})"


def redacted_error(error: BaseException, settings: ClientSettings) -> BaseException:
    """Return an error without the secrets of settings: the same object if no text has one.

    The texts of its causes count too. Otherwise returns a new error without causes and with the
    same traceback, of the same class if that takes one text, else a RuntimeError. An error of
    confluent-kafka keeps its code.
    """
    shown = [text_of_error(each) for each in _with_causes(error)]
    if all(settings.redacted(text) == text for text in shown):
        return error
    cause = error.args[0] if error.args else None
    told: Any
    if isinstance(error, KafkaException) and isinstance(cause, KafkaError):
        told = KafkaError(cause.code(), settings.redacted(cause.str()), cause.fatal())
    else:
        told = settings.redacted(text_of_error(error))
    try:
        other = type(error)(told)
    except TypeError:
        other = RuntimeError(f"{type(error).__name__}: {told}")
    return other.with_traceback(error.__traceback__)


def _with_causes(error: BaseException) -> list[BaseException]:
    """Return an error and its causes, the last cause at the end; without suppressed contexts."""
    found: list[BaseException] = []
    one: BaseException | None = error
    while one is not None and one not in found:
        found.append(one)
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
    return found
