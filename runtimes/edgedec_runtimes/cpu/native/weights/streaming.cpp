#include "weights/streaming.h"

#include <algorithm>
#include <chrono>
#include <system_error>

#include "forward/model.h"
#include "weights/tiles.h"

namespace edgedec {
namespace {

constexpr auto CANCEL_POLL = std::chrono::milliseconds(20);
constexpr uint64_t ALIGNMENT = 64;  // of tiles
constexpr int64_t PANEL_ROWS = 32;  // of the output matrix that forward/forward.cpp multiplies at once

uint64_t pages(const ec_part &part) { return io_ceil(part.offset + part.n_bytes) - io_floor(part.offset); }

struct Matrices {
  int32_t n, which[7];
};
constexpr Matrices MATRICES_OF[EC_PART_OUTPUT] = {{7, {EC_Q, EC_K, EC_V, EC_MIX, EC_MIX_GATE, EC_MIX_ALPHA, EC_MIX_BETA}},
                                                {2, {EC_ATTN_OUT, EC_MIX_OUT}},
                                                {4, {EC_GATE, EC_UP, EC_ROUTER, EC_SHARED_ROUTER}},
                                                {3, {EC_DOWN, EC_PER_LAYER_GATE, EC_PER_LAYER_OUT}}};  // experts: forward/expert_store.h

}  // namespace

Streamer::~Streamer() {
  {
    std::lock_guard<std::mutex> guard(lock_);
    stopping_ = true;
    abandon_.store(true, std::memory_order_relaxed);
    changed_.notify_all();
  }
  if (reader_.joinable()) reader_.join();
}

void Streamer::place(int32_t which, int32_t layer, uint64_t offset, uint64_t n_bytes) {
  require(!started() && offset % ALIGNMENT == 0 && offset <= UINT64_MAX / 2 && n_bytes <= UINT64_MAX / 4,
          "a matrix's place in the file is out of range");
  places_[{which, layer}] = {offset, n_bytes};
}

const Streamer::Place &Streamer::placed(int32_t which, int32_t layer) const {
  const auto found = places_.find({which, layer});
  require(found != places_.end(), "a matrix has no place in the file");
  return found->second;
}

Matrix &Streamer::matrix(int32_t which, int32_t layer) {
  return which == EC_TOKEN_EMBD ? model_->token_embd
         : which == EC_OUTPUT   ? model_->output
                                : model_->layers[(size_t)layer].matrices[which];
}

void Streamer::start(ec_model &model, int64_t file, uint64_t file_bytes, const ec_part *parts, int32_t n_parts,
                     uint64_t ring_bytes) {
  require(!started() && !model.finished, "the streaming has begun already");
  n_of_layers_ = model.config.n_layer * EC_PART_OUTPUT;
  require(n_parts > n_of_layers_, "parts of the model are missing");
  model_ = &model;
  file_ = File(file, file_bytes);
  output_matrix_ = model.output.n_rows != 0 ? EC_OUTPUT : EC_TOKEN_EMBD;
  const Matrix &output = matrix(output_matrix_, 0);
  rows_.open(file_, placed(EC_TOKEN_EMBD, 0).offset, model.token_embd, 1);
  int64_t n_rows = 0;
  uint64_t largest = 0;
  for (int32_t i = 0; i < n_parts; ++i) {
    const ec_part &part = parts[i];
    const bool of_layer = i < n_of_layers_;
    require(part.stage == (of_layer ? i % EC_PART_OUTPUT : EC_PART_OUTPUT) &&
                part.layer == (of_layer ? i / EC_PART_OUTPUT : 0),
            "the parts are not in order");
    if (!of_layer) {
      require(part.row_begin == n_rows && part.row_begin % PANEL_ROWS == 0 && part.row_end > n_rows,
              "the parts of the output matrix have gaps");
      n_rows = part.row_end;
    }
    check_part(output, part);
    if (part.data == nullptr) largest = std::max(largest, pages(part));
  }
  require(n_rows == output.n_rows, "the parts of the output matrix have gaps");
  // While one part is in use, there is room for another one before or behind it in the ring.
  require(largest == 0 || ring_bytes / 3 >= largest, "the ring is smaller than three parts");
  ring_ = aligned_memory(n_ring_ = io_floor(ring_bytes));
  position_.resize((size_t)n_parts);
  output_rows_.resize((size_t)(n_parts - n_of_layers_));
  parts_.assign(parts, parts + n_parts);
  for (int32_t i = 0; i < n_parts; ++i) bind(i, (const uint8_t *)parts_[(size_t)i].data);
  try {
    reader_ = std::thread(&Streamer::work, this);
  } catch (const std::system_error &) {
    throw std::bad_alloc();
  }
}

// Check that all that a part's stage reads lies within the part.
void Streamer::check_part(const Matrix &output, const ec_part &part) const {
  require(part.offset % ALIGNMENT == 0 && part.offset <= file_.n_bytes() &&
              part.n_bytes <= file_.n_bytes() - part.offset && (part.n_bytes > 0 || part.data != nullptr),
          "a part lies beyond the end of the file");
  const auto contains = [&](uint64_t offset, uint64_t n_bytes) {
    require(offset >= part.offset && offset + n_bytes <= part.offset + part.n_bytes, "a matrix lies outside its part");
  };
  if (part.stage == EC_PART_OUTPUT) {
    const uint64_t before = tile_bytes(output.type, part.row_begin, output.n_cols);
    contains(placed(output_matrix_, 0).offset + before,
             tile_bytes(output.type, part.row_end - part.row_begin, output.n_cols));
    return;
  }
  const Matrices &of = MATRICES_OF[part.stage];
  const Matrix *matrices = model_->layers[(size_t)part.layer].matrices;
  for (int32_t i = 0; i < of.n; ++i) {
    if (matrices[of.which[i]].n_rows == 0) continue;  // ec_model_finish says which may be absent
    const Place &place = placed(of.which[i], part.layer);
    contains(place.offset, place.n_bytes);
  }
}

// Point the model's matrices into a part that begins at `data`; with nullptr, point them nowhere.
void Streamer::bind(int32_t number, const uint8_t *data) {
  const ec_part &part = parts_[(size_t)number];
  if (part.stage == EC_PART_OUTPUT) {
    const Matrix &whole = matrix(output_matrix_, 0);
    const uint64_t offset = placed(output_matrix_, 0).offset + tile_bytes(whole.type, part.row_begin, whole.n_cols);
    output_rows_[(size_t)(number - first_output_part())] = {whole.type, part.row_end - part.row_begin, whole.n_cols,
                                                    data == nullptr ? nullptr : data + (offset - part.offset),
                                                    whole.ahead};
    return;
  }
  const Matrices &of = MATRICES_OF[part.stage];
  for (int32_t i = 0; i < of.n; ++i) {
    Matrix &found = matrix(of.which[i], part.layer);
    if (found.n_rows != 0)
      found.tiles = data == nullptr ? nullptr : data + (placed(of.which[i], part.layer).offset - part.offset);
  }
}

void Streamer::start_experts(int32_t n_slots) {
  const ec_config &c = model_->config;
  require(started() && !model_->finished && !model_->experts.started(), "experts are set up once, after the streaming");
  require(n_slots >= c.n_expert_used && n_slots >= 1 && n_slots <= c.n_layer * c.n_expert,
          "the slots of experts are out of range");
  std::vector<ExpertStore::LayerPlaces> places((size_t)c.n_layer);
  for (int32_t l = 0; l < c.n_layer; ++l)
    for (int part = 0; part < ExpertStore::PARTS; ++part) {
      const Layer &layer = model_->layers[(size_t)l];
      const int which = EC_GATE_EXPERTS + part;
      const Matrix &all = layer.experts(which);
      if (all.n_rows == 0) continue;
      const Place &place = placed(&all == &layer.matrices[which] ? which : EC_GATE_EXPERTS, l);
      const int64_t n_rows = which == EC_DOWN_EXPERTS ? c.n_embd : c.n_ff_expert;
      require(n_rows % 16 == 0, "an expert has no whole tiles");
      require(place.offset <= file_.n_bytes() && place.n_bytes <= file_.n_bytes() - place.offset,
              "experts lie beyond the end of the file");
      const uint64_t n_bytes = tile_bytes(all.type, n_rows, all.n_cols), first = layer.place_of_expert(which, 0);
      require((first + (layer.place_of_expert(which, 1) - first) * (uint64_t)(c.n_expert - 1) + 1) * n_bytes <=
                  place.n_bytes,
              "experts have another shape");
      places[(size_t)l].parts[part] = {place.offset + first * n_bytes, n_bytes,
                                       (layer.place_of_expert(which, 1) - first) * n_bytes};
    }
  model_->experts.start(file_, std::move(places), c.n_expert, n_slots, most_groups(model_->max_rows, c));
}

void Streamer::begin(const std::vector<int32_t> &order) {
  std::unique_lock<std::mutex> lock(lock_);
  error_.clear();
  gave_up_ = cancelled_ = false;
  n_bound_ = n_held_ = 0;
  order_.clear();
  next_ = 0;
  for (int32_t part : order)
    if (parts_[(size_t)part].data == nullptr) {
      position_[(size_t)part] = (int32_t)order_.size();
      order_.push_back(part);
    }
  if (order_.empty()) return;
  // Keep the parts that were read ahead if they are the first ones of this forward.
  size_t first = 0, n = 0;
  while (first < entries_.size() && entries_[first].part != order_[0]) ++first;
  while (first + n < entries_.size() && entries_[first + n].part == order_[n % order_.size()]) ++n;
  if (reading_ && first + n < entries_.size()) {
    dropping_ = true;
    abandon_.store(true, std::memory_order_relaxed);
    changed_.wait(lock, [&] { return !reading_; });
    dropping_ = false;
    abandon_.store(stopping_, std::memory_order_relaxed);
  }
  entries_.resize(std::min(entries_.size(), first + n));
  entries_.erase(entries_.begin(), entries_.begin() + (std::ptrdiff_t)std::min(first, entries_.size()));
  next_ = entries_.size() % order_.size();
  changed_.notify_all();
}

bool Streamer::fetch(int thread, int32_t number, const volatile int32_t *cancel) {
  if (parts_[(size_t)number].data != nullptr) return true;
  std::unique_lock<std::mutex> lock(lock_);
  const int32_t position = position_[(size_t)number];
  if (thread != 0) {  // thread 0 decides
    changed_.wait(lock, [&] { return n_bound_ > position || gave_up_; });
    return n_bound_ > position;
  }
  for (;;) {
    cancelled_ = cancel != nullptr && *cancel != 0;
    if (cancelled_) break;
    if (entries_.size() > (size_t)n_held_ && entries_[(size_t)n_held_].loaded) {
      const Entry &entry = entries_[(size_t)n_held_++];
      const ec_part &part = parts_[(size_t)number];
      bind(number, ring_.get() + entry.at + (part.offset - io_floor(part.offset)));
      ++n_bound_;
      changed_.notify_all();
      return true;
    }
    if (!error_.empty()) break;
    changed_.wait_for(lock, CANCEL_POLL);
  }
  gave_up_ = true;
  changed_.notify_all();
  return false;
}

void Streamer::release(int32_t number) {
  if (parts_[(size_t)number].data != nullptr) return;
  std::lock_guard<std::mutex> guard(lock_);
  entries_.pop_front();
  --n_held_;
  changed_.notify_all();
}

bool Streamer::end() {
  std::lock_guard<std::mutex> guard(lock_);
  for (; n_held_ > 0; --n_held_) entries_.pop_front();
  changed_.notify_all();
  if (gave_up_ && !cancelled_) throw Unreadable(error_);
  return !cancelled_;
}

void Streamer::embed(int32_t token, float *out) {
  for (size_t i = 0; output_matrix_ == EC_TOKEN_EMBD && i < output_rows_.size(); ++i) {
    const ec_part &part = parts_[(size_t)first_output_part() + i];
    if (part.data != nullptr && token >= part.row_begin && token < part.row_end)
      return tile_row(output_rows_[i].type, output_rows_[i].n_cols, output_rows_[i].tiles, token - part.row_begin, out);
  }
  rows_.read(token, out);
}

uint64_t Streamer::bytes_read() {
  std::lock_guard<std::mutex> guard(lock_);
  return n_read_ + (model_ == nullptr ? 0 : model_->experts.bytes_read());
}

// --- the reading thread ---------------------------------------------------------------------------------------------

// Find a place in the ring behind the youngest entry, or at its start where the oldest entries leave room there.
bool Streamer::find_room(uint64_t size, uint64_t *at) const {
  *at = 0;
  if (entries_.empty()) return size <= n_ring_;
  const uint64_t oldest = entries_.front().at, end = entries_.back().at + entries_.back().size;
  if (entries_.back().at < oldest) {
    *at = end;
    return oldest - end >= size;
  }
  if (n_ring_ - end >= size) *at = end;
  return *at == end || oldest >= size;
}

void Streamer::work() {
  std::unique_lock<std::mutex> lock(lock_);
  for (uint64_t at = 0;;) {
    changed_.wait(lock, [&] {
      return stopping_ || (!dropping_ && error_.empty() && !order_.empty() &&
                           find_room(pages(parts_[(size_t)order_[next_]]), &at));
    });
    if (stopping_) return;
    read_next(lock, at);
  }
}

void Streamer::read_next(std::unique_lock<std::mutex> &lock, uint64_t at) {
  const ec_part &part = parts_[(size_t)order_[next_]];
  entries_.push_back({order_[next_], at, pages(part), false});
  next_ = (next_ + 1) % order_.size();
  reading_ = true;
  lock.unlock();
  std::string error;
  bool whole = false;
  try {
    whole = file_.read_pages(part.offset, part.n_bytes, ring_.get() + at, &abandon_);
  } catch (const std::exception &failure) {
    error = failure.what();
  }
  lock.lock();
  reading_ = false;
  error_ = error;
  if (whole) {
    entries_.back().loaded = true;
    n_read_ += part.n_bytes;
  } else {
    entries_.pop_back();
  }
  changed_.notify_all();
}

}  // namespace edgedec
