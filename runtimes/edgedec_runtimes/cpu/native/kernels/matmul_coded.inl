// The types of weights/coding.h: codes are unpacked to numbers, with a table in a register where they have one.
// Included by matmul.inl.

inline void load_two_bits(const uint8_t *p, Bytes *w) {
  for (int v = 0; v < 2; ++v) {
    const Bytes h = load_bytes(p + 64 * v);
    w[4 * v] = mask_bytes(h, 3);
    w[4 * v + 1] = mask_bytes(shift_bytes<-2>(h), 3);
    w[4 * v + 2] = mask_bytes(shift_bytes<-4>(h), 3);
    w[4 * v + 3] = mask_bytes(shift_bytes<-6>(h), 3);
  }
}

// Bits as the numbers 0 and 2.
inline void load_signs(const uint8_t *p, Bytes *w) {
  const Bytes h = load_bytes(p);
  w[0] = mask_bytes(shift_bytes<1>(h), 2);
  w[1] = mask_bytes(h, 2);
  w[2] = mask_bytes(shift_bytes<-1>(h), 2);
  w[3] = mask_bytes(shift_bytes<-2>(h), 2);
  w[4] = mask_bytes(shift_bytes<-3>(h), 2);
  w[5] = mask_bytes(shift_bytes<-4>(h), 2);
  w[6] = mask_bytes(shift_bytes<-5>(h), 2);
  w[7] = mask_bytes(shift_bytes<-6>(h), 2);
}

inline void add_third_bits(const uint8_t *p, Bytes *w) {
  const Bytes h = load_bytes(p);
  w[0] = or_bytes(w[0], mask_bytes(shift_bytes<2>(h), 4));
  w[1] = or_bytes(w[1], mask_bytes(shift_bytes<1>(h), 4));
  w[2] = or_bytes(w[2], mask_bytes(h, 4));
  w[3] = or_bytes(w[3], mask_bytes(shift_bytes<-1>(h), 4));
  w[4] = or_bytes(w[4], mask_bytes(shift_bytes<-2>(h), 4));
  w[5] = or_bytes(w[5], mask_bytes(shift_bytes<-3>(h), 4));
  w[6] = or_bytes(w[6], mask_bytes(shift_bytes<-4>(h), 4));
  w[7] = or_bytes(w[7], mask_bytes(shift_bytes<-5>(h), 4));
}

// A table of numbers as the dot products take them: signed ones only where unsigned ones of 8 bits would be too much.
template <int32_t TYPE>
struct Numbers {
  alignas(16) uint8_t at[16];
  constexpr Numbers() : at() {
    constexpr edgedec::Coding c = edgedec::coding(TYPE);
    for (int i = 0; i < 16; ++i)
      at[i] = (uint8_t)((c.numbers != nullptr ? c.numbers[i] : i) - (c.bias == 128 && !SIGNED_NEEDS_SUM ? c.bias : 0));
  }
};

// The bits of a number with its bias.
constexpr int bits_of(int bias) { return bias == 128 ? 8 : bias == 64 ? 7 : bias == 16 ? 5 : 4; }
// -bias times a sum, from -2^POWER times it.
template <int BIAS, int POWER>
inline Ints minus_bias(Ints sum) {
  if constexpr (BIAS == 0) return set_ints(0);
  else return shift_ints<(BIAS == 128 ? 7 : BIAS == 64 ? 6 : BIAS == 16 ? 4 : BIAS == 4 ? 2 : 0) - POWER>(sum);
}

template <int32_t TYPE>
struct Coded {
  static constexpr edgedec::Coding C = edgedec::coding(TYPE);
  static constexpr int SUBS = C.columns / 32, BYTES = edgedec::coded_bytes(C), STEP = edgedec::code_bytes(C);
  static constexpr bool INTEGERS = C.scales != edgedec::ScaleBytes::NONE && C.scales != edgedec::ScaleBytes::EXPONENT;
  static constexpr bool MINIMUM = C.scales == edgedec::ScaleBytes::Q2;
  static constexpr bool SIGNED = C.bias == 128 && !SIGNED_NEEDS_SUM;
  static constexpr int BITS = bits_of(C.bias), SCALES = C.by_16 ? 2 : 1;  // of 32 columns
  Floats d, dmin, scale[SCALES], minimum[SCALES];
  alignas(64) int8_t scales[INTEGERS ? 256 : 1], minimums[MINIMUM ? 256 : 1];

