// Products of tiles of 4 to 6 bits with 16 or more activations, for AVX2 without VNNI. Included by matmul.inl.
//
// Weights of 256 columns are unpacked to the L1 cache once for 64 activations. A pass takes both halves of the tile and
// 4 activations: 8 registers hold its sums of 16 bits, and each 4 columns of an activation are loaded once for both
// halves. Sums in floats are in the L1 cache. Integers are exact, and the sum of a row has the same steps in the same
// order as in tile_product, so it has the same bits.

constexpr int LEAST_UNPACKED_ROWS = 16, UNPACKED_ROWS = 64, PASS_ROWS = 4, PASS_BLOCKS = 8;

struct UnpackedBlock {  // 32 columns of a tile
  Bytes w[8][2];        // 4 columns of a half of the tile's rows
  Floats scales[2][2];  // Unit::factors() of each half
};

// Sum the products of a block, or of 16 of its columns with Unit::BY_16, for N activations and each half of the rows.
template <class Unit, int N>
inline void sum_groups(const UnpackedBlock &block, const Rows &a, int half, Ints (*c)[2]) {
  constexpr int GROUPS = Unit::BY_16 ? 4 : 8, RUN = Unit::BITS == 4 ? GROUPS : 2;  // groups that 16 bits can hold
  const int8_t *q = a.q + 16 * half;
  const Bytes(*w)[2] = block.w + 4 * half;
  UNROLL for (int m = 0; m < N; ++m)
    UNROLL for (int part = 0; part < 2; ++part) c[m][part] = Unit::start(a, half, m);
  UNROLL for (int g = 0; g < GROUPS; g += RUN == GROUPS ? 1 : RUN)
    UNROLL for (int m = 0; m < N; ++m) {
      const Ints x = load_groups(q + 32 * m, g), y = RUN == GROUPS ? x : load_groups(q + 32 * m, g + 1);
      UNROLL for (int part = 0; part < 2; ++part) {
        const Ints pairs = short_pairs(w[g][part], x);
        if constexpr (RUN == GROUPS) c[m][part] = g == 0 ? pairs : add_shorts(c[m][part], pairs);
        else c[m][part] = add_widened(c[m][part], add_shorts(pairs, short_pairs(w[g + 1][part], y)));
      }
    }
  UNROLL for (int m = 0; RUN == GROUPS && m < N; ++m)
    UNROLL for (int part = 0; part < 2; ++part) c[m][part] = add_widened(Unit::start(a, half, m), c[m][part]);
}

// Add the products of some blocks with N activations to out[activation][half of the tile]. A scale and a minimum are
// loaded once for all activations, as the core can load no more than it does here.
template <class Unit, int N>
void add_unpacked(const UnpackedBlock *blocks, int n_blocks, Rows a, Floats (*out)[2]) {
  Floats sums[N][2];
  UNROLL for (int m = 0; m < N; ++m)
    UNROLL for (int part = 0; part < 2; ++part) sums[m][part] = out[m][part];
  for (int b = 0; b < n_blocks; ++b, a.next()) {
    const Floats(*scales)[2] = blocks[b].scales;
    Ints c[N][2];
    sum_groups<Unit, N>(blocks[b], a, 0, c);
    if constexpr (Unit::BY_16) {
      Floats both[N][2];
      UNROLL for (int m = 0; m < N; ++m)
        UNROLL for (int part = 0; part < 2; ++part) both[m][part] = mul(to_floats(c[m][part]), scales[part][0]);
      sum_groups<Unit, N>(blocks[b], a, 1, c);
      UNROLL for (int m = 0; m < N; ++m)
        UNROLL for (int part = 0; part < 2; ++part)
          sums[m][part] = fma(fma(to_floats(c[m][part]), scales[part][1], both[m][part]), a.scale(m), sums[m][part]);
      continue;
    }
    const Floats factors[2] = {scales[0][0], scales[1][0]};
    UNROLL for (int m = 0; m < N; ++m) {
      const Floats scale = a.scale(m);
      UNROLL for (int part = 0; part < 2; ++part)
        sums[m][part] = fma(to_floats(c[m][part]), mul(factors[part], scale), sums[m][part]);
    }
    if constexpr (Unit::MINIMUM) {
      const Floats minimums[2] = {scales[0][1], scales[1][1]};
      UNROLL for (int m = 0; m < N; ++m) {
        const Floats sum = a.sum(m);
        UNROLL for (int part = 0; part < 2; ++part) sums[m][part] = fnma(minimums[part], sum, sums[m][part]);
      }
    }
  }
  UNROLL for (int m = 0; m < N; ++m)
    UNROLL for (int part = 0; part < 2; ++part) out[m][part] = sums[m][part];
}

