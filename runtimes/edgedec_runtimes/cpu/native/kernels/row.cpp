#include "kernels/row.h"

#include <math.h>
#include <string.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <vector>

namespace edgedec {
namespace {

std::vector<float> maxima_of(const Kernels &k, const float *x, int64_t n) {
  std::vector<float> maxima((size_t)((n + ROW_BLOCK - 1) / ROW_BLOCK));
  k.row_maxima(x, n, maxima.data());
  return maxima;
}

// Call act(i) for the index i of each value that is at least `threshold`, in ascending order.
template <class Act>
void for_each_above(const std::vector<float> &maxima, const float *x, int64_t n, float threshold, Act act) {
  for (size_t block = 0; block < maxima.size(); ++block) {
    if (!(maxima[block] >= threshold)) continue;
    const int64_t begin = (int64_t)block * ROW_BLOCK;
    for (int64_t i = begin; i < std::min(n, begin + ROW_BLOCK); ++i)
      if (x[i] >= threshold) act(i);
  }
}

}  // namespace

double row_total(const Kernels &k, const float *x, int64_t n, float *most) {
  const std::vector<float> maxima = maxima_of(k, x, n);
  *most = *std::max_element(maxima.begin(), maxima.end());
  return k.row_sum(x, n, *most);
}

int64_t row_argmax(const Kernels &k, const float *x, int64_t n) {
  const std::vector<float> maxima = maxima_of(k, x, n);
  const auto most = std::max_element(maxima.begin(), maxima.end());
  const int64_t begin = (most - maxima.begin()) * ROW_BLOCK;
  return std::find(x + begin, x + std::min(n, begin + ROW_BLOCK) - 1, *most) - x;
}

int64_t row_above(const Kernels &k, const float *x, int64_t n, float threshold, int64_t *ids, int64_t capacity) {
  int64_t found = 0;
  for_each_above(maxima_of(k, x, n), x, n, threshold, [&](int64_t i) {
    if (found < capacity) ids[found] = i;
    ++found;
  });
  return found;
}

void row_top_k(const Kernels &k, const float *x, int64_t n, int64_t top_k, int64_t *ids) {
  const std::vector<float> maxima = maxima_of(k, x, n);
  // As many blocks have a value as great as this one, so at least as many values are that great.
  float bound = -INFINITY;
  if (top_k <= (int64_t)maxima.size()) {
    std::vector<float> sorted = maxima;
    std::nth_element(sorted.begin(), sorted.begin() + (top_k - 1), sorted.end(), std::greater<float>());
    bound = sorted[(size_t)top_k - 1];
  }
  std::vector<int64_t> found;
  found.reserve((size_t)std::max<int64_t>(2 * top_k, 64));
  for_each_above(maxima, x, n, bound, [&](int64_t i) { found.push_back(i); });
  const auto before = [&](int64_t a, int64_t b) { return x[a] > x[b] || (x[a] == x[b] && a < b); };
  std::nth_element(found.begin(), found.begin() + (top_k - 1), found.end(), before);
  std::copy_n(found.begin(), top_k, ids);
  std::sort(ids, ids + top_k);
}

// The weights are summed in bins by their logits, from the greatest logit down as far as enough of the weight goes. Only the
// bin in which the sum passes its goal is sorted.
int64_t row_nucleus(const Kernels &k, const float *x, int64_t n, double top_p, int64_t *ids, int64_t capacity) {
  constexpr int BINS = 512;
  constexpr float PER_BIN = 16.0f;  // bins to a unit of the logits
  const std::vector<float> maxima = maxima_of(k, x, n);
  const float most = *std::max_element(maxima.begin(), maxima.end());
  const double goal = top_p * k.row_sum(x, n, most);
  if (!(goal > 0)) return -1;
  const auto bin_of = [&](float value) { return std::min(BINS - 1, (int)((most - value) * PER_BIN)); };
  double sums[BINS], sum = 0;
  float lowest = most;
  for (float depth = 6.0f; depth < 100.0f && !(sum >= goal); depth *= 1.5f) {
    lowest = most - depth;
    std::fill(sums, sums + BINS, 0.0);
    for_each_above(maxima, x, n, lowest, [&](int64_t i) { sums[bin_of(x[i])] += (double)expf(x[i] - most); });
    sum = std::accumulate(sums, sums + BINS, 0.0);
  }
  int last = 0;
  for (sum = 0; last < BINS - 1 && sum + sums[last] < goal; ++last) sum += sums[last];
  const float edge = std::max(lowest, most - ((float)last + 1.01f) / PER_BIN);
  std::vector<int64_t> border;
  for_each_above(maxima, x, n, edge, [&](int64_t i) {
    if (bin_of(x[i]) == last) border.push_back(i);
  });
  const auto before = [&](int64_t a, int64_t b) { return x[a] > x[b] || (x[a] == x[b] && a < b); };
  std::sort(border.begin(), border.end(), before);
  size_t n_border = 0;
  while (n_border < border.size() && sum < goal) sum += (double)expf(x[border[n_border++]] - most);
  int64_t found = 0;
  for_each_above(maxima, x, n, edge, [&](int64_t i) {
    const int bin = bin_of(x[i]);
    if (bin > last || (bin == last && (n_border == 0 || before(border[n_border - 1], i)))) return;
    if (found < capacity) ids[found] = i;
    ++found;
  });
  return found;
}

// As -log(u) >= 1 - u, the noise of a token is at most -log(1 - u). So only a token with 1 - u <= exp(x / temperature - best)
// can exceed the best sum so far. That test needs no logarithm, and few tokens pass it.
int64_t row_contenders(const Kernels &k, const float *x, int64_t n, float temperature, uint64_t key, int64_t *ids,
                       int64_t capacity) {
  constexpr double UNIT = 1.0 / 4503599627370496.0, SLACK = 1.001;  // 2^-52; the rounding of float
  const std::vector<float> maxima = maxima_of(k, x, n);
  const auto block_of_most = std::max_element(maxima.begin(), maxima.end());
  const float most = *block_of_most;
  int64_t found = 0;
  const auto key_of = [&](int64_t i) {
    const double u = ((double)(hash_of(key, i) >> 12) + 0.5) * UNIT;
    return ((double)x[i] - most) / temperature - log(-log(u));
  };
  double best = key_of(std::find(x + (block_of_most - maxima.begin()) * ROW_BLOCK, x + n - 1, most) - x);
  float bound = (float)(exp(-best) / UNIT * SLACK), chances[ROW_BLOCK], padded[ROW_BLOCK];
  for (int64_t begin = 0; begin < n; begin += ROW_BLOCK) {
    const int64_t n_block = std::min(ROW_BLOCK, n - begin);
    const float *block = x + begin;
    if (n_block < ROW_BLOCK) {
      std::fill(std::copy_n(block, n_block, padded), padded + ROW_BLOCK, most);
      block = padded;
    }
    if (!(k.row_chances(block, most, 1.0f / temperature, bound, key, begin, chances) >= 0)) continue;
    for (int64_t i = 0; i < n_block; ++i) {
      if (!(chances[i] >= 0)) continue;
      const double own = key_of(i + begin);
      if (own > best) {
        best = own;
        bound = (float)(exp(-best) / UNIT * SLACK);
      }
      if (found < capacity) ids[found] = begin + i;
      ++found;
    }
  }
  return found;
}

}  // namespace edgedec
