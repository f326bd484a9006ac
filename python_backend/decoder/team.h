// The threads that share the work of an operator.
//
// Work is cut into pieces, and whoever is free takes the next one: nobody waits for a thread that the system has put
// aside. OpenMP's teams do, at the end of every loop, and a step has 80: beside one other busy program it took 50 times
// as long.

#pragma once

#include <omp.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

namespace {

// The caller and as many helpers as its OpenMP setting allows, which is what torch.set_num_threads sets.
class Team {
  public:
    static Team& instance() {
        static Team* const team = new Team;  // its threads may still sleep when the process ends
        return *team;
    }

    // Calls piece(i) for all i below `count`, in any order, and returns when all are done. Of callers at the same time
    // one has the helpers; the others work alone.
    template <typename Piece>
    void run(int64_t count, const Piece& piece) {
        const int64_t helpers = std::min<int64_t>(omp_get_max_threads(), count) - 1;
        std::unique_lock<std::mutex> lock(callers_, std::defer_lock);
        if (helpers <= 0 || !lock.try_lock()) {
            for (int64_t i = 0; i < count; ++i) piece(i);
            return;
        }
        for (; num_threads_ < helpers; ++num_threads_) std::thread(&Team::help, this, num_threads_).detach();
        call_ = [](const void* piece, int64_t i) { (*static_cast<const Piece*>(piece))(i); };
        piece_ = &piece;
        count_ = count;
        helpers_ = helpers;
        num_done_ = 0;
        const uint32_t job = job_of(ticket_) + 1;
        ticket_ = static_cast<uint64_t>(job) << 32 | static_cast<uint64_t>(count);
        if (num_asleep_ > 0) {
            std::lock_guard<std::mutex> awake(sleep_);
            wake_.notify_all();
        }
        take_pieces(job);
        for (Patience patience; num_done_ < count;)
            if (!patience.lasts()) sched_yield();
    }

  private:
    static uint32_t job_of(uint64_t ticket) { return static_cast<uint32_t>(ticket >> 32); }

    // Some 100 microseconds of looking again: more than what lies between two operators of a step.
    class Patience {
      public:
        bool lasts() {
            for (int i = 0; i < 16; ++i) relax();
            return std::chrono::steady_clock::now() < end_;
        }

      private:
        static void relax() {
#if defined(__x86_64__)
            __builtin_ia32_pause();
#elif defined(__aarch64__)
            asm volatile("yield");
#endif
        }
        std::chrono::steady_clock::time_point end_ = std::chrono::steady_clock::now() + std::chrono::microseconds(100);
    };

    void help(int64_t number) {
        for (uint32_t job = 0;;) {
            job = wait_for_other(job);
            if (number < helpers_) take_pieces(job);
        }
    }

    // The pieces of a job until none are left. What is called is read between two looks at the ticket: only when
    // nothing is left of a job do its caller's next ones take its place.
    void take_pieces(uint32_t job) {
        for (uint64_t ticket = ticket_;;) {
            const int64_t left = static_cast<uint32_t>(ticket);
            const int64_t count = count_;
            const auto call = call_.load();
            const void* piece = piece_;
            if (job_of(ticket) != job || left == 0) return;
            if (!ticket_.compare_exchange_weak(ticket, ticket - 1)) continue;
            call(piece, count - left);
            ++num_done_;
            ticket = ticket_;
        }
    }

    uint32_t wait_for_other(uint32_t job) {
        for (Patience patience; patience.lasts();)
            if (job_of(ticket_) != job) return job_of(ticket_);
        std::unique_lock<std::mutex> lock(sleep_);
        ++num_asleep_;
        wake_.wait(lock, [&] { return job_of(ticket_) != job; });
        --num_asleep_;
        return job_of(ticket_);
    }

    std::mutex callers_, sleep_;
    std::condition_variable wake_;
    std::atomic<int64_t> num_asleep_{0}, helpers_{0}, count_{0};
    int64_t num_threads_ = 0;
    std::atomic<void (*)(const void*, int64_t)> call_{nullptr};
    std::atomic<const void*> piece_{nullptr};
    alignas(64) std::atomic<uint64_t> ticket_{0};  // number of the job, and how many of its pieces are left
    alignas(64) std::atomic<int64_t> num_done_{0};
};

// How many rows make a piece that is worth sharing.
inline int64_t rows_of(int64_t width) { return 1 + 16384 / width; }

// piece(first, last) over parts of `count` things of about `size` each.
template <typename Piece>
void share(int64_t count, int64_t size, const Piece& piece) {
    if (count <= size) {
        if (count > 0) piece(int64_t{0}, count);
        return;
    }
    const int64_t parts = (count + size - 1) / size;
    Team::instance().run(parts, [&](int64_t part) { piece(part * count / parts, (part + 1) * count / parts); });
}

}  // namespace
