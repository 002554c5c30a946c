// The C interface of the kernels for one instruction set, bound by engine/native/__init__.py. Knows threads, no models.
//
// threads = 1 never enters an OpenMP region. Threads split outputs (panels, rows, tasks), never a sum.
#include "layers.h"
#include <stdlib.h>

using namespace KVR_NAME(kvr);

namespace KVR_NAME(kvr) {

template <class F> static void split(long count, long threads, const F& part) {
    if (threads <= 1 || count <= 1) return part(0, count);
#pragma omp parallel num_threads((int)(threads < count ? threads : count))
    {
        long n = omp_get_num_threads(), i = omp_get_thread_num();
        part(count * i / n, count * (i + 1) / n);
    }
}

template <class A, class P> static void attend(const KvrAttention& a, const Task* tasks, long count) {
    if (a.threads <= 1) {
        write_kv<A, P>(a, 0, a.tokens);
        for (long i = 0; i < count; i++) run_task<A, P>(a, tasks[i]);
        return;
    }
#pragma omp parallel num_threads((int)a.threads)
    {
        long n = omp_get_num_threads(), i = omp_get_thread_num();
        write_kv<A, P>(a, a.tokens * i / n, a.tokens * (i + 1) / n);
#pragma omp barrier
#pragma omp for schedule(dynamic, 1)
        for (long j = 0; j < count; j++) run_task<A, P>(a, tasks[j]);
    }
}

static bool takes(const KvrAttention& a) {
    return a.head_dim % UNIT == 0 && a.head_dim <= MAX_DIM && a.heads % a.kv_heads == 0;
}

// The tasks of a step, to be freed; null if there is no memory for them.
static Task* new_tasks(const KvrAttention& a, long* count) {
    *count = list_tasks(a, 0);
    Task* tasks = (Task*)malloc((*count + 1) * sizeof(Task));
    if (tasks) list_tasks(a, tasks);
    return tasks;
}

}  // namespace

