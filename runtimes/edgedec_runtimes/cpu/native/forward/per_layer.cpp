// What layers get of a token beside the hidden state: how it is made, and the block that reads it.
#include <math.h>

#include <algorithm>

#include "forward/run.h"
#include "weights/tiles.h"

namespace edgedec {

// Make for each row what all layers get: the sum of the token's row of the table and of the normed projection of what
// enters the first layer.
void Run::make_per_layer_inputs(int thread, float *memory) {
  PerLayer &of = m_.per_layer;
  const int64_t n = c_.n_per_layer, n_all = n * c_.n_layer, n_rows = plan_.n_rows;
  const Target target = {&of.projection, of.inputs.data(), n_all};
  products(thread, norm(thread, plan_.all_rows, none_, memory), plan_.all_rows, &target, 1, memory);
  const float shrunk = 1.0f / sqrtf((float)c_.n_embd), grown = sqrtf((float)n), half = sqrtf(0.5f);
  stages_.each(thread, n_rows, [&](int64_t r) {
    const RowInfo &row = plan_.rows[(size_t)r];
    const int64_t first = (int64_t)row.group->tokens[row.in_group] * c_.n_layer;
    for (int32_t l = 0; l < c_.n_layer; ++l) {
      float *input = of.inputs.data() + r * n_all + l * n, *looked_up = of.rows.data() + r * n_all + l * n;
      if (!of.file.is_open()) tile_row(of.table.type, n, of.table.tiles, first + l, looked_up);
      for (int64_t i = 0; i < n; ++i) input[i] *= shrunk;
      k_.rms_norm(input, of.norm.data(), c_.rms_epsilon, n, memory);
      for (int64_t i = 0; i < n; ++i) input[i] = (memory[i] + looked_up[i] * grown) * half;
    }
  });
}

// Add to x what a layer makes of its part of the token, and scale x.
void Run::per_layer_block(int thread, int32_t l, const std::vector<int32_t> &rows, float *memory) {
  PerLayer &of = m_.per_layer;
  const Layer &layer = m_.layers[(size_t)l];
  const int64_t n = c_.n_per_layer, n_all = n * c_.n_layer, n_rows = (int64_t)rows.size();
  const Target target = {&layer.matrices[EC_PER_LAYER_GATE], of.gates.data(), n};
  products(thread, norm(thread, rows, none_, memory), rows, &target, 1, memory);
  stages_.each(thread, (n_rows + GROUP_ROWS - 1) / GROUP_ROWS, [&](int64_t group) {
    for (int64_t i = group * GROUP_ROWS; i < std::min(n_rows, (group + 1) * GROUP_ROWS); ++i) {
      const float *input = of.inputs.data() + rows[(size_t)i] * n_all + l * n;
      k_.gated(of.gates.data() + i * n, input, n, c_.activation, memory);
      k_.quantize(of.gated.view(), i, 0, n, memory);
    }
  });
  add_product(thread, of.gated.view(), rows, layer.matrices[EC_PER_LAYER_OUT],
              {layer.vectors[EC_PER_LAYER_POST_NORM], no_convolution_, layer.scale()}, memory);
}

}  // namespace edgedec
