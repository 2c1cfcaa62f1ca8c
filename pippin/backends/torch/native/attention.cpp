// Attention over pages. See kernels.cpp for the conventions.
//
// A chunk is consecutive tokens of one sequence; its keys and values are in the pages already. A
// decode (one token) streams its context through registers, split between threads where it is long.
// Longer chunks go through matrix products, a strip of rows against a tile of tokens at a time, with
// a running softmax (flash attention). A strip's rows lie side by side in vectors, so keys and values
// are read from the pages as they stand and no sum runs across a vector. Where there are few strips,
// their context is split between threads too.

#include "pool.h"
#include "vectors.h"

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
static const int SIDE = 2 * LANES;  // lines of a strip that are computed together
static const int STRIP = 4 * SIDE;  // most lines: rows times query heads of one key head
static const int SHARE = 256;       // fewest tokens of a part of a strip
#if LANES == 16
static const int ROWS = 8;  // 2 * ROWS accumulators
#else
static const int ROWS = 4;
#endif

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
    int64_t part = 0, parts = 1;    // of the context of a strip
    int64_t at = 0;                 // where a part of a strip leaves its result, in lines
};

// ---------------------------------------------------------------------------------------------
// Strips

// acc[m][0 : V * LANES] += sum over k of x[m * step + k * stride] * tile[k][0 : V * LANES]; rows of
// tile and acc are SIDE apart. Fetches ``count`` times PACE bytes from ``ahead``: so evenly that the
// core's few line buffers never fill up, which would stall it.
static const int PACE = ROWS * 4;

template <int M, int V>
static void product(const float* tile, int64_t count, const float* x, int64_t step, int64_t stride,
                    float* acc, const char* ahead) {
    vf sums[M][V];
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 2
        for (int v = 0; v < V; v++) sums[m][v] = load(acc + m * SIDE + v * LANES);
    for (int64_t k = 0; k < count; k++, tile += SIDE, x += stride) {
        __builtin_prefetch(ahead + k * PACE);
        vf w[V];
#pragma GCC unroll 2
        for (int v = 0; v < V; v++) w[v] = load(tile + v * LANES);
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            const float value = x[m * step];
#pragma GCC unroll 2
            for (int v = 0; v < V; v++) sums[m][v] += w[v] * value;
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 2
        for (int v = 0; v < V; v++) store(acc + m * SIDE + v * LANES, sums[m][v]);
}

// ``ahead(row)`` is what is fetched during the products of ROWS rows.
template <int V, class Ahead>
static void products(const float* tile, int64_t count, const float* x, int64_t step, int64_t stride,
                     int64_t rows, float* acc, const Ahead& ahead) {
    int64_t row = 0;
    for (; row + ROWS <= rows; row += ROWS)
        product<ROWS, V>(tile, count, x + row * step, step, stride, acc + row * SIDE, ahead(row));
    if (ROWS == 8 && row + 4 <= rows) {
        product<4, V>(tile, count, x + row * step, step, stride, acc + row * SIDE, ahead(row));
        row += 4;
    }
    for (; row < rows; row++)
        product<1, V>(tile, count, x + row * step, step, stride, acc + row * SIDE, (char*)x);
}

// A running softmax of SIDE lines.
struct Running {
    alignas(64) float top[SIDE], total[SIDE];
};

// Scores [count, SIDE] become their exponentials, the values so far [width, SIDE] are scaled to fit.
template <int V>
static void soften_side(float* scores, int64_t count, Running& running, float* acc, int64_t width) {
    for (int v = 0; v < V; v++) {
        const vf before = load(running.top + v * LANES);
        vf top = before;
        for (int64_t t = 0; t < count; t++) {
            const vf score = load(scores + t * SIDE + v * LANES);
            top = score > top ? score : top;
        }
        const vf nothing = splat(NOTHING);
        // Where nothing was seen so far, here neither, any base will do.
        const vf base = top == nothing ? vf{} : top;
        const vf shrink = before == nothing ? vf{} : exponential(before - base);
        vf total = load(running.total + v * LANES) * shrink;
        for (int64_t t = 0; t < count; t++) {
            const vf score = load(scores + t * SIDE + v * LANES);
            vf weight = exponential(score - base);
            weight = score == nothing ? vf{} : weight;
            store(scores + t * SIDE + v * LANES, weight);
            total += weight;
        }
        for (int64_t i = 0; i < width; i++)
            store(acc + i * SIDE + v * LANES, load(acc + i * SIDE + v * LANES) * shrink);
        store(running.top + v * LANES, top);
        store(running.total + v * LANES, total);
    }
}

// One tile of tokens for SIDE lines: ``queries`` [width, SIDE], ``keys`` and ``values`` [count, width].
template <int V, class Mask, class Ahead>
static void tile_side(const float* queries, const float* keys, const float* values, int64_t count,
                      int64_t width, Running& running, float* acc, const Mask& mask,
                      const Ahead& ahead) {
    alignas(64) float scores[TOKENS * SIDE];
    for (int64_t t = 0; t < count; t++)
        for (int v = 0; v < V; v++) store(scores + t * SIDE + v * LANES, vf{});
    products<V>(queries, width, keys, width, 1, count, scores,
                [&](int64_t row) { return ahead(row, 0); });
    mask(scores);
    soften_side<V>(scores, count, running, acc, width);
    products<V>(scores, count, values, 1, width, width, acc,
                [&](int64_t row) { return ahead(row * TOKENS / width, 1); });
}

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

    void strip(const Task& task, float* partial) const;
    void join_strip(const Task& task, const float* partials) const;
};

