// Coverage-guided fuzzing of the native library's C interface, for libFuzzer with sanitizers (guided.sh builds and runs
// it). The environment variable FUZZ names the target:
//
//   tiles     rows of a GGUF, packed into tiles and requantized
//   model     a model of small sizes, of which any size, type or number may be wrong, and forwards of it
//   adapter   the same model, sound, with a LoRA adapter that may be wrong
//   kept      a sound model's session, whose saved state is damaged before it is loaded
//   head      a draft head of a sound model, of which any size may be wrong; its drafts and its saved state
//
// The library takes pointers with their sizes. Every buffer here is an allocation of exactly that size, so that a read
// or a write beyond it is found. At its end, the program says how much was accepted: a harness whose inputs are all
// refused would find nothing.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "edgedec_cpu.h"

namespace {

struct Counts {
  long inputs, finished, forwards, loads, drafts;
} counts;

// The bytes of one input, which are read as numbers; behind their end stand zeros.
struct Input {
  const uint8_t *at, *end;

  int32_t byte() { return at < end ? *at++ : 0; }
  int32_t below(int32_t n) { return n <= 1 ? 0 : byte() % n; }
  bool one_in(int32_t n) { return byte() % n == n - 1; }
  int32_t word() {
    uint32_t bits = 0;
    for (int i = 0; i < 4; ++i) bits = bits << 8 | (uint32_t)byte();
    return (int32_t)bits;
  }
  float number() {
    const int32_t bits = word();
    float value;
    memcpy(&value, &bits, 4);
    return value;
  }
  // Return `sound`, or where this target damages sizes and the input says so, another number near it or far from it.
  int32_t size(int32_t sound) {
    if (!damages || byte() < 250) return sound;
    switch (byte() % 6) {
      case 0: return (int32_t)((uint32_t)sound + 1);
      case 1: return (int32_t)((uint32_t)sound - 1);
      case 2: return (int32_t)((uint32_t)sound * 2);
      case 3: return (int32_t)(0 - (uint32_t)sound);
      case 4: return below(64);
      default: return word();
    }
  }
  void fill(void *target, size_t n) {
    uint8_t *out = (uint8_t *)target;
    const size_t n_read = std::min(n, (size_t)below(64));
    const uint8_t pattern = (uint8_t)byte();
    memset(out, pattern % 4 == 3 ? pattern : pattern % 64, n);
    for (size_t i = 0; i < n_read; ++i) out[(size_t)word() % n] = (uint8_t)byte();
  }
  bool damages = false;
};

using Bytes = std::unique_ptr<uint8_t[]>;

// What lives as long as a model or a head borrows it.
struct Borrowed {
  std::vector<Bytes> blocks;
  uint8_t *take(size_t n) {
    blocks.emplace_back(new uint8_t[n]);
    return blocks.back().get();
  }
};

const int32_t TYPES[] = {0, 1, 30, 2, 3, 6, 7, 8, 20, 39, 41, 42, 10, 11, 12, 13, 14, 16, 17, 18, 19, 21, 22, 23, 29, 34, 35};
const int32_t N_ANY = 10;  // types whose blocks have at most 32 columns stand first

int32_t type_of(Input &in, int64_t n_cols) {
  const int32_t n = n_cols % 256 == 0 ? (int32_t)(sizeof TYPES / sizeof *TYPES) : N_ANY;
  return in.size(TYPES[n_cols % 32 == 0 ? in.below(n) : in.below(3)]);
}

constexpr uint64_t MOST_BYTES = 1 << 20;

// Take the tiles of a matrix; return false where there are none of its type and shape, or too many for a fuzzer.
bool tiles(Input &in, Borrowed &borrowed, int32_t type, int64_t rows, int64_t cols, uint8_t **data, uint64_t *n) {
  *n = ec_tile_bytes(type, rows, cols);
  if (*n == 0 || *n > MOST_BYTES) return false;
  *data = borrowed.take(*n);
  in.fill(*data, *n);
  return true;
}

// Draw a matrix of about this shape, and hand it to `set`; return whether it was taken.
template <class Set>
bool drawn_matrix(Input &in, Borrowed &borrowed, int32_t which, int32_t layer, int64_t rows, int64_t cols, Set set) {
  rows = in.size((int32_t)rows), cols = in.size((int32_t)cols);
  const int32_t type = type_of(in, cols);
  uint8_t *data;
  uint64_t n;
  if (!tiles(in, borrowed, type, rows, cols, &data, &n)) return false;
  const int32_t matrix = in.size(which), of_layer = in.size(layer);
  return set(matrix, of_layer, type, rows, cols, data, n) == EC_OK;
}

std::vector<float> floats(Input &in, int64_t n) {
  std::vector<float> values((size_t)std::clamp<int64_t>(n, 0, 1 << 16), 1.0f);
  for (int i = in.below(4); i > 0 && !values.empty(); --i) values[(size_t)in.byte() % values.size()] = in.number();
  return values;
}

struct Model {
  ec_model *model = nullptr;
  ec_config c{};
  std::vector<ec_layer> layers;
  Borrowed borrowed;
  int32_t max_rows = 8, kv_type = 0;

