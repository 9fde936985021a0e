// Threads that work on parallel loops together, and the float environment that they do it in.

#pragma once

#include <atomic>
#include <cfenv>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <pthread.h>
#include <system_error>
#include <thread>

namespace hz {

using Task = void (*)(const void* context, int64_t chunk);

// One parallel loop. Whoever called it works on it as well, so it finishes even when every helper is busy elsewhere.
struct Loop {
    const Task task;
    const void* const context;
    const int64_t num_chunks;
    int wanted_helpers = 0;
    int active_helpers = 0;
    std::atomic<int64_t> next{0};
    std::condition_variable idle;

    Loop(Task task_, const void* context_, int64_t num_chunks_)
        : task(task_), context(context_), num_chunks(num_chunks_) {}

    void work() {
        for (int64_t chunk; (chunk = next.fetch_add(1, std::memory_order_relaxed)) < num_chunks;) task(context, chunk);
    }
};

// Rounding mode and flush-to-zero are inherited from whichever thread comes along; the arithmetic must not depend on it.
class DefaultFloatEnvironment {
  public:
    DefaultFloatEnvironment() {
        std::fegetenv(&before_);
        std::fesetenv(FE_DFL_ENV);
    }
    ~DefaultFloatEnvironment() { std::fesetenv(&before_); }
    DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
    DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

  private:
    std::fenv_t before_;
};

// Helpers are started on demand and sleep between loops; several loops may run at the same time.
class Pool {
  public:
    void run(Task task, const void* context, int64_t num_chunks, int num_threads) {
        DefaultFloatEnvironment environment;
        Loop loop(task, context, num_chunks);
        const int helpers = static_cast<int>(num_chunks < num_threads ? num_chunks : num_threads) - 1;
        if (helpers <= 0) {
            loop.work();
            return;
        }
        std::unique_lock<std::mutex> lock(mutex_);
        start_helpers(helpers);
        loop.wanted_helpers = helpers;
        waiting_.push_back(&loop);
        wake_.notify_all();
        lock.unlock();
        loop.work();
        lock.lock();
        for (auto it = waiting_.begin(); it != waiting_.end(); ++it) {
            if (*it == &loop) {
                waiting_.erase(it);
                break;
            }
        }
        loop.idle.wait(lock, [&] { return loop.active_helpers == 0; });
    }

  private:
    void start_helpers(int count) {
        try {
            for (; num_helpers_ < count; ++num_helpers_) {
                std::thread helper(&Pool::help, this);
                pthread_setname_np(helper.native_handle(), "horizon-adamw");
                helper.detach();
            }
        } catch (const std::system_error&) {
            // The process may have no more threads. The loop goes on with those it has: slower, with the same bits.
        }
    }

    void help() {
        DefaultFloatEnvironment environment;
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            wake_.wait(lock, [&] { return !waiting_.empty(); });
            Loop* loop = waiting_.front();
            if (--loop->wanted_helpers == 0) waiting_.pop_front();
            ++loop->active_helpers;
            lock.unlock();
            loop->work();
            lock.lock();
            if (--loop->active_helpers == 0) loop->idle.notify_one();
        }
    }

    std::mutex mutex_;
    std::condition_variable wake_;
    std::deque<Loop*> waiting_;
    int num_helpers_ = 0;
};

// Never destroyed: helpers sleep on its condition until the process is gone. A forked child has no helpers, so it gets
// a pool of its own.
static std::atomic<Pool*> current_pool{nullptr};
static std::once_flag pool_once;

static Pool& pool() {
    std::call_once(pool_once, [] {
        current_pool = new Pool;
        pthread_atfork(nullptr, nullptr, [] { current_pool = new Pool; });
    });
    return *current_pool;
}

}  // namespace hz
