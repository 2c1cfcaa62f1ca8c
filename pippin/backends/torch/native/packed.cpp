// Linears that compute in float32, with weights of 4 or 8 bits in groups, bfloat16 or float32: the
// small ones are turned into float32 tile by tile. See kernels.cpp for the conventions.
//
// Outputs are taken in blocks of 2 * LANES. A block holds, input after input, its weights side by
// side; at 4 bits a byte holds output i (low) and i + LANES (high) of the block. Scales and biases
// stand per block and group: [group][2 * LANES].

#include "multiply.h"
#include "pool.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

static const int TILE = 128;  // inputs that are turned into float32 at once: 8 or 16 KiB
static const int STRIP = 96;  // rows of x that share a tile

struct Packed {
    int64_t kind;  // 4 or 8 bits, 16 for bfloat16, 32 for float32
    int64_t outputs, inputs, group;
    const uint8_t* codes;
    const float* scales;
    const float* biases;
    const float* bias;  // [outputs], or null
};

// LANES bytes, each widened. (The compiler's own conversion goes through memory.)
static inline vu load_bytes(const uint8_t* p) {
#if defined(__AVX512F__)
    return (vu)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
    return (vu)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
    vu v;
    for (int i = 0; i < LANES; i++) v[i] = p[i];
    return v;
#endif
}

static inline vf to_float(vu v) { return __builtin_convertvector((vi)v, vf); }

// Inputs [first, last) of one block, as float32 [last - first][BLOCK].
static void unpack(const Packed& w, int64_t block, int64_t first, int64_t last, float* tile) {
    if (w.kind == 16) {
        const bf16* source = (const bf16*)w.codes + (block * w.inputs + first) * BLOCK;
        for (int64_t i = 0; i < (last - first) * BLOCK; i += LANES) store(tile + i, load(source + i));
        return;
    }
    const int64_t groups = w.inputs / w.group;
    const uint8_t* source = w.codes + (block * w.inputs + first) * (w.kind == 4 ? LANES : BLOCK);
    for (int64_t k = first; k < last;) {
        const int64_t group = k / w.group;
        const int64_t end = std::min(last, (group + 1) * w.group);
        const float* scales = w.scales + (block * groups + group) * BLOCK;
        const float* biases = w.biases + (block * groups + group) * BLOCK;
        const vf s0 = load(scales), s1 = load(scales + LANES);
        const vf b0 = load(biases), b1 = load(biases + LANES);
        if (w.kind == 4)
            for (; k < end; k++, source += LANES, tile += BLOCK) {
                const vu both = load_bytes(source);
                store(tile, to_float(both & 15) * s0 + b0);
                store(tile + LANES, to_float(both >> 4) * s1 + b1);
            }
        else
            for (; k < end; k++, source += BLOCK, tile += BLOCK) {
                store(tile, to_float(load_bytes(source)) * s0 + b0);
                store(tile + LANES, to_float(load_bytes(source + LANES)) * s1 + b1);
            }
    }
}

