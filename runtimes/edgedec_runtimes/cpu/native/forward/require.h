// What a model's matrices and vectors must be: each function throws Invalid with what was found and expected.
#pragma once
#include <string>
#include <vector>

#include "forward/model.h"

namespace edgedec {

inline void require(bool holds, const std::string &message) {
  if (!holds) throw Invalid(message);
}

inline std::string shape(int64_t rows, int64_t cols) { return std::to_string(rows) + " x " + std::to_string(cols); }

inline void require_matrix(const Matrix &m, const char *name, int64_t rows, int64_t cols) {
  require(m.n_rows != 0, std::string("the matrix ") + name + " is missing");
  require(m.n_rows == rows && m.n_cols == cols, std::string("the matrix ") + name + " is " + shape(m.n_rows, m.n_cols) +
                                                    ", expected " + shape(rows, cols));
}

inline void require_vector(const std::vector<float> &v, const char *name, int64_t n, bool optional) {
  require(optional || !v.empty(), std::string("the vector ") + name + " is missing");
  require(v.empty() || (int64_t)v.size() == n, std::string("the vector ") + name + " has " + std::to_string(v.size()) +
                                                   " elements, expected " + std::to_string(n));
}

}  // namespace edgedec