  ~Model() { ec_model_destroy(model); }

  bool matrix(Input &in, int32_t which, int32_t layer, int64_t rows, int64_t cols) {
    const auto set = [&](auto... matrix) { return ec_model_set_matrix(model, matrix...); };
    return drawn_matrix(in, borrowed, which, layer, rows, cols, set);
  }

  bool vector(Input &in, int32_t which, int32_t layer, int64_t n, bool optional = false) {
    if (optional && !in.one_in(6)) return true;
    const std::vector<float> values = floats(in, in.size((int32_t)n));
    return ec_model_set_vector(model, in.size(which), in.size(layer), values.data(), (int64_t)values.size()) == EC_OK;
  }

  // Set the attention, the convolution or the recurrence of a layer.
  bool mixer(Input &in, int32_t i) {
    const ec_layer &l = layers[(size_t)i];
    const int64_t d = c.n_embd;
    bool good = vector(in, EC_ATTN_NORM, i, d);
    if (l.mixer == EC_MIXER_ATTENTION || l.mixer == EC_MIXER_BOTH) {
      const int64_t q = (int64_t)l.n_head * l.head_dim, kv = (int64_t)l.n_head_kv * l.head_dim;
      good = good && matrix(in, EC_Q, i, c.attention_gate ? 2 * q : q, d) && matrix(in, EC_ATTN_OUT, i, d, q);
      if (l.kv_from == i) good = good && matrix(in, EC_K, i, kv, d) && matrix(in, EC_V, i, kv, d);
      good = good && vector(in, EC_Q_BIAS, i, q, true) && vector(in, EC_K_BIAS, i, kv, true) &&
             vector(in, EC_Q_NORM, i, c.wide_norms ? q : l.head_dim, true) &&
             vector(in, EC_K_NORM, i, c.wide_norms ? kv : l.head_dim, true) && vector(in, EC_SINKS, i, l.n_head, true);
    } else if (l.mixer == EC_MIXER_CONVOLUTION) {
      for (int32_t which : {EC_Q, EC_K, EC_V, EC_ATTN_OUT}) good = good && matrix(in, which, i, d, d);
      good = good && vector(in, EC_CONVOLUTION, i, d * 3);
    }
    if (l.mixer == EC_MIXER_RECURRENT || l.mixer == EC_MIXER_BOTH) {
      const int64_t n = c.n_state_head, values = n * c.n_state_value,
                    columns = 2 * (int64_t)c.n_state_key_head * c.n_state_key + values;
      const bool space = c.state_rule == EC_RULE_SPACE;
      good = good && matrix(in, EC_MIX, i, columns, d) && matrix(in, EC_MIX_GATE, i, values, d) &&
             matrix(in, EC_MIX_ALPHA, i, n, d) && (space || matrix(in, EC_MIX_BETA, i, n, d)) &&
             matrix(in, EC_MIX_OUT, i, d, values) && vector(in, EC_CONVOLUTION, i, columns * 4) &&
             vector(in, EC_STATE_BIAS, i, n) && vector(in, EC_STATE_NORM, i, space ? values : c.n_state_value);
      std::vector<float> rates((size_t)std::max<int64_t>(n, 1), -0.5f);
      good = good && ec_model_set_vector(model, EC_STATE_RATE, i, rates.data(), (int64_t)rates.size()) == EC_OK;
      if (space) good = good && vector(in, EC_CONVOLUTION_BIAS, i, columns) && vector(in, EC_STATE_PASSED, i, n);
    }
    return good;
  }

