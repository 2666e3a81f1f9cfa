/* The linear layer's inner part, for operations that are made of several products. */
#ifndef METRALE_LINEAR_H
#define METRALE_LINEAR_H

#include "common.h"

#define TILE 32

struct linear_args {
    const void *x;
    const void *packed;
    const float *bias; /* [padded N] or NULL */
    void *out;
    int64_t rows, in_features, out_features, x_stride, x_dtype, out_dtype;
};

/* Outputs tile * TILE .. of rows begin .. end - 1. Meanwhile `next` is fetched, the tile the thread takes next (or `tile`). */
void linear_tile(const struct linear_args *a, int64_t tile, int64_t next, int64_t begin, int64_t end);

#endif