// Few rows: codes go from the register that unpacks them into the products, without scales, which
// are applied to the sums of a group: sum of (s q + b) x = s * sum of q x + b * sum of x.
// ``x_sums`` [M][groups] are the latter. Writes [M][BLOCK].
template <int M, int KIND>
static void fused(const Packed& w, int64_t block, const float* x, const float* x_sums, float* acc) {
    const int64_t groups = w.inputs / w.group;
    const uint8_t* source = w.codes + block * w.inputs * (KIND == 4 ? LANES : BLOCK);
    const float* scales = w.scales + block * groups * BLOCK;
    const float* biases = w.biases + block * groups * BLOCK;
    vf sums[M][2] = {};
    for (int64_t group = 0; group < groups; group++, scales += BLOCK, biases += BLOCK) {
        // Two chains where there are few: an addition must wait for the one before.
        constexpr int CHAINS = M <= 2 ? 2 : 1;
        vf products[M][2][CHAINS] = {};
        const float* inputs = x + group * w.group;
        for (int64_t k = 0; k < w.group; k += CHAINS)
#pragma GCC unroll 2
            for (int c = 0; c < CHAINS; c++, source += KIND == 4 ? LANES : BLOCK) {
                vu low = load_bytes(source), high;
                if (KIND == 4) {
                    high = low >> 4;
                    low &= 15;
                } else {
                    high = load_bytes(source + LANES);
                }
                const vf w0 = to_float(low), w1 = to_float(high);
#pragma GCC unroll 12
                for (int m = 0; m < M; m++) {
                    const float value = inputs[m * w.inputs + k + c];
                    products[m][0][c] += w0 * value;
                    products[m][1][c] += w1 * value;
                }
            }
        const vf s0 = load(scales), s1 = load(scales + LANES);
        const vf b0 = load(biases), b1 = load(biases + LANES);
#pragma GCC unroll 12
        for (int m = 0; m < M; m++) {
            if (CHAINS == 2) {
                products[m][0][0] += products[m][0][CHAINS - 1];
                products[m][1][0] += products[m][1][CHAINS - 1];
            }
            const float sum = x_sums[m * groups + group];
            sums[m][0] += products[m][0][0] * s0 + b0 * sum;
            sums[m][1] += products[m][1][0] * s1 + b1 * sum;
        }
    }
#pragma GCC unroll 12
    for (int m = 0; m < M; m++) {
        store(acc + m * BLOCK, sums[m][0]);
        store(acc + m * BLOCK + LANES, sums[m][1]);
    }
}

typedef void (*Fused)(const Packed&, int64_t, const float*, const float*, float*);

static const int FEW = ROWS;           // most rows of the fused product
static const int FEW_LIMIT = 12;  // rows up to which it is used, and repeated where FEW is less
static const Fused FUSED[2][FEW + 1] = {
    {nullptr, fused<1, 4>, fused<2, 4>, fused<3, 4>, fused<4, 4>, fused<5, 4>, fused<6, 4>,
#if LANES == 16
     fused<7, 4>, fused<8, 4>, fused<9, 4>, fused<10, 4>, fused<11, 4>, fused<12, 4>,
#endif
    },
    {nullptr, fused<1, 8>, fused<2, 8>, fused<3, 8>, fused<4, 8>, fused<5, 8>, fused<6, 8>,
#if LANES == 16
     fused<7, 8>, fused<8, 8>, fused<9, 8>, fused<10, 8>, fused<11, 8>, fused<12, 8>,
#endif
    },
};

static inline float total(const float* x, int64_t count) {
    vf lanes = {};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) lanes += load(x + i);
    float rest = sum(lanes);
    for (; i < count; i++) rest += x[i];
    return rest;
}

