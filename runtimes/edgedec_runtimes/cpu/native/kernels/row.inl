// Kernels for one row of logits over the whole vocabulary. Included by kernels.cpp, once per instruction set.

constexpr int64_t ROW_BLOCK = edgedec::ROW_BLOCK;
static_assert(ROW_BLOCK % (4 * LANES) == 0, "a block is a number of vectors");

inline Floats block_max(const float *x) {
  Floats most[4] = {load(x), load(x + LANES), load(x + 2 * LANES), load(x + 3 * LANES)};
  for (int64_t i = 4 * LANES; i < ROW_BLOCK; i += 4 * LANES)
    for (int k = 0; k < 4; ++k) most[k] = max(most[k], load(x + i + k * LANES));
  return max(max(most[0], most[1]), max(most[2], most[3]));
}

// The greatest value of each block of ROW_BLOCK; the last block may be shorter.
void row_maxima(const float *x, int64_t n, float *maxima) {
  const int64_t whole = n - n % ROW_BLOCK;
  for (int64_t i = 0; i < whole; i += ROW_BLOCK) maxima[i / ROW_BLOCK] = max_lanes(block_max(x + i));
  if (whole == n) return;
  float most = x[whole];
  for (int64_t i = whole + 1; i < n; ++i) most = x[i] > most ? x[i] : most;
  maxima[whole / ROW_BLOCK] = most;
}

// The sum of exp(x - most), NaN where a value is not finite. The sums of blocks are added in double precision.
double row_sum(const float *x, int64_t n, float most) {
  const int64_t whole = n - n % ROW_BLOCK;
  double sum = 0;
  Floats wrong = zero();
  for (int64_t i = 0; i < whole; i += ROW_BLOCK) {
    Floats part[4] = {zero(), zero(), zero(), zero()};
    for (int64_t k = i; k < i + ROW_BLOCK; k += 4 * LANES)
      UNROLL for (int j = 0; j < 4; ++j) {
        const Floats v = load(x + k + j * LANES);
        part[j] = add(part[j], exp_of(sub(v, set(most))));
        wrong = add(wrong, sub(v, v));
      }
    sum += (double)sum_lanes(add(add(part[0], part[1]), add(part[2], part[3])));
  }
  sum += (double)sum_lanes(wrong);
  for (int64_t i = whole; i < n; ++i) sum += exp((double)(x[i] - most)) + (double)(x[i] - x[i]);
  return sum;
}

float row_chances(const float *x, float most, float factor, float bound, uint64_t key, int64_t begin, float *out) {
  for (int64_t i = 0; i < ROW_BLOCK; ++i) {
    const uint64_t bits = hash_of(key, begin + i);
    out[i] = (float)(int64_t)(~bits >> 12) + 0.5f;
  }
  Floats greatest = set(-INFINITY);
  for (int64_t i = 0; i < ROW_BLOCK; i += LANES) {
    const Floats weight = exp_of(mul(sub(load(x + i), set(most)), set(factor)));
    const Floats chance = sub(mul(weight, set(bound)), load(out + i));
    store(out + i, chance);
    greatest = max(greatest, chance);
  }
  return max_lanes(greatest);
}
