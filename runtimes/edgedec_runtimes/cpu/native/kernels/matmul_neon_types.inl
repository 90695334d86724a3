// The types of matmul_neon.inl, which includes this file: `read_scales` unpacks the scales of n blocks; `unpack` the
// weights of a part of one of them; `add` adds the products of these weights with K rows of the activations, from row m
// of their group on, to K sums.

// Of a block or of its first half, and of its second half. Types with minimums of whole blocks have these as the second
// scale.
struct PartScales {
  Floats first, second, first_minimum, second_minimum;
};
struct Scales {
  Floats first[RUN][PARTS], second[RUN][PARTS], first_minimum[RUN][PARTS], second_minimum[RUN][PARTS];
  EDGEDEC_INLINE PartScales at(int i, int part) const {
    return {first[i][part], second[i][part], first_minimum[i][part], second_minimum[i][part]};
  }
};

EDGEDEC_INLINE void read_halves(const uint8_t *p, Floats *out) {
  UNROLL for (int part = 0; part < PARTS; ++part) out[part] = load_halves(p + 2 * LANES * part);
}

// x[i] times factors, for the rows i of x.
EDGEDEC_INLINE void widen_s8(int8x16_t x, const Floats *factors, Floats *out) {
  const int16x8_t low = vmovl_s8(vget_low_s8(x)), high = vmovl_high_s8(x);
  out[0] = mul(factors[0], vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))));
  out[1] = mul(factors[1], vcvtq_f32_s32(vmovl_high_s16(low)));
  out[2] = mul(factors[2], vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))));
  out[3] = mul(factors[3], vcvtq_f32_s32(vmovl_high_s16(high)));
}

template <bool MIN, bool FIFTH>
struct Simple {  // Q4_0, Q4_1, Q5_0, Q5_1
  static constexpr int UNIT_BLOCKS = 1, STEP = 256 + (FIFTH ? 64 : 0) + (MIN ? 64 : 32), UNIT_BYTES = STEP;

  static EDGEDEC_INLINE void read_scales(const uint8_t *p, int n, Scales &scales) {
    p += 256 + (FIFTH ? 64 : 0);
    for (int i = 0; i < n; ++i, p += STEP) {
      read_halves(p, scales.first[i]);
      if constexpr (MIN) read_halves(p + 32, scales.second[i]);
    }
  }
  template <bool PAIRED>
  static EDGEDEC_INLINE void unpack(const uint8_t *block, int part, Bytes *w) {
    if constexpr (FIFTH) load_five_bits<PAIRED>(block + PART_BYTES * part, block + 256 + PART_BYTES * part, w);
    else load_nibbles<PAIRED>(block + PART_BYTES * part, w);
  }
  template <bool PAIRED, int K>
  static EDGEDEC_INLINE void add(Floats *sums, const Bytes *w, const PartScales &of,
                                 const ActivationBlock &a, int m) {
    Ints c[K];
    UNROLL for (int v = 0; v < K; ++v) {
      if constexpr (MIN) c[v] = set_ints(0);
      else c[v] = shift_ints<FIFTH ? 1 : 0>(of_rows<PAIRED>(a.minus8, m + v));
    }
    whole_block<PAIRED, K>(c, w, a, m);
    UNROLL for (int v = 0; v < K; ++v) {
      const Floats scale = by_rows<PAIRED>(of_part<PAIRED>(of.first, v), a.scale, m + v);
      sums[v] = fma(to_floats(c[v]), scale, sums[v]);
      if constexpr (MIN) sums[v] = add_by_rows<PAIRED>(sums[v], of_part<PAIRED>(of.second, v), a.sum, m + v);
    }
  }
};

struct Eight {  // Q8_0
  static constexpr int UNIT_BLOCKS = 1, STEP = 544, UNIT_BYTES = STEP;

  static EDGEDEC_INLINE void read_scales(const uint8_t *p, int n, Scales &scales) {
    for (int i = 0; i < n; ++i) read_halves(p + STEP * i + 512, scales.first[i]);
  }
  template <bool PAIRED>
  static EDGEDEC_INLINE void unpack(const uint8_t *block, int part, Bytes *w) {
    UNROLL for (int g = 0; g < 8; ++g) w[g] = load_bytes(block + 64 * g + PART_BYTES * part);
    pair<PAIRED, 8>(w);
  }
  template <bool PAIRED, int K>
  static EDGEDEC_INLINE void add(Floats *sums, const Bytes *w, const PartScales &of,
                                 const ActivationBlock &a, int m) {
    Ints c[K];
    UNROLL for (int v = 0; v < K; ++v) c[v] = set_ints(0);
    whole_block<PAIRED, K>(c, w, a, m);
    UNROLL for (int v = 0; v < K; ++v)
      sums[v] = fma(to_floats(c[v]), by_rows<PAIRED>(of_part<PAIRED>(of.first, v), a.scale, m + v), sums[v]);
  }
};

