// One vector type per instruction set, and the few operations the kernels need. Knows no kernel.
//
// KVR_ISA is 0 (generic: GCC vector extensions of 16 bytes), 1 (AVX2 + FMA) or 2 (AVX-512F). This header is compiled
// once for each, inside a namespace of its own; no standard header with inline functions may be included, or the
// linker could keep a copy that this processor cannot run.
//
// A *unit* is 16 neighbouring elements (columns of a panel, or dimensions of a head): NV vectors of VL lanes.
// bfloat16 units are split into even and odd elements, which costs one shift and one mask instead of a shuffle, so
// vector lane j of a bfloat16 unit is element PERM(j). Float units keep their order.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#if KVR_ISA > 0
#include <immintrin.h>
#endif

#define KVR_INLINE static inline __attribute__((always_inline))
#define KVR_APART __attribute__((noinline))  // a loop that fills the registers is compiled for itself

#if KVR_ISA == 2
#define KVR_NAME(x) x##_avx512
constexpr int VL = 16;
#elif KVR_ISA == 1
#define KVR_NAME(x) x##_avx2
constexpr int VL = 8;
#else
#define KVR_NAME(x) x##_generic
constexpr int VL = 4;
#endif

// Makes the compiler hold a vector in a register here instead of reading it again from memory later.
#if defined(__x86_64__)
#define KVR_HOLD(v) asm volatile("" : "+x"(v))
#else
#define KVR_HOLD(v)
#endif

