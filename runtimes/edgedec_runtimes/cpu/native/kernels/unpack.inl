// Unpacking keys and values of less than 16 bits to floats, in the order in which attention reads them. Included by
// attention.inl.
//
// The floats of a token depend only on what is stored for that token, so bits do not depend on how the work is cut.

// Return element i of halves, or of unpacked floats.
template <bool PACKED>
inline Floats load_element(const uint8_t *from, int64_t i) {
  if constexpr (PACKED) return load((const float *)from + i);
  else return load_halves(from + 2 * i);
}

// Write the exact elements of several tokens to out. Number j of token t is at index t * token_step + j * step; element
// `place` of the token goes to out[t * pitch + place * stride].
inline void put_outliers(const AttentionWork &w, const uint8_t *halves, const uint8_t *places, int64_t n_tokens,
                         int64_t token_step, int64_t step, int64_t pitch, int64_t stride, float *out) {
  constexpr int64_t PER_BLOCK = edgedec::OUTLIER_ELEMENTS / edgedec::OUTLIERS_OF;
  const int32_t n = w.layout.n_outliers;
  float x[edgedec::UNPACKED_TOKENS * edgedec::MAX_OUTLIERS];
  // Bytes behind the last number are still in the page.
  for (int64_t i = 0; i < n_tokens * n; i += LANES) store(x + i, load_halves(halves + 2 * i));
  for (int64_t t = 0; t < n_tokens; ++t)
    for (int64_t j = 0; j < n; ++j) {
      const int64_t i = t * token_step + j * step;
      const int64_t found = j / PER_BLOCK * edgedec::OUTLIER_ELEMENTS + places[i];
      const int64_t place = found < w.head_dim ? found : 0;  // only a forged session has other places
      out[t * pitch + place * stride] = x[i];
    }
}

// Fetch n bytes that lie in the page `ahead` where `from` lies in a page; nothing where it is nullptr.
inline void fetch_ahead(const uint8_t *page, const uint8_t *ahead, const void *from, int64_t n) {
  if (ahead == nullptr) return;
  const uint8_t *to = ahead + ((const uint8_t *)from - page);
  for (int64_t i = 0; i < n; i += 64) prefetch_to_l2(to + i);
}

// Add the rotated bias to 16 keys.
inline void add_bias(const AttentionWork &w, const uint8_t *page, const uint8_t *ahead, const float *rotations,
                     float *out) {
  constexpr int WIDTH = edgedec::KEY_BLOCK;
  const int32_t half = w.n_rot / 2;
  for (int32_t i = 0; i < half; ++i) {
    const int32_t a = w.rope_interleaved ? 2 * i : i, b = w.rope_interleaved ? a + 1 : a + half;
    const Floats x = set(w.key_bias[a]), y = set(w.key_bias[b]);
    fetch_ahead(page, ahead, rotations + i * WIDTH, 4 * WIDTH);
    fetch_ahead(page, ahead, rotations + (half + i) * WIDTH, 4 * WIDTH);
    for (int v = 0; v < WIDTH; v += LANES) {
      const Floats cosine = load(rotations + i * WIDTH + v), sine = load(rotations + (half + i) * WIDTH + v);
      float *to_a = out + a * WIDTH + v, *to_b = out + b * WIDTH + v;
      store(to_a, fnma(y, sine, fma(x, cosine, load(to_a))));
      store(to_b, fma(y, cosine, fma(x, sine, load(to_b))));
    }
  }
  for (int32_t d = w.n_rot; d < w.head_dim; ++d)
    for (int v = 0; v < WIDTH; v += LANES)
      store(out + d * WIDTH + v, add(load(out + d * WIDTH + v), set(w.key_bias[d])));
}

// Where no bias is to be added, keys stay multiplied by the Hadamard matrix, and queries are multiplied by it as well.
inline bool stays_rotated(const AttentionWork &w) { return w.layout.rotated && w.key_bias == nullptr; }

