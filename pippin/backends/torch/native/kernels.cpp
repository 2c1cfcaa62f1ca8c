// Kernels for the CPU that torch has no single operation for. Plain C interface, called through
// ctypes by ops.py, which also checks shapes. Compiled by build.py on the machine that runs them.
//
// Element types: 0 float32, 1 bfloat16. All arithmetic is in float32.

#include "pool.h"
#include "vectors.h"

static const int MAX_WIDTH = 512;  // of a head

// ---------------------------------------------------------------------------------------------
// Queries, keys and values of a step: norms of heads, turning, writing to the pages

struct Mix {
    int64_t dtype, rows, heads, kv_heads, width, rotary, pairs;
    int64_t head_stride;  // elements from one head of the pool to the next
    double eps;
    const float* turns;    // [rows, rotary / 2, 2] cosine and sine
    const int64_t* slots;  // [rows]
};

template <class T>
static void mix_row(const Mix& m, int64_t row, T* qkv, T* pool, const float* norm) {
    const int64_t width = m.width, half = m.rotary / 2;
    alignas(64) float head[MAX_WIDTH];
    const float* turns = m.turns ? m.turns + row * m.rotary : nullptr;
    for (int64_t h = 0; h < m.heads + 2 * m.kv_heads; h++) {
        T* source = qkv + (row * (m.heads + 2 * m.kv_heads) + h) * width;
        const bool turned = h < m.heads + m.kv_heads;
        T* page = h < m.heads ? nullptr : pool + (h - m.heads) * m.head_stride + m.slots[row] * width;
        if (!turned || (!turns && !norm)) {
            if (page) std::memcpy(page, source, width * sizeof(T));
            continue;
        }
        for (int64_t i = 0; i < width; i += LANES) store(head + i, load(source + i));
        if (norm) {
            vf squares = vf{};
            for (int64_t i = 0; i < width; i += LANES) squares += load(head + i) * load(head + i);
            const float scale = 1.0f / std::sqrt(sum(squares) / width + (float)m.eps);
            for (int64_t i = 0; i < width; i += LANES)
                store(head + i, load(head + i) * scale * load(norm + h * width + i));
        }
        if (turns && m.pairs)
            for (int64_t i = 0; i < half; i++) {
                const float x = head[2 * i], y = head[2 * i + 1];
                head[2 * i] = x * turns[2 * i] - y * turns[2 * i + 1];
                head[2 * i + 1] = y * turns[2 * i] + x * turns[2 * i + 1];
            }
        else if (turns)
            for (int64_t i = 0; i < half; i++) {
                const float x = head[i], y = head[half + i];
                head[i] = x * turns[2 * i] - y * turns[2 * i + 1];
                head[half + i] = y * turns[2 * i] + x * turns[2 * i + 1];
            }
        for (int64_t i = 0; i < width; i += LANES) store(source + i, load(head + i));
        if (page) std::memcpy(page, source, width * sizeof(T));
    }
}

template <class T>
static void mix(const Mix& m, T* qkv, T* pool, const float* norm) {
    if (m.rows < 16)
        for (int64_t row = 0; row < m.rows; row++) mix_row(m, row, qkv, pool, norm);
    else
        parallel(m.rows, [&](int64_t row) { mix_row(m, row, qkv, pool, norm); });
}

// ---------------------------------------------------------------------------------------------
// Norm and gated activation

// Small work is done at once: waking other threads costs some microseconds.
template <class Body>
static void over_rows(int64_t rows, int64_t width, const Body& body) {
    if (rows * width < 32768)
        for (int64_t row = 0; row < rows; row++) body(row);
    else
        parallel(rows, body);
}

template <class T>
static void rms_norm(const T* x, const float* weight, T* out, int64_t rows, int64_t width,
                     float eps) {
    const auto body = [&](int64_t row) {
        const T* source = x + row * width;
        T* target = out + row * width;
        vf squares = vf{};
        for (int64_t i = 0; i < width; i += LANES) {
            vf v = load(source + i);
            squares += v * v;
        }
        const float scale = 1.0f / std::sqrt(sum(squares) / width + eps);
        for (int64_t i = 0; i < width; i += LANES)
            store(target + i, load(source + i) * scale * load(weight + i));
    };
    over_rows(rows, width, body);
}

static inline vf silu(vf x) { return x / (1.0f + exponential(-x)); }

static inline vf gelu_tanh(vf x) {
    // 0.5 * (1 + tanh(z)) = 1 / (1 + e^(-2z))
    vf z = 0.7978845608f * (x + 0.044715f * x * x * x);
    return x / (1.0f + exponential(-2.0f * z));
}

template <class T>
static void gated(const T* gate_up, T* out, int64_t rows, int64_t width, int64_t kind) {
    const auto body = [&](int64_t row) {
        const T* gate = gate_up + row * 2 * width;
        const T* up = gate + width;
        T* target = out + row * width;
        if (kind == 0)
            for (int64_t i = 0; i < width; i += LANES)
                store(target + i, silu(load(gate + i)) * load(up + i));
        else
            for (int64_t i = 0; i < width; i += LANES)
                store(target + i, gelu_tanh(load(gate + i)) * load(up + i));
    };
    over_rows(rows, 4 * width, body);
}

Pool& pool() {
    static Pool* made = new Pool;
    return *made;
}

extern "C" {

int pippin_lanes() { return LANES; }

void pippin_threads(int threads) { pool().resize(threads); }

void pippin_mix(const Mix* m, void* qkv, void* pool, const float* norm) {
    if (m->dtype == 0)
        mix(*m, (float*)qkv, (float*)pool, norm);
    else
        mix(*m, (bf16*)qkv, (bf16*)pool, norm);
}

void pippin_rms_norm(int64_t dtype, const void* x, const float* weight, void* out, int64_t rows,
                     int64_t width, double eps) {
    if (dtype == 0)
        rms_norm((const float*)x, weight, (float*)out, rows, width, (float)eps);
    else
        rms_norm((const bf16*)x, weight, (bf16*)out, rows, width, (float)eps);
}

void pippin_gated(int64_t dtype, const void* gate_up, void* out, int64_t rows, int64_t width,
                  int64_t kind) {
    if (dtype == 0)
        gated((const float*)gate_up, (float*)out, rows, width, kind);
    else
        gated((const bf16*)gate_up, (bf16*)out, rows, width, kind);
}
}
