// Experts that do not all fit in memory: those that were used last stay, the others are read when rows choose them.
//
// Memory has slots of one expert each: gate, up and down. Before the experts of a layer are multiplied, those that are in no
// slot are read by all threads at once, in place of the experts that were used the longest time ago.
#pragma once
#include <atomic>
#include <mutex>
#include <string>
#include <vector>

#include "experts.h"
#include "file.h"

namespace edgedec {

class ExpertStore {
 public:
  // Where one matrix of a layer's experts lies in the file; an expert takes n_bytes.
  struct Place {
    uint64_t offset, n_bytes;
  };
  static constexpr int PARTS = 3;  // gate, up, down
  struct LayerPlaces {
    Place parts[PARTS];  // n_bytes is 0 in a layer without experts
  };

  // Make the slots. Throws std::bad_alloc; the caller has checked that all places lie in the file.
  void start(const File &file, std::vector<LayerPlaces> places, int32_t n_expert, int32_t n_slots);
  bool started() const { return n_slots_ > 0; }
  // The most experts that are in memory at a time.
  int32_t n_slots() const { return n_slots_; }

  // Give the experts of these groups slots: at most n_slots() different ones. One thread calls this, and then load() is
  // called for each group, by any threads.
  void assign(int32_t layer, const ExpertGroup *groups, int64_t n);
  // Read the group's expert, unless it is there or another group before has the same one.
  void load(int32_t layer, const ExpertGroup *groups, int64_t i);
  // The tiles of an expert that has a slot.
  const uint8_t *tiles(int32_t layer, int32_t expert, int part) const;
  // Whether an expert could not be read since the last call of check().
  bool failed() const { return failed_.load(std::memory_order_relaxed); }
  // Throws Unreadable where one could not.
  void check();
  // Bytes of experts that were read so far.
  uint64_t bytes_read() const { return n_read_.load(std::memory_order_relaxed); }

 private:
  struct Slot {
    int32_t layer = -1, expert = -1;
    uint64_t used = 0;  // when it was used last
    bool loaded = false;
  };
  int32_t &slot_of(int32_t layer, int32_t expert) { return slot_of_[(size_t)layer * (size_t)n_expert_ + (size_t)expert]; }

  File file_;
  std::vector<LayerPlaces> places_;
  int32_t n_expert_ = 0, n_slots_ = 0;
  uint64_t starts_[PARTS + 1] = {};  // of the parts in a slot; the last is the size of a slot
  AlignedMemory memory_;
  std::vector<Slot> slots_;
  std::vector<int32_t> slot_of_;  // by layer and expert; -1 for none
  uint64_t now_ = 0;
  std::atomic<uint64_t> n_read_{0};
  std::atomic<bool> failed_{false};
  std::mutex lock_;
  std::string error_;
};

}  // namespace edgedec
