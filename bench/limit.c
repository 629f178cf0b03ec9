/* limit.c - LIMIT: what memory alone lets through.  Not a ledger; no ledger can be faster.
 *
 * The same columns in the same batches, and for each record one 64-byte line, at random, of a table
 * as large as a dense ledger's (24-byte entries, of which a line takes 8/3, 60 % full: live / 0.6 x
 * 21.3 bytes), read and written.  No key is compared and nothing is decided, so there is no branch.
 * The caller tries several prefetch distances, and takes the best.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

enum { LINE = 64, HUGE = 2 << 20, MOST_AHEAD = 256, BLOCK = 1024 };

typedef struct {
    uint64_t words[LINE / 8];
} line_t;

line_t *limit_open(uint64_t lines) {
    const size_t bytes = (lines * LINE + HUGE - 1) / HUGE * HUGE;
    line_t *table = aligned_alloc(HUGE, bytes);
    if (table == NULL) return NULL;
#if defined(__linux__)
    madvise(table, bytes, MADV_HUGEPAGE);
#endif
    memset(table, 0, bytes);
    return table;
}
void limit_close(line_t *table) { free(table); }

static inline uint32_t line_of(uint64_t id, uint64_t lines) {
    return (uint32_t)(((id * 0x9e3779b97f4a7c15) >> 32) * lines >> 32);
}
/* n records, which `rest` more of the call follow: their first lines are prefetched as well. */
static inline __attribute__((always_inline)) void block(line_t *table, uint64_t lines,
        const uint64_t *ids, const uint64_t *vals, const int32_t *tasks, size_t n, size_t rest, size_t ahead) {
    uint32_t at[BLOCK + MOST_AHEAD];
    const size_t known = n + (rest < ahead ? rest : ahead);
    for (size_t j = 0; j < known; j++) at[j] = line_of(ids[j], lines);
    for (size_t j = known; j < n + ahead; j++) at[j] = at[n - 1];
    for (size_t j = 0; j < ahead; j++) __builtin_prefetch(&table[at[j]], 1, 3);
    for (size_t j = 0; j < n; j++) {
        if (ahead) __builtin_prefetch(&table[at[j + ahead]], 1, 3);
        table[at[j]].words[0] ^= vals[j] ^ (uint64_t)(int64_t)tasks[j];
    }
}
void limit_run(line_t *table, uint64_t lines, const uint64_t *ids, const uint64_t *vals,
               const int32_t *tasks, size_t rows, size_t call, size_t ahead) {
    for (size_t from = 0; from < rows; from += call) {
        const size_t end = from + call < rows ? from + call : rows;
        for (size_t i = from; i < end; i += BLOCK) {
            const size_t n = end - i < BLOCK ? end - i : BLOCK, rest = end - i - n;
            /* 0 apart, so that the loop without prefetch has none in it */
            if (ahead)
                block(table, lines, ids + i, vals + i, tasks + i, n, rest, ahead);
            else
                block(table, lines, ids + i, vals + i, tasks + i, n, rest, 0);
        }
    }
}
/* The XOR of all that was folded in: whoever skips a record is found out. */
uint64_t limit_sum(const line_t *table, uint64_t lines) {
    uint64_t sum = 0;
    for (uint64_t i = 0; i < lines; i++) sum ^= table[i].words[0];
    return sum;
}
