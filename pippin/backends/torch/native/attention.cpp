// Attention over pages. See kernels.cpp for the conventions.
//
// A chunk is consecutive tokens of one sequence; its keys and values are in the pages already. A
// decode (one token) streams its context through registers, split between threads where it is long.
// Longer chunks go through the matrix product, a strip of rows against a tile of tokens at a time,
// with a running softmax (flash attention).

#include "multiply.h"
#include "pool.h"

struct Chunks {
    int64_t dtype, count, heads, kv_heads, width, block_size, max_blocks;
    int64_t head_stride;   // elements from one head of the pool to the next
    int64_t query_stride;  // elements from one row of queries to the next
    int64_t out_stride;
    int64_t window;  // tokens that a token sees, itself included; 0 for all
    double scale;
    const int64_t* rows;     // [count] first row of queries and of out
    const int64_t* lengths;  // [count] rows
    const int64_t* blocks;   // [count, max_blocks] pages; slots count from the first page's first
    const int64_t* lows;     // [count] first slot that any row sees
    const int64_t* starts;   // [count] slot of the first row's own token
};

static const int MAX_WIDTH = 512;  // of a head
static const int GROUP = 4;        // most query heads of one key head that a decode takes together
static const int SPLIT = 512;      // tokens of a decode's task
static const int AHEAD = 16;       // tokens that a decode's keys are fetched ahead
static const int TOKENS = 64;      // tokens whose scores are kept at once
static const int STRIP = 128;      // rows times query heads of one key head

static const float NOTHING = -std::numeric_limits<float>::infinity();

// The address of each token of [first, first + count), in elements from the head's first.
static void addresses(const Chunks& c, const int64_t* blocks, int64_t first, int64_t count,
                      int64_t* out) {
    int64_t block = first / c.block_size, offset = first % c.block_size;
    for (int64_t i = 0; i < count; i++) {
        out[i] = (blocks[block] * c.block_size + offset) * c.width;
        if (++offset == c.block_size) offset = 0, block++;
    }
}

// Exponentials of one row of scores, in place, for a running softmax: ``top`` and ``total`` so far.
// Returns what the values so far must be multiplied by.
static float soften(float* scores, int64_t count, float& top, float& total) {
    float highest = top;
    for (int64_t i = 0; i < count; i++) highest = std::max(highest, scores[i]);
    if (highest == NOTHING) {  // nothing seen yet, here neither
        std::fill(scores, scores + count, 0.0f);
        return 1.0f;
    }
    const float shrink = std::exp(top - highest);
    const int64_t padded = (count + LANES - 1) / LANES * LANES;
    for (int64_t i = count; i < padded; i++) scores[i] = NOTHING;
    vf sums = vf{};
    for (int64_t i = 0; i < padded; i += LANES) {
        const vf raw = load(scores + i);
        vf weight = exponential(raw - highest);
        weight = raw == NOTHING ? vf{} : weight;
        store(scores + i, weight);
        sums += weight;
    }
    total = total * shrink + sum(sums);
    top = highest;
    return shrink;
}

// ---------------------------------------------------------------------------------------------
// Decode

// One softmax over a part of the context.
struct Partial {
    float top[GROUP], total[GROUP];
};

