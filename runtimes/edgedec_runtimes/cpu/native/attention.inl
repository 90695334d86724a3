// Attention of up to 8 queries over one head's pages. Included by kernels.cpp, once per instruction set.
//
// A score is the sum of one lane over the elements of a head, in order. The scores of a query stand in the order of
// positions; their exponentials are summed in lanes by position modulo LANES, and values are added in the order of
// positions. So the result of a query depends on the tokens that it sees, and not on their slots, on other queries or on how
// the work is cut.

#include "unpack.inl"

// Scores of N queries against B blocks of 16 keys.
template <bool PACKED, int N, int B>
void score_blocks(const AttentionWork &w, int64_t block) {
  constexpr int V = edgedec::KEY_BLOCK / LANES;
  const uint8_t *keys[B];
  const int64_t per_page = edgedec::PAGE_TOKENS / edgedec::KEY_BLOCK;
  for (int b = 0; b < B; ++b) {
    const uint8_t *page = w.pages[(block + b) / per_page];
    const int64_t i = (block + b) % per_page;
    if constexpr (PACKED) {
      float *unpacked = w.unpacked + b * w.head_dim * edgedec::KEY_BLOCK;
      unpack_keys(w, page, i, unpacked);
      keys[b] = (const uint8_t *)unpacked;
    } else {
      keys[b] = page + w.offset + 2 * i * w.head_dim * edgedec::KEY_BLOCK;
    }
  }
  for (int v = 0; v < V; ++v) {
    Floats acc[B][N];
    for (int b = 0; b < B; ++b)
      for (int q = 0; q < N; ++q) acc[b][q] = zero();
    for (int32_t d = 0; d < w.head_dim; ++d)
      for (int b = 0; b < B; ++b) {
        const Floats k = load_element<PACKED>(keys[b], d * 16 + LANES * v);
        UNROLL for (int q = 0; q < N; ++q) acc[b][q] = fma(k, set(w.packed[d * N + q]), acc[b][q]);
      }
    for (int b = 0; b < B; ++b)
      for (int q = 0; q < N; ++q)
        store(w.scores + q * w.stride + (block + b) * 16 + LANES * v, mul(acc[b][q], set(w.scale)));
  }
}

template <bool PACKED, int N>
void score(const AttentionWork &w, int64_t begin, int64_t end) {
  for (int32_t d = 0; d < w.head_dim; ++d)
    for (int q = 0; q < N; ++q) w.packed[d * N + q] = w.query[q][d];
  if (stays_rotated(w)) edgedec::hadamard(w.packed, w.head_dim, N);
  constexpr int B = LANES == 16 && N <= 4 ? 2 : 1;
  int64_t block = begin;
  for (; block + B <= end; block += B) score_blocks<PACKED, N, B>(w, block);
  for (; block < end; ++block) score_blocks<PACKED, N, 1>(w, block);
}

// Replace scores by weights, and return the number that the sum of weighted values is to be divided by.
float softmax(float *s, int64_t start, int64_t visible) {
  const int64_t begin = start - start % 16, end = (visible + 15) / 16 * 16;
  for (int64_t i = begin; i < start; ++i) s[i] = -INFINITY;
  for (int64_t i = visible; i < end; ++i) s[i] = -INFINITY;
  Floats most = load(s + begin);
  for (int64_t i = begin + LANES; i < end; i += LANES) most = max(most, load(s + i));
  const Floats peak = set(max_lanes(most));
  Floats sum = zero();
  for (int64_t i = begin; i < end; i += LANES) {
    const Floats e = exp_of(sub(load(s + i), peak));
    store(s + i, e);
    if (i >= start && i + LANES <= visible) sum = add(sum, e);
    else {  // exp_of is never below e^-87, so masked weights are set to zero
      for (int64_t j = i; j < i + LANES; ++j)
        if (j < start || j >= visible) s[j] = 0.0f;
      sum = add(sum, load(s + i));
    }
  }
  return sum_lanes(sum);
}

// The values of the slots [begin, end) of one page: as halves in the page, or unpacked to floats.
template <bool PACKED>
const uint8_t *values_of(const AttentionWork &w, int64_t begin, int64_t end) {
  const uint8_t *page = w.pages[begin / edgedec::PAGE_TOKENS];
  const int64_t first = begin % edgedec::PAGE_TOKENS;
  if constexpr (!PACKED) return page + w.offset + w.layout.values + 2 * first * w.head_dim;
  unpack_values(w, page, first, first + end - begin, w.unpacked);
  return (const uint8_t *)w.unpacked;
}

