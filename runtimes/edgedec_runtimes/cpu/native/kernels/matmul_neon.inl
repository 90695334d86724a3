// Products of tiles and quantized activations with NEON: for the dot products of Armv8.2 (sdot), and for i8mm's
// products of 2 x 8 with 8 x 2 bytes (smmla). Included by matmul.inl in place of its own plan, which is made for wider
// vectors.
//
// A tile is 4 parts of 4 rows. The scales of 8 blocks of 32 columns are unpacked for all 16 rows at once. Then passes
// go over these blocks: one pass for all parts, or one for each part where there are more than 4 rows of activations.
// The registers hold the sums of a pass (at most 16), 8 vectors of weights, and the integer sums and activations of one
// or two rows.
//
// Nothing is fetched ahead unless a matrix says so (docs/cpu-kernels.md, NEON, says why).
//
// With sdot, vector m of the sums belongs to row m of the activations, and its lanes to the part's 4 rows. With smmla
// (PAIRED), vectors m and m + 1 (m even) belong to rows m and m + 1 of the activations: the first to rows 0 and 1 of
// the part, the second to rows 2 and 3. Their lanes are (m, first), (m, second), (m + 1, first), (m + 1, second). A sum
// has the same steps either way, so both instruction sets have the same bits.

constexpr int PARTS = edgedec::TILE_ROWS / LANES;
constexpr int PART_BYTES = 4 * LANES;
constexpr int RUN = 8;  // blocks of a unit of Q4_K, Q5_K or Q6_K, or as many blocks of the other types

// Whether n rows are multiplied in pairs: for 1, 2, 3 and 5 rows the dot products alone take no more instructions.
constexpr bool in_pairs(int n) { return ROWS_IN_PAIRS && (n == 4 || n > 5); }
// The rows that are computed for n rows.
constexpr int padded(int n) { return in_pairs(n) ? (n + 1) / 2 * 2 : n; }

constexpr int SECOND_HALF = ROWS_IN_PAIRS ? 32 : 16;  // where columns 16 to 31 of a row begin

// --- the lanes of vector v
// ------------------------------------------------------------------------------------------------

// x times element `lane` of `four`; sum plus that; sum minus that.
EDGEDEC_INLINE Floats times_lane(Floats x, Floats four, int lane) {
  switch (lane) {
    case 0: return vmulq_laneq_f32(x, four, 0);
    case 1: return vmulq_laneq_f32(x, four, 1);
    case 2: return vmulq_laneq_f32(x, four, 2);
    default: return vmulq_laneq_f32(x, four, 3);
  }
}
EDGEDEC_INLINE Floats add_times_lane(Floats sum, Floats x, Floats four, int lane) {
  switch (lane) {
    case 0: return vfmaq_laneq_f32(sum, x, four, 0);
    case 1: return vfmaq_laneq_f32(sum, x, four, 1);
    case 2: return vfmaq_laneq_f32(sum, x, four, 2);
    default: return vfmaq_laneq_f32(sum, x, four, 3);
  }
}
EDGEDEC_INLINE Floats sub_times_lane(Floats sum, Floats x, Floats four, int lane) {
  switch (lane) {
    case 0: return vfmsq_laneq_f32(sum, x, four, 0);
    case 1: return vfmsq_laneq_f32(sum, x, four, 1);
    case 2: return vfmsq_laneq_f32(sum, x, four, 2);
    default: return vfmsq_laneq_f32(sum, x, four, 3);
  }
}