template <class T, int G>
static void decode_part(const Chunks& c, const T* keys, const T* values, const int64_t* blocks,
                        int64_t first, int64_t last, const float* query, Partial& part,
                        float* acc) {
    const int64_t width = c.width;
    constexpr int UNROLL = G <= 2 ? 4 : 2;
    constexpr int COLUMNS = G <= 3 ? 4 : 2;  // vectors of a value that are summed together
    const int64_t line = 64 / (int64_t)sizeof(T);
    alignas(64) float scores[GROUP][TOKENS];
    int64_t at[TOKENS];
    for (int g = 0; g < G; g++) part.top[g] = NOTHING, part.total[g] = 0;
    std::fill(acc, acc + G * width, 0.0f);
    for (int64_t start = first; start < last; start += TOKENS) {
        const int count = (int)std::min<int64_t>(TOKENS, last - start);
        addresses(c, blocks, start, count, at);
        int i = 0;
        for (; i + UNROLL <= count; i += UNROLL) {
            // Values are read after all scores; pages begin where the hardware cannot foresee.
            for (int u = 0; u < UNROLL; u++)
                for (int64_t j = 0; j < width; j += line) {
                    __builtin_prefetch(values + at[i + u] + j);
                    if (i + u + AHEAD < count) __builtin_prefetch(keys + at[i + u + AHEAD] + j);
                }
            vf sums[UNROLL][G] = {};
            for (int64_t j = 0; j < width; j += LANES) {
                vf k[UNROLL];
                for (int u = 0; u < UNROLL; u++) k[u] = load(keys + at[i + u] + j);
                for (int g = 0; g < G; g++) {
                    const vf q = load(query + g * width + j);
                    for (int u = 0; u < UNROLL; u++) sums[u][g] += q * k[u];
                }
            }
            for (int u = 0; u < UNROLL; u++)
                for (int g = 0; g < G; g++) scores[g][i + u] = sum(sums[u][g]);
        }
        for (; i < count; i++)
            for (int g = 0; g < G; g++) {
                vf s = vf{};
                for (int64_t j = 0; j < width; j += LANES)
                    s += load(query + g * width + j) * load(keys + at[i] + j);
                scores[g][i] = sum(s);
            }
        float shrink[G];
        for (int g = 0; g < G; g++)
            shrink[g] = soften(scores[g], count, part.top[g], part.total[g]);
        int64_t j = 0;
        for (; j + COLUMNS * LANES <= width; j += COLUMNS * LANES) {
            vf sums[G][COLUMNS];
            for (int g = 0; g < G; g++)
                for (int v = 0; v < COLUMNS; v++)
                    sums[g][v] = load(acc + g * width + j + v * LANES) * shrink[g];
            for (int t = 0; t < count; t++)
#pragma GCC unroll 4
                for (int v = 0; v < COLUMNS; v++) {
                    const vf value = load(values + at[t] + j + v * LANES);
#pragma GCC unroll 4
                    for (int g = 0; g < G; g++) sums[g][v] += value * scores[g][t];
                }
            for (int g = 0; g < G; g++)
                for (int v = 0; v < COLUMNS; v++)
                    store(acc + g * width + j + v * LANES, sums[g][v]);
        }
        for (; j < width; j += LANES)
            for (int g = 0; g < G; g++) {
                vf s = load(acc + g * width + j) * shrink[g];
                for (int t = 0; t < count; t++) s += load(values + at[t] + j) * scores[g][t];
                store(acc + g * width + j, s);
            }
    }
}

struct Task {
    int64_t chunk, kv_head, group;  // a decode takes one group of query heads, a strip takes all
    int64_t first, last;            // tokens of a decode, rows of a strip
};

template <class T>
struct Call {
    const Chunks& c;
    const T* queries;
    const T* pool;
    const float* sinks;
    T* out;
    int64_t per_key = c.heads / c.kv_heads;

    const T* keys(const Task& task) const { return pool + task.kv_head * c.head_stride; }
    const T* values(const Task& task) const {
        return pool + (c.kv_heads + task.kv_head) * c.head_stride;
    }
    const int64_t* blocks(const Task& task) const { return c.blocks + task.chunk * c.max_blocks; }
    const T* query(int64_t row, int64_t head) const {
        return queries + row * c.query_stride + head * c.width;
    }
    T* target(int64_t row, int64_t head) const { return out + row * c.out_stride + head * c.width; }
    void scaled(int64_t row, int64_t head, float* to) const {
        const T* from = query(row, head);
        for (int64_t i = 0; i < c.width; i += LANES) store(to + i, load(from + i) * (float)c.scale);
    }

    void decode(const Task& task, Partial& part, float* acc) const {
        alignas(64) float query[GROUP * MAX_WIDTH];
        const int64_t head = task.kv_head * per_key + task.group * GROUP;
        const int64_t count = std::min<int64_t>(GROUP, (task.kv_head + 1) * per_key - head);
        for (int64_t g = 0; g < count; g++)
            scaled(c.rows[task.chunk], head + g, query + g * c.width);
        const auto part_of = count == 1   ? decode_part<T, 1>
                             : count == 2 ? decode_part<T, 2>
                             : count == 3 ? decode_part<T, 3>
                                          : decode_part<T, 4>;
        part_of(c, keys(task), values(task), blocks(task), task.first, task.last, query, part, acc);
    }

