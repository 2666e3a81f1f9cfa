/* Causal attention over a paged cache, exact in order: a row's result is a function of its query and of the keys and values at
 * the positions it sees, taken in the order of position, and of nothing else.
 *
 * Keys are cut by absolute position into partitions of PARTITION keys and those into tiles of TILE. Within a partition the
 * softmax is computed online over its tiles (Milakov & Gimelshein 2018); partitions are then merged in order. That is so
 * for every row, whether it comes alone or with others, and whether one thread computes all partitions of a piece of work or
 * several threads share them.
 *
 * Everything is done in 32-bit words: of float32 a word is one value, of bfloat16 two, neighbours along the head for the
 * products with keys and neighbouring positions for the sums of values, as dot-product instructions want them. So with
 * bfloat16 a weight is rounded before it meets its value, and it is the rounded weights that are summed up. */
#include "common.h"

#define TILE 64
#define PARTITION 1024
#define ROWS 32
#define QUERIES 4 /* vectors computed together */
#define SLACK 8.0f
#define LOG2E 1.44269504088896341
/* Partitions are shared among threads when there are fewer pieces of work than this for each thread, and if what is kept of them
 * until they are merged takes no more than this. */
#define PIECES_PER_THREAD 8
#define PARTIALS_BYTES (16 << 20)
#define MAX_HEAD_DIM 512
#define MAX_GROUPS 64

/* One piece of machine code for each of these, so that the compiler cannot fuse multiplications and additions one way for one
 * caller and another way for the next. */
#define ONE_COPY __attribute__((noinline, noclone))

struct attention_args {
    const void *query, *key_cache, *value_cache;
    void *out;
    const int64_t *positions;
    const int32_t *query_starts, *context_lengths, *block_tables;
    int64_t sequences, query_heads, key_heads, head_dim, block_size;
    int64_t query_stride, key_block_stride, value_block_stride, table_stride, window, dtype;
    double scale;
};

/* One piece of work: rows [row, row + rows) of one sequence and one KV head, over one partition or over all of them. */
struct piece {
    int32_t sequence, rows;
    int64_t row, head, partition, partials; /* partition: -1 for all of them */
};

/* One row and query head, and the keys it sees: positions from .. to - 1. */
struct vector {
    const uint32_t *query;
    int64_t from, to;
};

/* A softmax in progress over some keys: sum of weights (in lanes until the partition's end) and weighted sum of values. A weight is
 * 2^(score - maximum), scores in units of log 2; the maximum may lag behind the highest score by up to SLACK, so that what was
 * summed up seldom has to be scaled anew (as FlashAttention-4 does). Whole cache lines each. */
struct partial {
    float maximum, total, unused[LANES - 2];
    float lanes[LANES];
    float mixed[];
};

struct work {
    const struct attention_args *a;
    const struct piece *pieces;
    char *partials;
    size_t partial_bytes;
};

static inline struct partial *partial_at(const struct work *w, int64_t index) {
    return (struct partial *)(w->partials + index * w->partial_bytes);
}

static inline int64_t groups_of(const struct attention_args *a) { return a->query_heads / a->key_heads; }

/* Where the keys and values of positions start .. start + TILE - 1 lie; beyond the sequence, at zeros. */
static void find_rows(const struct attention_args *a, int64_t sequence, int64_t head, int64_t start, int64_t length,
                      const void *zeros, const char **keys, const char **values) {
    const int32_t *table = a->block_tables + sequence * a->table_stride;
    int64_t item = a->dtype == F32 ? 4 : 2, row_bytes = a->head_dim * item;
    int64_t count = length - start < TILE ? length - start : TILE;
    int64_t block = start / a->block_size, offset = start % a->block_size;
    for (int64_t j = 0; j < count; block++, offset = 0) {
        int64_t place = (head * a->block_size + offset) * a->head_dim;
        const char *key = (const char *)a->key_cache + (table[block] * a->key_block_stride + place) * item;
        const char *value = (const char *)a->value_cache + (table[block] * a->value_block_stride + place) * item;
        for (; j < count && offset < a->block_size; j++, offset++, key += row_bytes, value += row_bytes) {
            keys[j] = key;
            values[j] = value;
        }
    }
    for (int64_t j = count; j < TILE; j++) keys[j] = values[j] = zeros;
}

