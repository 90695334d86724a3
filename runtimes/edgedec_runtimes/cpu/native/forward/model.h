// A decoder-only transformer: its weights, in tiles that the caller owns, and the memory of its forwards.
#pragma once
#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "edgedec_cpu.h"
#include "forward/adapters.h"
#include "forward/expert_store.h"
#include "forward/experts.h"
#include "forward/kv_cache.h"
#include "forward/recurrent_state.h"
#include "forward/require.h"
#include "forward/row_notes.h"
#include "forward/short_conv.h"
#include "kernels/kernels.h"
#include "threads/pool.h"
#include "weights/mapping.h"
#include "weights/streaming.h"

struct ec_mapping : edgedec::Mapping {
  using Mapping::Mapping;
};

namespace edgedec {
class DraftHeadState;
}

struct ec_session {
  // A session of the draft head's layers, which have attention alone.
  ec_session(ec_model *owner, edgedec::KVCache &&kv);
  ec_session(ec_model *owner, int32_t n_ctx, int32_t kv_type);
  // Share the first n_tokens.
  ec_session(const ec_session &other, int32_t n_tokens);
  ec_model *model;
  edgedec::KVCache cache;
  edgedec::RowNotes notes;  // used where there are columns or states
  edgedec::ColumnCache columns;
  edgedec::RecurrentState states;
  std::shared_ptr<edgedec::DraftHeadState> draft_head;  // of one that follows the text; nullptr for none
  std::vector<float> adapter_scales;                    // by adapter; what is missing is 0, and so without effect
};

namespace edgedec {

// Rows of activations, and the memory that they point to.
class ActivationBuffer {
 public:
  ActivationBuffer() = default;
  ActivationBuffer(int64_t rows, int64_t n, bool quantized, bool floats);
  const Activations &view() const { return view_; }

 private:
  std::vector<ActivationBlock> blocks_;
  std::vector<float> floats_;
  Activations view_{};
};

// How queries and keys are rotated.
struct Rope {
  std::vector<double> frequencies;  // [n_rot / 2], radians per position
  double magnitude = 1.0;           // of rotated elements
  std::vector<uint8_t> axes;        // [n_rot / 2], which of a row's places a pair turns to; empty: all to the first
  int32_t n_rot() const { return 2 * (int32_t)frequencies.size(); }
  // Write the cosines and sines of a row's three places, [2][n_rot / 2].
  void fill(float *cos_sin, const int32_t *places) const;
};

// Convolutions over the rows of an item before and behind a block of a layer (DFlash2). A row's kernels are a base, and
// what a matrix makes of the row that enters the block: one number for a group of elements.
struct RowConvolution {
  Matrix kernels{};         // [2 * length * groups][n_embd]: before and behind the block, by distance, by group
  std::vector<float> base;  // [2][length][n_embd]
  bool is_used() const { return !base.empty(); }
};

// What layers get of a token beside the hidden state (Gemma 3n's per-layer embeddings): a row of a table, and a
// projection of what enters the first layer.
struct PerLayer {
  Matrix table{}, projection{};
  std::vector<float> norm;
  RowFile file;  // reads rows of the table, where they are not looked up in memory
  // --- memory of a forward ---
  std::vector<float> rows, inputs;  // [rows][n_layer * n_per_layer]: of the table, and all that layers get
  std::vector<float> gates;         // [rows][n_per_layer]
  ActivationBuffer gated;
};

constexpr int MAX_CONVOLUTION = 16;  // the most tokens that a convolution goes over

struct Layer {
  ec_layer shape{};
  Matrix matrices[EC_N_MATRICES];
  std::vector<float> vectors[EC_N_VECTORS];
  RowConvolution around_attention, around_ffn;
  bool slides = false, unrotated = false;
  int32_t window = 0;  // tokens that it sees; 0: all
  bool has_experts() const { return matrices[EC_ROUTER].n_rows != 0; }
  // Among the layers that store keys and values (the number of the layer whose own it reads), or among those with a
  // convolution.
  int32_t number = 0;
  bool stores_kv = false;
  bool attends() const { return shape.mixer == EC_MIXER_ATTENTION || shape.mixer == EC_MIXER_BOTH; }
  // Of a short convolution, the matrices of queries, keys and values are C, B and x, of n_embd rows each: what enters
  // the convolution is B * x, and what leaves it is multiplied by C.
  bool convolves() const { return shape.mixer == EC_MIXER_CONVOLUTION; }
  // What the hidden state is multiplied by behind the layer.
  float scale() const { return vectors[EC_LAYER_SCALE].empty() ? 1.0f : vectors[EC_LAYER_SCALE][0]; }
  bool mixes() const { return shape.mixer != EC_MIXER_NONE; }
  bool recurs() const { return shape.mixer == EC_MIXER_RECURRENT || shape.mixer == EC_MIXER_BOTH; }
  int32_t state = 0;      // its number among the layers with a recurrent state
  int64_t mix_width = 0;  // of a row of ec_model::mix
  bool has_mlp() const { return has_experts() || shape.n_ff != 0; }
  // The matrix that holds what EC_GATE_EXPERTS and so on name of all experts, and the place of one of them there, among
  // those of one width.
  const Matrix &experts(int which) const {
    const bool together = which == EC_UP_EXPERTS && matrices[EC_UP_EXPERTS].n_rows == 0;
    return matrices[together ? EC_GATE_EXPERTS : which];
  }
  uint64_t place_of_expert(int which, int32_t number) const {
    if (matrices[EC_UP_EXPERTS].n_rows != 0 || which == EC_DOWN_EXPERTS) return (uint64_t)number;
    return 2 * (uint64_t)number + (which == EC_UP_EXPERTS ? 1 : 0);
  }
  bool only_stores() const { return shape.role == EC_ROLE_MEMORY; }
  // Whether rows of a source, or those behind it, run the layer.
  bool takes(bool of_source) const {
    if (shape.role == EC_ROLE_ALL) return true;
    return of_source == (shape.role == EC_ROLE_ENCODER || shape.role == EC_ROLE_MEMORY);
  }
  int64_t n_q() const { return (int64_t)shape.n_head * shape.head_dim; }
  int64_t n_kv() const { return (int64_t)shape.n_head_kv * shape.head_dim; }
};

}  // namespace edgedec