extern "C" {

void KVR_NAME(kvr_pack)(const void* w, int is_bf16, int64_t n, int64_t k, void* packed, int64_t threads) {
    split((n + PANEL - 1) / PANEL, threads, [=](long p0, long p1) {
        if (is_bf16) pack_panels((const bf16*)w, n, k, (bf16*)packed, p0, p1);
        else pack_panels((const float*)w, n, k, (float*)packed, p0, p1);
    });
}

void KVR_NAME(kvr_unpack_rows)(const void* packed, int is_bf16, int64_t k, const int64_t* ids, int64_t count,
                               float* out) {
    if (is_bf16) unpack_rows((const bf16*)packed, k, ids, count, out);
    else unpack_rows((const float*)packed, k, ids, count, out);
}

void KVR_NAME(kvr_linear)(const float* x, int64_t ldx, int64_t rows, const void* packed, int is_bf16, int64_t n,
                          int64_t k, const float* bias, float* y, int64_t ldy, int64_t threads) {
    Linear a = {x, ldx, rows, packed, n, k, bias, y, ldy};
    split((n + PANEL - 1) / PANEL, threads, [&](long p0, long p1) {
        if (is_bf16) panels<bf16>(a, p0, p1);
        else panels<float>(a, p0, p1);
    });
}

void KVR_NAME(kvr_rms_norm)(const void* x, void* residual, const float* weight, int is_bf16, int64_t rows, int64_t n,
                            double eps, void* out, int64_t threads) {
    split(rows, threads, [=](long r0, long r1) {
        for (long r = r0; r < r1; r++) {
            long at = r * n;
            if (is_bf16)
                rms_norm_row((const bf16*)x + at, residual ? (bf16*)residual + at : 0, weight, n, (float)eps,
                             (bf16*)out + at);
            else
                rms_norm_row((const float*)x + at, residual ? (float*)residual + at : 0, weight, n, (float)eps,
                             (float*)out + at);
        }
    });
}

void KVR_NAME(kvr_silu_mul)(const void* gate_up, int is_bf16, int64_t rows, int64_t n, void* out, int64_t threads) {
    split(rows, threads, [=](long r0, long r1) {
        for (long r = r0; r < r1; r++)
            if (is_bf16) silu_mul_row((const bf16*)gate_up + 2 * r * n, n, (bf16*)out + r * n);
            else silu_mul_row((const float*)gate_up + 2 * r * n, n, (float*)out + r * n);
    });
}

void KVR_NAME(kvr_embed)(const void* table, int is_bf16, int64_t n, const int64_t* ids, int64_t count, float* out) {
    for (long i = 0; i < count; i++)
        if (is_bf16) embed_row((const bf16*)table + ids[i] * n, n, out + i * n);
        else embed_row((const float*)table + ids[i] * n, n, out + i * n);
}

// 0: done; 1: a shape these kernels do not take; 2: out of memory.
int KVR_NAME(kvr_attention)(const KvrAttention* args) {
    const KvrAttention& a = *args;
    long count;
    if (!takes(a)) return 1;
    Task* tasks = new_tasks(a, &count);
    if (!tasks) return 2;
    if (a.act_is_bf16) {
        if (a.pool_is_bf16) attend<bf16, bf16>(a, tasks, count);
        else attend<bf16, float>(a, tasks, count);
    } else {
        if (a.pool_is_bf16) attend<float, bf16>(a, tasks, count);
        else attend<float, float>(a, tasks, count);
    }
    free(tasks);
    return 0;
}

// The same answers.
int KVR_NAME(kvr_layers)(const KvrLayers* args) {
    const KvrLayers& a = *args;
    long count, threads = a.attention->threads;
    if (!takes(*a.attention) || a.attention->act_is_bf16) return 1;
    Task* tasks = new_tasks(*a.attention, &count);
    if (!tasks) return 2;
    if (threads <= 1) {
        run_layers({0, 1}, a, tasks, count);
    } else {
#pragma omp parallel num_threads((int)threads)
        run_layers({omp_get_thread_num(), omp_get_num_threads()}, a, tasks, count);
    }
    free(tasks);
    return 0;
}

// For bench/kernels.py, the floors: reads `bytes` once; below, does `rounds` x 12 x VL fused multiply-adds.
float KVR_NAME(kvr_read)(const float* p, int64_t bytes, int64_t threads) {
    float total = 0;
    long step = 16 * VL;
    split(bytes / 4 / step, threads, [&](long from, long to) {
        vf s[16] = {};
        for (const float *q = p + from * step, *end = p + to * step; q < end; q += step) {
            __builtin_prefetch((const char*)q + 2048);
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++) s[i] += load(q + i * VL);
        }
        for (int i = 1; i < 16; i++) s[0] += s[i];
        float part = sum_lanes(s[0]);
#pragma omp atomic
        total += part;
    });
    return total;
}

// Reads tiles of tile_bytes in the given order: what memory gives to attention over scattered blocks.
float KVR_NAME(kvr_read_tiles)(const float* p, int64_t tile_bytes, const int32_t* order, int64_t count,
                               int64_t threads) {
    float total = 0;
    split(count, threads, [&](long from, long to) {
        vf s[4] = {};
        for (long i = from; i < to; i++) {
            const float* tile = p + order[i] * (tile_bytes / 4);
            const char* next = (const char*)(p + order[i + 1 < to ? i + 1 : i] * (tile_bytes / 4));
            for (long j = 0; j < tile_bytes / 4; j += 4 * VL) {
                for (long b = 0; b < 16 * VL; b += 64) __builtin_prefetch(next + j * 4 + b);
#pragma GCC unroll 4
                for (int v = 0; v < 4; v++) s[v] += load(tile + j + v * VL);
            }
        }
        float part = sum_lanes((s[0] + s[1]) + (s[2] + s[3]));
#pragma omp atomic
        total += part;
    });
    return total;
}

float KVR_NAME(kvr_multiply)(int64_t rounds, int64_t threads) {
    float total = 0;
    split(threads, threads, [&](long from, long to) {
        for (; from < to; from++) {
            vf s[12] = {}, a = splat(0.5f), b = splat(0.25f);
            for (long i = 0; i < rounds; i++)
#pragma GCC unroll 12
                for (int j = 0; j < 12; j++) {
                    s[j] = fma(s[j], a, b);
                    KVR_HOLD(s[j]);
                }
            for (int j = 1; j < 12; j++) s[0] += s[j];
            float part = sum_lanes(s[0]);
#pragma omp atomic
            total += part;
        }
    });
    return total;
}

}