template <class T>
static void packed_linear(const Packed& w, const T* input, int64_t rows, const T* residual, T* y) {
    static std::vector<float> wide;  // used from one thread
    const float* x = (const float*)input;
    if (sizeof(T) == 2) {
        wide.resize(rows * w.inputs);
        for (int64_t i = 0; i < rows * w.inputs; i += LANES) store(&wide[i], load(input + i));
        x = wide.data();
    }
    const int64_t blocks = (w.outputs + BLOCK - 1) / BLOCK;
    const int64_t strips = (rows + STRIP - 1) / STRIP;
    static std::vector<float> x_sums;
    const bool few = rows <= FEW_LIMIT && w.kind <= 8 && w.group % 2 == 0;
    if (few) {
        const int64_t groups = w.inputs / w.group;
        x_sums.resize(rows * groups);
        float* sums = x_sums.data();
        for (int64_t i = 0; i < rows * groups; i++) sums[i] = total(x + i * w.group, w.group);
    }
    parallel(strips * blocks, [&](int64_t task) {
        alignas(64) float tile[TILE * BLOCK];
        alignas(64) float acc[STRIP * BLOCK];
        const int64_t block = task % blocks, top = task / blocks * STRIP;
        const int64_t count = std::min<int64_t>(STRIP, rows - top);
        if (few) {
            // Passes of nearly equal rows.
            const int64_t passes = (rows + FEW - 1) / FEW;
            for (int64_t row = 0, pass = 0; pass < passes; pass++) {
                const int64_t now = (rows - row + passes - pass - 1) / (passes - pass);
                FUSED[w.kind == 8][now](w, block, x + row * w.inputs,
                                        &x_sums[row * (w.inputs / w.group)], acc + row * BLOCK);
                row += now;
            }
        }
        else
            std::memset(acc, 0, count * BLOCK * sizeof(float));
        for (int64_t first = few ? w.inputs : 0; first < w.inputs; first += TILE) {
            const int64_t last = std::min<int64_t>(first + TILE, w.inputs);
            const float* weights = tile;
            if (w.kind == 32)
                weights = (const float*)w.codes + (block * w.inputs + first) * BLOCK;
            else
                unpack(w, block, first, last, tile);
            multiply_rows(weights, BLOCK, last - first, x + top * w.inputs + first, w.inputs,
                          count, acc, BLOCK);
        }
        const int64_t at = block * BLOCK;
        const int64_t width = std::min<int64_t>(BLOCK, w.outputs - at);
        for (int64_t row = 0; row < count; row++) {
            const int64_t target = (top + row) * w.outputs + at;
            float* sums = acc + row * BLOCK;
            if (w.bias)
                for (int64_t i = 0; i < width; i++) sums[i] += w.bias[at + i];
            if (residual)
                for (int64_t i = 0; i < width; i++) sums[i] += get(residual[target + i]);
            for (int64_t i = 0; i < width; i++) put(y + target + i, sums[i]);
        }
    }, rows < 32 ? 8 : 32);
}

// Weights [outputs, inputs], one of kind 4 or 8 a byte, into blocks. The last block is filled up
// with copies of the last output.
static void pack(const uint8_t* weights, int64_t kind, int64_t outputs, int64_t inputs,
                 uint8_t* packed) {
    const int64_t blocks = (outputs + BLOCK - 1) / BLOCK;
    const int64_t size = kind > 8 ? kind / 8 : 1;
    parallel(blocks, [&](int64_t block) {
        for (int64_t i = 0; i < BLOCK; i++) {
            const uint8_t* row = weights + std::min(block * BLOCK + i, outputs - 1) * inputs * size;
            if (kind == 4) {
                uint8_t* target = packed + block * inputs * LANES + i % LANES;
                for (int64_t k = 0; k < inputs; k++)
                    target[k * LANES] = i < LANES ? row[k] : target[k * LANES] | row[k] << 4;
            } else if (kind == 8) {
                uint8_t* target = packed + block * inputs * BLOCK + i;
                for (int64_t k = 0; k < inputs; k++) target[k * BLOCK] = row[k];
            } else if (kind == 16) {
                uint16_t* target = (uint16_t*)packed + block * inputs * BLOCK + i;
                for (int64_t k = 0; k < inputs; k++) target[k * BLOCK] = ((const uint16_t*)row)[k];
            } else {
                float* target = (float*)packed + block * inputs * BLOCK + i;
                for (int64_t k = 0; k < inputs; k++) target[k * BLOCK] = ((const float*)row)[k];
            }
        }
    });
}

extern "C" {

void pippin_pack(const void* weights, int64_t kind, int64_t outputs, int64_t inputs,
                 void* packed) {
    pack((const uint8_t*)weights, kind, outputs, inputs, (uint8_t*)packed);
}

void pippin_packed_linear(const Packed* w, int64_t dtype, const void* x, int64_t rows,
                          const void* residual, void* y) {
    if (dtype == 0)
        packed_linear(*w, (const float*)x, rows, (const float*)residual, (float*)y);
    else
        packed_linear(*w, (const bf16*)x, rows, (const bf16*)residual, (bf16*)y);
}
}
