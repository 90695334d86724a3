// Experts that do not all fit in memory: the favourites of late stay, the others are read when rows choose them.
//
// Memory has slots of one expert each: gate, up and down. When the rows of a layer have chosen their experts, those
// that are in no slot take the places of others, and threads of the store read them, gates and ups first, while the
// forward multiplies with the experts that are there. A place is taken from the expert that was used least often, where
// uses count less the longer ago they were (a kind of LRFU, Lee et al. 2001).
#pragma once
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "forward/experts.h"
#include "weights/file.h"

namespace edgedec {

class ExpertStore {
 public:
  // Where one matrix of a layer's experts lies in the file: that of the first one, of n_bytes; the next one's begins
  // `step` bytes behind it.
  struct Place {
    uint64_t offset = 0, n_bytes = 0, step = 0;
    uint64_t of(int32_t expert) const { return offset + step * (uint64_t)expert; }
  };
  static constexpr int PARTS = 3;  // gate, up, down
  struct LayerPlaces {
    Place parts[PARTS];  // n_bytes is 0 in a layer without experts, and of a gate where experts have none
  };

  ExpertStore() = default;
  ~ExpertStore();
  ExpertStore(const ExpertStore &) = delete;
  ExpertStore &operator=(const ExpertStore &) = delete;

  // Make the slots, and start the threads. A layer has at most n_groups groups. Throws std::bad_alloc; the caller has
  // checked that all places lie in the file.
  void start(const File &file, std::vector<LayerPlaces> places, int32_t n_expert, int32_t n_slots, int64_t n_groups);
  bool started() const { return n_slots_ > 0; }
  // The most experts that are in memory at a time.
  int32_t n_slots() const { return n_slots_; }

  // --- one thread of a forward calls these, while no other uses the store ---

  // Give the experts of some groups slots, at most n_slots() different ones, and have the missing ones read. `n_rows`
  // is the number of the layer's rows, 0 for further waves of the same rows.
  void want(int32_t layer, const ExpertGroup *groups, int64_t n, int64_t n_rows);
  // In which order to multiply with the groups of want(): those that are in memory first. Indexes of these groups.
  const std::vector<int32_t> &order() const { return order_; }
  // Throws Unreadable where an expert could not be read since the last call; to be called after a forward.
  void check();

  // --- any thread of a forward ---

  // Wait until a part of an expert that was wanted is in memory; false where it can't be read. After a stage that
  // waited for all that is left to read, failed() is the same for all threads.
  bool wait(int32_t layer, int32_t expert, int part);
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  // The tiles of an expert that has a slot.
  const uint8_t *tiles(int32_t layer, int32_t expert, int part) const;
  // Bytes of experts that were read so far.
  uint64_t bytes_read() const { return n_read_.load(std::memory_order_relaxed); }

  // How often experts were wanted, and how many of them were in memory then.
  struct Counts {
    uint64_t wanted = 0, present = 0;
  };
  Counts counts() const { return counts_; }

 private:
  struct Slot {
    int32_t layer = -1, expert = -1;
    uint64_t wanted = 0;             // the last call of want() that wanted it
    std::atomic<uint8_t> loaded{0};  // the parts in memory, or that there are not, a bit each
  };
  struct Job {
    int32_t slot;
    int part;
  };
  // Jobs in the order in which they are done; up to what was reserved, nothing is allocated.
  struct Jobs {
    std::vector<Job> all;
    size_t n_begun = 0;
    bool empty() const { return n_begun == all.size(); }
    void clear() { all.clear(), n_begun = 0; }
    Job take() { return all[n_begun++]; }
  };
  static constexpr uint8_t WHOLE = (1 << PARTS) - 1;

  size_t index(int32_t layer, int32_t expert) const { return (size_t)layer * (size_t)n_expert_ + (size_t)expert; }
  int32_t slot_of(int32_t layer, int32_t expert) const { return slot_of_[index(layer, expert)]; }
  void note_use(int32_t layer, const ExpertGroup &group);
  int32_t least_used() const;
  void settle(int32_t slot, int32_t layer, int32_t expert);
  void add_jobs(int32_t layer, const ExpertGroup *groups, int first_part, int end_part);
  void read(const Slot &slot, const Job &job);
  void read_next(std::unique_lock<std::mutex> &lock);
  void work();

  File file_;
  std::vector<LayerPlaces> places_;
  int32_t n_expert_ = 0, n_slots_ = 0, n_layers_ = 0;  // n_layers_ have experts
  uint64_t starts_[PARTS + 1] = {};  // of the parts in a slot; the last is the size of a slot
  AlignedMemory memory_;
  std::vector<Slot> slots_;
  std::vector<int32_t> slot_of_;  // by layer and expert; -1 for none
  std::vector<double> worth_;     // by layer and expert: the logarithm of its uses; it grows with the time of the last
  std::vector<int32_t> order_, late_;
  uint64_t now_ = 0;
  double time_ = 0;  // rows of layers, in half-lives of a use
  Counts counts_;
  std::atomic<uint64_t> n_read_{0};
  std::atomic<bool> failed_{false};

  std::mutex lock_;
  std::condition_variable work_, changed_;
  Jobs jobs_;
  std::string error_;
  bool stopping_ = false;
  int32_t n_busy_ = 0;  // threads that read
  std::vector<std::thread> readers_;
};

}  // namespace edgedec
