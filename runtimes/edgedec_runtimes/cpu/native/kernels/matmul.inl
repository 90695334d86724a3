// Products of tiles and activations. Included by kernels.cpp, once per instruction set.
//
// Lane i of a vector is row i of the tile (or of the part of the tile that fits a vector). So the sum of every row runs
// over the columns in the same order, whatever else is computed. Unpacked weights are used for up to MAX_ROWS
// activations.

// Return how far ahead weights are fetched for products with n activations, unless a matrix says it. A single one is so
// quick with 16 lanes that fetching far ahead is in its way. With NEON nothing is fetched.
constexpr Ahead usual_ahead(int64_t n) {
  if (EDGEDEC_NEON) return {};
  return {LANES == 16 && n == 1 ? 4608 : 9216, 0, 0};
}

inline Ahead ahead_of(const Matrix &w, int64_t n, Ahead usual) {
  const Ahead *said = w.ahead == nullptr ? nullptr : w.ahead + (n < edgedec::AHEAD_ROWS ? n : edgedec::AHEAD_ROWS) - 1;
  return said == nullptr || said->l1 == edgedec::USUAL_AHEAD ? usual : *said;
}

inline Ahead ahead_of(const Matrix &w, int64_t n) { return ahead_of(w, n, usual_ahead(n)); }

// Fetch n_bytes that lie ahead of p, perhaps behind the end of the weights: then nothing happens. The pieces of a unit
// that its blocks fetch in turn are equal parts of all of it, its scales included. The function is always inlined: GCC
// drops calls of a function that does nothing but prefetch.
EDGEDEC_INLINE void prefetch_ahead(const uint8_t *p, int n_bytes, Ahead ahead) {
  const uintptr_t at = (uintptr_t)p;
  if (ahead.l1 != 0)
    for (int i = 0; i < n_bytes; i += 64) prefetch((const void *)(at + (uintptr_t)(ahead.l1 + i)));
  for (int time = ahead.l2_times; time > 0; --time)
    for (int i = 0; i < n_bytes; i += 64) prefetch_to_l2((const void *)(at + (uintptr_t)(ahead.l2 * time + i)));
}

#if EDGEDEC_NEON
#include "kernels/matmul_neon.inl"
#else
constexpr int PARTS = edgedec::TILE_ROWS / LANES;  // vectors for the 16 rows of a tile
constexpr int PART_BYTES = 4 * LANES;              // of the 64 bytes that hold a group of 4 columns

inline void load_nibbles(const uint8_t *p, Bytes *w) {
  for (int j = 0; j < 4; ++j) {
    const Bytes raw = load_bytes(p + 64 * j);
    w[j] = mask_bytes(raw, 15);
    w[j + 4] = mask_bytes(shift_bytes<-4>(raw), 15);
  }
}

inline void add_fifth_bits(const uint8_t *p, Bytes *w) {
  const Bytes h = load_bytes(p);
  w[0] = or_bytes(w[0], mask_bytes(shift_bytes<4>(h), 16));
  w[1] = or_bytes(w[1], mask_bytes(shift_bytes<3>(h), 16));
  w[2] = or_bytes(w[2], mask_bytes(shift_bytes<2>(h), 16));
  w[3] = or_bytes(w[3], mask_bytes(shift_bytes<1>(h), 16));
  w[4] = or_bytes(w[4], mask_bytes(h, 16));
  w[5] = or_bytes(w[5], mask_bytes(shift_bytes<-1>(h), 16));
  w[6] = or_bytes(w[6], mask_bytes(shift_bytes<-2>(h), 16));
  w[7] = or_bytes(w[7], mask_bytes(shift_bytes<-3>(h), 16));
}