    // Joins the parts [begin, end) of one group of heads.
    void join(const Task& task, Partial* parts, const float* accs, int64_t count_parts) const {
        const int64_t width = c.width, room = GROUP * width;
        const int64_t head = task.kv_head * per_key + task.group * GROUP;
        const int64_t count = std::min<int64_t>(GROUP, (task.kv_head + 1) * per_key - head);
        for (int64_t g = 0; g < count; g++) {
            float top = sinks ? sinks[head + g] : NOTHING;
            for (int64_t p = 0; p < count_parts; p++) top = std::max(top, parts[p].top[g]);
            float total = sinks ? std::exp(sinks[head + g] - top) : 0;
            for (int64_t p = 0; p < count_parts; p++) {
                parts[p].top[g] = std::exp(parts[p].top[g] - top);
                total += parts[p].total[g] * parts[p].top[g];
            }
            T* to = target(c.rows[task.chunk], head + g);
            for (int64_t i = 0; i < width; i += LANES) {
                vf mixed = vf{};
                for (int64_t p = 0; p < count_parts; p++)
                    mixed += load(accs + p * room + g * width + i) * parts[p].top[g];
                store(to + i, mixed / total);
            }
        }
    }

    void strip(const Task& task) const;
};

// Rows [first, last) of a chunk, for all query heads of one key head.
template <class T>
void Call<T>::strip(const Task& task) const {
    const int64_t width = c.width, rows = task.last - task.first, lines = rows * per_key;
    const int64_t padded_width = (width + BLOCK - 1) / BLOCK * BLOCK;
    static thread_local std::vector<float> room;
    room.resize(lines * (width + TOKENS + padded_width + 2) + 2 * TOKENS * padded_width);
    float* x = room.data();                          // [lines, width] queries, scaled
    float* scores = x + lines * width;               // [lines, TOKENS]
    float* acc = scores + lines * TOKENS;            // [lines, padded_width]
    float* key_tile = acc + lines * padded_width;    // [TOKENS / BLOCK, width, BLOCK]
    float* value_tile = key_tile + TOKENS * padded_width;  // [TOKENS, padded_width]
    float* top = value_tile + TOKENS * padded_width;       // [lines]
    float* total = top + lines;
    const int64_t first_head = task.kv_head * per_key;
    for (int64_t row = 0; row < rows; row++)
        for (int64_t g = 0; g < per_key; g++)
            scaled(c.rows[task.chunk] + task.first + row, first_head + g,
                   x + (row * per_key + g) * width);
    std::fill(acc, acc + lines * padded_width, 0.0f);
    std::fill(value_tile, value_tile + TOKENS * padded_width, 0.0f);
    for (int64_t i = 0; i < lines; i++) {
        top[i] = sinks ? sinks[first_head + i % per_key] : NOTHING;
        total[i] = sinks ? 1.0f : 0.0f;
    }
    const T* keys_here = keys(task);
    const T* values_here = values(task);
    const int64_t own = c.starts[task.chunk] + task.first;  // slot of the strip's first row
    const int64_t end = own + rows;
    int64_t begin = c.lows[task.chunk];
    if (c.window) begin = std::max(begin, own - c.window + 1);
    int64_t at[TOKENS];
    for (int64_t start = begin; start < end; start += TOKENS) {
        const int64_t count = std::min<int64_t>(TOKENS, end - start);
        addresses(c, blocks(task), start, count, at);
        for (int64_t t = 0; t < TOKENS; t++) {
            float* column = key_tile + t / BLOCK * width * BLOCK + t % BLOCK;
            if (t < count) {
                for (int64_t i = 0; i < width; i++) column[i * BLOCK] = get(keys_here[at[t] + i]);
                for (int64_t i = 0; i < width; i += LANES)
                    store(value_tile + t * padded_width + i, load(values_here + at[t] + i));
            } else if (t < (count + BLOCK - 1) / BLOCK * BLOCK) {
                for (int64_t i = 0; i < width; i++) column[i * BLOCK] = 0;
            }
        }
        // Rows before this one see nothing of the tile.
        const int64_t blind = std::max<int64_t>(0, start - own);
        const int64_t from = blind * per_key, seeing = lines - from;
        std::fill(scores + from * TOKENS, scores + lines * TOKENS, 0.0f);
        for (int64_t t = 0; t < count; t += BLOCK)
            multiply_rows(key_tile + t * width, BLOCK, width, x + from * width, width, seeing,
                          scores + from * TOKENS + t, TOKENS);
        for (int64_t row = blind; row < rows; row++) {
            const int64_t seen_to = std::min(count, own + row + 1 - start);
            const int64_t seen_from =
                c.window ? std::max<int64_t>(0, own + row - c.window + 1 - start) : 0;
            for (int64_t g = 0; g < per_key; g++) {
                const int64_t i = row * per_key + g;
                float* line = scores + i * TOKENS;
                for (int64_t t = 0; t < std::min(seen_from, count); t++) line[t] = NOTHING;
                for (int64_t t = seen_to; t < count; t++) line[t] = NOTHING;
                const float shrink = soften(line, count, top[i], total[i]);
                if (shrink != 1.0f)
                    for (int64_t j = 0; j < width; j += LANES)
                        store(acc + i * padded_width + j,
                              load(acc + i * padded_width + j) * shrink);
            }
        }
        for (int64_t j = 0; j < padded_width; j += BLOCK)
            multiply_rows(value_tile + j, padded_width, count, scores + from * TOKENS, TOKENS,
                          seeing, acc + from * padded_width + j, padded_width);
    }
    for (int64_t row = 0; row < rows; row++)
        for (int64_t g = 0; g < per_key; g++) {
            const int64_t i = row * per_key + g;
            T* to = target(c.rows[task.chunk] + task.first + row, first_head + g);
            for (int64_t j = 0; j < width; j += LANES)
                store(to + j, load(acc + i * padded_width + j) / total[i]);
        }
}