template <bool FIFTH>
struct K45 {  // Q4_K, Q5_K
  static constexpr int UNIT_BLOCKS = 8, STEP = FIFTH ? 320 : 256, UNIT_BYTES = 8 * STEP + 256;

  // x[i] times factors, for the rows i of x.
  static EDGEDEC_INLINE void widen(Bytes x, const Floats *factors, Floats *out) {
    const uint16x8_t low = vmovl_u8(vget_low_u8(x)), high = vmovl_high_u8(x);
    out[0] = mul(factors[0], vcvtq_f32_u32(vmovl_u16(vget_low_u16(low))));
    out[1] = mul(factors[1], vcvtq_f32_u32(vmovl_high_u16(low)));
    out[2] = mul(factors[2], vcvtq_f32_u32(vmovl_u16(vget_low_u16(high))));
    out[3] = mul(factors[3], vcvtq_f32_u32(vmovl_high_u16(high)));
  }
  static EDGEDEC_INLINE void read_scales(const uint8_t *p, int, Scales &scales) {
    p += 8 * STEP;
    Floats d[PARTS], dmin[PARTS];
    read_halves(p + 192, d);
    read_halves(p + 224, dmin);
    for (int i = 0; i < 4; ++i) {
      const Bytes a = load_bytes(p + 16 * i), b = load_bytes(p + 64 + 16 * i), c = load_bytes(p + 128 + 16 * i);
      widen(mask_bytes(a, 63), d, scales.first[i]);
      widen(mask_bytes(b, 63), dmin, scales.second[i]);
      widen(mask_bytes(vsliq_n_u8(c, vshrq_n_u8(a, 6), 4), 63), d, scales.first[i + 4]);
      widen(vsriq_n_u8(mask_bytes(vshrq_n_u8(b, 2), 48), c, 4), dmin, scales.second[i + 4]);
    }
  }
  template <bool PAIRED>
  static EDGEDEC_INLINE void unpack(const uint8_t *block, int part, Bytes *w) {
    if constexpr (FIFTH) load_five_bits<PAIRED>(block + PART_BYTES * part, block + 256 + PART_BYTES * part, w);
    else load_nibbles<PAIRED>(block + PART_BYTES * part, w);
  }
  template <bool PAIRED, int K>
  static EDGEDEC_INLINE void add(Floats *sums, const Bytes *w, const PartScales &of,
                                 const ActivationBlock &a, int m) {
    Ints c[K];
    UNROLL for (int v = 0; v < K; ++v) c[v] = set_ints(0);
    whole_block<PAIRED, K>(c, w, a, m);
    UNROLL for (int v = 0; v < K; ++v) {
      const Floats scale = by_rows<PAIRED>(of_part<PAIRED>(of.first, v), a.scale, m + v);
      sums[v] = fma(to_floats(c[v]), scale, sums[v]);
      sums[v] = add_by_rows<PAIRED, true>(sums[v], of_part<PAIRED>(of.second, v), a.sum, m + v);
    }
  }
};

struct K6 {  // Q6_K
  static constexpr int UNIT_BLOCKS = 8, STEP = 384, UNIT_BYTES = 3360;

