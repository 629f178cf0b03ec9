/* kafka_record.h - records of Kafka's message format 2, recognized in librdkafka's buffers.
 *
 * librdkafka allocates and frees several blocks to find that a message has no headers: a third of
 * the reading thread's time.  Its keys and values lie in the buffer that came from the broker:
 *
 *     length | attributes 1 | timestamp | offset | key length | key | value length | value
 *     | number of headers | headers
 *
 * with zigzag varints.  So the record behind a recognized one begins where that one ends.  The
 * layout is not part of librdkafka's interface: nothing is concluded unless all lengths fit to the
 * message's key and value.  Memory is read only between these, or where a length has included it.
 */
#ifndef ACKCORE_KAFKA_RECORD_H
#define ACKCORE_KAFKA_RECORD_H

#include <stddef.h>
#include <stdint.h>

/* The most bytes before the key: three varints of up to 5 bytes, one of 10, the attributes. */
#define MOST_HEAD 26
#define MOST_LENGTH 5

/* Read a varint that ends before or at `end`; return the place behind it, or NULL. */
static inline const uint8_t *read_varint(const uint8_t *at, const uint8_t *end, int64_t *value) {
    uint64_t found = 0;
    for (int shift = 0; shift < 64 && at < end; shift += 7) {
        uint8_t byte = *at++;
        found |= (uint64_t)(byte & 127) << shift;
        if (byte < 128) {
            *value = (int64_t)(found >> 1) ^ -(int64_t)(found & 1);
            return at;
        }
    }
    return NULL;
}

/* Return the end of a record without headers that begins at `at`, and has this key and value.
 * Return NULL if that is not certain, also for an empty or missing value, and for `at` NULL. */
static inline const uint8_t *end_of_plain(
    const uint8_t *at, const uint8_t *key, size_t key_size, const uint8_t *value, size_t size
) {
    const uint8_t *after_key = key ? key + key_size : at, *body, *place;
    int64_t length = 0, skipped = 0, of_key = 0, of_value = 0;
    if (!at || !value) return NULL;
    if (key && (uintptr_t)key - (uintptr_t)at > MOST_HEAD) return NULL;
    if ((uintptr_t)value - (uintptr_t)after_key > MOST_LENGTH + (key ? 0 : MOST_HEAD)) return NULL;
    if (!(body = read_varint(at, value, &length)) || body == value) return NULL;
    if (!(place = read_varint(body + 1, value, &skipped))) return NULL;
    if (!(place = read_varint(place, value, &skipped))) return NULL;
    if (!(place = read_varint(place, value, &of_key))) return NULL;
    if (key ? of_key != (int64_t)key_size || place != key : of_key != -1) return NULL;
    place = read_varint(key ? after_key : place, value, &of_value);
    if (place != value || of_value != (int64_t)size) return NULL;
    if (length != (value - body) + (int64_t)size + 1) return NULL;
    return value[size] ? NULL : value + size + 1; /* the number of headers */
}

#endif