// x times the numbers of the activations' rows, of which there are 8 at p.
template <bool PAIRED>
EDGEDEC_INLINE Floats by_rows(Floats x, const float *p, int v) {
  const Floats four = load(p + v / 4 * 4);
  if constexpr (!PAIRED) return times_lane(x, four, v % 4);
  return mul(x, v % 4 < 2 ? vzip1q_f32(four, four) : vzip2q_f32(four, four));
}
// sum + x times these numbers, or sum - x times these numbers.
template <bool PAIRED, bool MINUS = false>
EDGEDEC_INLINE Floats add_by_rows(Floats sum, Floats x, const float *p, int v) {
  const Floats four = load(p + v / 4 * 4);
  if constexpr (!PAIRED) return MINUS ? sub_times_lane(sum, x, four, v % 4) : add_times_lane(sum, x, four, v % 4);
  const Floats two = v % 4 < 2 ? vzip1q_f32(four, four) : vzip2q_f32(four, four);
  return MINUS ? fnma(x, two, sum) : fma(x, two, sum);
}
// These numbers, where they are integers.
template <bool PAIRED>
EDGEDEC_INLINE Ints of_rows(const int32_t *p, int v) {
  const Ints four = vld1q_s32(p + v / 4 * 4);
  if constexpr (!PAIRED) switch (v % 4) {
    case 0: return vdupq_laneq_s32(four, 0);
    case 1: return vdupq_laneq_s32(four, 1);
    case 2: return vdupq_laneq_s32(four, 2);
    default: return vdupq_laneq_s32(four, 3);
  }
  return v % 4 < 2 ? vzip1q_s32(four, four) : vzip2q_s32(four, four);
}
// The numbers of the part's rows.
template <bool PAIRED>
EDGEDEC_INLINE Floats of_part(Floats x, int v) {
  if constexpr (!PAIRED) return x;
  const float64x2_t twos = vreinterpretq_f64_f32(x);
  return vreinterpretq_f32_f64(v % 2 == 0 ? vzip1q_f64(twos, twos) : vzip2q_f64(twos, twos));
}

// --- weights of a part: vector g has the columns 4 g to 4 g + 3 of its rows. PAIRED: vector 2 q has the columns 8 q to
// 8 q + 7 of rows 0 and 1, vector 2 q + 1 those of rows 2 and 3
// ------------------------------------------------------------

template <bool PAIRED, int N>
EDGEDEC_INLINE void pair(Bytes *w) {
  if constexpr (PAIRED)
    UNROLL for (int i = 0; i < N; i += 2) {
      const uint32x4_t a = vreinterpretq_u32_u8(w[i]), b = vreinterpretq_u32_u8(w[i + 1]);
      w[i] = vreinterpretq_u8_u32(vzip1q_u32(a, b));
      w[i + 1] = vreinterpretq_u8_u32(vzip2q_u32(a, b));
    }
}

template <bool PAIRED>
EDGEDEC_INLINE void load_nibbles(const uint8_t *p, Bytes *w) {
  UNROLL for (int j = 0; j < 4; ++j) w[j] = load_bytes(p + 64 * j);
  pair<PAIRED, 4>(w);
  UNROLL for (int j = 0; j < 4; ++j) {
    w[j + 4] = vshrq_n_u8(w[j], 4);
    w[j] = mask_bytes(w[j], 15);
  }
}

// w[j] and w[j + 4] from the halves of a byte and from higher bits: bits 0 and up of `low`, bits 4 and up of `high`.
template <uint8_t MASK>
EDGEDEC_INLINE void join(Bytes *w, int j, Bytes nibbles, Bytes low, Bytes high) {
  w[j] = mask_bytes(vsliq_n_u8(nibbles, low, 4), MASK);
  w[j + 4] = mask_bytes(vsriq_n_u8(high, nibbles, 4), MASK);
}

template <bool PAIRED>
EDGEDEC_INLINE void load_five_bits(const uint8_t *p, const uint8_t *fifth, Bytes *w) {
  const Bytes h = load_bytes(fifth), bits[4] = {h, vshrq_n_u8(h, 1), vshrq_n_u8(h, 2), vshrq_n_u8(h, 3)};
  UNROLL for (int j = 0; j < 4; ++j) join<31>(w, j, load_bytes(p + 64 * j), bits[j], bits[j]);
  pair<PAIRED, 8>(w);
}

template <bool PAIRED>
EDGEDEC_INLINE void load_six_bits(const uint8_t *p, Bytes *w) {
  const Bytes a = load_bytes(p + 256), b = load_bytes(p + 320);
  join<63>(w, 0, load_bytes(p), a, vshlq_n_u8(b, 4));
  join<63>(w, 1, load_bytes(p + 64), vshrq_n_u8(a, 2), vshlq_n_u8(b, 2));
  join<63>(w, 2, load_bytes(p + 128), vshrq_n_u8(a, 4), b);
  join<63>(w, 3, load_bytes(p + 192), vshrq_n_u8(a, 6), vshrq_n_u8(b, 2));
  pair<PAIRED, 8>(w);
}

// --- integer sums
// ---------------------------------------------------------------------------------------------------------

