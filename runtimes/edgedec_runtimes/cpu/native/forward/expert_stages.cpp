// The stages of a mixture of experts. An expert is a run of rows of a matrix that holds all experts of its layer.
#include <math.h>
#include <string.h>

#include <algorithm>

#include "forward/run.h"
#include "weights/tiles.h"

namespace edgedec {
namespace {

constexpr int64_t PIECE_BYTES = 128 * 1024;  // of tiles
constexpr int PIECES_PER_THREAD = 4;

}  // namespace

// Return at least the number of pieces of any stage of experts.
int64_t Run::most_expert_pieces() const {
  if (c_.n_expert == 0) return 0;
  return most_groups(std::max(plan_.n_rows, 1), c_) * (c_.n_ff_expert / PANEL_ROWS) + c_.n_embd / PANEL_ROWS + 1;
}

// Return the floats of scratch memory that a thread needs for experts.
size_t expert_scratch(const ec_model &model, const Plan &plan) {
  return model.config.n_expert == 0 ? 0 : (size_t)(plan.n_rows + MAX_IN_GROUP) * PANEL_ROWS;
}

void count_experts(ec_model &model, const Plan &plan) {
  for (int32_t l = 0; !model.touched.empty() && l < model.config.n_layer; ++l) {
    const size_t n_rows = plan.mlp(l).size();
    if (n_rows == 0 || !model.layers[(size_t)l].has_experts()) continue;
    Touched &touched = model.touched[n_rows];
    ++touched.n_layers;
    touched.n_experts += model.routings[(size_t)l].n_touched();
  }
}

// Keep the state of the given rows for their router.
void Run::keep_entering(int thread, const std::vector<int32_t> &rows) {
  if (rows.empty()) return;
  stages_.each(thread, (int64_t)rows.size(), [&](int64_t i) {
    k_.quantize(m_.early.view(), i, 0, c_.n_embd, m_.x.data() + (int64_t)rows[(size_t)i] * c_.n_embd);
  });
}

// Choose the experts of all rows of a layer by what its router reads. Each layer has a routing of its own, as threads
// that are late read theirs.
void Run::route(int thread, int32_t l, const Activations &read, const std::vector<int32_t> &rows, float *memory) {
  const int64_t n_rows = (int64_t)rows.size();
  const Layer &layer = m_.layers[(size_t)l];
  Routing &routing = m_.routings[(size_t)l];
  const int64_t stride = c_.n_expert + 1;
  const Matrix &gate = layer.matrices[EC_SHARED_ROUTER];
  const Target targets[] = {{&layer.matrices[EC_ROUTER], m_.scores.data(), stride},
                            {&gate, m_.scores.data() + c_.n_expert, stride}};
  products(thread, read, rows, targets, gate.n_rows != 0 ? 2 : 1, memory);
  const std::vector<float> &bias = layer.vectors[EC_EXPERT_BIAS], &of_scores = layer.vectors[EC_ROUTER_BIAS];
  const std::vector<float> &scales = layer.vectors[EC_EXPERT_SCALES];
  stages_.each(thread, n_rows, [&](int64_t i) {
    float *scores = m_.scores.data() + i * stride;
    if (!of_scores.empty()) k_.add(scores, of_scores.data(), 1.0f, c_.n_expert);
    routing.choose(i, scores, bias.empty() ? nullptr : bias.data(), c_);
    if (!scales.empty()) routing.scale(i, scales.data(), c_);
    routing.shared[(size_t)i] = gate.n_rows != 0 ? 1.0f / (1.0f + expf(-scores[c_.n_expert])) : 1.0f;
  });
  stages_.each(thread, 1, [&](int64_t) { routing.group(n_rows, c_); });
}

// Return the activations of a group's rows, one after another. A thread copies them once for all of the group's pieces
// that follow one another.
const Activations &Run::gathered(int thread, int32_t l, const ExpertGroup &group, const Activations &normed,
                                 int64_t n_rows) {
  if (n_rows == 1) return normed;
  const Activations &own = m_.own_gathered[(size_t)thread].view();
  Gathered &held = gathered_[(size_t)thread];
  if (held.layer == l && held.slot == group.slot) return own;
  for (int32_t i = 0; i < group.n; ++i)
    copy_activations(normed, m_.routings[(size_t)l].rows[(size_t)(group.first + i)], own, i, k_.rows_in_pairs);
  held.layer = l, held.slot = group.slot;
  return own;
}

// Return the matrix of one expert, whose tiles are in memory.
Matrix Run::expert(int which, int32_t l, int32_t number) const {
  const Layer &layer = m_.layers[(size_t)l];
  const Matrix &all = layer.experts(which);
  const int64_t n_rows = which == EC_DOWN_EXPERTS ? c_.n_embd : c_.n_ff_expert;
  const uint64_t n_bytes = tile_bytes(all.type, n_rows, all.n_cols);
  const uint8_t *tiles = m_.experts.started()
                             ? m_.experts.tiles(l, number, which - EC_GATE_EXPERTS)
                             : all.tiles + n_bytes * layer.place_of_expert(which, number);
  return {all.type, n_rows, all.n_cols, tiles, all.ahead};
}

// Compute what the experts of a layer add to each row, and leave it in `branch`. Experts that are not all in memory
// come in waves of as many as there are slots. Return false where an expert can't be read: then all threads leave the
// forward.
bool Run::mix(int thread, int32_t l, const Activations &normed, int64_t n_rows, float *memory) {
  ExpertStore &store = m_.experts;
  const std::vector<ExpertGroup> &groups = m_.routings[(size_t)l].groups;
  const int64_t n_groups = (int64_t)groups.size();
  if (n_groups == 0) expert_downs(thread, l, {0, 0}, n_rows, memory);  // no row has an expert: it leaves zeros
  for (int64_t begin = 0, end = 0; begin < n_groups; begin = end) {
    for (int32_t n = 0; end < n_groups; ++end) {
      n += end == begin || groups[(size_t)end].expert != groups[(size_t)end - 1].expert;
      if (store.started() && n > store.n_slots()) break;
    }
    if (store.started()) {
      stages_.each(thread, 1, [&](int64_t) {
        store.want(l, &groups[(size_t)begin], end - begin, begin == 0 ? n_rows : 0);
      });
    }
    expert_gates(thread, l, {begin, end}, normed, memory);
    expert_downs(thread, l, {begin, end}, n_rows, memory);
    if (store.failed()) return false;
  }
  return true;
}

// Multiply gate and up (or up alone) of the experts of some groups with their rows.
void Run::expert_gates(int thread, int32_t l, GroupRange range, const Activations &normed, float *memory) {
  const Routing &routing = m_.routings[(size_t)l];
  const std::vector<float> *vectors = m_.layers[(size_t)l].vectors;
  const std::vector<float> &gate_bias = vectors[EC_GATE_EXPERTS_BIAS], &up_bias = vectors[EC_UP_EXPERTS_BIAS];
  const int64_t n_panels = c_.n_ff_expert / PANEL_ROWS, n_rows = (int64_t)plan_.mlp(l).size();
  const int first_matrix = c_.ungated != 0 ? EC_UP_EXPERTS : EC_GATE_EXPERTS;
  int64_t bytes = 0;
  for (int which = first_matrix; which <= EC_UP_EXPERTS; ++which) {
    const Matrix &w = m_.layers[(size_t)l].experts(which);
    bytes += (int64_t)tile_bytes(w.type, PANEL_ROWS, w.n_cols);
  }
  const int64_t most = std::min({PIECE_BYTES / bytes, (int64_t)BAND / std::max(1, routing.most_in_group),
                                 range.size() * n_panels / (PIECES_PER_THREAD * m_.pool.size())});
  const int64_t each = std::max<int64_t>(1, std::min(most, n_panels)), in_group = (n_panels + each - 1) / each;
  const int64_t stride = each * PANEL_ROWS;
  float *gates = memory, *ups = memory + BAND * PANEL_ROWS;
  const auto panels_of = [&](int64_t piece) {
    const int64_t first = piece % in_group * each;
    return std::pair<int64_t, int64_t>(first, std::min(first + each, n_panels) - first);
  };
  const std::vector<int32_t> &order = m_.experts.order();
  const auto group_of = [&](int64_t piece) -> const ExpertGroup & {
    const int64_t i = piece / in_group;
    return routing.groups[(size_t)(range.begin + (m_.experts.started() ? order[(size_t)i] : i))];
  };
  const auto compute = [&](int64_t piece) {
    const ExpertGroup &group = group_of(piece);
    if (!have(l, group.expert, first_matrix) || !have(l, group.expert, EC_UP_EXPERTS)) return;
    const auto [first, n] = panels_of(piece);
    const int64_t tile = first * PANEL_TILES, end = tile + n * PANEL_TILES;
    const Activations &rows = gathered(thread, l, group, normed, n_rows);
    k_.matmul(expert(first_matrix, l, group.expert), tile, end, rows, 0, group.n, gates, stride);
    if (first_matrix != EC_UP_EXPERTS)
      k_.matmul(expert(EC_UP_EXPERTS, l, group.expert), tile, end, rows, 0, group.n, ups, stride);
    const int64_t row = group.expert * (int64_t)c_.n_ff_expert + first * PANEL_ROWS;
    for (int64_t r = 0; r < group.n; ++r) {
      if (!gate_bias.empty()) k_.add(gates + r * stride, gate_bias.data() + row, 1.0f, n * PANEL_ROWS);
      if (!up_bias.empty()) k_.add(ups + r * stride, up_bias.data() + row, 1.0f, n * PANEL_ROWS);
      activate(gates + r * stride, ups + r * stride, n * PANEL_ROWS);
    }
  };
  const auto write = [&](int64_t piece) {
    const ExpertGroup &group = group_of(piece);
    const auto [first, n] = panels_of(piece);
    for (int64_t r = 0; r < group.n; ++r)
      k_.quantize(m_.expert_gated.view(), group.slot + r, first * PANEL_ROWS, n * PANEL_ROWS, gates + r * stride);
  };
  stages_.each_of_two_parts(thread, range.size() * in_group, (double)(each * bytes), retake_, compute, write);
}

// Multiply down of the experts of some groups, and add the weighted outputs to `branch`, which begins with zeros. A
// piece is a panel of all these experts with all rows; a row's sum is in the order of its experts' numbers.
void Run::expert_downs(int thread, int32_t l, GroupRange range, int64_t n_rows, float *memory) {
  const Routing &routing = m_.routings[(size_t)l];
  const Matrix &all = m_.layers[(size_t)l].matrices[EC_DOWN_EXPERTS];
  const std::vector<float> &bias = m_.layers[(size_t)l].vectors[EC_DOWN_EXPERTS_BIAS];
  const int64_t n_tiles = c_.n_embd / TILE_ROWS;
  float *sums = memory, *outputs = memory + n_rows * PANEL_ROWS;
  const auto columns = [&](int64_t panel) { return std::min<int64_t>(PANEL_ROWS, c_.n_embd - panel * PANEL_ROWS); };
  const auto place = [&](int64_t i, int64_t panel) { return m_.branch.data() + i * c_.n_embd + panel * PANEL_ROWS; };
  const auto compute = [&](int64_t panel) {
    const size_t n_bytes = (size_t)columns(panel) * sizeof(float);
    if (range.begin == 0) memset(sums, 0, (size_t)(n_rows * PANEL_ROWS) * sizeof(float));
    for (int64_t i = 0; range.begin != 0 && i < n_rows; ++i) memcpy(sums + i * PANEL_ROWS, place(i, panel), n_bytes);
    const int64_t first = panel * PANEL_TILES, last = std::min(first + PANEL_TILES, n_tiles);
    for (int64_t g = range.begin; g < range.end; ++g) {
      const ExpertGroup &group = routing.groups[(size_t)g];
      if (!have(l, group.expert, EC_DOWN_EXPERTS)) return;
      k_.matmul(expert(EC_DOWN_EXPERTS, l, group.expert), first, last, m_.expert_gated.view(), group.slot,
                group.slot + group.n, outputs, PANEL_ROWS);
      const float *own_bias =
          bias.empty() ? nullptr : bias.data() + group.expert * (int64_t)c_.n_embd + panel * PANEL_ROWS;
      for (int32_t i = 0; i < group.n; ++i) {
        if (own_bias != nullptr) k_.add(outputs + i * PANEL_ROWS, own_bias, 1.0f, columns(panel));
        k_.add(sums + routing.rows[(size_t)(group.first + i)] * PANEL_ROWS, outputs + i * PANEL_ROWS,
               routing.weights[(size_t)(group.first + i)], columns(panel));
      }
    }
  };
  const auto write = [&](int64_t panel) {
    for (int64_t i = 0; i < n_rows; ++i)
      memcpy(place(i, panel), sums + i * PANEL_ROWS, (size_t)columns(panel) * sizeof(float));
  };
  const double bytes = (double)tile_bytes(all.type, PANEL_ROWS, all.n_cols) * (double)range.size();
  stages_.each_of_two_parts(thread, (n_tiles + PANEL_TILES - 1) / PANEL_TILES, bytes, retake_, compute, write);
}

// Add to x what mix() left, and what the shared expert gives.
void Run::add_mixed(int thread, int32_t l, const std::vector<int32_t> &rows, float *memory) {
  stages_.each(thread, (int64_t)rows.size(), [&](int64_t i) {
    k_.add(m_.x.data() + (int64_t)rows[(size_t)i] * c_.n_embd, m_.branch.data() + i * c_.n_embd, c_.residual_scale,
           c_.n_embd);
  });
  const Matrix &shared = m_.layers[(size_t)l].matrices[EC_DOWN];
  const Target target = {&shared, m_.x.data(), c_.n_embd, m_.routings[(size_t)l].shared.data()};
  if (shared.n_rows != 0) products(thread, gated(shared), rows, &target, 1, memory, true);
}

// Add to x the normed sum of what mix() left and of what the shared expert gives, each after a norm of its own.
void Run::add_normed(int thread, int32_t l, const std::vector<int32_t> &rows, float *memory) {
  const Layer &layer = m_.layers[(size_t)l];
  const int64_t n = c_.n_embd;
  const Matrix &shared = layer.matrices[EC_DOWN];
  const Target target = {&shared, m_.beside.data(), n};
  products(thread, gated(shared), rows, &target, 1, memory);
  stages_.each(thread, (int64_t)rows.size(), [&](int64_t i) {
    const auto norm = [&](const float *from, int weight, float *to) {
      k_.rms_norm(from, layer.vectors[weight].data(), c_.rms_epsilon, n, to);
    };
    float *x = m_.x.data() + (int64_t)rows[(size_t)i] * n, *sum = memory, *other = memory + n;
    norm(m_.beside.data() + i * n, EC_POST_SHARED_NORM, sum);
    norm(m_.branch.data() + i * n, EC_POST_EXPERTS_NORM, other);
    k_.add(sum, other, 1.0f, n);
    norm(sum, EC_POST_FFN_NORM, other);
    k_.add(x, other, c_.residual_scale, n);
    scale_row(x, c_.n_per_layer != 0 ? 1.0f : layer.scale());
  });
}

}  // namespace edgedec
