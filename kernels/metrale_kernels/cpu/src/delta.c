/* Gated delta net (Yang, Kautz, Hatamizadeh 2024): a short causal convolution, then a recurrence with a matrix state.
 *
 * Token by token in float32, in one order, however a sequence is cut into calls: the state at a position is a function of the
 * tokens before it. Rows are taken in batches: first everything that needs no state (convolution, norms, gates), by rows; then
 * the recurrence, a task for some columns of one head of one sequence. The old state is read and the new one written
 * elsewhere. */
#include "common.h"

#define BATCH_ROWS 256
#define BLOCK_ROWS 8
#define PARTS 4
#define MAX_VECTORS 4

struct delta_args {
    const void *mixed;      /* [rows, 2 * key_heads * key_dim + value_heads * value_dim]: q, k, v before the convolution */
    const void *beta, *decay; /* [rows, value_heads] logits of the write strength, and inputs of the decay */
    const float *conv;      /* [kernel, channels] */
    const float *rate;      /* [value_heads]: -exp(A_log) */
    const float *bias;      /* [value_heads]: dt_bias */
    void *conv_states;      /* [places, kernel - 1, channels], inputs of the last kernel - 1 tokens */
    float *states;          /* [places, value_heads, key_dim, value_dim] */
    void *out;              /* [rows, value_heads, value_dim] */
    const int64_t *reads, *writes, *positions;
    const int32_t *query_starts;
    int64_t sequences, key_heads, value_heads, key_dim, value_dim, kernel;
    int64_t mixed_stride, beta_stride, decay_stride, dtype;
};

static inline int64_t channels_of(const struct delta_args *a) {
    return 2 * a->key_heads * a->key_dim + a->value_heads * a->value_dim;
}

/* What the recurrence needs of a row, computed beforehand: queries and keys, normalised, and values [channels]; what is kept
 * of each head's state [value_heads]; how strongly it is written [value_heads]. */
struct work {
    const struct delta_args *a;
    int64_t channels, item, first_row, rows, row_floats, pieces, blocks;
    float *prepared;    /* [rows, row_floats] */
    int32_t *sequences; /* [rows] */
    struct piece *list;
};

/* Rows of one sequence in the batch. */
struct piece {
    int64_t sequence, begin, end;
};

static const char *kept_inputs(const struct work *w, int64_t sequence) {
    const struct delta_args *a = w->a;
    if (a->positions[a->query_starts[sequence]] == 0) return NULL;
    return (const char *)a->conv_states + a->reads[sequence] * (a->kernel - 1) * w->channels * w->item;
}

/* The inputs of the row `back` rows before `row`: of this call, kept from before, or NULL before the sequence's first. */
static const char *input_row(const struct work *w, int64_t sequence, const char *kept, int64_t row, int64_t back) {
    const struct delta_args *a = w->a;
    int64_t begin = a->query_starts[sequence];
    if (row - back >= begin) return (const char *)a->mixed + (row - back) * a->mixed_stride * w->item;
    if (!kept) return NULL;
    return kept + (row - back - begin + a->kernel - 1) * w->channels * w->item;
}

static inline vf load_some(const void *p, int64_t dtype, int64_t count) {
    if (count >= LANES) return dtype == F32 ? load_f32(p) : load_bf16(p);
    char whole[LANES * sizeof(float)] = {0};
    memcpy(whole, p, count * (dtype == F32 ? 4 : 2));
    return dtype == F32 ? load_f32((float *)whole) : load_bf16((bf16 *)whole);
}
static inline void store_some(void *p, int64_t dtype, int64_t count, vf x) {
    char whole[LANES * sizeof(float)];
    void *to = count >= LANES ? p : whole;
    if (dtype == F32) store_f32(to, x);
    else store_bf16(to, x);
    if (count < LANES) memcpy(p, whole, count * (dtype == F32 ? 4 : 2));
}

