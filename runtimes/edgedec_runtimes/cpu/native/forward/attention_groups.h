// Which rows attend to which spans together.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include <vector>

namespace edgedec {

struct Plan;
struct RowRange;

// Rows that attend to the same spans in the same pages: all rows of an item, or rows of items whose sessions share these pages.
struct AttentionGroup {
  struct Row {
    size_t place;  // among the rows that attend
    size_t query;  // among the rows that have queries
  };
  std::vector<Row> rows;
  size_t n_before;      // rows of the groups before this one in its step
  int64_t begin, end;   // the spans
  bool resumed;         // the rows have attended to the spans before `begin` in earlier steps
  bool unfinished;      // they attend to the spans from `end` on in later steps
};

// Steps follow one another, so that each row goes over its spans in order. A row is in at most one group of a step.
using AttentionSteps = std::vector<std::vector<AttentionGroup>>;

// Return the steps of some ranges of rows, one for each item. The pages that the items write must be made.
AttentionSteps attention_steps(const Plan &plan, const std::vector<int32_t> &rows, const std::vector<RowRange> &ranges);

}  // namespace edgedec
