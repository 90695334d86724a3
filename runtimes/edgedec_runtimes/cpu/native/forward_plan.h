// What a forward evaluates: its rows, where each row goes in its session's cache, and which rows each layer runs.
#pragma once
#include <vector>

#include "model.h"

namespace edgedec {

struct RowInfo {
  int32_t item, index;              // the item that the row belongs to, and its number within that item
  int32_t slot, position;           // where the cache holds its keys and values, and its position in the text
  int32_t path_begin, path_length;  // of a row of a tree: its part of Plan::paths
};

struct Plan {
  const ec_item *items;
  int32_t n_items, n_rows = 0, n_wanted = 0, most_slots = 0;
  std::vector<RowInfo> rows;
  std::vector<int32_t> paths;      // for each row of a tree: the slots from the cached prefix to the row, one row after another
  std::vector<int32_t> wanted;     // the rows whose logits are wanted
  std::vector<int32_t> first_row;  // of each item
  std::vector<std::vector<int32_t>> attn_rows, mlp_rows;  // by layer; empty where all rows run all layers
  std::vector<int32_t> all_rows;

  const std::vector<int32_t> &attn(int32_t layer) const { return attn_rows.empty() ? all_rows : attn_rows[(size_t)layer]; }
  const std::vector<int32_t> &mlp(int32_t layer) const { return mlp_rows.empty() ? all_rows : mlp_rows[(size_t)layer]; }
};

// Check the items and plan their forward (throws Invalid).
Plan make_plan(const ec_model &model, const ec_item *items, int32_t n_items);

}  // namespace edgedec