/* silu of the convolution for channels first .. first + count - 1 of one row. */
static inline void convolve_as(const struct work *w, const char *const *inputs, int64_t first, int64_t count, float *out,
                               const int64_t dtype) {
    const int64_t item = dtype == F32 ? 4 : 2, kernel = w->a->kernel;
    const float *weights = w->a->conv + first;
    int64_t c = 0;
    for (; c + MAX_VECTORS * LANES <= count; c += MAX_VECTORS * LANES) {
        vf x[MAX_VECTORS] = {};
        for (int64_t j = 0; j < kernel; j++) {
            if (!inputs[j]) continue;
            const char *input = inputs[j] + (first + c) * item;
            for (int v = 0; v < MAX_VECTORS; v++)
                x[v] = x[v] + load_some(input + v * LANES * item, dtype, LANES) *
                                  load_f32(weights + j * w->channels + c + v * LANES);
        }
        for (int v = 0; v < MAX_VECTORS; v++) store_f32(out + c + v * LANES, x[v] / (1.0f + exp_vf(-x[v])));
    }
    for (; c < count; c += LANES) {
        vf x = {};
        for (int64_t j = 0; j < kernel; j++)
            if (inputs[j])
                x = x + load_some(inputs[j] + (first + c) * item, dtype, count - c) *
                            load_some(weights + j * w->channels + c, F32, count - c);
        store_some(out + c, F32, count - c, x / (1.0f + exp_vf(-x)));
    }
}

static void convolve(const struct work *w, const char *const *inputs, int64_t first, int64_t count, float *out) {
    if (w->a->dtype == F32) convolve_as(w, inputs, first, count, out, F32);
    else convolve_as(w, inputs, first, count, out, BF16);
}

static void l2_normalise(float *x, int64_t count, float scale) {
    vf squares = {};
    for (int64_t i = 0; i < count; i += LANES) {
        vf v = load_some(x + i, F32, count - i);
        squares = squares + v * v;
    }
    float factor = scale / sqrtf(sum_lanes(squares) + 1e-6f);
    for (int64_t i = 0; i < count; i++) x[i] *= factor;
}

/* log(1 + exp(x)) = max(x, 0) + log(1 + y) with y = exp(-|x|), and log(1 + y) = 2 atanh(y / (2 + y)), whose series needs few
 * terms up to 1 / 3. */
static inline vf softplus(vf x) {
    vf y = exp_vf(-max_vf(x, -x)), s = y / (2.0f + y), square = s * s;
    vf sum = splat(1.0f / 17.0f);
    sum = sum * square + 1.0f / 15.0f;
    sum = sum * square + 1.0f / 13.0f;
    sum = sum * square + 1.0f / 11.0f;
    sum = sum * square + 1.0f / 9.0f;
    sum = sum * square + 1.0f / 7.0f;
    sum = sum * square + 1.0f / 5.0f;
    sum = sum * square + 1.0f / 3.0f;
    return max_vf(x, (vf){}) + 2.0f * (s + s * (square * sum));
}

static void compute_gates(const struct delta_args *a, int64_t row, float *keep, float *strength) {
    int64_t item = a->dtype == F32 ? 4 : 2;
    for (int64_t head = 0; head < a->value_heads; head += LANES) {
        int64_t count = a->value_heads - head;
        vf decay = load_some((char *)a->decay + (row * a->decay_stride + head) * item, a->dtype, count);
        vf beta = load_some((char *)a->beta + (row * a->beta_stride + head) * item, a->dtype, count);
        vf steps = softplus(decay + load_some(a->bias + head, F32, count));
        store_some(keep + head, F32, count, exp_vf(load_some(a->rate + head, F32, count) * steps));
        store_some(strength + head, F32, count, 1.0f / (1.0f + exp_vf(-beta)));
    }
}

/* Queries, keys and values lie head after head. */
static int64_t first_channel(const struct delta_args *a, int64_t head) {
    int64_t value_head = head - 2 * a->key_heads;
    return value_head < 0 ? head * a->key_dim : 2 * a->key_heads * a->key_dim + value_head * a->value_dim;
}

/* A share of the heads of a few rows. */
static void prepare(void *context, int64_t task) {
    const struct work *w = context;
    const struct delta_args *a = w->a;
    int64_t block = task / PARTS, part = task % PARTS;
    int64_t end = (block + 1) * BLOCK_ROWS < w->rows ? (block + 1) * BLOCK_ROWS : w->rows;
    int64_t heads = 2 * a->key_heads + a->value_heads, begin_head = heads * part / PARTS;
    int64_t end_head = heads * (part + 1) / PARTS;
    int64_t first = first_channel(a, begin_head), end_channel = first_channel(a, end_head);
    float query_scale = 1.0f / sqrtf((float)a->key_dim);
    const char **inputs = thread_scratch(6, a->kernel * sizeof *inputs);
    for (int64_t i = block * BLOCK_ROWS; i < end; i++) {
        int64_t row = w->first_row + i, sequence = w->sequences[i];
        const char *kept = kept_inputs(w, sequence);
        for (int64_t j = 0; j < a->kernel; j++) inputs[j] = input_row(w, sequence, kept, row, a->kernel - 1 - j);
        float *out = w->prepared + i * w->row_floats;
        convolve(w, inputs, first, end_channel - first, out + first);
        for (int64_t head = begin_head; head < end_head && head < 2 * a->key_heads; head++)
            l2_normalise(out + head * a->key_dim, a->key_dim, head < a->key_heads ? query_scale : 1.0f);
        float *gates = out + w->channels;
        if (part == 0) compute_gates(a, row, gates, gates + a->value_heads);
    }
}

