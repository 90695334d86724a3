// One forward: its entry, and all stages but those of the attention block.
#include <math.h>
#include <string.h>

#include <algorithm>

#include "forward_run.h"
#include "tiles.h"

namespace edgedec {
namespace {

constexpr int PIECES_PER_THREAD = 4;
constexpr int OWN_ROWS = 32;  // the most rows that all threads together normalize where each does so for itself
constexpr int64_t BAND_ELEMENTS = 1 << 18;  // the most elements of a band of activations: they stay in the L2 cache

int64_t band_rows(int64_t n_cols) {
  const int64_t rows = BAND_ELEMENTS / n_cols / GROUP_ROWS * GROUP_ROWS;
  return std::max<int64_t>(GROUP_ROWS, std::min<int64_t>(BAND, rows));
}

int64_t panels(const Matrix &w) { return (w.n_rows + PANEL_ROWS - 1) / PANEL_ROWS; }

// Whether all values are finite: no exponent has all its bits set.
bool all_finite(const float *values, int64_t n) {
  uint32_t found = 0;
  for (int64_t i = 0; i < n; ++i) {
    uint32_t bits;
    memcpy(&bits, values + i, sizeof bits);
    found |= (uint32_t)((bits & 0x7f800000u) == 0x7f800000u);
  }
  return found == 0;
}

void fill_rope(float *cos_sin, const std::vector<double> &frequencies, int32_t position) {
  const size_t half = frequencies.size();
  for (size_t i = 0; i < half; ++i) {
    cos_sin[i] = (float)cos(frequencies[i] * position);
    cos_sin[half + i] = (float)sin(frequencies[i] * position);
  }
}

// Tell the streamer which parts of the weights the forward will fetch.
void begin_streaming(ec_model &model, const Plan &plan) {
  std::vector<int32_t> order;
  for (int32_t l = 0; l < model.config.n_layer; ++l) {
    if (!plan.attn(l).empty()) order.insert(order.end(), {Streamer::part(EC_PART_QKV, l), Streamer::part(EC_PART_ATTN_OUT, l)});
    if (!plan.mlp(l).empty()) order.insert(order.end(), {Streamer::part(EC_PART_GATE_UP, l), Streamer::part(EC_PART_DOWN, l)});
  }
  for (int32_t p = model.streamer.first_head_part(); plan.n_wanted > 0 && p < model.streamer.n_parts(); ++p) order.push_back(p);
  model.streamer.begin(order);
}

// Read the rows of the embedding matrix that the forward begins with from their file.
void read_rows(ec_model &model, const Plan &plan) {
  for (int32_t r = 0; r < plan.n_rows; ++r) {
    const RowInfo &row = plan.rows[(size_t)r];
    const ec_item &item = plan.items[row.item];
    if (item.tokens == nullptr) continue;
    float *x = model.x.data() + (int64_t)r * model.config.n_embd;
    if (model.streamer.started())
      model.streamer.embed(item.tokens[row.index], x);
    else
      model.row_file.read(item.tokens[row.index], x);
  }
}

}  // namespace

void Run::operator()(int thread) {
  float *memory = m_.thread_memory[(size_t)thread].data();
  embed(thread);
  next_stage(thread, EC_OP_OTHER);
  for (int32_t l = 0; l < c_.n_layer; ++l) {
    if (!attention_block(thread, l, memory) || !mlp_block(thread, l, memory)) return;
    if (thread == 0) copy_taps(l);  // before it ends a stage that changes x
  }
  head(thread, memory);
}

// Thread 0 decides at the beginning of a block whether the forward stops. All threads read so after the block's products,
// and there is another barrier before the next decision.
void Run::look_for_cancel(int thread) {
  if (thread == 0 && cancel_ != nullptr && *cancel_ != 0) stopped = true;
}

// End a stage: all threads wait for one another, and the counter of pieces starts again.
void Run::next_stage(int thread, int operation) {
  m_.pool.barrier();
  // Three counters take turns, so that no thread uses the one that is reset.
  const int64_t stage = ++stages_[(size_t)thread].number;
  if (thread != 0) return;
  counters_[(stage + 1) % 3].reset();
  const auto now = std::chrono::steady_clock::now();
  m_.seconds[operation] += std::chrono::duration<double>(now - last_).count();
  last_ = now;
}

void Run::embed(int thread) {
  for (int r; (r = take(thread)) < plan_.n_rows;) {
    const RowInfo &row = plan_.rows[(size_t)r];
    const ec_item &item = plan_.items[row.item];
    float *x = m_.x.data() + (int64_t)r * c_.n_embd;
    if (item.hidden != nullptr) {
      memcpy(x, item.hidden + (int64_t)row.index * c_.n_embd, (size_t)c_.n_embd * sizeof(float));
    } else {
      if (!streamed_ && !m_.row_file.is_open())
        tile_row(m_.token_embd.type, c_.n_embd, m_.token_embd.tiles, item.tokens[row.index], x);
      if (c_.embedding_scale != 1.0f)
        for (int32_t i = 0; i < c_.n_embd; ++i) x[i] *= c_.embedding_scale;
    }
    fill_rope(m_.cos_sin[0].data() + (int64_t)r * c_.n_rot, m_.rope_frequencies, row.position);
    if (c_.sliding_pattern > 0)
      fill_rope(m_.cos_sin[1].data() + (int64_t)r * c_.n_rot, m_.rope_frequencies_sliding, row.position);
    item.session->cache.write_rotation(row.slot, m_.cos_sin[0].data() + (int64_t)r * c_.n_rot);
  }
}

// Normalize the given rows of x, and return them as activations, in order. A few rows are normalized by each thread for
// itself, which takes less time than to wait for the others and to fetch what they wrote. Pieces are whole groups of rows,
// as the rows of a group share cache lines.
const Activations &Run::norm(int thread, const std::vector<int32_t> &rows, const std::vector<float> &weight, float *memory) {
  const int n = (int)rows.size();
  const auto group = [&](const Activations &to, int first) {
    for (int i = first; i < std::min(n, first + GROUP_ROWS); ++i) {
      k_.rms_norm(m_.x.data() + (int64_t)rows[(size_t)i] * c_.n_embd, weight.data(), c_.rms_epsilon, c_.n_embd, memory);
      k_.quantize(to, i, 0, c_.n_embd, memory);
    }
  };
  if (n <= GROUP_ROWS && n * m_.pool.size() <= OWN_ROWS) {
    group(m_.own_normed[(size_t)thread].view(), 0);
    return m_.own_normed[(size_t)thread].view();
  }
  for (int first; (first = take(thread) * GROUP_ROWS) < n;) group(m_.normed.view(), first);
  next_stage(thread, EC_OP_NORM);
  return m_.normed.view();
}

// Call work(panel, begin, end) for all panels and bands of rows. A piece is several panels that follow one another, so that
// memory is read in long runs; there are a few pieces for each thread, as some cores may be busy with other work.
template <class Work>
void Run::each_panel(int thread, int64_t n_panels, int64_t n_cols, int64_t n_rows, Work work) {
  const int64_t band = band_rows(n_cols), n_bands = (n_rows + band - 1) / band;
  const int64_t run = std::max<int64_t>(1, n_panels / (PIECES_PER_THREAD * m_.pool.size()));
  const int64_t n_runs = (n_panels + run - 1) / run;
  for (int64_t piece; (piece = take(thread)) < n_runs * n_bands;) {
    const int64_t first = piece % n_runs * run, last = std::min(first + run, n_panels);
    const int64_t begin = piece / n_runs * band, end = std::min(begin + band, n_rows);
    for (int64_t panel = first; panel < last; ++panel) work(panel, begin, end);
  }
}
// Multiply several matrices with the activations that they share, panel by panel, and write or add the products.
void Run::products(int thread, int operation, const Activations &a, int64_t n_rows, const Target *targets, int n_targets,
              float *memory, const std::vector<int32_t> *add_to) {
  int64_t n_panels = 0;
  for (int t = 0; t < n_targets; ++t) n_panels += panels(*targets[t].matrix);
  each_panel(thread, n_panels, a.n, n_rows, [&](int64_t panel, int64_t begin, int64_t end) {
    const Target *target = targets;
    while (panel >= panels(*target->matrix)) panel -= panels(*target++->matrix);
    const Matrix &w = *target->matrix;
    const int64_t tile = panel * PANEL_TILES, last = std::min(tile + PANEL_TILES, (w.n_rows + 15) / 16);
    const int64_t columns = std::min<int64_t>(PANEL_ROWS, w.n_rows - panel * PANEL_ROWS);
    float *out = target->out + panel * PANEL_ROWS;
    const bool in_place = add_to == nullptr && columns == PANEL_ROWS;  // a shorter panel's tiles may be wider than the matrix
    if (in_place) k_.matmul(w, tile, last, a, begin, end, out + begin * target->stride, target->stride);
    else k_.matmul(w, tile, last, a, begin, end, memory, PANEL_ROWS);
    for (int64_t r = begin; r < end; ++r) {
      float *to = out + (add_to != nullptr ? (*add_to)[(size_t)r] : r) * target->stride;
      const float *from = in_place ? to : memory + (r - begin) * PANEL_ROWS;
      if (operation == EC_OP_HEAD && !all_finite(from, columns)) finite.store(false, std::memory_order_relaxed);
      if (add_to != nullptr) k_.add(to, from, columns);
      else if (!in_place) memcpy(to, from, (size_t)columns * sizeof(float));
    }
  });
  next_stage(thread, operation);
}

// Add the product of a matrix to x, after a norm where the architecture has one.
void Run::add_product(int thread, int operation, const Activations &a, const std::vector<int32_t> &rows, const Matrix &w,
                 const std::vector<float> &post_norm, float *memory) {
  const int64_t n = (int64_t)rows.size();
  if (post_norm.empty()) {
    const Target target = {&w, m_.x.data(), c_.n_embd};
    products(thread, operation, a, n, &target, 1, memory, &rows);
    return;
  }
  const Target target = {&w, m_.branch.data(), c_.n_embd};
  products(thread, operation, a, n, &target, 1, memory);
  for (int i; (i = take(thread)) < n;) {
    k_.rms_norm(m_.branch.data() + (int64_t)i * c_.n_embd, post_norm.data(), c_.rms_epsilon, c_.n_embd, memory);
    k_.add(m_.x.data() + (int64_t)rows[(size_t)i] * c_.n_embd, memory, c_.n_embd);
  }
  next_stage(thread, EC_OP_NORM);
}

bool Run::mlp_block(int thread, int32_t l, float *memory) {
  const std::vector<int32_t> &rows = plan_.mlp(l);
  if (rows.empty()) return true;
  if (!fetch(thread, EC_PART_GATE_UP, l)) return false;
  const Layer &layer = m_.layers[(size_t)l];
  look_for_cancel(thread);
  const Activations &normed = norm(thread, rows, layer.vectors[EC_FFN_NORM], memory);
  gate_and_up(thread, layer, normed, (int64_t)rows.size(), memory);
  if (stopped) return false;
  release(thread, EC_PART_GATE_UP, l);
  if (!fetch(thread, EC_PART_DOWN, l)) return false;
  add_product(thread, EC_OP_DOWN, m_.gated.view(), rows, layer.matrices[EC_DOWN], layer.vectors[EC_POST_FFN_NORM],
              memory);
  release(thread, EC_PART_DOWN, l);
  return true;
}

// Multiply gate and up. A panel of both gives 32 columns of the gated activations, one block to quantize.
void Run::gate_and_up(int thread, const Layer &layer, const Activations &normed, int64_t n_rows, float *memory) {
  const Matrix &gate = layer.matrices[EC_GATE], &up = layer.matrices[EC_UP];
  float *gates = memory, *ups = memory + BAND * PANEL_ROWS;
  each_panel(thread, panels(gate), gate.n_cols, n_rows, [&](int64_t panel, int64_t begin, int64_t end) {
    const int64_t tile = panel * PANEL_TILES, last = std::min(tile + PANEL_TILES, (gate.n_rows + 15) / 16);
    k_.matmul(gate, tile, last, normed, begin, end, gates, PANEL_ROWS);
    k_.matmul(up, tile, last, normed, begin, end, ups, PANEL_ROWS);
    const int64_t columns = std::min<int64_t>(PANEL_ROWS, gate.n_rows - panel * PANEL_ROWS);
    for (int64_t r = begin; r < end; ++r) {
      float *g = gates + (r - begin) * PANEL_ROWS;
      k_.gated(g, ups + (r - begin) * PANEL_ROWS, columns, c_.gelu != 0, g);
      k_.quantize(m_.gated.view(), r, panel * PANEL_ROWS, columns, g);
    }
  });
  next_stage(thread, EC_OP_GATE_UP);
}

// Copy the states after layer l that are wanted. One thread does so, while the others at most read x.
void Run::copy_taps(int32_t l) {
  for (int32_t i = 0; i < plan_.n_items; ++i) {
    const ec_item &item = plan_.items[i];
    for (int32_t t = 0; t < item.n_taps; ++t)
      if (item.taps[t] == l) {
        const int64_t n = (int64_t)item.n_rows * c_.n_embd;
        memcpy(item.tapped + t * n, m_.x.data() + (int64_t)plan_.first_row[(size_t)i] * c_.n_embd, (size_t)n * 4);
      }
  }
}

void Run::head(int thread, float *memory) {
  if (plan_.n_wanted == 0) return;
  if (streamed_) return head_in_parts(thread, memory);
  const Target target = {&m_.output, logits_, c_.n_vocab};
  const Activations &normed = norm(thread, plan_.wanted, m_.output_norm, memory);
  products(thread, EC_OP_HEAD, normed, plan_.n_wanted, &target, 1, memory);
}

void Run::head_in_parts(int thread, float *memory) {
  Streamer &streamer = m_.streamer;
  const Activations &normed = norm(thread, plan_.wanted, m_.output_norm, memory);
  for (int32_t part = streamer.first_head_part(); part < streamer.n_parts(); ++part) {
    if (!fetch(thread, part)) return;
    const Target target = {&streamer.head(part), logits_ + streamer.head_begin(part), c_.n_vocab};
    products(thread, EC_OP_HEAD, normed, plan_.n_wanted, &target, 1, memory);
    release(thread, part);
  }
}

Outcome forward(ec_model &model, const ec_item *items, int32_t n_items, float *logits, const volatile int32_t *cancel) {
  if (!model.finished) throw Invalid("the model is not finished");
  const Plan plan = make_plan(model, items, n_items);
  if (plan.n_wanted > model.max_rows) throw Invalid("too many rows of logits are wanted");
  for (int32_t i = 0; i < n_items; ++i)
    items[i].session->cache.prepare(items[i].n_past, items[i].n_past + items[i].n_rows);
  const size_t panel = 2 * BAND * PANEL_ROWS, row = (size_t)std::max(model.config.n_embd, model.config.head_dim);
  const size_t scratch = std::max({panel, row, attention_scratch(model, plan)});
  for (auto &memory : model.thread_memory) memory.resize(std::max(memory.size(), scratch));
  model.kept.resize(std::max(model.kept.size(), attention_kept(model, plan)));
  Run run(model, plan, logits, cancel);
  if (model.streamer.started()) begin_streaming(model, plan);
  if (model.streamer.started() || model.row_file.is_open()) read_rows(model, plan);
  {
    const FaultsUnblocked unblocked;
    model.pool.run([&](int thread) { run(thread); });
  }
  if ((model.streamer.started() && !model.streamer.end()) || run.stopped) return Outcome::cancelled;
  return run.finite ? Outcome::done : Outcome::not_finite;
}

}  // namespace edgedec
