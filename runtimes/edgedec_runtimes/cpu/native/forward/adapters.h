// Low-rank adapters (Hu et al. 2021, arXiv:2106.09685): what they add to the products of a model's matrices.
#pragma once
#include <map>
#include <vector>

#include "kernels/kernels.h"

namespace edgedec {

// The two matrices by which an adapter changes a matrix W of the model: W x becomes W x + scale * factor * B (A x). The
// scale is the session's, and both products read floats.
struct AdapterPair {
  int32_t adapter;
  Matrix a, b;      // [rank][n_cols of W], [n_rows of W][rank]
  float factor;
  int64_t place;    // in Adapters::low: A x of all rows lies behind `place` numbers for each row of a forward
  int64_t rank() const { return a.n_rows; }
  int64_t n_tiles() const { return (a.n_rows + 15) / 16; }  // of a
};

// The adapters of a model.
struct Adapters {
  int32_t n = 0;
  std::map<const Matrix *, std::vector<AdapterPair>> pairs;  // by the matrix that they change, in the order of adapters
  std::map<int32_t, int64_t> widths;                         // the numbers for a row in `low`, by layer
  std::vector<float> low;  // A x, of the pairs of one layer at a time

  const std::vector<AdapterPair> *of(const Matrix *matrix) const {
    const auto found = pairs.find(matrix);
    return found == pairs.end() ? nullptr : &found->second;
  }
  float *low_of(const AdapterPair &pair, int32_t max_rows) { return low.data() + pair.place * max_rows; }
  // Make the memory of forwards with up to max_rows rows.
  void finish(int32_t max_rows) {
    int64_t widest = 0;
    for (const auto &[layer, width] : widths) widest = width > widest ? width : widest;
    low.resize((size_t)(widest * max_rows));
  }
};

}  // namespace edgedec
