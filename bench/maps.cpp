// maps.cpp - an acker over a general-purpose hash map: INIT and ACK as in SEMANTICS 2, no expiry.
//
// Compiled once for each map that has its header here (-DMAP_STD, -DMAP_BOOST, -DMAP_ABSL).  The
// map is sized up front and hashes as its authors chose; batches come as columns and are handled in
// one call from Python, so the cost of a Python call is not in it.
#include <cstddef>
#include <cstdint>
#include <new>
#if defined(MAP_BOOST)
#include <boost/unordered/unordered_flat_map.hpp>
template <class K, class V> using map_t = boost::unordered_flat_map<K, V>;
#elif defined(MAP_ABSL)
#include <absl/container/flat_hash_map.h>
template <class K, class V> using map_t = absl::flat_hash_map<K, V>;
#else
#include <unordered_map>
template <class K, class V> using map_t = std::unordered_map<K, V>;
#endif

struct Pending {
    uint64_t val = 0;
    int32_t task = -1;
    uint8_t age = 0;
    bool failed = false;
};
using Acker = map_t<uint64_t, Pending>;

extern "C" {

Acker *map_open(size_t live) {
    Acker *acker = new (std::nothrow) Acker;
    if (acker) acker->reserve(live);
    return acker;
}
void map_close(Acker *acker) { delete acker; }
size_t map_size(const Acker *acker) { return acker->size(); }

// Returns how many trees completed; their roots and spout tasks are in the out columns, in order.
size_t map_run(Acker *acker, const uint64_t *ids, const uint64_t *vals, const int32_t *tasks,
               size_t rows, uint64_t *out_ids, int32_t *out_tasks) {
    size_t m = 0;
    for (size_t i = 0; i < rows; i++) {
        auto at = acker->try_emplace(ids[i]).first;
        Pending &pending = at->second;
        pending.val ^= vals[i];
        if (tasks[i] >= 0) pending.task = tasks[i];
        if (pending.task >= 0 && pending.val == 0) {
            out_ids[m] = ids[i];
            out_tasks[m++] = pending.task;
            acker->erase(at);
        }
    }
    return m;
}
}
