// Attention of up to MAX_QUERIES queries over one head's pages. Included by kernels.cpp, once per instruction set.
//
// Positions are cut into spans of 128. Of a span a query has: its scores, each the sum of one lane over the elements of
// a head, in order; the greatest score; the weights e^(score - greatest), summed in lanes by position modulo LANES; and
// the sum of the weighted values, in the order of positions. Then the query's spans are joined one by one, in order. So
// a result depends on the tokens that the query sees, and not on their slots, on other queries or on how the work is
// cut: the spans of a query may be computed by several threads, which leave them to be joined by one.

#include "kernels/unpack.inl"

constexpr int SPAN = edgedec::SPAN_TOKENS, PAGE = edgedec::PAGE_TOKENS;
// Vectors of sums that registers hold: with 12, six queries take two vectors at a time, and 8 loads serve 12 products.
constexpr int SUMS = LANES == 8 || EDGEDEC_SIMD == 0 ? 12 : 24;
static_assert(SPAN == 2 * PAGE && QUERY_GROUP == 6, "a span is two pages; Functions has a form for each count");

// How many vectors of keys, or of values, N queries take at a time.
template <int N>
constexpr int vectors_at_once() { return 4 * N <= SUMS ? 4 : 2 * N <= SUMS ? 2 : 1; }

// Compute the scores of N queries against the first n tokens of a page, and of some tokens behind them. `keys` are
// halves in the page, or unpacked floats. As many halves are fetched from `ahead` as are read, where it is not nullptr.
template <bool PACKED, int N>
void score_page(const AttentionWork &w, const float *queries, const uint8_t *keys, const uint8_t *ahead, int64_t n,
                float *scores, int64_t stride) {
  constexpr int V = vectors_at_once<N>(), SIZE = PACKED ? 4 : 2;
  static_assert(PAGE % (V * LANES) == 0, "tokens behind the last one are in the page");
  for (int64_t i = 0; i < n; i += V * LANES) {
    const uint8_t *from[V];
    Floats sums[N][V];
    UNROLL for (int v = 0; v < V; ++v) {
      const int64_t token = i + v * LANES, in_block = token % edgedec::KEY_BLOCK;
      from[v] = keys + SIZE * ((token - in_block) * w.head_dim + in_block);
      UNROLL for (int q = 0; q < N; ++q) sums[q][v] = zero();
    }
    for (int32_t d = 0; d < w.head_dim; ++d) {
      Floats k[V];
      UNROLL for (int v = 0; v < V; ++v) k[v] = load_element<PACKED>(from[v], d * edgedec::KEY_BLOCK);
      if (ahead != nullptr)
        for (int b = 0; b < 2 * V * LANES; b += 64) prefetch_to_l2(ahead + 2 * (i * w.head_dim + d * V * LANES) + b);
      UNROLL for (int q = 0; q < N; ++q) {
        const Floats x = set(queries[d * N + q]);
        UNROLL for (int v = 0; v < V; ++v) sums[q][v] = fma(k[v], x, sums[q][v]);
      }
    }
    UNROLL for (int q = 0; q < N; ++q)
      UNROLL for (int v = 0; v < V; ++v) store(scores + q * stride + i + v * LANES, mul(sums[q][v], set(w.scale)));
  }
}

// The values of tokens of one page that are in a span: token i of the span, of [begin, end), is at rows + i * head_dim,
// and what is to be fetched while it is read is as far from `ahead`, where that is not nullptr.
struct Values {
  const uint8_t *rows, *ahead;
  int64_t begin, end;
};

