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
/* Before loops over registers, which are none unless the loop is unrolled. */
#define UNROLL _Pragma("GCC unroll 16")
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
/* Round to nearest even; NaN stays NaN. */
static inline bf16 float_to_bf16(float x) {
    union { float f; uint32_t u; } c = {x};
    if (x != x) return (bf16)((c.u >> 16) | 0x40);
    return (bf16)((c.u + 0x7FFF + ((c.u >> 16) & 1)) >> 16);
}
static inline vh narrow_bf16(vf x) {
#ifdef METRALE_AVX512_BF16
    /* One instruction; it takes what is too small for a normal number as zero. */
    return (vh)_mm512_cvtneps_pbh((__m512)x);
#else
    vu bits = as_bits(x), is_nan = (vu)(x != x);
    vu rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    return __builtin_convertvector((is_nan & (bits >> 16 | 0x40)) | (~is_nan & rounded), vh);
#endif
}
static inline vu widen_u16(vh x) {
#ifdef METRALE_AVX512
    return (vu)_mm512_cvtepu16_epi32((__m256i)x);
#else
    return __builtin_convertvector(x, vu);
#endif
}
static inline vf widen_bf16(vh x) { return as_float(widen_u16(x) << 16); }
static inline vf load_bf16(const bf16 *p) { return widen_bf16(*(const vh *)p); }
static inline void store_bf16(bf16 *p, vf x) { *(vh *)p = narrow_bf16(x); }
/* The value after a round trip through bfloat16. */
static inline vf round_bf16(vf x) { return widen_bf16(narrow_bf16(x)); }

static inline vf max_vf(vf a, vf b) {
#ifdef METRALE_AVX512
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#else
    vu mask = (vu)(a > b);
    return as_float((mask & as_bits(a)) | (~mask & as_bits(b)));
#endif
}
/* a * b + c where a sum of two products must not be fused now one way, now the other. */
static inline vf fma_vf(vf a, vf b, vf c) {
#ifdef METRALE_AVX512
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return a * b + c;
#endif
}
/* Lanes are folded in halves: one order everywhere. */
#if defined(__clang__)
#define SHUFFLE(x, ...) __builtin_shufflevector(x, x, __VA_ARGS__)
#else
#define SHUFFLE(x, ...) __builtin_shuffle(x, (vi){__VA_ARGS__})
#endif
#define FOLD(x, OP)                                                                                                    \
    x = OP(x, SHUFFLE(x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));                                       \
    x = OP(x, SHUFFLE(x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));                                       \
    x = OP(x, SHUFFLE(x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));                                       \
    x = OP(x, SHUFFLE(x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
static inline vf add_vf(vf a, vf b) { return a + b; }
static inline float sum_lanes(vf x) {
    FOLD(x, add_vf)
    return x[0];
}
static inline float max_lanes(vf x) {
    FOLD(x, max_vf)
    return x[0];
}

/* exp in float32 to about 1 unit in the last place; 0 for -inf, NaN for NaN.
 * 2^n * p(r), x = n ln 2 + r, |r| <= ln 2 / 2, with ln 2 in two parts (Cody and Waite). */
static inline vf exp_reduced(vf r) {
    vf p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    return p * (r * r) + r + 1.0f;
}
static inline vf exp_vf(vf x) {
    const float log2e = 1.44269504088896341f, ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
#ifdef METRALE_AVX512
    /* The second operand of these is what they return for NaN. */
    __m512 clamped = _mm512_max_ps(_mm512_set1_ps(-104.5f), (__m512)x);
    clamped = _mm512_min_ps(_mm512_set1_ps(88.8f), clamped);
    vf n = (vf)_mm512_roundscale_ps(_mm512_mul_ps(clamped, _mm512_set1_ps(log2e)), 0);
    vf r = (vf)clamped - n * ln2_high;
    r = r - n * ln2_low;
    return (vf)_mm512_scalef_ps((__m512)exp_reduced(r), (__m512)n);
#else
    vf clamped = max_vf(x, splat(-87.33654f));
    vf upper = splat(88.72283f);
    vu over = (vu)(clamped > upper);
    clamped = as_float((over & as_bits(upper)) | (~over & as_bits(clamped)));
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    vf shifted = clamped * log2e + magic;
    vf n = shifted - magic;
    vf r = clamped - n * ln2_high;
    r = r - n * ln2_low;
    vf result = as_float(as_bits(exp_reduced(r)) + (as_bits(shifted) << 23));
    vu under = (vu)(x < splat(-87.33654f));
    result = as_float(~under & as_bits(result));
    vu nan = (vu)(x != x);
    return as_float((nan & as_bits(x)) | (~nan & as_bits(result)));
#endif
}

/* Thread pool (pool.c). Tasks 0 .. count - 1 are taken in order by whichever thread is free. */
typedef void (*task_fn)(void *context, int64_t task);
void pool_run(task_fn run, void *context, int64_t count);
void pool_set_threads(int64_t count);
int64_t pool_threads(void);
/* Memory of the calling thread, at least `bytes` long and aligned to 64; it keeps nothing between calls. */
void *thread_scratch(int which, size_t bytes);

#endif
