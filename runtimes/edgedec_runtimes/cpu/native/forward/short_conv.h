// What the short convolutions of a session remember of its text: the columns that their kernels go over.
//
// A convolution of length n reads the columns of a token and of the n - 1 tokens before it, in each of its layers.
// Going back by a few tokens needs the columns of these; going back further needs those at the end of some page of 64
// tokens, from which up to 63 rows are evaluated again, with the same bits. So the newest pages hold all their columns,
// older ones the last n - 1 (row_notes.h has what it takes to evaluate rows again).
#pragma once
#include <memory>
#include <vector>

#include "edgedec_cpu.h"
#include "kernels/kernels.h"

namespace edgedec {

struct ColumnShape {
  int32_t n_conv = 0;  // layers with a convolution
  int32_t n_embd = 0;
  int32_t n_back = 0;  // columns that a row reads beside its own, less than PAGE_TOKENS
};

class ColumnCache {
 public:
  ColumnCache(const ColumnShape &shape, int32_t n_ctx);
  // Share the columns of the first n_tokens.
  ColumnCache(const ColumnCache &other, int32_t n_tokens);

  bool is_used() const { return shape_.n_conv > 0; }
  // Return n_past where the columns before it are held; else the position from which rows are to be evaluated again.
  int32_t held_before(int32_t n_past) const;
  // Begin a forward: forget what lies behind its rows, and make room for their columns (std::bad_alloc).
  void begin(const ec_item &item);
  // Make the columns of the slots [begin, end) writable; those that are held stay (std::bad_alloc).
  void prepare(int32_t begin, int32_t end);
  // Hold nothing any more of the slots from the page of `slot` on.
  void forget(int32_t slot);
  void move(const int32_t *source, int32_t n, int32_t start);

  // The column of a slot in one of the n_conv layers, [n_embd].
  float *at(int32_t slot, int32_t layer) const {
    const Page &page = pages_[(size_t)(slot / PAGE_TOKENS)];
    return page.columns.get() + (page.place(slot, layer)) * shape_.n_embd;
  }

  // What is saved is the last columns of the first n_tokens and, with `before`, those at the ends of earlier pages.
  uint64_t saved_bytes(int32_t n_tokens, bool before) const;
  void save(int32_t n_tokens, uint8_t *target, bool before) const;  // the columns before n_tokens are held
  void load(int32_t n_tokens, const uint8_t *source, bool before);

 private:
  // The columns of the slots from number `first` of the page on, [n_conv][PAGE_TOKENS - first][n_embd].
  struct Page {
    std::shared_ptr<float> columns;
    int32_t first = PAGE_TOKENS;
    int64_t place(int32_t slot, int32_t layer) const {
      return (int64_t)layer * (PAGE_TOKENS - first) + slot % PAGE_TOKENS - first;
    }
  };
  Page new_page(int32_t first) const;
  Page copy_of(const Page &page, int32_t first) const;
  bool holds(int32_t slot) const { return slot % PAGE_TOKENS >= pages_[(size_t)(slot / PAGE_TOKENS)].first; }
  template <class Visit>
  void visit_saved(int32_t n_tokens, bool before, Visit visitor) const;

  ColumnShape shape_;
  std::vector<Page> pages_;
};

}  // namespace edgedec
