// Threads that run one function together, with barriers inside of it. A thread that waits spins for a moment, then gives
// its core away.
#pragma once
#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace edgedec {

class Pool {
 public:
  // Return this process's pool of that many threads. It is never destroyed, as its threads may be asleep at exit.
  // Throws std::bad_alloc where the system refuses threads.
  static Pool &shared(int n_threads);

  int size() const { return n_threads_; }
  // Run job(thread) on every thread; the caller is thread 0. Other callers wait until the job is done.
  void run(const std::function<void(int)> &job);
  // Wait until every thread of the job is here.
  void barrier();

 private:
  explicit Pool(int n_threads) : n_threads_(n_threads) {}
  void start();
  void work(int thread);

  const int n_threads_;
  std::mutex callers_;
  std::mutex sleep_;
  std::condition_variable wake_;
  const std::function<void(int)> *job_ = nullptr;  // nullptr ends the threads
  alignas(64) std::atomic<unsigned> generation_{0};
  alignas(64) std::atomic<int> running_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<unsigned> phase_{0};
  std::vector<std::thread> threads_;
};

// Returns 0, 1, 2, ... in turn. One thread may reset it while no other uses it.
class Counter {
 public:
  void reset() { next_.store(0, std::memory_order_relaxed); }
  int take() { return next_.fetch_add(1, std::memory_order_relaxed); }

 private:
  alignas(64) std::atomic<int> next_{0};
};

}  // namespace edgedec
