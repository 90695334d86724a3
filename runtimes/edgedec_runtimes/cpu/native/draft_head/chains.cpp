// Drafting chains with a draft head: the texts of several sessions together, so that each reading of the weights serves
// all of them.
#include <math.h>

#include <algorithm>
#include <atomic>
#include <chrono>

#include "draft_head/draft_head.h"
#include "kernels/row.h"

namespace edgedec {
namespace {

constexpr float SUREST = 0.995f;  // the highest chance that a node gets

// A chain that is being drafted.
struct Chain {
  ec_draft_item *item;
  DraftHeadState *state;
  double path;
  bool goes_on;
};

// Take the most probable token as the chain's next node; `scores` are those of what follows it.
void extend(Chain &chain, const float *scores, double spent_seconds) {
  const ec_draft_head &head = chain.state->head();
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
  node.sure = chain.state->sure(node.p);
  int32_t bin = 0;
  while (bin < rules.n_edges && node.sure >= rules.edges[bin]) ++bin;
  chain.path *= std::min(SUREST, node.sure * (rules.factors != nullptr ? rules.factors[bin] : 1.0f));
  chain.goes_on =
      chain.item->n_found < rules.n_max && chain.path >= rules.least_path && spent_seconds <= rules.most_seconds;
}

}  // namespace

void draft_chains(ec_draft_item *items, int32_t n) {
  const auto started = std::chrono::steady_clock::now();
  std::vector<Chain> chains;
  for (int32_t i = 0; i < n; ++i) {
    items[i].n_found = 0;
    DraftHeadState *state = items[i].session->draft_head.get();
    const int32_t n_max = items[i].rules.n_max;
    if (state == nullptr || n_max < 1) continue;
    if (state->lay_out(items[i].n_past, items[i].token, n_max)) chains.push_back({&items[i], state, 1.0, true});
  }
  std::vector<DraftHeadState *> states;
  while (!chains.empty()) {
    states.clear();
    for (const Chain &chain : chains) states.push_back(chain.state);
    const float *scores = DraftHeadState::read(states);
    const ec_draft_head &head = chains[0].state->head();
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
