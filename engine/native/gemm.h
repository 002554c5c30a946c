// y = x W^T (+ bias) with W packed once into panels of 32 output columns. Knows nothing of models or threads.
//
// Every output is one lane of one accumulator: acc = fma(x[k], w[k], acc) for k = 0, 1, 2, ... from zero, then + bias.
// So a row's result does not depend on how many rows, which tile, which thread or how K is cut (a partial sum that
// waits in y is the same float): a batch of 256 gives bit for bit what 256 batches of one give.
#pragma once
#include "simd.h"

namespace KVR_NAME(kvr) {

constexpr int PANEL = 32;
constexpr long MAX_KC = 320;          // a slab of a panel, 320 x 32 bfloat16 = 20 KiB, stays in the first cache
constexpr long FEW_ROWS = 16;         // up to here memory bounds the time: shorter slabs, fetched more evenly
constexpr long FEW_KC = 96;
constexpr long STREAM_AHEAD = 4096;   // bytes; one pass over the weights fetches this far ahead
constexpr long X_BYTES = 192 * 1024;  // a block of x that stays in the second cache
#if KVR_ISA == 2
constexpr int MAX_ROWS = 12, WIDE_ROWS = 12;
#elif KVR_ISA == 1
constexpr int MAX_ROWS = 6, WIDE_ROWS = 3;
#else
constexpr int MAX_ROWS = 3, WIDE_ROWS = 1;
#endif

struct Tile {
    const float* x;   // [rows, ldx], at this slab's first k
    long ldx;
    long kc;
    float* y;         // [rows, ldy], at this unit's first column
    long ldy;
    const float* bias;  // or null; added after the last slab
    bool first;         // start from zero, else from y
    const char* ahead;  // where the next weights lie: ahead + k * ahead_step is prefetched
    long ahead_step;
};

// ROWS rows by UNITS units of columns of one slab. w: [kc, 32] of W.
template <class W, int ROWS, int UNITS> static void micro(const Tile& t, const W* w) {
    constexpr int V = UNITS * NV;
    vf acc[ROWS][V];
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) acc[r][v] = t.first ? vf{} : load(t.y + r * t.ldy + v * VL);
    const float* x[ROWS];
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++) x[r] = t.x + r * t.ldx;
    const char* ahead = t.ahead;
    for (long k = 0; k < t.kc; k++) {
        vf b[V];
#pragma GCC unroll 2
        for (int u = 0; u < UNITS; u++) load_unit(w + u * UNIT, b + u * NV);
        w += PANEL;
        __builtin_prefetch(ahead);
        ahead += t.ahead_step;
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++) {
            vf a = splat(x[r][k]);
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) acc[r][v] = fma(a, b[v], acc[r][v]);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) {
            vf sum = t.bias ? acc[r][v] + load(t.bias + v * VL) : acc[r][v];
            store(t.y + r * t.ldy + v * VL, sum);
        }
}

template <class W, int UNITS, int ROWS> static void micro_rows(int rows, const Tile& t, const W* w) {
    if (rows == ROWS) return micro<W, ROWS, UNITS>(t, w);
    if constexpr (ROWS > 1) micro_rows<W, UNITS, ROWS - 1>(rows, t, w);
}

struct Linear {
    const float* x;
    long ldx, rows;
    const void* packed;
    long n, k;
    const float* bias;
    float* y;
    long ldy;
};

// One tile of at most MAX_ROWS rows against one slab of one panel; a panel that sticks out of n goes through a copy.
template <class W> static void tile(const Linear& a, Tile t, int rows, const W* slab, long col) {
    float edge[MAX_ROWS * PANEL], edge_bias[PANEL] = {};
    long width = a.n - col < PANEL ? a.n - col : PANEL;
    float* y = t.y;
    if (width < PANEL) {
        for (int r = 0; r < rows && !t.first; r++) memcpy(edge + r * PANEL, y + r * t.ldy, width * 4);
        if (t.bias) memcpy(edge_bias, t.bias, width * 4), t.bias = edge_bias;
        t.y = edge, t.ldy = PANEL;
    }
    if (rows <= WIDE_ROWS) {
        micro_rows<W, 2, WIDE_ROWS>(rows, t, slab);
    } else {
        for (int u = 0; u < 2; u++) {
            micro_rows<W, 1, MAX_ROWS>(rows, t, slab + u * UNIT);
            t.y += UNIT, t.ahead += t.ahead_step * t.kc;
            if (t.bias) t.bias += UNIT;
        }
    }
    if (width < PANEL)
        for (int r = 0; r < rows; r++) memcpy(y + r * a.ldy, edge + r * PANEL, width * 4);
}