inline void add_two_bits(const uint8_t *p, Bytes *w) {
  for (int v = 0; v < 2; ++v) {
    const Bytes h = load_bytes(p + 64 * v);
    w[4 * v] = or_bytes(w[4 * v], mask_bytes(shift_bytes<4>(h), 48));
    w[4 * v + 1] = or_bytes(w[4 * v + 1], mask_bytes(shift_bytes<2>(h), 48));
    w[4 * v + 2] = or_bytes(w[4 * v + 2], mask_bytes(h, 48));
    w[4 * v + 3] = or_bytes(w[4 * v + 3], mask_bytes(shift_bytes<-2>(h), 48));
  }
}

// One block of the activations of up to MAX_ROWS rows.
struct Rows {
  const int8_t *q;      // [rows][32]
  const float *scales;  // scale, sum, minus8, minus32[0], minus32[1] of 8 rows each
  Rows(const ActivationBlock *block, int first) : q(block->q[first]), scales(block->scale + first) {}
  void next() {
    q += sizeof(ActivationBlock);
    scales += sizeof(ActivationBlock) / sizeof(float);
  }
  Floats scale(int m) const { return set(scales[m]); }
  Floats sum(int m) const { return set(scales[8 + m]); }
  Ints minus8(int m) const { return set_ints(whole(16 + m)); }
  Ints minus32(int half, int m) const { return set_ints(whole(24 + 8 * half + m)); }

 private:
  int32_t whole(int i) const {
    int32_t x;
    memcpy(&x, scales + i, 4);
    return x;
  }
};
static_assert(sizeof(ActivationBlock) == 8 * (32 + 5 * 4), "Rows counts on this layout");

// --- the types: `Unit` holds the scales of a unit of SUBS x 32 columns -----------------------------------------------

template <bool MIN, bool FIFTH>
struct Simple {  // Q4_0, Q4_1, Q5_0, Q5_1
  static constexpr int BITS = FIFTH ? 5 : 4, SUBS = 1, BYTES = 256 + (FIFTH ? 64 : 0) + (MIN ? 64 : 32);
  static constexpr bool BY_16 = false, MINIMUM = MIN;
  Floats d, minimum;

  Simple(const uint8_t *unit, int part) {
    const uint8_t *scales = unit + 256 + (FIFTH ? 64 : 0) + 2 * LANES * part;
    d = load_halves(scales);
    if constexpr (MIN) minimum = load_halves(scales + 32);
  }
  inline void unpack(const uint8_t *unit, int, int part, Ahead ahead, Bytes *w) {
    prefetch_ahead(unit, BYTES, ahead);
    load_nibbles(unit + PART_BYTES * part, w);
    if constexpr (FIFTH) add_fifth_bits(unit + 256 + PART_BYTES * part, w);
  }
  void factors(Floats *of) const {
    of[0] = d;
    if constexpr (MIN) of[1] = sub(zero(), minimum);
  }
  static Ints start(const Rows &a, int, int m) {
    if constexpr (MIN) return set_ints(0);
    else return shift_ints<FIFTH ? 1 : 0>(a.minus8(m));
  }
  template <int N>
  inline void accumulate(Floats *acc, const Bytes *w, const Rows &a) const {
    Ints c[N];
    UNROLL for (int m = 0; m < N; ++m) c[m] = start(a, 0, m);
    dots<BITS, 8, N>(c, w, a.q);
    UNROLL for (int m = 0; m < N; ++m) {
      acc[m] = fma(to_floats(c[m]), mul(d, a.scale(m)), acc[m]);
      if constexpr (MIN) acc[m] = fma(minimum, a.sum(m), acc[m]);
    }
  }
};


struct Eight {  // Q8_0
  static constexpr int SUBS = 1, BYTES = 544;
  Floats d;

