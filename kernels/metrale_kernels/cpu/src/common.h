/* What every source shares: vector types, bfloat16, the thread pool. All operations take one pointer to their arguments,
 * a struct of 8-byte fields, so that a caller can store calls and replay them. */
#ifndef METRALE_COMMON_H
#define METRALE_COMMON_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && !defined(METRALE_PORTABLE)
#include <immintrin.h>
#define METRALE_AVX512 1
#endif
#if defined(METRALE_AVX512) && defined(__AVX512BF16__)
#define METRALE_AVX512_BF16 1
#endif

#define LANES 16
/* Sixteen lanes whatever the processor has: the compiler splits them into as many registers as it takes, and a sum over
 * lanes has the same order everywhere. */
typedef float vf __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t vu __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t vh __attribute__((vector_size(32), aligned(2), may_alias));
typedef uint16_t bf16;

enum dtype { F32 = 0, BF16 = 1 };

static inline vf load_f32(const float *p) { return *(const vf *)p; }
static inline void store_f32(float *p, vf x) { *(vf *)p = x; }
static inline vf splat(float x) { return x - (vf){}; }
static inline vu as_bits(vf x) { union { vf f; vu u; } c = {x}; return c.u; }
static inline vf as_float(vu x) { union { vu u; vf f; } c; c.u = x; return c.f; }

static inline float bf16_to_float(bf16 x) {
    union { uint32_t u; float f; } c = {(uint32_t)x << 16};
    return c.f;
}
static inline vf load_bf16(const bf16 *p) {
    return as_float(__builtin_convertvector(*(const vh *)p, vu) << 16);
}
/* Round to nearest even; NaN stays NaN. */
static inline bf16 float_to_bf16(float x) {
    union { float f; uint32_t u; } c = {x};
    if (x != x) return (bf16)((c.u >> 16) | 0x40);
    return (bf16)((c.u + 0x7FFF + ((c.u >> 16) & 1)) >> 16);
}
static inline void store_bf16(bf16 *p, vf x) {
    vu bits = as_bits(x);
    vu rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    vu nan = (bits >> 16) | 0x40;
    vu is_nan = (vu)(x != x);
    rounded = (is_nan & nan) | (~is_nan & rounded);
    *(vh *)p = __builtin_convertvector(rounded, vh);
}
/* The value after a round trip through bfloat16. */
static inline vf round_bf16(vf x) {
    bf16 rounded[LANES];
    store_bf16(rounded, x);
    return load_bf16(rounded);
}

static inline vf max_vf(vf a, vf b) {
#ifdef METRALE_AVX512
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#else
    vu mask = (vu)(a > b);
    return as_float((mask & as_bits(a)) | (~mask & as_bits(b)));
#endif
}
/* Lanes are folded in halves: one order everywhere. */
static inline float sum_lanes(vf x) {
    float t[LANES];
    store_f32(t, x);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) t[i] += t[i + half];
    return t[0];
}
static inline float max_lanes(vf x) {
    float t[LANES];
    store_f32(t, x);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) t[i] = t[i] > t[i + half] ? t[i] : t[i + half];
    return t[0];
}

/* exp in float32 to about 1 unit in the last place; 0 below -87.3 (also for -inf), NaN for NaN.
 * 2^n * p(r), x = n ln 2 + r, |r| <= ln 2 / 2, with ln 2 in two parts (Cody and Waite). */
static inline vf exp_vf(vf x) {
    const float log2e = 1.44269504088896341f, ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
    vf clamped = max_vf(x, splat(-87.33654f));
    vf upper = splat(88.72283f);
    vu over = (vu)(clamped > upper);
    clamped = as_float((over & as_bits(upper)) | (~over & as_bits(clamped)));
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    vf shifted = clamped * log2e + magic;
    vf n = shifted - magic;
    vf r = clamped - n * ln2_high;
    r = r - n * ln2_low;
    vf p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    vf result = as_float(as_bits(p) + (as_bits(shifted) << 23));
    vu under = (vu)(x < splat(-87.33654f));
    result = as_float(~under & as_bits(result));
    vu nan = (vu)(x != x);
    return as_float((nan & as_bits(x)) | (~nan & as_bits(result)));
}

/* Thread pool (pool.c). Tasks 0 .. count - 1 are taken in order by whichever thread is free. */
typedef void (*task_fn)(void *context, int64_t task);
void pool_run(task_fn run, void *context, int64_t count);
void pool_set_threads(int64_t count);
int64_t pool_threads(void);
/* Memory of the calling thread, at least `bytes` long and aligned to 64; it keeps nothing between calls. */
void *thread_scratch(int which, size_t bytes);

#endif
