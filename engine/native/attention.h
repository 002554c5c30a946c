// Paged causal attention with rope and the KV write in front. Knows one layer of one step; plans nothing.
//
// pool [blocks, kv_heads, layers, 2, block_size, head_dim]. A query row sees the tokens 0 .. its own position, visited
// in windows of 64 tokens that start at multiples of 64, whatever the block size. Within a window: scores (lanes over
// head_dim, then one fixed sum), online softmax in base 2, values token after token. A masked score adds exactly
// nothing, so a row gives the same bits decoded alone or anywhere in a chunk. No slot past the context is read.
//
// Query rows that share K and V (the heads of a group, and neighbouring rows of a chunk) are worked on together: each
// K and V element is widened once for up to six of them, in registers.
#pragma once
#include "simd.h"

struct KvrAttention {  // mirrored in engine/attention/cpu.py
    const void* qkv;   // [tokens, (heads + 2 kv_heads) head_dim]
    void* pool;
    const float* rope;  // [max_positions, head_dim]: cosines, then sines
    void* out;          // [tokens, heads head_dim]
    const int32_t *positions, *slot_blocks, *slot_offsets;        // [tokens]
    const int32_t *cu_seqlens_q, *context_lens, *block_tables;    // [seqs + 1], [seqs], [seqs, max_blocks]
    int64_t tokens, seqs, max_blocks;
    int64_t heads, kv_heads, head_dim, layers, layer, block_size;
    int64_t qkv_stride, out_stride;
    int64_t act_is_bf16, pool_is_bf16, threads;
};