  static EDGEDEC_INLINE void read_scales(const uint8_t *p, int, Scales &scales) {
    Floats d[PARTS];
    read_halves(p + 3328, d);
    for (int i = 0; i < RUN; ++i) {
      widen_s8(vld1q_s8((const int8_t *)p + 3072 + 32 * i), d, scales.first[i]);
      widen_s8(vld1q_s8((const int8_t *)p + 3072 + 32 * i + 16), d, scales.second[i]);
    }
  }
  template <bool PAIRED>
  static EDGEDEC_INLINE void unpack(const uint8_t *block, int part, Bytes *w) {
    load_six_bits<PAIRED>(block + PART_BYTES * part, w);
  }
  template <bool PAIRED, int K>
  static EDGEDEC_INLINE void add(Floats *sums, const Bytes *w, const PartScales &of,
                                 const ActivationBlock &a, int m) {
    Ints c[K];
    Floats both[K];
    UNROLL for (int v = 0; v < K; ++v) c[v] = of_rows<PAIRED>(a.minus32[0], m + v);
    sixteen<PAIRED, K>(c, w, a.q[m]);
    UNROLL for (int v = 0; v < K; ++v) {
      both[v] = mul(to_floats(c[v]), of_part<PAIRED>(of.first, v));
      c[v] = of_rows<PAIRED>(a.minus32[1], m + v);
    }
    sixteen<PAIRED, K>(c, w + 4, a.q[m] + SECOND_HALF);
    UNROLL for (int v = 0; v < K; ++v) {
      const Floats sum = fma(to_floats(c[v]), of_part<PAIRED>(of.second, v), both[v]);
      sums[v] = add_by_rows<PAIRED>(sums[v], sum, a.scale, m + v);
    }
  }
};

// The numbers of a type's codes without the bias, as dot products are of signed bytes.
template <int32_t TYPE>
struct Numbers {
  alignas(16) uint8_t at[16];
  constexpr Numbers() : at() {
    constexpr edgedec::Coding c = edgedec::coding(TYPE);
    for (int i = 0; i < 16; ++i) at[i] = (uint8_t)((c.numbers != nullptr ? c.numbers[i] : i) - c.bias);
  }
};

template <bool PAIRED, bool THIRD>
EDGEDEC_INLINE void load_two_bits(const uint8_t *p, const uint8_t *thirds, Bytes *w) {
  UNROLL for (int v = 0; v < 2; ++v) {
    const Bytes h = load_bytes(p + 64 * v);
    w[4 * v] = mask_bytes(h, 3);
    w[4 * v + 1] = mask_bytes(vshrq_n_u8(h, 2), 3);
    w[4 * v + 2] = mask_bytes(vshrq_n_u8(h, 4), 3);
    w[4 * v + 3] = vshrq_n_u8(h, 6);
  }
  if constexpr (THIRD) {
    const Bytes h = load_bytes(thirds);
    w[0] = vorrq_u8(w[0], mask_bytes(vshlq_n_u8(h, 2), 4));
    w[1] = vorrq_u8(w[1], mask_bytes(vshlq_n_u8(h, 1), 4));
    w[2] = vorrq_u8(w[2], mask_bytes(h, 4));
    w[3] = vorrq_u8(w[3], mask_bytes(vshrq_n_u8(h, 1), 4));
    w[4] = vorrq_u8(w[4], mask_bytes(vshrq_n_u8(h, 2), 4));
    w[5] = vorrq_u8(w[5], mask_bytes(vshrq_n_u8(h, 3), 4));
    w[6] = vorrq_u8(w[6], mask_bytes(vshrq_n_u8(h, 4), 4));
    w[7] = vorrq_u8(w[7], mask_bytes(vshrq_n_u8(h, 5), 4));
  }
  pair<PAIRED, 8>(w);
}

template <bool PAIRED>
EDGEDEC_INLINE void load_one_bits(const uint8_t *p, Bytes *w) {
  const Bytes h = load_bytes(p);
  w[0] = mask_bytes(h, 1);
  w[1] = mask_bytes(vshrq_n_u8(h, 1), 1);
  w[2] = mask_bytes(vshrq_n_u8(h, 2), 1);
  w[3] = mask_bytes(vshrq_n_u8(h, 3), 1);
  w[4] = mask_bytes(vshrq_n_u8(h, 4), 1);
  w[5] = mask_bytes(vshrq_n_u8(h, 5), 1);
  w[6] = mask_bytes(vshrq_n_u8(h, 6), 1);
  w[7] = vshrq_n_u8(h, 7);
  pair<PAIRED, 8>(w);
}

template <int32_t TYPE>
struct Coded {  // the types of weights/coding.h
  static constexpr edgedec::Coding C = edgedec::coding(TYPE);
  static constexpr int UNIT_BLOCKS = C.columns / 32, UNIT_BYTES = edgedec::coded_bytes(C);
  static constexpr int STEP = UNIT_BLOCKS == 1 ? UNIT_BYTES : edgedec::code_bytes(C);
  static constexpr bool MINIMUM = C.scales == edgedec::ScaleBytes::Q2;