// [TOKENS, width] of the pages as float32: where they lie if they follow each other, else a copy.
template <class T>
static const float* gather(const T* pages, const int64_t* at, int64_t count, int64_t width,
                           float* room) {
    bool neighbours = sizeof(T) == 4;
    for (int64_t t = 1; t < count; t++) neighbours &= at[t] == at[t - 1] + width;
    if (neighbours) return (const float*)(pages + at[0]);
    for (int64_t t = 0; t < count; t++)
        for (int64_t i = 0; i < width; i += LANES)
            store(room + t * width + i, load(pages + at[t] + i));
    return room;
}

// Rows [first, last) of a chunk, for all query heads of one key head. A part of the context leaves
// top, total and values of each line in ``partial`` [lines, width + 2].
template <class T>
void Call<T>::strip(const Task& task, float* partial) const {
    const int64_t width = c.width, rows = task.last - task.first, lines = rows * per_key;
    const int64_t sides = (lines + SIDE - 1) / SIDE;
    static thread_local std::vector<float> room;
    static thread_local std::vector<Running> running;
    room.resize(2 * (sides * SIDE + TOKENS) * width + 16);
    running.resize(sides);
    float* queries = room.data();                // [sides, width, SIDE], scaled
    queries += 15 - ((uintptr_t)queries / 4 + 15) % 16;  // whole vectors in a cache line
    float* acc = queries + sides * SIDE * width;  // [sides, width, SIDE]
    float* key_room = acc + sides * SIDE * width;
    float* value_room = key_room + TOKENS * width;
    const int64_t first_head = task.kv_head * per_key;
    std::fill(queries, acc + sides * SIDE * width, 0.0f);
    for (int64_t i = 0; i < sides * SIDE; i++) {
        const bool sink = sinks && task.part == 0;
        Running& side = running[i / SIDE];
        side.top[i % SIDE] = sink ? sinks[first_head + i % per_key] : NOTHING;
        side.total[i % SIDE] = sink ? 1.0f : 0.0f;
        if (i >= lines) continue;
        const T* from = query(c.rows[task.chunk] + task.first + i / per_key, first_head + i % per_key);
        float* column = queries + i / SIDE * SIDE * width + i % SIDE;
        for (int64_t j = 0; j < width; j++) column[j * SIDE] = get(from[j]) * (float)c.scale;
    }
    const int64_t own = c.starts[task.chunk] + task.first;  // slot of the strip's first row
    int64_t begin = c.lows[task.chunk], end = own + rows;
    if (c.window) begin = std::max(begin, own - c.window + 1);
    if (task.parts > 1) {
        const int64_t tiles = (end - begin + TOKENS - 1) / TOKENS, low = begin;
        begin = low + tiles * task.part / task.parts * TOKENS;
        end = std::min(end, low + tiles * (task.part + 1) / task.parts * TOKENS);
    }
    int64_t at[TOKENS], next[TOKENS];
    const T* pages[2] = {keys(task), values(task)};
    if (begin < end)
        addresses(c, blocks(task), begin, std::min<int64_t>(TOKENS, end - begin), next);
    for (int64_t start = begin; start < end; start += TOKENS) {
        const int64_t count = std::min<int64_t>(TOKENS, end - start);
        std::memcpy(at, next, count * sizeof(int64_t));
        const int64_t coming = std::clamp<int64_t>(end - start - TOKENS, 0, TOKENS);
        if (coming) addresses(c, blocks(task), start + TOKENS, coming, next);
        const float* keys_here = gather(keys(task), at, count, width, key_room);
        const float* values_here = gather(values(task), at, count, width, value_room);
        // Rows before this one see nothing of the tile.
        const int64_t blind = std::max<int64_t>(0, start - own);
        const bool masked = start + count - 1 > own ||
                            (c.window && start < own + rows - c.window);
        for (int64_t side = blind * per_key / SIDE; side < sides; side++) {
            const int64_t first = side * SIDE, used = std::min<int64_t>(SIDE, lines - first);
            const auto mask = [&](float* scores) {
                if (!masked) return;
                for (int64_t i = 0; i < used; i++) {
                    const int64_t slot = own + (first + i) / per_key - start;  // of the row itself
                    const int64_t seen_to = std::clamp<int64_t>(slot + 1, 0, count);
                    const int64_t seen_from =
                        c.window ? std::clamp<int64_t>(slot - c.window + 1, 0, count) : 0;
                    for (int64_t t = 0; t < seen_from; t++) scores[t * SIDE + i] = NOTHING;
                    for (int64_t t = seen_to; t < count; t++) scores[t * SIDE + i] = NOTHING;
                }
            };
            // The next tile's keys and values, while the last lines of this one are computed.
            const auto ahead = [&](int64_t token, int which) {
                return side + 1 == sides && token < coming ? (const char*)(pages[which] + next[token])
                                                           : (const char*)keys_here;
            };
            const auto tile = used > LANES ? tile_side<2, decltype(mask), decltype(ahead)>
                                           : tile_side<1, decltype(mask), decltype(ahead)>;
            tile(queries + first * width, keys_here, values_here, count, width, running[side],
                 acc + first * width, mask, ahead);
        }
    }
    for (int64_t i = 0; i < lines; i++) {
        const Running& side = running[i / SIDE];
        const float* column = acc + i / SIDE * SIDE * width + i % SIDE;
        if (partial) {
            float* to = partial + i * (width + 2);
            to[width] = side.top[i % SIDE];
            to[width + 1] = side.total[i % SIDE];
            for (int64_t j = 0; j < width; j++) to[j] = column[j * SIDE];
        } else {
            T* to = target(c.rows[task.chunk] + task.first + i / per_key, first_head + i % per_key);
            const float share = 1.0f / side.total[i % SIDE];
            for (int64_t j = 0; j < width; j++) put(to + j, column[j * SIDE] * share);
        }
    }
}

