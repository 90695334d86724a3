// Products of both halves of a tile with 3 or more activations, for AVX-VNNI, whose vectors hold 8 rows. Included by
// matmul.inl for Q4_0, Q8_0, Q4_K and Q5_K; the other types gain nothing by it. AVX2 without VNNI has
// matmul_unpacked.inl.
//
// There are 16 registers: 8 of them hold the integer sums of 2 halves and 4 activations, and each 4 columns of an
// activation are loaded once for both halves. Sums in floats are in the L1 cache. A pass goes over 256 columns before
// the next 4 activations do, so a tile is read from memory once. The sum of a row has the same steps in the same order
// as in tile_product, so it has the same bits.

constexpr int PASS_ROWS = 4;    // activations of a pass
constexpr int PASS_BLOCKS = 8;  // blocks of 32 columns that a pass goes over

inline Bytes nibbles(const uint8_t *p, int g) {
  return mask_bytes(shift_bytes_by(load_bytes(p + 64 * (g % 4)), g < 4 ? 0 : -4), 15);
}

struct HalvesOfQ4_0 {
  static constexpr bool MINIMUM = false;
  static constexpr int BLOCK = 288, UNIT = PASS_BLOCKS * BLOCK;
  const uint8_t *run;
  explicit HalvesOfQ4_0(const uint8_t *begin) : run(begin) {}
  static Ints start(const Rows &a, int m) { return a.minus8(m); }
  static Bytes group(const uint8_t *block, int g, int part) { return nibbles(block + PART_BYTES * part, g); }
  Floats scale(int b, int part) const { return load_halves(run + BLOCK * b + 256 + 2 * LANES * part); }
};

struct HalvesOfQ8_0 {
  static constexpr bool MINIMUM = false;
  static constexpr int BLOCK = 544, UNIT = PASS_BLOCKS * BLOCK;
  const uint8_t *run;
  explicit HalvesOfQ8_0(const uint8_t *begin) : run(begin) {}
  static Ints start(const Rows &a, int m) { return shift_ints<4>(a.minus8(m)); }
  static Bytes group(const uint8_t *block, int g, int part) {
    return flip_signs(load_bytes(block + 64 * g + PART_BYTES * part));
  }
  Floats scale(int b, int part) const { return load_halves(run + BLOCK * b + 512 + 2 * LANES * part); }
};

template <bool FIFTH>
struct HalvesOfK45 {  // Q4_K, Q5_K
  static constexpr bool MINIMUM = true;
  static constexpr int BLOCK = FIFTH ? 320 : 256, UNIT = 8 * BLOCK + 256;
  K45<FIFTH> first;
  Floats d[2], dmin[2];
  explicit HalvesOfK45(const uint8_t *begin) : first(begin, 0) {
    for (int part = 0; part < 2; ++part) {
      d[part] = load_halves(begin + 8 * BLOCK + 192 + 2 * LANES * part);
      dmin[part] = load_halves(begin + 8 * BLOCK + 224 + 2 * LANES * part);
    }
  }
  static Ints start(const Rows &, int) { return set_ints(0); }
  static Bytes group(const uint8_t *block, int g, int part) {
    const Bytes low = nibbles(block + PART_BYTES * part, g);
    if constexpr (!FIFTH) return low;
    const Bytes fifths = load_bytes(block + 256 + PART_BYTES * part);
    return or_bytes(low, mask_bytes(shift_bytes_by(fifths, 4 - g), 16));
  }
  Floats scale(int b, int part) const { return mul(d[part], load_u8(first.scales + 16 * b + LANES * part)); }
  Floats minimum(int b, int part) const { return mul(dmin[part], load_u8(first.minimums + 16 * b + LANES * part)); }
};

