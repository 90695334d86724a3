// One forward while it runs: what its threads share, and the stages that each of them calls.
//
// Every thread calls the same stages in the same order and takes pieces of each stage's work until none is left
// (threads/stages.h). Which thread takes which piece does not change a result: a piece is some rows of a matrix, some
// rows of activations or some queries, and its result depends on nothing else.
#pragma once
#include <atomic>
#include <vector>

#include "forward/model.h"
#include "forward/plan.h"
#include "threads/stages.h"
#include "weights/tensor_types.h"

namespace edgedec {

constexpr int PANEL_TILES = 2;  // a panel is 32 rows of a matrix: their products are one block of quantized activations
constexpr int PANEL_ROWS = PANEL_TILES * TILE_ROWS;
constexpr int BAND = 64;  // the most activations that pass a panel together

// Whether a thread that is late may read what later stages write, and throw away what it made of it: pieces in its
// hands are computed by others, and a few rows are normalized by each thread for itself. ThreadSanitizer would report
// these reads.
#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define EDGEDEC_THREAD_SANITIZER
#endif
#endif
#if defined(__SANITIZE_THREAD__) || defined(EDGEDEC_THREAD_SANITIZER)
constexpr bool LATE_READS = false;
#else
constexpr bool LATE_READS = true;
#endif

// Return the floats of scratch memory that attention needs for each thread.
size_t attention_scratch(const ec_model &model, const Plan &plan);
// Return the floats that threads keep of the spans of attention, for one of them to join; 0 where no spans are cut.
size_t attention_kept(const ec_model &model, const Plan &plan);

// Return the floats of scratch memory that recurrent states need for each thread.
size_t state_scratch(const ec_model &model, const Plan &plan);

// Return the floats of scratch memory that experts need for each thread.
size_t expert_scratch(const ec_model &model, const Plan &plan);
// Return the floats of scratch memory that a thread needs for adapters.
size_t adapter_scratch(const ec_model &model);
// Count the experts that the rows of each layer went through, after a forward.
void count_experts(ec_model &model, const Plan &plan);

class Run {
 public:
  Run(ec_model &model, const Plan &plan, float *logits, int32_t *best, const volatile int32_t *cancel);

  // All of the forward; every thread of the pool calls it. `memory` of a thread is its element of thread_memory.
  void operator()(int thread);

  // What each thread did in products, after the forward.
  std::vector<Effort> efforts() const { return stages_.efforts(); }

  std::atomic<bool> stopped{false};  // *cancel stopped the forward
  std::atomic<bool> finite{true};    // whether all logits are finite
  std::atomic<int32_t> n_folded{0};  // layers whose states have folded what they had to fold

 private:
  // What products() writes: out[row][column] of one of the matrices that share their activations.
  struct Target {
    const Matrix *matrix;
    float *out;  // [rows][stride]
    int64_t stride;
    const float *factors = nullptr;  // [rows], what added products are multiplied by; nullptr: 1
    bool are_logits = false;
  };

  // How the products of matrices with rows of activations are cut into pieces: some panels that lie one behind the
  // other in memory, for a band of rows.
  struct Pieces {
    int64_t n_panels, n_rows;
    int64_t panels_each, band;
    double bytes;  // of a piece's tiles
    int64_t in_band() const { return (n_panels + panels_each - 1) / panels_each; }
    int64_t count() const { return in_band() * ((n_rows + band - 1) / band); }
  };
  struct Piece {
    int64_t first, last, begin, end;  // panels, rows
  };

  // --- forward.cpp ---
  int64_t most_pieces() const;
  void embed(int thread);
  bool goes_on(int thread);
  const Activations &norm(int thread, const std::vector<int32_t> &rows, const std::vector<float> &weight,
                          float *memory);
  void add_vectors(int thread, int32_t l);
  void norm_states(int thread, int32_t l, float *memory);
  void make_rows(int thread, float *memory);
  const Activations &attention_input(int thread, const Layer &layer, const std::vector<int32_t> &rows, float *memory);
  void products(int thread, const Activations &a, const std::vector<int32_t> &rows,
                const Target *targets, int n_targets, float *memory, bool adds = false);
  Pieces cut(const Matrix &w, int n_matrices, int64_t n_panels, int64_t n_rows) const;
  template <class Compute, class Write>
  void each_piece(int thread, const Pieces &pieces, Compute compute, Write write);
  void finish_logits(float *logits, int64_t n) const;
  // What a product goes through before it is added to x, and what x is multiplied by then.
  struct Behind {
    const std::vector<float> &post_norm;
    const RowConvolution &convolution;
    float scale = 1.0f;
  };
  void add_product(int thread, const Activations &a, const std::vector<int32_t> &rows, const Matrix &w,
                   const Behind &behind, float *memory);
  void scale_row(float *x, float scale) const {
    for (int32_t i = 0; scale != 1.0f && i < c_.n_embd; ++i) x[i] *= scale;
  }
  Activations gated(const Matrix &down) const;
  bool mlp_block(int thread, int32_t l, float *memory);
  void activate(float *gates, float *ups, int64_t n) const;
  void gate_and_up(int thread, const Layer &layer, const Activations &normed, const std::vector<int32_t> &rows,
                   float *memory);
  void copy_taps(int thread, int32_t l);
  void logits(int thread, float *memory);
  void logits_in_parts(int thread, float *memory);
  void find_best(int thread);