  Coded(const uint8_t *unit, int part) {
    const uint8_t *halves = unit + edgedec::halves_at(C) + 2 * LANES * part;
    if constexpr (C.scales == edgedec::ScaleBytes::EXPONENT)
      d = load_exponents(unit + edgedec::scales_at(C) + LANES * part);
    else d = load_halves(halves);
    if constexpr (C.factor != 1.0f) d = mul(d, set(C.factor));
    if constexpr (MINIMUM) dmin = load_halves(halves + 32);
    if constexpr (INTEGERS)
      edgedec::unpack_scales<C.scales, C.by_16 ? 16 : 8>(unit + edgedec::scales_at(C), scales, minimums);
    else scale[0] = d;
  }

  inline void unpack(const uint8_t *unit, int sub, int part, Ahead ahead, Bytes *w) {
    static constexpr Numbers<TYPE> numbers;
    const uint8_t *p = unit + STEP * sub;
    prefetch_ahead(unit + BYTES / SUBS * sub, BYTES / SUBS, ahead);
    if constexpr (C.bits == 1) load_signs(p + PART_BYTES * part, w);
    else if constexpr (C.bits == 4) load_nibbles(p + PART_BYTES * part, w);
    else load_two_bits(p + PART_BYTES * part, w);
    if constexpr (C.bits == 3) add_third_bits(p + 128 + PART_BYTES * part, w);
    if constexpr (C.numbers != nullptr && C.bits > 1) {
      const Bytes table = load_table(numbers.at);
      UNROLL for (int g = 0; g < 8; ++g) w[g] = look_up(table, w[g]);
    }
    if constexpr (INTEGERS) UNROLL
    for (int i = 0; i < SCALES; ++i) scale[i] = mul(d, load_s8(scales + 16 * (SCALES * sub + i) + LANES * part));
    if constexpr (MINIMUM)  // for sums of the activations times -32
      UNROLL for (int i = 0; i < SCALES; ++i)
        minimum[i] = mul(mul(dmin, set(1.0f / 32)), load_s8(minimums + 16 * (SCALES * sub + i) + LANES * part));
  }

  template <int N>
  inline void accumulate(Floats *acc, const Bytes *w, const Rows &a) const {
    Ints c[N];
    if constexpr (!C.by_16) {
      UNROLL for (int m = 0; m < N; ++m) c[m] = SIGNED ? set_ints(0) : minus_bias<C.bias, 3>(a.minus8(m));
      if constexpr (SIGNED) dots_signed<N>(c, w, a.q);
      else dots<BITS, 8, N>(c, w, a.q);
      UNROLL for (int m = 0; m < N; ++m) acc[m] = fma(to_floats(c[m]), mul(scale[0], a.scale(m)), acc[m]);
    } else {
      Floats both[N];
      UNROLL for (int m = 0; m < N; ++m) c[m] = minus_bias<C.bias, 5>(a.minus32(0, m));
      dots<BITS, 4, N>(c, w, a.q);
      UNROLL for (int m = 0; m < N; ++m) {
        both[m] = mul(to_floats(c[m]), scale[0]);
        c[m] = minus_bias<C.bias, 5>(a.minus32(1, m));
      }
      dots<BITS, 4, N>(c, w + 4, a.q + 16);
      UNROLL for (int m = 0; m < N; ++m) {
        both[m] = fma(to_floats(c[m]), scale[1], both[m]);
        if constexpr (MINIMUM)
          both[m] = fma(to_floats(a.minus32(1, m)), minimum[1], fma(to_floats(a.minus32(0, m)), minimum[0], both[m]));
        acc[m] = fma(both[m], a.scale(m), acc[m]);
      }
    }
  }
};