// Sum V vectors of the weighted values from element d on, for N queries.
template <bool PACKED, int N, int V>
void sum_columns(const AttentionWork &w, const Values *pages, const float *weights, int32_t d, float *out) {
  Floats sums[N][V];
  UNROLL for (int q = 0; q < N; ++q)
    UNROLL for (int v = 0; v < V; ++v) sums[q][v] = zero();
  for (int page = 0; page < 2; ++page)
    for (int64_t i = pages[page].begin; i < pages[page].end; ++i) {
      Floats x[V];
      UNROLL for (int v = 0; v < V; ++v) x[v] = load_element<PACKED>(pages[page].rows, i * w.head_dim + d + v * LANES);
      if (pages[page].ahead != nullptr)
        for (int b = 0; b < 2 * V * LANES; b += 64) prefetch_to_l2(pages[page].ahead + 2 * (i * w.head_dim + d) + b);
      UNROLL for (int q = 0; q < N; ++q) {
        const Floats weight = set(weights[q * SPAN + i]);
        UNROLL for (int v = 0; v < V; ++v) sums[q][v] = fma(x[v], weight, sums[q][v]);
      }
    }
  UNROLL for (int q = 0; q < N; ++q)
    UNROLL for (int v = 0; v < V; ++v) store(out + q * w.head_dim + d + v * LANES, sums[q][v]);
}

template <bool PACKED, int N>
void sum_values(const AttentionWork &w, const Values *pages, const float *weights, float *out) {
  constexpr int V = vectors_at_once<N>();
  int32_t d = 0;
  for (; d + V * LANES <= w.head_dim; d += V * LANES) sum_columns<PACKED, N, V>(w, pages, weights, d, out);
  for (; d < w.head_dim; d += LANES) sum_columns<PACKED, N, 1>(w, pages, weights, d, out);
}

// Replace the scores [begin, end) of a span by weights, set the others of [low, high) to zero, and return the sum of
// the weights. `most` becomes the greatest score.
float softmax(float *s, int64_t begin, int64_t end, int64_t low, int64_t high, float *most) {
  const int64_t first = begin - begin % LANES, last = (end + LANES - 1) / LANES * LANES;
  for (int64_t i = first; i < begin; ++i) s[i] = -INFINITY;
  for (int64_t i = end; i < last; ++i) s[i] = -INFINITY;
  Floats greatest = load(s + first);
  for (int64_t i = first + LANES; i < last; i += LANES) greatest = max(greatest, load(s + i));
  *most = max_lanes(greatest);
  const Floats peak = set(*most);
  Floats sum = zero();
  for (int64_t i = first; i < last; i += LANES) {
    Floats e = exp_of(sub(load(s + i), peak));
    store(s + i, e);
    if (i < begin || i + LANES > end) {  // exp_of is never below e^-87, so masked weights are set to zero
      for (int64_t j = i; j < i + LANES; ++j)
        if (j < begin || j >= end) s[j] = 0.0f;
      e = load(s + i);
    }
    sum = add(sum, e);
  }
  for (int64_t i = low; i < first; ++i) s[i] = 0.0f;
  for (int64_t i = last; i < high; ++i) s[i] = 0.0f;
  return sum_lanes(sum);
}

// What a query has of a span, or of all spans so far: sums [head_dim] relative to e^most.
struct Part {
  float *sums;
  float most, total;
};

void join(Part &all, const Part &span, int32_t head_dim) {
  const float peak = span.most > all.most ? span.most : all.most;
  const Floats before = exp_of(set(all.most - peak)), factor = exp_of(set(span.most - peak));
  for (int32_t d = 0; d < head_dim; d += LANES)
    store(all.sums + d, fma(load(span.sums + d), factor, mul(load(all.sums + d), before)));
  float lanes[2][LANES];
  store(lanes[0], before);
  store(lanes[1], factor);
  all.most = peak;
  all.total = all.total * lanes[0][0] + span.total * lanes[1][0];
}

// Return what a query has of the spans before those of this call.
Part begun(const AttentionWork &w, int query) {
  if (w.resumed) return {w.out[query], w.state[query][0], w.state[query][1]};
  memset(w.out[query], 0, (size_t)w.head_dim * sizeof(float));
  return {w.out[query], -INFINITY, 0.0f};
}