  static EDGEDEC_INLINE void read_scales(const uint8_t *p, [[maybe_unused]] int n, Scales &scales) {
    if constexpr (UNIT_BLOCKS < RUN) {
      for (int i = 0; i < n; ++i) {
        const uint8_t *unit = p + i / UNIT_BLOCKS * UNIT_BYTES;
        if constexpr (C.scales == edgedec::ScaleBytes::NONE) read_halves(unit + edgedec::halves_at(C), scales.first[i]);
        else UNROLL for (int part = 0; part < PARTS; ++part)
          scales.first[i][part] = load_exponents(unit + edgedec::scales_at(C) + LANES * part);
      }
    } else {
      alignas(16) int8_t s[256], m[256];
      edgedec::unpack_scales<C.scales, C.by_16 ? 16 : 8>(p + edgedec::scales_at(C), s, m);
      Floats d[PARTS], dmin[PARTS];
      read_halves(p + edgedec::halves_at(C), d);
      UNROLL for (int part = 0; part < PARTS; ++part) d[part] = mul(d[part], set(C.factor));
      if constexpr (MINIMUM) read_halves(p + edgedec::halves_at(C) + 32, dmin);
      if constexpr (MINIMUM)  // for sums of the activations times -32
        UNROLL for (int part = 0; part < PARTS; ++part) dmin[part] = mul(dmin[part], set(1.0f / 32));
      for (int i = 0; i < RUN; ++i) {
        widen_s8(vld1q_s8(s + (C.by_16 ? 32 : 16) * i), d, scales.first[i]);
        if constexpr (C.by_16) widen_s8(vld1q_s8(s + 32 * i + 16), d, scales.second[i]);
        if constexpr (MINIMUM) widen_s8(vld1q_s8(m + 32 * i), dmin, scales.first_minimum[i]);
        if constexpr (MINIMUM) widen_s8(vld1q_s8(m + 32 * i + 16), dmin, scales.second_minimum[i]);
      }
    }
  }
  template <bool PAIRED>
  static EDGEDEC_INLINE void unpack(const uint8_t *block, int part, Bytes *w) {
    static constexpr Numbers<TYPE> numbers;
    const uint8_t *p = block + PART_BYTES * part;
    if constexpr (C.bits == 1) load_one_bits<PAIRED>(p, w);
    else if constexpr (C.bits == 4) load_nibbles<PAIRED>(p, w);
    else load_two_bits<PAIRED, C.bits == 3>(p, p + 128, w);
    if constexpr (C.numbers != nullptr || C.bias != 0) {
      const Bytes table = load_bytes(numbers.at);
      UNROLL for (int g = 0; g < 8; ++g) w[g] = vqtbl1q_u8(table, w[g]);
    }
  }
  template <bool PAIRED, int K>
  static EDGEDEC_INLINE void add(Floats *sums, const Bytes *w, const PartScales &of, const ActivationBlock &a, int m) {
    Ints c[K];
    UNROLL for (int v = 0; v < K; ++v) c[v] = set_ints(0);
    if constexpr (!C.by_16) {
      whole_block<PAIRED, K>(c, w, a, m);
      UNROLL for (int v = 0; v < K; ++v)
        sums[v] = fma(to_floats(c[v]), by_rows<PAIRED>(of_part<PAIRED>(of.first, v), a.scale, m + v), sums[v]);
    } else {
      Floats both[K];
      sixteen<PAIRED, K>(c, w, a.q[m]);
      UNROLL for (int v = 0; v < K; ++v) {
        both[v] = mul(to_floats(c[v]), of_part<PAIRED>(of.first, v));
        c[v] = set_ints(0);
      }
      sixteen<PAIRED, K>(c, w + 4, a.q[m] + SECOND_HALF);
      UNROLL for (int v = 0; v < K; ++v) {
        both[v] = fma(to_floats(c[v]), of_part<PAIRED>(of.second, v), both[v]);
        if constexpr (MINIMUM) {
          const Floats first = of_part<PAIRED>(of.first_minimum, v), second = of_part<PAIRED>(of.second_minimum, v);
          both[v] = fma(to_floats(of_rows<PAIRED>(a.minus32[0], m + v)), first, both[v]);
          both[v] = fma(to_floats(of_rows<PAIRED>(a.minus32[1], m + v)), second, both[v]);
        }
        sums[v] = add_by_rows<PAIRED>(sums[v], both[v], a.scale, m + v);
      }
    }
  }
};
