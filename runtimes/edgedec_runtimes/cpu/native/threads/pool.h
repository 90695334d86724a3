// Threads that run one function together. None waits for another to begin: a thread whose core is busy with another
// process comes later, or not at all.
#pragma once
#include <atomic>
#include <condition_variable>
#include <functional>
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
  // Run job(0) in the caller, and job(1), job(2), ... in those threads that begin before job(0) has returned; wait
  // until they have returned, too. So the threads must share out the work as they go (stages.h). Other callers wait for
  // their turn.
  void run(const std::function<void(int)> &job);
  // Have thread i run on the logical processors cores[i] only; the caller does so while it is in a job.
  void keep_to_cores(std::vector<std::vector<int32_t>> cores);

 private:
  explicit Pool(int n_threads) : n_threads_(n_threads) {}
  void start();
  void work(int thread);
  bool enter(uint32_t number);

  const int n_threads_;
  std::mutex callers_;
  std::mutex sleep_;
  std::condition_variable wake_;
  const std::function<void(int)> *job_ = nullptr;
  // Read within a job.
  std::vector<std::vector<int32_t>> cores_ = std::vector<std::vector<int32_t>>((size_t)n_threads_);
  bool ending_ = false;
  // The number of the job in the upper half; below, whether no more threads may begin it, and how many are in it.
  alignas(64) std::atomic<uint64_t> gate_;
  std::vector<std::thread> threads_;
};

// Tell the processor that this thread waits in a loop.
void relax();

}  // namespace edgedec
