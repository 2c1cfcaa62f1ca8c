// Threads that share the tasks of one job at a time.
//
// Tasks are claimed one after the other, so a thread that the system does not run right now holds
// up nothing that it has not begun: with a barrier for all threads (OpenMP), each job on a busy
// machine waits until every thread had its turn. Slow cores simply claim less.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
static inline void relax() { _mm_pause(); }
#else
static inline void relax() {}
#endif

class Pool {
  public:
    void resize(int threads) {
        for (; size_ < threads - 1; size_++) std::thread([this] { work(); }).detach();
        active_ = threads;
    }

    int threads() const { return active_; }

    // Runs function(context, i) for every i in [0, total), and returns when all are done.
    void run(int64_t total, void (*function)(void*, int64_t), void* context) {
        if (total <= 1 || active_ <= 1) {
            for (int64_t i = 0; i < total; i++) function(context, i);
            return;
        }
        // No claim can succeed while the next task's number is CLOSED, so the job may change.
        const uint64_t job = ((ticket_.load(std::memory_order_relaxed) >> 32) + 1) << 32;
        ticket_.store(job | CLOSED, std::memory_order_seq_cst);
        function_.store(function, std::memory_order_relaxed);
        context_.store(context, std::memory_order_relaxed);
        total_.store(total, std::memory_order_relaxed);
        done_.store(0, std::memory_order_relaxed);
        ticket_.store(job, std::memory_order_seq_cst);
        if (sleeping_.load(std::memory_order_seq_cst)) ticket_.notify_all();
        while (claim()) {
        }
        for (int spins = 0; done_.load(std::memory_order_acquire) != total; spins++)
            if (spins < PATIENCE)
                relax();
            else
                std::this_thread::yield();
    }

  private:
    static const uint64_t CLOSED = 0xffffffff;
    static const int PATIENCE = 2000;  // spins before a thread lets others have its core

    bool claim() {
        uint64_t ticket = ticket_.load(std::memory_order_acquire);
        const auto function = function_.load(std::memory_order_relaxed);
        const auto context = context_.load(std::memory_order_relaxed);
        const int64_t total = total_.load(std::memory_order_relaxed);
        const int64_t task = ticket & CLOSED;
        if (task >= total || (uint64_t)task == CLOSED) return false;
        if (!ticket_.compare_exchange_strong(ticket, ticket + 1, std::memory_order_acq_rel))
            return true;
        function(context, task);
        done_.fetch_add(1, std::memory_order_release);
        return true;
    }

    void work() {
        for (int spins = 0;; spins++) {
            if (claim()) {
                spins = 0;
                continue;
            }
            if (spins < PATIENCE) {
                relax();
                continue;
            }
            const uint64_t seen = ticket_.load(std::memory_order_seq_cst);
            sleeping_.fetch_add(1, std::memory_order_seq_cst);
            if ((int64_t)(seen & CLOSED) >= total_.load(std::memory_order_relaxed))
                ticket_.wait(seen, std::memory_order_seq_cst);
            sleeping_.fetch_sub(1, std::memory_order_seq_cst);
            spins = 0;
        }
    }

    alignas(64) std::atomic<uint64_t> ticket_{CLOSED};  // job number, number of the next task
    alignas(64) std::atomic<int64_t> done_{0};
    alignas(64) std::atomic<void (*)(void*, int64_t)> function_{nullptr};
    std::atomic<void*> context_{nullptr};
    std::atomic<int64_t> total_{0};
    std::atomic<int> sleeping_{0};
    int size_ = 0, active_ = 1;
};

// Never destroyed: its threads run to the end of the process.
Pool& pool();

// body(i) for every i in [0, count), in at most `parts` pieces a thread.
template <class Body>
static inline void parallel(int64_t count, const Body& body, int parts = 8) {
    const int64_t pieces = std::min<int64_t>(count, (int64_t)pool().threads() * parts);
    struct Job {
        const Body& body;
        int64_t count, pieces;
    } job{body, count, pieces};
    pool().run(
        pieces,
        [](void* context, int64_t piece) {
            const Job& job = *(const Job*)context;
            const int64_t end = job.count * (piece + 1) / job.pieces;
            for (int64_t i = job.count * piece / job.pieces; i < end; i++) job.body(i);
        },
        &job);
}
