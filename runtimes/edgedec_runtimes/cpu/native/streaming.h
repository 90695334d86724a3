// Weights that do not fit in memory: parts of them are read from their file in each forward.
//
// A part is what one stage of the forward reads: q, k and v of a layer, its attention output, gate and up, down, or some
// rows of the head. Parts stay in memory or are streamed, which does not change from forward to forward: with the least
// recently used ones thrown out, a pass over the layers in order would find nothing of what it needs. A thread reads the
// streamed parts ahead, in the order of the forward, into a ring of memory, and goes on with those that the next forward
// begins with. So no more is in memory than the ring and what stays, and the disk does not rest while it is the limit.
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
#include "file.h"
#include "kernels.h"
#include "row_file.h"

struct ec_model;

namespace edgedec {

class Streamer {
 public:
  Streamer() = default;
  ~Streamer();
  Streamer(const Streamer &) = delete;
  Streamer &operator=(const Streamer &) = delete;

  // Say where a matrix's tiles lie in the file; before start().
  void place(int32_t which, int32_t layer, uint64_t offset, uint64_t n_bytes);
  // Check that the parts are all that the model needs, and begin. Throws Invalid, std::bad_alloc.
  void start(ec_model &model, int64_t file, uint64_t file_bytes, const ec_part *parts, int32_t n_parts,
             uint64_t ring_bytes);
  bool started() const { return !parts_.empty(); }
  bool complete() const { return started() || places_.empty(); }

  // --- one forward; all but fetch() by its caller or its thread 0 ---

  // Say which parts the forward will fetch, by number and in order.
  void begin(const std::vector<int32_t> &order);
  // Wait until a part is in memory and the model's matrices point to it; every thread calls it, and all get the same
  // answer: false when it can't be read or *cancel stopped it. Then no more is fetched.
  bool fetch(int thread, int32_t part, const volatile int32_t *cancel);
  // A part that was fetched is not needed any more; in the order of fetching.
  void release(int32_t part);
  // The forward is over; false when fetch() was cancelled. Throws Unreadable when the file was the reason.
  bool end();

  // Dequantize a row of the embedding matrix: out[n_embd].
  void embed(int32_t token, float *out);

  static int32_t part(int32_t stage, int32_t layer) { return layer * EC_PART_HEAD + stage; }
  int32_t first_head_part() const { return n_of_layers_; }
  int32_t n_parts() const { return (int32_t)parts_.size(); }
  // The rows of the head that a part has, once it was fetched.
  const Matrix &head(int32_t part) const { return heads_[(size_t)(part - first_head_part())]; }
  int64_t head_begin(int32_t part) const { return parts_[(size_t)part].row_begin; }
  // Of the parts that were streamed so far.
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
  std::deque<Entry> entries_;      // in the ring, oldest first; the last may be on its way
  std::vector<int32_t> order_;     // streamed parts of the forward; the next one is expected to need the same
  std::vector<int32_t> position_;  // by part, in order_
  size_t next_ = 0;                // of order_, to be read
  int32_t n_bound_ = 0, n_held_ = 0;
  bool reading_ = false, stopping_ = false, dropping_ = false, gave_up_ = false, cancelled_ = false;
  std::atomic<bool> abandon_{false};  // the part on its way is not wanted
  std::string error_;  // of the reading thread, until the next forward
  uint64_t n_read_ = 0;
  std::thread reader_;
};

}  // namespace edgedec
