// Products of many rows with panels of weights, and what a picture's encoder needs beside them. Included by kernels.cpp,
// once per instruction set. Lane i of a vector is weight row i of the panel: every sum runs over the columns in order.

constexpr int PANEL_PARTS = edgedec::TILE_ROWS / LANES;  // vectors for the 16 weight rows of a panel
// Rows that a kernel takes at once: as many as leave registers for the weights (plain C++ has none to plan with).
constexpr int PANEL_AT_ONCE = LANES == 16 ? 12 : EDGEDEC_SIMD == 0 ? 2 : 6;

template <int N>
void panel_rows(const PanelWork &w, int64_t row) {
  const float *x = w.x + row * w.x_stride;
  float *y = w.y + row * w.y_stride;
  Floats acc[N][PANEL_PARTS];
  UNROLL for (int m = 0; m < N; ++m)
    UNROLL for (int p = 0; p < PANEL_PARTS; ++p) acc[m][p] = w.adds ? load(y + m * w.y_stride + LANES * p) : zero();
  for (int64_t c = 0; c < w.n_cols; ++c) {
    Floats weights[PANEL_PARTS];
    UNROLL for (int p = 0; p < PANEL_PARTS; ++p) weights[p] = load(w.weights + edgedec::TILE_ROWS * c + LANES * p);
    UNROLL for (int m = 0; m < N; ++m) {
      const Floats a = set(x[m * w.x_stride + c]);
      UNROLL for (int p = 0; p < PANEL_PARTS; ++p) acc[m][p] = fma(weights[p], a, acc[m][p]);
    }
  }
  UNROLL for (int m = 0; m < N; ++m)
    UNROLL for (int p = 0; p < PANEL_PARTS; ++p) store(y + m * w.y_stride + LANES * p, acc[m][p]);
}

template <class Work, int... I>
void by_rows(const Work &w, void (*const (&of_n)[sizeof...(I)])(const Work &, int64_t),
             std::integer_sequence<int, I...>) {
  constexpr int most = (int)sizeof...(I);
  for (int64_t row = 0; row < w.n_rows; row += most)
    of_n[(w.n_rows - row < most ? w.n_rows - row : most) - 1](w, row);
}

template <int... I>
void panel_of(const PanelWork &w, std::integer_sequence<int, I...> numbers) {
  static constexpr void (*of_n[])(const PanelWork &, int64_t) = {panel_rows<I + 1>...};
  by_rows(w, of_n, numbers);
}

void panel(const PanelWork &w) { panel_of(w, std::make_integer_sequence<int, PANEL_AT_ONCE>()); }

#if EDGEDEC_SIMD >= 2 && EDGEDEC_SIMD <= 4
// The same for weights of Q8_0, widened to 16 bits, and rows rounded to 16 bits. A sum over 32 columns is exact:
// 32 * 128 * 32767 < 2^31.
template <int N>
void pairs_rows(const PairsWork &w, int64_t row) {
  const int16_t *x = w.x + row * w.x_stride;
  Floats acc[N][PANEL_PARTS];
  UNROLL for (int m = 0; m < N; ++m)
    UNROLL for (int p = 0; p < PANEL_PARTS; ++p) acc[m][p] = zero();
  const int16_t *weights = w.weights;
  for (int64_t c = 0; c < w.n_cols; c += 32) {
    Ints sums[N][PANEL_PARTS];
    UNROLL for (int m = 0; m < N; ++m)
      UNROLL for (int p = 0; p < PANEL_PARTS; ++p) sums[m][p] = set_ints(0);
    for (int k = 0; k < 32; k += 2, weights += 2 * edgedec::TILE_ROWS) {
      Bytes pairs[PANEL_PARTS];
      UNROLL for (int p = 0; p < PANEL_PARTS; ++p) pairs[p] = load_bytes(weights + 2 * LANES * p);
      UNROLL for (int m = 0; m < N; ++m) {
        int32_t both;
        memcpy(&both, x + m * w.x_stride + c + k, 4);
        const Ints a = set_ints(both);
        UNROLL for (int p = 0; p < PANEL_PARTS; ++p) sums[m][p] = add_pairs(sums[m][p], pairs[p], a);
      }
    }
    UNROLL for (int p = 0; p < PANEL_PARTS; ++p) {
      const Floats scale = load(w.scales + c / 32 * edgedec::TILE_ROWS + LANES * p);
      UNROLL for (int m = 0; m < N; ++m) acc[m][p] = fma(to_floats(sums[m][p]), scale, acc[m][p]);
    }
  }
  UNROLL for (int m = 0; m < N; ++m) {
    const Floats scale = set(w.x_scales[(row + m) * w.x_scales_stride]);
    UNROLL for (int p = 0; p < PANEL_PARTS; ++p) {
      float *y = w.y + (row + m) * w.y_stride + LANES * p;
      store(y, fma(acc[m][p], scale, w.adds ? load(y) : zero()));
    }
  }
}