// Unpack the next blocks of a tile, and return where those behind them begin.
template <class Unit>
const uint8_t *unpack_blocks(const uint8_t *unit, int n_blocks, Ahead ahead, UnpackedBlock *blocks) {
  for (int b = 0; b < n_blocks; b += Unit::SUBS, unit += Unit::BYTES)
    for (int part = 0; part < 2; ++part) {
      Unit of(unit, part);
      for (int sub = 0; sub < Unit::SUBS; ++sub) {
        Bytes w[8];
        of.unpack(unit, sub, part, part == 0 ? ahead : Ahead{}, w);
        UNROLL for (int g = 0; g < 8; ++g) blocks[b + sub].w[g][part] = w[g];
        of.factors(blocks[b + sub].scales[part]);
      }
    }
  return unit;
}

// Multiply a tile with n activations, at most UNPACKED_ROWS, of which the first is the first of its group.
template <class Unit>
void unpacked_product(const uint8_t *tile, int64_t n_blocks, const ActivationBlock *groups, int n, Ahead ahead,
                      float *y, int64_t stride) {
  using Add = void (*)(const UnpackedBlock *, int, Rows, Floats (*)[2]);
  static constexpr Add add[PASS_ROWS] = {add_unpacked<Unit, 1>, add_unpacked<Unit, 2>, add_unpacked<Unit, 3>,
                                         add_unpacked<Unit, 4>};
  Floats sums[UNPACKED_ROWS][2];
  UnpackedBlock blocks[PASS_BLOCKS];
  for (int m = 0; m < n; ++m) sums[m][0] = sums[m][1] = zero();
  for (int64_t b = 0; b < n_blocks; b += PASS_BLOCKS) {
    const int n_now = (int)(n_blocks - b < PASS_BLOCKS ? n_blocks - b : PASS_BLOCKS);
    tile = unpack_blocks<Unit>(tile, n_now, ahead, blocks);
    for (int m = 0; m < n; m += PASS_ROWS)
      add[(n - m < PASS_ROWS ? n - m : PASS_ROWS) - 1](
          blocks, n_now, Rows(groups + m / GROUP_ROWS * n_blocks + b, m % GROUP_ROWS), sums + m);
  }
  for (int m = 0; m < n; ++m)
    for (int part = 0; part < 2; ++part) store(y + m * stride + LANES * part, sums[m][part]);
}

template <class Unit>
void unpacked_products(const Matrix &w, int64_t tile_begin, int64_t tile_end, const Activations &a, int64_t row_begin,
                       int64_t row_end, float *y, int64_t stride) {
  if (row_end - row_begin < LEAST_UNPACKED_ROWS)
    return quantized_product<Unit>(w, tile_begin, tile_end, a, row_begin, row_end, y, stride);
  const int64_t n_blocks = w.n_cols / 32;
  const Ahead ahead = ahead_of(w, row_end - row_begin);
  for (int64_t t = tile_begin; t < tile_end; ++t)
    for (int64_t i = row_begin; i < row_end; i += UNPACKED_ROWS)
      unpacked_product<Unit>(w.tiles + t * (n_blocks / Unit::SUBS) * Unit::BYTES, n_blocks,
                             a.blocks + i / GROUP_ROWS * n_blocks,
                             row_end - i < UNPACKED_ROWS ? (int)(row_end - i) : UNPACKED_ROWS,
                             i == row_begin ? ahead : Ahead{},
                             y + (t - tile_begin) * edgedec::TILE_ROWS + (i - row_begin) * stride, stride);
}
