# The messages of Kafka's client as columns.  Part of _kafka_native.pyx.
#
# A message is an object with methods, and the client has no call for many messages at once.  Here
# each method is called once, and its result is copied to the end of a column, so neither messages
# nor their bytes outlast the call.  Nothing is assumed about the layout of such an object.
# `RawMessages` are read in place, and copied without the GIL.

from cpython.exc cimport PyErr_Clear, PyErr_Occurred
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_GET_SIZE
from libc.string cimport memcpy

cdef extern from "kafka_record.h" nogil:
    const uint8_t *end_of_plain(
        const uint8_t *at, const uint8_t *key, size_t key_size, const uint8_t *value, size_t size
    )

#: The largest initial size of a column, in bytes: a new column gets about the size of the last one.
cdef Py_ssize_t MOST_AT_ONCE = 1 << 24
#: The value for a missing timestamp. Kafka 0.11 and later store a timestamp for each record.
cdef int64_t NO_TIMESTAMP = -1


ctypedef struct bytes_t:
    int32_t *ends
    uint8_t *valid
    char *data
    Py_ssize_t size, nulls


cdef inline void append_raw(
    bytes_t *column, Py_ssize_t i, const void *value, size_t length
) noexcept nogil:
    column.valid[i] = value != NULL
    if value == NULL:
        column.nulls += 1
    else:
        memcpy(column.data + column.size, value, length)
        column.size += length
    column.ends[i] = <int32_t>column.size


