// An order in which the rows of a tree can be gone through with one state that changes from row to row.
#pragma once
#include <stdint.h>

#include <vector>

namespace edgedec {

// Go on from the state that was kept under number `load`, or from where the step before has ended where it is -1; do
// the row, -1 for none; and keep the state under number `keep`, -1: not at all.
struct TreeStep {
  int32_t load, row, keep;
};

// Return the steps through the rows of a tree: every row follows its parent's state. parents[i] is less than i, -1 for
// the state before the first step. At most 1 + log2(n) states are kept at a time, as the largest branch comes last.
std::vector<TreeStep> tree_steps(const int32_t *parents, int32_t n);
// Return how many states the steps keep at a time.
int32_t n_kept(const std::vector<TreeStep> &steps);

}  // namespace edgedec
