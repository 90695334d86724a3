// The keys and values of a session for all layers, in pages of 64 tokens. A fork shares pages until one session writes
// there.
#pragma once
#include <memory>
#include <vector>

#include "edgedec_cpu.h"
#include "kernels/kernels.h"

namespace edgedec {

// The keys and values of one layer in a page.
struct KVLayer {
  int32_t n_head_kv, head_dim;
  KVLayout layout;  // of one head
  int64_t begin;    // where the first head's are

  int64_t offset(int32_t head) const { return begin + layout.bytes * head; }
};

struct KVShape {
  // The heads and their length of a layer.
  struct Heads {
    int32_t n_head_kv, head_dim;
  };

  std::vector<KVLayer> layers;  // those that store keys and values
  int32_t bits;
  int32_t n_rot;  // cosines and sines stored for each token where keys are stored without their bias; else 0
  int64_t rotations = 0;  // where a page has them

  // `type` is one of EC_KV_...
  KVShape(const std::vector<Heads> &layers, int32_t type, int32_t n_rot);

  int64_t page_bytes() const { return rotations + (int64_t)PAGE_TOKENS * n_rot * (int64_t)sizeof(float); }
};

class KVCache {
 public:
  KVCache(const KVShape &shape, int32_t n_ctx)
      : shape_(shape), n_ctx_(n_ctx), pages_((n_ctx + PAGE_TOKENS - 1) / PAGE_TOKENS), in_memory_(pages_.size()) {
    addresses_.resize(pages_.size());
  }
  // Share the pages that hold the first n_tokens.
  KVCache(const KVCache &other, int32_t n_tokens);
  // Free the pages behind those of the first n_tokens.
  void trim(int32_t n_tokens);

  const KVShape &shape() const { return shape_; }
  int32_t n_ctx() const { return n_ctx_; }
  const uint8_t *const *pages() const { return addresses_.data(); }

  // Make the slots [begin, end) writable: make the pages that are absent, and copy those that are shared
  // (std::bad_alloc).
  void prepare(int32_t begin, int32_t end);
  // Store one token's keys and values of one head of a layer of the shape, head_dim floats each.
  void write(const Kernels &kernels, int32_t layer, int32_t head, int32_t slot, const float *keys, const float *values);
  // Store the cosines and sines of a token's position, [n_rot]; do nothing where the shape has none.
  void write_rotation(int32_t slot, const float *cos_sin);
  void move(const int32_t *source, int32_t n, int32_t start);
  // Put into the slots from `start` on what each head of each layer has in slots of its own of another cache of the same
  // shape, without rotations: slots [heads of all layers][n].
  void gather(const KVCache &other, const int32_t *slots, int32_t n, int32_t start);

  int64_t token_bytes() const;
  void save(int32_t n_tokens, uint8_t *target) const;
  void load(int32_t n_tokens, const uint8_t *source);
  // Throw Invalid unless [begin, end) are slots of whole pages, and n_bytes are theirs.
  void check_pages(int32_t begin, int32_t end, uint64_t n_bytes) const;
  // Copy the pages of the slots [begin, end), which begin and end a page, as they lie in memory.
  void save_pages(int32_t begin, int32_t end, uint8_t *target) const;
  void load_pages(int32_t begin, int32_t end, const uint8_t *source);  // std::bad_alloc: some may be loaded

 private:
  std::shared_ptr<uint8_t> new_page(size_t i);  // std::bad_alloc
  template <class Visit>
  void visit(int32_t slot, Visit visitor) const;
  template <class Visit>
  void visit_head(const KVLayer &of, int32_t head, int32_t slot, Visit visitor) const;
  uint8_t *at(int32_t slot, int64_t offset) const { return pages_[slot / PAGE_TOKENS].get() + offset; }
  void copy_token(int32_t from, int32_t to);

  KVShape shape_;
  int32_t n_ctx_;
  std::vector<std::shared_ptr<uint8_t>> pages_;
  std::vector<const uint8_t *> addresses_;
  // Memory with a place for each page, empty until a page is needed. A place is free while its page in in_memory_ is
  // gone; pages before first_in_memory_, and those whose place a fork still has, are allocated apart.
  std::shared_ptr<uint8_t> memory_;
  std::vector<std::weak_ptr<uint8_t>> in_memory_;
  size_t first_in_memory_ = 0;
};

}  // namespace edgedec
