#include "forward/plan.h"

#include <algorithm>

namespace edgedec {
namespace {

void add_paths(Plan &plan, const ec_item &item, int32_t first) {
  for (int32_t i = 0; i < item.n_rows; ++i) {
    RowInfo &row = plan.rows[(size_t)(first + i)];
    const int32_t parent = item.parents[i];
    row.path_begin = (int32_t)plan.paths.size();
    if (parent >= 0) {
      const RowInfo &p = plan.rows[(size_t)(first + parent)];
      for (int32_t j = 0; j < p.path_length; ++j) plan.paths.push_back(plan.paths[(size_t)(p.path_begin + j)]);
      row.path_length = p.path_length;
    }
    plan.paths.push_back(row.slot);
    row.path_length += 1;
    row.position = item.n_past + row.path_length - 1;
    row.visible = row.window_end = row.position + 1;
  }
}

// Return where the rows of each item are in a list of rows.
std::vector<RowRange> ranges_of(const Plan &plan, const std::vector<int32_t> &rows) {
  std::vector<RowRange> ranges;
  for (size_t i = 0; i < rows.size(); ++i) {
    const bool is_next = i > 0 && plan.rows[(size_t)rows[i]].item == plan.rows[(size_t)rows[i - 1]].item;
    if (!is_next) ranges.push_back({i, i, i});
    ranges.back().end = i + 1;
  }
  return ranges;
}

}  // namespace

void check_item(const ec_model &model, const ec_item &item) {
  const ec_config &c = model.config;
  require(item.session != nullptr && item.session->model == &model, "an item's session belongs to another model");
  require(item.n_rows > 0 && item.n_past >= 0, "an item has no rows, or a negative n_past");
  require((int64_t)item.n_past + item.n_rows <= item.session->cache.n_ctx(), "an item is longer than its session");
  require(item.n_groups == 1 || (item.n_groups > 1 && !model.remembers() && item.block == EC_BLOCK_NONE),
          "rows with states, and those of a block, are one group");
  int64_t n_rows = 0;
  int32_t first_layer = c.n_layer;
  for (int32_t g = 0; g < item.n_groups; ++g) {
    const ec_group &group = item.groups[g];
    require(group.n_rows > 0, "a group has no rows");
    require((group.tokens == nullptr) != (group.vectors == nullptr), "a group has either tokens or vectors");
    require(group.first_layer >= 0 && group.first_layer <= c.n_layer, "first_layer is out of range");
    require(group.vectors != nullptr || group.first_layer == 0, "tokens begin with layer 0");
    require(group.vectors == nullptr || c.n_per_layer == 0, "the layers of this model read tokens");
    require(group.n_added >= 0 && group.n_added <= c.n_layer, "more is added than there are layers");
    require(group.n_added == 0 || (group.vectors != nullptr && group.first_layer == 0),
            "only vectors bring what is added");
    n_rows += group.n_rows;
    first_layer = std::min(first_layer, group.first_layer);
    for (int32_t i = 0; group.tokens != nullptr && n_rows <= item.n_rows && i < group.n_rows; ++i)
      require(group.tokens[i] >= 0 && group.tokens[i] < c.n_vocab, "a token is out of range");
  }
  require(n_rows == item.n_rows, "the groups have another number of rows than their item");
  for (int32_t i = 0; item.parents != nullptr && i < item.n_rows; ++i)
    require(item.parents[i] >= -1 && item.parents[i] < i, "a parent is out of range");
  const bool is_behind = item.n_past >= item.n_source, is_whole = item.n_past == 0 && item.n_rows >= item.n_source;
  require(model.has_encoder() == (item.n_source > 0) && item.n_source >= 0 && (is_behind || is_whole),
          "rows of a source come all together, in a model with an encoder alone");
  require(is_behind || (item.parents == nullptr && item.block == EC_BLOCK_NONE), "a source is no tree and no block");
  require(!model.has_encoder() || item.n_mass == 0, "the attention to a source can't be added up");
  require(item.block >= EC_BLOCK_NONE && item.block <= EC_BLOCK_MUTUAL, "no such block");
  require(item.block != EC_BLOCK_MUTUAL || !model.remembers(), "rows with states can't see rows behind them");
  require(item.block == EC_BLOCK_NONE || item.parents == nullptr, "a block is no tree");
  require(item.n_wanted >= 0 && item.n_taps >= 0, "a count is negative");
  for (int32_t i = 0; i < item.n_wanted; ++i)
    require(item.wanted[i] >= 0 && item.wanted[i] < item.n_rows && item.n_past + item.wanted[i] >= item.n_source,
            "a wanted row is out of range, or of a source");
  for (int32_t i = 0; i < item.n_taps; ++i)
    require(item.taps[i] >= first_layer && item.taps[i] < c.n_layer, "a tap is out of range");
  if (item.n_mass == 0) return;
  require(item.n_mass > 0 && item.parents == nullptr, "attention is added up for the rows of a chain");
  require(item.mass_layers != nullptr && item.mass_weights != nullptr && item.mass != nullptr, "no room for attention");
  require(item.n_mass_slots >= item.n_past + item.n_rows, "attention has fewer slots than the item");
  for (int32_t i = 0; i < item.n_mass; ++i) {
    require(item.mass_layers[i] >= first_layer && item.mass_layers[i] < c.n_layer, "a layer is out of range");
    const Layer &layer = model.layers[(size_t)item.mass_layers[i]];
    require(!layer.attends() || layer.shape.n_head <= item.n_mass_heads, "a layer has more heads than attention");
  }
}

void Plan::end_early(const ec_model &model) {
  if (adds_mass || model.has_encoder()) return;  // all rows attend in all layers, or only in those of their role
  const int32_t n_layer = n_storing = model.config.n_layer;
  const auto stores = [&](const Layer &layer) { return layer.stores_kv || layer.convolves() || layer.recurs(); };
  // Where rows leave layers out, and nothing is read of any row, a layer that no row runs stores nothing either.
  const auto runs = [&](int32_t l) { return attn_rows.empty() || !attn_rows[(size_t)l].empty(); };
  const bool may_end = attn_rows.empty() || (wanted.empty() && taps.empty());
  while (may_end && n_storing > 1 && !(runs(n_storing - 1) && stores(model.layers[(size_t)n_storing - 1]))) --n_storing;
  last_layer = n_storing - 1;
  std::vector<char> is_read((size_t)n_rows, 0);
  for (int32_t r : wanted) is_read[(size_t)r] = 1;
  for (const Tap &tap : taps) {  // one whose rows go on anyway leaves the others out
    const auto first = is_read.begin() + tap.first_row;
    if (std::count(first, first + tap.n_rows, 0) > 0)
      last_layer = std::min(std::max(last_layer, tap.layer + 1), n_layer - 1);
  }
  for (const Tap &tap : taps)
    if (tap.layer >= last_layer) std::fill_n(is_read.begin() + tap.first_row, tap.n_rows, 1);
  if (std::all_of(is_read.begin(), is_read.end(), [](char c) { return c != 0; })) return;
  // The queries of an item go on from the first row that is read to the last one: attention takes ranges of rows.
  for (const RowRange &range : std::vector<RowRange>(ranges(last_layer))) {
    size_t begin = range.begin, end = range.end;
    while (begin < end && !is_read[(size_t)attn(last_layer)[begin]]) ++begin;
    while (begin < end && !is_read[(size_t)attn(last_layer)[end - 1]]) --end;
    if (begin == end) continue;
    last_ranges.push_back({last_attn.size(), last_attn.size() + end - begin, begin});
    behind_ranges.push_back({last_attn.size(), last_attn.size() + end - begin, last_attn.size()});
    last_attn.insert(last_attn.end(), attn(last_layer).begin() + (int64_t)begin,
                     attn(last_layer).begin() + (int64_t)end);
  }
  for (int32_t r : mlp(last_layer))
    if (is_read[(size_t)r]) last_mlp.push_back(r);
  ends_early = true;
}

void Plan::group_rows() {
  if (ends_early) last_steps = attention_steps(*this, last_attn, last_ranges);
  if (ends_early) behind_steps = attention_steps(*this, last_attn, behind_ranges);
  if (attn_rows.empty()) all_steps = attention_steps(*this, all_rows, all_ranges);
  for (size_t l = 0; l < attn_rows.size(); ++l)
    attn_steps.push_back(attention_steps(*this, attn_rows[l], attn_ranges[l]));
}

bool Plan::has_steps() const {
  const auto several = [](const AttentionSteps &steps) { return steps.size() > 1; };
  return several(all_steps) || several(last_steps) || several(behind_steps) || std::any_of(attn_steps.begin(), attn_steps.end(), several);
}

Plan make_plan(const ec_model &model, const ec_item *items, int32_t n_items) {
  Plan plan{};
  plan.items = items;
  plan.n_items = n_items;
  bool subset = model.has_encoder();
  for (int32_t i = 0; i < n_items; ++i) {
    const ec_item &item = items[i];
    check_item(model, item);
    for (int32_t j = 0; j < i; ++j)
      if (items[j].session == item.session) throw Invalid("a session stands twice in one forward");
    if (item.n_rows > model.max_rows - plan.n_rows) throw Invalid("a forward has too many rows");
    plan.first_row.push_back(plan.n_rows);
    const bool of_row = item.block == EC_BLOCK_NONE || item.block == EC_BLOCK_MUTUAL;
    const ec_group *group = item.groups;
    for (int32_t r = 0, in_group = 0; r < item.n_rows; ++r, ++in_group) {
      if (in_group == group->n_rows) ++group, in_group = 0;
      const int32_t position = item.n_past + r,
                    visible = item.block >= EC_BLOCK_WHOLE ? item.n_past + item.n_rows
                              : std::max(position + 1, item.n_source),
                    window_end = of_row ? position + 1 : item.n_past;
      plan.rows.push_back({i, r, group, in_group, position, position, visible, window_end, 0, 0});
      plan.all_rows.push_back(plan.n_rows + r);
    }
    if (item.parents != nullptr) add_paths(plan, item, plan.n_rows);
    if (model.recurrent.n_layer() > 0) {
      const int32_t n = item.parents != nullptr ? item.n_rows : 0;
      plan.tree_steps.push_back(tree_steps(item.parents, n));
      plan.n_kept_states = std::max(plan.n_kept_states, n_kept(plan.tree_steps.back()));
    }
    for (int32_t t = 0; t < item.n_taps; ++t)
      plan.taps.push_back({item.taps[t], plan.n_rows, item.n_rows,
                           item.tapped + (int64_t)t * item.n_rows * model.config.n_embd, model.config.n_embd});
    for (int32_t w = 0; w < item.n_wanted; ++w) plan.wanted.push_back(plan.n_rows + item.wanted[w]);
    plan.n_rows += item.n_rows;
    plan.most_slots = std::max(plan.most_slots, item.n_past + item.n_rows);
    plan.adds_mass = plan.adds_mass || item.n_mass > 0;
    for (int32_t g = 0; g < item.n_groups; ++g) {
      const ec_group &each = item.groups[g];
      plan.n_added = std::max(plan.n_added, each.n_added);
      subset = subset || each.attn != nullptr || each.mlp != nullptr || each.first_layer > 0;
    }
  }
  plan.n_wanted = (int32_t)plan.wanted.size();
  plan.all_ranges = ranges_of(plan, plan.all_rows);
  if (!subset) return plan;
  plan.attn_rows.resize((size_t)model.config.n_layer);
  plan.mlp_rows.resize((size_t)model.config.n_layer);
  for (const Layer &layer : model.layers)
    if (model.has_encoder()) plan.only_stores.push_back(layer.only_stores());
  for (int32_t l = 0; l < model.config.n_layer; ++l)
    for (int32_t r = 0; r < plan.n_rows; ++r) {
      const RowInfo &row = plan.rows[(size_t)r];
      const ec_group &group = *row.group;
      const Layer &layer = model.layers[(size_t)l];
      if (l < group.first_layer || !layer.takes(row.position < items[row.item].n_source)) continue;
      const int32_t source = layer.attends() ? layer.shape.kv_from : l;
      // A row that leaves a layer out also leaves out the attention of those layers that read its keys and values.
      const bool has_kv = group.attn == nullptr || source < group.first_layer || group.attn[source];
      if (group.attn == nullptr || (group.attn[l] && has_kv)) plan.attn_rows[(size_t)l].push_back(r);
      if (group.mlp == nullptr || group.mlp[l]) plan.mlp_rows[(size_t)l].push_back(r);
    }
  for (const std::vector<int32_t> &rows : plan.attn_rows) plan.attn_ranges.push_back(ranges_of(plan, rows));
  return plan;
}

}  // namespace edgedec