// Return what a query's weights are multiplied by, so that with that of its sink they sum to 1.
float share_of(const AttentionWork &w, int query, const Part &part) {
  const float *sink = w.sink[query];
  if (sink == nullptr) return 1.0f / part.total;
  const float peak = *sink > part.most ? *sink : part.most;
  const Floats before = exp_of(set(part.most - peak)), own = exp_of(set(*sink - peak));
  float lanes[2][LANES];
  store(lanes[0], before);
  store(lanes[1], own);
  return lanes[0][0] / (part.total * lanes[0][0] + lanes[1][0]);
}

// Divide the sums of a query by all its weights.
void divide(const AttentionWork &w, int query, const Part &part) {
  const Floats factor = set(share_of(w, query, part));
  for (int32_t d = 0; d < w.head_dim; d += LANES) store(part.sums + d, mul(load(part.sums + d), factor));
  if (w.layout.values_rotated) edgedec::hadamard(part.sums, w.head_dim, 1);
}

// Write a query's result, or what later calls go on from.
void finish(const AttentionWork &w, int query, const Part &part) {
  if (!w.unfinished) return divide(w, query, part);
  w.state[query][0] = part.most;
  w.state[query][1] = part.total;
}

// One chunk of queries and one span: which of its tokens are seen.
struct View {
  int64_t base;                  // the span's first position
  int first, n;                  // queries
  int64_t low, high;             // tokens of the span that some query sees: [low, high)
  int64_t joint;                 // tokens below this one are in the slots of their number; the others are on paths
  int64_t begin[QUERY_GROUP], end[QUERY_GROUP];  // tokens that each query sees
  View(const AttentionWork &w, int64_t span, int chunk)
      : base(span * SPAN), first(chunk * QUERY_GROUP), low(SPAN), high(0) {
    n = w.n_queries - first < QUERY_GROUP ? w.n_queries - first : QUERY_GROUP;
    for (int q = 0; q < n; ++q) {
      const int64_t start = w.start[first + q] - base, visible = w.visible[first + q] - base;
      begin[q] = start < 0 ? 0 : start;
      end[q] = visible > SPAN ? SPAN : visible;
      if (begin[q] >= end[q]) continue;
      low = begin[q] < low ? begin[q] : low;
      high = end[q] > high ? end[q] : high;
    }
    joint = w.path[0] == nullptr ? high : w.n_prefix < base ? 0 : w.n_prefix - base < high ? w.n_prefix - base : high;
  }
};

// Return the page that stands in the next span where a page stands in this one; nullptr where none is read there.
const uint8_t *page_ahead(const AttentionWork &w, int64_t page) {
  return (page + 2) / 2 < w.span_end && (page + 2) * PAGE < w.n_slots ? w.pages[page + 2] : nullptr;
}

// Unpack the keys of the first n tokens of a page, and fetch those of the page `ahead` where it is not nullptr.
const uint8_t *unpacked_keys(const AttentionWork &w, int64_t page, const uint8_t *ahead, int64_t n, float *to) {
  for (int64_t i = 0; i * edgedec::KEY_BLOCK < n; ++i)
    unpack_keys(w, w.pages[page], ahead, i, to + i * edgedec::KEY_BLOCK * w.head_dim);
  return (const uint8_t *)to;
}

// Compute the scores of the tokens that lie on paths of a tree: those of all its slots first.
template <bool PACKED, int N>
void score_paths(const AttentionWork &w, const View &view, const float *queries, float *scores) {
  const int64_t first = w.n_prefix / PAGE, stride = w.tree_stride;
  for (int64_t page = first; page * PAGE < w.n_slots; ++page) {
    const int64_t left = w.n_slots - page * PAGE, n = left < PAGE ? left : PAGE;
    const uint8_t *keys = PACKED ? unpacked_keys(w, page, nullptr, n, w.unpacked + SPAN * w.head_dim)
                                 : w.pages[page] + w.offset;
    score_page<PACKED, N>(w, queries, keys, nullptr, n, w.tree_scores + (page - first) * PAGE, stride);
  }
  for (int q = 0; q < N; ++q)
    for (int64_t i = view.joint > view.begin[q] ? view.joint : view.begin[q]; i < view.end[q]; ++i) {
      const int64_t slot = w.path[view.first + q][view.base + i - w.n_prefix];
      scores[q * SPAN + i] = w.tree_scores[q * stride + slot - first * PAGE];
    }
}