  // --- adapter_stages.cpp ---
  int64_t most_adapter_pieces() const;
  float adapter_scale(int32_t row, int32_t adapter) const;
  bool uses_adapter(const std::vector<int32_t> &rows, int64_t begin, int64_t end, int32_t adapter) const;
  void multiply_adapters(int thread, const Activations &a, const std::vector<int32_t> &rows,
                         const std::vector<const Matrix *> &matrices, float *memory);
  void add_adapters(const Matrix &matrix, int64_t tile, int64_t last, const std::vector<int32_t> &rows, int64_t begin,
                    int64_t end, float *out, int64_t stride, float *memory) const;

  // --- per_layer.cpp ---
  void make_per_layer_inputs(int thread, float *memory);
  void per_layer_block(int thread, int32_t l, const std::vector<int32_t> &rows, float *memory);

  // --- expert_stages.cpp ---
  struct alignas(64) Gathered {
    int32_t layer = -1, slot = -1;  // the group whose rows a thread holds
  };
  struct GroupRange {
    int64_t begin, end;  // of a routing's groups
    int64_t size() const { return end - begin; }
  };
  int64_t most_expert_pieces() const;
  void keep_entering(int thread, const std::vector<int32_t> &rows);
  void route(int thread, int32_t l, const Activations &read, const std::vector<int32_t> &rows, float *memory);
  // Wait until a matrix of an expert is in memory; false where it can't be read.
  bool have(int32_t l, int32_t expert, int which) {
    return !m_.experts.started() || m_.experts.wait(l, expert, which - EC_GATE_EXPERTS);
  }
  const Activations &gathered(int thread, int32_t l, const ExpertGroup &group, const Activations &normed,
                              int64_t n_rows);
  Matrix expert(int which, int32_t l, int32_t number) const;
  bool mix(int thread, int32_t l, const Activations &normed, int64_t n_rows, float *memory);
  void expert_gates(int thread, int32_t l, GroupRange range, const Activations &normed, float *memory);
  void expert_downs(int thread, int32_t l, GroupRange range, int64_t n_rows, float *memory);
  void add_mixed(int thread, int32_t l, const std::vector<int32_t> &rows, float *memory);
  void add_normed(int thread, int32_t l, const std::vector<int32_t> &rows, float *memory);

  // --- attention.cpp ---
  bool mixer_block(int thread, int32_t l, float *memory);
  void mix_rows(int thread, int32_t l, const std::vector<int32_t> &rows, float *memory);
  Activations attended(const Layer &layer) const;
  int64_t width_of(const Layer &layer) const { return m_.n_q(layer) + 2 * m_.n_kv(layer); }  // of a row of qkv
  // The elements from a head's query to the next one's: there may be a gate between them.
  int64_t query_stride(const Layer &layer) const { return (c_.attention_gate != 0 ? 2 : 1) * layer.shape.head_dim; }
  void add_output_bias(int thread, const Layer &layer, const std::vector<int32_t> &rows);
  void write_keys_and_values(int thread, const Layer &layer, const std::vector<int32_t> &rows, float *memory);
  void norm_wide(float *x, const std::vector<float> &weight, float *memory);
  void write_head(const Layer &layer, int64_t i, const RowInfo &row, int32_t head, float *memory);
  float temperature_at(int32_t position) const;
  void attend(int thread, int32_t l, const std::vector<int32_t> &rows, float *memory);
  struct AttentionCut;
  struct AttentionPiece;
  struct Spans {
    int64_t begin, end;
  };
  AttentionCut cut(const Layer &layer, const AttentionGroup &group, size_t n_groups) const;
  int64_t count_pieces(const Layer &layer, const std::vector<AttentionGroup> &groups) const;
  AttentionPiece find_piece(const Layer &layer, const std::vector<AttentionGroup> &groups, int64_t number) const;
  Spans set_queries(AttentionWork &w, int32_t l, const std::vector<int32_t> &rows, const AttentionPiece &piece);
  AttentionWork work_of(int32_t l, int64_t head, const ec_item &item, float *memory) const;
  void attend_piece(int32_t l, const std::vector<int32_t> &rows, const AttentionPiece &piece, float *memory);

