// Attention: against sums in double precision, and one query's bits whatever other queries, slots and trees there are.
#include <math.h>

#include <algorithm>
#include <memory>
#include <numeric>

#include "checks.h"
#include "forward/kv_cache.h"
#include "weights/tensor_types.h"

using namespace edgedec;

namespace checks {
namespace {

// How a test keeps keys and values.
struct Kind {
  int32_t type, head_dim;
  bool biased = false;  // keys are kept without their bias
  bool interleaved = false;
  float softcap = 0.0f;  // of scores; 0: none
  bool has_sinks = false;

  std::string name() const {
    const char *types[] = {"f16", "int8", "int4", "gear", "int8 and int4"};
    return std::string(types[type]) + (biased ? ", biased" : "") + (interleaved ? ", interleaved" : "") +
           (softcap != 0.0f ? ", capped" : "") + (has_sinks ? ", with sinks" : "") + ", heads of " +
           std::to_string(head_dim);
  }
  // How far a result may be from that of the exact numbers, which are normal.
  double tolerance() const { return type == EC_KV_F16 ? 1e-5 : type == EC_KV_INT8 ? 0.1 : 1.0; }
  int32_t n_rot() const { return biased ? head_dim / 4 * 2 : 0; }
};

// Keys and values of `n` tokens in a cache, and as what they are kept.
struct Cached {
  Kind kind;
  KVShape shape;
  KVCache cache;
  std::vector<Floats> keys, values;
  Floats bias;

