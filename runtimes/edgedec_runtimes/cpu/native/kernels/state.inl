// Recurrent states: a tile of a head's state is [n_key][STATE_LANES] floats. Included by kernels.cpp, once per
// instruction set. The lanes of a tile never mix.

constexpr int STATE_VECTORS = edgedec::STATE_LANES / LANES;

void fold_state(float *state, int64_t n_key, const float *key, const float *update, float decay) {
  const Floats a = set(decay);
  Floats u[STATE_VECTORS];
  UNROLL for (int v = 0; v < STATE_VECTORS; ++v) u[v] = load(update + v * LANES);
  for (int64_t i = 0; i < n_key; ++i, state += edgedec::STATE_LANES) {
    const Floats k = set(key[i]);
    UNROLL for (int v = 0; v < STATE_VECTORS; ++v)
      store(state + v * LANES, fma(k, u[v], mul(a, load(state + v * LANES))));
  }
}

// Write S^T x, [STATE_LANES].
inline void state_product(const float *state, int64_t n_key, const float *x, float *out) {
  Floats even[STATE_VECTORS], odd[STATE_VECTORS];
  UNROLL for (int v = 0; v < STATE_VECTORS; ++v) even[v] = odd[v] = zero();
  int64_t i = 0;
  for (; i + 2 <= n_key; i += 2, state += 2 * edgedec::STATE_LANES) {
    const Floats first = set(x[i]), second = set(x[i + 1]);
    UNROLL for (int v = 0; v < STATE_VECTORS; ++v) {
      even[v] = fma(load(state + v * LANES), first, even[v]);
      odd[v] = fma(load(state + edgedec::STATE_LANES + v * LANES), second, odd[v]);
    }
  }
  if (i < n_key)
    UNROLL for (int v = 0; v < STATE_VECTORS; ++v) even[v] = fma(load(state + v * LANES), set(x[i]), even[v]);
  UNROLL for (int v = 0; v < STATE_VECTORS; ++v) store(out + v * LANES, add(even[v], odd[v]));
}

void step_state(float *state, int64_t n_key, const float *key, const float *query, float *update, float decay,
                float gain, bool corrects, float *out) {
  if (corrects) {
    state_product(state, n_key, key, out);
    UNROLL for (int v = 0; v < STATE_VECTORS; ++v) {
      const Floats known = mul(load(out + v * LANES), set(decay));
      store(update + v * LANES, mul(sub(load(update + v * LANES), known), set(gain)));
    }
  }
  const Floats a = set(decay);
  Floats u[STATE_VECTORS], even[STATE_VECTORS], odd[STATE_VECTORS];
  UNROLL for (int v = 0; v < STATE_VECTORS; ++v) u[v] = load(update + v * LANES), even[v] = odd[v] = zero();
  const auto row = [&](int64_t i, Floats *sums) {
    const Floats k = set(key[i]), q = set(query[i]);
    float *s = state + i * edgedec::STATE_LANES;
    UNROLL for (int v = 0; v < STATE_VECTORS; ++v) {
      const Floats now = fma(k, u[v], mul(a, load(s + v * LANES)));
      store(s + v * LANES, now);
      sums[v] = fma(now, q, sums[v]);
    }
  };
  for (int64_t i = 0; i < n_key; i += 2) {
    row(i, even);
    if (i + 1 < n_key) row(i + 1, odd);
  }
  UNROLL for (int v = 0; v < STATE_VECTORS; ++v) store(out + v * LANES, add(even[v], odd[v]));
}
