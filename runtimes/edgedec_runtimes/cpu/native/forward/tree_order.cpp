#include "forward/tree_order.h"

#include <algorithm>

namespace edgedec {

std::vector<TreeStep> tree_steps(const int32_t *parents, int32_t n) {
  // Row i is number i + 1 here, and the state before the first step is number 0.
  std::vector<int32_t> sizes((size_t)n + 1, 1);
  std::vector<std::vector<int32_t>> children((size_t)n + 1);
  for (int32_t i = n; i > 0; --i) sizes[(size_t)parents[i - 1] + 1] += sizes[(size_t)i];
  for (int32_t i = 1; i <= n; ++i) children[(size_t)parents[i - 1] + 1].push_back(i);
  struct Waiting {
    int32_t node, load, level;
  };
  std::vector<TreeStep> steps;
  std::vector<Waiting> stack = {{0, -1, 0}};
  while (!stack.empty()) {
    const Waiting at = stack.back();
    stack.pop_back();
    std::vector<int32_t> &below = children[(size_t)at.node];
    std::stable_sort(below.begin(), below.end(),
                     [&](int32_t a, int32_t b) { return sizes[(size_t)a] < sizes[(size_t)b]; });
    const bool branches = below.size() > 1;
    if (at.node > 0 || branches) steps.push_back({at.load, at.node - 1, branches ? at.level : -1});
    for (size_t i = below.size(); i-- > 0;) {
      const bool is_last = i + 1 == below.size();
      stack.push_back({below[i], i == 0 ? -1 : at.level, is_last ? at.level : at.level + 1});
    }
  }
  return steps;
}

int32_t n_kept(const std::vector<TreeStep> &steps) {
  int32_t n = 0;
  for (const TreeStep &step : steps) n = std::max(n, step.keep + 1);
  return n;
}

}  // namespace edgedec