cdef cnp.ndarray with_room(cnp.ndarray column, Py_ssize_t used, Py_ssize_t needed, int typenum):
    """Return a column with room for ``needed`` items: the same, or a copy of its ``used`` ones."""
    cdef Py_ssize_t room = 0 if column is None else rows(column)
    cdef cnp.ndarray larger
    if column is not None and needed <= room:
        return column
    larger = new_column(max(needed, room + room // 2), typenum)
    if used:
        memcpy(
            cnp.PyArray_DATA(larger), cnp.PyArray_DATA(column), used * cnp.PyArray_ITEMSIZE(larger)
        )
    return larger


@cython.final
@cython.auto_pickle(False)
cdef class _BinaryRows:
    """A growing column of bytes: concatenated values, and the offset of each end."""

    cdef cnp.ndarray offsets, data, valid
    cdef Py_ssize_t size, nulls, at_once

    cdef int reserve(self, Py_ssize_t used, Py_ssize_t needed, Py_ssize_t more) except -1:
        """Make room for ``needed`` rows in all, of which ``used`` exist, and ``more`` bytes."""
        if not used:
            more = max(more, self.at_once)
        self.valid = with_room(self.valid, used, needed, cnp.NPY_UINT8)
        self.data = with_room(self.data, self.size, self.size + more, cnp.NPY_UINT8)
        self.offsets = with_room(self.offsets, used + 1 if used else 0, needed + 1, cnp.NPY_INT32)
        if not used:
            (<int32_t *>cnp.PyArray_DATA(self.offsets))[0] = 0
        return 0

    cdef void append(self, Py_ssize_t used, list values, Py_ssize_t n):
        """Copy values, each bytes or None, into reserved room."""
        cdef int32_t *ends = <int32_t *>cnp.PyArray_DATA(self.offsets) + used + 1
        cdef uint8_t *valid = <uint8_t *>cnp.PyArray_DATA(self.valid) + used
        cdef char *data = <char *>cnp.PyArray_DATA(self.data)
        cdef Py_ssize_t i, length, size = self.size
        for i in range(n):
            value = values[i]
            valid[i] = value is not None
            if value is None:
                self.nulls += 1
            else:
                length = PyBytes_GET_SIZE(value)
                memcpy(data + size, PyBytes_AS_STRING(value), length)
                size += length
            ends[i] = <int32_t>size
        self.size = size

    cdef bytes_t place(self, Py_ssize_t used):
        """Return the reserved place of the next values."""
        cdef bytes_t place
        place.ends = <int32_t *>cnp.PyArray_DATA(self.offsets) + used + 1
        place.valid = <uint8_t *>cnp.PyArray_DATA(self.valid) + used
        place.data = <char *>cnp.PyArray_DATA(self.data)
        place.size = self.size
        place.nulls = 0
        return place

    cdef object taken(self, Py_ssize_t n):
        """Return the n values as a `BinaryColumn`, and begin a new one."""
        cdef object valid = self.valid[:n] if self.nulls else None
        found = _records.BinaryColumn(self.offsets[:n + 1], self.data[:self.size], valid)
        # The next column is likely to be as large, and growing is the largest part of the cost.
        self.at_once = min(self.size + self.size // 16, MOST_AT_ONCE)
        self.offsets = self.data = self.valid = None
        self.size = self.nulls = 0
        return found


cdef int64_t checked_size(object value, str name, Py_ssize_t place) except -1:
    """Return the number of bytes of a key or value; raise if it is not bytes or None."""
    if value is None:
        return 0
    if not PyBytes_CheckExact(value):
        raise TypeError(
            f"the {name} of message {place} must be bytes or None, got {type(value).__name__}"
        )
    return PyBytes_GET_SIZE(value)


cdef object readable_headers(object headers_of, object message):
    """Return a message's headers, None for none, or `UNREADABLE_HEADERS` if its method raises."""
    try:
        found = headers_of(message)
        # confluent-kafka returns an error and a list with NULL items, which must not be read.
        if PyErr_Occurred() == NULL:
            return found or None
        PyErr_Clear()
    except (SystemError, UnicodeDecodeError):  # CPython raises SystemError for it
        pass
    return _records.UNREADABLE_HEADERS


@cython.final
@cython.auto_pickle(False)
cdef class RecordBuffers:
    """Records of one partition, collected from messages into columns.

    Parameters
    ----------
    most_bytes : int, default 2**31 - 1
        The maximum size of all keys, and of all values, in bytes; more do not fit 32-bit offsets.

    Raises
    ------
    TypeError, ValueError
        If ``most_bytes`` is not an integer, or not in 0..2**31 - 1.
    """

    cdef _BinaryRows keys, values
    cdef cnp.ndarray offsets, times, timed
    cdef list headers
    cdef Py_ssize_t n, untimed, rows_at_once
    cdef int64_t most_bytes, header_bytes

    def __cinit__(self, most_bytes=INT32_MAX):
        self.most_bytes = as_count(most_bytes, "most_bytes", 0, INT32_MAX)
        self.keys = _BinaryRows()
        self.values = _BinaryRows()

    @property
    def rows(self):
        """The number of records that were added and not taken yet."""
        return self.n

    @property
    def bytes(self):
        """The size of all keys, values and headers in bytes; header names count in characters."""
        return self.keys.size + self.values.size + self.header_bytes

    def add(self, messages, first=0, stop=INT64_MAX):
        """Add the records among messages, up to the first that cannot be added.

        Parameters
        ----------
        messages : sequence of confluent_kafka.Message, or RawMessages
            The messages, of one partition and one class, in the order of their offsets.
        first : int, default 0
            The index in ``messages`` at which to begin, not negative.
        stop : int, optional
            An offset: records at or above it are not added.

        Returns
        -------
        int
            The index of the first message that was not added: an event (its ``error()`` is not
            None), a record at or above ``stop``, or one with which keys or values would exceed
            ``most_bytes``; ``len(messages)`` if all were added.

        Raises
        ------
        TypeError
            If a method of a message returns another type than in confluent-kafka.

        If it raises, nothing has been added.
        """
        cdef int64_t until = stop
        if type(messages) is RawMessages:
            with cython.critical_section(self):
                return self.add_raw(<RawMessages>messages, first, until)
        cdef list some = list(messages[first:])
        cdef Py_ssize_t i, n = 0, taken = 0
        cdef int64_t begin, of_key, of_value, key_size, value_size, ms
        cdef long kind
        cdef bint is_dense
        if not some:
            return first
        # Look methods up once: a look-up takes as long as the method itself.
        cdef object of = type(some[0])
        error_of, offset_of, timestamp_of = of.error, of.offset, of.timestamp
        key_of, value_of, headers_of = of.key, of.value, of.headers
        while n < len(some) and error_of(some[n]) is None:
            n += 1
        if n == 0:
            return first
        cdef cnp.ndarray offsets = new_column(n, cnp.NPY_INT64)
        cdef int64_t *offset = <int64_t *>cnp.PyArray_DATA(offsets)
        begin = offset_of(some[0])
        offset[n - 1] = offset_of(some[n - 1])
        # Offsets ascend, so if the last is n - 1 above the first, none of the n is missing.
        is_dense = offset[n - 1] - begin == n - 1
        cdef cnp.ndarray times = new_column(n, cnp.NPY_INT64)
        cdef int64_t *time = <int64_t *>cnp.PyArray_DATA(times)
        cdef cnp.ndarray timed = new_column(n, cnp.NPY_UINT8)
        cdef uint8_t *is_timed = <uint8_t *>cnp.PyArray_DATA(timed)
        cdef list keys = [], values = [], headers = None
        cdef Py_ssize_t untimed = 0
        key_size = value_size = 0
        for i in range(n):
            message = some[i]
            offset[i] = begin + i if is_dense else offset_of(message)
            if offset[i] >= until:
                break
            key, value = key_of(message), value_of(message)
            of_key = checked_size(key, "key", first + i)
            of_value = checked_size(value, "value", first + i)
            if of_key > self.most_bytes - self.keys.size - key_size:
                break
            if of_value > self.most_bytes - self.values.size - value_size:
                break
            key_size += of_key
            value_size += of_value
            keys.append(key)
            values.append(value)
            kind, ms = timestamp_of(message)
            time[i] = ms
            is_timed[i] = kind != 0 and ms != NO_TIMESTAMP
            untimed += not is_timed[i]
            found = readable_headers(headers_of, message)
            if found is not None and headers is None:
                headers = [None] * i
            if headers is not None:
                headers.append(found)
            taken += 1
        if taken:
            with cython.critical_section(self):
                self.append(
                    keys, values, headers, offset, time, is_timed, taken, key_size, value_size
                )
                self.untimed += untimed
        return first + taken

    cdef Py_ssize_t add_raw(
        self, RawMessages messages, Py_ssize_t first, int64_t until
    ) except -1:
        cdef Py_ssize_t n = 0, used = self.n, needed
        cdef int64_t key_room = self.most_bytes - self.keys.size
        cdef int64_t value_room = self.most_bytes - self.values.size
        cdef size_t key_size = 0, value_size = 0
        cdef bint is_headed = False
        cdef kafka_message_t *one
        cdef void *found = NULL
        # Where the next record begins, if the one before it has no headers.
        cdef const uint8_t *start = NULL
        if first < 0:
            raise IndexError(f"a message's index must be at least 0, got {first}")
        if first >= messages.n:
            return first
        cdef kafka_message_t **some = messages.messages + first
        with nogil:
            for n in range(messages.n - first):
                one = some[n]
                if one.err or one.offset >= until:
                    break
                if one.key_size > <size_t>key_room - key_size:
                    break
                if one.size > <size_t>value_room - value_size:
                    break
                key_size += one.key_size
                value_size += one.size
                start = end_of_plain(
                    start, <const uint8_t *>one.key, one.key_size,
                    <const uint8_t *>one.payload, one.size,
                )
                if start == NULL:
                    if messages.headers_of(one, &found) == 0:
                        is_headed = True
                    elif one.payload != NULL:
                        start = <const uint8_t *>one.payload + one.size + 1
            else:
                n = messages.n - first
        if not n:
            return first
        needed = used + n if used else max(n, self.rows_at_once)
        cdef cnp.ndarray offsets = with_room(self.offsets, used, needed, cnp.NPY_INT64)
        cdef cnp.ndarray times = with_room(self.times, used, needed, cnp.NPY_INT64)
        cdef cnp.ndarray timed = with_room(self.timed, used, needed, cnp.NPY_UINT8)
        self.keys.reserve(used, needed, key_size)
        self.values.reserve(used, needed, value_size)
        cdef list headers = [messages.headers(first + i) for i in range(n)] if is_headed else None
        self.join_headers(headers, used, n)
        self.offsets, self.times, self.timed = offsets, times, timed
        cdef int64_t *offset = <int64_t *>cnp.PyArray_DATA(offsets) + used
        cdef int64_t *time = <int64_t *>cnp.PyArray_DATA(times) + used
        cdef uint8_t *is_timed = <uint8_t *>cnp.PyArray_DATA(timed) + used
        cdef bytes_t key = self.keys.place(used), value = self.values.place(used)
        cdef Py_ssize_t i, untimed = 0
        cdef int kind = 0
        with nogil:
            for i in range(n):
                one = some[i]
                offset[i] = one.offset
                time[i] = messages.timestamp_of(one, &kind)
                is_timed[i] = kind != 0 and time[i] != NO_TIMESTAMP
                untimed += not is_timed[i]
                append_raw(&key, i, one.key, one.key_size)
                append_raw(&value, i, one.payload, one.size)
        self.keys.size, self.values.size = key.size, value.size
        self.untimed += untimed
        self.keys.nulls += key.nulls
        self.values.nulls += value.nulls
        self.n = used + n
        return first + n

    cdef int join_headers(self, list headers, Py_ssize_t used, Py_ssize_t n) except -1:
        """Append the headers of n records, None if none has any. Only a lack of memory can fail."""
        cdef int64_t size = 0
        if headers is not None:
            for some in headers:
                if some is not None:
                    for name, value in some:
                        size += len(name)
                        if value is not None:
                            size += len(value)
        if headers is not None or self.headers is not None:
            if self.headers is None:
                self.headers = [None] * used
            self.headers += headers if headers is not None else [None] * n
        self.header_bytes += size
        return 0

    cdef int append(
        self, list keys, list values, list headers, int64_t *offset, int64_t *time,
        uint8_t *is_timed, Py_ssize_t n, int64_t key_size, int64_t value_size,
    ) except -1:
        cdef Py_ssize_t used = self.n, needed = used + n
        if not used:
            needed = max(needed, self.rows_at_once)
        cdef cnp.ndarray offsets = with_room(self.offsets, used, needed, cnp.NPY_INT64)
        cdef cnp.ndarray times = with_room(self.times, used, needed, cnp.NPY_INT64)
        cdef cnp.ndarray timed = with_room(self.timed, used, needed, cnp.NPY_UINT8)
        self.keys.reserve(used, needed, key_size)
        self.values.reserve(used, needed, value_size)
        self.join_headers(headers, used, n)
        self.offsets, self.times, self.timed = offsets, times, timed
        memcpy(<int64_t *>cnp.PyArray_DATA(offsets) + used, offset, n * sizeof(int64_t))
        memcpy(<int64_t *>cnp.PyArray_DATA(times) + used, time, n * sizeof(int64_t))
        memcpy(<uint8_t *>cnp.PyArray_DATA(timed) + used, is_timed, n)
        self.keys.append(used, keys, n)
        self.values.append(used, values, n)
        self.n = used + n
        return 0

    def taken(self):
        """Remove and return all records.

        Returns
        -------
        ackcore._records.GatheredRecords or None
            The records; None if there are none.
        """
        with cython.critical_section(self):
            return self.take()

    cdef object take(self):
        cdef Py_ssize_t n = self.n
        if not n:
            return None
        timed = self.timed[:n] if self.untimed else None
        found = _records.GatheredRecords(
            self.keys.taken(n), self.values.taken(n), self.headers, self.offsets[:n],
            self.times[:n], timed,
        )
        self.rows_at_once = n
        self.offsets = self.times = self.timed = self.headers = None
        self.n = self.untimed = 0
        self.header_bytes = 0
        return found