  Cached(std::mt19937 &random, const Kind &kind, int32_t n)
      : kind(kind),
        shape({{3, 32}, {2, kind.head_dim}}, kind.type, kind.n_rot()),  // of which the second layer is used
        cache(shape, n + 64),
        keys((size_t)n),
        values((size_t)n) {
    cache.prepare(0, n + 64);
    for (Floats &row : keys) row = normal(random, (size_t)kind.head_dim);
    for (Floats &row : values) row = normal(random, (size_t)kind.head_dim);
    bias = normal(random, (size_t)kind.head_dim, 20.0f);
  }
  void put(int32_t token, int32_t slot) {
    cache.write_rotation(slot, rotation(token).data());
    cache.write(*portable_kernels(), 1, 1, slot, keys[(size_t)token].data(), values[(size_t)token].data());
  }
  Floats rotation(int32_t position) const {
    Floats cos_sin((size_t)shape.n_rot);
    for (int32_t i = 0; i < shape.n_rot / 2; ++i) {
      cos_sin[(size_t)i] = cosf(0.1f * (float)(position * (i + 1)));
      cos_sin[(size_t)(shape.n_rot / 2 + i)] = sinf(0.1f * (float)(position * (i + 1)));
    }
    return cos_sin;
  }
  // A token's key as attention means it.
  Floats key(int32_t token) const {
    Floats whole = keys[(size_t)token], turned = bias;
    if (kind.type == EC_KV_F16)
      for (float &x : whole) x = kept(x);
    if (!kind.biased) return whole;
    portable_kernels()->rope(turned.data(), rotation(token).data(), shape.n_rot, kind.interleaved);
    for (size_t i = 0; i < whole.size(); ++i) whole[i] += turned[i];
    return whole;
  }
  float value(int32_t token, size_t i) const {
    return kind.type == EC_KV_F16 ? kept(values[(size_t)token][i]) : values[(size_t)token][i];
  }
  static float kept(float x) { return half_to_float(float_to_half(x)); }
};

constexpr double TOLERANCE = 1e-5;

float scale_of(const Cached &c) { return 1.0f / sqrtf((float)c.kind.head_dim); }

struct Query {
  Floats values;
  int32_t start, visible;
  std::vector<int32_t> path;
  float sink = 0.0f;
};

// Evaluate queries together; slots from n_prefix on belong to a tree of `n_slots - n_prefix` rows where there are
// paths. In `n_steps` steps, which follow one another, each in `n_parts` parts, which compute some spans and keep them.
std::vector<Floats> attend(const Kernels &kernels, const Cached &c, const std::vector<const Query *> &queries,
                           int32_t n_prefix, int32_t n_slots, bool is_tree, int64_t n_parts = 1,
                           int64_t n_steps = 1) {
  const size_t d = (size_t)c.kind.head_dim;
  const int64_t tree_stride = (n_slots - n_prefix) / PAGE_TOKENS * PAGE_TOKENS + 2 * PAGE_TOKENS;
  Floats packed(MAX_QUERIES * d, NAN), weights((size_t)(MAX_QUERIES * SPAN_TOKENS), NAN), sums(QUERY_GROUP * d, NAN);
  Floats tree(QUERY_GROUP * (size_t)tree_stride, NAN), unpacked((SPAN_TOKENS + PAGE_TOKENS) * d, NAN);
  std::vector<Floats> out(queries.size(), Floats(d, NAN)), states(queries.size(), Floats(2, NAN));
  AttentionWork w{};
  w.head_dim = c.kind.head_dim;
  w.n_queries = (int32_t)queries.size();
  w.layout = c.shape.layers[1].layout;
  w.rotations = c.shape.rotations;
  w.n_rot = c.shape.n_rot;
  w.rope_interleaved = c.kind.interleaved;
  w.key_bias = c.kind.biased ? c.bias.data() : nullptr;
  w.pages = c.cache.pages();
  w.offset = c.shape.layers[1].offset(1);
  w.n_prefix = n_prefix;
  w.n_slots = n_slots;
  w.scale = scale_of(c);
  w.softcap = c.kind.softcap;
  w.packed = packed.data();
  w.weights = weights.data();
  w.sums = sums.data();
  w.tree_scores = tree.data();
  w.tree_stride = tree_stride;
  w.unpacked = unpacked.data();
  w.n_spans = n_slots / SPAN_TOKENS + 1;
  for (size_t i = 0; i < queries.size(); ++i) {
    w.query[i] = queries[i]->values.data();
    w.out[i] = out[i].data();
    w.state[i] = n_steps > 1 ? states[i].data() : nullptr;
    w.start[i] = queries[i]->start;
    w.visible[i] = queries[i]->visible;
    w.sink[i] = c.kind.has_sinks ? &queries[i]->sink : nullptr;
    w.path[i] = is_tree ? queries[i]->path.data() : nullptr;
  }
  Floats kept(queries.size() * (size_t)w.n_spans * (d + 2), NAN);
  if (n_parts > 1) w.kept = kept.data();
  for (int64_t step = 0; step < n_steps; ++step) {
    const int64_t begin = w.n_spans * step / n_steps, end = w.n_spans * (step + 1) / n_steps;
    w.resumed = step > 0;
    w.unfinished = step < n_steps - 1;
    for (int64_t part = 0; part < n_parts; ++part) {
      w.span_begin = begin + (end - begin) * part / n_parts;
      w.span_end = begin + (end - begin) * (part + 1) / n_parts;
      kernels.attend(w);
    }
    w.span_begin = begin;
    w.span_end = end;
    if (n_parts > 1) kernels.join_spans(w);
  }
  return out;
}

// Return the values that queries see, summed by the weights that they give to each position.
std::vector<Floats> weighed(const Kernels &kernels, const Cached &c, const std::vector<const Query *> &queries,
                            int32_t n_slots) {
  const size_t d = (size_t)c.kind.head_dim;
  const int64_t n_spans = (n_slots + SPAN_TOKENS - 1) / SPAN_TOKENS, stride = n_spans * SPAN_TOKENS;
  Floats packed(MAX_QUERIES * d, NAN), scores((size_t)(MAX_QUERIES * SPAN_TOKENS), NAN);
  Floats unpacked((SPAN_TOKENS + PAGE_TOKENS) * d, NAN), weights(queries.size() * (size_t)stride, NAN);
  AttentionWork w{};
  w.head_dim = c.kind.head_dim;
  w.n_queries = (int32_t)queries.size();
  w.layout = c.shape.layers[1].layout;
  w.rotations = c.shape.rotations;
  w.n_rot = c.shape.n_rot;
  w.rope_interleaved = c.kind.interleaved;
  w.key_bias = c.kind.biased ? c.bias.data() : nullptr;
  w.pages = c.cache.pages();
  w.offset = c.shape.layers[1].offset(1);
  w.n_slots = n_slots;
  w.scale = scale_of(c);
  w.softcap = c.kind.softcap;
  w.span_end = n_spans;
  w.packed = packed.data();
  w.weights = scores.data();
  w.unpacked = unpacked.data();
  for (size_t i = 0; i < queries.size(); ++i) {
    w.query[i] = queries[i]->values.data();
    w.start[i] = queries[i]->start;
    w.visible[i] = queries[i]->visible;
    w.sink[i] = c.kind.has_sinks ? &queries[i]->sink : nullptr;
  }
  kernels.weigh(w, weights.data(), stride);
  std::vector<Floats> sums(queries.size(), Floats(d, 0.0f));
  for (size_t q = 0; q < queries.size(); ++q)
    for (int32_t t = queries[q]->start; t < queries[q]->visible; ++t)
      for (size_t i = 0; i < d; ++i) sums[q][i] += weights[q * (size_t)stride + (size_t)t] * c.value(t, i);
  return sums;
}

std::vector<double> expected(const Cached &c, const Query &query) {
  std::vector<double> weights, sum((size_t)c.kind.head_dim, 0.0);
  for (int32_t t = query.start; t < query.visible; ++t) {
    double score = 0;
    const Floats key = c.key(t);
    for (size_t i = 0; i < sum.size(); ++i) score += (double)query.values[i] * key[i];
    score *= scale_of(c);
    weights.push_back(c.kind.softcap != 0.0f ? c.kind.softcap * tanh(score / c.kind.softcap) : score);
  }
  if (c.kind.has_sinks) weights.push_back(query.sink);
  const double peak = *std::max_element(weights.begin(), weights.end());
  for (double &weight : weights) weight = exp(weight - peak);
  const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  for (size_t t = 0; t < (size_t)(query.visible - query.start); ++t)
    for (size_t i = 0; i < sum.size(); ++i)
      sum[i] += weights[t] / total * c.value((int32_t)t + query.start, i);
  return sum;
}

std::vector<Query> make_queries(std::mt19937 &random, int32_t head_dim, int32_t n_tokens, bool sliding) {
  std::vector<Query> queries;
  for (int i = 0; i < 20; ++i) {
    const int32_t visible = std::max(1, n_tokens - (i % 4) - i / 8 * 100);
    queries.push_back({normal(random, (size_t)head_dim, 2.0f),
                       sliding ? std::max(0, visible - 21) : 0,
                       visible,
                       {},
                       (float)(i % 7 * 3 - 6)});
  }
  return queries;
}

void check_chains(const Kernels &kernels, std::mt19937 &random, const Kind &kind, bool sliding, int32_t n) {
  const int32_t head_dim = kind.head_dim;
  Cached c(random, kind, n);
  for (int32_t t = 0; t < n; ++t) c.put(t, t);
  const std::vector<Query> queries = make_queries(random, head_dim, n, sliding);
  const std::string what = "attention over " + std::to_string(n) + (sliding ? ", sliding, " : ", ") + kind.name();
  std::vector<Floats> alone;
  std::vector<const Query *> together;
  for (const Query &query : queries) {
    alone.push_back(attend(kernels, c, {&query}, query.visible - 1, query.visible, false)[0]);
    const Floats portable = attend(*portable_kernels(), c, {&query}, query.visible - 1, query.visible, false)[0];
    double most = 0;
    for (size_t i = 0; i < portable.size(); ++i) most = std::max(most, (double)fabsf(alone.back()[i] - portable[i]));
    expect(most < (kind.biased ? 1e-4 : TOLERANCE), kernels, what + ": beside the portable kernels");
    const std::vector<double> sums = expected(c, query);
    most = 0;
    for (size_t i = 0; i < sums.size(); ++i) most = std::max(most, fabs(alone.back()[i] - sums[i]));
    expect(most < kind.tolerance(), kernels, what + ": beside plain sums");
    together.push_back(&query);
    for (int64_t cut : {1, 2, 3, 4, 5, 6}) {
      const std::vector<Floats> found =
          attend(kernels, c, together, n - 4, n, false, (cut - 1) % 3 + 1, (cut - 1) / 3 + 1);
      for (size_t i = 0; i < found.size(); ++i)
        expect(same_bits(found[i], alone[i]), kernels, what + ": " + std::to_string(found.size()) + " queries at once");
    }
  }
  const std::vector<Floats> found = weighed(kernels, c, together, n);
  for (size_t q = 0; q < queries.size(); ++q) {
    const std::vector<double> sums = expected(c, queries[q]);
    double most = 0;
    for (size_t i = 0; i < sums.size(); ++i) most = std::max(most, fabs(found[q][i] - sums[i]));
    expect(most < kind.tolerance(), kernels, what + ": weights beside plain sums");
    expect(same_bits(weighed(kernels, c, {&queries[q]}, n)[0], found[q]), kernels, what + ": weights of one query");
  }
}

// A tree on a prefix: row j lies in slot n_prefix + j, between rows of other branches.
void check_trees(const Kernels &kernels, std::mt19937 &random, const Kind &kind, bool sliding, int32_t n_prefix) {
  constexpr int32_t n_own = 6;
  const int32_t head_dim = kind.head_dim;
  Cached chain(random, kind, n_prefix + n_own), tree = chain;
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
    if (std::find(slots.begin(), slots.end(), slot) == slots.end())
      tree.cache.write(*portable_kernels(), 1, 1, slot, noise.data(), noise.data());
  std::vector<Query> queries;
  for (int32_t i = 0; i < n_own; ++i) {
    const int32_t visible = n_prefix + i + 1, start = sliding ? std::max(0, visible - 5) : 0;
    queries.push_back({normal(random, (size_t)head_dim, 2.0f), start, visible, slots});
  }
  std::vector<const Query *> all;
  for (const Query &query : queries) all.push_back(&query);
  for (int64_t cut : {0, 1, 2, 3})
    for (size_t i = 0; i < all.size(); ++i) {
      const Floats found =
          attend(kernels, tree, all, n_prefix, n_prefix + 3 * n_own, true, cut % 2 + 1, cut / 2 + 1)[i];
      const Floats alone = attend(kernels, chain, {all[i]}, all[i]->visible - 1, all[i]->visible, false)[0];
      expect(same_bits(found, alone), kernels,
             "attention of a tree on " + std::to_string(n_prefix) + " tokens equals that of its chain");
    }
}

// Attention of one token to itself gives its value as it is kept.
Floats kept_value(const Cached &c, int32_t slot) {
  const Query query = {Floats((size_t)c.kind.head_dim, 0.0f), slot, slot + 1, {}};
  return attend(*portable_kernels(), c, {&query}, slot, slot + 1, false)[0];
}

// Values come back within half a step of their group's scale, the largest of gear exactly as halves; after a move and
// after saving and loading they have the same bits.
void check_round_trip(std::mt19937 &random, int32_t type, int32_t head_dim) {
  const Kernels &kernels = *portable_kernels();
  Cached c(random, {type, head_dim}, 40);
  for (int32_t t = 0; t < 40; ++t) {
    for (int32_t i = 0; i < head_dim; i += 16) c.values[(size_t)t][(size_t)(i + t % 16)] += 50.0f;
    c.put(t, t);
  }
  bool close = true, exact = true;
  const bool rotated = type == EC_KV_INT4 || type == EC_KV_INT8_INT4;  // then values are rounded after that
  for (int32_t t = 0; t < 40; ++t) {
    Floats found = kept_value(c, t), values = c.values[(size_t)t];
    for (Floats *x : {&found, &values})
      if (rotated) hadamard(x->data(), head_dim, 1);
    for (size_t i = 0; i < found.size(); ++i) {
      const bool is_outlier = type == EC_KV_GEAR && (int32_t)i % 16 == t % 16;
      float peak = 0.0f;
      for (size_t j = i / 32 * 32; j < i / 32 * 32 + 32; ++j)
        if (type != EC_KV_GEAR || (int32_t)j % 16 != t % 16) peak = std::max(peak, fabsf(values[j]));
      const float step = type == EC_KV_INT8 ? peak / 127.0f : peak / 7.4f;
      if (is_outlier) exact = exact && found[i] == c.kept(values[i]);
      else  // the largest of the wrong sign: 7.4 to 7
        close = close && fabsf(found[i] - values[i]) <= 1.41f * step;
    }
  }
  const std::string what = c.kind.name() + " values";
  expect(close, kernels, what + " come back within a step");
  expect(exact, kernels, what + ": the largest come back exactly");
  const int32_t from[] = {7, 20, 39};
  Floats before[3];
  for (int i = 0; i < 3; ++i) before[i] = kept_value(c, from[i]);
  c.cache.move(from, 3, 5);
  for (int i = 0; i < 3; ++i) expect(same_bits(kept_value(c, 5 + i), before[i]), kernels, what + " are moved");
  std::vector<uint8_t> bytes((size_t)(40 * c.cache.token_bytes()));
  c.cache.save(40, bytes.data());
  Cached other(random, {type, head_dim}, 40);
  other.cache.load(40, bytes.data());
  for (int32_t t : {0, 6, 17, 39})
    expect(same_bits(kept_value(other, t), kept_value(c, t)), kernels, what + " are restored");
}

// What is no number, infinite or nothing at all does no harm to other tokens.
void check_odd_numbers(std::mt19937 &random, int32_t type) {
  Cached c(random, {type, 64}, 3);
  c.values[0] = Floats(64, NAN);
  c.values[1] = Floats(64, INFINITY);
  c.values[2] = Floats(64, 0.0f);
  for (int32_t t = 0; t < 3; ++t) c.put(t, t);
  expect(same_bits(kept_value(c, 2), Floats(64, 0.0f)), *portable_kernels(), c.kind.name() + ": nothing stays nothing");
}

}  // namespace

void check_attention(const Kernels &kernels) {
  std::mt19937 random(7);
  std::vector<Kind> kinds;
  for (int32_t head_dim : {16, 48, 64, 80, 128, 256, 512}) kinds.push_back({EC_KV_F16, head_dim});
  for (int32_t head_dim : {64, 80}) kinds.push_back({EC_KV_F16, head_dim, false, false, 1.5f});
  for (int32_t head_dim : {64, 80}) kinds.push_back({EC_KV_F16, head_dim, false, false, 0.0f, true});
  kinds.push_back({EC_KV_INT8, 64, false, false, 1.5f, true});
  for (int32_t type : {EC_KV_INT8, EC_KV_INT4, EC_KV_GEAR, EC_KV_INT8_INT4}) {
    for (int32_t head_dim : {32, 64, 96, 128, 256, 320, 512}) kinds.push_back({type, head_dim});
    kinds.push_back({type, 64, false, false, 1.5f});
    for (bool interleaved : {false, true}) kinds.push_back({type, 64, true, interleaved});
    check_round_trip(random, type, 64);
    check_round_trip(random, type, 96);
    check_round_trip(random, type, 512);
    check_odd_numbers(random, type);
  }
  for (const Kind &kind : kinds)
    for (bool sliding : {false, true}) {
      for (int32_t n : {4, 17, 63, 64, 65, 129, 330}) check_chains(kernels, random, kind, sliding, n);
      for (int32_t n_prefix : {0, 1, 15, 16, 60, 125, 130}) check_trees(kernels, random, kind, sliding, n_prefix);
    }
}

}  // namespace checks