template <int... I>
void pairs_of(const PairsWork &w, std::integer_sequence<int, I...> numbers) {
  static constexpr void (*of_n[])(const PairsWork &, int64_t) = {pairs_rows<I + 1>...};
  by_rows(w, of_n, numbers);
}

void pairs(const PairsWork &w) { pairs_of(w, std::make_integer_sequence<int, PANEL_AT_ONCE>()); }

float to_pairs(const float *x, int64_t n, int16_t *out) {
  Floats most = zero();
  for (int64_t i = 0; i < n; i += LANES) most = max_magnitude(most, abs(load(x + i)));
  const float peak = max_magnitude_lanes(most), scale = peak / 32767.0f;
  const Floats inverse = set(scale > 1e-37f ? 1.0f / scale : 0.0f);
  for (int64_t i = 0; i < n; i += LANES)
    store_s16(out + i, max(min(mul(load(x + i), inverse), set(32767.0f)), set(-32767.0f)));
  return scale;
}
#else
constexpr void (*pairs)(const PairsWork &) = nullptr;
constexpr float (*to_pairs)(const float *, int64_t, int16_t *) = nullptr;
#endif

template <Floats (*LOAD)(const void *), int BYTES>
void widen_as(const uint8_t *row, int64_t n, float *out) {
  const int64_t whole = n - n % LANES;
  for (int64_t i = 0; i < whole; i += LANES) store(out + i, LOAD(row + BYTES * i));
  if (whole == n) return;
  uint8_t rest[BYTES * LANES] = {};
  float wide[LANES];
  memcpy(rest, row + BYTES * whole, (size_t)(BYTES * (n - whole)));
  store(wide, LOAD(rest));
  memcpy(out + whole, wide, (size_t)(n - whole) * sizeof(float));
}

void widen(int32_t type, const uint8_t *row, int64_t n, float *out) {
  switch (type) {
    case edgedec::F16: return widen_as<load_halves, 2>(row, n, out);
    case edgedec::BF16: return widen_as<load_bfloats, 2>(row, n, out);
    case edgedec::Q8_0:
      for (int64_t i = 0; i < n; i += 32, row += 34) {
        uint16_t half;
        memcpy(&half, row, 2);
        const Floats scale = set(edgedec::half_to_float(half));
        for (int k = 0; k < 32; k += LANES) store(out + i + k, mul(load_s8(row + 2 + k), scale));
      }
      return;
    default: return (void)memcpy(out, row, (size_t)n * sizeof(float));
  }
}

// Return the sum of f(x[i]); sums of the lanes of four vectors are added at the end.
template <class F>
float sum_of(const float *x, int64_t n, F f) {
  const int64_t whole = n - n % LANES;
  Floats sums[4] = {zero(), zero(), zero(), zero()};
  for (int64_t i = 0; i < whole; i += LANES) sums[i / LANES % 4] = f(load(x + i), sums[i / LANES % 4]);
  float sum = sum_lanes(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
  for (int64_t i = whole; i < n; ++i) {
    float one[LANES] = {};
    store(one, f(set(x[i]), zero()));
    sum += one[0];
  }
  return sum;
}

void layer_norm(const float *x, const float *weight, const float *bias, float epsilon, int64_t n, float *out) {
  const float mean = sum_of(x, n, [](Floats v, Floats sum) { return add(sum, v); }) / (float)n;
  const float square = sum_of(x, n, [&](Floats v, Floats sum) {
    const Floats d = sub(v, set(mean));
    return fma(d, d, sum);
  });
  const float factor = 1.0f / sqrtf(square / (float)n + epsilon);
  for (int64_t i = 0; i < n; ++i) out[i] = (x[i] - mean) * factor * weight[i] + (bias != nullptr ? bias[i] : 0.0f);
}

float exp_row(float *x, int64_t n, float *most) {
  const int64_t whole = n - n % LANES;
  Floats greatest = set(*most);
  for (int64_t i = 0; i < whole; i += LANES) greatest = max(greatest, load(x + i));
  *most = max_lanes(greatest);
  for (int64_t i = whole; i < n; ++i) *most = x[i] > *most ? x[i] : *most;
  const Floats subtracted = set(*most);
  Floats sum = zero();
  for (int64_t i = 0; i < whole; i += LANES) {
    const Floats e = exp_of(sub(load(x + i), subtracted));
    store(x + i, e);
    sum = add(sum, e);
  }
  float total = sum_lanes(sum);
  for (int64_t i = whole; i < n; ++i) {
    float one[LANES];
    store(one, exp_of(sub(set(x[i]), subtracted)));
    total += x[i] = one[0];
  }
  return total;
}
