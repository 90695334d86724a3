// Drafting a tree with a head: the nodes of a level are scored by one forward over all nodes so far.
#include <string.h>

#include <algorithm>
#include <numeric>

#include "draft_head/head.h"

namespace edgedec {
namespace {

void require(bool holds, const char *message) {
  if (!holds) throw Invalid(message);
}

}  // namespace

bool HeadState::read_branches(const int32_t *tokens, const int32_t *parents, int32_t n, int32_t n_new, float *scores) {
  const size_t d = (size_t)head_.config.n_embd;
  const int32_t n_known = n - n_new;
  require(n_drafted_ == 0, "no draft was begun");
  require(n_new > 0 && n_known >= 0 && branch_outputs_.size() >= (size_t)n_known * d, "the nodes before were not read");
  for (int32_t i = 0; i < n; ++i)
    require(tokens[i] >= 0 && tokens[i] < head_.target.config.n_vocab && parents[i] >= -1 && parents[i] < i,
            "a token or a parent is out of range");
  if (n > head_.net.max_rows || n_pairs_ + n > kv_.cache.n_ctx()) return false;
  branch_inputs_.resize((size_t)n * 2 * d);
  head_.embed(tokens + n_known, n_new, branch_inputs_.data() + (size_t)n_known * 2 * d, (int64_t)(2 * d));
  for (int32_t i = n_known; i < n; ++i) {
    require(parents[i] < n_known, "a new node follows another one");
    const float *above = parents[i] < 0 ? outputs_.data() : branch_outputs_.data() + (size_t)parents[i] * d;
    memcpy(branch_inputs_.data() + ((size_t)i * 2 + 1) * d, above, d * sizeof(float));
  }
  const int32_t layer = 0;
  std::vector<float> made((size_t)n * d);
  std::vector<int32_t> wanted((size_t)n_new);
  std::iota(wanted.begin(), wanted.end(), n_known);
  ec_item item{};
  item.session = &kv_, item.n_past = n_pairs_, item.n_rows = n, item.hidden = branch_inputs_.data(), item.parents = parents;
  item.n_wanted = n_new, item.wanted = wanted.data(), item.n_taps = 1, item.taps = &layer, item.tapped = made.data();
  if (forward(head_.net, &item, 1, scores, nullptr, nullptr) != Outcome::done)
    throw NotFinite("the draft head's scores are not finite");
  branch_outputs_.resize((size_t)n * d);
  for (int32_t i = n_known; i < n; ++i) {
    const float *row = made.data() + (size_t)i * d;
    float *out = branch_outputs_.data() + (size_t)i * d;
    if (head_.config.feeds_back_normed)
      head_.net.kernels->rms_norm(row, head_.net.output_norm.data(), head_.config.rms_epsilon, (int64_t)d, out);
    else
      memcpy(out, row, d * sizeof(float));
  }
  return true;
}

}  // namespace edgedec
