// Attention: against sums in double precision, and one query's bits whatever other queries, slots and trees there are.
#include <math.h>

#include <algorithm>
#include <memory>
#include <numeric>

#include "checks.h"
#include "kv_cache.h"
#include "tensor_types.h"

using namespace edgedec;

namespace checks {
namespace {

// Keys and values of `n` tokens in a cache, and as what they are kept.
struct Cached {
  KVShape shape;
  KVCache cache;
  std::vector<Floats> keys, values;

  Cached(std::mt19937 &random, int32_t head_dim, bool int8, int32_t n)
      : shape{2, 2, head_dim, int8}, cache(shape, n + 64), keys((size_t)n), values((size_t)n) {
    cache.prepare(0, n + 64);
    for (Floats &row : keys) row = normal(random, (size_t)head_dim);
    for (Floats &row : values) row = normal(random, (size_t)head_dim);
  }
  void put(int32_t token, int32_t slot) {
    cache.write(1, 1, slot, keys[(size_t)token].data(), values[(size_t)token].data());
  }
  static float kept(float x) { return half_to_float(float_to_half(x)); }
};

constexpr double TOLERANCE = 1e-5;

float scale_of(const Cached &c) { return 1.0f / sqrtf((float)c.shape.head_dim); }

struct Query {
  Floats values;
  int32_t start, visible;
  std::vector<int32_t> path;
};

// Evaluate queries together; slots from n_prefix on belong to a tree of `n_slots - n_prefix` rows where there are paths.
std::vector<Floats> attend(const Kernels &kernels, const Cached &c, const std::vector<const Query *> &queries,
                           int32_t n_prefix, int32_t n_slots, bool is_tree) {
  const int64_t stride = n_slots + 64;
  Floats scores((size_t)stride * MAX_QUERIES, NAN), scratch((size_t)stride, NAN);
  Floats packed((size_t)MAX_QUERIES * (size_t)std::max(c.shape.head_dim, PAGE_TOKENS), NAN);
  std::vector<Floats> out(queries.size(), Floats((size_t)c.shape.head_dim, NAN));
  AttentionWork w{};
  w.head_dim = c.shape.head_dim;
  w.n_queries = (int32_t)queries.size();
  w.kv_int8 = c.shape.int8;
  w.pages = c.cache.pages();
  w.offset = c.shape.offset(1, 1);
  w.n_prefix = n_prefix;
  w.n_slots = n_slots;
  w.scale = scale_of(c);
  w.scores = scores.data();
  w.stride = stride;
  w.tree_scratch = scratch.data();
  w.packed = packed.data();
  for (size_t i = 0; i < queries.size(); ++i) {
    w.query[i] = queries[i]->values.data();
    w.out[i] = out[i].data();
    w.start[i] = queries[i]->start;
    w.visible[i] = queries[i]->visible;
    w.path[i] = is_tree ? queries[i]->path.data() : nullptr;
  }
  kernels.attend(w);
  return out;
}

std::vector<double> expected(const Cached &c, const Query &query) {
  std::vector<double> weights, sum((size_t)c.shape.head_dim, 0.0);
  for (int32_t t = query.start; t < query.visible; ++t) {
    double score = 0;
    for (size_t i = 0; i < sum.size(); ++i) score += (double)query.values[i] * c.kept(c.keys[(size_t)t][i]);
    weights.push_back(score * scale_of(c));
  }
  const double peak = *std::max_element(weights.begin(), weights.end());
  for (double &weight : weights) weight = exp(weight - peak);
  const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  for (size_t t = 0; t < weights.size(); ++t)
    for (size_t i = 0; i < sum.size(); ++i)
      sum[i] += weights[t] / total * c.kept(c.values[t + (size_t)query.start][i]);
  return sum;
}

std::vector<Query> make_queries(std::mt19937 &random, int32_t head_dim, int32_t n_tokens, bool sliding) {
  std::vector<Query> queries;
  for (int i = 0; i < MAX_QUERIES; ++i) {
    const int32_t visible = n_tokens - (i % 4);
    queries.push_back({normal(random, (size_t)head_dim, 2.0f), sliding ? std::max(0, visible - 21) : 0, visible, {}});
  }
  return queries;
}

void check_chains(const Kernels &kernels, std::mt19937 &random, int32_t head_dim, bool int8, bool sliding, int32_t n) {
  Cached c(random, head_dim, int8, n);
  for (int32_t t = 0; t < n; ++t) c.put(t, t);
  const std::vector<Query> queries = make_queries(random, head_dim, n, sliding);
  const std::string what = "attention over " + std::to_string(n) + (int8 ? ", int8" : "") + (sliding ? ", sliding" : "") +
                           ", heads of " + std::to_string(head_dim);
  std::vector<Floats> alone;
  std::vector<const Query *> together;
  for (const Query &query : queries) {
    alone.push_back(attend(kernels, c, {&query}, query.visible - 1, query.visible, false)[0]);
    const Floats portable = attend(*portable_kernels(), c, {&query}, query.visible - 1, query.visible, false)[0];
    double most = 0;
    for (size_t i = 0; i < portable.size(); ++i) most = std::max(most, (double)fabsf(alone.back()[i] - portable[i]));
    expect(most < TOLERANCE, kernels, what + ": beside the portable kernels");
    const std::vector<double> sums = expected(c, query);
    most = 0;
    for (size_t i = 0; i < sums.size(); ++i) most = std::max(most, fabs(alone.back()[i] - sums[i]));
    expect(most < (int8 ? 0.1 : TOLERANCE), kernels, what + ": beside plain sums");
    together.push_back(&query);
    const std::vector<Floats> found = attend(kernels, c, together, n - 4, n, false);
    for (size_t i = 0; i < found.size(); ++i)
      expect(same_bits(found[i], alone[i]), kernels, what + ": " + std::to_string(found.size()) + " queries at once");
  }
}

// A tree on a prefix: row j lies in slot n_prefix + j, between rows of other branches.
void check_trees(const Kernels &kernels, std::mt19937 &random, int32_t head_dim, bool int8, bool sliding, int32_t n_prefix) {
  constexpr int32_t n_own = 6;
  Cached chain(random, head_dim, int8, n_prefix + n_own), tree = chain;
  tree.cache = KVCache(tree.shape, n_prefix + 4 * n_own);
  tree.cache.prepare(0, n_prefix + 4 * n_own);
  const Floats noise = normal(random, (size_t)head_dim, 9.0f);
  std::vector<int32_t> slots;
  for (int32_t t = 0; t < n_prefix + n_own; ++t) {
    const int32_t own = t - n_prefix, slot = own < 0 ? t : n_prefix + 2 * own + own % 2;
    chain.put(t, t);
    tree.put(t, slot);
    if (own >= 0) slots.push_back(slot);
  }
  for (int32_t slot = n_prefix; slot < n_prefix + 3 * n_own; ++slot)
    if (std::find(slots.begin(), slots.end(), slot) == slots.end()) tree.cache.write(1, 1, slot, noise.data(), noise.data());
  std::vector<Query> queries;
  for (int32_t i = 0; i < n_own; ++i) {
    const int32_t visible = n_prefix + i + 1, start = sliding ? std::max(0, visible - 5) : 0;
    queries.push_back({normal(random, (size_t)head_dim, 2.0f), start, visible, slots});
  }
  std::vector<const Query *> all;
  for (const Query &query : queries) all.push_back(&query);
  const std::vector<Floats> found = attend(kernels, tree, all, n_prefix, n_prefix + 3 * n_own, true);
  for (size_t i = 0; i < all.size(); ++i) {
    const Floats alone = attend(kernels, chain, {all[i]}, all[i]->visible - 1, all[i]->visible, false)[0];
    expect(same_bits(found[i], alone), kernels,
           "attention of a tree on " + std::to_string(n_prefix) + " tokens equals that of its chain");
  }
}

}  // namespace

void check_attention(const Kernels &kernels) {
  std::mt19937 random(7);
  for (bool int8 : {false, true})
    for (bool sliding : {false, true})
      for (int32_t head_dim : {16, 48, 64, 80, 128, 256}) {
        if (int8 && head_dim % 32 != 0) continue;
        for (int32_t n : {4, 16, 17, 63, 64, 65, 150, 257}) check_chains(kernels, random, head_dim, int8, sliding, n);
        for (int32_t n_prefix : {0, 1, 15, 16, 60, 64, 130}) check_trees(kernels, random, head_dim, int8, sliding, n_prefix);
      }
}

}  // namespace checks
