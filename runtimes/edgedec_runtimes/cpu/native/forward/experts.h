// Which experts of a mixture the rows of a forward go through.
//
// A router gives each row a score for every expert; the row goes through the n_used best ones, and their outputs are
// summed by weight (Shazeer et al. 2017, arXiv:1701.06538). The choice depends on one row's scores alone. The rows are
// then grouped by expert, so that a forward reads the weights of an expert once for all rows that chose it.
#pragma once
#include <stdint.h>

#include <vector>

#include "edgedec_cpu.h"
#include "kernels/kernels.h"

namespace edgedec {

constexpr int32_t MAX_EXPERTS = 1024;
constexpr int32_t MAX_IN_GROUP = 64;  // the most rows of a group

// Rows that chose the same expert.
struct ExpertGroup {
  int32_t expert;
  int32_t n;      // rows, at most MAX_IN_GROUP
  int32_t first;  // of Routing::rows and Routing::weights
  int32_t slot;   // where the activations of the first row lie; the others follow. A multiple of GROUP_ROWS
};

// The routing of one layer in one forward.
struct Routing {
  std::vector<int32_t> chosen;    // [rows][n_used], experts, the one with the best score first
  std::vector<float> shares;      // [rows][n_used], what their outputs are multiplied by
  std::vector<float> shared;      // [rows], what the output of the shared expert is multiplied by
  std::vector<ExpertGroup> groups;  // ascending by expert
  std::vector<int32_t> rows;      // [rows * n_used], group by group; ascending within a group
  std::vector<float> weights;     // [rows * n_used], the share of each of these rows
  int32_t most_in_group = 0;

  // Allocate what n_rows rows need, so that the other functions allocate nothing.
  void reserve(int64_t n_rows, const ec_config &config);
  // Choose the experts of a row by its scores [n_expert]; bias [n_expert] is added to choose, or nullptr. Whatever the
  // scores are, also NaN, the experts are different ones, from 0 to n_expert - 1.
  void choose(int64_t row, const float *scores, const float *bias, const ec_config &config);
  // Choose all experts of a row, in order, of EC_GATING_RELU. Those whose score is not above 0 have the share 0.
  void choose_positive(int64_t row, const float *scores, const ec_config &config);
  // Multiply the shares of a row's experts by those of scales [n_expert].
  void scale(int64_t row, const float *scales, const ec_config &config);
  // Group n_rows rows, for all of which choose() was called. Of EC_GATING_RELU, an expert with the share 0 is left out.
  void group(int64_t n_rows, const ec_config &config);
  // Return the number of different experts that were chosen.
  uint64_t n_touched() const;
};

// How many experts the rows of layers went through.
struct Touched {
  uint64_t n_layers = 0, n_experts = 0;
};

// Return the most groups of n_rows rows.
int64_t most_groups(int64_t n_rows, const ec_config &config);
// Return the rows of activations that hold those of all groups of n_rows rows.
int64_t most_slots(int64_t n_rows, const ec_config &config);
// Copy a row of activations. `in_pairs` is Kernels::rows_in_pairs.
void copy_activations(const Activations &from, int64_t row, const Activations &to, int64_t to_row, bool in_pairs);

}  // namespace edgedec
