#include "threads/pool.h"

#include <chrono>
#include <map>
#include <memory>
#include <new>
#include <system_error>
#include <utility>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "threads/system.h"
#include "weights/mapping.h"

namespace edgedec {
namespace {

constexpr uint64_t CLOSED = (uint64_t)1 << 31, INSIDE = CLOSED - 1;
constexpr auto SPIN = std::chrono::microseconds(150);  // between two jobs, before a thread sleeps

uint32_t job_number(uint64_t gate) { return (uint32_t)(gate >> 32); }

// Spin until holds() returns true, and return true; return false when it has taken long.
template <class Condition>
bool spin_until(Condition holds) {
  const auto end = std::chrono::steady_clock::now() + SPIN;
  do {
    for (int i = 0; i < 16; ++i) {
      if (holds()) return true;
      relax();
    }
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

}  // namespace

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ __volatile__("yield");
#endif
}

Pool &Pool::shared(int n_threads) {
  static std::mutex lock;
  static auto *pools = new std::map<std::pair<int64_t, int>, Pool *>;
  std::lock_guard<std::mutex> guard(lock);
  // A process that fork() made has none of its parent's threads, so it makes pools of its own.
  Pool *&pool = (*pools)[{process_id(), n_threads}];
  if (pool == nullptr) {
    std::unique_ptr<Pool> made(new Pool(n_threads));
    made->start();
    pool = made.release();
  }
  return *pool;
}

void Pool::start() {
  gate_.store(CLOSED, std::memory_order_relaxed);
  try {
    for (int i = 1; i < n_threads_; ++i) threads_.emplace_back(&Pool::work, this, i);
  } catch (const std::system_error &) {
    {
      std::lock_guard<std::mutex> awake(sleep_);
      ending_ = true;
      gate_.store((uint64_t)1 << 32 | CLOSED, std::memory_order_release);
      wake_.notify_all();
    }
    for (std::thread &thread : threads_) thread.join();
    throw std::bad_alloc();
  }
}

void Pool::run(const std::function<void(int)> &job) {
  std::lock_guard<std::mutex> guard(callers_);
  if (n_threads_ == 1) return job(0);
  {
    std::lock_guard<std::mutex> awake(sleep_);
    job_ = &job;
    gate_.store((uint64_t)(job_number(gate_.load(std::memory_order_relaxed)) + 1) << 32, std::memory_order_release);
    wake_.notify_all();
  }
  const KeptTo kept(cores_[0]);
  job(0);
  gate_.fetch_or(CLOSED, std::memory_order_acq_rel);
  const auto empty = [&] { return (gate_.load(std::memory_order_acquire) & INSIDE) == 0; };
  if (!spin_until(empty))
    while (!empty()) nap();
}

void Pool::keep_to_cores(std::vector<std::vector<int32_t>> cores) {
  std::lock_guard<std::mutex> guard(callers_);
  cores_ = std::move(cores);
  cores_.resize((size_t)n_threads_);
}

// Count this thread among those in a job; return false where the job takes no more threads.
bool Pool::enter(uint32_t number) {
  uint64_t gate = gate_.load(std::memory_order_acquire);
  while (job_number(gate) == number && (gate & CLOSED) == 0)
    if (gate_.compare_exchange_weak(gate, gate + 1, std::memory_order_acq_rel, std::memory_order_acquire)) return true;
  return false;
}

void Pool::work(int thread) {
  unblock_faults();
  std::vector<int32_t> core;
  for (uint32_t seen = 0;;) {
    const auto called = [&] { return job_number(gate_.load(std::memory_order_acquire)) != seen; };
    if (!spin_until(called)) {
      std::unique_lock<std::mutex> asleep(sleep_);
      wake_.wait(asleep, called);
    }
    seen = job_number(gate_.load(std::memory_order_acquire));
    if (ending_) return;
    if (!enter(seen)) continue;
    if (core != cores_[(size_t)thread]) keep_to(core = cores_[(size_t)thread]);
    (*job_)(thread);
    gate_.fetch_sub(1, std::memory_order_release);
  }
}

}  // namespace edgedec