namespace KVR_NAME(kvr) {

constexpr int WINDOW = 64, MAX_DIM = 256, MAX_QUERIES = 48;
constexpr int QUERY_TILE = 3, TOKEN_TILE = 4;
constexpr float NONE = -INFINITY;

struct Task {
    int32_t seq, kv_head, head, heads, row, rows;  // heads of the group from `head`, rows of the sequence from `row`
};

struct Slots {  // where the tokens of a window lie; the last one repeated to fill a tile
    const void *k[WINDOW + TOKEN_TILE], *v[WINDOW];
};

struct Work {  // one task's state; queries are row-major over (row, head)
    float q[MAX_QUERIES * MAX_DIM], acc[MAX_QUERIES * MAX_DIM];  // q: lanes of the pool's units, scaled
    float p[MAX_QUERIES * WINDOW];
    float top[MAX_QUERIES], best[MAX_QUERIES], shrink[MAX_QUERIES];  // highest score so far, with this window, factor
    vf total[MAX_QUERIES];                                           // sums of weights, lane by lane
    Slots slots[2];                                                  // of this window and of the next
};

template <class T> KVR_INLINE const T* tile_of(const KvrAttention& a, int64_t block, int64_t kv_head) {
    return (const T*)a.pool + ((block * a.kv_heads + kv_head) * a.layers + a.layer) * 2 * a.block_size * a.head_dim;
}

template <class A> KVR_INLINE void rope_pair(const A* x, const float* rope, long half, long i, float* lo, float* hi) {
    float a = to_float(x[i]), b = to_float(x[i + half]), c = rope[i], s = rope[i + half];
    *lo = a * c - b * s;
    *hi = b * c + a * s;
}

// K of tokens t0 .. t1 is turned by its position; K and V go to their slots.
template <class A, class P> static void write_kv(const KvrAttention& a, long t0, long t1) {
    long half = a.head_dim / 2;
    for (long t = t0; t < t1; t++) {
        const float* rope = a.rope + (long)a.positions[t] * a.head_dim;
        for (long h = 0; h < a.kv_heads; h++) {
            const A* k = (const A*)a.qkv + t * a.qkv_stride + (a.heads + h) * a.head_dim;
            const A* v = k + a.kv_heads * a.head_dim;
            P* slot = (P*)tile_of<P>(a, a.slot_blocks[t], h) + a.slot_offsets[t] * a.head_dim;
            for (long i = 0; i < half; i++) {
                float lo, hi;
                rope_pair(k, rope, half, i, &lo, &hi);
                from_float(lo, slot + i);
                from_float(hi, slot + half + i);
            }
            P* value = slot + a.block_size * a.head_dim;
            for (long i = 0; i < a.head_dim; i++) from_float(to_float(v[i]), value + i);
        }
    }
}

template <class A, class P> static void load_queries(const KvrAttention& a, const Task& t, Work& w) {
    long dim = a.head_dim, half = dim / 2, first = a.cu_seqlens_q[t.seq] + t.row;
    float scale = 1.44269504088896341f / sqrtf((float)dim), turned[MAX_DIM];
    for (long r = 0; r < t.rows; r++)
        for (long h = 0; h < t.heads; h++) {
            const A* x = (const A*)a.qkv + (first + r) * a.qkv_stride + (t.head + h) * dim;
            const float* rope = a.rope + (long)a.positions[first + r] * dim;
            for (long i = 0; i < half; i++) rope_pair(x, rope, half, i, turned + i, turned + half + i);
            float* q = w.q + (r * t.heads + h) * dim;
            for (long d = 0; d < dim; d += UNIT)
#pragma GCC unroll 16
                for (int i = 0; i < UNIT; i++) q[d + i] = turned[d + perm<P>(i)] * scale;
        }
}

KVR_INLINE void prefetch_row(const void* row, long num_bytes) {
    for (long i = 0; i < num_bytes; i += 64) __builtin_prefetch((const char*)row + i, 0, 2);
}

// acc[q][t] += q . k[t] over vector I of the unit at d, and the vectors after it.
template <class P, int QUERIES, int I>
KVR_INLINE void score_part(const float* q, long dim, const P* const* k, long d, vf (*acc)[TOKEN_TILE]) {
#pragma GCC unroll 4
    for (int i = 0; i < TOKEN_TILE; i++) {
        vf key = load_part<I>(k[i] + d);
#pragma GCC unroll 4
        for (int j = 0; j < QUERIES; j++) fma_from(q + j * dim + d + I * VL, key, &acc[j][i]);
    }
    asm volatile("" ::: "memory");  // else K is held in registers across vectors, and there are none left
    if constexpr (I + 1 < NV) score_part<P, QUERIES, I + 1>(q, dim, k, d, acc);
}

// p[q][t] = q . k[t] for QUERIES queries and `count` tokens, rounded up to TOKEN_TILE by repeating the last token.
template <class P, int QUERIES>
KVR_APART static void scores(const float* q, long dim, const void* const* keys, const void* const* ahead, long count,
                             float* p) {
    for (long t = 0; t < count; t += TOKEN_TILE) {
        const P* k[TOKEN_TILE];
        vf acc[QUERIES][TOKEN_TILE] = {};
#pragma GCC unroll 4
        for (int i = 0; i < TOKEN_TILE; i++) {
            k[i] = (const P*)keys[t + i];
            if (ahead) prefetch_row(ahead[t + i], dim * sizeof(P));
        }
        for (long d = 0; d < dim; d += UNIT) score_part<P, QUERIES, 0>(q, dim, k, d, acc);
#pragma GCC unroll 4
        for (int j = 0; j < QUERIES; j++) sum_lanes4(acc[j], p + j * WINDOW + t);
    }
}

// The same for SIX queries and tokens two by two: more products for each K read. Bit for bit the same sums.
template <class P, int I>
KVR_INLINE void score_part6(const float* q, long dim, const P* k0, const P* k1, long d, vf (*acc)[2]) {
    vf key[2] = {load_part<I>(k0 + d), load_part<I>(k1 + d)};
#pragma GCC unroll 6
    for (int j = 0; j < 6; j++) {
        vf part = load(q + j * dim + d + I * VL);
        KVR_HOLD(part);  // one load for both products
        acc[j][0] = fma(part, key[0], acc[j][0]);
        acc[j][1] = fma(part, key[1], acc[j][1]);
    }
    asm volatile("" ::: "memory");
    if constexpr (I + 1 < NV) score_part6<P, I + 1>(q, dim, k0, k1, d, acc);
}

template <class P>
KVR_APART static void scores6(const float* q, long dim, const void* const* keys, const void* const* ahead, long count,
                              float* p) {
    for (long t = 0; t < count; t += 2) {
        vf acc[6][2] = {};
        if (ahead) prefetch_row(ahead[t], dim * sizeof(P)), prefetch_row(ahead[t + 1], dim * sizeof(P));
        for (long d = 0; d < dim; d += UNIT)
            score_part6<P, 0>(q, dim, (const P*)keys[t], (const P*)keys[t + 1], d, acc);
#pragma GCC unroll 3
        for (int j = 0; j < 6; j += 2) {
            float sums[4];
            sum_lanes4(acc[j], sums);
            memcpy(p + j * WINDOW + t, sums, 8);
            memcpy(p + (j + 1) * WINDOW + t, sums + 2, 8);
        }
    }
}

// acc[q][unit] = acc * shrink[q] + sum over tokens of p[q][t] v[t][unit], for QUERIES queries and UNITS units.
template <class P, int QUERIES, int UNITS>
KVR_APART static void values(const float* p, const float* shrink, const void* const* rows, const void* const* ahead,
                             long d, long count, float* acc, long dim) {
    constexpr int V = UNITS * NV;
    vf sum[QUERIES][V];
#pragma GCC unroll 6
    for (int j = 0; j < QUERIES; j++)
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) sum[j][v] = load(acc + j * dim + d + v * VL) * splat(shrink[j]);
    for (long t = 0; t < count; t++) {
        vf b[V];
        if (ahead) __builtin_prefetch((const P*)ahead[t] + d, 0, 2);
#pragma GCC unroll 2
        for (int u = 0; u < UNITS; u++) load_unit((const P*)rows[t] + d + u * UNIT, b + u * NV);
#pragma GCC unroll 6
        for (int j = 0; j < QUERIES; j++) {
            vf weight = splat(p[j * WINDOW + t]);
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) sum[j][v] = fma(weight, b[v], sum[j][v]);
        }
    }
