#include "weights/row_file.h"

#include "forward/model.h"
#include "weights/tiles.h"

namespace edgedec {

void RowFile::open(const File &file, uint64_t offset, const Matrix &rows) {
  const uint64_t n_bytes = tile_bytes(rows.type, rows.n_rows, rows.n_cols);
  if (offset > file.n_bytes() || n_bytes > file.n_bytes() - offset)
    throw Invalid("the embedding matrix lies beyond the end of the file");
  tile_ = aligned_memory(io_ceil(tile_bytes(rows.type, TILE_ROWS, rows.n_cols)) + IO_ALIGNMENT);
  file_ = file;
  offset_ = offset;
  rows_ = rows;
}

void RowFile::read(int32_t row, float *out) {
  const uint64_t tile = tile_bytes(rows_.type, TILE_ROWS, rows_.n_cols);
  const uint64_t offset = offset_ + tile * (uint64_t)(row / TILE_ROWS);
  file_.read_pages(offset, tile, tile_.get(), nullptr);
  tile_row(rows_.type, rows_.n_cols, tile_.get() + (offset - io_floor(offset)), row % TILE_ROWS, out);
}

}  // namespace edgedec
