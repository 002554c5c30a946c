// Row-wise operations between the linear layers: norms and the gated activation. Every row stands alone.
#pragma once
#include "simd.h"

namespace KVR_NAME(kvr) {

KVR_INLINE vf load_any(const float* p) { return load(p); }
KVR_INLINE vf load_any(const bf16* p) {
    float a[VL];
    for (int i = 0; i < VL; i++) a[i] = to_float(p[i]);
    return load(a);
}
KVR_INLINE void store_any(float* p, vf v) { store(p, v); }
KVR_INLINE void store_any(bf16* p, vf v) {
    float a[VL];
    store(a, v);
    for (int i = 0; i < VL; i++) from_float(a[i], p + i);
}

// If residual is given: residual += x first, and the norm is of the sum. out = norm * weight.
template <class T>
static void rms_norm_row(const T* x, T* residual, const float* weight, long n, float eps, T* out) {
    vf sums[4] = {};
    float tail = 0;
    const T* in = residual ? residual : x;
    long i = 0;
    for (; i + VL <= n; i += VL) {
        vf v = load_any(in + i);
        if (residual) {
            store_any(residual + i, v + load_any(x + i));
            v = load_any(residual + i);
        }
        vf& s = sums[i / VL & 3];
        s = fma(v, v, s);
    }
    for (; i < n; i++) {
        if (residual) from_float(to_float(residual[i]) + to_float(x[i]), residual + i);
        tail += to_float(in[i]) * to_float(in[i]);
    }
    float sum = sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3])) + tail;
    float scale = 1.f / sqrtf(sum / (float)n + eps);
    for (i = 0; i + VL <= n; i += VL) store_any(out + i, load_any(in + i) * splat(scale) * load(weight + i));
    for (; i < n; i++) from_float(to_float(in[i]) * scale * weight[i], out + i);
}

KVR_INLINE vf silu(vf g) { return g / (splat(1.f) + exp2(g * splat(-1.44269504088896341f))); }

// gate_up: gate [n] then up [n].
template <class T> static void silu_mul_row(const T* gate_up, long n, T* out) {
    long i = 0;
    for (; i + VL <= n; i += VL) store_any(out + i, silu(load_any(gate_up + i)) * load_any(gate_up + n + i));
    for (; i < n; i++)
        from_float(silu(splat(to_float(gate_up[i])))[0] * to_float(gate_up[n + i]), out + i);
}

template <class T> static void embed_row(const T* row, long n, float* out) {
    for (long i = 0; i < n; i++) out[i] = to_float(row[i]);
}

}  // namespace
