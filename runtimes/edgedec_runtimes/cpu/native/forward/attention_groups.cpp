#include "forward/attention_groups.h"

#include <algorithm>

#include "forward/plan.h"

namespace edgedec {
namespace {

constexpr int64_t PAGES_OF_SPAN = SPAN_TOKENS / PAGE_TOKENS;
// With fewer shared spans a step for them costs more than it saves. Numbers of less than 16 bits are unpacked once for
// all rows of a group; halves are only read once (docs/cpu-kernels.md has the figures).
constexpr int64_t LEAST_SPANS = 2, LEAST_SPANS_OF_HALVES = 32;

// Makes the steps of one list of rows.
class Grouping {
 public:
  Grouping(const Plan &plan, const std::vector<int32_t> &rows) : plan_(plan), rows_(rows) {}

  // Add the groups of some items, whose pages are the same up to span `begin`, to the steps from number `step` on.
  void add(std::vector<RowRange> ranges, int64_t begin, size_t step) {
    while (!ranges.empty()) {
      const bool packed = item(ranges[0]).session->cache.shape().bits < 16;
      const int64_t least = packed ? LEAST_SPANS : LEAST_SPANS_OF_HALVES;
      std::vector<RowRange> together = {ranges[0]}, others;
      int64_t end = plan_.n_spans();
      for (size_t i = 1; i < ranges.size(); ++i) {
        const int64_t shared = shared_spans(item(ranges[0]), item(ranges[i]), begin);
        const bool enough = shared - begin >= least;
        if (enough) end = std::min(end, shared);
        (enough ? together : others).push_back(ranges[i]);
      }
      add_group(together, begin, end, step);
      if (together.size() > 1) add(together, end, step + 1);
      ranges = std::move(others);
    }
  }

  AttentionSteps steps;

 private:
  const ec_item &item(const RowRange &range) const { return plan_.items[plan_.rows[(size_t)rows_[range.begin]].item]; }

  // Return how many spans from the first one on are in the same pages, of which the first `known` are known to be. What
  // the items write is in none of them.
  static int64_t shared_spans(const ec_item &a, const ec_item &b, int64_t known) {
    const uint8_t *const *first = a.session->cache.pages(), *const *second = b.session->cache.pages();
    const int64_t n_pages = std::min(a.n_past, b.n_past) / PAGE_TOKENS;
    int64_t page = known * PAGES_OF_SPAN;
    while (page < n_pages && first[page] == second[page]) ++page;
    return page / PAGES_OF_SPAN;
  }

  void add_group(const std::vector<RowRange> &ranges, int64_t begin, int64_t end, size_t step) {
    if (steps.size() <= step) steps.resize(step + 1);
    std::vector<AttentionGroup> &groups = steps[step];
    const size_t n_before = groups.empty() ? 0 : groups.back().n_before + groups.back().rows.size();
    groups.push_back({{}, n_before, begin, end, begin > 0, ranges.size() > 1});
    for (const RowRange &range : ranges)
      for (size_t i = range.begin; i < range.end; ++i)
        groups.back().rows.push_back({i, range.first_query + i - range.begin});
  }

  const Plan &plan_;
  const std::vector<int32_t> &rows_;
};

}  // namespace

AttentionSteps attention_steps(const Plan &plan, const std::vector<int32_t> &rows,
                               const std::vector<RowRange> &ranges) {
  Grouping grouping(plan, rows);
  grouping.add(ranges, 0, 0);
  return std::move(grouping.steps);
}

}  // namespace edgedec