// sums[v] += the products of 16 columns, whose weights begin at w, with K rows of the activations, the first of which,
// in pairs an even one, is at a. The rows' dot products take turns, as an in-order processor waits for the sum before.
template <bool PAIRED, int K>
EDGEDEC_INLINE void sixteen(Ints *sums, const Bytes *weights, const int8_t *a) {
  const int8x16_t *w = (const int8x16_t *)weights;
  if constexpr (PAIRED) {
#if EDGEDEC_SIMD == 5
    int8x16_t eights[K];
    UNROLL for (int v = 0; v < K; ++v) eights[v] = vld1q_s8(a + 32 * (v / 2 * 2) + 16 * (v % 2));
    UNROLL for (int v = 0; v < K; ++v) sums[v] = vmmlaq_s32(sums[v], eights[v / 2 * 2], w[v % 2]);
    UNROLL for (int v = 0; v < K; ++v) sums[v] = vmmlaq_s32(sums[v], eights[v / 2 * 2 + 1], w[2 + v % 2]);
#endif
  } else if constexpr (ROWS_IN_PAIRS) {
    const int8x16_t first = vld1q_s8(a), second = vld1q_s8(a + 16);
    sums[0] = vdotq_laneq_s32(sums[0], w[0], first, 0);
    if constexpr (K == 2) sums[1] = vdotq_laneq_s32(sums[1], w[0], first, 2);
    sums[0] = vdotq_laneq_s32(sums[0], w[1], first, 1);
    if constexpr (K == 2) sums[1] = vdotq_laneq_s32(sums[1], w[1], first, 3);
    sums[0] = vdotq_laneq_s32(sums[0], w[2], second, 0);
    if constexpr (K == 2) sums[1] = vdotq_laneq_s32(sums[1], w[2], second, 2);
    sums[0] = vdotq_laneq_s32(sums[0], w[3], second, 1);
    if constexpr (K == 2) sums[1] = vdotq_laneq_s32(sums[1], w[3], second, 3);
  } else {
    int8x16_t rows[K];
    UNROLL for (int v = 0; v < K; ++v) rows[v] = vld1q_s8(a + 32 * v);
    UNROLL for (int v = 0; v < K; ++v) sums[v] = vdotq_laneq_s32(sums[v], w[0], rows[v], 0);
    UNROLL for (int v = 0; v < K; ++v) sums[v] = vdotq_laneq_s32(sums[v], w[1], rows[v], 1);
    UNROLL for (int v = 0; v < K; ++v) sums[v] = vdotq_laneq_s32(sums[v], w[2], rows[v], 2);
    UNROLL for (int v = 0; v < K; ++v) sums[v] = vdotq_laneq_s32(sums[v], w[3], rows[v], 3);
  }
}

// The same for the 32 columns of a block.
template <bool PAIRED, int K>
EDGEDEC_INLINE void whole_block(Ints *sums, const Bytes *w, const ActivationBlock &a, int m) {
  sixteen<PAIRED, K>(sums, w, a.q[m]);
  sixteen<PAIRED, K>(sums, w + 4, a.q[m] + SECOND_HALF);
}

#include "kernels/matmul_neon_types.inl"

// --- plans
// ----------------------------------------------------------------------------------------------------------------

// Write the sums of a part for n rows of the activations.
template <bool PAIRED>
EDGEDEC_INLINE void store_sums(const Floats *sums, int n, float *y, int64_t stride) {
  for (int m = 0; m < n; ++m) {
    if constexpr (PAIRED) {
      const float64x2_t a = vreinterpretq_f64_f32(sums[m / 2 * 2]), b = vreinterpretq_f64_f32(sums[m / 2 * 2 + 1]);
      store(y + m * stride, vreinterpretq_f32_f64(m % 2 == 0 ? vzip1q_f64(a, b) : vzip2q_f64(a, b)));
    } else {
      store(y + m * stride, sums[m]);
    }
  }
}

