// Weights that do not fit in memory: parts of them are read from their file in each forward.
//
// A part is what one stage of the forward reads: q, k and v of a layer, its attention output, gate and up, down, or some
// rows of the head. A part stays in memory or is streamed, in all forwards alike: if the least recently used parts were
// dropped instead, a pass over the layers in order would never find a part that it needs. A thread reads the streamed parts
// ahead, in the order of the forward, into a ring of memory, and goes on with those that the next forward begins with. So no
// more than the ring and the parts that stay are in memory, and the disk is always busy while it is the limit.
#pragma once
#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "edgedec_cpu.h"
#include "kernels/kernels.h"
#include "weights/file.h"
#include "weights/row_file.h"

struct ec_model;

namespace edgedec {

class Streamer {
 public:
  Streamer() = default;
  ~Streamer();
  Streamer(const Streamer &) = delete;
  Streamer &operator=(const Streamer &) = delete;

  // Note where a matrix's tiles lie in the file; to be called before start().
  void place(int32_t which, int32_t layer, uint64_t offset, uint64_t n_bytes);
  // Check that the parts hold all that the model needs, and begin to read ahead. Throws Invalid, std::bad_alloc.
  void start(ec_model &model, int64_t file, uint64_t file_bytes, const ec_part *parts, int32_t n_parts,
             uint64_t ring_bytes);
  // Set up the store of experts, after start(). Throws Invalid, std::bad_alloc.
  void start_experts(int32_t n_slots);
  bool started() const { return !parts_.empty(); }
  bool complete() const { return started() || places_.empty(); }

  // --- during one forward; all but fetch() are called by the forward's caller or its thread 0 ---

  // Note which parts the forward will fetch, by their numbers and in order.
  void begin(const std::vector<int32_t> &order);
  // Wait until a part is in memory and the model's matrices point to it. Every thread calls this and gets the same answer:
  // false where the part can't be read or *cancel stopped the forward, which then fetches no more.
  bool fetch(int thread, int32_t part, const volatile int32_t *cancel);
  // Give back a part that was fetched; parts are given back in the order of fetching.
  void release(int32_t part);
  // End the forward; return false where fetch() was cancelled. Throws Unreadable where a part could not be read.
  bool end();

  // Write a dequantized row of the embedding matrix to out[n_embd].
  void embed(int32_t token, float *out);

  static int32_t part(int32_t stage, int32_t layer) { return layer * EC_PART_HEAD + stage; }
  int32_t first_head_part() const { return n_of_layers_; }
  int32_t n_parts() const { return (int32_t)parts_.size(); }
  // The rows of the head that a part holds, once it was fetched.
  const Matrix &head(int32_t part) const { return heads_[(size_t)(part - first_head_part())]; }
  int64_t head_begin(int32_t part) const { return parts_[(size_t)part].row_begin; }
  // Bytes of parts that were read so far.
  uint64_t bytes_read();

 private:
  struct Place {
    uint64_t offset, n_bytes;
  };
  struct Entry {
    int32_t part;
    uint64_t at, size;  // in the ring
    bool loaded;
  };

  void check_part(const Matrix &head, const ec_part &part) const;
  void bind(int32_t number, const uint8_t *data);
  Matrix &matrix(int32_t which, int32_t layer);
  const Place &placed(int32_t which, int32_t layer) const;
  bool find_room(uint64_t size, uint64_t *at) const;
  void read_next(std::unique_lock<std::mutex> &lock, uint64_t at);
  void work();

  ec_model *model_ = nullptr;
  std::map<std::pair<int32_t, int32_t>, Place> places_;  // by matrix and layer
  File file_;
  std::vector<ec_part> parts_;
  int32_t n_of_layers_ = 0, head_matrix_ = EC_OUTPUT;
  std::vector<Matrix> heads_;
  AlignedMemory ring_;
  RowFile rows_;
  uint64_t n_ring_ = 0;

  std::mutex lock_;
  std::condition_variable changed_;
  std::deque<Entry> entries_;      // in the ring, oldest first; the last may still be being read
  std::vector<int32_t> order_;     // streamed parts of the forward; the next forward is expected to need the same
  std::vector<int32_t> position_;  // by part, in order_
  size_t next_ = 0;                // of order_, to be read
  int32_t n_bound_ = 0, n_held_ = 0;
  bool reading_ = false, stopping_ = false, dropping_ = false, gave_up_ = false, cancelled_ = false;
  std::atomic<bool> abandon_{false};  // the part that is being read is not wanted any more
  std::string error_;  // of the reading thread, until the next forward
  uint64_t n_read_ = 0;
  std::thread reader_;
};

}  // namespace edgedec