/* sum over i of state[i] * key[i]: what the state holds under a key, for R vectors of columns. */
#define RECALL(R)                                                                                                      \
    static void recall_##R(const float *state, int64_t stride, const float *key, int64_t depth, vf *known) {           \
        vf sum[R];                                                                                                     \
        for (int r = 0; r < R; r++) sum[r] = (vf){};                                                                   \
        for (int64_t i = 0; i < depth; i++)                                                                            \
            for (int r = 0; r < R; r++) sum[r] = sum[r] + load_f32(state + i * stride + r * LANES) * key[i];           \
        for (int r = 0; r < R; r++) known[r] = sum[r];                                                                 \
    }
/* One token: target = keep * source + key x change. In the same pass the new state is read under the token's query and
 * recalled under the next token's key, in the order of recall. */
#define WRITE(R)                                                                                                       \
    static void write_##R(const float *source, int64_t from_stride, float *target, int64_t to_stride, float keep,      \
                          const float *key, const float *query, const float *next_key, int64_t depth,                  \
                          const vf *change, vf *read, vf *known) {                                                     \
        vf added[R], seen[R], sum[R];                                                                                  \
        for (int r = 0; r < R; r++) added[r] = change[r], seen[r] = sum[r] = (vf){};                                   \
        for (int64_t i = 0; i < depth; i++) {                                                                          \
            for (int r = 0; r < R; r++) {                                                                              \
                vf now = fma_vf(added[r], splat(key[i]), load_f32(source + i * from_stride + r * LANES) * keep);       \
                store_f32(target + i * to_stride + r * LANES, now);                                                    \
                seen[r] = seen[r] + now * query[i];                                                                    \
                sum[r] = sum[r] + now * next_key[i];                                                                   \
            }                                                                                                          \
        }                                                                                                              \
        for (int r = 0; r < R; r++) read[r] = seen[r], known[r] = sum[r];                                              \
    }
#define EACH(MACRO) MACRO(1) MACRO(2) MACRO(3) MACRO(4)
EACH(RECALL)
EACH(WRITE)

typedef void (*recall_fn)(const float *, int64_t, const float *, int64_t, vf *);
typedef void (*write_fn)(const float *, int64_t, float *, int64_t, float, const float *, const float *, const float *,
                         int64_t, const vf *, vf *, vf *);
static const recall_fn recalls[MAX_VECTORS + 1] = {0, recall_1, recall_2, recall_3, recall_4};
static const write_fn writes[MAX_VECTORS + 1] = {0, write_1, write_2, write_3, write_4};

static void keep_inputs(const struct work *w, int64_t sequence) {
    const struct delta_args *a = w->a;
    int64_t last = a->query_starts[sequence + 1] - 1;
    size_t bytes = w->channels * w->item;
    char *into = (char *)a->conv_states + a->writes[sequence] * (a->kernel - 1) * bytes;
    const char *kept = kept_inputs(w, sequence);
    for (int64_t j = 0; j < a->kernel - 1; j++) {
        const char *input = input_row(w, sequence, kept, last, a->kernel - 2 - j);
        if (input) memcpy(into + j * bytes, input, bytes);
        else memset(into + j * bytes, 0, bytes);
    }
}

