#include "weights/tiles.h"

#include "weights/coding.h"

namespace edgedec {
namespace {

// Write row r's numbers of 32 columns, below 64: their low 4 bits, and behind these the N_HIGH bits above them.
template <int N_HIGH>
void put_numbers(uint8_t *out, int r, const uint8_t *q) {
  uint8_t low[32], high[32];
  for (int i = 0; i < 32; ++i) low[i] = q[i] & 15, high[i] = q[i] >> 4;
  put_codes(4, out, r, low);
  if constexpr (N_HIGH > 0) put_codes(N_HIGH, out + 256, r, high);
}

template <int N_HIGH>
int get_number(const uint8_t *in, int r, int column) {
  const int low = (int)get_code(4, in, r, column);
  if constexpr (N_HIGH == 0) return low;
  else return low | (int)get_code(N_HIGH, in + 256, r, column) << 4;
}

void copy16(uint8_t *to, const uint8_t *from) { memcpy(to, from, 2); }

// Blocks of 32 columns: [d][m][qh] qs
template <bool min, bool fifth>
void pack_simple(const uint8_t *in, uint8_t *out, int r) {
  const uint8_t *high = in + (min ? 4 : 2), *low = high + (fifth ? 4 : 0);
  uint32_t bits = 0;
  if (fifth) memcpy(&bits, high, 4);
  uint8_t q[32];
  for (int j = 0; j < 16; ++j) {
    q[j] = (uint8_t)((low[j] & 15) | ((bits >> j) & 1) << 4);
    q[j + 16] = (uint8_t)((low[j] >> 4) | ((bits >> (j + 16)) & 1) << 4);
  }
  put_numbers<fifth>(out, r, q);
  uint8_t *scales = out + 256 + (fifth ? 64 : 0);
  copy16(scales + 2 * r, in);
  if (min) copy16(scales + 32 + 2 * r, in + 2);
}

void pack_q8_0(const uint8_t *in, uint8_t *out, int r) {
  for (int g = 0; g < 8; ++g) memcpy(out + 64 * g + 4 * r, in + 2 + 4 * g, 4);
  copy16(out + 512 + 2 * r, in);
}

// Q4_K and Q5_K: d, dmin, scales[12], [qh[32]], qs[128]
template <bool fifth>
void pack_q45_k(const uint8_t *in, uint8_t *out, int r) {
  const int step = fifth ? 320 : 256;
  const uint8_t *high = in + 16, *low = in + (fifth ? 48 : 16);
  for (int s = 0; s < 8; ++s) {
    uint8_t q[32];
    for (int l = 0; l < 32; ++l) {
      const uint8_t byte = low[32 * (s / 2) + l];
      q[l] = s % 2 ? byte >> 4 : byte & 15;
      if (fifth) q[l] |= (uint8_t)(((high[l] >> s) & 1) << 4);
    }
    put_numbers<fifth>(out + step * s, r, q);
  }
  uint8_t *scales = out + 8 * step;
  for (int i = 0; i < 12; ++i) scales[16 * i + r] = in[4 + i];
  copy16(scales + 192 + 2 * r, in);
  copy16(scales + 224 + 2 * r, in + 2);
}

// Q6_K: ql[128], qh[64], scales[16], d. Columns 128 h + 32 i + l: 4 bits in ql[64 h + 32 (i % 2) + l], its high half
// for i of 2 and 3; 2 bits in qh[32 h + l] from bit 2 i.
void pack_q6_k(const uint8_t *in, uint8_t *out, int r) {
  for (int s = 0; s < 8; ++s) {
    const int h = s / 4, i = s % 4;
    uint8_t q[32];
    for (int l = 0; l < 32; ++l) {
      const uint8_t byte = in[64 * h + 32 * (i % 2) + l];
      const uint8_t two = (in[128 + 32 * h + l] >> 2 * i) & 3;
      q[l] = (uint8_t)((i < 2 ? byte & 15 : byte >> 4) | two << 4);
    }
    put_numbers<2>(out + 384 * s, r, q);
  }
  for (int i = 0; i < 16; ++i) out[3072 + 16 * i + r] = in[192 + i];
  copy16(out + 3328 + 2 * r, in + 208);
}

void pack_block(int32_t type, const uint8_t *in, uint8_t *out, int r) {
  switch (type) {
    case F32: memcpy(out + 4 * r, in, 4); break;
    case F16: case BF16: copy16(out + 2 * r, in); break;
    case Q4_0: pack_simple<false, false>(in, out, r); break;
    case Q4_1: pack_simple<true, false>(in, out, r); break;
    case Q5_0: pack_simple<false, true>(in, out, r); break;
    case Q5_1: pack_simple<true, true>(in, out, r); break;
    case Q8_0: pack_q8_0(in, out, r); break;
    case Q4_K: pack_q45_k<false>(in, out, r); break;
    case Q5_K: pack_q45_k<true>(in, out, r); break;
    case Q6_K: pack_q6_k(in, out, r); break;
    default: pack_coded(type, in, out, r); break;
  }
}

template <bool min, bool fifth>
void dequantize_simple(const uint8_t *tile, int r, float *out) {
  const uint8_t *scales = tile + 256 + (fifth ? 64 : 0);
  const float d = read_half(scales + 2 * r), m = min ? read_half(scales + 32 + 2 * r) : 0.0f;
  const int zero = min ? 0 : fifth ? 16 : 8;
  for (int i = 0; i < 32; ++i) out[i] = d * (float)(get_number<fifth>(tile, r, i) - zero) + m;
}

template <bool fifth>
void dequantize_q45_k(const uint8_t *tile, int r, float *out) {
  const int step = fifth ? 320 : 256;
  const uint8_t *b = tile + 8 * step + r;
  const float d = read_half(tile + 8 * step + 192 + 2 * r), dmin = read_half(tile + 8 * step + 224 + 2 * r);
  for (int s = 0; s < 8; ++s) {
    const int i = s % 4;
    const int scale = s < 4 ? b[16 * i] & 63 : (b[16 * (i + 8)] & 15) | (b[16 * i] >> 6) << 4;
    const int minimum = s < 4 ? b[16 * (i + 4)] & 63 : (b[16 * (i + 8)] >> 4) | (b[16 * (i + 4)] >> 6) << 4;
    const float ds = d * (float)scale, ms = dmin * (float)minimum;
    for (int l = 0; l < 32; ++l) out[32 * s + l] = ds * (float)get_number<fifth>(tile + step * s, r, l) - ms;
  }
}

void dequantize_q6_k(const uint8_t *tile, int r, float *out) {
  const float d = read_half(tile + 3328 + 2 * r);
  for (int s = 0; s < 8; ++s) {
    for (int l = 0; l < 32; ++l) {
      const float scale = d * (float)(int8_t)tile[3072 + 16 * (2 * s + l / 16) + r];
      out[32 * s + l] = scale * (float)(get_number<2>(tile + 384 * s, r, l) - 32);
    }
  }
}

void dequantize_block(int32_t type, const uint8_t *tile, int r, float *out) {
  switch (type) {
    case F32: memcpy(out, tile + 4 * r, 4); break;
    case F16: *out = read_half(tile + 2 * r); break;
    case BF16: {
      uint16_t b;
      memcpy(&b, tile + 2 * r, 2);
      *out = bfloat_to_float(b);
      break;
    }
    case Q4_0: dequantize_simple<false, false>(tile, r, out); break;
    case Q4_1: dequantize_simple<true, false>(tile, r, out); break;
    case Q5_0: dequantize_simple<false, true>(tile, r, out); break;
    case Q5_1: dequantize_simple<true, true>(tile, r, out); break;
    case Q8_0: {
      const float d = read_half(tile + 512 + 2 * r);
      for (int i = 0; i < 32; ++i) out[i] = d * (float)(int8_t)tile[64 * (i / 4) + 4 * r + i % 4];
      break;
    }
    case Q4_K: dequantize_q45_k<false>(tile, r, out); break;
    case Q5_K: dequantize_q45_k<true>(tile, r, out); break;
    case Q6_K: dequantize_q6_k(tile, r, out); break;
    default: dequantize_coded(type, tile, r, out); break;
  }
}

// Bytes of a block of 16 rows.
int64_t block_tile_bytes(int32_t type) {
  const Coding coded = coding(type);
  return coded.columns != 0 ? coded_bytes(coded) : block_layout(type).bytes * TILE_ROWS;
}

}  // namespace

uint64_t tile_bytes(int32_t type, int64_t n_rows, int64_t n_cols) {
  const BlockLayout block = block_layout(type);
  constexpr int64_t most = (int64_t)1 << 31;
  if (block.columns == 0 || n_rows < 1 || n_cols < 1 || n_rows >= most || n_cols >= most || n_cols % block.columns)
    return 0;
  const uint64_t n_tiles = ((uint64_t)n_rows + TILE_ROWS - 1) / TILE_ROWS;
  return n_tiles * (uint64_t)(n_cols / block.columns) * (uint64_t)block_tile_bytes(type);
}

void pack_tiles(int32_t type, int64_t n_cols, int64_t row_begin, int64_t row_end, const uint8_t *source,
                uint8_t *tiles) {
  const BlockLayout block = block_layout(type);
  const int64_t n_blocks = n_cols / block.columns, row_bytes = n_blocks * block.bytes;
  const int64_t step = block_tile_bytes(type), tile_size = n_blocks * step;
  for (int64_t row = row_begin; row < row_end; row += TILE_ROWS) {
    uint8_t *tile = tiles + row / TILE_ROWS * tile_size;
    const int n = row_end - row < TILE_ROWS ? (int)(row_end - row) : TILE_ROWS;
    if (n < TILE_ROWS) memset(tile, 0, (size_t)tile_size);
    for (int64_t b = 0; b < n_blocks; ++b)
      for (int r = 0; r < n; ++r)
        pack_block(type, source + (row - row_begin + r) * row_bytes + b * block.bytes, tile + b * step, r);
  }
}

void tile_row(int32_t type, int64_t n_cols, const uint8_t *tiles, int64_t row, float *out) {
  const BlockLayout block = block_layout(type);
  const int64_t n_blocks = n_cols / block.columns, step = block_tile_bytes(type);
  const uint8_t *tile = tiles + row / TILE_ROWS * n_blocks * step;
  for (int64_t b = 0; b < n_blocks; ++b, tile += step, out += block.columns)
    dequantize_block(type, tile, (int)(row % TILE_ROWS), out);
}

}  // namespace edgedec
