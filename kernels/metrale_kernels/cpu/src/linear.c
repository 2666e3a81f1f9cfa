/* out[T, N] = x[T, K] * weight[N, K]^T + bias.
 *
 * Weights are packed in tiles of 32 outputs: for float32 [K][32], for bfloat16 [K / 2][32][2] (pairs of neighbouring K, as
 * dot-product instructions want them). Every output is one chain of additions over K in order, in one accumulator,
 * whatever the number of rows: that is the row rule. Speed comes from computing up to ROWS x 32 chains at a time. */
#include "linear.h"

/* Rows computed together: as many as there are registers for two sums of 16 lanes each. */
#ifdef __AVX512F__
#define ROWS 12
#else
#define ROWS 3
#endif
#define ROWS_PER_TASK 256
#define FETCH_AHEAD 8192
#define MAX_CHUNKS 4096

struct context {
    const struct linear_args *a;
    int64_t chunks, starts[MAX_CHUNKS + 1]; /* chunk i: tiles starts[i] .. starts[i + 1] - 1 */
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

/* Weights to fetch while a tile is used: `step` bytes for each 128 of the tile. */
struct fetch {
    const char *from;
    int64_t step;
};

/* `count` rows of one tile; a constant where it is inlined, so that the sums live in registers. */
static inline __attribute__((always_inline)) void rows_f32(const struct linear_args *a, const float *tile, int64_t row,
                                                           int64_t first, const int count, struct fetch next) {
    const float *x = (const float *)a->x + row * a->x_stride;
    const int64_t stride = a->x_stride, depth = a->in_features;
    vf low[ROWS], high[ROWS];
    UNROLL for (int r = 0; r < count; r++) low[r] = high[r] = (vf){};
    for (int64_t k = 0; k < depth; k++, next.from += next.step) {
        vf w0 = load_f32(tile + k * TILE), w1 = load_f32(tile + k * TILE + LANES);
        __builtin_prefetch(next.from, 0, 2);
        __builtin_prefetch(next.from + 64, 0, 2);
        UNROLL for (int r = 0; r < count; r++) {
            vf value = splat(x[r * stride + k]);
            low[r] = low[r] + value * w0;
            high[r] = high[r] + value * w1;
        }
    }
    UNROLL for (int r = 0; r < count; r++) finish(a, row + r, first, low[r], high[r]);
}

static inline __attribute__((always_inline)) void rows_bf16(const struct linear_args *a, const bf16 *tile, int64_t row,
                                                            int64_t first, const int count, struct fetch next) {
    const bf16 *x = (const bf16 *)a->x + row * a->x_stride;
    const int64_t stride = a->x_stride, depth = a->in_features;
    vf low[ROWS], high[ROWS];
    UNROLL for (int r = 0; r < count; r++) low[r] = high[r] = (vf){};
    for (int64_t k = 0; k < depth; k += 2, next.from += next.step) {
        const bf16 *w = tile + k * TILE;
        vu w0 = LOAD_PAIRS(w), w1 = LOAD_PAIRS(w + TILE);
        __builtin_prefetch(next.from, 0, 2);
        __builtin_prefetch(next.from + 64, 0, 2);
        UNROLL for (int r = 0; r < count; r++) {
            uint32_t bits;
            memcpy(&bits, x + r * stride + k, sizeof bits);
            vu pair = SPLAT_PAIR(bits);
            low[r] = DOT(low[r], w0, pair);
            high[r] = DOT(high[r], w1, pair);
        }
    }
    UNROLL for (int r = 0; r < count; r++) finish(a, row + r, first, low[r], high[r]);
}

/* Each count is a function of its own, so that the compiler allots registers to one of them at a time. */
#define KERNELS(N)                                                                                                     \
    static void kernel_f32_##N(const struct linear_args *a, const void *tile, int64_t row, int64_t first,              \
                               struct fetch next) {                                                                    \
        rows_f32(a, tile, row, first, N, next);                                                                        \
    }                                                                                                                  \
    static void kernel_bf16_##N(const struct linear_args *a, const void *tile, int64_t row, int64_t first,             \
                                struct fetch next) {                                                                   \
        rows_bf16(a, tile, row, first, N, next);                                                                       \
    }
KERNELS(1) KERNELS(2) KERNELS(3)
#if ROWS > 3
KERNELS(4) KERNELS(5) KERNELS(6) KERNELS(7) KERNELS(8) KERNELS(9) KERNELS(10) KERNELS(11) KERNELS(12)
#define MORE(TYPE)                                                                                                     \
    , kernel_##TYPE##_4, kernel_##TYPE##_5, kernel_##TYPE##_6, kernel_##TYPE##_7, kernel_##TYPE##_8,                   \
        kernel_##TYPE##_9, kernel_##TYPE##_10, kernel_##TYPE##_11, kernel_##TYPE##_12
#else
#define MORE(TYPE)
#endif
static void (*const kernels[2][ROWS + 1])(const struct linear_args *, const void *, int64_t, int64_t, struct fetch) = {
    [F32] = {0, kernel_f32_1, kernel_f32_2, kernel_f32_3 MORE(f32)},
    [BF16] = {0, kernel_bf16_1, kernel_bf16_2, kernel_bf16_3 MORE(bf16)},
};

static inline const char *tile_at(const struct linear_args *a, int64_t tile) {
    return (const char *)a->packed + tile * TILE * a->in_features * (a->x_dtype == F32 ? 4 : 2);
}

void linear_tile(const struct linear_args *a, int64_t tile, int64_t next_tile, int64_t begin, int64_t end) {
    const char *weights = tile_at(a, tile), *ahead = tile_at(a, next_tile);
    int64_t bytes = tile_at(a, 1) - tile_at(a, 0), passes = (end - begin + ROWS - 1) / ROWS, row = begin;
    for (int64_t pass = 0; pass < passes; pass++) {
        /* Equal counts. One pass reads ahead of itself; several share the reading of the next tile. */
        int64_t count = (end - row + passes - pass - 1) / (passes - pass);
        struct fetch next = {weights + FETCH_AHEAD, 128};
        if (passes > 1) next = (struct fetch){ahead + bytes / passes * pass, ahead == weights ? 0 : 128 / passes};
        kernels[a->x_dtype][count](a, weights, row, tile * TILE, next);
        row += count;
    }
}

static void run_task(void *context, int64_t task) {
    const struct context *c = context;
    int64_t begin = task / c->chunks * ROWS_PER_TASK, chunk = task % c->chunks;
    int64_t end = begin + ROWS_PER_TASK < c->a->rows ? begin + ROWS_PER_TASK : c->a->rows;
    int64_t last = c->starts[chunk + 1] - 1;
    for (int64_t tile = c->starts[chunk]; tile <= last; tile++)
        linear_tile(c->a, tile, tile < last ? tile + 1 : tile, begin, end);
}

void op_linear(const struct linear_args *a) {
    struct context c = {a, 0, {0}};
    int64_t tiles = (a->out_features + TILE - 1) / TILE, shares = 2 * pool_threads();
    /* Large chunks first, so that a thread reads on where it is, and small ones last, so that all end together. */
    while (c.starts[c.chunks] < tiles) {
        int64_t left = tiles - c.starts[c.chunks], chunk = c.chunks < MAX_CHUNKS - 1 ? (left + shares - 1) / shares : left;
        c.starts[c.chunks + 1] = c.starts[c.chunks] + chunk;
        c.chunks++;
    }
    pool_run(run_task, &c, c.chunks * ((a->rows + ROWS_PER_TASK - 1) / ROWS_PER_TASK));
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
