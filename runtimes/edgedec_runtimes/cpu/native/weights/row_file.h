// Rows of a matrix that are read from the tile file a few at a time: those of the embedding matrix, and of the table of
// what layers get of a token. A forward needs next to nothing of the matrix; if it were mapped, each row would bring the
// pages around it into memory.
#pragma once
#include "kernels/kernels.h"
#include "weights/file.h"

namespace edgedec {

class RowFile {
 public:
  bool is_open() const { return tiles_ != nullptr; }
  // `file` is as in File; the tiles of the matrix `rows` begin at `offset`, and n_at_once rows are read at a time. Throws
  // Invalid, std::bad_alloc.
  void open(const File &file, uint64_t offset, const Matrix &rows, int32_t n_at_once);
  // Write the dequantized rows from number `first` on to out, [n_at_once][n_cols]. Throws Unreadable.
  void read(int64_t first, float *out);

 private:
  File file_;
  uint64_t offset_ = 0;
  int64_t n_at_once_ = 1;
  Matrix rows_{};
  AlignedMemory tiles_;
};

}  // namespace edgedec