  // --- attention_mass.cpp ---
  void add_mass(int thread, int32_t l, const std::vector<int32_t> &rows, float *memory);
  void add_mass_of_head(int32_t l, const std::vector<int32_t> &rows, const RowRange &range, int64_t head,
                        const float *row_weights, float *to, float *memory) const;

  // --- row_convolution.cpp ---
  const Activations &block_input(int thread, const RowConvolution &before, const std::vector<int32_t> &rows,
                                 const std::vector<float> &weight, float *memory);
  void convolve_row(const RowConvolution &convolution, int side, const std::vector<int32_t> &rows, int64_t i,
                    const float *from, float *out) const;

  // --- short_conv_stages.cpp ---
  void write_columns(int thread, const Layer &layer, const std::vector<int32_t> &rows);
  void convolve(int thread, int32_t l, const std::vector<int32_t> &rows, float *memory);
  int32_t slot_of(const RowInfo &row, int32_t position) const;

  // --- state_stages.cpp ---
  Activations mixed() const { return m_.mixed.view(); }
  float *record_of(const Layer &layer, const RowInfo &row, int64_t i) const;
  const float *column_of(const Layer &layer, const RowInfo &row, int64_t i, int32_t position) const;
  void convolve_columns(const Layer &layer, const RowInfo &row, int64_t i, int64_t begin, int64_t n, float *out) const;
  void scan(int thread, int32_t l, const std::vector<int32_t> &rows, float *memory);
  void scan_piece(int32_t l, const std::vector<int32_t> &rows, int32_t item, int64_t piece, float *memory) const;
  void scan_row(const Layer &layer, const std::vector<int32_t> &rows, size_t i, int64_t piece, float *state) const;

  // --- delta_stages.cpp ---
  void make_delta_records(int thread, const Layer &layer, const std::vector<int32_t> &rows);
  void make_delta_record(const Layer &layer, const RowInfo &row, int64_t i, int64_t key_head);
  void set_delta_gates(const Layer &layer, const float *scores, int64_t first, int64_t n, float *decays,
                       float *gains) const;
  void gate_results(int thread, int32_t l, const std::vector<int32_t> &rows, float *memory);

  // --- state_space_stages.cpp ---
  void make_space_records(int thread, const Layer &layer, const std::vector<int32_t> &rows, float *memory);
  void make_space_keys(const Layer &layer, const RowInfo &row, int64_t i);
  void make_space_heads(const Layer &layer, const RowInfo &row, int64_t i, int64_t first, int64_t n, float *times);
  const float *convolve_space(const Layer &layer, const RowInfo &row, int64_t i, int64_t begin, int64_t n);
  void pass_results(int thread, int32_t l, const std::vector<int32_t> &rows, float *memory);

  // Have a part of streamed weights in memory. False where it can't be read or the forward was cancelled: then all
  // threads leave the forward.
  bool fetch(int thread, int32_t part) { return !streamed_ || m_.streamer.fetch(thread, part, cancel_); }
  bool fetch(int thread, int32_t stage, int32_t l) { return fetch(thread, Streamer::part(stage, l)); }
  // Give a part back that was fetched, when its stage is over.
  void release(int thread, int32_t part) {
    if (streamed_ && thread == 0) m_.streamer.release(part);
  }
  void release(int thread, int32_t stage, int32_t l) { release(thread, Streamer::part(stage, l)); }

  ec_model &m_;
  const ec_config &c_;
  const Kernels &k_;
  const Plan &plan_;
  float *logits_;
  int32_t *best_;
  const volatile int32_t *cancel_;
  const std::vector<float> none_;
  const RowConvolution no_convolution_;
  const bool streamed_ = m_.streamer.started();
  const bool adapted_ = std::any_of(plan_.items, plan_.items + plan_.n_items,
                                    [](const ec_item &item) { return !item.session->adapter_scales.empty(); });
  // Streamed weights go from memory when their stage is over, so that a thread that is late must not read on.
  const bool retake_ = LATE_READS && !streamed_;
  Stages stages_;
  std::vector<Gathered> gathered_ = std::vector<Gathered>((size_t)m_.pool.size());
  const size_t n_kept_ = attention_kept(m_, plan_);
  const size_t n_heads_ =  // of all rows
      (size_t)(plan_.n_rows * m_.most([](const Layer &layer) { return layer.shape.n_head; }));
  std::vector<float> states_ =  // AttentionWork::state of each row and head, where rows attend in several steps
      std::vector<float>(plan_.has_steps() ? 2 * n_heads_ : 0);
  std::vector<std::atomic<int64_t>> n_finished_ =  // parts of each chunk of queries
      std::vector<std::atomic<int64_t>>(n_kept_ == 0 ? 0 : n_heads_);
};

// Evaluate a plan for which the sessions' memory is made. `logits` and `best` are as in forward().
Outcome evaluate(ec_model &model, Plan &plan, float *logits, int32_t *best, const volatile int32_t *cancel);

}  // namespace edgedec
