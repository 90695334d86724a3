// Rows of the embedding matrix, read from the file of the tiles one at a time: mapped, each would bring the pages around it
// into memory, of a matrix of which a forward needs next to nothing.
#pragma once
#include "file.h"
#include "kernels.h"

namespace edgedec {

class RowFile {
 public:
  bool is_open() const { return tile_ != nullptr; }
  // `file` as in File; the tiles of `rows` begin at `offset`. Throws Invalid, std::bad_alloc.
  void open(const File &file, uint64_t offset, const Matrix &rows);
  // Dequantize a row: out[n_cols]. Throws Unreadable.
  void read(int32_t row, float *out);

 private:
  File file_;
  uint64_t offset_ = 0;
  Matrix rows_{};
  AlignedMemory tile_;
};

}  // namespace edgedec
