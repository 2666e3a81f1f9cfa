/* out[T, N] = x[T, K] * weight[N, K]^T + bias.
 *
 * Weights are packed in tiles of 32 outputs: for float32 [K][32], for bfloat16 [K / 2][32][2] (pairs of neighbouring K, as
 * dot-product instructions want them). Every output is one chain of additions over K in order, in one accumulator,
 * whatever the number of rows: that is the row rule. Speed comes from computing up to ROWS x 32 chains at a time. */
#include "linear.h"

#define ROWS 8
#define ROWS_PER_TASK 256

struct context {
    const struct linear_args *a;
    int64_t tiles, row_groups;
};

static inline void finish(const struct linear_args *a, int64_t row, int64_t first, vf low, vf high) {
    if (a->bias) {
        low += load_f32(a->bias + first);
        high += load_f32(a->bias + first + LANES);
    }
    int64_t width = a->out_features - first;
    if (a->out_dtype == F32) {
        float *out = (float *)a->out + row * a->out_features + first;
        if (width >= TILE) {
            store_f32(out, low);
            store_f32(out + LANES, high);
        } else {
            float whole[TILE];
            store_f32(whole, low);
            store_f32(whole + LANES, high);
            memcpy(out, whole, width * sizeof *out);
        }
    } else {
        bf16 *out = (bf16 *)a->out + row * a->out_features + first;
        if (width >= TILE) {
            store_bf16(out, low);
            store_bf16(out + LANES, high);
        } else {
            bf16 whole[TILE];
            store_bf16(whole, low);
            store_bf16(whole + LANES, high);
            memcpy(out, whole, width * sizeof *out);
        }
    }
}

#define KERNEL_F32(R)                                                                                                  \
    static void kernel_f32_##R(const struct linear_args *a, const float *tile, int64_t row, int64_t first) {           \
        const float *x = (const float *)a->x + row * a->x_stride;                                                      \
        const int64_t stride = a->x_stride, depth = a->in_features;                                                    \
        vf low[R], high[R];                                                                                            \
        for (int r = 0; r < R; r++) low[r] = high[r] = (vf){};                                                         \
        for (int64_t k = 0; k < depth; k++) {                                                                          \
            vf w0 = load_f32(tile + k * TILE), w1 = load_f32(tile + k * TILE + LANES);                                 \
            __builtin_prefetch(tile + k * TILE + 16 * TILE);                                                           \
            __builtin_prefetch(tile + k * TILE + 16 * TILE + LANES);                                                   \
            for (int r = 0; r < R; r++) {                                                                              \
                vf value = splat(x[r * stride + k]);                                                                   \
                low[r] = low[r] + value * w0;                                                                          \
                high[r] = high[r] + value * w1;                                                                        \
            }                                                                                                          \
        }                                                                                                              \
        for (int r = 0; r < R; r++) finish(a, row + r, first, low[r], high[r]);                                        \
    }

#ifdef METRALE_AVX512_BF16
#define DOT(sum, weights, pair) ((vf)_mm512_dpbf16_ps((__m512)(sum), (__m512bh)(weights), (__m512bh)(pair)))
#define LOAD_PAIRS(p) ((vu)_mm512_loadu_si512(p))
#define SPLAT_PAIR(p) ((vu)_mm512_set1_epi32(p))
#else
#define LOAD_PAIRS(p) (*(const vu *)(p))
#define SPLAT_PAIR(p) ((uint32_t)(p) - (vu){})
static inline vf dot_pairs(vf sum, vu weights, vu pair) {
    sum = sum + as_float(weights << 16) * as_float(pair << 16);
    return sum + as_float(weights & 0xFFFF0000u) * as_float(pair & 0xFFFF0000u);
}
#define DOT dot_pairs
#endif