template <class T>
static void attend(const Chunks& c, const T* queries, const T* pool, const float* sinks, T* out) {
    const Call<T> call{c, queries, pool, sinks, out};
    const int64_t per_key = c.heads / c.kv_heads;
    const int64_t groups = (per_key + GROUP - 1) / GROUP, height = std::max<int64_t>(1, STRIP / per_key);
    // The longest tasks first: late rows of chunks see most.
    std::vector<Task> strips, parts;
    std::vector<int64_t> joins;  // the first part of each group of heads of a decode
    for (int64_t chunk = 0; chunk < c.count; chunk++)
        for (int64_t kv_head = 0; kv_head < c.kv_heads; kv_head++) {
            if (c.lengths[chunk] > 1) {
                for (int64_t last = c.lengths[chunk]; last > 0; last -= height)
                    strips.push_back(
                        {chunk, kv_head, 0, std::max<int64_t>(0, last - height), last});
                continue;
            }
            for (int64_t group = 0; group < groups; group++) {
                joins.push_back((int64_t)parts.size());
                const int64_t end = c.starts[chunk] + 1;
                for (int64_t first = c.lows[chunk]; first < end; first += SPLIT)
                    parts.push_back({chunk, kv_head, group, first, std::min(end, first + SPLIT)});
            }
        }
    joins.push_back((int64_t)parts.size());
    const int64_t room = GROUP * c.width, num_strips = (int64_t)strips.size();
    std::vector<Partial> partials(parts.size());
    std::vector<float> accs(parts.size() * room);
    parallel(
        num_strips + (int64_t)parts.size(),
        [&](int64_t i) {
            if (i < num_strips)
                call.strip(strips[i]);
            else
                call.decode(parts[i - num_strips], partials[i - num_strips],
                            &accs[(i - num_strips) * room]);
        },
        16);
    for (size_t j = 0; j + 1 < joins.size(); j++)
        call.join(parts[joins[j]], &partials[joins[j]], &accs[joins[j] * room],
                  joins[j + 1] - joins[j]);
}

extern "C" {

void pippin_attend(const Chunks* c, const void* queries, const void* pool, const float* sinks,
                   void* out) {
    if (c->dtype == 0)
        attend(*c, (const float*)queries, (const float*)pool, sinks, (float*)out);
    else
        attend(*c, (const bf16*)queries, (const bf16*)pool, sinks, (bf16*)out);
}
}