// Rows r0 .. r1 against slab k0 .. k0 + kc of panel p: tiles of nearly equal height, each fetching its share of the
// next slab, so that memory is read while the processor multiplies.
template <class W> static void slab_rows(const Linear& a, long p, long k0, long kc, long r0, long r1) {
    const W* slab = (const W*)a.packed + (p * a.k + k0) * PANEL;
    long rows = r1 - r0, tiles = (rows + MAX_ROWS - 1) / MAX_ROWS;
    long passes = rows <= WIDE_ROWS ? 1 : 2 * tiles;
    long col = p * PANEL;
    const char* ahead = (const char*)slab + (passes == 1 ? STREAM_AHEAD : kc * PANEL * (long)sizeof(W));
    Tile t = {0, a.ldx, kc, 0, a.ldy, 0, k0 == 0, ahead, (long)sizeof(W) * PANEL / passes};
    for (long i = 0; i < tiles; i++) {
        long from = r0 + rows * i / tiles, to = r0 + rows * (i + 1) / tiles;
        t.x = a.x + from * a.ldx + k0;
        t.y = a.y + from * a.ldy + col;
        t.bias = a.bias && k0 + kc == a.k ? a.bias + col : 0;
        for (long r = from; r < to + MAX_ROWS && r < r1; r++) {  // the sums of this tile and the next
            __builtin_prefetch(a.y + r * a.ldy + col, 1, 3);
            __builtin_prefetch(a.y + r * a.ldy + col + UNIT, 1, 3);
        }
        tile(a, t, (int)(to - from), slab, col);
        t.ahead += 2 * t.ahead_step * kc;
    }
}

// Panels p0 .. p1 for all rows. Few rows: panel after panel, weights read once in the order they lie in memory.
// Many rows: a block of x stays in the second cache while the panels pass.
template <class W> static void panels(const Linear& a, long p0, long p1) {
    long max_kc = a.rows <= FEW_ROWS ? FEW_KC : MAX_KC;
    long cuts = a.rows <= WIDE_ROWS ? 1 : (a.k + max_kc - 1) / max_kc;
    if (a.rows * a.k * 4 <= X_BYTES || cuts == 1) {
        for (long p = p0; p < p1; p++)
            for (long c = 0; c < cuts; c++) {
                long k0 = a.k * c / cuts, k1 = a.k * (c + 1) / cuts;
                slab_rows<W>(a, p, k0, k1 - k0, 0, a.rows);
            }
        return;
    }
    long block = X_BYTES / 4 / (a.k / cuts + 1), blocks = (a.rows + block - 1) / block;
    for (long b = 0; b < blocks; b++)
        for (long c = 0; c < cuts; c++) {
            long k0 = a.k * c / cuts, k1 = a.k * (c + 1) / cuts;
            for (long p = p0; p < p1; p++)
                slab_rows<W>(a, p, k0, k1 - k0, a.rows * b / blocks, a.rows * (b + 1) / blocks);
        }
}

// w [n, k] row major -> packed [ceil(n / 32), k, 32]; missing columns are zero.
template <class W> static void pack_panels(const W* w, long n, long k, W* packed, long p0, long p1) {
    for (long p = p0; p < p1; p++)
        for (long j = 0; j < PANEL; j++) {
            long col = p * PANEL + j;
            W* to = packed + p * k * PANEL + j / UNIT * UNIT + perm<W>(j % UNIT);
            for (long i = 0; i < k; i++) to[i * PANEL] = col < n ? w[col * k + i] : W{};
        }
}

// out[i] = row ids[i] of the original w, widened: the embedding lookup of a tied head, from the packed panels.
template <class W> static void unpack_rows(const W* packed, long k, const int64_t* ids, long count, float* out) {
    for (long i = 0; i < count; i++) {
        long p = ids[i] / PANEL, j = ids[i] % PANEL;
        const W* from = packed + p * k * PANEL + j / UNIT * UNIT + perm<W>((int)(j % UNIT));
        for (long c = 0; c < k; c++) {
            __builtin_prefetch(from + (c + 24) * PANEL);
            out[i * k + c] = to_float(from[c * PANEL]);
        }
    }
}

}  // namespace