// Compute the scores of a chunk of N queries against a span.
template <bool PACKED, int N>
void score_span(const AttentionWork &w, const View &view, const float *queries, float *scores) {
  for (int page = 0; page < 2; ++page) {
    const int64_t left = view.joint - page * PAGE, n = left < PAGE ? left : PAGE;
    if (n <= 0 || view.low >= (page + 1) * PAGE) continue;
    const uint8_t *keys = PACKED ? (const uint8_t *)(w.unpacked + page * PAGE * w.head_dim)
                                 : w.pages[view.base / PAGE + page] + w.offset;
    const uint8_t *values = PACKED || view.first > 0 ? nullptr : keys + w.layout.values;  // which are read next
    score_page<PACKED, N>(w, queries, keys, values, n, scores + page * PAGE, SPAN);
  }
  if (view.joint < view.high) score_paths<PACKED, N>(w, view, queries, scores);
}

// Where the values of the span's tokens [low, high), which are in the slots of their number, are: in the pages or
// unpacked.
template <bool PACKED>
void find_values(const AttentionWork &w, int64_t base, int64_t low, int64_t high, bool is_first, Values *pages) {
  for (int64_t page = 0; page < 2; ++page) {
    const int64_t begin = low > page * PAGE ? low : page * PAGE,
                  end = high < (page + 1) * PAGE ? high : (page + 1) * PAGE;
    const int64_t number = base / PAGE + page, before = 2 * page * PAGE * w.head_dim;
    const uint8_t *rows = (const uint8_t *)w.unpacked, *ahead = nullptr;
    if (!PACKED && begin < end) {
      rows = w.pages[number] + w.offset + w.layout.values - before;
      const uint8_t *next = is_first ? page_ahead(w, number) : nullptr;
      if (next != nullptr) ahead = next + w.offset - before;  // the keys of the next span
    }
    pages[page] = {rows, ahead, begin, end};
  }
}

// Unpack the values of the span's tokens [low, high).
void unpack_span(const AttentionWork &w, int64_t base, int64_t low, int64_t high) {
  for (int64_t i = low, to; i < high; i = to) {
    to = (i / edgedec::UNPACKED_TOKENS + 1) * edgedec::UNPACKED_TOKENS;
    if (to > high) to = high;
    const int64_t in_page = i % PAGE;
    const int64_t page = (base + i) / PAGE;
    unpack_values(w, w.pages[page], page_ahead(w, page), in_page, in_page + to - i, w.unpacked + i * w.head_dim);
  }
}

// Add the value of one slot.
template <bool PACKED>
void add_value(const AttentionWork &w, int64_t slot, float weight, float *sums) {
  const uint8_t *page = w.pages[slot / PAGE], *row = page + w.offset + w.layout.values + 2 * (slot % PAGE) * w.head_dim;
  if constexpr (PACKED) {
    float *unpacked = w.unpacked + SPAN * w.head_dim;
    unpack_values(w, page, nullptr, slot % PAGE, slot % PAGE + 1, unpacked);
    row = (const uint8_t *)unpacked;
  }
  for (int32_t d = 0; d < w.head_dim; d += LANES)
    store(sums + d, fma(load_element<PACKED>(row, d), set(weight), load(sums + d)));
}

template <bool PACKED>
struct Functions {
  using Score = void (*)(const AttentionWork &, const View &, const float *, float *);
  using Sum = void (*)(const AttentionWork &, const Values *, const float *, float *);
  static constexpr Score score[QUERY_GROUP] = {score_span<PACKED, 1>, score_span<PACKED, 2>, score_span<PACKED, 3>,
                                               score_span<PACKED, 4>, score_span<PACKED, 5>, score_span<PACKED, 6>};
  static constexpr Sum sum[QUERY_GROUP] = {sum_values<PACKED, 1>, sum_values<PACKED, 2>, sum_values<PACKED, 3>,
                                           sum_values<PACKED, 4>, sum_values<PACKED, 5>, sum_values<PACKED, 6>};
};