#pragma GCC unroll 6
    for (int j = 0; j < QUERIES; j++)
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) store(acc + j * dim + d + v * VL, sum[j][v]);
}

template <class P, int QUERIES>
static void value_units(const float* p, const float* shrink, const void* const* rows, const void* const* ahead,
                        long count, float* acc, long dim) {
    long d = 0;
    if constexpr (QUERIES * NV * 2 <= 12)
        for (; d + 2 * UNIT <= dim; d += 2 * UNIT) values<P, QUERIES, 2>(p, shrink, rows, ahead, d, count, acc, dim);
    for (; d < dim; d += UNIT) values<P, QUERIES, 1>(p, shrink, rows, ahead, d, count, acc, dim);
}

// The scores of a window -> weights. `before`: tokens of the window that row 0 of the task sees, less one.
static void soften(const Task& t, Work& w, long before) {
    long queries = (long)t.rows * t.heads;
    for (long j = 0, r = 0, h = 0; j < queries; j++, h + 1 < t.heads ? h++ : (h = 0, r++)) {
        float* p = w.p + j * WINDOW;
        for (long i = before + r + 1 > 0 ? before + r + 1 : 0; i < WINDOW; i++) p[i] = NONE;
        vf high = load(p);
#pragma GCC unroll 16
        for (int i = VL; i < WINDOW; i += VL) high = maximum(high, load(p + i));
        float best = max_lanes(high);
        w.best[j] = best > w.top[j] ? best : w.top[j];
    }
    for (long j = 0; j < queries; j += VL) {
        store(w.shrink + j, exp2(load(w.top + j) - load(w.best + j)));
        store(w.top + j, load(w.best + j));
    }
    for (long j = 0; j < queries; j++) {
        float* p = w.p + j * WINDOW;
        vf best = splat(w.best[j]), sum = {};
#pragma GCC unroll 4
        for (int i = 0; i < WINDOW; i += VL) {
            vf e = exp2(load(p + i) - best);
            store(p + i, e);
            sum += e;
        }
        w.total[j] = fma(w.total[j], splat(w.shrink[j]), sum);
    }
}

template <class P> static void find_slots(const KvrAttention& a, const Task& t, long start, long count, Slots& s) {
    const int32_t* table = a.block_tables + (long)t.seq * a.max_blocks;
    long dim = a.head_dim, size = a.block_size;
    for (long i = 0; i < count;) {
        long offset = (start + i) & (size - 1);
        const P* k = tile_of<P>(a, table[(start + i) / size], t.kv_head) + offset * dim;
        for (long end = i + size - offset < count ? i + size - offset : count; i < end; i++, k += dim)
            s.k[i] = k, s.v[i] = k + size * dim;
    }
    for (long i = 0; i < TOKEN_TILE; i++) s.k[count + i] = s.k[count - 1];
}