/* The rows of one piece, for some columns of one value head. */
static void recur(void *context, int64_t task) {
    const struct work *w = context;
    const struct delta_args *a = w->a;
    int64_t block = task % w->blocks, head = task / w->blocks % a->value_heads;
    const struct piece *piece = w->list + task / w->blocks / a->value_heads;
    int64_t dk = a->key_dim, dv = a->value_dim, column = block * MAX_VECTORS * LANES;
    int64_t columns = dv - column < MAX_VECTORS * LANES ? dv - column : MAX_VECTORS * LANES;
    int64_t vectors = (columns + LANES - 1) / LANES, stride = vectors * LANES;
    int is_first = piece->begin == a->query_starts[piece->sequence];
    int is_fresh = is_first && a->positions[piece->begin] == 0;
    int64_t place = is_first ? a->reads[piece->sequence] : a->writes[piece->sequence];
    int64_t head_start = head * dk * dv + column, state_size = a->value_heads * dk * dv;
    const float *old_state = a->states + place * state_size + head_start;
    float *new_state = a->states + a->writes[piece->sequence] * state_size + head_start;

    /* Between the first and the last token the columns live in a small block; columns that fill no vector always do. */
    float *scratch = thread_scratch(6, dk * stride * sizeof(float));
    int is_direct = dv % LANES == 0;
    const float *source = is_fresh || !is_direct ? scratch : old_state;
    int64_t from_stride = source == scratch ? stride : dv;
    if (source == scratch) {
        memset(scratch, 0, dk * stride * sizeof(float));
        if (!is_fresh)
            for (int64_t i = 0; i < dk; i++) memcpy(scratch + i * stride, old_state + i * dv, columns * sizeof(float));
    }

    int64_t key_head = head / (a->value_heads / a->key_heads), value_channel = 2 * a->key_heads * dk + head * dv + column;
    const float *row = w->prepared + (piece->begin - w->first_row) * w->row_floats;
    const float *key = row + (a->key_heads + key_head) * dk;
    vf known[MAX_VECTORS], change[MAX_VECTORS], read[MAX_VECTORS];
    recalls[vectors](source, from_stride, key, dk, known);
    for (int64_t r = piece->begin; r < piece->end; r++) {
        int is_last = r + 1 == piece->end;
        const float *next_key = is_last ? key : key + w->row_floats;
        float keep = row[w->channels + head], strength = row[w->channels + a->value_heads + head];
        for (int64_t v = 0; v < vectors; v++) {
            vf value = load_some(row + value_channel + v * LANES, F32, columns - v * LANES);
            change[v] = (value - known[v] * keep) * strength;
        }
        float *target = is_last && is_direct ? new_state : scratch;
        int64_t to_stride = target == scratch ? stride : dv;
        writes[vectors](source, from_stride, target, to_stride, keep, key, row + key_head * dk, next_key, dk, change, read,
                        known);
        int64_t out = (r * a->value_heads + head) * dv + column;
        for (int64_t v = 0; v < vectors; v++)
            store_some((char *)a->out + (out + v * LANES) * w->item, a->dtype, columns - v * LANES, read[v]);
        source = target, from_stride = to_stride;
        row += w->row_floats, key = next_key;
    }
    if (!is_direct)
        for (int64_t i = 0; i < dk; i++) memcpy(new_state + i * dv, scratch + i * stride, columns * sizeof(float));
    if (head == 0 && block == 0 && piece->end == a->query_starts[piece->sequence + 1]) keep_inputs(w, piece->sequence);
}

void op_gated_delta_net(const struct delta_args *a) {
    struct work w = {.a = a, .channels = channels_of(a), .item = a->dtype == F32 ? 4 : 2};
    int64_t total = a->query_starts[a->sequences], batch_rows = total < BATCH_ROWS ? total : BATCH_ROWS;
    w.row_floats = (w.channels + 2 * a->value_heads + LANES - 1) / LANES * LANES;
    w.blocks = (a->value_dim + MAX_VECTORS * LANES - 1) / (MAX_VECTORS * LANES);
    size_t prepared = batch_rows * w.row_floats * sizeof(float), sequences = (batch_rows * sizeof(int32_t) + 63) / 64 * 64;
    char *memory = thread_scratch(7, prepared + sequences + batch_rows * sizeof(struct piece));
    w.prepared = (float *)memory;
    w.sequences = (int32_t *)(memory + prepared);
    w.list = (struct piece *)(memory + prepared + sequences);
    int64_t sequence = 0;
    for (w.first_row = 0; w.first_row < total; w.first_row += batch_rows) {
        w.rows = total - w.first_row < batch_rows ? total - w.first_row : batch_rows;
        int64_t end = w.first_row + w.rows, row = w.first_row;
        w.pieces = 0;
        while (row < end) {
            while (a->query_starts[sequence + 1] <= row) sequence++;
            int64_t piece_end = a->query_starts[sequence + 1] < end ? a->query_starts[sequence + 1] : end;
            w.list[w.pieces++] = (struct piece){sequence, row, piece_end};
            for (; row < piece_end; row++) w.sequences[row - w.first_row] = sequence;
        }
        pool_run(prepare, &w, (w.rows + BLOCK_ROWS - 1) / BLOCK_ROWS * PARTS);
        pool_run(recur, &w, w.pieces * a->value_heads * w.blocks);
    }
}
