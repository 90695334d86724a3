// Norms, activations, rotations and int8 quantization. Included by kernels.cpp, once per instruction set.
// Where a length is no multiple of LANES, the rest is scalar code. The lane of a value depends on its index only.

// All of these keep NaN as NaN, so that a damaged weight shows in the logits (forward/forward.cpp).

// e^x for x <= 0, at least e^-87: x = n ln 2 + r, and a polynomial of degree 6 in r.
inline Floats exp_of(Floats x) {
  x = max(set(-87.0f), x);  // in this order, as x86 returns the second operand where one is NaN
  const Floats n = round_even(mul(x, set(1.44269504f)));
  const Floats r = fnma(n, set(-2.12194440e-4f), fnma(n, set(0.693359375f), x));
  Floats p = set(1.0f / 720);
  p = fma(p, r, set(1.0f / 120));
  p = fma(p, r, set(1.0f / 24));
  p = fma(p, r, set(1.0f / 6));
  p = fma(p, r, set(0.5f));
  p = fma(p, r, set(1.0f));
  p = fma(p, r, set(1.0f));
  return mul(p, power_of_two(n));
}

void quantize_block(ActivationBlock &block, int row, const float *x) {
  Floats most = zero();
  for (int i = 0; i < 32; i += LANES) most = max_magnitude(most, abs(load(x + i)));
  const float peak = max_magnitude_lanes(most), scale = peak / 127.0f;
  const float inverse = scale > 1e-37f ? 1.0f / scale : 0.0f;
  int8_t apart[32], *q = ROWS_IN_PAIRS ? apart : block.q[row];
  for (int i = 0; i < 32; i += LANES)
    store_s8(q + i, max(min(mul(load(x + i), set(inverse)), set(127.0f)), set(-127.0f)));
  if (ROWS_IN_PAIRS)
    for (int i = 0; i < 32; i += 8) memcpy(block.q[0] + edgedec::index_in_block(true, row, i), q + i, 8);
  const int32_t first = sum_s8(q), second = sum_s8(q + 16);
  block.scale[row] = scale;
  block.sum[row] = scale * (float)(first + second);
  block.minus8[row] = -8 * (first + second);
  block.minus32[0][row] = -32 * first;
  block.minus32[1][row] = -32 * second;
}

void quantize(const Activations &a, int64_t row, int64_t begin, int64_t n, const float *x) {
  if (a.x != nullptr) memcpy(a.x + row * a.n + begin, x, (size_t)n * sizeof(float));
  if (a.blocks == nullptr) return;
  ActivationBlock *blocks = a.blocks + row / GROUP_ROWS * (a.n / 32) + begin / 32;
  for (int64_t i = 0; i < n; i += 32) quantize_block(blocks[i / 32], (int)(row % GROUP_ROWS), x + i);
}

void rms_norm(const float *x, const float *weight, float epsilon, int64_t n, float *out) {
  const int64_t whole = n - n % LANES;
  Floats squares[4] = {zero(), zero(), zero(), zero()};
  for (int64_t i = 0; i < whole; i += 4 * LANES)
    UNROLL for (int k = 0; k < 4; ++k)
      if (i + k * LANES < whole) squares[k] = fma(load(x + i + k * LANES), load(x + i + k * LANES), squares[k]);
  float sum = sum_lanes(add(add(squares[0], squares[1]), add(squares[2], squares[3])));
  for (int64_t i = whole; i < n; ++i) sum += x[i] * x[i];
  const float factor = 1.0f / sqrtf(sum / (float)n + epsilon);
  for (int64_t i = 0; i < whole; i += LANES) store(out + i, mul(mul(load(x + i), set(factor)), load(weight + i)));
  for (int64_t i = whole; i < n; ++i) out[i] = x[i] * factor * weight[i];
}

void rope(float *x, const float *cos_sin, int32_t n_rot, bool interleaved) {
  const int32_t half = n_rot / 2;
  const float *cosine = cos_sin, *sine = cos_sin + half;
  int32_t i = 0;
  for (; !interleaved && i + LANES <= half; i += LANES) {
    const Floats u = load(x + i), v = load(x + half + i), c = load(cosine + i), s = load(sine + i);
    store(x + i, sub(mul(u, c), mul(v, s)));
    store(x + half + i, add(mul(u, s), mul(v, c)));
  }
  for (; i < half; ++i) {
    float *a = interleaved ? x + 2 * i : x + i, *b = interleaved ? a + 1 : a + half;
    const float u = *a, v = *b;
    *a = u * cosine[i] - v * sine[i];
    *b = u * sine[i] + v * cosine[i];
  }
}

// 1 / (1 + e^-x), computed from e^-|x|
inline Floats sigmoid(Floats x) {
  const Floats e = exp_of(sub(zero(), abs(x)));  // e^-|x|
  const Floats positive = div(set(1.0f), add(set(1.0f), e));
  // `positive` for x >= 0; for x < 0 it is 1 - positive, computed as e / (1 + e) to keep small values exact
  const Floats negative = mul(e, positive);
  return where_negative(x, negative, positive);
}

// gelu(x) = x * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)): the tanh form (Hendrycks and Gimpel 2016, arXiv:1606.08415)
inline Floats gelu_of(Floats x) {
  const Floats inner = mul(x, fma(mul(x, x), set(0.044715f), set(1.0f)));
  return mul(x, sigmoid(mul(inner, set(1.5957691216f))));
}

