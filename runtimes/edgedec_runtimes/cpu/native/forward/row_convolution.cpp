// Convolutions over the rows of an item before and behind a block of a layer (RowConvolution). They read rows of one
// forward only: what stands before an item's first row counts as 0.
#include <algorithm>

#include "forward/run.h"

namespace edgedec {

// Normalize what a block reads, and convolve it where the layer does so. The rows of an item are all among `rows` then.
const Activations &Run::block_input(int thread, const RowConvolution &before, const std::vector<int32_t> &rows,
                                    const std::vector<float> &weight, float *memory) {
  if (!before.is_used()) return norm(thread, rows, weight, memory);
  const int64_t n = c_.n_embd, n_rows = (int64_t)rows.size();
  stages_.each(thread, n_rows, [&](int64_t i) {
    float *normed = m_.entering.data() + i * n;
    k_.rms_norm(m_.x.data() + rows[(size_t)i] * n, weight.data(), c_.rms_epsilon, n, normed);
    k_.quantize(m_.normed.view(), i, 0, n, normed);
  });
  const Target target = {&before.kernels, m_.kernels_of_rows.data(), m_.n_row_kernels()};
  products(thread, m_.normed.view(), rows, &target, 1, memory);
  stages_.each(thread, n_rows, [&](int64_t i) {
    convolve_row(before, 0, rows, i, m_.entering.data(), memory);
    k_.quantize(m_.normed.view(), i, 0, n, memory);
  });
  return m_.normed.view();
}

// Convolve row i of `from`, [rows][n_embd], before the block (side 0) or behind it (side 1). An element of the result
// is summed up from the row itself backwards, without any fusing.
void Run::convolve_row(const RowConvolution &convolution, int side, const std::vector<int32_t> &rows, int64_t i,
                       const float *from, float *out) const {
  const int64_t n = c_.n_embd, group = m_.row_conv_group, length = m_.row_conv_length;
  const int64_t n_seen = std::min<int64_t>(length, plan_.rows[(size_t)rows[(size_t)i]].index + 1);
  const float *kernels = m_.kernels_of_rows.data() + i * m_.n_row_kernels() + side * length * (n / group);
  const float *base = convolution.base.data() + side * length * n;
  std::fill_n(out, n, 0.0f);
  for (int64_t back = 0; back < n_seen; ++back, kernels += n / group, base += n) {
    const float *row = from + (i - back) * n;
    for (int64_t g = 0; g < n / group; ++g)
      for (int64_t j = g * group; j < (g + 1) * group; ++j) out[j] += (base[j] + kernels[g]) * row[j];
  }
}

}  // namespace edgedec
