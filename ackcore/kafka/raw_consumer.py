"""A consumer that creates no Python object per message.

confluent-kafka creates one for each message, which costs more than all other processing. This
module calls the public functions of the librdkafka that confluent-kafka has loaded, by ctypes.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, closing
from functools import cache
from typing import TYPE_CHECKING, Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition, cimpl

from ackcore._backend import kafka_implementation
from ackcore._records import RawMessage

if TYPE_CHECKING:
    from ackcore._kafka_native import RawMessages
else:
    RawMessages = getattr(kafka_implementation(), "RawMessages", None)

_CONSUMER = 1  # in rd_kafka_type_t
_OK = 0  # in rd_kafka_conf_res_t and rd_kafka_resp_err_t
_NO_CONSUMER_CLOSE = 8  # for rd_kafka_destroy_flags
_TEXT_BYTES = 512
_PLUGINS = "plugin.library.paths"

_P, _INT, _STR, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t
_ERROR_CB = ctypes.CFUNCTYPE(None, _P, _INT, _STR, _P)
#: The functions called, with the types of result and arguments.
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
#: The functions that `RawMessages` calls, in its order.
_OF_MESSAGES = (
    "consume_batch_queue",
    "message_destroy",
    "message_timestamp",
    "message_headers",
    "header_get_all",
)


class _Library:
    """The functions of librdkafka as attributes, by their names without ``rd_kafka_``."""

    def __init__(self) -> None:
        # The loader also searches the libraries that this one needs, so librdkafka's path, which
        # depends on the wheel, is not needed.
        loaded = ctypes.CDLL(cimpl.__file__)
        for name, (result, *arguments) in _FUNCTIONS.items():
            function = getattr(loaded, f"rd_kafka_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)
        found = [ctypes.cast(getattr(loaded, f"rd_kafka_{name}"), _P) for name in _OF_MESSAGES]
        self.of_messages = [each.value or 0 for each in found]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AttributeError(name)  # for type checkers: the functions are instance attributes


@cache
def _library() -> _Library | None:
    """Return the library; None if this build of confluent-kafka hides its functions."""
    try:
        return _Library()
    except (AttributeError, OSError):
        return None


def raw_consumer(
    conf: Mapping[str, Any], heard: Callable[[KafkaError], None]
) -> RawConsumer | None:
    """Return a consumer with these settings; None if confluent-kafka's own must be used.

    That is needed if a setting is neither text nor number, since callbacks and loggers belong to
    confluent-kafka; with OAUTHBEARER, for which it fetches tokens; with the Python backend; and if
    librdkafka cannot be called. Raises KafkaException if librdkafka refuses the settings.

    ``conf``: the settings, as for confluent-kafka, without ``error_cb``. ``heard``: called with
    each error of the client, while `RawConsumer.consume` waits.
    """
    plain = all(type(value) in (str, int, float, bool) for value in conf.values())
    mechanisms = (str(conf.get(name, "")).upper() for name in ("sasl.mechanism", "sasl.mechanisms"))
    if not plain or "OAUTHBEARER" in mechanisms or RawMessages is None:
        return None
    library = _library()
    return None if library is None else RawConsumer(library, conf, heard)


class RawConsumer:
    """A replacement for confluent-kafka's consumer, with the methods that `RangeReader` needs.

    One thread at a time may use it. Garbage collection closes it. In a forked process it counts as
    closed, since librdkafka's threads exist only in the parent.
    """

    def __init__(
        self, library: _Library, conf: Mapping[str, Any], heard: Callable[[KafkaError], None]
    ) -> None:
        self._client: int | None = None
        self._library, self._conf, self._heard = library, conf, heard
        self._pid = os.getpid()

        # Runs in the thread that takes messages.  It must live as long as the client.
        self._on_error: Any = _ERROR_CB(self._hear)
        self._client = self._made(conf)
        library.poll_set_consumer(self._client)
        self._queue = library.queue_get_consumer(self._client)
        self._messages = RawMessages(library.of_messages, self._queue)

    def _made(self, conf: Mapping[str, Any]) -> int:
        library, text = self._library, ctypes.create_string_buffer(_TEXT_BYTES)
        settings = library.conf_new()
        # Plugins first: librdkafka accepts their settings only after it has loaded them.
        for name, value in sorted(conf.items(), key=lambda one: one[0] != _PLUGINS):
            said = str(value).lower() if isinstance(value, bool) else str(value)
            arguments = name.encode(), said.encode(), text, _TEXT_BYTES
            if library.conf_set(settings, *arguments) != _OK:
                break
        else:
            library.conf_set_error_cb(settings, self._on_error)
            client: int | None = library.new(_CONSUMER, settings, text, _TEXT_BYTES)
            if client is not None:
                return client
        library.conf_destroy(settings)
        raise KafkaException(KafkaError(KafkaError._INVALID_ARG, _decoded(text.value)))

    def _hear(self, client: int, code: int, text: bytes | None, _: object) -> None:
        if code == KafkaError._FATAL:
            cause = ctypes.create_string_buffer(_TEXT_BYTES)
            code = self._library.fatal_error(client, cause, _TEXT_BYTES)
            self._heard(KafkaError(code, _decoded(cause.value), True))
        else:
            self._heard(KafkaError(code, _decoded(text)))

    def assign(self, partitions: Iterable[TopicPartition]) -> None:
        """Begin to read partitions at their offsets, instead of those before.

        Raises KafkaException if librdkafka refuses. Raises RuntimeError if the consumer is closed.
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
        """Stop reading. The messages that the last `consume` returned become invalid."""
        self._messages.clear()
        if self._is_open:  # an iterator may outlast its reader
            self._library.assign(self._client, None)

    def consume(self, most: int, timeout_s: float) -> RawMessages:
        """Wait until ``most`` messages have come or ``timeout_s`` is over, and return those.

        An error is a message, too. They are valid until the next call. Raises RuntimeError if the
        consumer is closed.
        """
        self._check_open()
        self._messages.consume(most, timeout_s)
        return self._messages

    @property
    def _is_open(self) -> bool:
        return self._client is not None and os.getpid() == self._pid

    def _check_open(self) -> None:
        # librdkafka would use the client as a pointer to released memory.
        if not self._is_open:
            raise RuntimeError(
                "the consumer is closed, or was made before this process was forked; "
                "make another one"
            )

    def list_topics(self, topic: str, timeout: float) -> Any:
        """Return a topic's metadata, by a new client for this call, or raise KafkaException."""
        with self._asking() as client:
            return client.list_topics(topic, timeout=timeout)

    def get_watermark_offsets(self, partition: TopicPartition, timeout: float) -> Any:
        """Return a partition's first offset and end, by a new client, or raise KafkaException."""
        with self._asking() as client:
            return client.get_watermark_offsets(partition, timeout=timeout)

    def _asking(self) -> AbstractContextManager[Consumer]:
        return closing(Consumer({**self._conf, "error_cb": self._heard}))

    def close(self) -> None:
        """Close the connections, in the process that made the consumer. May be called again."""
        is_open, client = self._is_open, self._client
        self._client = None
        if is_open:
            self._messages.clear()
            self._library.queue_destroy(self._queue)
            # There is no group to leave.
            self._library.destroy_flags(client, _NO_CONSUMER_CLOSE)
            self._on_error = None  # it refers to this object

    def __del__(self) -> None:
        self.close()


def event_error(event: Message | RawMessage) -> KafkaError:
    """Return the error of a message that is no record, from either kind of consumer."""
    error = event.error()
    assert error is not None
    return error if isinstance(error, KafkaError) else KafkaError(*error)


def _decoded(text: bytes | None) -> str:
    return (text or b"").decode("utf-8", "replace")
