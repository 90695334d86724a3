// Drafting with a head: the texts of several sessions together, so that each reading of the weights serves all of them.
#include <math.h>
#include <string.h>

#include <algorithm>
#include <atomic>
#include <chrono>

#include "draft_head/head.h"
#include "kernels/row.h"

namespace edgedec {
namespace {

constexpr float SUREST = 0.995f;  // the highest probability that a node gets

void require(bool holds, const char *message) {
  if (!holds) throw Invalid(message);
}

}  // namespace

// Lay out pairs of the first n rows that have none; the last of them is followed by last_token.
void HeadState::lay_out_rows(int32_t n, int32_t last_token) {
  const int64_t d = head_.config.n_embd;
  inputs_.resize((size_t)(2 * d * n));
  std::vector<int32_t> next(tokens_.begin() + 1, tokens_.begin() + n);
  next.push_back(last_token);
  head_.embed(next.data(), n, inputs_.data(), 2 * d);
  slot_ = n_pairs_, n_laid_ = n_new_ = n;
}

bool HeadState::lay_out(int32_t n_past, int32_t token) {
  require(n_past >= 0 && token >= 0 && token < head_.target.config.n_vocab, "a token or n_past is out of range");
  n_drafted_ = -1;
  branch_outputs_.clear();
  if (n_past > end() || n_past <= base_) return false;
  go_back(n_past);
  if (n_pending() > head_.net.max_rows) absorb(n_pending() - 1, tokens_.back());
  if (n_pending() > 0) {
    lay_out_rows(n_pending(), token);
    return true;
  }
  if (fused_position_ != n_past - 1) return false;
  const int64_t d = head_.config.n_embd;
  inputs_.resize((size_t)(2 * d));
  head_.embed(&token, 1, inputs_.data(), d);
  memcpy(inputs_.data() + d, fused_.data(), (size_t)d * sizeof(float));
  slot_ = n_pairs_ - 1, n_laid_ = 1, n_new_ = 0;
  return true;
}

bool HeadState::lay_out_next(int32_t token) {
  require(n_drafted_ >= 0 && token >= 0 && token < head_.target.config.n_vocab, "no draft was begun, or no such token");
  if (n_pairs_ + n_drafted_ >= kv_.cache.n_ctx()) return false;
  const int64_t d = head_.config.n_embd;
  inputs_.resize((size_t)(2 * d));
  head_.embed(&token, 1, inputs_.data(), d);
  memcpy(inputs_.data() + d, outputs_.data(), (size_t)d * sizeof(float));
  slot_ = n_pairs_ + n_drafted_, n_laid_ = 1, n_new_ = 0;
  return true;
}

const float *HeadState::read(const std::vector<HeadState *> &states, bool wanted) {
  if (states.empty()) return nullptr;
  ec_head &head = states[0]->head_;
  const size_t n_vocab = (size_t)head.config.n_vocab;
  if (wanted) head.scores.resize(std::max(head.scores.size(), states.size() * n_vocab));
  for (size_t begin = 0, end; begin < states.size(); begin = end) {
    int32_t n_rows = 0;
    for (end = begin; end < states.size(); ++end) {
      require(&states[end]->head_ == &head, "the texts of a draft are of several heads");
      if (end > begin && states[end]->n_laid_ > head.net.max_rows - n_rows) break;
      n_rows += states[end]->n_laid_;
    }
    read_group(states.data() + begin, end - begin, wanted ? head.scores.data() + begin * n_vocab : nullptr);
  }
  return head.scores.data();
}

// Read what n states have laid out in one forward; with `scores`, write those of each text's last pair there.
void HeadState::read_group(HeadState *const *states, size_t n, float *scores) {
  ec_head &head = states[0]->head_;
  const int64_t d = head.config.n_embd, width = head.n_tapped();
  const int32_t layer = 0;
  const bool wanted = scores != nullptr;
  std::vector<ec_head::Fused> rows;
  std::vector<int32_t> last(n);
  std::vector<ec_item> items(n);
  int64_t n_rows = 0;
  for (size_t i = 0; i < n; ++i) n_rows += states[i]->n_laid_;
  std::vector<float> outputs((size_t)(wanted ? n_rows * d : 0));
  float *output = outputs.data();
  for (size_t i = 0; i < n; ++i) {
    HeadState &s = *states[i];
    for (int32_t r = 0; r < s.n_new_; ++r) rows.push_back({s.taps_.data() + r * width, s.inputs_.data() + (2 * r + 1) * d});
    ec_item &item = items[i];
    last[i] = s.n_laid_ - 1;
    item.session = &s.kv_, item.n_past = s.slot_, item.n_rows = s.n_laid_, item.hidden = s.inputs_.data();
    if (!wanted) continue;
    item.n_wanted = 1, item.wanted = &last[i], item.n_taps = 1, item.taps = &layer, item.tapped = output;
    output += s.n_laid_ * d;
  }
  if (!rows.empty()) head.fuse(rows);
  if (forward(head.net, items.data(), (int32_t)n, scores, nullptr, nullptr) != Outcome::done)
    throw NotFinite("the draft head's scores are not finite");
  for (size_t i = 0; i < n; ++i) states[i]->settle(items[i].tapped == nullptr ? nullptr : items[i].tapped + last[i] * d, wanted);
}

// Take what a forward made of the pairs that were laid out; `last` is the layer's output for the last of them.
void HeadState::settle(const float *last, bool wanted) {
  const size_t d = (size_t)head_.config.n_embd, width = (size_t)head_.n_tapped();
  if (n_new_ > 0) {
    memcpy(fused_.data(), inputs_.data() + inputs_.size() - d, d * sizeof(float));
    n_pairs_ += n_new_;
    fused_position_ = base_ + n_pairs_ - 1;
    tokens_.erase(tokens_.begin(), tokens_.begin() + n_new_);
    memmove(taps_.data(), taps_.data() + (size_t)n_new_ * width, tokens_.size() * width * sizeof(float));
  }
  n_drafted_ = wanted ? slot_ + n_laid_ - n_pairs_ : -1;
  n_new_ = 0;
  if (!wanted) return;
  if (head_.config.feeds_back_normed)
    head_.net.kernels->rms_norm(last, head_.net.output_norm.data(), head_.config.rms_epsilon, (int64_t)d, outputs_.data());
  else
    memcpy(outputs_.data(), last, d * sizeof(float));
}

namespace {

// A chain that is being drafted.
struct Chain {
  ec_draft_item *item;
  HeadState *state;
  double path;
  bool goes_on;
};

// Take the most probable token as the chain's next node; `scores` are those of what follows it.
void extend(Chain &chain, const float *scores, double spent_seconds) {
  const ec_head &head = chain.state->head();
  const Kernels &kernels = *head.net.kernels;
  const ec_draft_rules &rules = chain.item->rules;
  const int64_t n = head.config.n_vocab, width = std::min<int64_t>(2, n);
  int64_t best[2] = {0, 0};
  float most = 0;
  const double total = row_total(kernels, scores, n, &most);
  row_top_k(kernels, scores, n, width, best);
  if (width == 2 && scores[best[1]] > scores[best[0]]) std::swap(best[0], best[1]);
  ec_drafted &node = chain.item->nodes[chain.item->n_found++];
  node.token = head.tokens[(size_t)best[0]];
  node.p = (float)(exp((double)scores[best[0]] - most) / total);
  node.second_token = width == 2 ? head.tokens[(size_t)best[1]] : -1;
  node.second_p = width == 2 ? (float)(exp((double)scores[best[1]] - most) / total) : 0.0f;
  int32_t bin = 0;
  while (bin < rules.n_edges && node.p >= rules.edges[bin]) ++bin;
  chain.path *= std::min(SUREST, node.p * (rules.factors != nullptr ? rules.factors[bin] : 1.0f));
  chain.goes_on =
      chain.item->n_found < rules.n_max && chain.path >= rules.least_path && spent_seconds <= rules.most_seconds;
}

}  // namespace

void draft_chains(ec_draft_item *items, int32_t n) {
  const auto started = std::chrono::steady_clock::now();
  std::vector<Chain> chains;
  for (int32_t i = 0; i < n; ++i) {
    items[i].n_found = 0;
    HeadState *state = items[i].session->head.get();
    if (state == nullptr || items[i].rules.n_max < 1) continue;
    if (state->lay_out(items[i].n_past, items[i].token)) chains.push_back({&items[i], state, 1.0, true});
  }
  std::vector<HeadState *> states;
  while (!chains.empty()) {
    states.clear();
    for (const Chain &chain : chains) states.push_back(chain.state);
    const float *scores = HeadState::read(states);
    const ec_head &head = chains[0].state->head();
    const double spent = std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
    std::atomic<size_t> next{0};
    const auto extend_all = [&](int) {
      for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < chains.size();)
        extend(chains[i], scores + i * (size_t)head.config.n_vocab, spent);
    };
    if (chains.size() == 1) extend_all(0);
    else head.net.pool.run(extend_all);
    const auto ends = [](Chain &chain) {
      return !chain.goes_on || !chain.state->lay_out_next(chain.item->nodes[chain.item->n_found - 1].token);
    };
    chains.erase(std::remove_if(chains.begin(), chains.end(), ends), chains.end());
  }
}

}  // namespace edgedec
