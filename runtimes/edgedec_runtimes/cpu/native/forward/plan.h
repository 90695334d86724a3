// What a forward evaluates: its rows, where each row goes in its session's cache, and which rows each layer runs.
#pragma once
#include <algorithm>
#include <vector>

#include "forward/attention_groups.h"
#include "forward/model.h"
#include "forward/tree_order.h"

namespace edgedec {

struct RowInfo {
  int32_t item, index;              // the item that the row belongs to, and its number within that item
  const ec_group *group;            // the group of the item that the row belongs to, and its number within that group
  int32_t in_group;
  int32_t slot, position;           // where the cache holds its keys and values, and its position in the text
  int32_t visible, window_end;      // it sees the positions below `visible`, of a window those that end with window_end
  int32_t path_begin, path_length;  // of a row of a tree: its part of Plan::paths
};

struct RowRange {
  size_t begin, end;  // of a list of rows
  size_t first_query; // where the list of rows that have queries holds the first of these rows
};

// Rows that enter a layer with what a head makes of states: base + kept * s + matrix s, where s is the state with which
// another row enters it.
struct MadeRows {
  int32_t layer = 0, n = 0;       // n rows at most are made of one
  Matrix matrix{};                // [n * n_embd][n_embd]; no rows: there is none
  std::vector<float> kept, base;  // [n * n_embd], or empty
  // --- memory of a forward ---
  ActivationBuffer sources, to_output;  // what the matrix reads, and the output matrix
  std::vector<float> products;          // [sources][n * n_embd]
  void reserve(size_t n_sources) { products.resize(std::max(products.size(), n_sources * (size_t)matrix.n_rows)); }
};

struct Plan {
  const ec_item *items;
  int32_t n_items, n_rows = 0, n_wanted = 0, most_slots = 0;
  std::vector<RowInfo> rows;
  std::vector<int32_t> paths;      // for each row of a tree in turn: the slots from the cached prefix to the row
  std::vector<int32_t> wanted;     // the rows whose logits are wanted
  std::vector<int32_t> first_row;  // of each item
  std::vector<std::vector<int32_t>> attn_rows, mlp_rows;  // by layer; empty where all rows run all layers
  std::vector<int32_t> all_rows;
  std::vector<RowRange> all_ranges;                // the rows of each item among all_rows
  std::vector<std::vector<RowRange>> attn_ranges;  // by layer: the rows of each item among attn_rows
  // Of the last layer that stores something, where nobody reads what leaves it for some rows: these only write their
  // keys and values, and are in no layer behind it.
  bool ends_early = false;
  std::vector<int32_t> last_attn, last_mlp;
  std::vector<char> only_stores;  // by layer, whether no row goes on behind its keys and values; empty: in all they do
  std::vector<int32_t> no_rows;
  std::vector<RowRange> last_ranges, behind_ranges;
  // How the rows attend: of the lists all_rows, attn_rows by layer, and last_attn in that layer and behind it.
  AttentionSteps all_steps, last_steps, behind_steps;
  std::vector<AttentionSteps> attn_steps;
  // Of items that are trees, where layers have recurrent states: the order of their rows, and how many states it keeps.
  std::vector<std::vector<TreeStep>> tree_steps;
  int32_t n_kept_states = 0;
  int32_t n_added = 0;   // the most of a group
  bool adds_mass = false;  // whether an item wants attention added up
  int32_t n_folded = 0;  // after the forward: how many layers have folded what their states had to fold
  // Where the states after a layer are copied to, row by row; layer -1 stands for the embeddings.
  struct Tap {
    int32_t layer, first_row, n_rows;
    float *out;
    int64_t stride;
  };
  std::vector<Tap> taps;
  // Rows that are made of others in the forward.
  struct Made {
    int32_t row, source, number;  // its row, the place of its source in made_of, which of the rows of that source it is
  };
  MadeRows *made = nullptr;
  std::vector<Made> made_rows;
  std::vector<int32_t> made_of;  // rows

  const std::vector<int32_t> &attn(int32_t layer) const {
    if (is_behind(layer)) return last_attn;
    return attn_rows.empty() ? all_rows : attn_rows[(size_t)layer];
  }
  // Those rows of attn(layer) that go on behind their keys and values.
  const std::vector<int32_t> &attending(int32_t layer) const {
    if (!only_stores.empty() && only_stores[(size_t)layer] != 0) return no_rows;
    return is_cut(layer) ? last_attn : attn(layer);
  }
  // The rows of each item among attending(layer).
  const std::vector<RowRange> &ranges(int32_t layer) const {
    if (is_cut(layer)) return last_ranges;
    if (is_behind(layer)) return behind_ranges;
    return attn_ranges.empty() ? all_ranges : attn_ranges[(size_t)layer];
  }
  // Where the rows attn(layer) have row i of attending(layer).
  size_t query_of(int32_t layer, size_t i) const {
    for (const RowRange &range : ranges(layer))
      if (i < range.end) return range.first_query + i - range.begin;
    return i;
  }
  // Where attn(layer) has the rows of an item.
  RowRange range_of(int32_t layer, int32_t item) const {
    for (const RowRange &range : attn_ranges.empty() ? all_ranges : attn_ranges[(size_t)layer])
      if (rows[(size_t)attn(layer)[range.begin]].item == item) return range;
    return {0, 0, 0};
  }
  const AttentionSteps &steps(int32_t layer) const {
    if (is_cut(layer)) return last_steps;
    if (is_behind(layer)) return behind_steps;
    return attn_steps.empty() ? all_steps : attn_steps[(size_t)layer];
  }
  // Whether rows of some layer attend in several steps.
  bool has_steps() const;
  int64_t n_spans() const { return (most_slots + SPAN_TOKENS - 1) / SPAN_TOKENS; }
  const std::vector<int32_t> &mlp(int32_t layer) const {
    if (is_cut(layer) || is_behind(layer)) return last_mlp;
    return mlp_rows.empty() ? all_rows : mlp_rows[(size_t)layer];
  }
  // Let the last layers leave out what nobody reads; all taps must be known.
  void end_early(const ec_model &model);
  // Find the rows that attend together; the sessions' memory must be made.
  void group_rows();

 private:
  bool is_cut(int32_t layer) const { return ends_early && layer == last_layer && layer < n_storing; }
  bool is_behind(int32_t layer) const { return ends_early && layer >= std::max(last_layer, n_storing); }
  int32_t last_layer = 0, n_storing = 0;  // no layer from number n_storing on stores anything
};

// Throw Invalid where an item can't be evaluated.
void check_item(const ec_model &model, const ec_item &item);
// Check the items and plan their forward (throws Invalid).
Plan make_plan(const ec_model &model, const ec_item *items, int32_t n_items);

}  // namespace edgedec
