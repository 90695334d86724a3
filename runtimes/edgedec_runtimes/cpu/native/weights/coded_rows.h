// Rows of the types of coding.h: from a block of a file to a tile, and from a tile to floats.
#pragma once
#include <stdint.h>

namespace edgedec {

// Write the block `in` of row r (0 to 15) to a block of a tile.
void pack_coded(int32_t type, const uint8_t *in, uint8_t *tile, int r);
// Write row r of a block of a tile to out, dequantized as by ggml.
void dequantize_coded(int32_t type, const uint8_t *tile, int r, float *out);

}  // namespace edgedec