#ifdef METRALE_AVX512
/* Sixteen rows of sixteen 32-bit words, columns from `column` on, to columns of sixteen rows. */
static inline void transpose16(const char *const *rows, int64_t column, __mmask16 mask, uint32_t *out, int64_t stride) {
    __m512i r[16], t[16];
    for (int i = 0; i < 16; i++) r[i] = _mm512_maskz_loadu_epi32(mask, (const uint32_t *)rows[i] + column);
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xDD);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xDD);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xDD);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xDD);
    }
    for (int i = 0; i < 16; i++)
        if (mask >> i & 1) _mm512_storeu_si512(out + i * stride, r[i]);
}
#endif

/* TILE rows of `words` 32-bit words to [words][TILE]: a float32 each, or a pair of bfloat16. */
static void transpose_tile(const char *const *rows, int64_t words, uint32_t *out) {
#ifdef METRALE_AVX512
    for (int64_t j = 0; j < TILE; j += 16)
        for (int64_t column = 0; column < words; column += 16) {
            int64_t left = words - column;
            __mmask16 mask = left >= 16 ? 0xFFFF : (__mmask16)((1 << left) - 1);
            transpose16(rows + j, column, mask, out + column * TILE + j, TILE);
        }
#else
    for (int64_t j = 0; j < TILE; j++)
        for (int64_t column = 0; column < words; column++) out[column * TILE + j] = ((const uint32_t *)rows[j])[column];
#endif
}

/* Values of TILE positions, words in the order of positions: [TILE][head_dim] float32, [TILE / 2][head_dim] pairs. */
static void gather_values(const struct attention_args *a, const char *const *rows, uint32_t *out) {
    if (a->dtype == F32) {
        for (int64_t j = 0; j < TILE; j++) memcpy(out + j * a->head_dim, rows[j], a->head_dim * sizeof *out);
        return;
    }
    for (int64_t j = 0; j < TILE; j += 2, out += a->head_dim) {
        const bf16 *even = (const bf16 *)rows[j], *odd = (const bf16 *)rows[j + 1];
        int64_t d = 0;
        for (; d + LANES <= a->head_dim; d += LANES) {
            *(vu *)(out + d) = widen_u16(*(const vh *)(even + d)) | widen_u16(*(const vh *)(odd + d)) << 16;
        }
        for (; d < a->head_dim; d++) out[d] = even[d] | (uint32_t)odd[d] << 16;
    }
}

#ifdef METRALE_AVX512_BF16
static inline vf dot(vf sum, vu keys, uint32_t query) {
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)keys, (__m512bh)_mm512_set1_epi32((int)query));
}
#else
static inline vf dot(vf sum, vu keys, uint32_t query) {
    vu pair = query - (vu){};
    sum = sum + as_float(keys << 16) * as_float(pair << 16);
    return sum + as_float(keys & 0xFFFF0000u) * as_float(pair & 0xFFFF0000u);
}
#endif

/* Products of `count` <= QUERIES query vectors with a transposed tile of keys: [count][TILE]. */
#define SCORES(NAME, STEP)                                                                                             \
    static inline __attribute__((always_inline)) void NAME(const uint32_t *const *queries, int count, int64_t words,   \
                                                           const uint32_t *keys, float *out) {                         \
        vf s[QUERIES][TILE / LANES];                                                                                   \
        UNROLL for (int q = 0; q < count; q++)                                                                         \
            UNROLL for (int t = 0; t < TILE / LANES; t++) s[q][t] = (vf){};                                            \
        for (int64_t w = 0; w < words; w++) {                                                                          \
            vu k[TILE / LANES];                                                                                        \
            UNROLL for (int t = 0; t < TILE / LANES; t++) k[t] = *(const vu *)(keys + w * TILE + t * LANES);           \
            UNROLL for (int q = 0; q < count; q++) {                                                                   \
                uint32_t value = queries[q][w];                                                                        \
                UNROLL for (int t = 0; t < TILE / LANES; t++) s[q][t] = STEP(s[q][t], k[t], value);                    \
            }                                                                                                          \
        }                                                                                                              \
        UNROLL for (int q = 0; q < count; q++)                                                                         \
            UNROLL for (int t = 0; t < TILE / LANES; t++) store_f32(out + q * TILE + t * LANES, s[q][t]);              \
    }
