#include "expert_store.h"

#include <algorithm>
#include <utility>

namespace edgedec {

void ExpertStore::start(const File &file, std::vector<LayerPlaces> places, int32_t n_expert, int32_t n_slots) {
  places_ = std::move(places);
  for (int part = 0; part < PARTS; ++part) {
    uint64_t most = 0;
    for (const LayerPlaces &layer : places_) most = std::max(most, layer.parts[part].n_bytes);
    starts_[part + 1] = starts_[part] + io_ceil(most) + IO_ALIGNMENT;
  }
  memory_ = aligned_memory(starts_[PARTS] * (uint64_t)n_slots);
  slots_.resize((size_t)n_slots);
  slot_of_.assign(places_.size() * (size_t)n_expert, -1);
  file_ = file;
  n_expert_ = n_expert;
  n_slots_ = n_slots;
}

void ExpertStore::assign(int32_t layer, const ExpertGroup *groups, int64_t n) {
  ++now_;
  for (int64_t i = 0; i < n; ++i) {
    const int32_t slot = slot_of(layer, groups[i].expert);
    if (slot >= 0) slots_[(size_t)slot].used = now_;
  }
  for (int64_t i = 0; i < n; ++i) {
    int32_t &slot = slot_of(layer, groups[i].expert);
    if (slot >= 0) continue;
    const auto older = [](const Slot &a, const Slot &b) { return a.used < b.used; };
    const auto oldest = std::min_element(slots_.begin(), slots_.end(), older);
    if (oldest->expert >= 0) slot_of(oldest->layer, oldest->expert) = -1;
    *oldest = {layer, groups[i].expert, now_, false};
    slot = (int32_t)(oldest - slots_.begin());
  }
}

void ExpertStore::load(int32_t layer, const ExpertGroup *groups, int64_t i) {
  const int32_t expert = groups[i].expert;
  if (i > 0 && groups[i - 1].expert == expert) return;
  Slot &slot = slots_[(size_t)slot_of(layer, expert)];
  if (slot.loaded || failed()) return;
  uint8_t *memory = memory_.get() + starts_[PARTS] * (uint64_t)(&slot - slots_.data());
  try {
    for (int part = 0; part < PARTS; ++part) {
      const Place &place = places_[(size_t)layer].parts[part];
      file_.read_pages(place.offset + place.n_bytes * (uint64_t)expert, place.n_bytes, memory + starts_[part], nullptr);
      n_read_ += place.n_bytes;
    }
    slot.loaded = true;
  } catch (const std::exception &error) {
    std::lock_guard<std::mutex> guard(lock_);
    error_ = error.what();
    failed_.store(true, std::memory_order_relaxed);
  }
}

const uint8_t *ExpertStore::tiles(int32_t layer, int32_t expert, int part) const {
  const int32_t slot = slot_of_[(size_t)layer * (size_t)n_expert_ + (size_t)expert];
  const Place &place = places_[(size_t)layer].parts[part];
  const uint64_t offset = place.offset + place.n_bytes * (uint64_t)expert;
  return memory_.get() + starts_[PARTS] * (uint64_t)slot + starts_[part] + (offset - io_floor(offset));
}

void ExpertStore::check() {
  std::lock_guard<std::mutex> guard(lock_);
  if (!failed_.exchange(false)) return;
  // What was assigned and not read is not there.
  for (Slot &slot : slots_)
    if (slot.expert >= 0 && !slot.loaded) {
      slot_of(slot.layer, slot.expert) = -1;
      slot = Slot{};
    }
  throw Unreadable(error_);
}

}  // namespace edgedec
