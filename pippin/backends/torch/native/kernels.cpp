// Kernels for the CPU that torch has no single operation for. Plain C interface, called through
// ctypes by ops.py, which also checks shapes. Compiled by build.py on the machine that runs them.
//
// Element types: 0 float32, 1 bfloat16. All arithmetic is in float32.

#include "pool.h"
#include "vectors.h"

// ---------------------------------------------------------------------------------------------
// Decode attention over pages

struct Decode {
    int64_t dtype, count, heads, kv_heads, width, block_size, max_blocks;
    int64_t head_stride;   // elements from one head of the pool to the next
    int64_t query_stride;  // elements from one row of queries to the next
    int64_t out_stride;
    double scale;
    const int64_t* rows;    // [count] row of queries and of out
    const int64_t* blocks;  // [count, max_blocks]
    const int64_t* lows;    // [count] first slot seen, counted from the first block
    const int64_t* ends;    // [count]
};

static const int CHUNK = 64;   // tokens whose scores are kept at once
static const int SPLIT = 512;  // tokens of a task: long contexts are shared between threads
static const int AHEAD = 16;   // tokens that keys are fetched ahead
static const int MAX_WIDTH = 512;  // of a head
static const int GROUP = 4;    // most query heads of one key head that are taken together

// One softmax over a part of the context: [GROUP] maxima, [GROUP] sums, [GROUP, width] values.
struct Partial {
    float top[GROUP], total[GROUP];
};

template <class T, int G>
static void attend_part(const T* keys, const T* values, int64_t head_offset, const Decode& d,
                        const int64_t* blocks, int64_t first, int64_t last, const float* query,
                        Partial& part, float* acc) {
    const int64_t width = d.width;
    constexpr int UNROLL = G <= 2 ? 4 : 2;
    alignas(64) float scores[GROUP][CHUNK];
    for (int g = 0; g < G; g++) part.top[g] = -std::numeric_limits<float>::infinity();
    for (int g = 0; g < G; g++) part.total[g] = 0;
    std::fill(acc, acc + G * width, 0.0f);
    for (int64_t start = first; start < last; start += CHUNK) {
        const int count = (int)std::min<int64_t>(CHUNK, last - start);
        const T* value_rows[CHUNK];
        const T* key_rows[CHUNK];
        int64_t block = start / d.block_size, offset = start % d.block_size;
        for (int i = 0; i < count; i++) {
            const int64_t at = head_offset + (blocks[block] * d.block_size + offset) * width;
            key_rows[i] = keys + at;
            value_rows[i] = values + at;
            if (++offset == d.block_size) offset = 0, block++;
        }
        int i = 0;
        for (; i + UNROLL <= count; i += UNROLL) {
            // Values are read after all scores; pages begin where the hardware cannot foresee.
            for (int u = 0; u < UNROLL; u++)
                for (int64_t c = 0; c < width; c += 64 / (int)sizeof(T))
                    __builtin_prefetch(value_rows[i + u] + c);
            for (int u = 0; u < UNROLL && i + u + AHEAD < count; u++)
                for (int64_t c = 0; c < width; c += 64 / (int)sizeof(T))
                    __builtin_prefetch(key_rows[i + u + AHEAD] + c);
            vf sums[UNROLL][G];
            for (int u = 0; u < UNROLL; u++)
                for (int g = 0; g < G; g++) sums[u][g] = vf{};
            for (int64_t c = 0; c < width; c += LANES) {
                vf k[UNROLL];
                for (int u = 0; u < UNROLL; u++) k[u] = load(key_rows[i + u] + c);
                for (int g = 0; g < G; g++) {
                    vf q = load(query + g * width + c);
                    for (int u = 0; u < UNROLL; u++) sums[u][g] += q * k[u];
                }
            }
            for (int u = 0; u < UNROLL; u++)
                for (int g = 0; g < G; g++) scores[g][i + u] = sum(sums[u][g]);
        }
        for (; i < count; i++)
            for (int g = 0; g < G; g++) {
                vf s = vf{};
                for (int64_t c = 0; c < width; c += LANES)
                    s += load(query + g * width + c) * load(key_rows[i] + c);
                scores[g][i] = sum(s);
            }
        const int padded = (count + LANES - 1) / LANES * LANES;
        for (int g = 0; g < G; g++) {
            for (int j = count; j < padded; j++)
                scores[g][j] = -std::numeric_limits<float>::infinity();
            float top = part.top[g];
            for (int j = 0; j < count; j++) top = std::max(top, scores[g][j]);
            if (top > part.top[g]) {
                const float shrink = std::exp(part.top[g] - top);
                part.total[g] *= shrink;
                for (int64_t c = 0; c < width; c += LANES)
                    store(acc + g * width + c, load(acc + g * width + c) * shrink);
                part.top[g] = top;
            }
            vf total = vf{};
            for (int j = 0; j < padded; j += LANES) {
                vf weight = exponential(load(&scores[g][j]) - top);
                store(&scores[g][j], weight);
            }
            for (int j = count; j < padded; j++) scores[g][j] = 0;
            for (int j = 0; j < padded; j += LANES) total += load(&scores[g][j]);
            part.total[g] += sum(total);
        }
        for (int64_t c = 0; c < width; c += LANES) {
            vf sums[G];
            for (int g = 0; g < G; g++) sums[g] = load(acc + g * width + c);
            for (int j = 0; j < count; j++) {
                vf v = load(value_rows[j] + c);
                for (int g = 0; g < G; g++) sums[g] += v * scores[g][j];
            }
            for (int g = 0; g < G; g++) store(acc + g * width + c, sums[g]);
        }
    }
}

