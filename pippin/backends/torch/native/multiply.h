// The inner matrix product: rows of x against a tile of BLOCK columns.

#pragma once

#include "vectors.h"

static const int BLOCK = 2 * LANES;  // columns
#if LANES == 16
static const int ROWS = 12;  // 2 * ROWS accumulators
#else
static const int ROWS = 6;
#endif

template <int M>
static void multiply(const float* tile, int64_t tile_stride, int64_t count, const float* x,
                     int64_t stride, float* acc, int64_t acc_stride) {
    // Few rows: several sums each, since an addition must wait for the one before.
    constexpr int CHAINS = M == 1 ? 4 : M == 2 ? 2 : 1;
    vf sums[M][2], more[M][2][CHAINS > 1 ? CHAINS - 1 : 1] = {};
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
        sums[m][0] = load(acc + m * acc_stride);
        sums[m][1] = load(acc + m * acc_stride + LANES);
    }
    int64_t k = 0;
    if (CHAINS > 1) {
        for (; k + CHAINS <= count; k += CHAINS)
#pragma GCC unroll 4
            for (int c = 0; c < CHAINS; c++) {
                const vf w0 = load(tile + (k + c) * tile_stride);
                const vf w1 = load(tile + (k + c) * tile_stride + LANES);
#pragma GCC unroll 2
                for (int m = 0; m < M; m++) {
                    const float value = x[m * stride + k + c];
                    (c ? more[m][0][c - 1] : sums[m][0]) += w0 * value;
                    (c ? more[m][1][c - 1] : sums[m][1]) += w1 * value;
                }
            }
#pragma GCC unroll 16
        for (int m = 0; m < M; m++)
#pragma GCC unroll 4
            for (int c = 0; c < CHAINS - 1; c++) {
                sums[m][0] += more[m][0][c];
                sums[m][1] += more[m][1][c];
            }
    }
    for (; k < count; k++) {
        const vf w0 = load(tile + k * tile_stride), w1 = load(tile + k * tile_stride + LANES);
#pragma GCC unroll 16
        for (int m = 0; m < M; m++) {
            const float value = x[m * stride + k];
            sums[m][0] += w0 * value;
            sums[m][1] += w1 * value;
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
        store(acc + m * acc_stride, sums[m][0]);
        store(acc + m * acc_stride + LANES, sums[m][1]);
    }
}

typedef void (*Multiply)(const float*, int64_t, int64_t, const float*, int64_t, float*, int64_t);

static const Multiply MULTIPLY[] = {
    nullptr,     multiply<1>, multiply<2>, multiply<3>, multiply<4>, multiply<5>, multiply<6>,
#if LANES == 16
    multiply<7>, multiply<8>, multiply<9>, multiply<10>, multiply<11>, multiply<12>,
#endif
};

// acc[m][0:BLOCK] += sum over k of x[m][k] * tile[k][0:BLOCK], for ``rows`` rows.
static inline void multiply_rows(const float* tile, int64_t tile_stride, int64_t count,
                                 const float* x, int64_t stride, int64_t rows, float* acc,
                                 int64_t acc_stride) {
    for (int64_t row = 0; row < rows; row += ROWS)
        MULTIPLY[std::min<int64_t>(ROWS, rows - row)](tile, tile_stride, count, x + row * stride,
                                                      stride, acc + row * acc_stride, acc_stride);
}