// Sum the weighted values of a span for one chunk, and join the sums to those of the spans before, or keep them.
template <bool PACKED>
void finish_span(const AttentionWork &w, int64_t span, const View &view, const float *weights, Part *parts, Part *all) {
  Values pages[2];
  find_values<PACKED>(w, view.base, view.low, view.joint, view.first == 0, pages);
  Functions<PACKED>::sum[view.n - 1](w, pages, weights, w.sums);
  for (int q = 0; q < view.n; ++q) {
    if (view.begin[q] >= view.end[q]) continue;
    float *sums = w.sums + q * w.head_dim;
    for (int64_t i = view.joint > view.begin[q] ? view.joint : view.begin[q]; i < view.end[q]; ++i)
      add_value<PACKED>(w, w.path[view.first + q][view.base + i - w.n_prefix], weights[q * SPAN + i], sums);
    Part &part = parts[q];
    part.sums = sums;
    if (w.kept == nullptr) {
      join(all[q], part, w.head_dim);
      continue;
    }
    float *kept = w.kept + ((view.first + q) * w.n_spans + span) * (w.head_dim + 2);
    memcpy(kept, sums, (size_t)w.head_dim * sizeof(float));
    kept[w.head_dim] = part.most;
    kept[w.head_dim + 1] = part.total;
  }
}

// Add what a head has for the distances of n keys from its query; the first key is `distance` behind it.
void add_distance_bias(float *scores, const float *bias, int64_t distance, int64_t n) {
  constexpr int64_t MOST = EC_MOST_DISTANCE;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t d = distance + i;
    scores[i] += bias[MOST + (d < -MOST ? -MOST : d > MOST ? MOST : d)];
  }
}

template <bool PACKED>
void attend_as(const AttentionWork &w) {
  const int n_chunks = (w.n_queries + QUERY_GROUP - 1) / QUERY_GROUP;
  Part all[edgedec::MAX_QUERIES], parts[edgedec::MAX_QUERIES];
  for (int c = 0; c < n_chunks; ++c) {
    const View view(w, w.span_begin, c);
    float *queries = w.packed + c * QUERY_GROUP * w.head_dim;
    for (int q = 0; q < view.n; ++q) {
      for (int32_t d = 0; d < w.head_dim; ++d) queries[d * view.n + q] = w.query[view.first + q][d];
      if (w.kept == nullptr) all[view.first + q] = begun(w, view.first + q);
    }
    if (stays_rotated(w)) edgedec::hadamard(queries, w.head_dim, view.n);
  }
  for (int64_t span = w.span_begin; span < w.span_end; ++span) {
    int64_t low = SPAN, joint = 0;
    for (int c = 0; c < n_chunks; ++c) {
      const View view(w, span, c);
      low = view.low < low ? view.low : low;
      joint = view.joint > joint ? view.joint : joint;
    }
    for (int64_t page = 0; PACKED && page < 2; ++page)
      if (joint > page * PAGE)
        unpacked_keys(w, 2 * span + page, page_ahead(w, 2 * span + page),
                      joint - page * PAGE < PAGE ? joint - page * PAGE : PAGE, w.unpacked + page * PAGE * w.head_dim);
    for (int c = 0; c < n_chunks; ++c) {
      const View view(w, span, c);
      if (view.low >= view.high) continue;
      float *weights = w.weights + view.first * SPAN;
      Functions<PACKED>::score[view.n - 1](w, view, w.packed + view.first * w.head_dim, weights);
      for (int q = 0; q < view.n; ++q) {
        float *row = weights + q * SPAN;
        Part &part = parts[view.first + q];
        const float *bias = w.distance_bias[view.first + q];
        if (view.begin[q] < view.end[q] && bias != nullptr)
          add_distance_bias(row + view.begin[q], bias, view.base + view.begin[q] - w.position[view.first + q],
                            view.end[q] - view.begin[q]);
        if (view.begin[q] < view.end[q] && w.softcap != 0.0f)
          softcap(row + view.begin[q], w.softcap, view.end[q] - view.begin[q]);
        if (view.begin[q] < view.end[q])
          part.total = softmax(row, view.begin[q], view.end[q], view.low, view.high, &part.most);
        else
          for (int64_t i = view.low; i < view.high; ++i) row[i] = 0.0f;
      }
    }
    if (PACKED && low < joint) unpack_span(w, span * SPAN, low, joint);
    for (int c = 0; c < n_chunks; ++c) {
      const View view(w, span, c);
      if (view.low < view.high)
        finish_span<PACKED>(w, span, view, w.weights + view.first * SPAN, parts + view.first, all + view.first);
    }
  }
  for (int q = 0; w.kept == nullptr && q < w.n_queries; ++q) finish(w, q, all[q]);
}