static inline vf multiply_add(vf sum, vu words, uint32_t factor) {
    union { uint32_t u; float f; } c = {factor};
    return sum + as_float(words) * splat(c.f);
}
SCORES(scores_f32, multiply_add)
SCORES(scores_bf16, dot)

static void scores(const struct attention_args *a, const uint32_t *const *queries, int count, int64_t words,
                   const uint32_t *keys, float *out) {
    /* Written out, so that the compiler keeps the sums of each count in registers. */
#define COUNT(N)                                                                                                       \
    case N:                                                                                                            \
        if (a->dtype == F32) {                                                                                         \
            scores_f32(queries, N, words, keys, out);                                                                  \
        } else {                                                                                                       \
            scores_bf16(queries, N, words, keys, out);                                                                 \
        }                                                                                                              \
        break;
    switch (count) { COUNT(1) COUNT(2) COUNT(3) COUNT(4) }
#undef COUNT
}

/* mixed[q] += sum over words first .. last - 1 of weight * value, one chain per element in the order of words: `count` vectors,
 * WIDTH vectors of 16 lanes of each at a time. */
#define MIX(NAME, STEP, WIDTH)                                                                                         \
    static inline __attribute__((always_inline)) void NAME(float *const *mixed, const uint32_t *const *weights,        \
                                                           int count, const uint32_t *values, int64_t head_dim,        \
                                                           int64_t d, int64_t first, int64_t last) {                   \
        vf s[QUERIES][WIDTH];                                                                                          \
        UNROLL for (int q = 0; q < count; q++)                                                                         \
            UNROLL for (int t = 0; t < WIDTH; t++) s[q][t] = load_f32(mixed[q] + d + t * LANES);                       \
        for (int64_t w = first; w < last; w++) {                                                                       \
            vu v[WIDTH];                                                                                               \
            UNROLL for (int t = 0; t < WIDTH; t++) v[t] = *(const vu *)(values + w * head_dim + d + t * LANES);        \
            UNROLL for (int q = 0; q < count; q++) {                                                                   \
                uint32_t weight = weights[q][w];                                                                       \
                UNROLL for (int t = 0; t < WIDTH; t++) s[q][t] = STEP(s[q][t], v[t], weight);                          \
            }                                                                                                          \
        }                                                                                                              \
        UNROLL for (int q = 0; q < count; q++)                                                                         \
            UNROLL for (int t = 0; t < WIDTH; t++) store_f32(mixed[q] + d + t * LANES, s[q][t]);                       \
    }
