// Sums over the ranks of one host, through memory that they share.
//
// The region has a page of counters, one a rank in a cache line of its own, and behind it two
// buffers a rank. In each turn every rank copies its part into its buffer (they take turns), raises
// its counter, waits for all counters and reads. A buffer is written again two turns later, which
// its owner reaches only after all others have raised their counters for the turn between: they
// have read it by then.

#include <sched.h>
#include <time.h>

#include "pool.h"
#include "vectors.h"

struct Exchange {
    int64_t rank, size, capacity;  // bytes of a buffer
    uint8_t* shared;
    int64_t turn;       // that this rank has begun
    int64_t done;       // elements or bytes of the present call that are through
    int64_t published;  // whether this rank's part of the present turn is in its buffer
};

static const int64_t COUNTERS = 4096;  // bytes, as are these:
static const int64_t LINE = 128;       // two cache lines: they are fetched in pairs

static const int PATIENCE = 200;           // spins before others may have the core
static const int64_t WAKEFUL = 5'000'000;  // ns until it sleeps between looks
static const int64_t NAP = 100'000;        // ns

static inline std::atomic<int64_t>& counter(const Exchange& e, int64_t rank) {
    return *(std::atomic<int64_t>*)(e.shared + rank * LINE);
}

static inline uint8_t* buffer(const Exchange& e, int64_t rank) {
    return e.shared + COUNTERS + (2 * rank + (e.turn & 1)) * e.capacity;
}

static int64_t now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1'000'000'000 + t.tv_nsec;
}

static void publish(Exchange& e) {
    counter(e, e.rank).store(e.turn, std::memory_order_release);
    e.published = 1;
}

// A rank that has not come to this turn in so many ns, or -1 when all are there.
static int64_t missing(const Exchange& e, int64_t patience) {
    int64_t begun = 0;
    for (int64_t rank = 0; rank < e.size; rank++)
        for (int spins = 0; counter(e, rank).load(std::memory_order_acquire) < e.turn; spins++) {
            if (spins < PATIENCE) {
                relax();
                continue;
            }
            const int64_t time = now();
            if (!begun) begun = time;
            if (time - begun > patience) return rank;
            if (time - begun < WAKEFUL) {
                sched_yield();
            } else {
                const timespec nap{0, NAP};
                nanosleep(&nap, nullptr);
            }
        }
    return -1;
}

// body(first, last) over [0, count) in vectors, by all threads where it pays.
template <class Body>
static void in_pieces(int64_t count, const Body& body) {
    const int64_t piece = 8192;
    if (count <= 2 * piece) return body((int64_t)0, count);
    parallel((count + piece - 1) / piece, [&](int64_t i) {
        body(i * piece, std::min(count, (i + 1) * piece));
    });
}

// out = residual + (part of rank 0 + part of rank 1 + ...), always in this order: every rank gets
// the same bits.
template <class T>
static int64_t reduce(Exchange& e, const T* x, int64_t count, const T* residual, T* out,
                      int64_t patience) {
    const int64_t most = e.capacity / sizeof(T);
    for (; e.done < count; e.done += std::min(most, count - e.done)) {
        const int64_t size = std::min(most, count - e.done);
        if (!e.published) {
            e.turn++;
            T* own = (T*)buffer(e, e.rank);
            const T* from = x + e.done;
            in_pieces(size, [&](int64_t first, int64_t last) {
                std::memcpy(own + first, from + first, (last - first) * sizeof(T));
            });
            publish(e);
        }
        const int64_t rank = missing(e, patience);
        if (rank >= 0) return rank;
        const T* more = residual ? residual + e.done : nullptr;
        T* to = out + e.done;
        in_pieces(size, [&](int64_t first, int64_t last) {
            const T* parts = (const T*)buffer(e, 0);
            const int64_t stride = 2 * e.capacity / sizeof(T);
            int64_t i = first;
            for (; i + LANES <= last; i += LANES) {
                vf sum = load(parts + i);
                for (int64_t r = 1; r < e.size; r++) sum += load(parts + r * stride + i);
                if (more) sum += load(more + i);
                store(to + i, sum);
            }
            for (; i < last; i++) {
                float sum = get(parts[i]);
                for (int64_t r = 1; r < e.size; r++) sum += get(parts[r * stride + i]);
                if (more) sum += get(more[i]);
                put(to + i, sum);
            }
        });
        e.published = 0;
    }
    e.done = 0;
    return -1;
}

// Bytes [first, last) of a part of rows of `width` bytes, into columns of `out`.
static void place(const uint8_t* from, int64_t first, int64_t last, int64_t width, uint8_t* out,
                  int64_t out_width) {
    while (first < last) {
        const int64_t row = first / width, column = first % width;
        const int64_t size = std::min(width - column, last - first);
        std::memcpy(out + row * out_width + column, from, size);
        from += size;
        first += size;
    }
}

extern "C" {

// Both return -1 when done, or the number of a rank that did not come within `patience` ns: the
// same call again goes on waiting.
int64_t pippin_reduce(Exchange* e, int64_t dtype, const void* x, int64_t count,
                      const void* residual, void* out, int64_t patience) {
    if (dtype == 0)
        return reduce(*e, (const float*)x, count, (const float*)residual, (float*)out, patience);
    return reduce(*e, (const bf16*)x, count, (const bf16*)residual, (bf16*)out, patience);
}

// Parts [rows, widths[rank] bytes] side by side in rank 0's `out`.
int64_t pippin_gather(Exchange* e, const uint8_t* part, int64_t rows, const int64_t* widths,
                      uint8_t* out, int64_t patience) {
    int64_t longest = 0, out_width = 0;
    for (int64_t r = 0; r < e->size; r++) {
        longest = std::max(longest, widths[r] * rows);
        out_width += widths[r];
    }
    for (; e->done < longest; e->done += e->capacity) {
        const auto end = [&](int64_t r) { return std::min(widths[r] * rows, e->done + e->capacity); };
        if (!e->published) {
            e->turn++;
            const int64_t size = end(e->rank) - e->done;
            if (size > 0 && e->rank == 0)
                place(part + e->done, e->done, end(0), widths[0], out, out_width);
            else if (size > 0)
                std::memcpy(buffer(*e, e->rank), part + e->done, size);
            publish(*e);
        }
        const int64_t rank = missing(*e, patience);
        if (rank >= 0) return rank;
        if (e->rank == 0) {
            uint8_t* column = out + widths[0];
            for (int64_t r = 1; r < e->size; column += widths[r++])
                place(buffer(*e, r), e->done, end(r), widths[r], column, out_width);
        }
        e->published = 0;
    }
    e->done = 0;
    return -1;
}
}