template <class T>
static void attend(const Decode& d, const T* queries, const T* pool, const float* sinks, T* out) {
    const int64_t width = d.width, per_key = d.heads / d.kv_heads;
    const int64_t groups = (per_key + GROUP - 1) / GROUP;
    struct Task {
        int64_t seq, kv_head, group, first, last;
    };
    std::vector<Task> tasks;
    std::vector<int64_t> starts;  // of each (sequence, key head, group) in tasks
    for (int64_t seq = 0; seq < d.count; seq++)
        for (int64_t kv_head = 0; kv_head < d.kv_heads; kv_head++)
            for (int64_t group = 0; group < groups; group++) {
                starts.push_back((int64_t)tasks.size());
                for (int64_t first = d.lows[seq]; first < d.ends[seq]; first += SPLIT)
                    tasks.push_back(
                        {seq, kv_head, group, first, std::min(d.ends[seq], first + SPLIT)});
            }
    starts.push_back((int64_t)tasks.size());
    const int64_t room = GROUP * width;
    std::vector<Partial> partials(tasks.size());
    std::vector<float> values(tasks.size() * room);
    const T* keys = pool;
    const T* pool_values = pool + d.kv_heads * d.head_stride;
    const int64_t units = (int64_t)starts.size() - 1;
    parallel(
        (int64_t)tasks.size(),
        [&](int64_t t) {
            alignas(64) float query[GROUP * MAX_WIDTH];
            const Task& task = tasks[t];
            const int64_t head = task.kv_head * per_key + task.group * GROUP;
            const int64_t count = std::min<int64_t>(GROUP, (task.kv_head + 1) * per_key - head);
            const T* source = queries + d.rows[task.seq] * d.query_stride + head * width;
            for (int64_t i = 0; i < count * width; i += LANES)
                store(query + i, load(source + i) * (float)d.scale);
            const int64_t offset = task.kv_head * d.head_stride;
            const int64_t* blocks = d.blocks + task.seq * d.max_blocks;
            Partial& part = partials[t];
            float* acc = &values[t * room];
            switch (count) {
                case 1: attend_part<T, 1>(keys, pool_values, offset, d, blocks, task.first, task.last, query, part, acc); break;
                case 2: attend_part<T, 2>(keys, pool_values, offset, d, blocks, task.first, task.last, query, part, acc); break;
                case 3: attend_part<T, 3>(keys, pool_values, offset, d, blocks, task.first, task.last, query, part, acc); break;
                default: attend_part<T, 4>(keys, pool_values, offset, d, blocks, task.first, task.last, query, part, acc); break;
            }
        },
        16);
    for (int64_t unit = 0; unit < units; unit++) {
            const int64_t begin = starts[unit], end = starts[unit + 1];
            const Task& task = tasks[begin];
            const int64_t head = task.kv_head * per_key + task.group * GROUP;
            const int64_t count = std::min<int64_t>(GROUP, (task.kv_head + 1) * per_key - head);
            T* target = out + d.rows[task.seq] * d.out_stride + head * width;
            for (int64_t g = 0; g < count; g++) {
                float top = sinks ? sinks[head + g] : partials[begin].top[g];
                for (int64_t t = begin; t < end; t++) top = std::max(top, partials[t].top[g]);
                float total = sinks ? std::exp(sinks[head + g] - top) : 0;
                for (int64_t t = begin; t < end; t++) {
                    partials[t].top[g] = std::exp(partials[t].top[g] - top);
                    total += partials[t].total[g] * partials[t].top[g];
                }
                for (int64_t c = 0; c < width; c += LANES) {
                    vf mixed = vf{};
                    for (int64_t t = begin; t < end; t++)
                        mixed += load(&values[t * room + g * width + c]) * partials[t].top[g];
                    store(target + g * width + c, mixed / total);
                }
            }
        }
}

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

void pippin_attend(const Decode* d, const void* queries, const void* pool, const float* sinks,
                   void* out) {
    if (d->dtype == 0)
        attend(*d, (const float*)queries, (const float*)pool, sinks, (float*)out);
    else
        attend(*d, (const bf16*)queries, (const bf16*)pool, sinks, (bf16*)out);
}

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
