// Vectors of the machine's own width, of float32 in registers and of float32 or bfloat16 in memory.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

typedef float vf __attribute__((vector_size(LANES * 4)));
typedef int32_t vi __attribute__((vector_size(LANES * 4)));
typedef uint32_t vu __attribute__((vector_size(LANES * 4)));
typedef uint16_t vh __attribute__((vector_size(LANES * 2)));

struct bf16 {
    uint16_t bits;
};

static inline vf load(const float* p) {
    vf v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

static inline vf load(const bf16* p) {
    vh h;
    std::memcpy(&h, p, sizeof h);
    return (vf)(__builtin_convertvector(h, vu) << 16);
}

static inline void store(float* p, vf v) { std::memcpy(p, &v, sizeof v); }

static inline void store(bf16* p, vf v) {
    vu bits = (vu)v;
    bits += 0x7fff + ((bits >> 16) & 1);  // to nearest, ties to even
    vh h = __builtin_convertvector(bits >> 16, vh);
    std::memcpy(p, &h, sizeof h);
}

static inline float get(float x) { return x; }
static inline float get(bf16 x) {
    uint32_t bits = (uint32_t)x.bits << 16;
    float v;
    std::memcpy(&v, &bits, 4);
    return v;
}
static inline void put(float* p, float x) { *p = x; }
static inline void put(bf16* p, float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    p->bits = (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline vf splat(float x) { return x - vf{}; }

static inline float sum(vf v) {
    // Lane i of the mask takes lane i ^ width.
#if LANES == 16
    v += __builtin_shuffle(v, (vi){8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7});
    v += __builtin_shuffle(v, (vi){4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11});
    v += __builtin_shuffle(v, (vi){2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13});
    v += __builtin_shuffle(v, (vi){1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14});
#elif LANES == 8
    v += __builtin_shuffle(v, (vi){4, 5, 6, 7, 0, 1, 2, 3});
    v += __builtin_shuffle(v, (vi){2, 3, 0, 1, 6, 7, 4, 5});
    v += __builtin_shuffle(v, (vi){1, 0, 3, 2, 5, 4, 7, 6});
#else
    v += __builtin_shuffle(v, (vi){2, 3, 0, 1});
    v += __builtin_shuffle(v, (vi){1, 0, 3, 2});
#endif
    return v[0];
}

// e^x to about 1 ulp for x in [-87, 88], which it is clamped to: 2^n * e^r with a polynomial for e^r, |r| <= ln2 / 2.
static inline vf exponential(vf x) {
    const vf lowest = splat(-87.0f), highest = splat(88.0f);
    x = x < lowest ? lowest : x;
    x = x > highest ? highest : x;
    const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    vf n = x * 1.44269504f + magic;
    vi bits = (vi)n << 23;
    n -= magic;
    vf r = x - n * 0.693359375f;
    r -= n * -2.12194440e-4f;
    vf p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return (vf)((vi)p + bits);
}