namespace KVR_NAME(kvr) {

constexpr int UNIT = 16;
constexpr int NV = UNIT / VL;

typedef float vf __attribute__((vector_size(VL * 4)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
struct bf16 {
    uint16_t bits;
};

KVR_INLINE vf load(const float* p) {
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}
KVR_INLINE void store(float* p, vf v) { memcpy(p, &v, sizeof v); }
KVR_INLINE vf splat(float x) { return x - vf{}; }
KVR_INLINE vi splat_int(int32_t x) { return x - vi{}; }
KVR_INLINE vf maximum(vf a, vf b) { return a > b ? a : b; }

// a * b + c with one rounding where the instruction set has it; always this, never the compiler's own contraction.
KVR_INLINE vf fma(vf a, vf b, vf c) {
#if KVR_ISA == 2
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif KVR_ISA == 1
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

// acc = fma(*p, b, acc) with *p as the instruction's memory operand: where twelve accumulators leave no register free,
// the compiler would rather spill one of them.
KVR_INLINE void fma_from(const float* p, vf b, vf* acc) {
#if KVR_ISA == 1
    typedef float unaligned __attribute__((vector_size(VL * 4), aligned(4), may_alias));
    asm("vfmadd231ps %2, %1, %0" : "+x"(*acc) : "x"(b), "m"(*(const unaligned*)p));
#else
    *acc = fma(load(p), b, *acc);
#endif
}

KVR_INLINE float to_float(float x) { return x; }
KVR_INLINE float to_float(bf16 x) {
    uint32_t u = (uint32_t)x.bits << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}
KVR_INLINE void from_float(float x, float* out) { *out = x; }
KVR_INLINE void from_float(float x, bf16* out) {  // round to nearest even, as torch does
    uint32_t u;
    memcpy(&u, &x, 4);
    out->bits = x != x ? 0x7fc0 : (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

KVR_INLINE void load_unit(const float* p, vf* v) {
#pragma GCC unroll 4
    for (int i = 0; i < NV; i++) v[i] = load(p + i * VL);
}

#if KVR_ISA == 2
KVR_INLINE void load_unit(const bf16* p, vf* v) {
    typedef uint16_t words __attribute__((vector_size(32)));
    words w;
    memcpy(&w, p, sizeof w);
    v[0] = (vf)(__builtin_convertvector(w, vi) << 16);
}
template <class T> constexpr int perm(int j) { return j; }
#else
KVR_INLINE void load_unit(const bf16* p, vf* v) {
#pragma GCC unroll 2
    for (int i = 0; i < NV / 2; i++) {
        vi pair;
        memcpy(&pair, p + i * 2 * VL, sizeof pair);
        v[2 * i] = (vf)(pair << 16);
        v[2 * i + 1] = (vf)(pair & (int32_t)0xffff0000);
    }
}
template <class T> constexpr int perm(int j);
template <> constexpr int perm<float>(int j) { return j; }
template <> constexpr int perm<bf16>(int j) {
    int base = j / (2 * VL) * 2 * VL, lane = j % (2 * VL);
    return lane < VL ? base + 2 * lane : base + 2 * (lane - VL) + 1;
}
#endif

// Vector I of a unit alone.
template <int I> KVR_INLINE vf load_part(const float* p) { return load(p + I * VL); }
#if KVR_ISA == 2
template <int I> KVR_INLINE vf load_part(const bf16* p) {
    vf v;
    load_unit(p, &v);
    return v;
}
#else
template <int I> KVR_INLINE vf load_part(const bf16* p) {
    vi pair;
    memcpy(&pair, p + I / 2 * 2 * VL, sizeof pair);
    return I % 2 ? (vf)(pair & (int32_t)0xffff0000) : (vf)(pair << 16);
}
#endif

// 2 to the power x, relative error about 1e-7; exactly 1 at 0, exactly 0 below -126 (and at -inf), saturates at 2^126.
KVR_INLINE vf exp2(vf x) {
    vf floor = splat(-126.f);
    vi tiny = x < floor;
    x = x > floor ? x : floor;
    x = x < splat(126.f) ? x : splat(126.f);
    vf shifted = x + splat(12582912.f);  // 1.5 * 2^23: rounds to an integer held in the low bits
    vf r = x - (shifted - splat(12582912.f));
    vf p = splat(1.535336188319500e-4f);
    p = fma(p, r, splat(1.339887440266574e-3f));
    p = fma(p, r, splat(9.618437357674640e-3f));
    p = fma(p, r, splat(5.550332471162809e-2f));
    p = fma(p, r, splat(2.402264791363012e-1f));
    p = fma(p, r, splat(6.931472028550421e-1f));
    p = fma(p, r, splat(1.f));
    vi bits = (vi)p + ((vi)shifted << 23);
    return (vf)(bits & ~tiny);
}

// The other half of a vector, lane by lane: folding by these reduces it in a fixed order.
template <int W> KVR_INLINE vf fold(vf v) {
    vi lanes;
    for (int i = 0; i < VL; i++) lanes[i] = i ^ W;
    return __builtin_shuffle(v, lanes);
}
KVR_INLINE float sum_lanes(vf v) {
    if constexpr (VL > 8) v += fold<8>(v);
    if constexpr (VL > 4) v += fold<4>(v);
    v += fold<2>(v);
    v += fold<1>(v);
    return v[0];
}
KVR_INLINE float max_lanes(vf v) {
    if constexpr (VL > 8) v = maximum(v, fold<8>(v));
    if constexpr (VL > 4) v = maximum(v, fold<4>(v));
    v = maximum(v, fold<2>(v));
    v = maximum(v, fold<1>(v));
    return v[0];
}

// out[i] = sum of the lanes of v[i], always in the same order.
KVR_INLINE void sum_lanes4(const vf* v, float* out) {
#if KVR_ISA > 0
#if KVR_ISA == 2
    __m256 w[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        w[i] = (__m256)__builtin_shufflevector(v[i], v[i], 0, 1, 2, 3, 4, 5, 6, 7) +
               (__m256)__builtin_shufflevector(v[i], v[i], 8, 9, 10, 11, 12, 13, 14, 15);
#else
    const __m256* w = (const __m256*)v;
#endif
    __m256 s = _mm256_hadd_ps(_mm256_hadd_ps(w[0], w[1]), _mm256_hadd_ps(w[2], w[3]));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
#else
    for (int i = 0; i < 4; i++) out[i] = (v[i][0] + v[i][1]) + (v[i][2] + v[i][3]);
#endif
}

}  // namespace
