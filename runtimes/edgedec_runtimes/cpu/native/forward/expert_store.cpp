#include "forward/expert_store.h"

#include <math.h>

#include <algorithm>
#include <system_error>
#include <utility>

namespace edgedec {
namespace {

constexpr int READERS = 4;              // threads: disks read several pieces faster than one
constexpr double HALF_LIFE = 64;        // of a use, in rows
constexpr double NEVER_USED = -1e300;

}  // namespace

ExpertStore::~ExpertStore() {
  {
    std::lock_guard<std::mutex> guard(lock_);
    stopping_ = true;
    work_.notify_all();
  }
  for (std::thread &reader : readers_) reader.join();
}

void ExpertStore::start(const File &file, std::vector<LayerPlaces> places, int32_t n_expert, int32_t n_slots,
                        int64_t n_groups) {
  places_ = std::move(places);
  for (int part = 0; part < PARTS; ++part) {
    uint64_t most = 0;
    for (const LayerPlaces &layer : places_) most = std::max(most, layer.parts[part].n_bytes);
    starts_[part + 1] = starts_[part] + io_ceil(most) + IO_ALIGNMENT;
  }
  for (const LayerPlaces &layer : places_) n_layers_ += layer.parts[PARTS - 1].n_bytes != 0;
  memory_ = aligned_memory(starts_[PARTS] * (uint64_t)n_slots);
  slots_ = std::vector<Slot>((size_t)n_slots);
  slot_of_.assign(places_.size() * (size_t)n_expert, -1);
  worth_.assign(slot_of_.size(), NEVER_USED);
  order_.reserve((size_t)n_groups);
  late_.reserve((size_t)n_groups);
  jobs_.all.reserve((size_t)n_expert * PARTS);
  file_ = file;
  n_expert_ = n_expert;
  try {
    for (int i = 0; i < READERS; ++i) readers_.emplace_back(&ExpertStore::work, this);
  } catch (const std::system_error &) {
    throw std::bad_alloc();
  }
  n_slots_ = n_slots;
}

// --- which experts have slots
// -----------------------------------------------------------------------------------------

// A use counts n now and half of that after HALF_LIFE rows. The logarithm of the sum, less the time, keeps its order
// among experts while time goes on.
void ExpertStore::note_use(int32_t layer, const ExpertGroup &group) {
  double &worth = worth_[index(layer, group.expert)];
  worth = time_ + log2(group.n + (worth == NEVER_USED ? 0.0 : exp2(worth - time_)));
}

// Return the slot whose expert is worth the least, of those that are not wanted now.
int32_t ExpertStore::least_used() const {
  int32_t best = -1;
  double least = 0;
  for (int32_t i = 0; i < n_slots_; ++i) {
    const Slot &slot = slots_[(size_t)i];
    if (slot.wanted == now_) continue;
    if (slot.expert < 0) return i;
    const double worth = worth_[index(slot.layer, slot.expert)];
    if (best < 0 || worth < least) best = i, least = worth;
  }
  return best;
}

void ExpertStore::settle(int32_t number, int32_t layer, int32_t expert) {
  Slot &slot = slots_[(size_t)number];
  if (slot.expert >= 0) slot_of_[index(slot.layer, slot.expert)] = -1;
  slot.layer = layer;
  slot.expert = expert;
  slot.wanted = now_;
  uint8_t absent = 0;
  for (int part = 0; part < PARTS; ++part)
    if (places_[(size_t)layer].parts[part].n_bytes == 0) absent |= (uint8_t)(1 << part);
  slot.loaded.store(absent, std::memory_order_relaxed);
  slot_of_[index(layer, expert)] = number;
}

void ExpertStore::want(int32_t layer, const ExpertGroup *groups, int64_t n, int64_t n_rows) {
  std::lock_guard<std::mutex> guard(lock_);  // all that was wanted before was waited for, so no thread reads
  ++now_;
  time_ += (double)n_rows / (HALF_LIFE * n_layers_);
  order_.clear();
  late_.clear();
  for (int32_t i = 0; i < n; ++i) {
    note_use(layer, groups[i]);
    const int32_t slot = slot_of(layer, groups[i].expert);
    const bool present = slot >= 0 && slots_[(size_t)slot].loaded.load(std::memory_order_relaxed) == WHOLE;
    if (slot >= 0) slots_[(size_t)slot].wanted = now_;
    (present ? order_ : late_).push_back(i);
    if (i > 0 && groups[i].expert == groups[i - 1].expert) continue;
    ++counts_.wanted;
    counts_.present += present;
  }
  order_.insert(order_.end(), late_.begin(), late_.end());
  for (int32_t i : late_)
    if (slot_of(layer, groups[i].expert) < 0) settle(least_used(), layer, groups[i].expert);
  jobs_.clear();
  add_jobs(layer, groups, 0, PARTS - 1);
  add_jobs(layer, groups, PARTS - 1, PARTS);  // downs are needed last
  work_.notify_all();
}

// Have parts of the experts read that are late, but for those in memory.
void ExpertStore::add_jobs(int32_t layer, const ExpertGroup *groups, int first_part, int end_part) {
  for (size_t i = 0; i < late_.size(); ++i) {
    const int32_t expert = groups[late_[i]].expert, slot = slot_of(layer, expert);
    if (i > 0 && groups[late_[i - 1]].expert == expert) continue;
    for (int part = first_part; part < end_part; ++part)
      if ((slots_[(size_t)slot].loaded.load(std::memory_order_relaxed) >> part & 1) == 0)
        jobs_.all.push_back({slot, part});
  }
}

bool ExpertStore::wait(int32_t layer, int32_t expert, int part) {
  const Slot &slot = slots_[(size_t)slot_of(layer, expert)];
  const auto is_there = [&] { return (slot.loaded.load(std::memory_order_acquire) >> part & 1) != 0; };
  if (is_there()) return true;
  std::unique_lock<std::mutex> lock(lock_);
  changed_.wait(lock, [&] { return is_there() || failed(); });
  return is_there();
}

const uint8_t *ExpertStore::tiles(int32_t layer, int32_t expert, int part) const {
  const int32_t slot = slot_of(layer, expert);
  const Place &place = places_[(size_t)layer].parts[part];
  const uint64_t offset = place.of(expert);
  return memory_.get() + starts_[PARTS] * (uint64_t)slot + starts_[part] + (offset - io_floor(offset));
}

void ExpertStore::check() {
  if (!failed()) return;
  std::unique_lock<std::mutex> lock(lock_);
  changed_.wait(lock, [&] { return n_busy_ == 0; });
  failed_.store(false, std::memory_order_relaxed);
  throw Unreadable(error_);
}

// --- the reading threads
// ----------------------------------------------------------------------------------------------

void ExpertStore::work() {
  std::unique_lock<std::mutex> lock(lock_);
  for (;;) {
    work_.wait(lock, [&] { return stopping_ || !jobs_.empty(); });
    if (stopping_) return;
    read_next(lock);
  }
}

void ExpertStore::read_next(std::unique_lock<std::mutex> &lock) {
  const Job job = jobs_.take();
  Slot &slot = slots_[(size_t)job.slot];
  ++n_busy_;
  lock.unlock();
  std::string error;
  try {
    read(slot, job);
    slot.loaded.fetch_or((uint8_t)(1 << job.part), std::memory_order_release);
  } catch (const std::exception &failure) {
    error = failure.what();
  }
  lock.lock();
  --n_busy_;
  if (!error.empty()) {
    error_ = error;
    jobs_.clear();
    failed_.store(true, std::memory_order_release);
  }
  changed_.notify_all();
}

void ExpertStore::read(const Slot &slot, const Job &job) {
  const Place &place = places_[(size_t)slot.layer].parts[job.part];
  uint8_t *memory = memory_.get() + starts_[PARTS] * (uint64_t)job.slot + starts_[job.part];
  file_.read_pages(place.of(slot.expert), place.n_bytes, memory, nullptr);
  n_read_.fetch_add(place.n_bytes, std::memory_order_relaxed);
}

}  // namespace edgedec
