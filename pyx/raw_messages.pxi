# Messages of librdkafka in its C memory, without an object for each.  Part of
# _kafka_native.pyx, before record_buffers.pxi.
#
# This calls the public interface of librdkafka, at addresses that the caller looked up.  The
# structure below and these functions have not changed since version 1.0, and will not change while
# the library is called librdkafka.so.1.

from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdlib cimport free, realloc

ctypedef struct kafka_message_t:
    int err
    void *topic
    int32_t partition
    void *payload  # of an event: its text, or NULL
    size_t size
    void *key
    size_t key_size
    int64_t offset
    void *private

ctypedef Py_ssize_t (*consume_t)(void *, int, kafka_message_t **, size_t) noexcept nogil
ctypedef void (*destroy_t)(kafka_message_t *) noexcept nogil
ctypedef int64_t (*timestamp_t)(const kafka_message_t *, int *) noexcept nogil
ctypedef int (*headers_t)(const kafka_message_t *, void **) noexcept nogil
ctypedef int (*header_t)(
    const void *, size_t, const char **, const void **, size_t *
) noexcept nogil


cdef object bytes_or_none(const void *data, size_t size):
    if data == NULL:
        return None
    return PyBytes_FromStringAndSize(<const char *>data, size)


@cython.final
@cython.auto_pickle(False)
cdef class RawMessages:
    """The messages of one call to a queue of librdkafka, in librdkafka's memory.

    It is a sequence of `RawMessage`; indexing copies a message.  `RecordBuffers.add` reads the
    messages in place.  Use it in one thread at a time, and clear it before its queue is destroyed.

    Parameters
    ----------
    functions : sequence of int
        The addresses of rd_kafka_consume_batch_queue, rd_kafka_message_destroy,
        rd_kafka_message_timestamp, rd_kafka_message_headers and rd_kafka_header_get_all.
    queue : int
        The address of the queue.

    Raises
    ------
    TypeError, ValueError
        If ``functions`` are not five addresses, or an address is not an int from 1 to 2**64-1.
    """

    cdef consume_t consume_batch
    cdef destroy_t destroy
    cdef timestamp_t timestamp_of
    cdef headers_t headers_of
    cdef header_t header_at
    cdef void *queue
    cdef kafka_message_t **messages
    cdef Py_ssize_t n, room

    def __cinit__(self, functions, queue):
        addresses = _arguments.addresses(functions, queue)
        self.consume_batch = <consume_t><uintptr_t>addresses[0]
        self.destroy = <destroy_t><uintptr_t>addresses[1]
        self.timestamp_of = <timestamp_t><uintptr_t>addresses[2]
        self.headers_of = <headers_t><uintptr_t>addresses[3]
        self.header_at = <header_t><uintptr_t>addresses[4]
        self.queue = <void *><uintptr_t>addresses[5]

    def __dealloc__(self):
        self.drop()
        free(self.messages)

    def consume(self, most, timeout_s):
        """Free the held messages, and wait for new ones.

        Parameters
        ----------
        most : int
            The number of messages after which the wait ends.
        timeout_s : float
            The longest wait, in seconds, rounded down to milliseconds.

        Raises
        ------
        TypeError, ValueError
            If ``most`` is not in 1..2**24.  The held messages then stay.
        MemoryError
            If there is no memory for ``most`` pointers.
        """
        cdef Py_ssize_t wanted = as_count(most, "most", 1, 1 << 24), found
        cdef int wait_ms = <int>max(0, min(timeout_s * 1000, <double>INT32_MAX))
        cdef kafka_message_t **larger
        self.clear()
        if wanted > self.room:
            larger = <kafka_message_t **>realloc(
                self.messages, wanted * sizeof(kafka_message_t *)
            )
            if larger == NULL:
                raise MemoryError(f"no memory for {wanted} messages")
            self.messages, self.room = larger, wanted
        with nogil:
            found = self.consume_batch(self.queue, wait_ms, self.messages, wanted)
        self.n = max(found, 0)

    def clear(self):
        """Free the held messages; the sequence is then empty."""
        with nogil:
            self.drop()

    cdef void drop(self) noexcept nogil:
        cdef Py_ssize_t i
        for i in range(self.n):
            self.destroy(self.messages[i])
        self.n = 0

    def __len__(self):
        return self.n

    def __getitem__(self, place):
        cdef Py_ssize_t i = place
        cdef int kind = 0
        cdef int64_t ms
        if i < 0 or i >= self.n:
            raise IndexError(f"a message's index must be at least 0 and below {self.n}, got {i}")
        cdef kafka_message_t *one = self.messages[i]
        if one.err:
            text = bytes_or_none(one.payload, one.size) or b""
            error = one.err, text.rstrip(b"\0").decode("utf-8", "replace")
            return _records.RawMessage(one.offset, error)
        ms = self.timestamp_of(one, &kind)
        return _records.RawMessage(
            one.offset, None, bytes_or_none(one.key, one.key_size),
            bytes_or_none(one.payload, one.size), self.headers(i), (kind, ms),
        )

    cdef list headers(self, Py_ssize_t i):
        cdef void *found = NULL
        cdef const char *name = NULL
        cdef const void *value = NULL
        cdef size_t size = 0, number = 0
        if self.headers_of(self.messages[i], &found):
            return None
        some = []
        while self.header_at(found, number, &name, &value, &size) == 0:
            some.append(
                ((<bytes>name).decode("utf-8", "backslashreplace"), bytes_or_none(value, size))
            )
            number += 1
        return some
