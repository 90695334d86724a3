// What the threads of a forward share: stages, which follow one another, and the pieces of each stage.
//
// Every thread calls the same stages in the same order with the same numbers of pieces. It takes the pieces of its own share,
// which lie one behind the other, then those that are left of other shares. A stage is over when its pieces are done; a
// thread that is late, because its core went to another process, finds nothing to do and goes on to where the others are.
//
// Only a piece that such a thread has in its hands would keep the others waiting. So pieces that take long have two parts:
// compute() writes to memory of the thread, write() to memory that the threads share. A thread that has waited computes the
// piece once more, and whoever is first to have computed a piece writes it. What the late thread computes from then on may
// come from memory that later stages write, and is thrown away. Each piece is written once, with the same bits by whomever.
#pragma once
#include <atomic>
#include <chrono>
#include <memory>
#include <vector>

#include "threads/shares.h"

namespace edgedec {

class Stages {
 public:
  // `cuts` are those of cuts_by_speed(); most_pieces is the most pieces of a stage of two parts.
  Stages(std::vector<double> cuts, int64_t most_pieces);

  // Do the n pieces of the next stage: some thread calls work(piece) for each. Return when all are done.
  template <class Work>
  void each(int thread, int64_t n, Work work) {
    const uint32_t stage = ++own_[(size_t)thread].stage;
    for (int i = 0; i < n_shares(); ++i) {
      const int share = (thread + i) % n_shares();
      for (int64_t piece; (piece = take(share, stage, n)) >= 0; done(share)) work(piece);
    }
    wait(stage, n, NEVER, [](int, int64_t) {});
  }

  // The same for pieces of two parts. A piece is so much work, which efforts() counts. Without `retake`, no piece is
  // computed twice.
  template <class Compute, class Write>
  void each_of_two_parts(int thread, int64_t n, double work, bool retake, Compute compute, Write write) {
    Own &own = own_[(size_t)thread];
    const uint32_t stage = ++own.stage;
    const auto start = Clock::now();
    int64_t n_taken = 0;
    const auto act = [&](int share, int64_t piece) {
      compute(piece);
      if (!may_write(piece, stage)) return;
      write(piece);
      done(share);
    };
    for (int i = 0; i < n_shares(); ++i) {
      const int share = (thread + i) % n_shares();
      for (int64_t piece; (piece = take(share, stage, n)) >= 0; ++n_taken) act(share, piece);
    }
    const std::chrono::duration<double> busy = Clock::now() - start;
    if (n_taken > 0 && work > 0) {
      own.effort.work += work * (double)n_taken;
      own.effort.seconds += busy.count();
    }
    wait(stage, n, retake ? patience(busy.count(), n_taken) : NEVER, act);
  }

  // What each thread has done so far in stages of two parts; to be called when no thread is in a stage.
  std::vector<Effort> efforts() const;

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr double NEVER = 1e9;  // seconds

  // Both words have the number of the stage in their upper half: a share is set up for a stage by the first that comes.
  struct alignas(64) Share {
    std::atomic<uint64_t> next{0};  // the piece to be taken next
    std::atomic<uint64_t> left{0};  // how many pieces are not done
  };
  struct alignas(64) Own {
    uint32_t stage = 0;
    Effort effort;
  };

  int n_shares() const { return (int)shares_.size(); }
  int64_t begin(int share, int64_t n) const { return share_begin(cuts_, share, n); }
  // Return a piece of a share, -1 where none is left or the stage is over.
  int64_t take(int share, uint32_t stage, int64_t n);
  void done(int share) { shares_[(size_t)share].left.fetch_sub(1, std::memory_order_acq_rel); }
  bool is_done(int share, uint32_t stage, int64_t n) const;
  // Return whether this thread is the first to have computed a piece.
  bool may_write(int64_t piece, uint32_t stage);
  // Return the seconds after which a thread that took so many pieces in so much time takes over a piece of another one.
  static double patience(double busy, int64_t n_taken);

  // Wait until all pieces are done; after so many seconds without it, call act(share, piece) for those that are not.
  template <class Act>
  void wait(uint32_t stage, int64_t n, double patience, Act act) {
    int share = 0;
    for (Waiting waiting; share < n_shares();) {
      if (is_done(share, stage, n)) {
        ++share;
      } else if (waiting.seconds() > patience) {
        for (int64_t piece = begin(share, n); piece < begin(share + 1, n); ++piece)
          if (!is_done(share, stage, n) && written_[(size_t)piece].load(std::memory_order_relaxed) < stage) act(share, piece);
        patience *= 2;
      } else {
        waiting.wait();
      }
    }
  }

  // A thread that waits: it spins, and sleeps for short times when that takes long.
  class Waiting {
   public:
    // Return for how long it has been waiting; 0 for the first few microseconds.
    double seconds() const { return seconds_; }
    void wait();

   private:
    int n_spins_ = 0;
    Clock::time_point start_;
    double seconds_ = 0;
  };

  const std::vector<double> cuts_;
  std::vector<Share> shares_;
  std::vector<Own> own_;
  std::vector<std::atomic<uint32_t>> written_;  // by piece, the last stage in which it was written
};

}  // namespace edgedec
