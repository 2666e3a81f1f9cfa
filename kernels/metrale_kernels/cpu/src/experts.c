/* Mixture of experts: routing, and the chosen experts' feed-forward blocks.
 *
 * Rows are sorted by expert, so that an expert's weights are read once for all of its rows; a row's products are those of the
 * linear layer and do not depend on the company it has there. Its experts are added in the order of their ids. */
#include "linear.h"

#define SEGMENT_ROWS 128
#define GROUP_ROWS 8
#define GATHER_PAIRS 64
#define SUM_ROWS 16
/* Rows are taken in batches that need no more memory than this. */
#define BATCH_BYTES (256 << 20)

struct route_args {
    const float *logits; /* [rows, experts], rows stride apart */
    int64_t *ids;        /* [rows, top_k] */
    float *weights;      /* [rows, top_k] */
    int64_t rows, experts, top_k, stride, normalise;
};

static void route_row(const struct route_args *a, int64_t row) {
    int64_t padded = (a->experts + LANES - 1) / LANES * LANES;
    float *p = thread_scratch(6, padded * sizeof(float));
    for (int64_t e = a->experts; e < padded; e++) p[e] = -INFINITY;
    memcpy(p, a->logits + row * a->stride, a->experts * sizeof(float));
    vf largest = load_f32(p), sum = {};
    for (int64_t e = LANES; e < padded; e += LANES) largest = max_vf(largest, load_f32(p + e));
    float maximum = max_lanes(largest);
    for (int64_t e = 0; e < padded; e += LANES) {
        vf x = exp_vf(load_f32(p + e) - maximum);
        store_f32(p + e, x);
        sum = sum + x;
    }
    float total = sum_lanes(sum);
    for (int64_t e = 0; e < padded; e += LANES) store_f32(p + e, load_f32(p + e) / total);

    /* The largest so far, in order; an equal one that comes later stays behind. NaN is never larger, so ids are always valid. */
    int64_t *ids = a->ids + row * a->top_k;
    int64_t found = 0;
    for (int64_t e = 0; e < a->experts; e++) {
        int64_t place = found;
        while (place > 0 && p[e] > p[ids[place - 1]]) place--;
        if (place == a->top_k) continue;
        if (found < a->top_k) found++;
        memmove(ids + place + 1, ids + place, (found - 1 - place) * sizeof *ids);
        ids[place] = e;
    }
    for (int64_t i = 1; i < found; i++)
        for (int64_t j = i; j > 0 && ids[j] < ids[j - 1]; j--) {
            int64_t swapped = ids[j];
            ids[j] = ids[j - 1];
            ids[j - 1] = swapped;
        }
    float *weights = a->weights + row * a->top_k, chosen = 0;
    for (int64_t i = 0; i < a->top_k; i++) chosen += weights[i] = p[ids[i]];
    if (a->normalise)
        for (int64_t i = 0; i < a->top_k; i++) weights[i] /= chosen;
}

static void route_rows(void *context, int64_t task) {
    const struct route_args *a = context;
    int64_t end = (task + 1) * SUM_ROWS < a->rows ? (task + 1) * SUM_ROWS : a->rows;
    for (int64_t row = task * SUM_ROWS; row < end; row++) route_row(a, row);
}

void op_route_experts(const struct route_args *a) {
    pool_run(route_rows, (void *)a, (a->rows + SUM_ROWS - 1) / SUM_ROWS);
}

struct expert_args {
    const void *x;                   /* [rows, width], rows x_stride apart */
    const int64_t *ids;              /* [rows, top_k], ascending in a row */
    const float *weights;            /* [rows, top_k] */
    const void *gates, *ups, *downs; /* packed as linear layers, every expert from a tile of its own */
    void *out;                       /* [rows, width] */
    int64_t rows, width, inner, experts, top_k, x_stride, dtype;
};

/* Some rows of one expert: pairs begin .. end - 1 in the order by expert. */
struct segment {
    int64_t expert, begin, end;
};