  Eight(const uint8_t *unit, int part) { d = load_halves(unit + 512 + 2 * LANES * part); }
  inline void unpack(const uint8_t *unit, int, int part, Ahead ahead, Bytes *w) {
    prefetch_ahead(unit, BYTES, ahead);
    for (int g = 0; g < 8; ++g) w[g] = load_bytes(unit + 64 * g + PART_BYTES * part);
  }
  template <int N>
  inline void accumulate(Floats *acc, const Bytes *w, const Rows &a) const {
    Ints c[N];
    UNROLL for (int m = 0; m < N; ++m) {
      if constexpr (SIGNED_NEEDS_SUM) c[m] = shift_ints<4>(a.minus8(m));
      else c[m] = set_ints(0);
    }
    dots_signed<N>(c, w, a.q);
    UNROLL for (int m = 0; m < N; ++m) acc[m] = fma(to_floats(c[m]), mul(d, a.scale(m)), acc[m]);
  }
};

template <bool FIFTH>
struct K45 {  // Q4_K, Q5_K
  static constexpr int BITS = FIFTH ? 5 : 4, STEP = FIFTH ? 320 : 256, SUBS = 8, BYTES = 8 * STEP + 256;
  static constexpr bool BY_16 = false, MINIMUM = true;
  Floats d, dmin, scale, minimum;
  alignas(64) uint8_t scales[128], minimums[128];  // [8][16], 6 bits each

  K45(const uint8_t *unit, int part) {
    const uint8_t *p = unit + 8 * STEP;
    d = load_halves(p + 192 + 2 * LANES * part);
    dmin = load_halves(p + 224 + 2 * LANES * part);
    for (int i = 0; i < 64; i += 4 * LANES) {
      const Bytes a = load_bytes(p + i), b = load_bytes(p + 64 + i), c = load_bytes(p + 128 + i);
      keep(scales + i, mask_bytes(a, 63));
      keep(minimums + i, mask_bytes(b, 63));
      keep(scales + 64 + i, or_bytes(mask_bytes(c, 15), mask_bytes(shift_bytes<-2>(a), 48)));
      keep(minimums + 64 + i, or_bytes(mask_bytes(shift_bytes<-4>(c), 15), mask_bytes(shift_bytes<-2>(b), 48)));
    }
  }
  static inline void keep(uint8_t *to, Bytes x) { memcpy(to, &x, sizeof x); }
  inline void unpack(const uint8_t *unit, int sub, int part, Ahead ahead, Bytes *w) {
    const uint8_t *p = unit + STEP * sub;
    prefetch_ahead(unit + BYTES / SUBS * sub, BYTES / SUBS, ahead);
    load_nibbles(p + PART_BYTES * part, w);
    if constexpr (FIFTH) add_fifth_bits(p + 256 + PART_BYTES * part, w);
    scale = mul(d, load_u8(scales + 16 * sub + LANES * part));
    minimum = mul(dmin, load_u8(minimums + 16 * sub + LANES * part));
  }
  void factors(Floats *of) const { of[0] = scale, of[1] = minimum; }
  static Ints start(const Rows &, int, int) { return set_ints(0); }
  template <int N>
  inline void accumulate(Floats *acc, const Bytes *w, const Rows &a) const {
    Ints c[N];
    UNROLL for (int m = 0; m < N; ++m) c[m] = start(a, 0, m);
    dots<BITS, 8, N>(c, w, a.q);
    UNROLL for (int m = 0; m < N; ++m) {
      acc[m] = fma(to_floats(c[m]), mul(scale, a.scale(m)), acc[m]);
      acc[m] = fnma(minimum, a.sum(m), acc[m]);
    }
  }
};

struct K6 {  // Q6_K
  static constexpr int BITS = 6, SUBS = 8, BYTES = 3360;
  static constexpr bool BY_16 = true, MINIMUM = false;
  Floats d, first, second;