#define MIXES(TYPE, STEP)                                                                                              \
    MIX(mix_##TYPE##_4, STEP, 4)                                                                                       \
    MIX(mix_##TYPE##_2, STEP, 2)                                                                                       \
    MIX(mix_##TYPE##_1, STEP, 1)                                                                                       \
    static inline __attribute__((always_inline)) void mix_##TYPE(                                                      \
        float *const *mixed, const uint32_t *const *weights, int count, const uint32_t *values, int64_t head_dim,      \
        int64_t first, int64_t last) {                                                                                 \
        int64_t d = 0;                                                                                                 \
        for (; d + 4 * LANES <= head_dim; d += 4 * LANES)                                                              \
            mix_##TYPE##_4(mixed, weights, count, values, head_dim, d, first, last);                                   \
        for (; d + 2 * LANES <= head_dim; d += 2 * LANES)                                                              \
            mix_##TYPE##_2(mixed, weights, count, values, head_dim, d, first, last);                                   \
        for (; d + LANES <= head_dim; d += LANES)                                                                      \
            mix_##TYPE##_1(mixed, weights, count, values, head_dim, d, first, last);                                   \
        for (; d < head_dim; d++)                                                                                      \
            for (int q = 0; q < count; q++) {                                                                          \
                vf s = splat(mixed[q][d]);                                                                             \
                for (int64_t w = first; w < last; w++)                                                                 \
                    s = STEP(s, values[w * head_dim + d] - (vu){}, weights[q][w]);                                     \
                mixed[q][d] = s[0];                                                                                    \
            }                                                                                                          \
    }
MIXES(f32, multiply_add)
MIXES(bf16, dot)

static void mix(const struct attention_args *a, float *const *mixed, const uint32_t *const *weights, int count,
                const uint32_t *values, int64_t first, int64_t last) {
    if (first >= last) return;
#define COUNT(N)                                                                                                       \
    case N:                                                                                                            \
        if (a->dtype == F32) mix_f32(mixed, weights, N, values, a->head_dim, first, last);                             \
        else mix_bf16(mixed, weights, N, values, a->head_dim, first, last);                                            \
        break;
    switch (count) { COUNT(1) COUNT(2) COUNT(3) COUNT(4) }
#undef COUNT
}

/* The word in which only one of two keys is seen: the other's value may be anything, even NaN, and must not count. */
static void mix_half(const struct attention_args *a, float *mixed, const uint32_t *weights, const uint32_t *values,
                     int64_t word, uint32_t seen) {
    uint32_t masked[MAX_HEAD_DIM];
    for (int64_t d = 0; d < a->head_dim; d++) masked[d] = values[word * a->head_dim + d] & seen;
    const uint32_t *weight = weights + word;
    mix(a, &mixed, &weight, 1, masked, 0, 1);
}

/* Values of keys first[q] .. last[q] - 1 of the tile for each of `count` vectors: one by one where they see different keys. */
static void mix_seen(const struct attention_args *a, float *const *mixed, const uint32_t *const *weights, int count,
                     const uint32_t *values, const int64_t *first, const int64_t *last) {
    int64_t keys = a->dtype == F32 ? 1 : 2, begin = 0, end = TILE;
    for (int q = 0; q < count; q++) {
        if (begin < (first[q] + keys - 1) / keys) begin = (first[q] + keys - 1) / keys;
        if (end > last[q] / keys) end = last[q] / keys;
    }
    if (end < begin) end = begin;
    for (int q = 0; q < count; q++) {
        if (first[q] >= last[q]) continue;
        int64_t whole = (first[q] + keys - 1) / keys, whole_end = last[q] / keys;
        if (first[q] % keys) mix_half(a, mixed[q], weights[q], values, first[q] / keys, 0xFFFF0000u);
        mix(a, mixed + q, weights + q, 1, values, whole, begin < whole_end ? begin : whole_end);
    }
    mix(a, mixed, weights, count, values, begin, end);
    for (int q = 0; q < count; q++) {
        if (first[q] >= last[q]) continue;
        int64_t whole = (first[q] + keys - 1) / keys, whole_end = last[q] / keys;
        mix(a, mixed + q, weights + q, 1, values, end > whole ? end : whole, whole_end);
        if (last[q] % keys) mix_half(a, mixed[q], weights[q], values, last[q] / keys, 0x0000FFFFu);
    }
}

/* 2^x in float32 to about 1 unit in the last place, for x < 100; 0 for -inf, NaN for NaN. */
static inline vf exp2_vf(vf x) {
#ifdef METRALE_AVX512
    x = (vf)_mm512_max_ps(_mm512_set1_ps(-150.0f), (__m512)x); /* the second operand is what it returns for NaN */
    vf n = (vf)_mm512_roundscale_ps((__m512)x, 0);
#else
    vu nan = (vu)(x != x), under = (vu)(x < splat(-126.0f)), given = as_bits(x);
    x = max_vf(x, splat(-126.0f));
    vf shifted = x + 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    vf n = shifted - 12582912.0f;
#endif
    vf r = x - n, p = splat(1.5353361959569156e-4f);
    p = p * r + 1.3398875016719103e-3f;
    p = p * r + 9.61843691766262e-3f;
    p = p * r + 5.5503323674201965e-2f;
    p = p * r + 2.4022647738456726e-1f;
    p = p * r + 6.931471824645996e-1f;
    p = p * r + 1.0f;
#ifdef METRALE_AVX512
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    vu result = (as_bits(p) + (as_bits(shifted) << 23)) & ~under;
    return as_float((nan & given) | (~nan & result));
#endif
}

static inline int exceeds(vf x, float limit) {
#ifdef METRALE_AVX512
    return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(limit), _CMP_NLE_UQ) != 0;
#else
    return !(max_lanes(x) <= limit);
#endif
}

/* Two vectors of weights as words of two. */
static inline vu narrow_words(vf low, vf high) {
#ifdef METRALE_AVX512_BF16
    return (vu)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
#else
    union { vh halves[2]; vu words; } c = {{narrow_bf16(low), narrow_bf16(high)}};
    return c.words;
#endif
}

static inline int64_t first_seen(const struct attention_args *a, int64_t position) {
    return a->window > 0 && position >= a->window ? position - a->window + 1 : 0;
}

/* Turn a vector's products with one tile into weights and take them into its softmax. Keys outside [first, last) are not seen. */
static ONE_COPY void take_scores(struct partial *p, float *s, uint32_t *weights, int64_t first, int64_t last, float scale,
                                 int64_t dtype, int64_t head_dim) {
    if (first > 0 || last < TILE) {
        for (int64_t j = 0; j < first; j++) s[j] = -INFINITY;
        for (int64_t j = last; j < TILE; j++) s[j] = -INFINITY;
    }
    vf x[TILE / LANES], total = load_f32(p->lanes);
    UNROLL for (int t = 0; t < TILE / LANES; t++) x[t] = load_f32(s + t * LANES);
    vf highest = max_vf(max_vf(x[0], x[1]), max_vf(x[2], x[3])) * scale;
    if (exceeds(highest, p->maximum + SLACK)) {
        float maximum = max_lanes(highest);
        vf factor = exp2_vf(splat(p->maximum - maximum)); /* 0 the first time: 2^-inf */
        total = total * factor;
        int64_t d = 0;
        for (; d + LANES <= head_dim; d += LANES) store_f32(p->mixed + d, load_f32(p->mixed + d) * factor);
        for (; d < head_dim; d++) p->mixed[d] *= factor[0];
        p->maximum = maximum;
    }
    vf maximum = splat(p->maximum);
    UNROLL for (int t = 0; t < TILE / LANES; t++) x[t] = exp2_vf(x[t] * scale - maximum);
    if (dtype == F32) {
        UNROLL for (int t = 0; t < TILE / LANES; t++) {
            store_f32((float *)weights + t * LANES, x[t]);
            total = total + x[t];
        }
    } else {
        UNROLL for (int t = 0; t < TILE / LANES; t += 2) {
            vu words = narrow_words(x[t], x[t + 1]);
            *(vu *)(weights + t / 2 * LANES) = words;
            total = dot(total, words, 0x3F803F80u); /* 1 and 1 */
        }
    }
    store_f32(p->lanes, total);
}

/* Softmax partials of every (row, head of the group) of a piece over one partition: out[row * groups + head]. */
static ONE_COPY void attend_partition(const struct attention_args *a, const struct piece *p, int64_t partition,
                                      struct partial **out) {
    int64_t groups = groups_of(a), vectors = p->rows * groups, head_dim = a->head_dim;
    int64_t words = a->dtype == F32 ? head_dim : head_dim / 2;
    float scale = (float)(a->scale * LOG2E);
    const int64_t *positions = a->positions + p->row;
    int64_t start = partition * PARTITION, end = positions[p->rows - 1] + 1;
    if (end > start + PARTITION) end = start + PARTITION;
    int64_t seen_from = first_seen(a, positions[0]);
    if (start < seen_from) start = seen_from / TILE * TILE;

    const char *keys[TILE], *values[TILE];
    static const uint32_t zeros[MAX_HEAD_DIM];
    uint32_t *key_tile = thread_scratch(0, words * TILE * sizeof *key_tile);
    uint32_t *value_tile = thread_scratch(1, words * TILE * sizeof *value_tile);
    float score_tile[QUERIES * TILE];
    uint32_t weight_tile[QUERIES][TILE];

    struct vector *all = thread_scratch(2, vectors * sizeof *all);
    for (int64_t v = 0; v < vectors; v++) {
        int64_t row = v / groups, place = (p->row + row) * a->query_stride + (p->head * groups + v % groups) * head_dim;
        all[v].query = (const uint32_t *)((const char *)a->query + place * (a->dtype == F32 ? 4 : 2));
        all[v].from = first_seen(a, positions[row]);
        all[v].to = positions[row] + 1;
        out[v]->maximum = -INFINITY;
        memset(out[v]->lanes, 0, (LANES + head_dim) * sizeof(float));
    }
    for (; start < end; start += TILE) {
        find_rows(a, p->sequence, p->head, start, a->context_lengths[p->sequence], zeros, keys, values);
        transpose_tile(keys, words, key_tile);
        gather_values(a, values, value_tile);
        for (int64_t v = 0; v < vectors; v += QUERIES) {
            const uint32_t *queries[QUERIES], *weights[QUERIES];
            float *mixed[QUERIES];
            int64_t first[QUERIES], last[QUERIES];
            int count = vectors - v < QUERIES ? (int)(vectors - v) : QUERIES, any = 0, whole = 1;
            for (int q = 0; q < count; q++) {
                queries[q] = all[v + q].query;
                mixed[q] = out[v + q]->mixed;
                weights[q] = weight_tile[q];
                first[q] = all[v + q].from > start ? all[v + q].from - start : 0;
                last[q] = all[v + q].to < start + TILE ? all[v + q].to - start : TILE;
                any |= first[q] < last[q];
                whole &= first[q] == 0 && last[q] == TILE;
            }
            if (!any) continue;
            scores(a, queries, count, words, key_tile, score_tile);
            for (int q = 0; q < count; q++)
                if (first[q] < last[q])
                    take_scores(out[v + q], score_tile + q * TILE, weight_tile[q], first[q], last[q], scale, a->dtype,
                                head_dim);
            if (whole) mix(a, mixed, weights, count, value_tile, 0, a->dtype == F32 ? TILE : TILE / 2);
            else mix_seen(a, mixed, weights, count, value_tile, first, last);
        }
    }
    for (int64_t v = 0; v < vectors; v++) out[v]->total = sum_lanes(load_f32(out[v]->lanes));
}

/* Take the next partition's partial into the running one. */
static ONE_COPY void merge(struct partial *into, const struct partial *next, int64_t head_dim) {
    if (next->total == 0) return; /* it saw no key (a window that begins later) */
    float maximum = into->maximum > next->maximum ? into->maximum : next->maximum;
    vf old = exp2_vf(splat(into->maximum - maximum)), new = exp2_vf(splat(next->maximum - maximum));
    into->total = into->total * old[0] + next->total * new[0];
    int64_t d = 0;
    for (; d + LANES <= head_dim; d += LANES)
        store_f32(into->mixed + d, load_f32(into->mixed + d) * old + load_f32(next->mixed + d) * new);
    for (; d < head_dim; d++) into->mixed[d] = into->mixed[d] * old[0] + next->mixed[d] * new[0];
    into->maximum = maximum;
}

static ONE_COPY void write_out(const struct attention_args *a, int64_t row, int64_t head, const struct partial *p) {
    int64_t place = (row * a->query_heads + head) * a->head_dim, d = 0;
    for (; d + LANES <= a->head_dim; d += LANES) {
        vf value = load_f32(p->mixed + d) / splat(p->total);
        if (a->dtype == F32) store_f32((float *)a->out + place + d, value);
        else store_bf16((bf16 *)a->out + place + d, value);
    }
    for (; d < a->head_dim; d++) {
        float value = p->mixed[d] / p->total;
        if (a->dtype == F32) ((float *)a->out)[place + d] = value;
        else ((bf16 *)a->out)[place + d] = float_to_bf16(value);
    }
}

static inline int64_t partitions_up_to(int64_t position) { return position / PARTITION + 1; }
static inline int64_t first_partition(const struct attention_args *a, int64_t position) {
    return first_seen(a, position) / PARTITION;
}

static void run_piece(void *context, int64_t task) {
    const struct work *w = context;
    const struct attention_args *a = w->a;
    const struct piece *p = &w->pieces[task];
    int64_t groups = groups_of(a), vectors = p->rows * groups;
    struct partial *next[ROWS * MAX_GROUPS], *running[ROWS * MAX_GROUPS];

    if (p->partition >= 0) {
        for (int64_t v = 0; v < vectors; v++) next[v] = partial_at(w, p->partials + v);
        attend_partition(a, p, p->partition, next);
        return;
    }
    char *memory = thread_scratch(3, 2 * vectors * w->partial_bytes);
    for (int64_t v = 0; v < vectors; v++) {
        running[v] = (struct partial *)(memory + v * w->partial_bytes);
        next[v] = (struct partial *)(memory + (vectors + v) * w->partial_bytes);
    }
    int64_t begin = first_partition(a, a->positions[p->row]);
    int64_t end = partitions_up_to(a->positions[p->row + p->rows - 1]);
    attend_partition(a, p, begin, running);
    for (int64_t partition = begin + 1; partition < end; partition++) {
        attend_partition(a, p, partition, next);
        for (int64_t v = 0; v < vectors; v++) {
            /* A row's first partition is taken as it is, which is what merging it into nothing would give. */
            if (running[v]->total == 0) {
                struct partial *swap = running[v];
                running[v] = next[v];
                next[v] = swap;
            } else {
                merge(running[v], next[v], a->head_dim);
            }
        }
    }
    for (int64_t v = 0; v < vectors; v++)
        write_out(a, p->row + v / groups, p->head * groups + v % groups, running[v]);
}

/* Merge the partitions of a piece that threads have shared; the first of them stands for all. */
static void merge_piece(void *context, int64_t task) {
    const struct work *w = context;
    const struct attention_args *a = w->a;
    const struct piece *p = &w->pieces[task];
    int64_t groups = groups_of(a), vectors = p->rows * groups;
    int64_t begin = first_partition(a, a->positions[p->row]), end = partitions_up_to(a->positions[p->row + p->rows - 1]);
    if (p->partition != begin) return;
    for (int64_t v = 0; v < vectors; v++) {
        struct partial *running = partial_at(w, p->partials + v);
        for (int64_t n = 1; n < end - begin; n++) {
            struct partial *next = partial_at(w, p->partials + n * vectors + v);
            if (running->total == 0) running = next;
            else merge(running, next, a->head_dim);
        }
        write_out(a, p->row + v / groups, p->head * groups + v % groups, running);
    }
}

/* Cut the batch into pieces; returns their number, and with `list` NULL only counts. Pieces whose partitions are shared come first,
 * `shared` of them. */
static int64_t cut(const struct attention_args *a, int shares, struct piece *list, int64_t *shared, int64_t *partials) {
    int64_t n = 0;
    *shared = *partials = 0;
    for (int share = shares; share >= 0; share--) {
        for (int64_t s = 0; s < a->sequences; s++) {
            int64_t row = a->query_starts[s], end = a->query_starts[s + 1];
            /* The last rows see most keys: largest pieces first. */
            for (int64_t group = (end - row + ROWS - 1) / ROWS - 1; group >= 0; group--) {
                int64_t first = row + group * ROWS, rows = end - first < ROWS ? end - first : ROWS;
                int64_t from = first_partition(a, a->positions[first]), to = partitions_up_to(a->positions[first + rows - 1]);
                if (share != (shares && to - from > 1)) continue;
                for (int64_t head = 0; head < a->key_heads; head++)
                    for (int64_t partition = share ? from : -1; partition < (share ? to : 0); partition++) {
                        if (list) list[n] = (struct piece){(int32_t)s, (int32_t)rows, first, head, partition, *partials};
                        n++;
                        if (share) *partials += rows * groups_of(a);
                    }
            }
        }
        if (share) *shared = n;
    }
    return n;
}

void op_attention(const struct attention_args *a) {
    int64_t shared, partials, n = cut(a, 0, NULL, &shared, &partials);
    struct work w = {a, NULL, NULL, 0};
    w.partial_bytes = (sizeof(struct partial) + a->head_dim * sizeof(float) + 63) / 64 * 64;
    int shares = n < PIECES_PER_THREAD * pool_threads();
    if (shares) n = cut(a, 1, NULL, &shared, &partials);
    if (partials * w.partial_bytes > PARTIALS_BYTES) n = cut(a, shares = 0, NULL, &shared, &partials);
    struct piece *pieces = thread_scratch(4, (n + 1) * sizeof *pieces);
    cut(a, shares, pieces, &shared, &partials);
    w.pieces = pieces;
    w.partials = thread_scratch(5, partials * w.partial_bytes + 64);
    pool_run(run_piece, &w, n);
    pool_run(merge_piece, &w, shared);
}
