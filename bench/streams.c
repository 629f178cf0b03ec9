/* streams.c - the records of churning trees, as columns.  Loaded by streams.py, which says more. */
#include <stdint.h>
#include <stdlib.h>

enum { RECORDS = 5, TASKS = 64, AHEAD = 64 };

typedef struct {
    uint64_t root, left; /* `left`: the XOR of the values so far, and so the last one */
    int64_t tree;
    uint8_t next, init_at; /* position of the next record; 0: between two trees */
} slot_t;

typedef struct {
    uint64_t random, stride;
    int64_t trees, pending, most; /* trees begun, of them not completed, and the most of those so far */
    int64_t *roots, *vals; /* where the next record goes */
    int32_t *tasks;
    int8_t *done;
} stream_t;

/* SplitMix64 */
static uint64_t draw(stream_t *s) {
    uint64_t x = s->random += 0x9e3779b97f4a7c15;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
}
static uint64_t below(stream_t *s, uint64_t n) {
    return (uint64_t)(((unsigned __int128)draw(s) * n) >> 64);
}
static void record(stream_t *s, slot_t *slot) {
    const int first = slot->next == 0, last = slot->next == RECORDS - 1;
    if (first) {
        slot->tree = s->trees++;
        slot->root = s->stride ? (uint64_t)slot->tree * s->stride : draw(s);
        slot->left = 0;
        slot->init_at = (uint8_t)below(s, RECORDS);
    }
    s->pending += first - last;
    if (s->pending > s->most) s->most = s->pending;
    const uint64_t val = last ? slot->left : draw(s);
    slot->left ^= val;
    *s->roots++ = (int64_t)slot->root;
    *s->vals++ = (int64_t)val;
    *s->tasks++ = slot->next == slot->init_at ? (int32_t)(slot->tree % TASKS) : -1;
    *s->done++ = last ? (int8_t)(slot->tree % TASKS) : first ? -2 : -1;
    slot->next = last ? 0 : (uint8_t)(slot->next + 1);
}

/* None to four records of each slot, as many slots having each number of them, then `churn` of slots drawn at
 * random, then `whole` trees one by one.  So no more trees are ever in flight while the stream fills a
 * ledger than afterwards.  Returns the most that are.
 * `done` is the spout task in a record that completes its tree, -2 in one that begins a tree, and -1
 * in the others. */
int64_t make_stream(uint64_t seed, int64_t slots, int64_t churn, int64_t whole, uint64_t stride,
                    int64_t *roots, int64_t *vals, int32_t *tasks, int8_t *done) {
    stream_t s = {seed, stride, 1, 0, 0, roots, vals, tasks, done};
    slot_t *all = calloc((size_t)slots, sizeof *all), fresh = {0}, *next[AHEAD];
    if (all == NULL) return -1;
    for (int k = 1; k < RECORDS; k++)
        for (int64_t i = 0; i < slots; i++)
            if (i % RECORDS >= k) record(&s, &all[i]);
    for (int i = 0; i < AHEAD; i++) next[i] = &all[below(&s, (uint64_t)slots)];
    for (int64_t i = 0; i < churn; i++) {
        slot_t *slot = next[i % AHEAD];
        __builtin_prefetch(next[i % AHEAD] = &all[below(&s, (uint64_t)slots)], 1);
        record(&s, slot);
    }
    for (int64_t i = 0; i < whole * RECORDS; i++) record(&s, &fresh);
    free(all);
    return s.most;
}