  bool mlp(Input &in, int32_t i) {
    const int64_t d = c.n_embd, n = layers[(size_t)i].n_ff, wide = c.n_ff_expert;
    bool good = vector(in, EC_FFN_NORM, i, d);
    if (n != 0)
      good = good && (c.ungated || matrix(in, EC_GATE, i, n, d)) && matrix(in, EC_UP, i, n, d) &&
             matrix(in, EC_DOWN, i, d, n);
    if (c.n_expert != 0 && i % 2 == 0)
      good = good && matrix(in, EC_ROUTER, i, c.n_expert, d) &&
             (c.ungated || matrix(in, EC_GATE_EXPERTS, i, c.n_expert * wide, d)) &&
             matrix(in, EC_UP_EXPERTS, i, c.n_expert * wide, d) && matrix(in, EC_DOWN_EXPERTS, i, c.n_expert * d, wide) &&
             vector(in, EC_EXPERT_BIAS, i, c.n_expert, true) && vector(in, EC_ROUTER_BIAS, i, c.n_expert, true);
    return good && vector(in, EC_POST_FFN_NORM, i, d, true);
  }

  // Make the model but for finishing it; false where the library, or a size, refused it.
  bool make(Input &in) {
    c.n_vocab = in.size(24), c.n_embd = in.size(in.one_in(4) ? 256 : 32), c.n_layer = in.size(1 + in.below(3));
    c.rms_epsilon = 1e-5f, c.embedding_scale = c.residual_scale = c.logit_scale = c.expert_scale = 1.0f;
    c.attention_scale = 0.2f, c.glu_slope = 1.0f;
    c.rope_interleaved = in.below(2), c.activation = in.size(in.below(4)), c.ungated = in.one_in(5);
    c.wide_norms = in.one_in(5), c.sliding_window = in.size(in.one_in(3) ? 5 : 0);
    c.attention_gate = in.size(in.one_in(6)), c.norm_period = in.size(in.one_in(8));
    if (in.one_in(3)) c.n_expert = in.size(4), c.n_expert_used = in.size(2), c.n_ff_expert = in.size(32);
    c.expert_gating = in.size(in.below(3)), c.norm_experts = in.below(2);
    c.state_rule = in.size(in.one_in(3) ? 1 + in.below(2) : 0);
    c.n_state_head = in.size(2), c.n_state_key_head = in.size(1 + in.below(2)), c.state_tiled = in.below(2);
    c.n_state_key = in.size(32), c.n_state_value = in.size(32);
    if (in.one_in(8)) c.logit_softcap = in.number(), c.attention_softcap = in.number();
    if (in.one_in(8)) c.glu_limit = in.number(), c.temperature_scale = in.number(), c.temperature_tokens = in.word();
    max_rows = in.size(8);
    if (c.n_embd > 1024 || c.n_vocab > 4096 || c.n_layer > 8 || max_rows > 64) return false;  // only slow
    const char *set = in.one_in(8) ? "portable" : nullptr;  // whose kernels take several times as long
    if (ec_model_create(&c, 1, max_rows, set, &model) != EC_OK) return false;
    for (int32_t i = 0; i < c.n_layer; ++i) {
      const int32_t any = c.state_rule != 0 ? 5 : 3;
      ec_layer l{0, in.below(any), 2, 1, 32, 32, i};
      if (i == 0 && l.mixer == EC_MIXER_NONE) l.mixer = EC_MIXER_ATTENTION;
      l.flags = in.size((c.sliding_window > 0 && in.below(2) ? EC_LAYER_SLIDES : 0) | (in.one_in(4) ? EC_LAYER_UNROTATED : 0));
      l.n_head = in.size(2), l.n_head_kv = in.size(1 + in.below(2)), l.head_dim = in.size(32), l.n_ff = in.size(32);
      l.mixer = in.size(l.mixer);
      if (in.one_in(6)) l.kv_from = in.size(in.below(i + 1));
      layers.push_back(l);
    }
    if (ec_model_set_layers(model, layers.data()) != EC_OK) return false;
    for (int32_t sliding = 0; sliding < 2; ++sliding) {
      std::vector<double> frequencies((size_t)std::clamp(in.size(in.one_in(4) ? 8 : 16), 1, 64), 0.3);
      std::vector<uint8_t> axes(frequencies.size(), (uint8_t)in.size(in.below(3)));
      if (ec_model_set_rope(model, sliding, frequencies.data(), in.one_in(4) ? axes.data() : nullptr,
                            (int64_t)frequencies.size(), 1.0) != EC_OK)
        return false;
    }
    bool good = matrix(in, EC_TOKEN_EMBD, 0, c.n_vocab, c.n_embd) && matrix(in, EC_OUTPUT, 0, c.n_vocab, c.n_embd) &&
                vector(in, EC_OUTPUT_NORM, 0, c.n_embd);
    for (int32_t i = 0; good && i < c.n_layer; ++i) {
      if (layers[(size_t)i].mixer != EC_MIXER_NONE) good = mixer(in, i);
      good = good && mlp(in, i);
    }
    return good || in.damages;
  }

