/* Operations on rows: norms, rotary position embedding, activation, cache writes, embedding. A row is one task's work from its
 * first element to its last, in one order, so its bits depend on nothing else. */
#include "common.h"

#define ROWS_PER_TASK 16

struct rows {
    void (*row)(const void *args, int64_t row);
    const void *args;
    int64_t count;
};

static void run_rows(void *context, int64_t task) {
    const struct rows *r = context;
    int64_t end = (task + 1) * ROWS_PER_TASK < r->count ? (task + 1) * ROWS_PER_TASK : r->count;
    for (int64_t row = task * ROWS_PER_TASK; row < end; row++) r->row(r->args, row);
}

static void for_rows(void (*row)(const void *, int64_t), const void *args, int64_t count) {
    struct rows r = {row, args, count};
    pool_run(run_rows, &r, (count + ROWS_PER_TASK - 1) / ROWS_PER_TASK);
}

static inline vf load(const void *p, int64_t dtype, int64_t i) {
    return dtype == F32 ? load_f32((const float *)p + i) : load_bf16((const bf16 *)p + i);
}
static inline float load1(const void *p, int64_t dtype, int64_t i) {
    return dtype == F32 ? ((const float *)p)[i] : bf16_to_float(((const bf16 *)p)[i]);
}
static inline void store(void *p, int64_t dtype, int64_t i, vf x) {
    if (dtype == F32) store_f32((float *)p + i, x);
    else store_bf16((bf16 *)p + i, x);
}
static inline void store1(void *p, int64_t dtype, int64_t i, float x) {
    if (dtype == F32) ((float *)p)[i] = x;
    else ((bf16 *)p)[i] = float_to_bf16(x);
}
static inline int64_t itemsize(int64_t dtype) { return dtype == F32 ? 4 : 2; }
static inline void *at(const void *p, int64_t dtype, int64_t i) { return (char *)p + i * itemsize(dtype); }

struct norm_args {
    const void *x;   /* [rows, heads, width], rows x_stride apart */
    void *residual;  /* NULL, or [rows, width]: x is added to it in place first */
    const void *weight;
    void *out;       /* contiguous */
    int64_t rows, heads, width, x_stride, dtype;
    double eps;
    int64_t weight_dtype; /* a float32 weight is applied before rounding to bfloat16, one in dtype after */
};

static void norm_one(const struct norm_args *a, const void *x, void *out) {
    int64_t i = 0;
    vf squares = {};
    for (; i + LANES <= a->width; i += LANES) {
        vf v = load(x, a->dtype, i);
        squares = squares + v * v;
    }
    float total = sum_lanes(squares);
    for (; i < a->width; i++) {
        float v = load1(x, a->dtype, i);
        total += v * v;
    }
    float factor = 1.0f / sqrtf(total / (float)a->width + (float)a->eps);
    int rounds = a->weight_dtype == BF16;
    for (i = 0; i + LANES <= a->width; i += LANES) {
        vf v = load(x, a->dtype, i) * factor;
        if (rounds) v = round_bf16(v);
        store(out, a->dtype, i, v * load(a->weight, a->weight_dtype, i));
    }
    for (; i < a->width; i++) {
        float v = load1(x, a->dtype, i) * factor;
        if (rounds) v = bf16_to_float(float_to_bf16(v));
        store1(out, a->dtype, i, v * load1(a->weight, a->weight_dtype, i));
    }
}

static void norm_row(const void *args, int64_t row) {
    const struct norm_args *a = args;
    void *out = at(a->out, a->dtype, row * a->heads * a->width);
    const void *x = at(a->x, a->dtype, row * a->x_stride);
    if (a->residual) {
        void *residual = at(a->residual, a->dtype, row * a->width);
        int64_t i = 0;
        for (; i + LANES <= a->width; i += LANES)
            store(residual, a->dtype, i, load(residual, a->dtype, i) + load(x, a->dtype, i));
        for (; i < a->width; i++)
            store1(residual, a->dtype, i, load1(residual, a->dtype, i) + load1(x, a->dtype, i));
        x = residual;
    }
    for (int64_t head = 0; head < a->heads; head++)
        norm_one(a, at(x, a->dtype, head * a->width), at(out, a->dtype, head * a->width));
}

void op_rms_norm(const struct norm_args *a) { for_rows(norm_row, a, a->rows); }

struct rotary_args {
    void *query, *key;
    const int64_t *positions;
    const float *cos, *sin; /* [positions, half] */
    int64_t rows, query_heads, key_heads, head_dim, half, query_stride, key_stride, dtype;
};

static void rotate(void *head, const float *cos, const float *sin, int64_t half, int64_t dtype) {
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES) {
        vf first = load(head, dtype, i), second = load(head, dtype, half + i);
        vf c = load_f32(cos + i), s = load_f32(sin + i);
        store(head, dtype, i, first * c - second * s);
        store(head, dtype, half + i, second * c + first * s);
    }
    for (; i < half; i++) {
        float first = load1(head, dtype, i), second = load1(head, dtype, half + i);
        store1(head, dtype, i, first * cos[i] - second * sin[i]);
        store1(head, dtype, half + i, second * cos[i] + first * sin[i]);
    }
}