struct batch {
    const struct expert_args *a;
    int64_t first_row, rows, pairs, segments, item;
    int64_t inner_tiles, width_tiles;
    int64_t *places;  /* [rows * top_k]: where a row's pair lies in the order by expert */
    int64_t *sources; /* [pairs]: the row of each pair */
    struct segment *list;
    char *gathered, *hidden; /* [pairs, width] and [pairs, inner] */
    float *results;          /* [pairs, width] */
};

/* Sort the batch's pairs of row and expert by expert. */
static void sort_pairs(struct batch *b, int64_t *counts) {
    const struct expert_args *a = b->a;
    const int64_t *ids = a->ids + b->first_row * a->top_k;
    memset(counts, 0, (a->experts + 1) * sizeof *counts);
    for (int64_t i = 0; i < b->pairs; i++) counts[ids[i] + 1]++;
    b->segments = 0;
    for (int64_t e = 0; e < a->experts; e++) {
        int64_t end = counts[e] + counts[e + 1];
        for (int64_t begin = counts[e]; begin < end; begin += SEGMENT_ROWS)
            b->list[b->segments++] = (struct segment){e, begin, begin + SEGMENT_ROWS < end ? begin + SEGMENT_ROWS : end};
        counts[e + 1] = end;
    }
    for (int64_t i = 0; i < b->pairs; i++) {
        int64_t place = counts[ids[i]]++;
        b->places[i] = place;
        b->sources[place] = b->first_row + i / a->top_k;
    }
}

static void gather(void *context, int64_t task) {
    const struct batch *b = context;
    int64_t end = (task + 1) * GATHER_PAIRS < b->pairs ? (task + 1) * GATHER_PAIRS : b->pairs;
    size_t bytes = b->a->width * b->item;
    for (int64_t i = task * GATHER_PAIRS; i < end; i++)
        memcpy(b->gathered + i * bytes, (const char *)b->a->x + b->sources[i] * b->a->x_stride * b->item, bytes);
}

static inline vf load(const void *p, int64_t dtype) { return dtype == F32 ? load_f32(p) : load_bf16(p); }
static inline void store(void *p, int64_t dtype, vf x) {
    if (dtype == F32) store_f32(p, x);
    else store_bf16(p, x);
}

/* hidden = silu(gate) * up of one tile of one segment. */
static void gate_up(void *context, int64_t task) {
    const struct batch *b = context;
    const struct expert_args *a = b->a;
    const struct segment *s = b->list + task / b->inner_tiles;
    int64_t tile = task % b->inner_tiles, tile_bytes = TILE * a->width * b->item;
    int64_t offset = (s->expert * b->inner_tiles + tile) * tile_bytes;
    int64_t columns = a->inner - tile * TILE < TILE ? a->inner - tile * TILE : TILE;
    float gate[GROUP_ROWS * TILE], up[GROUP_ROWS * TILE], activated[TILE];
    for (int64_t row = s->begin; row < s->end; row += GROUP_ROWS) {
        int64_t count = s->end - row < GROUP_ROWS ? s->end - row : GROUP_ROWS;
        struct linear_args linear = {b->gathered + row * a->width * b->item, (const char *)a->gates + offset, NULL, gate,
                                     count, a->width, TILE, a->width, a->dtype, a->dtype};
        linear_tile(&linear, 0, 0, 0, count);
        linear.packed = (const char *)a->ups + offset;
        linear.out = up;
        linear_tile(&linear, 0, 0, 0, count);
        for (int64_t r = 0; r < count; r++) {
            for (int64_t i = 0; i < TILE; i += LANES) {
                int64_t at = (r * TILE + i) * b->item;
                vf g = load((char *)gate + at, a->dtype), u = load((char *)up + at, a->dtype);
                store((char *)activated + i * b->item, a->dtype, g / (1.0f + exp_vf(-g)) * u);
            }
            memcpy(b->hidden + ((row + r) * a->inner + tile * TILE) * b->item, activated, columns * b->item);
        }
    }
}