#define KERNEL_BF16(R)                                                                                                 \
    static void kernel_bf16_##R(const struct linear_args *a, const bf16 *tile, int64_t row, int64_t first) {           \
        const bf16 *x = (const bf16 *)a->x + row * a->x_stride;                                                        \
        const int64_t stride = a->x_stride, depth = a->in_features;                                                    \
        vf low[R], high[R];                                                                                            \
        for (int r = 0; r < R; r++) low[r] = high[r] = (vf){};                                                         \
        for (int64_t k = 0; k < depth; k += 2) {                                                                       \
            const bf16 *w = tile + k * TILE;                                                                           \
            vu w0 = LOAD_PAIRS(w), w1 = LOAD_PAIRS(w + TILE);                                                          \
            __builtin_prefetch(w + 32 * TILE);                                                                         \
            __builtin_prefetch(w + 33 * TILE);                                                                         \
            for (int r = 0; r < R; r++) {                                                                              \
                uint32_t bits;                                                                                         \
                memcpy(&bits, x + r * stride + k, sizeof bits);                                                        \
                vu pair = SPLAT_PAIR(bits);                                                                            \
                low[r] = DOT(low[r], w0, pair);                                                                        \
                high[r] = DOT(high[r], w1, pair);                                                                      \
            }                                                                                                          \
        }                                                                                                              \
        for (int r = 0; r < R; r++) finish(a, row + r, first, low[r], high[r]);                                        \
    }

#define EACH(KERNEL) KERNEL(1) KERNEL(2) KERNEL(3) KERNEL(4) KERNEL(5) KERNEL(6) KERNEL(7) KERNEL(8)
EACH(KERNEL_F32)
EACH(KERNEL_BF16)

typedef void (*kernel_f32)(const struct linear_args *, const float *, int64_t, int64_t);
typedef void (*kernel_bf16)(const struct linear_args *, const bf16 *, int64_t, int64_t);
static const kernel_f32 kernels_f32[ROWS + 1] = {0, kernel_f32_1, kernel_f32_2, kernel_f32_3, kernel_f32_4,
                                                 kernel_f32_5, kernel_f32_6, kernel_f32_7, kernel_f32_8};
static const kernel_bf16 kernels_bf16[ROWS + 1] = {0, kernel_bf16_1, kernel_bf16_2, kernel_bf16_3, kernel_bf16_4,
                                                   kernel_bf16_5, kernel_bf16_6, kernel_bf16_7, kernel_bf16_8};

void linear_tile(const struct linear_args *a, int64_t tile, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row += ROWS) {
        int64_t count = end - row < ROWS ? end - row : ROWS;
        if (a->x_dtype == F32)
            kernels_f32[count](a, (const float *)a->packed + tile * a->in_features * TILE, row, tile * TILE);
        else
            kernels_bf16[count](a, (const bf16 *)a->packed + tile * a->in_features * TILE, row, tile * TILE);
    }
}

static void run_task(void *context, int64_t task) {
    const struct context *c = context;
    int64_t tile = task % c->tiles, begin = task / c->tiles * ROWS_PER_TASK;
    int64_t end = begin + ROWS_PER_TASK < c->a->rows ? begin + ROWS_PER_TASK : c->a->rows;
    linear_tile(c->a, tile, begin, end);
}

void op_linear(const struct linear_args *a) {
    struct context c = {a, (a->out_features + TILE - 1) / TILE, (a->rows + ROWS_PER_TASK - 1) / ROWS_PER_TASK};
    pool_run(run_task, &c, c.tiles * c.row_groups);
}

struct pack_args {
    const void *weight; /* [N, K] contiguous */
    void *packed;       /* zeroed beforehand: [tiles][K][32], or [tiles][K / 2][32][2] */
    int64_t out_features, in_features, dtype, first_out;
};

/* Put the rows of one weight matrix at outputs first_out .. of a packed (possibly fused) one. */
void op_pack(const struct pack_args *a) {
    for (int64_t n = 0; n < a->out_features; n++) {
        int64_t out = a->first_out + n, lane = out % TILE, base = out / TILE * a->in_features * TILE;
        if (a->dtype == F32) {
            const float *row = (const float *)a->weight + n * a->in_features;
            float *tile = (float *)a->packed + base;
            for (int64_t k = 0; k < a->in_features; k++) tile[k * TILE + lane] = row[k];
        } else {
            const uint32_t *row = (const uint32_t *)((const bf16 *)a->weight + n * a->in_features);
            uint32_t *tile = (uint32_t *)((bf16 *)a->packed + base);
            for (int64_t k = 0; k < a->in_features / 2; k++) tile[k * TILE + lane] = row[k];
        }
    }
}