  K6(const uint8_t *unit, int part) { d = load_halves(unit + 3328 + 2 * LANES * part); }
  inline void unpack(const uint8_t *unit, int sub, int part, Ahead ahead, Bytes *w) {
    const uint8_t *p = unit + 384 * sub;
    prefetch_ahead(unit + BYTES / SUBS * sub, BYTES / SUBS, ahead);
    load_nibbles(p + PART_BYTES * part, w);
    add_two_bits(p + 256 + PART_BYTES * part, w);
    first = mul(d, load_s8(unit + 3072 + 32 * sub + LANES * part));
    second = mul(d, load_s8(unit + 3072 + 32 * sub + 16 + LANES * part));
  }
  void factors(Floats *of) const { of[0] = first, of[1] = second; }
  static Ints start(const Rows &a, int half, int m) { return a.minus32(half, m); }
  template <int N>
  inline void accumulate(Floats *acc, const Bytes *w, const Rows &a) const {
    Ints c[N];
    Floats both[N];
    UNROLL for (int m = 0; m < N; ++m) c[m] = start(a, 0, m);
    dots<BITS, 4, N>(c, w, a.q);
    UNROLL for (int m = 0; m < N; ++m) {
      both[m] = mul(to_floats(c[m]), first);
      c[m] = start(a, 1, m);
    }
    dots<BITS, 4, N>(c, w + 4, a.q + 16);
    UNROLL for (int m = 0; m < N; ++m) acc[m] = fma(fma(to_floats(c[m]), second, both[m]), a.scale(m), acc[m]);
  }
};

#include "kernels/matmul_coded.inl"

// Multiply one tile with N activations, from row `first` of their group on. The first pass over a unit fetches for the
// passes of all its parts; with 4 lanes there are too many for that.
template <class Unit, int N>
void tile_product(const uint8_t *tile, int64_t n_units, const ActivationBlock *group, int first, Ahead ahead, float *y,
                  int64_t stride) {
  // The units that stay in the L1 cache.
  constexpr int RUN = PARTS == 1 ? 1 << 30 : 8 / Unit::SUBS < 1 ? 1 : 8 / Unit::SUBS;
  Floats acc[PARTS][N];
  for (int part = 0; part < PARTS; ++part)
    for (int m = 0; m < N; ++m) acc[part][m] = zero();
  for (int64_t begin = 0; begin < n_units; begin += RUN) {
    const int64_t end = begin + RUN < n_units ? begin + RUN : n_units;
    for (int part = 0; part < PARTS; ++part) {
      Floats sums[N];
      UNROLL for (int m = 0; m < N; ++m) sums[m] = acc[part][m];
      const Ahead now = PARTS <= 2 && part == 0 ? ahead : Ahead{};
      const uint8_t *p = tile + begin * Unit::BYTES;
      Rows rows(group + begin * Unit::SUBS, first);
      for (int64_t i = begin; i < end; ++i, p += Unit::BYTES) {
        Unit unit(p, part);
        for (int sub = 0; sub < Unit::SUBS; ++sub, rows.next()) {
          Bytes w[8];
          unit.unpack(p, sub, part, now, w);
          unit.template accumulate<N>(sums, w, rows);
        }
      }
      UNROLL for (int m = 0; m < N; ++m) acc[part][m] = sums[m];
    }
  }
  for (int part = 0; part < PARTS; ++part)
    for (int m = 0; m < N; ++m) store(y + m * stride + LANES * part, acc[part][m]);
}

using TileProduct = void (*)(const uint8_t *, int64_t, const ActivationBlock *, int, Ahead, float *, int64_t);

// Return the product of a tile with n activations; a set is compiled for as many as its MAX_ROWS, and for no more.
template <class Unit, int... I>
TileProduct tile_product_of(int n, std::integer_sequence<int, I...>) {
  static constexpr TileProduct products[] = {tile_product<Unit, I + 1>...};
  return products[n - 1];
}