static void rotary_row(const void *args, int64_t row) {
    const struct rotary_args *a = args;
    const float *cos = a->cos + a->positions[row] * a->half, *sin = a->sin + a->positions[row] * a->half;
    for (int64_t h = 0; h < a->query_heads; h++)
        rotate(at(a->query, a->dtype, row * a->query_stride + h * a->head_dim), cos, sin, a->half, a->dtype);
    for (int64_t h = 0; h < a->key_heads; h++)
        rotate(at(a->key, a->dtype, row * a->key_stride + h * a->head_dim), cos, sin, a->half, a->dtype);
}

void op_rotary(const struct rotary_args *a) { for_rows(rotary_row, a, a->rows); }

struct silu_args {
    const void *gate_up; /* [rows, 2 * width] */
    void *out;           /* [rows, width] */
    int64_t rows, width, stride, dtype;
};

static inline vf silu(vf x) { return x / (1.0f + exp_vf(-x)); }
static inline vf sigmoid(vf x) { return 1.0f / (1.0f + exp_vf(-x)); }

static void silu_row(const void *args, int64_t row) {
    const struct silu_args *a = args;
    const void *gate = at(a->gate_up, a->dtype, row * a->stride), *up = at(gate, a->dtype, a->width);
    void *out = at(a->out, a->dtype, row * a->width);
    int64_t i = 0;
    for (; i + LANES <= a->width; i += LANES)
        store(out, a->dtype, i, silu(load(gate, a->dtype, i)) * load(up, a->dtype, i));
    for (; i < a->width; i++)
        store1(out, a->dtype, i, silu(splat(load1(gate, a->dtype, i)))[0] * load1(up, a->dtype, i));
}

void op_silu_and_mul(const struct silu_args *a) { for_rows(silu_row, a, a->rows); }

struct gate_args {
    const void *x, *gate;
    void *out;
    int64_t rows, width, x_stride, gate_stride, gate_step, dtype; /* gate_step: 0 for one gate a row */
};

static void gate_row(const void *args, int64_t row) {
    const struct gate_args *a = args;
    const void *x = at(a->x, a->dtype, row * a->x_stride), *gate = at(a->gate, a->dtype, row * a->gate_stride);
    void *out = at(a->out, a->dtype, row * a->width);
    vf factor = sigmoid(splat(load1(gate, a->dtype, 0)));
    int64_t i = 0;
    for (; i + LANES <= a->width; i += LANES) {
        if (a->gate_step) factor = sigmoid(load(gate, a->dtype, i));
        store(out, a->dtype, i, load(x, a->dtype, i) * factor);
    }
    for (; i < a->width; i++) {
        if (a->gate_step) factor = sigmoid(splat(load1(gate, a->dtype, i)));
        store1(out, a->dtype, i, load1(x, a->dtype, i) * factor[0]);
    }
}

void op_sigmoid_and_mul(const struct gate_args *a) { for_rows(gate_row, a, a->rows); }

struct gated_norm_args {
    struct norm_args norm;
    const void *gate;
    int64_t gate_stride;
};

static void gated_norm_row(const void *args, int64_t row) {
    const struct gated_norm_args *a = args;
    const struct norm_args *n = &a->norm;
    norm_row(n, row);
    int64_t width = n->heads * n->width;
    void *out = at(n->out, n->dtype, row * width);
    const void *gate = at(a->gate, n->dtype, row * a->gate_stride);
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES)
        store(out, n->dtype, i, load(out, n->dtype, i) * silu(load(gate, n->dtype, i)));
    for (; i < width; i++)
        store1(out, n->dtype, i, load1(out, n->dtype, i) * silu(splat(load1(gate, n->dtype, i)))[0]);
}

void op_rms_norm_gated(const struct gated_norm_args *a) { for_rows(gated_norm_row, a, a->norm.rows); }

struct write_args {
    const void *key, *value;
    void *key_cache, *value_cache;
    const int64_t *slots;
    int64_t rows, heads, head_dim, block_size, key_stride, value_stride, key_block_stride, value_block_stride, dtype;
};

static void write_row(const void *args, int64_t row) {
    const struct write_args *a = args;
    int64_t block = a->slots[row] / a->block_size, offset = a->slots[row] % a->block_size;
    for (int64_t h = 0; h < a->heads; h++) {
        int64_t place = (h * a->block_size + offset) * a->head_dim;
        size_t bytes = a->head_dim * itemsize(a->dtype);
        memcpy(at(a->key_cache, a->dtype, block * a->key_block_stride + place),
               at(a->key, a->dtype, row * a->key_stride + h * a->head_dim), bytes);
        memcpy(at(a->value_cache, a->dtype, block * a->value_block_stride + place),
               at(a->value, a->dtype, row * a->value_stride + h * a->head_dim), bytes);
    }
}

void op_write_kv(const struct write_args *a) { for_rows(write_row, a, a->rows); }

struct embedding_args {
    const int64_t *token_ids;
    const void *table;
    void *out;
    int64_t rows, width, dtype;
};

static void embedding_row(const void *args, int64_t row) {
    const struct embedding_args *a = args;
    memcpy(at(a->out, a->dtype, row * a->width), at(a->table, a->dtype, a->token_ids[row] * a->width),
           a->width * itemsize(a->dtype));
}

void op_embedding(const struct embedding_args *a) { for_rows(embedding_row, a, a->rows); }