inline Floats silu_of(Floats x) { return mul(x, sigmoid(x)); }

inline Floats relu_of(Floats x) { return max(zero(), x); }

inline Floats activation_of(Floats x, int32_t activation) {
  switch (activation) {
    case EC_GELU: return gelu_of(x);
    case EC_GELU_QUICK: return mul(x, sigmoid(mul(x, set(1.702f))));
    case EC_RELU: return relu_of(x);
    case EC_RELU2: return mul(relu_of(x), relu_of(x));
    default: return silu_of(x);
  }
}

void gated(const float *gate, const float *up, int64_t n, int32_t activation, float *out) {
  const int64_t whole = n - n % LANES;
  const auto gate_of = [&](Floats g, const float *u) {
    const Floats active = activation_of(g, activation);
    return u != nullptr ? mul(active, load(u)) : active;
  };
  for (int64_t i = 0; i < whole; i += LANES)
    store(out + i, gate_of(load(gate + i), up != nullptr ? up + i : nullptr));
  if (whole == n) return;
  float g[LANES] = {}, u[LANES] = {};
  memcpy(g, gate + whole, (size_t)(n - whole) * sizeof(float));
  if (up != nullptr) memcpy(u, up + whole, (size_t)(n - whole) * sizeof(float));
  store(g, gate_of(load(g), up != nullptr ? u : nullptr));
  memcpy(out + whole, g, (size_t)(n - whole) * sizeof(float));
}

void add_rows(float *x, const float *y, float factor, int64_t n) {
  const int64_t whole = n - n % LANES;
  for (int64_t i = 0; i < whole; i += LANES) store(x + i, add(load(x + i), mul(load(y + i), set(factor))));
  for (int64_t i = whole; i < n; ++i) x[i] += y[i] * factor;
}

// tanh(x) = (1 - e^-2|x|) / (1 + e^-2|x|), with the sign of x
inline Floats tanh_of(Floats x) {
  const Floats e = exp_of(mul(abs(x), set(-2.0f)));
  const Floats positive = div(sub(set(1.0f), e), add(set(1.0f), e));
  return where_negative(x, sub(zero(), positive), positive);
}

void softcap(float *x, float cap, int64_t n) {
  const int64_t whole = n - n % LANES;
  const auto capped = [&](Floats v) { return mul(tanh_of(mul(v, set(1.0f / cap))), set(cap)); };
  for (int64_t i = 0; i < whole; i += LANES) store(x + i, capped(load(x + i)));
  if (whole == n) return;
  float rest[LANES] = {};
  memcpy(rest, x + whole, (size_t)(n - whole) * sizeof(float));
  store(rest, capped(load(rest)));
  memcpy(x + whole, rest, (size_t)(n - whole) * sizeof(float));
}

void to_halves(const float *x, int64_t n, uint16_t *out) {
  const int64_t whole = n - n % LANES;
  for (int64_t i = 0; i < whole; i += LANES) store_halves(out + i, load(x + i));
  for (int64_t i = whole; i < n; ++i) out[i] = edgedec::float_to_half(x[i]);
}

// ln(1 + e) for e from 0 to 1: 2 artanh(e / (2 + e)), whose series ends below a float's precision.
inline Floats log1p_of(Floats e) {
  const Floats s = div(e, add(set(2.0f), e)), s2 = mul(s, s);
  Floats p = set(2.0f / 15);
  p = fma(p, s2, set(2.0f / 13));
  p = fma(p, s2, set(2.0f / 11));
  p = fma(p, s2, set(2.0f / 9));
  p = fma(p, s2, set(2.0f / 7));
  p = fma(p, s2, set(2.0f / 5));
  p = fma(p, s2, set(2.0f / 3));
  p = fma(p, s2, set(2.0f));
  return mul(s, p);
}

// ln(1 + e^x), computed from e^-|x|
inline Floats softplus_of(Floats x) { return add(max(zero(), x), log1p_of(exp_of(sub(zero(), abs(x))))); }

// Replace each vector of x by what `f` makes of it.
template <class F>
void map_by(float *x, int64_t n, F f) {
  const int64_t whole = n - n % LANES;
  for (int64_t i = 0; i < whole; i += LANES) store(x + i, f(load(x + i)));
  if (whole == n) return;
  float rest[LANES] = {};
  memcpy(rest, x + whole, (size_t)(n - whole) * sizeof(float));
  store(rest, f(load(rest)));
  memcpy(x + whole, rest, (size_t)(n - whole) * sizeof(float));
}

void map(Function function, float *x, int64_t n) {
  switch (function) {
    case Function::silu: return map_by(x, n, silu_of);
    case Function::sigmoid: return map_by(x, n, sigmoid);
    case Function::softplus: return map_by(x, n, softplus_of);
    case Function::exp: return map_by(x, n, exp_of);
  }
}

void multiply_by_sigmoid(float *x, const float *gate, int64_t n) {
  const int64_t whole = n - n % LANES;
  for (int64_t i = 0; i < whole; i += LANES) store(x + i, mul(load(x + i), sigmoid(load(gate + i))));
  if (whole == n) return;
  float rest[LANES] = {};
  memcpy(rest, gate + whole, (size_t)(n - whole) * sizeof(float));
  store(rest, sigmoid(load(rest)));
  for (int64_t i = whole; i < n; ++i) x[i] *= rest[i - whole];
}
