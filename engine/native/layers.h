// Several decoder layers in one call, in one OpenMP region: what engine/llama.py does call by call, with the same
// functions and so the same bits. Knows Llama's order of operations; weights and scratch belong to the caller.
#pragma once
#include "attention.h"
#include "gemm.h"
#include "rowwise.h"
#include <omp.h>

struct KvrMatrix {  // mirrored, as are the two below, in engine/native/layers.py
    const void* packed;
    const float* bias;
    int64_t n, k, is_bf16;
};

struct KvrLayer {
    KvrMatrix qkv, output, gate_up, down;
    const float *mlp_norm, *next_norm;  // next_norm: the norm that stands after this layer
};

struct KvrLayers {
    const KvrLayer* layers;
    const KvrAttention* attention;  // its qkv and out are scratch of this call; its layer is the first of `count`
    float *x, *residual;            // [rows, hidden]: x is the normed input, and at the end that of the next layer
    float *gate_up, *gated;         // [rows, 2 mlp], [rows, mlp]: scratch
    int64_t count;
    double eps;
};

namespace KVR_NAME(kvr) {

struct Team {  // one thread of those that share the work; alone it never meets OpenMP
    long index, size;
    long from(long count) const { return count * index / size; }
    long to(long count) const { return count * (index + 1) / size; }
    void wait() const {
        if (size > 1) {
#pragma omp barrier
        }
    }
};

static void multiply(const Team& team, const KvrMatrix& m, const float* x, long rows, float* y) {
    Linear a = {x, m.k, rows, m.packed, m.n, m.k, m.bias, y, m.n};
    long count = (m.n + PANEL - 1) / PANEL;
    if (m.is_bf16) panels<bf16>(a, team.from(count), team.to(count));
    else panels<float>(a, team.from(count), team.to(count));
    team.wait();
}

static void add_norm(const Team& team, const KvrLayers& a, const float* weight, long rows, long hidden) {
    for (long r = team.from(rows); r < team.to(rows); r++) {
        float* x = a.x + r * hidden;
        rms_norm_row(x, a.residual + r * hidden, weight, hidden, (float)a.eps, x);
    }
    team.wait();
}

template <class P>
static void attend_with(const Team& team, const KvrAttention& a, const Task* tasks, long count) {
    write_kv<float, P>(a, team.from(a.tokens), team.to(a.tokens));
    team.wait();
    if (team.size == 1) {
        for (long i = 0; i < count; i++) run_task<float, P>(a, tasks[i]);
        return;
    }
#pragma omp for schedule(dynamic, 1)
    for (long i = 0; i < count; i++) run_task<float, P>(a, tasks[i]);
}

static void run_layers(const Team& team, const KvrLayers& a, const Task* tasks, long count) {
    KvrAttention attention = *a.attention;
    long rows = attention.tokens;
    float* qkv = (float*)attention.qkv;
    for (long i = 0; i < a.count; i++, attention.layer++) {
        const KvrLayer& layer = a.layers[i];
        long hidden = layer.down.n, mlp = layer.down.k;
        multiply(team, layer.qkv, a.x, rows, qkv);
        if (attention.pool_is_bf16) attend_with<bf16>(team, attention, tasks, count);
        else attend_with<float>(team, attention, tasks, count);
        multiply(team, layer.output, (const float*)attention.out, rows, a.x);
        add_norm(team, a, layer.mlp_norm, rows, hidden);
        multiply(team, layer.gate_up, a.x, rows, a.gate_up);
        for (long r = team.from(rows); r < team.to(rows); r++)
            silu_mul_row(a.gate_up + 2 * r * mlp, mlp, a.gated + r * mlp);
        team.wait();
        multiply(team, layer.down, a.gated, rows, a.x);
        add_norm(team, a, layer.next_norm, rows, hidden);
    }
}

}  // namespace