// Joins the parts of a strip, which left ``partials`` [parts, lines, width + 2].
template <class T>
void Call<T>::join_strip(const Task& task, const float* partials) const {
    const int64_t width = c.width, lines = (task.last - task.first) * per_key;
    alignas(64) float sums[MAX_WIDTH];
    for (int64_t i = 0; i < lines; i++) {
        const auto part = [&](int64_t p) { return partials + (p * lines + i) * (width + 2); };
        float top = NOTHING, total = 0;
        for (int64_t p = 0; p < task.parts; p++) top = std::max(top, part(p)[width]);
        std::fill(sums, sums + width, 0.0f);
        for (int64_t p = 0; p < task.parts; p++) {
            const float share = std::exp(part(p)[width] - top);
            total += part(p)[width + 1] * share;
            for (int64_t j = 0; j < width; j++) sums[j] += part(p)[j] * share;
        }
        T* to = target(c.rows[task.chunk] + task.first + i / per_key,
                       task.kv_head * per_key + i % per_key);
        for (int64_t j = 0; j < width; j++) put(to + j, sums[j] / total);
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
    int64_t num_strips = 0, lines = 0;
    for (int64_t chunk = 0; chunk < c.count; chunk++)
        if (c.lengths[chunk] > 1) num_strips += (c.lengths[chunk] + height - 1) / height * c.kv_heads;
    // So many that no thread waits long for the last one.
    const int64_t wanted = num_strips ? (4 * ::pool().threads() + num_strips - 1) / num_strips : 1;
    for (int64_t chunk = 0; chunk < c.count; chunk++)
        for (int64_t kv_head = 0; kv_head < c.kv_heads; kv_head++) {
            const int64_t end = c.starts[chunk] + c.lengths[chunk];
            if (c.lengths[chunk] > 1) {
                int64_t seen = end - c.lows[chunk];
                if (c.window) seen = std::min(seen, c.window + height);
                const int64_t split =
                    ::pool().threads() > 1 ? std::clamp<int64_t>(seen / SHARE, 1, wanted) : 1;
                for (int64_t last = c.lengths[chunk]; last > 0; last -= height)
                    for (int64_t part = 0; part < split; part++) {
                        const int64_t first = std::max<int64_t>(0, last - height);
                        strips.push_back({chunk, kv_head, 0, first, last, part, split, lines});
                        if (split > 1) lines += (last - first) * per_key;
                    }
                continue;
            }
            for (int64_t group = 0; group < groups; group++) {
                joins.push_back((int64_t)parts.size());
                for (int64_t first = c.lows[chunk]; first < end; first += SPLIT)
                    parts.push_back({chunk, kv_head, group, first, std::min(end, first + SPLIT)});
            }
        }
    joins.push_back((int64_t)parts.size());
    num_strips = (int64_t)strips.size();
    const int64_t room = GROUP * c.width;
    std::vector<Partial> partials(parts.size());
    std::vector<float> accs(parts.size() * room), strip_parts(lines * (c.width + 2));
    parallel(
        num_strips + (int64_t)parts.size(),
        [&](int64_t i) {
            if (i < num_strips)
                call.strip(strips[i], strips[i].parts > 1 ? &strip_parts[strips[i].at * (c.width + 2)]
                                                          : nullptr);
            else
                call.decode(parts[i - num_strips], partials[i - num_strips],
                            &accs[(i - num_strips) * room]);
        },
        16);
    for (const Task& task : strips)
        if (task.parts > 1 && task.part == 0)
            call.join_strip(task, &strip_parts[task.at * (c.width + 2)]);
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