static void down(void *context, int64_t task) {
    const struct batch *b = context;
    const struct expert_args *a = b->a;
    const struct segment *s = b->list + task / b->width_tiles;
    struct linear_args linear = {b->hidden,
                                 (const char *)a->downs + s->expert * b->width_tiles * TILE * a->inner * b->item,
                                 NULL, b->results, b->pairs, a->inner, a->width, a->inner, a->dtype, F32};
    int64_t tile = task % b->width_tiles;
    linear_tile(&linear, tile, tile, s->begin, s->end);
}

static void add_up(void *context, int64_t task) {
    const struct batch *b = context;
    const struct expert_args *a = b->a;
    int64_t end = (task + 1) * SUM_ROWS < b->rows ? (task + 1) * SUM_ROWS : b->rows;
    for (int64_t row = task * SUM_ROWS; row < end; row++) {
        const int64_t *places = b->places + row * a->top_k;
        const float *weights = a->weights + (b->first_row + row) * a->top_k;
        char *out = (char *)a->out + (b->first_row + row) * a->width * b->item;
        for (int64_t i = 0; i < a->width; i += LANES) {
            int64_t columns = a->width - i < LANES ? a->width - i : LANES;
            vf total = {};
            for (int64_t k = 0; k < a->top_k; k++) {
                vf x = {};
                memcpy(&x, b->results + places[k] * a->width + i, columns * sizeof(float));
                total = total + x * weights[k];
            }
            if (columns == LANES) {
                store(out + i * b->item, a->dtype, total);
            } else {
                float whole[LANES];
                store(whole, a->dtype, total);
                memcpy(out + i * b->item, whole, columns * b->item);
            }
        }
    }
}

static void *take(char **memory, size_t bytes) {
    void *taken = *memory;
    *memory += (bytes + 63) / 64 * 64;
    return taken;
}

void op_apply_experts(const struct expert_args *a) {
    int64_t item = a->dtype == F32 ? 4 : 2;
    int64_t pair_bytes = a->width * item + a->inner * item + a->width * sizeof(float) + 2 * sizeof(int64_t);
    int64_t batch_rows = BATCH_BYTES / (pair_bytes * a->top_k);
    if (batch_rows < SEGMENT_ROWS) batch_rows = SEGMENT_ROWS;
    if (batch_rows > a->rows) batch_rows = a->rows;
    int64_t pairs = batch_rows * a->top_k, segments = pairs / SEGMENT_ROWS + (pairs < a->experts ? pairs : a->experts);
    char *memory = thread_scratch(7, pairs * pair_bytes + segments * sizeof(struct segment) +
                                         (a->experts + 1) * sizeof(int64_t) + 7 * 64);
    struct batch b = {.a = a, .item = item};
    b.inner_tiles = (a->inner + TILE - 1) / TILE;
    b.width_tiles = (a->width + TILE - 1) / TILE;
    b.places = take(&memory, pairs * sizeof(int64_t));
    b.sources = take(&memory, pairs * sizeof(int64_t));
    b.list = take(&memory, segments * sizeof(struct segment));
    b.gathered = take(&memory, pairs * a->width * item);
    b.hidden = take(&memory, pairs * a->inner * item);
    b.results = take(&memory, pairs * a->width * sizeof(float));
    int64_t *counts = take(&memory, (a->experts + 1) * sizeof(int64_t));
    for (b.first_row = 0; b.first_row < a->rows; b.first_row += batch_rows) {
        b.rows = a->rows - b.first_row < batch_rows ? a->rows - b.first_row : batch_rows;
        b.pairs = b.rows * a->top_k;
        sort_pairs(&b, counts);
        pool_run(gather, &b, (b.pairs + GATHER_PAIRS - 1) / GATHER_PAIRS);
        pool_run(gate_up, &b, b.segments * b.inner_tiles);
        pool_run(down, &b, b.segments * b.width_tiles);
        pool_run(add_up, &b, (b.rows + SUM_ROWS - 1) / SUM_ROWS);
    }
}
