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

struct Work {  // one task's state; queries are row-major over (row, head)
    float q[MAX_QUERIES * MAX_DIM], acc[MAX_QUERIES * MAX_DIM];  // q: lanes of the pool's units, scaled
    float p[MAX_QUERIES * WINDOW];
    float top[MAX_QUERIES], total[MAX_QUERIES], shrink[MAX_QUERIES];
    const void *k[WINDOW + TOKEN_TILE], *v[WINDOW];
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
            for (long i = 0; i < dim; i++) q[i] = turned[i / UNIT * UNIT + perm<P>(i % UNIT)] * scale;
        }
}

// p[q][t] = q . k[t] for QUERIES queries and `count` tokens, rounded up to TOKEN_TILE by repeating the last token.
template <class P, int QUERIES>
static void scores(const float* q, long dim, const void* const* keys, long count, float* p) {
    for (long t = 0; t < count; t += TOKEN_TILE) {
        const P* k[TOKEN_TILE];
        vf acc[QUERIES][TOKEN_TILE] = {};
#pragma GCC unroll 4
        for (int i = 0; i < TOKEN_TILE; i++) k[i] = (const P*)keys[t + i];
        for (long d = 0; d < dim; d += UNIT)
#pragma GCC unroll 4
            for (int v = 0; v < NV; v++)
#pragma GCC unroll 4
                for (int i = 0; i < TOKEN_TILE; i++) {
                    vf unit[NV];
                    load_unit(k[i] + d, unit);
#pragma GCC unroll 4
                    for (int j = 0; j < QUERIES; j++)
                        acc[j][i] = fma(load(q + j * dim + d + v * VL), unit[v], acc[j][i]);
                }
#pragma GCC unroll 4
        for (int j = 0; j < QUERIES; j++) sum_lanes4(acc[j], p + j * WINDOW + t);
    }
}

// acc[q][unit] = acc * shrink[q] + sum over tokens of p[q][t] v[t][unit], for QUERIES queries and UNITS units.
template <class P, int QUERIES, int UNITS>
static void values(const float* p, const float* shrink, const void* const* rows, long d, long count, float* acc,
                   long dim) {
    constexpr int V = UNITS * NV;
    vf sum[QUERIES][V];
#pragma GCC unroll 6
    for (int j = 0; j < QUERIES; j++)
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) sum[j][v] = load(acc + j * dim + d + v * VL) * splat(shrink[j]);
    for (long t = 0; t < count; t++) {
        vf b[V];
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
static void value_units(const float* p, const float* shrink, const void* const* rows, long count, float* acc,
                        long dim) {
    long d = 0;
    if constexpr (QUERIES * NV * 2 <= 12)
        for (; d + 2 * UNIT <= dim; d += 2 * UNIT) values<P, QUERIES, 2>(p, shrink, rows, d, count, acc, dim);
    for (; d < dim; d += UNIT) values<P, QUERIES, 1>(p, shrink, rows, d, count, acc, dim);
}

// One query's scores of a window -> weights; `seen` of them are visible.
static void soften(float* p, long seen, float* top, float* total, float* shrink) {
    if (seen <= 0) {
        *shrink = 1.f;
        memset(p, 0, WINDOW * sizeof *p);
        return;
    }
    for (long t = seen; t < WINDOW; t++) p[t] = NONE;
    vf high = load(p), sum = {};
#pragma GCC unroll 16
    for (int t = VL; t < WINDOW; t += VL) high = maximum(high, load(p + t));
    float best = max_lanes(high);
    best = best > *top ? best : *top;
#pragma GCC unroll 16
    for (int t = 0; t < WINDOW; t += VL) {
        vf e = exp2(load(p + t) - splat(best));
        store(p + t, e);
        sum += e;
    }
    *shrink = exp2(splat(*top - best))[0];
    *total = *total * *shrink + sum_lanes(sum);
    *top = best;
}

template <class P> static void one_window(const KvrAttention& a, const Task& t, Work& w, long start, long count) {
    const int32_t* table = a.block_tables + (long)t.seq * a.max_blocks;
    long dim = a.head_dim, queries = (long)t.rows * t.heads;
    for (long i = 0; i < count; i++) {
        long at = start + i;
        const P* k = tile_of<P>(a, table[at / a.block_size], t.kv_head) + at % a.block_size * dim;
        w.k[i] = k;
        w.v[i] = k + a.block_size * dim;
    }
    for (long i = 0; i < TOKEN_TILE; i++) w.k[count + i] = w.k[count - 1];
    long j = 0;
    for (; j + 3 <= queries; j += 3) scores<P, 3>(w.q + j * dim, dim, w.k, count, w.p + j * WINDOW);
    if (queries - j == 2) scores<P, 2>(w.q + j * dim, dim, w.k, count, w.p + j * WINDOW);
    if (queries - j == 1) scores<P, 1>(w.q + j * dim, dim, w.k, count, w.p + j * WINDOW);
    long before = a.context_lens[t.seq] - (a.cu_seqlens_q[t.seq + 1] - a.cu_seqlens_q[t.seq]) + t.row - start;
    for (j = 0; j < queries; j++) {
        long seen = before + j / t.heads + 1;
        soften(w.p + j * WINDOW, seen < WINDOW ? seen : WINDOW, w.top + j, w.total + j, w.shrink + j);
    }
    for (j = 0; j < queries;) {
        long left = queries - j;
        const float *p = w.p + j * WINDOW, *s = w.shrink + j;
        float* acc = w.acc + j * dim;
        if (left >= 6 && NV <= 2) value_units<P, 6>(p, s, w.v, count, acc, dim), j += 6;
        else if (left >= 3) value_units<P, 3>(p, s, w.v, count, acc, dim), j += 3;
        else if (left == 2) value_units<P, 2>(p, s, w.v, count, acc, dim), j += 2;
        else value_units<P, 1>(p, s, w.v, count, acc, dim), j += 1;
    }
}

template <class A, class P> static void run_task(const KvrAttention& a, const Task& t) {
    alignas(64) Work w;
    long dim = a.head_dim, queries = (long)t.rows * t.heads, first = a.cu_seqlens_q[t.seq];
    load_queries<A, P>(a, t, w);
    memset(w.acc, 0, queries * dim * sizeof *w.acc);
    for (long j = 0; j < queries; j++) w.top[j] = NONE, w.total[j] = 0;
    long visible = a.context_lens[t.seq] - (a.cu_seqlens_q[t.seq + 1] - first) + t.row + t.rows;
    for (long start = 0; start < visible; start += WINDOW)
        one_window<P>(a, t, w, start, visible - start < WINDOW ? visible - start : WINDOW);
    for (long j = 0; j < queries; j++) {
        A* out = (A*)a.out + (first + t.row + j / t.heads) * a.out_stride + (t.head + j % t.heads) * dim;
        float inverse = 1.f / w.total[j];
        for (long i = 0; i < dim; i++)
            from_float(w.acc[j * dim + i] * inverse, out + i / UNIT * UNIT + perm<P>(i % UNIT));
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
