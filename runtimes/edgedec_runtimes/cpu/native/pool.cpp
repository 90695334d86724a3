#include "pool.h"

#include <map>
#include <new>
#include <system_error>
#include <utility>
#if !defined(_WIN32)
#include <unistd.h>
#endif
#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

#include "mapping.h"

namespace edgedec {
namespace {

inline void relax() {
#if defined(__x86_64__) || defined(_M_X64)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ __volatile__("yield");
#endif
}

// A process that fork() made has none of its parent's threads, so it makes pools of its own.
inline int64_t process_id() {
#if defined(_WIN32)
  return 0;
#else
  return getpid();
#endif
}

constexpr int SPINS = 4000;        // some 50 to 150 microseconds
constexpr int IDLE_YIELDS = 200;   // between two jobs, before a thread sleeps

// Wait until `value` is no longer `old`, and return true; return false after `patience` yields (0: no limit).
template <class T>
bool wait_for_change(const std::atomic<T> &value, T old, int patience) {
  for (int i = 0; i < SPINS; ++i) {
    if (value.load(std::memory_order_acquire) != old) return true;
    relax();
  }
  for (int i = 0; patience == 0 || i < patience; ++i) {
    if (value.load(std::memory_order_acquire) != old) return true;
    std::this_thread::yield();
  }
  return false;
}

}  // namespace

Pool &Pool::shared(int n_threads) {
  static std::mutex lock;
  static auto *pools = new std::map<std::pair<int64_t, int>, Pool *>;
  std::lock_guard<std::mutex> guard(lock);
  Pool *&pool = (*pools)[{process_id(), n_threads}];
  if (pool == nullptr) {
    std::unique_ptr<Pool> made(new Pool(n_threads));
    made->start();
    pool = made.release();
  }
  return *pool;
}

void Pool::start() {
  try {
    for (int i = 1; i < n_threads_; ++i) threads_.emplace_back(&Pool::work, this, i);
  } catch (const std::system_error &) {
    {
      std::lock_guard<std::mutex> awake(sleep_);
      generation_.fetch_add(1, std::memory_order_release);  // without a job, the threads end
      wake_.notify_all();
    }
    for (std::thread &thread : threads_) thread.join();
    throw std::bad_alloc();
  }
}

void Pool::run(const std::function<void(int)> &job) {
  std::lock_guard<std::mutex> guard(callers_);
  if (n_threads_ > 1) {
    std::lock_guard<std::mutex> awake(sleep_);
    job_ = &job;
    running_.store(n_threads_ - 1, std::memory_order_relaxed);
    generation_.fetch_add(1, std::memory_order_release);
    wake_.notify_all();
  }
  job(0);
  for (int left; (left = running_.load(std::memory_order_acquire)) != 0;) wait_for_change(running_, left, 0);
}

void Pool::work(int thread) {
  unblock_faults();
  for (unsigned seen = 0;; ++seen) {
    if (!wait_for_change(generation_, seen, IDLE_YIELDS)) {
      std::unique_lock<std::mutex> asleep(sleep_);
      wake_.wait(asleep, [&] { return generation_.load(std::memory_order_acquire) != seen; });
    }
    if (job_ == nullptr) return;
    (*job_)(thread);
    running_.fetch_sub(1, std::memory_order_release);
  }
}

void Pool::barrier() {
  if (n_threads_ == 1) return;
  const unsigned phase = phase_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == n_threads_) {
    arrived_.store(0, std::memory_order_relaxed);
    phase_.store(phase + 1, std::memory_order_release);
  } else {
    wait_for_change(phase_, phase, 0);
  }
}

}  // namespace edgedec
