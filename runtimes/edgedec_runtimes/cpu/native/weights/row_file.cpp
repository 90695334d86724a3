#include "weights/row_file.h"

#include "forward/model.h"
#include "weights/tiles.h"

namespace edgedec {

void RowFile::open(const File &file, uint64_t offset, const Matrix &rows, int32_t n_at_once) {
  const uint64_t n_bytes = tile_bytes(rows.type, rows.n_rows, rows.n_cols);
  if (offset > file.n_bytes() || n_bytes > file.n_bytes() - offset)
    throw Invalid("a matrix whose rows are read lies beyond the end of the file");
  if (n_at_once < 1 || n_at_once > rows.n_rows) throw Invalid("more rows are read at once than there are");
  const int64_t n_tiles = (n_at_once + TILE_ROWS - 2) / TILE_ROWS + 1;  // the most that hold rows that follow one another
  tiles_ = aligned_memory(io_ceil(tile_bytes(rows.type, n_tiles * TILE_ROWS, rows.n_cols)) + IO_ALIGNMENT);
  file_ = file;
  offset_ = offset;
  n_at_once_ = n_at_once;
  rows_ = rows;
}

void RowFile::read(int64_t first, float *out) {
  const uint64_t tile = tile_bytes(rows_.type, TILE_ROWS, rows_.n_cols);
  const int64_t before = first / TILE_ROWS, end = (first + n_at_once_ - 1) / TILE_ROWS + 1;
  const uint64_t offset = offset_ + tile * (uint64_t)before;
  file_.read_pages(offset, tile * (uint64_t)(end - before), tiles_.get(), nullptr);
  const uint8_t *tiles = tiles_.get() + (offset - io_floor(offset));
  for (int64_t row = first; row < first + n_at_once_; ++row, out += rows_.n_cols)
    tile_row(rows_.type, rows_.n_cols, tiles, row - before * TILE_ROWS, out);
}

}  // namespace edgedec