// Multiply one tile with n activations, from the first row of their group on; N is padded(n). The first pass over a
// block fetches.
template <class Type, int N>
void tile_product(const uint8_t *tile, int64_t n_blocks, const ActivationBlock *group, int n, Ahead ahead, float *y,
                  int64_t stride) {
  constexpr bool PAIRED = in_pairs(N);
  constexpr int AT_ONCE = N <= 4 ? PARTS : 1;             // parts of a pass
  constexpr int K = N == 1 ? 1 : 2, REST = N / K * K;     // rows whose dot products take turns; what comes after them
  Floats sums[PARTS][N];
  for (int part = 0; part < PARTS; ++part)
    for (int v = 0; v < N; ++v) sums[part][v] = zero();
  for (int64_t begin = 0; begin < n_blocks; begin += RUN) {
    const int n_run = n_blocks - begin < RUN ? (int)(n_blocks - begin) : RUN;
    const uint8_t *unit = tile + begin / Type::UNIT_BLOCKS * Type::UNIT_BYTES;
    Scales scales;
    Type::read_scales(unit, n_run, scales);
    for (int pass = 0; pass < PARTS; pass += AT_ONCE) {
      const Ahead now = pass == 0 ? ahead : Ahead{};
      Floats acc[AT_ONCE][N];
      UNROLL for (int part = 0; part < AT_ONCE; ++part)
        UNROLL for (int v = 0; v < N; ++v) acc[part][v] = sums[pass + part][v];
      for (int i = 0; i < n_run; ++i) {
        prefetch_ahead(unit + Type::UNIT_BYTES / Type::UNIT_BLOCKS * i, Type::UNIT_BYTES / Type::UNIT_BLOCKS, now);
        const ActivationBlock &a = group[begin + i], &after = group[begin + i + (N > GROUP_ROWS ? n_blocks : 0)];
        UNROLL for (int part = 0; part < AT_ONCE; ++part) {
          Bytes w[8];
          const uint8_t *block = unit + i / Type::UNIT_BLOCKS * Type::UNIT_BYTES + i % Type::UNIT_BLOCKS * Type::STEP;
          Type::template unpack<PAIRED>(block, pass + part, w);
          const PartScales of = scales.at(i, pass + part);
          UNROLL for (int m = 0; m < N - K + 1; m += K)
            Type::template add<PAIRED, K>(acc[part] + m, w, of, m < GROUP_ROWS ? a : after, m % GROUP_ROWS);
          if constexpr (REST < N)
            Type::template add<PAIRED, 1>(acc[part] + REST, w, of, N < GROUP_ROWS ? a : after, REST % GROUP_ROWS);
        }
      }
      UNROLL for (int part = 0; part < AT_ONCE; ++part)
        UNROLL for (int v = 0; v < N; ++v) sums[pass + part][v] = acc[part][v];
    }
  }
  for (int part = 0; part < PARTS; ++part) store_sums<PAIRED>(sums[part], n, y + LANES * part, stride);
}

// The loop over tiles is outside of the loop over activations, so that a tile is read from memory once.
template <class Type>
void quantized_product(const Matrix &w, int64_t tile_begin, int64_t tile_end, const Activations &a, int64_t row_begin,
                       int64_t row_end, float *y, int64_t stride) {
  using Product = void (*)(const uint8_t *, int64_t, const ActivationBlock *, int, Ahead, float *, int64_t);
  static constexpr Product products[MAX_ROWS] = {
#define EDGEDEC_N(n) tile_product<Type, padded(n)>
      EDGEDEC_N(1),  EDGEDEC_N(2),  EDGEDEC_N(3),  EDGEDEC_N(4),  EDGEDEC_N(5),  EDGEDEC_N(6),
      EDGEDEC_N(7),  EDGEDEC_N(8),  EDGEDEC_N(9),  EDGEDEC_N(10), EDGEDEC_N(11), EDGEDEC_N(12),
      EDGEDEC_N(13), EDGEDEC_N(14), EDGEDEC_N(15), EDGEDEC_N(16)};
#undef EDGEDEC_N
  const Ahead ahead = ahead_of(w, row_end - row_begin);
  const int64_t n_blocks = w.n_cols / 32;
  const int64_t tile_bytes = n_blocks / Type::UNIT_BLOCKS * Type::UNIT_BYTES;
  for (int64_t t = tile_begin; t < tile_end; ++t)
    for (int64_t i = row_begin; i < row_end; i += MAX_ROWS) {
      const int n = row_end - i < MAX_ROWS ? (int)(row_end - i) : MAX_ROWS;
      products[n - 1](w.tiles + t * tile_bytes, n_blocks, a.blocks + i / GROUP_ROWS * n_blocks, n,
                      i == row_begin ? ahead : Ahead{},
                      y + (t - tile_begin) * edgedec::TILE_ROWS + (i - row_begin) * stride, stride);
    }
}
