/* Causal attention over a paged cache, exact in order: a row's result is a function of its query and of the keys and values at
 * the positions it sees, taken in the order of position, and of nothing else.
 *
 * Keys are cut by absolute position into partitions of PARTITION keys and those into tiles of TILE. Within a partition the
 * softmax is computed online over its tiles (Milakov & Gimelshein 2018); partitions are then merged in order. That is so
 * for every row, whether it comes alone (decode: partitions can be computed by different threads) or with others (prefill:
 * one task computes all partitions for up to ROWS rows and the query heads of one KV head). */
#include "common.h"

#define TILE 64
#define PARTITION 1024
#define ROWS 16
#define QUERIES 4 /* vectors computed together */
#define MAX_HEAD_DIM 512

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

/* One piece of work: rows [row, row + rows) of one sequence and one KV head; for single rows one partition of it. */
struct piece {
    int32_t sequence, rows;
    int64_t row, head, partition, partials; /* partition: -1 for all of them */
};

/* A softmax in progress over some keys: maximum, sum of weights, weighted sum of values. */
struct partial {
    float maximum, total;
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

static void widen_values(const struct attention_args *a, const char *const *rows, float *out) {
    for (int64_t j = 0; j < TILE; j++) {
        if (a->dtype == F32) {
            memcpy(out + j * a->head_dim, rows[j], a->head_dim * 4);
            continue;
        }
        const bf16 *row = (const bf16 *)rows[j];
        int64_t d = 0;
        for (; d + LANES <= a->head_dim; d += LANES) store_f32(out + j * a->head_dim + d, load_bf16(row + d));
        for (; d < a->head_dim; d++) out[j * a->head_dim + d] = bf16_to_float(row[d]);
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

/* Scores of `count` <= QUERIES query vectors with a transposed tile of keys: [count][TILE]. */
#define SCORES(NAME, STEP)                                                                                             \
    static inline __attribute__((always_inline)) void NAME(const uint32_t *const *queries, int count, int64_t words,   \
                                                           const uint32_t *keys, float scale, float *out) {            \
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
            UNROLL for (int t = 0; t < TILE / LANES; t++) store_f32(out + q * TILE + t * LANES, s[q][t] * scale);      \
    }
static inline vf multiply_add(vf sum, vu keys, uint32_t query) {
    union { uint32_t u; float f; } c = {query};
    return sum + as_float(keys) * splat(c.f);
}
SCORES(scores_f32, multiply_add)
SCORES(scores_bf16, dot)

static void scores(const struct attention_args *a, const uint32_t *const *queries, int count, int64_t words,
                   const uint32_t *keys, float *out) {
    float scale = (float)a->scale;
    /* Written out, so that the compiler keeps the sums of each count in registers. */
#define COUNT(N)                                                                                                       \
    case N:                                                                                                            \
        if (a->dtype == F32) {                                                                                         \
            scores_f32(queries, N, words, keys, scale, out);                                                           \
        } else {                                                                                                       \
            scores_bf16(queries, N, words, keys, scale, out);                                                          \
        }                                                                                                              \
        break;
    switch (count) { COUNT(1) COUNT(2) COUNT(3) COUNT(4) }
#undef COUNT
}

/* mixed += sum over keys first .. last - 1 of weight * value, one chain per element in the order of keys; `count` vectors. */
static inline __attribute__((always_inline)) void mix(float *const *mixed, const float *const *weights, int count,
                                                      const float *values, int64_t head_dim, int64_t first, int64_t last) {
    int64_t d = 0;
    for (; d + 4 * LANES <= head_dim; d += 4 * LANES) {
        vf s[QUERIES][4];
        UNROLL for (int q = 0; q < count; q++)
            UNROLL for (int t = 0; t < 4; t++) s[q][t] = load_f32(mixed[q] + d + t * LANES);
        for (int64_t j = first; j < last; j++) {
            vf v[4];
            UNROLL for (int t = 0; t < 4; t++) v[t] = load_f32(values + j * head_dim + d + t * LANES);
            UNROLL for (int q = 0; q < count; q++) {
                vf weight = splat(weights[q][j]);
                UNROLL for (int t = 0; t < 4; t++) s[q][t] = s[q][t] + weight * v[t];
            }
        }
        UNROLL for (int q = 0; q < count; q++)
            UNROLL for (int t = 0; t < 4; t++) store_f32(mixed[q] + d + t * LANES, s[q][t]);
    }
    for (; d + LANES <= head_dim; d += LANES)
        for (int q = 0; q < count; q++) {
            vf s = load_f32(mixed[q] + d);
            for (int64_t j = first; j < last; j++)
                s = s + splat(weights[q][j]) * load_f32(values + j * head_dim + d);
            store_f32(mixed[q] + d, s);
        }
    for (; d < head_dim; d++)
        for (int q = 0; q < count; q++) {
            /* In a lane, so that the compiler fuses multiply and add here exactly where it does above. */
            vf s = splat(mixed[q][d]);
            for (int64_t j = first; j < last; j++) s = s + splat(weights[q][j]) * splat(values[j * head_dim + d]);
            mixed[q][d] = s[0];
        }
}

/* The same for vectors that see the same keys of the tile. */
static void mix_alike(float *const *mixed, const float *const *weights, int count, const float *values,
                      int64_t head_dim, int64_t first, int64_t last) {
    switch (count) {
    case 1: mix(mixed, weights, 1, values, head_dim, first, last); break;
    case 2: mix(mixed, weights, 2, values, head_dim, first, last); break;
    case 3: mix(mixed, weights, 3, values, head_dim, first, last); break;
    case 4: mix(mixed, weights, 4, values, head_dim, first, last); break;
    }
}

/* Turn a vector's scores of one tile into weights and take them into its softmax. Keys outside [first, last) are not seen. */
static ONE_COPY void take_scores(struct partial *p, float *s, int64_t first, int64_t last, int64_t head_dim) {
    for (int64_t j = 0; j < first; j++) s[j] = -INFINITY;
    for (int64_t j = last; j < TILE; j++) s[j] = -INFINITY;
    vf highest = load_f32(s);
    for (int t = 1; t < TILE / LANES; t++) highest = max_vf(highest, load_f32(s + t * LANES));
    float maximum = max_lanes(highest);
    if (!(maximum <= p->maximum)) {
        vf factor = exp_vf(splat(p->maximum - maximum)); /* 0 the first time: exp(-inf) */
        p->total *= factor[0];
        int64_t d = 0;
        for (; d + LANES <= head_dim; d += LANES) store_f32(p->mixed + d, load_f32(p->mixed + d) * factor);
        for (; d < head_dim; d++) p->mixed[d] *= factor[0];
        p->maximum = maximum;
    }
    vf total = {};
    UNROLL for (int t = 0; t < TILE / LANES; t++) {
        vf weight = exp_vf(load_f32(s + t * LANES) - splat(p->maximum));
        store_f32(s + t * LANES, weight);
        total = total + weight;
    }
    p->total += sum_lanes(total);
}

static inline int64_t first_seen(const struct attention_args *a, int64_t position) {
    return a->window > 0 && position >= a->window ? position - a->window + 1 : 0;
}

/* Softmax partials of every (row, head of the group) of a piece over one partition: out[row * groups + head]. */
static ONE_COPY void attend_partition(const struct attention_args *a, const struct piece *p, int64_t partition,
                             struct partial **out) {
    int64_t groups = groups_of(a), vectors = p->rows * groups, head_dim = a->head_dim;
    int64_t words = a->dtype == F32 ? head_dim : head_dim / 2;
    const int64_t *positions = a->positions + p->row;
    int64_t start = partition * PARTITION, end = positions[p->rows - 1] + 1;
    if (end > start + PARTITION) end = start + PARTITION;
    int64_t seen_from = first_seen(a, positions[0]);
    if (start < seen_from) start = seen_from / TILE * TILE;

    const char *keys[TILE], *values[TILE];
    static const uint32_t zeros[MAX_HEAD_DIM];
    uint32_t *key_tile = thread_scratch(0, words * TILE * sizeof *key_tile);
    float *value_tile = thread_scratch(1, TILE * head_dim * sizeof *value_tile);
    float *score_tile = thread_scratch(2, vectors * TILE * sizeof *score_tile);

    for (int64_t v = 0; v < vectors; v++) {
        out[v]->maximum = -INFINITY;
        out[v]->total = 0;
        memset(out[v]->mixed, 0, head_dim * sizeof(float));
    }
    for (; start < end; start += TILE) {
        find_rows(a, p->sequence, p->head, start, a->context_lengths[p->sequence], zeros, keys, values);
        transpose_tile(keys, words, key_tile);
        widen_values(a, values, value_tile);
        for (int64_t v = 0; v < vectors; v += QUERIES) {
            const uint32_t *queries[QUERIES];
            float *mixed[QUERIES];
            const float *weights[QUERIES];
            int64_t first[QUERIES], last[QUERIES];
            int count = vectors - v < QUERIES ? (int)(vectors - v) : QUERIES, alike = 1, any = 0;
            for (int q = 0; q < count; q++) {
                int64_t row = (v + q) / groups, head = p->head * groups + (v + q) % groups;
                int64_t place = (p->row + row) * a->query_stride + head * head_dim;
                queries[q] = (const uint32_t *)((const char *)a->query + place * (a->dtype == F32 ? 4 : 2));
                mixed[q] = out[v + q]->mixed;
                weights[q] = score_tile + (v + q) * TILE;
                first[q] = first_seen(a, positions[row]) - start;
                if (first[q] < 0) first[q] = 0;
                last[q] = positions[row] + 1 - start;
                if (last[q] > TILE) last[q] = TILE;
                alike &= first[q] == first[0] && last[q] == last[0];
                any |= first[q] < last[q];
            }
            if (!any) continue;
            scores(a, queries, count, words, key_tile, score_tile + v * TILE);
            for (int q = 0; q < count; q++)
                if (first[q] < last[q])
                    take_scores(out[v + q], score_tile + (v + q) * TILE, first[q], last[q], head_dim);
            if (alike) {
                mix_alike(mixed, weights, count, value_tile, head_dim, first[0], last[0]);
            } else {
                for (int q = 0; q < count; q++)
                    if (first[q] < last[q])
                        mix_alike(mixed + q, weights + q, 1, value_tile, head_dim, first[q], last[q]);
            }
        }
    }
}

/* Take the next partition's partial into the running one. */
static ONE_COPY void merge(struct partial *into, const struct partial *next, int64_t head_dim) {
    if (next->total == 0) return; /* it saw no key (a window that begins later) */
    float maximum = into->maximum > next->maximum ? into->maximum : next->maximum;
    float old = exp_vf(splat(into->maximum - maximum))[0], new = exp_vf(splat(next->maximum - maximum))[0];
    into->total = into->total * old + next->total * new;
    for (int64_t d = 0; d < head_dim; d++) into->mixed[d] = into->mixed[d] * old + next->mixed[d] * new;
    into->maximum = maximum;
}

static ONE_COPY void write_out(const struct attention_args *a, int64_t row, int64_t head, const struct partial *p) {
    int64_t place = (row * a->query_heads + head) * a->head_dim;
    for (int64_t d = 0; d < a->head_dim; d++) {
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
    struct partial *next[ROWS * 64], *running[ROWS * 64];

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

/* Merge the partitions of rows that came alone. */
static void merge_piece(void *context, int64_t task) {
    const struct work *w = context;
    const struct attention_args *a = w->a;
    const struct piece *p = &w->pieces[task];
    int64_t groups = groups_of(a);
    int64_t begin = first_partition(a, a->positions[p->row]), end = partitions_up_to(a->positions[p->row]);
    if (p->partition != begin) return;
    for (int64_t g = 0; g < groups; g++) {
        struct partial *running = partial_at(w, p->partials + g);
        for (int64_t n = 1; n < end - begin; n++) {
            struct partial *next = partial_at(w, p->partials + n * groups + g);
            if (running->total == 0) running = next;
            else merge(running, next, a->head_dim);
        }
        write_out(a, p->row, p->head * groups + g, running);
    }
}

void op_attention(const struct attention_args *a) {
    int64_t groups = groups_of(a), count = 0, partials = 0;
    for (int64_t s = 0; s < a->sequences; s++) {
        int64_t rows = a->query_starts[s + 1] - a->query_starts[s];
        if (rows == 1) count += partitions_up_to(a->context_lengths[s] - 1);
        else count += (rows + ROWS - 1) / ROWS;
    }
    struct piece *pieces = thread_scratch(4, (count * a->key_heads + 1) * sizeof *pieces);
    int64_t n = 0, alone = 0;
    /* Single rows first: they are merged afterwards, and long prompts fill up the time of threads that are done. */
    for (int64_t s = 0; s < a->sequences; s++) {
        int64_t row = a->query_starts[s];
        if (a->query_starts[s + 1] - row != 1) continue;
        int64_t begin = first_partition(a, a->positions[row]), end = partitions_up_to(a->positions[row]);
        for (int64_t head = 0; head < a->key_heads; head++)
            for (int64_t partition = begin; partition < end; partition++, partials += groups)
                pieces[n++] = (struct piece){(int32_t)s, 1, row, head, partition, partials};
    }
    alone = n;
    for (int64_t s = 0; s < a->sequences; s++) {
        int64_t row = a->query_starts[s], end = a->query_starts[s + 1];
        if (end - row == 1) continue;
        /* The last rows see most keys: largest pieces first. */
        for (int64_t group = (end - row + ROWS - 1) / ROWS - 1; group >= 0; group--) {
            int64_t first = row + group * ROWS, rows = end - first < ROWS ? end - first : ROWS;
            for (int64_t head = 0; head < a->key_heads; head++)
                pieces[n++] = (struct piece){(int32_t)s, (int32_t)rows, first, head, -1, 0};
        }
    }
    struct work w = {a, pieces, NULL, 0};
    w.partial_bytes = (sizeof(struct partial) + a->head_dim * sizeof(float) + 63) / 64 * 64;
    w.partials = thread_scratch(5, partials * w.partial_bytes + 64);
    pool_run(run_piece, &w, n);
    pool_run(merge_piece, &w, alone);
}
