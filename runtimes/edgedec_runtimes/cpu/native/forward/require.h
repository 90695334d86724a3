// What is thrown for wrong arguments and results, and the checks of a model's matrices and vectors, whose messages say
// what was found and expected.
#pragma once
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/kernels.h"

namespace edgedec {

// Thrown for wrong arguments; the C interface returns EC_INVALID.
struct Invalid : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Thrown for results that are infinite or no numbers; the C interface returns EC_NOT_FINITE.
struct NotFinite : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline void require(bool holds, const char *message) {
  if (!holds) throw Invalid(message);
}
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