// edgedec::hadamard for 16 keys, [d][16], two of its steps at a time.
void rotate_back(float *x, int32_t d) {
  constexpr int WIDTH = edgedec::KEY_BLOCK;
  const int32_t size = d & -d;
  const Floats factor = set(1.0f / sqrtf((float)size));
  int32_t half = 1;
  for (int32_t n = size; n > 1; n /= 4)
    if (n == 2) half = 2;
  if (half == 2)  // with an odd number of steps, one is taken by itself
    for (int32_t i = 0; i < d * WIDTH; i += 2 * WIDTH)
      for (int v = 0; v < WIDTH; v += LANES) {
        const Floats a = load(x + i + v), b = load(x + i + WIDTH + v);
        store(x + i + v, add(a, b));
        store(x + i + WIDTH + v, sub(a, b));
      }
  for (; half < size; half *= 4) {
    const int64_t step = half * WIDTH;
    const Floats scale = half * 4 == size ? factor : set(1.0f);
    for (int32_t begin = 0; begin < d; begin += 4 * half)
      for (int64_t i = begin * WIDTH; i < begin * WIDTH + step; i += LANES) {
        const Floats a = load(x + i), b = load(x + i + step), c = load(x + i + 2 * step), e = load(x + i + 3 * step);
        const Floats ab = add(a, b), a_b = sub(a, b), ce = add(c, e), c_e = sub(c, e);
        store(x + i, mul(add(ab, ce), scale));
        store(x + i + step, mul(add(a_b, c_e), scale));
        store(x + i + 2 * step, mul(sub(ab, ce), scale));
        store(x + i + 3 * step, mul(sub(a_b, c_e), scale));
      }
  }
}

// Unpack one block of 16 keys of a page to floats [head_dim][16], and fetch that of the page `ahead`, if any.
void unpack_keys(const AttentionWork &w, const uint8_t *page, const uint8_t *ahead, int64_t block, float *out) {
  constexpr int WIDTH = edgedec::KEY_BLOCK;
  const edgedec::KVLayout &at = w.layout;
  const uint8_t *base = page + w.offset, *scales = base + at.key_scales + 2 * block * at.n_groups * WIDTH;
  const uint8_t *keys = base + block * w.head_dim * WIDTH * at.bits / 8;
  for (int32_t g = 0; g < at.n_groups; ++g, out += 32 * WIDTH) {
    fetch_ahead(page, ahead, keys + g * (4 * WIDTH * at.bits), 4 * WIDTH * at.bits);
    for (int v = 0; v < WIDTH; v += LANES) {
      const Floats scale = load_halves(scales + 2 * (g * WIDTH + v));
      if (at.bits == 8) {
        for (int32_t i = 0; i < 32; ++i)
          store(out + i * WIDTH + v, mul(load_s8(keys + (32 * g + i) * WIDTH + v), scale));
        continue;
      }
      for (int32_t i = 0; i < 16; ++i) {
        const uint8_t *from = keys + (16 * g + i) * WIDTH + v;
        store(out + i * WIDTH + v, mul(load_low4(from), scale));
        store(out + (16 + i) * WIDTH + v, mul(load_high4(from), scale));
      }
    }
  }
  out -= w.head_dim * WIDTH;
  if (at.rotated && !stays_rotated(w)) rotate_back(out, w.head_dim);
  const int64_t first = block * at.n_outliers * WIDTH;
  put_outliers(w, base + at.key_outliers + 2 * first, base + at.key_places + first, WIDTH, 1, WIDTH, 1, WIDTH, out);
  if (w.key_bias != nullptr) {
    const float *rotations = (const float *)(page + w.rotations) + block * w.n_rot * WIDTH;
    add_bias(w, page, ahead, rotations, out);
  }
}

// Unpack the values of the tokens [begin, end) of a page to floats [end - begin][head_dim], and fetch those of the page
// `ahead`, if any.
void unpack_values(const AttentionWork &w, const uint8_t *page, const uint8_t *ahead, int64_t begin, int64_t end,
                   float *out) {
  const edgedec::KVLayout &at = w.layout;
  const uint8_t *base = page + w.offset, *values = base + at.values + begin * w.head_dim * at.value_bits / 8;
  const uint8_t *scales = base + at.value_scales + 2 * begin * at.n_groups;
  const int64_t n_groups = (end - begin) * at.n_groups;
  for (int64_t g = 0; g < n_groups; ++g) {
    uint16_t half;
    memcpy(&half, scales + 2 * g, 2);
    fetch_ahead(page, ahead, values + 4 * g * at.value_bits, 4 * at.value_bits);
    const Floats scale = set(edgedec::half_to_float(half));
    if (at.value_bits == 8) {
      for (int i = 0; i < 32; i += LANES) store(out + 32 * g + i, mul(load_s8(values + 32 * g + i), scale));
      continue;
    }
    for (int i = 0; i < 16; i += LANES) {
      store(out + 32 * g + i, mul(load_low4(values + 16 * g + i), scale));
      store(out + 32 * g + 16 + i, mul(load_high4(values + 16 * g + i), scale));
    }
  }
  const int64_t first = begin * at.n_outliers;
  put_outliers(w, base + at.value_outliers + 2 * first, base + at.value_places + first, end - begin, at.n_outliers, 1,
               w.head_dim, 1, out);
}
