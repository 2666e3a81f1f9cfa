/* Gated delta net (Yang, Kautz, Hatamizadeh 2024): a short causal convolution, then a recurrence with a matrix state.
 *
 * Token by token in float32, in one order, however a sequence is cut into calls: the state at a position is a function of the
 * tokens before it. A task is one value head of one sequence; it reads the old state and writes the new one elsewhere. */
#include "common.h"

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

static inline float value_at(const void *p, int64_t dtype, int64_t i) {
    return dtype == F32 ? ((const float *)p)[i] : bf16_to_float(((const bf16 *)p)[i]);
}

static inline int64_t channels_of(const struct delta_args *a) {
    return 2 * a->key_heads * a->key_dim + a->value_heads * a->value_dim;
}

/* silu of the convolution at row `row` for channels first .. first + count - 1. Rows before the call's first one come from
 * the kept inputs (NULL: zeros). */
static void convolve(const struct delta_args *a, const char *kept, int64_t begin, int64_t row, int64_t first,
                     int64_t count, float *out) {
    int64_t channels = channels_of(a), item = a->dtype == F32 ? 4 : 2;
    for (int64_t c = 0; c < count; c++) out[c] = 0;
    for (int64_t j = 0; j < a->kernel; j++) {
        int64_t source = row - a->kernel + 1 + j;
        const char *input;
        if (source >= begin) {
            input = (const char *)a->mixed + source * a->mixed_stride * item;
        } else if (kept) {
            input = kept + (source - begin + a->kernel - 1) * channels * item;
        } else {
            continue;
        }
        const float *weight = a->conv + j * channels + first;
        for (int64_t c = 0; c < count; c++) out[c] += weight[c] * value_at(input, a->dtype, first + c);
    }
    int64_t c = 0;
    for (; c < count; c += LANES) {
        vf x = {};
        int64_t width = count - c < LANES ? count - c : LANES;
        memcpy(&x, out + c, width * sizeof(float));
        x = x / (1.0f + exp_vf(-x));
        memcpy(out + c, &x, width * sizeof(float));
    }
}

static void l2_normalise(float *x, int64_t count, float scale) {
    float total = 0;
    for (int64_t i = 0; i < count; i++) total += x[i] * x[i];
    float factor = scale / sqrtf(total + 1e-6f);
    for (int64_t i = 0; i < count; i++) x[i] *= factor;
}

static void keep_inputs(const struct delta_args *a, const char *kept, int64_t begin, int64_t end, char *into,
                        int64_t first, int64_t count) {
    int64_t channels = channels_of(a), item = a->dtype == F32 ? 4 : 2;
    for (int64_t j = 0; j < a->kernel - 1; j++) {
        int64_t source = end - a->kernel + 1 + j;
        char *target = into + (j * channels + first) * item;
        if (source >= begin) {
            memcpy(target, (const char *)a->mixed + (source * a->mixed_stride + first) * item, count * item);
        } else if (kept) {
            memcpy(target, kept + ((source - begin + a->kernel - 1) * channels + first) * item, count * item);
        } else {
            memset(target, 0, count * item);
        }
    }
}

static void run_head(void *context, int64_t task) {
    const struct delta_args *a = context;
    int64_t s = task / a->value_heads, head = task % a->value_heads, item = a->dtype == F32 ? 4 : 2;
    int64_t begin = a->query_starts[s], end = a->query_starts[s + 1];
    if (begin == end) return;
    int64_t group = a->value_heads / a->key_heads, key_head = head / group;
    int64_t dk = a->key_dim, dv = a->value_dim, lanes = (dv + LANES - 1) / LANES * LANES;
    int64_t query_channel = key_head * dk, key_channel = (a->key_heads + key_head) * dk;
    int64_t value_channel = 2 * a->key_heads * dk + head * dv, channels = channels_of(a);
    int is_fresh = a->positions[begin] == 0;
    int64_t state_size = a->value_heads * dk * dv, kept_bytes = (a->kernel - 1) * channels * item;
    const char *kept = is_fresh ? NULL : (const char *)a->conv_states + a->reads[s] * kept_bytes;
    const float *old_state = a->states + a->reads[s] * state_size + head * dk * dv;
    float *new_state = a->states + a->writes[s] * state_size + head * dk * dv;

    float *state = thread_scratch(6, (dk * lanes + 2 * dk + 4 * lanes) * sizeof(float));
    float *query = state + dk * lanes, *key = query + dk, *value = key + dk, *memory = value + lanes;
    float *result = memory + lanes;
    memset(state, 0, dk * lanes * sizeof(float));
    if (!is_fresh)
        for (int64_t i = 0; i < dk; i++) memcpy(state + i * lanes, old_state + i * dv, dv * sizeof(float));
    memset(value, 0, lanes * sizeof(float));

    for (int64_t row = begin; row < end; row++) {
        convolve(a, kept, begin, row, query_channel, dk, query);
        convolve(a, kept, begin, row, key_channel, dk, key);
        convolve(a, kept, begin, row, value_channel, dv, value);
        l2_normalise(query, dk, 1.0f / sqrtf((float)dk));
        l2_normalise(key, dk, 1.0f);
        float x = value_at(a->decay, a->dtype, row * a->decay_stride + head) + a->bias[head];
        float softplus = x > 20.0f ? x : log1pf(expf(x));
        float keep = expf(a->rate[head] * softplus);
        float strength = 1.0f / (1.0f + expf(-value_at(a->beta, a->dtype, row * a->beta_stride + head)));
        for (int64_t d = 0; d < lanes; d += LANES) {
            vf known = {};
            for (int64_t i = 0; i < dk; i++) {
                vf kept_row = load_f32(state + i * lanes + d) * keep;
                store_f32(state + i * lanes + d, kept_row);
                known = known + kept_row * key[i];
            }
            vf change = (load_f32(value + d) - known) * strength;
            vf read = {};
            for (int64_t i = 0; i < dk; i++) {
                vf row_now = load_f32(state + i * lanes + d) + change * key[i];
                store_f32(state + i * lanes + d, row_now);
                read = read + row_now * query[i];
            }
            store_f32(result + d, read);
        }
        int64_t place = (row * a->value_heads + head) * dv;
        for (int64_t d = 0; d < dv; d++) {
            if (a->dtype == F32) ((float *)a->out)[place + d] = result[d];
            else ((bf16 *)a->out)[place + d] = float_to_bf16(result[d]);
        }
    }
    for (int64_t i = 0; i < dk; i++) memcpy(new_state + i * dv, state + i * lanes, dv * sizeof(float));
    char *into = (char *)a->conv_states + a->writes[s] * kept_bytes;
    keep_inputs(a, kept, begin, end, into, value_channel, dv);
    if (head % group == 0) {
        keep_inputs(a, kept, begin, end, into, query_channel, dk);
        keep_inputs(a, kept, begin, end, into, key_channel, dk);
    }
}

void op_gated_delta_net(const struct delta_args *a) { pool_run(run_head, (void *)a, a->sequences * a->value_heads); }
