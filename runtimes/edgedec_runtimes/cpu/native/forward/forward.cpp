// One forward: its entry, and the stages outside of products, of the attention block and of experts.
#include <math.h>
#include <string.h>

#include <algorithm>

#include "draft_head/draft_head.h"
#include "forward/run.h"
#include "kernels/row.h"
#include "weights/tiles.h"

namespace edgedec {
namespace {

constexpr int OWN_ROWS = 32;  // the most rows that all threads together normalize where each does so for itself
// Tell the streamer which parts of the weights the forward will fetch.
void begin_streaming(ec_model &model, const Plan &plan) {
  std::vector<int32_t> order;
  for (int32_t l = 0; l < model.config.n_layer; ++l) {
    const Layer &layer = model.layers[(size_t)l];
    if (layer.mixes() && !plan.attn(l).empty()) order.push_back(Streamer::part(EC_PART_QKV, l));
    if (layer.mixes() && !plan.attending(l).empty()) order.push_back(Streamer::part(EC_PART_ATTN_OUT, l));
    if (layer.has_mlp() && !plan.mlp(l).empty())
      order.insert(order.end(), {Streamer::part(EC_PART_GATE_UP, l), Streamer::part(EC_PART_DOWN, l)});
  }
  for (int32_t p = model.streamer.first_output_part(); plan.n_wanted > 0 && p < model.streamer.n_parts(); ++p)
    order.push_back(p);
  model.streamer.begin(order);
}

// Read the rows of tables that the forward begins with from their files.
void read_rows(ec_model &model, const Plan &plan) {
  for (int32_t r = 0; r < plan.n_rows; ++r) {
    const RowInfo &row = plan.rows[(size_t)r];
    if (row.group->tokens == nullptr) continue;
    const int32_t token = row.group->tokens[row.in_group], n_layer = model.config.n_layer;
    float *x = model.x.data() + (int64_t)r * model.config.n_embd;
    if (model.streamer.started()) model.streamer.embed(token, x);
    else if (model.row_file.is_open()) model.row_file.read(token, x);
    if (model.per_layer.file.is_open())
      model.per_layer.file.read((int64_t)token * n_layer,
                                model.per_layer.rows.data() + (int64_t)r * n_layer * model.config.n_per_layer);
  }
}

}  // namespace

Run::Run(ec_model &model, const Plan &plan, float *logits, int32_t *best, const volatile int32_t *cancel)
    : m_(model), c_(model.config), k_(*model.kernels), plan_(plan), logits_(logits), best_(best), cancel_(cancel),
      stages_(cuts_by_speed(model.speeds), most_pieces()) {}

void Run::operator()(int thread) {
  float *memory = m_.thread_memory[(size_t)thread].data();
  embed(thread);
  if (c_.n_per_layer != 0) make_per_layer_inputs(thread, memory);
  copy_taps(thread, -1);
  for (int32_t l = 0; l < c_.n_layer; ++l) {
    if (plan_.made != nullptr && plan_.made->layer == l) make_rows(thread, memory);
    if (c_.early_router) keep_entering(thread, plan_.mlp(l));
    if (!mixer_block(thread, l, memory) || !mlp_block(thread, l, memory)) return;
    if (l < plan_.n_added) add_vectors(thread, l);
    if (c_.norm_period != 0 && (l + 1) % c_.norm_period == 0 && l + 1 < c_.n_layer) norm_states(thread, l, memory);
    copy_taps(thread, l);
  }
  logits(thread, memory);
  if (best_ != nullptr && plan_.n_wanted > 0) find_best(thread);
}

// Return at least the number of pieces of any stage that is cut into pieces of two parts.
int64_t Run::most_pieces() const {
  const int64_t of_layers = m_.most([&](const Layer &layer) {
    return std::max<int64_t>({layer.shape.n_ff, width_of(layer), layer.mix_width});
  });
  const int64_t widest = std::max<int64_t>({c_.n_vocab, of_layers, c_.n_expert, c_.n_embd, m_.n_row_kernels(),
                                            (int64_t)c_.n_layer * c_.n_per_layer,
                                            plan_.made != nullptr ? plan_.made->matrix.n_rows : 0});
  const int64_t bands = (std::max(plan_.n_rows, 1) + GROUP_ROWS - 1) / GROUP_ROWS;
  return std::max({(widest / PANEL_ROWS + 4) * bands, most_expert_pieces(), most_adapter_pieces()});
}

// Return whether the forward goes on. A thread may leave that others do not follow at once: they do its work. With
// streamed weights all leave at the same stage, as the others would wait for parts that thread 0 does not fetch.
bool Run::goes_on(int thread) {
  const auto look = [&](int64_t) {
    if (cancel_ != nullptr && *cancel_ != 0) stopped.store(true, std::memory_order_relaxed);
  };
  if (streamed_) stages_.each(thread, 1, look);
  else look(0);
  return !stopped.load(std::memory_order_relaxed);
}

void Run::embed(int thread) {
  stages_.each(thread, plan_.n_rows, [&](int64_t r) {
    const RowInfo &row = plan_.rows[(size_t)r];
    const ec_item &item = plan_.items[row.item];
    const ec_group &group = *row.group;
    float *x = m_.x.data() + r * c_.n_embd;
    bool is_scaled = c_.embedding_scale != 1.0f;
    if (group.vectors != nullptr) {
      const int64_t width = m_.n_input() + (int64_t)group.n_added * c_.n_embd;
      memcpy(x, group.vectors + row.in_group * width + m_.n_input() - c_.n_embd, (size_t)c_.n_embd * sizeof(float));
      is_scaled = is_scaled && c_.scaled_vectors != 0 && group.first_layer == 0 && !m_.of_head;
    } else {
      if (!streamed_ && !m_.row_file.is_open())
        tile_row(m_.token_embd.type, c_.n_embd, m_.token_embd.tiles, group.tokens[row.in_group], x);
    }
    if (is_scaled)
      for (int32_t i = 0; i < c_.n_embd; ++i) x[i] *= c_.embedding_scale;
    const int32_t of_text[3] = {row.position, row.position, row.position};
    const int32_t *places = item.places != nullptr ? item.places + 3 * (int64_t)row.slot : of_text;
    for (int i = 0; i < 2; ++i) m_.rope[i].fill(m_.cos_sin[i].data() + r * m_.rope[i].n_rot(), places);
    item.session->cache.write_rotation(row.slot, m_.cos_sin[0].data() + r * m_.rope[0].n_rot());
  });
}

// Normalize the given rows of x, and return them as activations, in order; without a weight, x as it is. A few rows are
// normalized by each thread for itself, which takes less time than to wait for the others and to fetch what they wrote.
// Pieces are whole groups of rows, as the rows of a group share cache lines. (A thread that is late may read an x that
// has gone on. It finds nothing to multiply then.)
const Activations &Run::norm(int thread, const std::vector<int32_t> &rows, const std::vector<float> &weight,
                             float *memory) {
  const int64_t n = (int64_t)rows.size();
  const auto group = [&](const Activations &to, int64_t first) {
    for (int64_t i = first; i < std::min(n, first + GROUP_ROWS); ++i) {
      const float *x = m_.x.data() + (int64_t)rows[(size_t)i] * c_.n_embd;
      if (!weight.empty()) k_.rms_norm(x, weight.data(), c_.rms_epsilon, c_.n_embd, memory);
      k_.quantize(to, i, 0, c_.n_embd, weight.empty() ? x : memory);
    }
  };
  if (LATE_READS && n <= GROUP_ROWS && n * m_.pool.size() <= OWN_ROWS) {
    group(m_.own_normed[(size_t)thread].view(), 0);
    return m_.own_normed[(size_t)thread].view();
  }
  stages_.each(thread, (n + GROUP_ROWS - 1) / GROUP_ROWS,
               [&](int64_t piece) { group(m_.normed.view(), piece * GROUP_ROWS); });
  return m_.normed.view();
}

// Add what vectors bring for the states behind layer l.
void Run::add_vectors(int thread, int32_t l) {
  stages_.each(thread, plan_.n_rows, [&](int64_t r) {
    const RowInfo &row = plan_.rows[(size_t)r];
    const ec_group &group = *row.group;
    if (l >= group.n_added) return;
    const float *vector = group.vectors + row.in_group * (m_.n_input() + (int64_t)group.n_added * c_.n_embd);
    k_.add(m_.x.data() + r * c_.n_embd, vector + (int64_t)(l + 1) * c_.n_embd, 1.0f, c_.n_embd);
  });
}

// Put the states behind layer l through the norm that stands before the output.
void Run::norm_states(int thread, int32_t l, float *memory) {
  stages_.each(thread, plan_.n_rows, [&](int64_t r) {
    if (plan_.rows[(size_t)r].group->first_layer > l) return;
    float *x = m_.x.data() + r * c_.n_embd;
    k_.rms_norm(x, m_.output_norm.data(), c_.rms_epsilon, c_.n_embd, memory);
    memcpy(x, memory, (size_t)c_.n_embd * sizeof(float));
  });
}

// Make what rows enter a layer with.
void Run::make_rows(int thread, float *memory) {
  MadeRows &made = *plan_.made;
  const std::vector<int32_t> &sources = plan_.made_of;
  const int64_t n = c_.n_embd, width = made.matrix.n_rows;
  if (width != 0) {
    stages_.each(thread, (int64_t)sources.size(), [&](int64_t i) {
      k_.quantize(made.sources.view(), i, 0, n, m_.x.data() + (int64_t)sources[(size_t)i] * n);
    });
    const Target target = {&made.matrix, made.products.data(), width};
    products(thread, made.sources.view(), sources, &target, 1, memory);
  }
  stages_.each(thread, (int64_t)plan_.made_rows.size(), [&](int64_t i) {
    const Plan::Made &row = plan_.made_rows[(size_t)i];
    const float *state = m_.x.data() + (int64_t)sources[(size_t)row.source] * n;
    const float *product = width == 0 ? nullptr : made.products.data() + row.source * width + row.number * n;
    float *x = m_.x.data() + (int64_t)row.row * n;
    for (int64_t j = 0, at = row.number * n; j < n; ++j, ++at)
      x[j] = (made.base.empty() ? 0.0f : made.base[(size_t)at]) +
             (made.kept.empty() ? 0.0f : made.kept[(size_t)at] * state[j]) + (width != 0 ? product[j] : 0.0f);
  });
}

// Normalize what a layer's attention reads: rows of x, or, of a draft head, the embedding and the feature of each pair.
const Activations &Run::attention_input(int thread, const Layer &layer, const std::vector<int32_t> &rows,
                                        float *memory) {
  if (!m_.paired) return block_input(thread, layer.around_attention, rows, layer.vectors[EC_ATTN_NORM], memory);
  const int64_t n = c_.n_embd;
  stages_.each(thread, (int64_t)rows.size(), [&](int64_t i) {
    const RowInfo &row = plan_.rows[(size_t)rows[(size_t)i]];
    float *x = m_.x.data() + rows[(size_t)i] * n;
    const float *embedding = row.group->vectors + row.in_group * m_.n_input();
    k_.rms_norm(embedding, layer.vectors[EC_EMBEDDING_NORM].data(), c_.rms_epsilon, n, memory);
    k_.rms_norm(x, layer.vectors[EC_ATTN_NORM].data(), c_.rms_epsilon, n, memory + n);
    k_.quantize(m_.pairs.view(), i, 0, 2 * n, memory);
    if (m_.normed_residual) memcpy(x, memory + n, (size_t)n * sizeof(float));
  });
  return m_.pairs.view();
}

// Return the gated activations that a matrix reads: layers differ in their number.
Activations Run::gated(const Matrix &down) const {
  Activations found = m_.gated.view();
  found.n = down.n_cols;
  return found;
}

bool Run::mlp_block(int thread, int32_t l, float *memory) {
  const std::vector<int32_t> &rows = plan_.mlp(l);
  const Layer &layer = m_.layers[(size_t)l];
  if (rows.empty() || !layer.has_mlp()) return true;
  if (!fetch(thread, EC_PART_GATE_UP, l)) return false;
  if (!goes_on(thread)) return false;
  const Matrix &down = layer.matrices[EC_DOWN];
  const std::vector<float> *v = layer.vectors;
  const auto input = [&](const std::vector<float> &norm) -> const Activations & {
    return block_input(thread, layer.around_ffn, rows, norm, memory);
  };
  const bool apart = layer.has_experts() && !v[EC_ROUTER_NORM].empty();  // experts have norms of their own
  const Activations *normed = apart ? nullptr : &input(v[EC_FFN_NORM]);
  if (layer.has_experts()) {
    const Activations &to_router = c_.early_router ? m_.early.view() : apart ? input(v[EC_ROUTER_NORM]) : *normed;
    route(thread, l, to_router, rows, memory);
    const Activations &to_experts = apart ? input(v[EC_EXPERTS_NORM]) : *normed;
    if (!mix(thread, l, to_experts, (int64_t)rows.size(), memory)) return false;
  }
  if (apart) normed = &input(v[EC_FFN_NORM]);
  if (down.n_rows != 0) gate_and_up(thread, layer, *normed, rows, memory);
  release(thread, EC_PART_GATE_UP, l);
  if (!fetch(thread, EC_PART_DOWN, l)) return false;
  const float scale = c_.n_per_layer != 0 ? 1.0f : layer.scale();
  if (apart) add_normed(thread, l, rows, memory);
  else if (layer.has_experts()) add_mixed(thread, l, rows, memory);
  else add_product(thread, gated(down), rows, down, {v[EC_POST_FFN_NORM], layer.around_ffn, scale}, memory);
  if (c_.n_per_layer != 0) per_layer_block(thread, l, rows, memory);
  release(thread, EC_PART_DOWN, l);
  return true;
}

// Copy the states after layer l that are wanted; layer -1 is what enters the first one.
void Run::copy_taps(int thread, int32_t l) {
  const auto is_wanted = [l](const Plan::Tap &tap) { return tap.layer == l; };
  if (std::none_of(plan_.taps.begin(), plan_.taps.end(), is_wanted)) return;
  stages_.each(thread, (int64_t)plan_.taps.size(), [&](int64_t i) {
    const Plan::Tap &tap = plan_.taps[(size_t)i];
    for (int32_t r = 0; is_wanted(tap) && r < tap.n_rows; ++r)
      memcpy(tap.out + r * tap.stride, m_.x.data() + (int64_t)(tap.first_row + r) * c_.n_embd,
             (size_t)c_.n_embd * sizeof(float));
  });
}

void Run::logits(int thread, float *memory) {
  if (plan_.n_wanted == 0) return;
  if (streamed_) return logits_in_parts(thread, memory);
  const Target target = {&m_.output, logits_, c_.n_vocab, nullptr, true};
  const Activations &normed = norm(thread, plan_.wanted, m_.output_norm, memory);
  products(thread, normed, plan_.wanted, &target, 1, memory);
}

void Run::logits_in_parts(int thread, float *memory) {
  Streamer &streamer = m_.streamer;
  const Activations &normed = norm(thread, plan_.wanted, m_.output_norm, memory);
  for (int32_t part = streamer.first_output_part(); part < streamer.n_parts(); ++part) {
    if (!fetch(thread, part)) return;
    const Target target = {&streamer.output(part), logits_ + streamer.output_begin(part), c_.n_vocab,
                           nullptr, true};
    products(thread, normed, plan_.wanted, &target, 1, memory);
    release(thread, part);
  }
}

// Find the greatest logit of each row while the caches still hold them.
void Run::find_best(int thread) {
  stages_.each(thread, plan_.n_wanted,
               [&](int64_t i) { best_[i] = (int32_t)row_argmax(k_, logits_ + i * c_.n_vocab, c_.n_vocab); });
}

Outcome evaluate(ec_model &model, Plan &plan, float *logits, int32_t *best, const volatile int32_t *cancel) {
  if (model.row_conv_length == 0) plan.end_early(model);
  plan.group_rows();
  const size_t panel = 2 * BAND * PANEL_ROWS, of_norms = (size_t)model.most([&](const Layer &layer) {
    return model.config.wide_norms != 0 ? layer.n_q() : (int64_t)layer.shape.head_dim;
  });
  const size_t row = std::max({2 * (size_t)model.config.n_embd, (size_t)model.config.n_per_layer, of_norms});
  const size_t of_states = model.recurrent.n_layer() > 0 ? state_scratch(model, plan) : 0;
  const size_t scratch =
      std::max({panel, row, attention_scratch(model, plan), expert_scratch(model, plan), of_states, adapter_scratch(model)});
  for (auto &memory : model.thread_memory) memory.resize(std::max(memory.size(), scratch));
  model.kept.resize(std::max(model.kept.size(), attention_kept(model, plan)));
  Run run(model, plan, logits, best, cancel);
  if (model.streamer.started()) begin_streaming(model, plan);
  read_rows(model, plan);
  {
    const FaultsUnblocked unblocked;
    model.pool.run([&](int thread) { run(thread); });
  }
  plan.n_folded = run.n_folded;
  model.speeds = learned_speeds(model.speeds, run.efforts());
  const bool streamed = !model.streamer.started() || model.streamer.end();
  if (model.experts.started()) model.experts.check();
  if (!streamed || run.stopped) return Outcome::cancelled;
  return run.finite ? Outcome::done : Outcome::not_finite;
}

}  // namespace edgedec