  bool finish() {
    const bool good = ec_model_finish(model) == EC_OK;
    counts.finished += good;
    return good;
  }
};

struct Session {
  ec_session *session = nullptr;
  ~Session() { ec_session_close(session); }
};

// Evaluate some rows of a session; return how many tokens it holds then.
int32_t forward(Input &in, Model &m, ec_session *session, int32_t n_past, int32_t n_ctx) {
  const int32_t n = std::min({1 + in.below(8), n_ctx - n_past, m.max_rows});
  if (n <= 0) return n_past;
  std::vector<int32_t> tokens((size_t)n), wanted, parents((size_t)n), places((size_t)(n_past + n) * 3, in.size(1));
  for (int32_t i = 0; i < n; ++i) {
    tokens[(size_t)i] = in.one_in(40) ? in.word() : in.below(std::max(m.c.n_vocab, 1));
    parents[(size_t)i] = in.one_in(40) ? in.word() : in.below(i + 1) - 1;
    if (in.below(2)) wanted.push_back(in.one_in(40) ? in.word() : i);
  }
  std::vector<uint8_t> attn((size_t)m.c.n_layer, 1), mlp((size_t)m.c.n_layer, 1);
  attn[(size_t)in.below(m.c.n_layer)] = (uint8_t)in.below(2);
  std::vector<int32_t> taps{in.one_in(40) ? in.word() : in.below(m.c.n_layer)}, mass{in.below(m.c.n_layer)};
  std::vector<float> tapped((size_t)(n * m.c.n_embd)), weights((size_t)n, 1.0f);
  std::vector<float> hidden((size_t)(n * m.c.n_embd), 0.5f), masses((size_t)(4 * (n_past + n)));
  ec_item item{};
  item.session = session, item.n_past = in.one_in(30) ? in.word() : n_past, item.n_rows = n;
  const bool is_tree = in.below(2);
  const bool sound_past = item.n_past == n_past;
  ec_group groups[2] = {}; item.groups = groups, item.n_groups = n > 1 && in.one_in(4) ? 2 : 1, groups[0].tokens = groups[1].tokens = tokens.data();
  groups[0].n_rows = item.n_groups == 1 ? n : in.one_in(20) ? in.word() : 1 + in.below(n - 1), groups[1].n_rows = n - groups[0].n_rows;
  if (sound_past && in.one_in(5))
    groups[0].tokens = nullptr, groups[0].vectors = hidden.data(), groups[0].first_layer = in.one_in(20) ? in.word() : in.below(m.c.n_layer);
  item.wanted = wanted.data(), item.n_wanted = (int32_t)wanted.size();
  if (is_tree) item.parents = parents.data();
  else item.block = in.one_in(20) ? in.word() : in.below(4);
  if (in.one_in(3)) groups[0].attn = attn.data(), groups[0].mlp = mlp.data();
  if (in.below(2)) item.taps = taps.data(), item.tapped = tapped.data(), item.n_taps = 1;
  if (sound_past && in.one_in(6)) item.places = places.data();
  if (sound_past && in.one_in(5)) {
    item.mass_layers = mass.data(), item.mass_weights = weights.data(), item.mass = masses.data();
    item.n_mass = 1, item.n_mass_heads = 4, item.n_mass_slots = n_past + n;
  }
  std::vector<float> logits(std::max<size_t>(wanted.size(), 1) * (size_t)m.c.n_vocab);
  std::vector<int32_t> best(std::max<size_t>(wanted.size(), 1));
  volatile int32_t cancel = in.one_in(60);
  if (ec_forward(m.model, &item, 1, logits.data(), in.below(2) ? best.data() : nullptr, &cancel) != EC_OK) return -1;
  ++counts.forwards;
  if (!is_tree) return n_past + n;
  std::vector<int32_t> path;
  for (int32_t i = n - 1; i >= 0; i = parents[(size_t)i]) path.insert(path.begin(), n_past + i);
  if (in.one_in(30)) path[0] = in.word();
  return ec_session_move(session, path.data(), (int32_t)path.size(), n_past) == EC_OK ? n_past + (int32_t)path.size() : -1;
}

using Saver = int32_t (*)(ec_session *, int32_t, void *, uint64_t);
using Loader = int32_t (*)(ec_session *, int32_t, const void *, uint64_t);

int32_t save_slots(ec_session *session, int32_t n, void *target, uint64_t n_bytes) {
  return ec_session_save(session, n, nullptr, target, n_bytes);
}
int32_t save_vectors(ec_session *session, int32_t n, void *target, uint64_t n_bytes) {
  return ec_session_save_vectors(session, n, target, n_bytes);
}

// Save a state, damage it, and load it into another session.
bool reload(Input &in, ec_session *from, ec_session *to, int32_t n, uint64_t n_bytes, Saver save, Loader load) {
  if (n_bytes > MOST_BYTES) return false;
  Bytes state(new uint8_t[n_bytes]);
  if (n_bytes != 0 && save(from, n, state.get(), n_bytes) != EC_OK) return false;
  const uint64_t n_left = in.one_in(10) ? (uint64_t)in.word() % (n_bytes + 1) : n_bytes;
  Bytes damaged(new uint8_t[n_left]);
  memcpy(damaged.get(), state.get(), n_left);
  for (int i = in.below(8); i > 0 && n_left > 0; --i) damaged[(uint64_t)(uint32_t)in.word() % n_left] = (uint8_t)in.byte();
  const bool good = load(to, in.one_in(10) ? in.size(in.word()) : n, damaged.get(), n_left) == EC_OK;
  counts.loads += good;
  return good;
}

// Use a finished model: forwards, forks, saved states.
void use(Input &in, Model &m) {
  const int32_t n_ctx = in.size(24);
  if (n_ctx > 4096) return;
  Session first, other, fork;
  const int32_t kv_type = in.size(in.below(4));
  if (ec_session_open(m.model, n_ctx, kv_type, &first.session) != EC_OK) return;
  if (ec_session_open(m.model, n_ctx, kv_type, &other.session) != EC_OK) return;
  const std::vector<float> scales = floats(in, in.below(3));
  if (in.one_in(4)) ec_session_adapt(first.session, scales.data(), (int32_t)scales.size());
  int32_t n = 0;
  for (int i = 0; i < 3; ++i) {
    const int32_t next = forward(in, m, first.session, n, n_ctx);
    if (next < 0) break;
    n = next;
  }
  const bool slots = reload(in, first.session, other.session, n, ec_session_saved_bytes(first.session, n), save_slots, ec_session_load);
  const uint64_t n_vectors = ec_session_vector_bytes(first.session, n);
  if (slots && n_vectors != 0) reload(in, first.session, other.session, n, n_vectors, save_vectors, ec_session_load_vectors);
  if (slots) forward(in, m, other.session, n, n_ctx);
  std::vector<int32_t> taken((size_t)(m.c.n_layer * ec_session_gathered_heads(first.session)) * 3);
  for (int32_t &slot : taken) slot = in.one_in(50) ? in.word() : in.below(n + 1);
  if (!taken.empty() && ec_session_gather(other.session, first.session, taken.data(), 3, in.below(2)) == EC_OK)
    forward(in, m, other.session, 3, n_ctx);
  if (ec_session_fork(first.session, in.one_in(10) ? in.word() : n, &fork.session) == EC_OK)
    forward(in, m, fork.session, n, n_ctx);
  forward(in, m, first.session, in.below(n + 1), n_ctx);
}

void fuzz_tiles(Input &in) {
  in.damages = true;
  const int32_t type = in.size(TYPES[in.below(27)]);
  const int64_t rows = in.size(in.below(50)), cols = in.size(32 * in.below(17));
  const int64_t begin = in.size(16 * in.below(3)), end = in.size((int32_t)std::min<int64_t>(rows, begin + 16));
  const uint64_t n = ec_tile_bytes(type, rows, cols);
  if (n > MOST_BYTES) return;
  const uint64_t n_tiles = in.one_in(20) ? (uint64_t)in.byte() : n, n_left = (uint64_t)(in.end - in.at);
  // Of the rows that are packed, the bytes in a GGUF: those of all rows are the tiles' but for what fills the last tile.
  const uint64_t n_rows = rows > 0 ? n / (uint64_t)((rows + 15) / 16 * 16) : 0;
  const uint64_t n_source = in.one_in(20) ? n_left : n_rows * (uint64_t)std::clamp<int64_t>(end - begin, 0, 64);
  Bytes source(new uint8_t[n_source]), packed(new uint8_t[n_tiles]);
  in.fill(source.get(), std::max<uint64_t>(n_source, 1) - (n_source == 0));
  counts.finished += ec_tile_pack(type, rows, cols, begin, end, source.get(), n_source, packed.get(), n_tiles) == EC_OK;
  const int64_t n_q4 = in.size((int32_t)(std::max<int64_t>(end - begin, 0) * (cols / 32) * 18));
  if (n_q4 < 0 || n_q4 > (int64_t)MOST_BYTES) return;
  Bytes q4(new uint8_t[(size_t)n_q4]);
  counts.loads += ec_rows_to_q4_0(type, end - begin, cols, source.get(), n_source, q4.get(), (uint64_t)n_q4) == EC_OK;
}

void fuzz_model(Input &in) {
  in.damages = true;
  Model m;
  if (m.make(in) && m.finish()) use(in, m);
}

// Return one of a few sound models, by a byte of the input: what only uses a model need not make one each time.
Model *sound(Input &in) {
  static std::unique_ptr<Model> made[16];
  static bool tried[16];
  const int32_t i = in.byte() % 16;
  if (!tried[i]) {
    uint8_t bytes[2048];
    uint32_t state = 77 + (uint32_t)i;
    for (uint8_t &byte : bytes) byte = (uint8_t)((state = state * 1664525 + 1013904223) >> 24);
    Input drawn{bytes, bytes + sizeof bytes};
    made[i] = std::make_unique<Model>();
    if (!made[i]->make(drawn) || !made[i]->finish()) made[i].reset();
    tried[i] = true;
  }
  return made[i].get();
}

void fuzz_kept(Input &in) {
  if (Model *m = sound(in)) use(in, *m);
}

void fuzz_adapter(Input &in) {
  Model m;
  if (!m.make(in)) return;
  in.damages = true;
  for (int32_t n = 1 + in.below(3), i = 0; i < n; ++i) {
    const int32_t type = in.size(in.below(2)), rank = in.size(1 + in.below(8)), which = in.size(EC_Q + in.below(8));
    const int64_t cols = in.size(in.below(2) ? m.c.n_embd : 64), rows = in.size(in.below(2) ? m.c.n_embd : 64);
    uint8_t *a, *b;
    uint64_t a_bytes, b_bytes;
    if (!tiles(in, m.borrowed, type, rank, cols, &a, &a_bytes) || !tiles(in, m.borrowed, type, rows, rank, &b, &b_bytes))
      continue;
    counts.loads += ec_model_adapt(m.model, in.size(i), which, in.size(in.below(m.c.n_layer)), type, rank, in.number(), a,
                                   a_bytes, b, b_bytes) == EC_OK;
  }
  in.damages = false;
  if (m.finish()) use(in, m);
}

struct Head {
  ec_draft_head *head = nullptr;
  Borrowed borrowed;
  ~Head() { ec_draft_head_destroy(head); }