struct ec_model {
  ec_model(const ec_config &config, int32_t n_threads, int32_t max_rows, const edgedec::Kernels *kernels);

  ec_config config;
  int32_t max_rows;
  const edgedec::Kernels *kernels;
  edgedec::Pool &pool;
  edgedec::Matrix token_embd{}, output{};
  std::vector<float> output_norm;
  std::vector<edgedec::Layer> layers;
  edgedec::PerLayer per_layer;
  edgedec::Rope rope[2];  // the second one of sliding layers, where they have their own
  bool finished = false;
  bool elsewhere = false;  // another library evaluates the text: there are no weights, keys and values
  ec_look_up look_up = nullptr;  // of a model that is elsewhere
  bool of_head = false;  // the layers of a draft head, which read no tokens and may lack a norm before the output
  // Of a head that reads pairs: an item's hidden states are an embedding and a feature, 2 * n_embd numbers. The feature
  // is the residual stream, normed where normed_residual is true, and the attention reads both, each after a norm of
  // its own.
  bool paired = false, normed_residual = false;
  // Of layers with convolutions over rows: how many rows they go over, and the elements that share a kernel.
  int32_t row_conv_length = 0, row_conv_group = 0;
  edgedec::Adapters adapters;
  edgedec::Streamer streamer;  // of weights that are read in each forward
  edgedec::ExpertStore experts;  // those of streamed weights
  edgedec::RowFile row_file;   // reads rows of token_embd, where they are not looked up in memory
  const ec_mapping *mapping = nullptr;  // of the tiles, where they are mapped from a file
  std::map<int32_t, std::array<edgedec::Ahead, edgedec::AHEAD_ROWS>> ahead;  // by type of weights, see Matrix::ahead
  ec_model *ahead_from = nullptr;  // of the layers of a draft head: its target, which has `ahead`
  std::vector<double> speeds;            // of the pool's threads (threads/shares.h)
  std::vector<edgedec::Touched> touched; // by rows of a layer, of all forwards so far; empty without experts