// Add the products of up to 8 blocks of a tile, which begin at `unit`, with N activations to sums[half][activation].
template <class Type, int N>
void add_halves(const uint8_t *unit, int n_blocks, Rows a, Ahead ahead, Floats (*to)[PASS_ROWS]) {
  const Type scales(unit);
  Floats sums[2][N];
  UNROLL for (int part = 0; part < 2; ++part)
    UNROLL for (int m = 0; m < N; ++m) sums[part][m] = to[part][m];
  for (int b = 0; b < n_blocks; ++b, a.next()) {
    const uint8_t *block = unit + Type::BLOCK * b;
    prefetch_ahead(unit + Type::UNIT / PASS_BLOCKS * b, Type::UNIT / PASS_BLOCKS, ahead);
    Ints c[2][N];
    UNROLL for (int m = 0; m < N; ++m) c[0][m] = c[1][m] = Type::start(a, m);
    UNROLL for (int g = 0; g < 4; ++g) {  // nibbles of groups g and g + 4 lie together
      const Bytes first[2] = {Type::group(block, g, 0), Type::group(block, g, 1)};
      const Bytes second[2] = {Type::group(block, g + 4, 0), Type::group(block, g + 4, 1)};
      UNROLL for (int m = 0; m < N; ++m) {
        const Ints x = load_groups(a.q + 32 * m, g), y = load_groups(a.q + 32 * m, g + 4);
        UNROLL
        for (int part = 0; part < 2; ++part)
          c[part][m] = add_dots(add_dots(c[part][m], first[part], x), second[part], y);
      }
    }
    UNROLL for (int part = 0; part < 2; ++part) {
      const Floats scale = scales.scale(b, part);
      UNROLL for (int m = 0; m < N; ++m)
        sums[part][m] = fma(to_floats(c[part][m]), mul(scale, a.scale(m)), sums[part][m]);
      if constexpr (Type::MINIMUM) {
        const Floats minimum = scales.minimum(b, part);
        UNROLL for (int m = 0; m < N; ++m) sums[part][m] = fnma(minimum, a.sum(m), sums[part][m]);
      }
    }
  }
  UNROLL for (int part = 0; part < 2; ++part)
    UNROLL for (int m = 0; m < N; ++m) to[part][m] = sums[part][m];
}

// Multiply a tile with n activations, at most 16, of which the first is the first of its group; the first pass fetches.
template <class Type>
void halves_product(const uint8_t *tile, int64_t n_blocks, const ActivationBlock *group, int n, Ahead ahead, float *y,
                    int64_t stride) {
  using Add = void (*)(const uint8_t *, int, Rows, Ahead, Floats (*)[PASS_ROWS]);
  static constexpr Add add[PASS_ROWS] = {add_halves<Type, 1>, add_halves<Type, 2>, add_halves<Type, 3>,
                                         add_halves<Type, 4>};
  Floats sums[16 / PASS_ROWS][2][PASS_ROWS];
  for (auto &pass : sums)
    for (auto &half : pass)
      for (auto &sum : half) sum = zero();
  for (int64_t b = 0; b < n_blocks; b += PASS_BLOCKS, tile += Type::UNIT) {
    const int n_now = (int)(n_blocks - b < PASS_BLOCKS ? n_blocks - b : PASS_BLOCKS);
    for (int m = 0; m < n; m += PASS_ROWS) {
      const Rows rows(group + m / GROUP_ROWS * n_blocks + b, m % GROUP_ROWS);
      const Ahead now = m == 0 ? ahead : Ahead{};
      add[(n - m < PASS_ROWS ? n - m : PASS_ROWS) - 1](tile, n_now, rows, now, sums[m / PASS_ROWS]);
    }
  }
  for (int m = 0; m < n; ++m)
    for (int part = 0; part < 2; ++part) store(y + m * stride + LANES * part, sums[m / PASS_ROWS][part][m % PASS_ROWS]);
}

// Multiply the tiles as quantized_product<Unit> does, with the plan for halves where there are enough activations.
template <class Unit, class Type>
void product_of_halves(const Matrix &w, int64_t tile_begin, int64_t tile_end, const Activations &a, int64_t row_begin,
                       int64_t row_end, float *y, int64_t stride) {
  if (row_end - row_begin < 3 || row_begin % GROUP_ROWS != 0)
    return quantized_product<Unit>(w, tile_begin, tile_end, a, row_begin, row_end, y, stride);
  const int64_t n_blocks = w.n_cols / 32;
  const Ahead ahead = ahead_of(w, row_end - row_begin);
  for (int64_t t = tile_begin; t < tile_end; ++t)
    for (int64_t i = row_begin; i < row_end; i += 16)
      halves_product<Type>(w.tiles + t * (n_blocks / Unit::SUBS) * Unit::BYTES, n_blocks,
                           a.blocks + i / GROUP_ROWS * n_blocks, row_end - i < 16 ? (int)(row_end - i) : 16,
                           i == row_begin ? ahead : Ahead{},
                           y + (t - tile_begin) * edgedec::TILE_ROWS + (i - row_begin) * stride, stride);
}