// The loop over tiles is outside of the loop over activations, so that a tile is read from memory once: the first
// activations fetch it for all.
template <class Unit>
void quantized_product(const Matrix &w, int64_t tile_begin, int64_t tile_end, const Activations &a, int64_t row_begin,
                       int64_t row_end, float *y, int64_t stride) {
  const Ahead ahead = ahead_of(w, row_end - row_begin);
  const int64_t n_units = w.n_cols / (32 * Unit::SUBS);
  for (int64_t t = tile_begin; t < tile_end; ++t) {
    const uint8_t *tile = w.tiles + t * n_units * Unit::BYTES;
    float *column = y + (t - tile_begin) * edgedec::TILE_ROWS;
    for (int64_t i = row_begin; i < row_end; i += MAX_ROWS) {
      const int n = row_end - i < MAX_ROWS ? (int)(row_end - i) : MAX_ROWS;
      const ActivationBlock *group = a.blocks + i / GROUP_ROWS * (a.n / 32);
      const TileProduct product = tile_product_of<Unit>(n, std::make_integer_sequence<int, MAX_ROWS>());
      const Ahead now = i == row_begin ? ahead : Ahead{};
      product(tile, n_units, group, (int)(i % GROUP_ROWS), now, column + (i - row_begin) * stride, stride);
    }
  }
}

#if EDGEDEC_SIMD == 4
#include "kernels/matmul_halves.inl"
#elif EDGEDEC_SIMD == 2
#include "kernels/matmul_unpacked.inl"
#endif
#endif  // EDGEDEC_NEON

using Q4_0Unit = Simple<false, false>;
using Q4_1Unit = Simple<true, false>;
using Q5_0Unit = Simple<false, true>;
using Q5_1Unit = Simple<true, true>;
#if EDGEDEC_SIMD == 2
#define UNPACKED(unit) unpacked_products<unit>
#else
#define UNPACKED(unit) quantized_product<unit>
#endif
#if EDGEDEC_SIMD == 4
#define HALVES(unit, halves, others) product_of_halves<unit, halves>
#else
#define HALVES(unit, halves, others) others
#endif

using Product = void (*)(const Matrix &, int64_t, int64_t, const Activations &, int64_t, int64_t, float *, int64_t);

// Return the product of a type of weights/coding.h.
Product coded_product(int32_t type) {
  switch (type) {
    case edgedec::Q2_K: return quantized_product<Coded<edgedec::Q2_K>>;
    case edgedec::Q3_K: return quantized_product<Coded<edgedec::Q3_K>>;
    case edgedec::IQ4_NL: return quantized_product<Coded<edgedec::IQ4_NL>>;
    case edgedec::IQ4_XS: return quantized_product<Coded<edgedec::IQ4_XS>>;
    case edgedec::MXFP4: return quantized_product<Coded<edgedec::MXFP4>>;
    case edgedec::Q1_0: return quantized_product<Coded<edgedec::Q1_0>>;
    case edgedec::Q2_0: return quantized_product<Coded<edgedec::Q2_0>>;
    case edgedec::IQ3_S: return quantized_product<Coded<edgedec::IQ3_S>>;
    case edgedec::IQ3_XXS: return quantized_product<Coded<edgedec::IQ3_XXS>>;
    case edgedec::IQ2_XXS: return quantized_product<Coded<edgedec::IQ2_XXS>>;
    case edgedec::IQ2_XS: case edgedec::IQ2_S: return quantized_product<Coded<edgedec::IQ2_S>>;
    case edgedec::IQ1_S: return quantized_product<Coded<edgedec::IQ1_S>>;
    case edgedec::IQ1_M: return quantized_product<Coded<edgedec::IQ1_M>>;
    // TQ1_0 as well; ec_model_set_matrix refuses types that are not here.
    default: return quantized_product<Coded<edgedec::TQ2_0>>;
  }
}

