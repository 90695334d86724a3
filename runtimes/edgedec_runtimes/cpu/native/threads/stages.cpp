#include "threads/stages.h"

#include <algorithm>
#include <utility>

#include "threads/pool.h"
#include "threads/system.h"

namespace edgedec {
namespace {

constexpr int SPINS_UNTIMED = 64;    // 1 to 3 microseconds
constexpr double NAP_AFTER = 2e-4;   // seconds
constexpr double PATIENCE = 2e-5;    // seconds; the scheduler takes a core away for milliseconds
constexpr double PIECES_OF_PATIENCE = 4;
constexpr double PATIENCE_OF_IDLE = 1e-3;  // seconds, of a thread that does not know how long a piece takes

constexpr uint64_t word(uint32_t stage, int64_t value) { return (uint64_t)stage << 32 | (uint32_t)value; }
constexpr uint32_t stage_of(uint64_t word) { return (uint32_t)(word >> 32); }
constexpr int64_t value_of(uint64_t word) { return (int64_t)(uint32_t)word; }

}  // namespace

Stages::Stages(std::vector<double> cuts, int64_t most_pieces)
    : cuts_(std::move(cuts)), shares_(cuts_.size() - 1), own_(cuts_.size() - 1), written_((size_t)most_pieces) {}

int64_t Stages::take(int share, uint32_t stage, int64_t n) {
  const int64_t first = begin(share, n), end = begin(share + 1, n);
  if (first == end) return -1;
  Share &s = shares_[(size_t)share];
  for (uint64_t seen = s.next.load(std::memory_order_acquire);;) {
    if (stage_of(seen) > stage) return -1;
    if (stage_of(seen) < stage) {  // the pieces are counted before the first can be taken
      uint64_t left = s.left.load(std::memory_order_acquire);
      if (stage_of(left) < stage)
        s.left.compare_exchange_strong(left, word(stage, end - first), std::memory_order_acq_rel);
    }
    const int64_t piece = stage_of(seen) < stage ? first : value_of(seen);
    if (piece == end) return -1;
    if (s.next.compare_exchange_weak(seen, word(stage, piece + 1), std::memory_order_acq_rel,
                                     std::memory_order_acquire))
      return piece;
  }
}

bool Stages::is_done(int share, uint32_t stage, int64_t n) const {
  if (begin(share, n) == begin(share + 1, n)) return true;
  const uint64_t left = shares_[(size_t)share].left.load(std::memory_order_acquire);
  return stage_of(left) > stage || (stage_of(left) == stage && value_of(left) == 0);
}

bool Stages::may_write(int64_t piece, uint32_t stage) {
  std::atomic<uint32_t> &written = written_[(size_t)piece];
  uint32_t seen = written.load(std::memory_order_relaxed);
  return seen < stage && written.compare_exchange_strong(seen, stage, std::memory_order_acq_rel);
}

double Stages::patience(double busy, int64_t n_taken) {
  return n_taken == 0 ? PATIENCE_OF_IDLE : std::max(PATIENCE, PIECES_OF_PATIENCE * busy / (double)n_taken);
}

std::vector<Effort> Stages::efforts() const {
  std::vector<Effort> efforts;
  for (const Own &own : own_) efforts.push_back(own.effort);
  return efforts;
}

void Stages::Waiting::wait() {
  if (++n_spins_ == SPINS_UNTIMED) start_ = Clock::now();
  if (n_spins_ > SPINS_UNTIMED && n_spins_ % 8 == 0)
    seconds_ = std::chrono::duration<double>(Clock::now() - start_).count();
  if (seconds_ > NAP_AFTER) nap();
  else relax();
}

}  // namespace edgedec