// ahead: the slots of the next window, fetched while this one is worked on; or null.
template <class P>
static void one_window(const KvrAttention& a, const Task& t, Work& w, long start, long count, const Slots& here,
                       const Slots* next) {
    long dim = a.head_dim, queries = (long)t.rows * t.heads;
    for (long j = 0; j < queries;) {
        const void* const* ahead = next && j == 0 ? next->k : 0;
        const float* q = w.q + j * dim;
        float* p = w.p + j * WINDOW;
        if (queries - j >= 6) scores6<P>(q, dim, here.k, ahead, count, p), j += 6;
        else if (queries - j >= 3) scores<P, 3>(q, dim, here.k, ahead, count, p), j += 3;
        else if (queries - j == 2) scores<P, 2>(q, dim, here.k, ahead, count, p), j += 2;
        else scores<P, 1>(q, dim, here.k, ahead, count, p), j += 1;
    }
    long rows = a.cu_seqlens_q[t.seq + 1] - a.cu_seqlens_q[t.seq];
    soften(t, w, a.context_lens[t.seq] - rows + t.row - start);
    for (long j = 0; j < queries;) {
        long left = queries - j;
        const void* const* ahead = next && j == 0 ? next->v : 0;
        const float *p = w.p + j * WINDOW, *s = w.shrink + j;
        float* acc = w.acc + j * dim;
        if (left >= 6 && NV <= 2) value_units<P, 6>(p, s, here.v, ahead, count, acc, dim), j += 6;
        else if (left >= 3) value_units<P, 3>(p, s, here.v, ahead, count, acc, dim), j += 3;
        else if (left == 2) value_units<P, 2>(p, s, here.v, ahead, count, acc, dim), j += 2;
        else value_units<P, 1>(p, s, here.v, ahead, count, acc, dim), j += 1;
    }
}

template <class A, class P> static void run_task(const KvrAttention& a, const Task& t) {
    alignas(64) Work w;
    long dim = a.head_dim, queries = (long)t.rows * t.heads, first = a.cu_seqlens_q[t.seq];
    load_queries<A, P>(a, t, w);
    memset(w.acc, 0, queries * dim * sizeof *w.acc);
    for (long j = 0; j < MAX_QUERIES; j++) w.top[j] = w.best[j] = NONE, w.total[j] = vf{};
    long visible = a.context_lens[t.seq] - (a.cu_seqlens_q[t.seq + 1] - first) + t.row + t.rows;
    find_slots<P>(a, t, 0, visible < WINDOW ? visible : WINDOW, w.slots[0]);
    if (visible > WINDOW) w.slots[1] = w.slots[0];  // what is prefetched past the end of a short last window
    for (long start = 0, i = 0; start < visible; start += WINDOW, i ^= 1) {
        long left = visible - start, after = left - WINDOW;
        if (after > 0) find_slots<P>(a, t, start + WINDOW, after < WINDOW ? after : WINDOW, w.slots[i ^ 1]);
        one_window<P>(a, t, w, start, left < WINDOW ? left : WINDOW, w.slots[i], after > 0 ? &w.slots[i ^ 1] : 0);
    }
    for (long j = 0; j < queries; j++) {
        A* out = (A*)a.out + (first + t.row + j / t.heads) * a.out_stride + (t.head + j % t.heads) * dim;
        float inverse = 1.f / sum_lanes(w.total[j]);
        for (long d = 0; d < dim; d += UNIT)
#pragma GCC unroll 16
            for (int i = 0; i < UNIT; i++) from_float(w.acc[j * dim + d + i] * inverse, out + d + perm<P>(i));
    }
}

// All tasks of the step, largest context first within a sequence; returns how many there are. tasks may be null.
static long list_tasks(const KvrAttention& a, Task* tasks) {
    long group = a.heads / a.kv_heads, n = 0;
    long heads = group < MAX_QUERIES ? group : MAX_QUERIES;
    long rows = MAX_QUERIES / 2 / heads > 1 ? MAX_QUERIES / 2 / heads : 1;
    for (long s = 0; s < a.seqs; s++) {
        long count = a.cu_seqlens_q[s + 1] - a.cu_seqlens_q[s];
        for (long kv = 0; kv < a.kv_heads; kv++)
            for (long h = 0; h < group; h += heads)
                for (long end = count; end > 0; end -= rows) {
                    long row = end > rows ? end - rows : 0;
                    long width = group - h < heads ? group - h : heads;
                    if (tasks)
                        tasks[n] = {(int32_t)s, (int32_t)kv, (int32_t)(kv * group + h), (int32_t)width, (int32_t)row,
                                    (int32_t)(end - row)};
                    n++;
                }
    }
    return n;
}

}  // namespace
