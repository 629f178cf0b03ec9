"""A consumer that makes no object of a message: librdkafka's own, the one confluent-kafka brings.

confluent-kafka's has a Python object for each message, which costs more than all else that is done
to it, and no call for many of them.  The library that it has loaded is called here by its public
functions, which ctypes finds in it, with the same settings.  What needs callbacks is left to
confluent-kafka: `raw_consumer` says where.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, closing
from functools import cache
from typing import TYPE_CHECKING, Any

from confluent_kafka import (
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
    cimpl,
)

from ackcore._backend import backend, kafka_implementation
from ackcore._records import RawMessage

if TYPE_CHECKING:
    from ackcore._reference import RawMessages
else:
    RawMessages = kafka_implementation().RawMessages

_CONSUMER = 1  # of rd_kafka_type_t
_OK = 0  # of rd_kafka_conf_res_t, and of rd_kafka_resp_err_t
_NO_CONSUMER_CLOSE = 8  # for rd_kafka_destroy_flags
_TEXT_BYTES = 512
_PLUGINS = "plugin.library.paths"

_P, _INT, _STR, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t
_ERROR_CB = ctypes.CFUNCTYPE(None, _P, _INT, _STR, _P)
#: What is called, with what it returns and takes.
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "conf_new": (_P,),
    "conf_destroy": (None, _P),
    "conf_set": (_INT, _P, _STR, _STR, _STR, _SIZE),
    "conf_set_error_cb": (None, _P, _ERROR_CB),
    "new": (_P, _INT, _P, _STR, _SIZE),
    "fatal_error": (_INT, _P, _STR, _SIZE),
    "poll_set_consumer": (_INT, _P),
    "queue_get_consumer": (_P, _P),
    "queue_destroy": (None, _P),
    "topic_partition_list_new": (_P, _INT),
    "topic_partition_list_add": (_P, _P, _STR, ctypes.c_int32),
    "topic_partition_list_set_offset": (_INT, _P, _STR, ctypes.c_int32, ctypes.c_int64),
    "topic_partition_list_destroy": (None, _P),
    "assign": (_INT, _P, _P),
    "destroy_flags": (None, _P, _INT),
}
#: What `RawMessages` calls, in its order.
_OF_MESSAGES = (
    "consume_batch_queue",
    "message_destroy",
    "message_timestamp",
    "message_headers",
    "header_get_all",
)


class _Library:
    """The functions of the librdkafka that is loaded, by their names without ``rd_kafka_``."""

    def __init__(self) -> None:
        # A name is looked for in what a library needs, too: where librdkafka lies, is the wheel's.
        loaded = ctypes.CDLL(cimpl.__file__)
        for name, (result, *arguments) in _FUNCTIONS.items():
            function = getattr(loaded, f"rd_kafka_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)
        found = [ctypes.cast(getattr(loaded, f"rd_kafka_{name}"), _P) for name in _OF_MESSAGES]
        self.of_messages = [each.value or 0 for each in found]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AttributeError(name)  # for type checkers: what there is, is set


@cache
def _library() -> _Library | None:
    """Return it, None where it cannot be called: linked in and hidden, or on another system."""
    try:
        return _Library()
    except (AttributeError, OSError):
        return None


def raw_consumer(
    conf: Mapping[str, Any], heard: Callable[[KafkaError], None]
) -> RawConsumer | None:
    """Return a consumer of these settings, None where one of confluent-kafka's is to be had.

    That is where a setting is no text or number (callbacks and loggers are its own), where a token
    may be fetched for SASL, as it has ways of its own, in the backend in Python, which is slower at
    it, and where librdkafka cannot be called.

    Parameters
    ----------
    conf : mapping
        As confluent-kafka's, without ``error_cb``.
    heard : callable
        Called with each error of the client itself, while messages are waited for.

    Raises
    ------
    KafkaException
        If librdkafka refuses the settings; with a `KafkaError`.
    """
    plain = all(type(value) in (str, int, float, bool) for value in conf.values())
    mechanisms = (str(conf.get(name, "")).upper() for name in ("sasl.mechanism", "sasl.mechanisms"))
    if not plain or "OAUTHBEARER" in mechanisms or backend != "native":
        return None
    library = _library()
    return None if library is None else RawConsumer(library, conf, heard)


class RawConsumer:
    """The calls of confluent-kafka's consumer that a reader of ranges makes; see `raw_consumer`.

    It is used by one thread at a time, and closed by `close`, or when it goes.  A process that was
    forked from its own has none of its threads: there it is closed, and nothing is let go.
    """

    def __init__(
        self, library: _Library, conf: Mapping[str, Any], heard: Callable[[KafkaError], None]
    ) -> None:
        self._client: int | None = None
        self._library, self._conf, self._heard = library, conf, heard
        self._pid = os.getpid()

        # Called by whoever takes messages; it is kept for as long as the client is.
        self._on_error: Any = _ERROR_CB(self._hear)
        self._client = self._made(conf)
        library.poll_set_consumer(self._client)
        self._queue = library.queue_get_consumer(self._client)
        self._messages = RawMessages(library.of_messages, self._queue)

    def _made(self, conf: Mapping[str, Any]) -> int:
        library, text = self._library, ctypes.create_string_buffer(_TEXT_BYTES)
        settings = library.conf_new()
        # What plugins add to the settings is unknown before they are loaded.
        for name, value in sorted(conf.items(), key=lambda one: one[0] != _PLUGINS):
            said = str(value).lower() if isinstance(value, bool) else str(value)
            arguments = name.encode(), said.encode(), text, _TEXT_BYTES
            if library.conf_set(settings, *arguments) != _OK:
                library.conf_destroy(settings)
                raise KafkaException(KafkaError(KafkaError._INVALID_ARG, _decoded(text.value)))
        library.conf_set_error_cb(settings, self._on_error)
        client: int | None = library.new(_CONSUMER, settings, text, _TEXT_BYTES)
        if client is None:
            library.conf_destroy(settings)
            raise KafkaException(KafkaError(KafkaError._INVALID_ARG, _decoded(text.value)))
        return client

    def _hear(self, client: int, code: int, text: bytes | None, _: object) -> None:
        if code == KafkaError._FATAL:
            cause = ctypes.create_string_buffer(_TEXT_BYTES)
            code = self._library.fatal_error(client, cause, _TEXT_BYTES)
            self._heard(KafkaError(code, _decoded(cause.value), True))
        else:
            self._heard(KafkaError(code, _decoded(text)))

    def assign(self, partitions: Iterable[TopicPartition]) -> None:
        """Read partitions from their offsets on, and nothing else.

        Raises
        ------
        KafkaException
            If that is refused.
        RuntimeError
            If it is closed.
        """
        self._check_open()
        library, wanted = self._library, list(partitions)
        listed = library.topic_partition_list_new(len(wanted))
        try:
            for one in wanted:
                where = listed, one.topic.encode(), one.partition
                library.topic_partition_list_add(*where)
                library.topic_partition_list_set_offset(*where, one.offset)
            code = library.assign(self._client, listed)
        finally:
            library.topic_partition_list_destroy(listed)
        if code != _OK:
            raise KafkaException(KafkaError(code))

    def unassign(self) -> None:
        """Read nothing any more; what was read is let go."""
        self._messages.clear()
        if self._is_open:  # an iterator may outlast its reader
            self._library.assign(self._client, None)

    def consume(self, most: int, timeout_s: float) -> RawMessages:
        """Return so many messages, or those that come in so long; they last until the next call.

        Raises RuntimeError if it is closed.
        """
        self._check_open()
        self._messages.consume(most, timeout_s)
        return self._messages

    @property
    def _is_open(self) -> bool:
        return self._client is not None and os.getpid() == self._pid

    def _check_open(self) -> None:
        # To librdkafka it would be an address, of nothing.
        if not self._is_open:
            raise RuntimeError(
                "the consumer is closed, or of the process this one was forked from; "
                "make another one"
            )

    def list_topics(self, topic: str, timeout: float) -> Any:
        """Return what confluent-kafka's consumer does: one that is made for it, as it is rare."""
        with self._asking() as client:
            return client.list_topics(topic, timeout=timeout)

    def get_watermark_offsets(self, partition: TopicPartition, timeout: float) -> Any:
        """Return what confluent-kafka's consumer does, like `list_topics`."""
        with self._asking() as client:
            return client.get_watermark_offsets(partition, timeout=timeout)

    def _asking(self) -> AbstractContextManager[Consumer]:
        return closing(Consumer({**self._conf, "error_cb": self._heard}))

    def close(self) -> None:
        """Leave the brokers."""
        is_open, client = self._is_open, self._client
        self._client = None
        if is_open:
            self._messages.clear()
            self._library.queue_destroy(self._queue)
            # There is no group to leave.
            self._library.destroy_flags(client, _NO_CONSUMER_CLOSE)
            self._on_error = None  # which refers to this

    def __del__(self) -> None:
        self.close()


def event_error(event: Message | RawMessage) -> KafkaError:
    """Return what is wrong with what is no record, whoever's message it is."""
    error = event.error()
    assert error is not None
    return error if isinstance(error, KafkaError) else KafkaError(*error)


def _decoded(text: bytes | None) -> str:
    return (text or b"").decode("utf-8", "replace")