// The same for float weights: four sums by column modulo 4, which are added at the end. Nothing is fetched ahead unless
// a matrix says it.
template <Floats (*LOAD)(const void *), int BYTES, int N>
void float_tile_product(const uint8_t *tile, int64_t n_cols, const float *const *x, Ahead ahead, float *y,
                        int64_t stride) {
  for (int part = 0; part < PARTS; ++part) {
    const Ahead now = PARTS <= 2 && part == 0 ? ahead : Ahead{};
    const uint8_t *p = tile + BYTES * LANES * part;
    Floats acc[4][N];
    for (int i = 0; i < 4; ++i)
      for (int m = 0; m < N; ++m) acc[i][m] = zero();
    int64_t k = 0;
    for (; k + 4 <= n_cols; k += 4) {
      prefetch_ahead(tile + k * 16 * BYTES, 4 * 16 * BYTES, now);
      for (int i = 0; i < 4; ++i) {
        const Floats w = LOAD(p + (k + i) * 16 * BYTES);
        for (int m = 0; m < N; ++m) acc[i][m] = fma(w, set(x[m][k + i]), acc[i][m]);
      }
    }
    for (; k < n_cols; ++k) {
      const Floats w = LOAD(p + k * 16 * BYTES);
      for (int m = 0; m < N; ++m) acc[0][m] = fma(w, set(x[m][k]), acc[0][m]);
    }
    for (int m = 0; m < N; ++m)
      store(y + m * stride + LANES * part, add(add(acc[0][m], acc[1][m]), add(acc[2][m], acc[3][m])));
  }
}

inline Floats load_f32(const void *p) { return load((const float *)p); }

template <Floats (*LOAD)(const void *), int BYTES>
void float_product(const Matrix &w, int64_t tile_begin, int64_t tile_end, const Activations &a, int64_t row_begin,
                   int64_t row_end, float *y, int64_t stride) {
  using Product = void (*)(const uint8_t *, int64_t, const float *const *, Ahead, float *, int64_t);
  static constexpr Product products[4] = {float_tile_product<LOAD, BYTES, 1>, float_tile_product<LOAD, BYTES, 2>,
                                          float_tile_product<LOAD, BYTES, 3>, float_tile_product<LOAD, BYTES, 4>};
  const Ahead ahead = ahead_of(w, row_end - row_begin, {});
  for (int64_t t = tile_begin; t < tile_end; ++t) {
    const uint8_t *tile = w.tiles + t * w.n_cols * BYTES * edgedec::TILE_ROWS;
    float *column = y + (t - tile_begin) * edgedec::TILE_ROWS;
    for (int64_t i = row_begin; i < row_end; i += 4) {
      const int n = row_end - i < 4 ? (int)(row_end - i) : 4;
      const float *x[4] = {};
      for (int m = 0; m < n; ++m) x[m] = a.x + (i + m) * a.n;
      products[n - 1](tile, w.n_cols, x, i == row_begin ? ahead : Ahead{}, column + (i - row_begin) * stride, stride);
    }
  }
}

void matmul(const Matrix &w, int64_t tile_begin, int64_t tile_end, const Activations &a, int64_t row_begin,
            int64_t row_end, float *y, int64_t stride) {
  Product product = nullptr;
  switch (w.type) {
    case edgedec::F32: product = float_product<load_f32, 4>; break;
    case edgedec::F16: product = float_product<load_halves, 2>; break;
    case edgedec::BF16: product = float_product<load_bfloats, 2>; break;
    case edgedec::Q4_0: product = HALVES(Q4_0Unit, HalvesOfQ4_0, UNPACKED(Q4_0Unit)); break;
    case edgedec::Q4_1: product = UNPACKED(Q4_1Unit); break;
    case edgedec::Q5_0: product = UNPACKED(Q5_0Unit); break;
    case edgedec::Q5_1: product = UNPACKED(Q5_1Unit); break;
    case edgedec::Q8_0: product = HALVES(Eight, HalvesOfQ8_0, quantized_product<Eight>); break;
    case edgedec::Q4_K: product = HALVES(K45<false>, HalvesOfK45<false>, UNPACKED(K45<false>)); break;
    case edgedec::Q5_K: product = HALVES(K45<true>, HalvesOfK45<true>, UNPACKED(K45<true>)); break;
    case edgedec::Q6_K: product = UNPACKED(K6); break;
    default: product = coded_product(w.type); break;
  }
  product(w, tile_begin, tile_end, a, row_begin, row_end, y, stride);
}