// Add the weighted values of the slots [begin, end) of one page to the results of N queries.
template <bool PACKED, int N>
void add_values(const AttentionWork &w, int64_t begin, int64_t end) {
  constexpr int V = LANES == 8 ? 1 : 2;
  const uint8_t *rows = values_of<PACKED>(w, begin, end);
  for (int64_t slot = begin; slot < end; ++slot)
    for (int q = 0; q < N; ++q) w.packed[(slot - begin) * N + q] = w.scores[q * w.stride + slot];
  for (int32_t d = 0; d < w.head_dim; d += V * LANES) {
    Floats acc[N][V];
    const int used = w.head_dim - d >= V * LANES ? V : 1;
    for (int q = 0; q < N; ++q)
      for (int v = 0; v < used; ++v) acc[q][v] = load(w.out[q] + d + LANES * v);
    if (used == V) {
      for (int64_t slot = begin; slot < end; ++slot)
        for (int v = 0; v < V; ++v) {
          const Floats x = load_element<PACKED>(rows, (slot - begin) * w.head_dim + d + LANES * v);
          UNROLL for (int q = 0; q < N; ++q) acc[q][v] = fma(x, set(w.packed[(slot - begin) * N + q]), acc[q][v]);
        }
    } else {
      for (int64_t slot = begin; slot < end; ++slot) {
        const Floats x = load_element<PACKED>(rows, (slot - begin) * w.head_dim + d);
        for (int q = 0; q < N; ++q) acc[q][0] = fma(x, set(w.packed[(slot - begin) * N + q]), acc[q][0]);
      }
    }
    for (int q = 0; q < N; ++q)
      for (int v = 0; v < used; ++v) store(w.out[q] + d + LANES * v, acc[q][v]);
  }
}

template <bool PACKED>
void add_value(const AttentionWork &w, int query, int64_t slot, float weight) {
  const uint8_t *row = values_of<PACKED>(w, slot, slot + 1);
  for (int32_t d = 0; d < w.head_dim; d += LANES) {
    const Floats x = load_element<PACKED>(row, d);
    float *out = w.out[query] + d;
    store(out, fma(x, set(weight), load(out)));
  }
}

template <bool PACKED>
void attend_as(const AttentionWork &w) {
  using Score = void (*)(const AttentionWork &, int64_t, int64_t);
  static constexpr Score scores[8] = {score<PACKED, 1>, score<PACKED, 2>, score<PACKED, 3>, score<PACKED, 4>,
                                      score<PACKED, 5>, score<PACKED, 6>, score<PACKED, 7>, score<PACKED, 8>};
  static constexpr Score values[8] = {add_values<PACKED, 1>, add_values<PACKED, 2>, add_values<PACKED, 3>,
                                      add_values<PACKED, 4>, add_values<PACKED, 5>, add_values<PACKED, 6>,
                                      add_values<PACKED, 7>, add_values<PACKED, 8>};
  const int n = w.n_queries;
  int64_t start = w.start[0], end = 0;
  for (int q = 0; q < n; ++q) {
    start = w.start[q] < start ? w.start[q] : start;
    end = w.visible[q] > end ? w.visible[q] : end;
  }
  scores[n - 1](w, start / 16, (w.n_slots + 15) / 16);
  const bool is_tree = w.path[0] != nullptr;
  const int64_t joint = is_tree ? w.n_prefix : end;
  float total[MAX_QUERIES];
  for (int q = 0; q < n; ++q) {
    float *s = w.scores + q * w.stride;
    if (is_tree) {  // reorder from slots to positions
      const int64_t own = w.visible[q] - w.n_prefix;
      for (int64_t i = 0; i < own; ++i) w.tree_scratch[i] = s[w.path[q][i]];
      for (int64_t i = 0; i < own; ++i) s[w.n_prefix + i] = w.tree_scratch[i];
    }
    total[q] = softmax(s, w.start[q], w.visible[q]);
    for (int64_t i = start; i < w.start[q]; ++i) s[i] = 0.0f;
    for (int64_t i = w.visible[q]; i < joint; ++i) s[i] = 0.0f;
    memset(w.out[q], 0, (size_t)w.head_dim * sizeof(float));
  }
  constexpr int64_t RUN = PACKED ? edgedec::UNPACKED_TOKENS : edgedec::PAGE_TOKENS;
  for (int64_t i = start; i < joint;) {
    const int64_t border = (i / RUN + 1) * RUN, to = border < joint ? border : joint;
    values[n - 1](w, i, to);
    i = to;
  }
  for (int q = 0; q < n; ++q) {
    if (is_tree)
      for (int64_t i = w.start[q] > w.n_prefix ? w.start[q] : w.n_prefix; i < w.visible[q]; ++i)
        add_value<PACKED>(w, q, w.path[q][i - w.n_prefix], w.scores[q * w.stride + i]);
    const Floats factor = set(1.0f / total[q]);
    for (int32_t d = 0; d < w.head_dim; d += LANES) store(w.out[q] + d, mul(load(w.out[q] + d), factor));
  }
}

void attend(const AttentionWork &work) {
  if (work.layout.bits < 16) attend_as<true>(work);
  else attend_as<false>(work);
}