  bool matrix(Input &in, int32_t which, int32_t layer, int64_t rows, int64_t cols) {
    const auto set = [&](auto... matrix) { return ec_draft_head_set_matrix(head, matrix...); };
    return drawn_matrix(in, borrowed, which, layer, rows, cols, set);
  }
  bool vector(Input &in, int32_t which, int32_t layer, int64_t n) {
    const std::vector<float> values = floats(in, in.size((int32_t)n));
    return ec_draft_head_set_vector(head, in.size(which), in.size(layer), values.data(), (int64_t)values.size()) == EC_OK;
  }

  bool make(Input &in, Model &m, ec_draft_head_config &c) {
    const int kind = in.below(4);  // pairs, blocks, rows, an exit
    const bool is_block = kind == 1, has_rows = kind == 2, exits = kind == 3;
    c.n_rows_made = in.size(has_rows ? 1 + in.below(3) : 0), c.rows_layer = in.size(in.below(m.c.n_layer));
    c.exit_layer = in.size(exits ? in.below(m.c.n_layer) : 0);
    c.n_vocab = in.size(16), c.n_embd = in.size(m.c.n_embd), c.n_layer = in.size(is_block ? 1 + in.below(2) : 1);
    c.n_head = in.size(2), c.n_head_kv = in.size(1), c.head_dim = in.size(32), c.n_ff = in.size(exits ? 0 : 32);
    c.n_taps = in.size(has_rows ? 0 : exits ? 1 : 1 + in.below(2)), c.fc_norm = in.size(in.below(3));
    c.norm_before_residual = in.below(2), c.feeds_back_normed = in.below(2);
    c.block_size = in.size(is_block ? 4 : 0), c.block_shifted = in.below(2), c.block_causal = in.below(2);
    c.markov = in.size(is_block ? in.below(5) : 0), c.rank = in.size(c.markov ? 32 : 0);
    c.top_k = in.size(c.markov == EC_MARKOV_SELECTOR ? 4 : 0), c.mask_token = in.size(in.below(2) - 1);
    c.rms_epsilon = 1e-5f, c.rope_base = in.one_in(10) ? in.number() : 10000.0f;
    c.embedding_scale = c.logit_scale = 1.0f;
    if (c.n_vocab < 0 || c.n_vocab > 4096 || c.n_embd > 1024 || c.n_taps > 64 || c.n_layer > 64) return false;
    std::vector<int32_t> taps((size_t)std::max(c.n_taps, 1)), tokens((size_t)std::max(c.n_vocab, 1));
    for (int32_t &tap : taps) tap = in.size(exits ? c.exit_layer : in.below(m.c.n_layer + 1));
    for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = in.size((int32_t)i);
    std::vector<int32_t> windows((size_t)std::max(c.n_layer, 1), in.size(in.below(8)));
    if (ec_draft_head_create(m.model, &c, nullptr, taps.data(), tokens.data(), in.below(2) ? windows.data() : nullptr, &head) != EC_OK)
      return false;
    const int64_t d = c.n_embd, q = (int64_t)c.n_head * c.head_dim, kv = (int64_t)c.n_head_kv * c.head_dim,
                  reads = kind == 0 ? 2 * d : d, n_tapped = (int64_t)c.n_taps * m.c.n_embd;
    bool good = true;
    if (has_rows) {
      const int64_t width = c.n_rows_made * d;
      good = matrix(in, EC_DRAFT_HEAD_OUTPUT, 0, c.n_vocab, d);
      if (in.below(2)) good = good && vector(in, EC_DRAFT_HEAD_ROWS_BASE, 0, width);
      else good = good && matrix(in, EC_DRAFT_HEAD_ROWS, 0, width, d) && vector(in, EC_DRAFT_HEAD_ROWS_KEPT, 0, width);
      return good || in.damages;
    }
    for (int32_t i = 0; good && i < c.n_layer; ++i) {
      good = matrix(in, EC_DRAFT_HEAD_Q, i, q, reads) && matrix(in, EC_DRAFT_HEAD_K, i, kv, reads) &&
             matrix(in, EC_DRAFT_HEAD_V, i, kv, reads) && matrix(in, EC_DRAFT_HEAD_ATTN_OUT, i, d, q) &&
             vector(in, EC_DRAFT_HEAD_ATTN_NORM, i, d);
      if (exits) continue;
      good = good && matrix(in, EC_DRAFT_HEAD_GATE, i, c.n_ff, d) && matrix(in, EC_DRAFT_HEAD_UP, i, c.n_ff, d) &&
             matrix(in, EC_DRAFT_HEAD_DOWN, i, d, c.n_ff) && vector(in, EC_DRAFT_HEAD_FFN_NORM, i, d) && (is_block || vector(in, EC_DRAFT_HEAD_EMBEDDING_NORM, i, d));
    }
    good = good && (exits || matrix(in, EC_DRAFT_HEAD_FC, 0, d, n_tapped)) &&
           matrix(in, EC_DRAFT_HEAD_OUTPUT, 0, c.n_vocab, d) && vector(in, EC_DRAFT_HEAD_OUTPUT_NORM, 0, d);
    if (c.fc_norm != EC_FC_NORM_NONE) good = good && vector(in, EC_DRAFT_HEAD_FC_NORM, 0, n_tapped);
    if (is_block) good = good && vector(in, EC_DRAFT_HEAD_FEATURE_NORM, 0, d);
    if (is_block && c.mask_token < 0) good = good && vector(in, EC_DRAFT_HEAD_MASK, 0, d);
    if (c.markov == EC_MARKOV_NONE) return good || in.damages;
    const bool gated = c.markov == EC_MARKOV_GATED, selects = c.markov == EC_MARKOV_SELECTOR;
    good = good && matrix(in, EC_DRAFT_HEAD_MARKOV_W1, 0, m.c.n_vocab, c.rank) &&
           matrix(in, EC_DRAFT_HEAD_MARKOV_W2, 0, selects ? m.c.n_vocab : c.n_vocab, c.rank);
    if (gated || selects) good = good && matrix(in, EC_DRAFT_HEAD_MARKOV_GATE, 0, c.rank, gated ? d + c.rank : d);
    if (gated) good = good && vector(in, EC_DRAFT_HEAD_MARKOV_GATE_BIAS, 0, c.rank);
    if (c.markov == EC_MARKOV_RNN)
      good = good && matrix(in, EC_DRAFT_HEAD_MARKOV_JOINT, 0, 3 * (int64_t)c.rank, 2 * (int64_t)c.rank + d) &&
             vector(in, EC_DRAFT_HEAD_MARKOV_JOINT_BIAS, 0, 3 * (int64_t)c.rank);
    return good || in.damages;
  }
};

void draft(Input &in, const Model &m, const ec_draft_head_config &c, ec_session *session, int32_t n) {
  std::vector<ec_drafted> nodes(8);
  std::vector<float> scores((size_t)c.n_vocab), factors(2, 0.9f), edges(1, 0.5f);
  ec_draft_item item{};
  item.session = session, item.n_past = in.one_in(20) ? in.word() : n;
  item.token = in.one_in(20) ? in.word() : in.below(m.c.n_vocab);
  item.rules = {1 + in.below(8), 1, edges.data(), in.below(2) ? factors.data() : nullptr, in.below(2) ? 0.0 : 0.1, 1.0};
  item.nodes = nodes.data(), item.scores = scores.data();
  counts.drafts += ec_draft_chains(&item, 1) == EC_OK && item.n_found > 0;
  if (ec_draft_scores(&item, 1) != EC_OK) return;
  const int32_t n_nodes = 1 + in.below(6);
  std::vector<int32_t> tokens((size_t)n_nodes), parents((size_t)n_nodes);
  for (int32_t i = 0; i < n_nodes; ++i) {
    tokens[(size_t)i] = in.one_in(30) ? in.word() : in.below(m.c.n_vocab);
    parents[(size_t)i] = in.one_in(30) ? in.word() : in.below(i + 1) - 1;
  }
  std::vector<float> all((size_t)(n_nodes * c.n_vocab));
  int32_t n_found = 0;
  ec_draft_branches(session, tokens.data(), parents.data(), n_nodes, n_nodes, all.data(), &n_found);
}

void fuzz_head(Input &in) {
  Model *target = sound(in);
  if (target == nullptr) return;
  Model &m = *target;
  Head h;
  Session first, other;
  in.damages = in.below(2);
  ec_draft_head_config c{};
  if (!h.make(in, m, c) || ec_draft_head_finish(h.head) != EC_OK) return;
  in.damages = false;
  ++counts.loads;
  for (Session *s : {&first, &other})
    if (ec_session_open(m.model, 24, 0, &s->session) != EC_OK || ec_session_follow(s->session, h.head) != EC_OK) return;
  const int32_t places[] = {in.size(in.below(4)), in.size(in.below(3)), in.size(in.below(2))};
  ec_draft_place(first.session, places, 3, 0.0);
  int32_t n = 0;
  for (int i = 0; i < 2; ++i) {
    const int32_t next = forward(in, m, first.session, n, 24);
    if (next < 0) return;
    n = next;
    draft(in, m, c, first.session, n);
  }
  if (!reload(in, first.session, other.session, n, ec_session_saved_bytes(first.session, n), save_slots, ec_session_load)) return;
  const auto save = [](ec_session *s, int32_t k, void *to, uint64_t bytes) { return ec_draft_save(s, k, to, bytes); };
  reload(in, first.session, other.session, n, ec_draft_saved_bytes(first.session, n), save, ec_draft_load);
  draft(in, m, c, other.session, n);
}

void report() {
  fprintf(stderr, "of %ld inputs: %ld finished, %ld loaded, %ld forwards, %ld drafts\n", counts.inputs, counts.finished,
          counts.loads, counts.forwards, counts.drafts);
}

std::string target;

}  // namespace

extern "C" int LLVMFuzzerInitialize(int *, char ***) {
  const char *name = getenv("FUZZ");
  target = name == nullptr ? "" : name;
  for (const char *each : {"tiles", "model", "adapter", "kept", "head"})
    if (target == each) return atexit(report);
  fprintf(stderr, "FUZZ is '%s', expected tiles, model, adapter, kept or head\n", target.c_str());
  exit(2);
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
  Input in{data, data + n};
  ++counts.inputs;
  if (target == "tiles") fuzz_tiles(in);
  else if (target == "adapter") fuzz_adapter(in);
  else if (target == "head") fuzz_head(in);
  else if (target == "kept") fuzz_kept(in);
  else fuzz_model(in);
  return 0;
}