  // --- memory of a forward, for up to max_rows rows ---
  std::vector<float> x;                 // [rows][n_embd], the residual stream
  std::vector<float> qkv;               // [rows][n_q(layer) + 2 * n_kv(layer)]
  std::vector<float> attention;         // [rows][n_q(layer)]
  std::vector<float> kept;              // attention's results by spans, where several threads compute one result
  std::vector<float> branch;            // [rows][n_embd], a block's output before its norm or convolution
  std::vector<float> beside;            // [rows][n_embd], a shared expert's, where it has a norm of its own
  std::vector<float> ones;              // the weight of norms that have none
  std::vector<float> entering, kernels_of_rows;  // [rows][n_embd], [rows][n_row_kernels()], of convolutions over rows
  std::vector<float> cos_sin[2];        // [rows][2 * pairs], of each rope
  edgedec::ActivationBuffer normed, attended, convolved, gated, mixed;
  std::vector<edgedec::ActivationBuffer> own_normed;  // of each thread, for one group of rows
  edgedec::ActivationBuffer early;         // [rows][n_embd], what entered a layer, where its router reads that
  std::vector<edgedec::Routing> routings;  // by layer, where there are experts
  std::vector<float> scores;               // [rows][n_expert + 1], of the layer's routers
  edgedec::ActivationBuffer expert_gated;
  std::vector<edgedec::ActivationBuffer> own_gathered;  // of each thread, for one group of an expert's rows
  edgedec::ActivationBuffer pairs;  // [rows][2 * n_embd], where `paired` is true
  // Of layers with a recurrent state: the products of a row; the records of rows that are folded at once; queries
  // [rows][n_key_head][n_key], how much heads learn [rows][n_head], and the results [rows][n_head][n_lanes()]. Of state
  // spaces, what was convolved, [rows][n_column].
  std::vector<float> mix, records, queries, gains, scanned, convolved_rows;
  std::vector<std::vector<float>> thread_memory;  // a panel, a row, scores

  bool has_encoder() const { return layers[0].shape.role != EC_ROLE_ALL; }
  // The elements of a layer's queries, with their gates, and of the keys that it makes; those of a convolution's three
  // inputs.
  int64_t n_q(const edgedec::Layer &layer) const {
    if (layer.only_stores()) return 0;
    return layer.convolves() ? config.n_embd : (config.attention_gate != 0 ? 2 : 1) * layer.n_q();
  }
  int64_t n_kv(const edgedec::Layer &layer) const {
    return layer.convolves() ? config.n_embd : layer.stores_kv ? layer.n_kv() : 0;
  }
  // The greatest number of a layer.
  template <class Number>
  int64_t most(Number number) const {
    int64_t found = 0;
    for (const edgedec::Layer &layer : layers) found = std::max<int64_t>(found, number(layer));
    return found;
  }
  // The keys and values of a session.
  edgedec::KVShape kv_shape(int32_t kv_type) const;
  edgedec::ColumnShape columns() const;
  edgedec::RecurrentShape recurrent;  // of the layers with a recurrent state
  int32_t n_states() const { return elsewhere ? 0 : recurrent.n_layer(); }
  // Whether a row leaves something to the rows behind it beside keys and values.
  bool remembers() const { return columns().n_conv + n_states() > 0; }
  std::vector<float> query_weight, key_weight;  // [n_key], of norms that are by the sum of squares, not by the mean
  // Where a type of weights has its Matrix::ahead, as is usual until another is set; it stays there.
  edgedec::Ahead *ahead_of(int32_t type);
  // Which of the ropes a layer has.
  int rope_of(const edgedec::Layer &layer) const { return layer.slides && !rope[1].frequencies.empty() ? 1 : 0; }
  int32_t convolution_length = 0;  // of the layers with convolutions, where there are any
  int64_t n_row_kernels() const {
    return row_conv_length == 0 ? 0 : 2 * (int64_t)row_conv_length * (config.n_embd / row_conv_group);
  }
  int64_t n_input() const { return (paired ? 2 : 1) * (int64_t)config.n_embd; }
  // Take the shapes of the layers, [n_layer]. Throws Invalid.
  void set_layers(const ec_layer *shapes);
  void finish();

 private:
  void number_layers();
  void read_target(edgedec::Layer &layer) const;
  void check_mixer(const edgedec::Layer &layer) const;
  void check_mlp(const edgedec::Layer &layer) const;
  void check_experts(const edgedec::Layer &layer) const;
  void check_per_layer() const;
  void require_gate(const edgedec::Matrix &gate, const char *name, int64_t n_rows) const;
  void finish_convolution(edgedec::Layer &layer);
  void finish_recurrence();
  void check_recurrence(const edgedec::Layer &layer) const;
  void check_row_convolution(const edgedec::RowConvolution &convolution) const;
};

namespace edgedec {

enum class Outcome { done, cancelled, not_finite };

// Evaluate rows again until the session of an item holds what its rows go on from: the columns and states before its
// n_past, and, where it does not begin with the first layer, its rows in the layers below. Throws as forward() does.
Outcome renew(const ec_item &item, const volatile int32_t *cancel);

// Throws Invalid, std::bad_alloc, Unreadable.
Outcome forward(ec_model &model, const ec_item *items, int32_t n_items, float *logits, int32_t *best,
                const volatile int32_t *cancel);

}  // namespace edgedec
