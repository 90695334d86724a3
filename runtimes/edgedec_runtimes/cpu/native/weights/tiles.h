// Tiles: 16 rows of a matrix, their bits reordered so that one vector holds the same columns of all rows.
//
// A tile goes through the columns block by block. A block of a tile has 16 times the bytes of a GGUF block, and exactly
// its bits, but for types with a look-up grid and TQ1_0: of these, tiles hold what the file's bits stand for
// (coding.h), from which the bits can be made again. In 32 columns there are 8 groups of 4; lane r of a 64-byte vector
// holds 4 consecutive columns of row r.
//
//   nibbles     4 vectors; vector j has group j in the low and group j + 4 in the high half of its bytes
//   fifth bits  1 vector; bit g of a byte belongs to group g
//   two bits    2 vectors; the first has groups 0 to 3 (bits 2g, 2g + 1), the second groups 4 to 7
//   bytes       8 vectors, one per group
//
//   Q4_0  nibbles, d[16]                        Q4_1  nibbles, d[16], m[16]          (d, m: float16)
//   Q5_0  nibbles, fifth bits, d[16]            Q5_1  nibbles, fifth bits, d[16], m[16]
//   Q8_0  bytes, d[16]
//   Q4_K  8 x nibbles, packed scales[12][16], d[16], dmin[16]
//   Q5_K  8 x (nibbles, fifth bits), packed scales[12][16], d[16], dmin[16]
//   Q6_K  8 x (nibbles, two bits), scales[16][16], d[16]
//   F32, F16, BF16: value[16], column by column
//   All others: coding.h
//
// Rows that fill up the last tile are zero.
#pragma once
#include "weights/tensor_types.h"

namespace edgedec {

// Return the bytes of the tiles of a matrix; 0 where there are none for its type or shape.
uint64_t tile_bytes(int32_t type, int64_t n_rows, int64_t n_cols);
// Rearrange the rows [row_begin, row_end) of a matrix; `source` begins with row_begin, a multiple of 16.
void pack_tiles(int32_t type, int64_t n_cols, int64_t row_begin, int64_t row_end, const uint8_t *source,
                uint8_t *tiles);
// Write one row to out[n_cols], dequantized as by ggml.
void tile_row(int32_t type, int64_t n_cols, const uint8_t *tiles, int64_t row, float *out);
// Round rows of a matrix, as a GGUF has them in `type`, to rows of Q4_0: for matrices whose speed counts for more than
// their last bits. n_cols is a multiple of 32 and fits the type. Each block gets the scale with the least squared error
// of a few around the one that ggml would choose.
void rows_to_q4_0(int32_t type, int64_t n_rows, int64_t n_cols, const uint8_t *source, uint8_t *out);

}  // namespace edgedec