void attend(const AttentionWork &work) {
  if (work.layout.bits < 16) attend_as<true>(work);
  else attend_as<false>(work);
}

// Write the weights of one chunk of queries.
template <bool PACKED>
void weigh_chunk(const AttentionWork &w, int chunk, float *out, int64_t stride) {
  const View first(w, w.span_begin, chunk);
  for (int q = 0; q < first.n; ++q)
    for (int32_t d = 0; d < w.head_dim; ++d) w.packed[d * first.n + q] = w.query[first.first + q][d];
  if (stays_rotated(w)) edgedec::hadamard(w.packed, w.head_dim, first.n);
  for (int64_t span = w.span_begin; span < w.span_end; ++span) {
    const View view(w, span, chunk);
    for (int64_t page = 0; PACKED && page < 2; ++page)
      if (view.high > page * PAGE)
        unpacked_keys(w, 2 * span + page, page_ahead(w, 2 * span + page),
                      view.high - page * PAGE < PAGE ? view.high - page * PAGE : PAGE,
                      w.unpacked + page * PAGE * w.head_dim);
    if (view.low < view.high) Functions<PACKED>::score[view.n - 1](w, view, w.packed, w.weights);
    for (int q = 0; q < view.n; ++q)
      if (view.begin[q] < view.end[q])
        memcpy(out + (view.first + q) * stride + view.base + view.begin[q], w.weights + q * SPAN + view.begin[q],
               (size_t)(view.end[q] - view.begin[q]) * sizeof(float));
  }
  for (int i = first.first; i < first.first + first.n; ++i) {
    float *row = out + i * stride;
    const int64_t begin = w.start[i], end = w.visible[i];
    if (w.softcap != 0.0f) softcap(row + begin, w.softcap, end - begin);
    Part part = {row, 0.0f, 0.0f};
    part.total = softmax(row, begin, end, begin, end, &part.most);
    const float factor = share_of(w, i, part);
    for (int64_t slot = begin; slot < end; ++slot) row[slot] *= factor;
  }
}

void weigh(const AttentionWork &work, float *weights, int64_t stride) {
  for (int chunk = 0; chunk * QUERY_GROUP < work.n_queries; ++chunk) {
    if (work.layout.bits < 16) weigh_chunk<true>(work, chunk, weights, stride);
    else weigh_chunk<false>(work, chunk, weights, stride);
  }
}

// Join the spans of each query that calls of attend() have kept.
void join_spans(const AttentionWork &w) {
  for (int q = 0; q < w.n_queries; ++q) {
    Part all = begun(w, q);
    const int64_t first = w.start[q] / SPAN, end = (w.visible[q] + SPAN - 1) / SPAN;
    for (int64_t span = first > w.span_begin ? first : w.span_begin; span < end && span < w.span_end; ++span) {
      float *kept = w.kept + (q * w.n_spans + span) * (w.head_dim + 2);
      join(all, {kept, kept[w.head_dim], kept[w.head_dim + 1]}, w.head_dim);
    }
    finish(w, q, all);
  }
}
