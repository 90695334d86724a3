// Rows of the embedding matrix that are read from the tile file one at a time. A forward needs next to nothing of the matrix;
// if it were mapped, each row would bring the pages around it into memory.
#pragma once
#include "kernels/kernels.h"
#include "weights/file.h"

namespace edgedec {

class RowFile {
 public:
  bool is_open() const { return tile_ != nullptr; }
  // `file` is as in File; the tiles of the matrix `rows` begin at `offset`. Throws Invalid, std::bad_alloc.
  void open(const File &file, uint64_t offset, const Matrix &rows);
  // Write a dequantized row to out[n_cols]. Throws Unreadable.
  void read(int32_t row, float *out);

 private:
  File file_;
  uint64_t offset_ = 0;
  Matrix rows_{};
  AlignedMemory tile_;
};

}  // namespace edgedec
