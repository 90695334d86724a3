// A forward over items: the sessions' memory is made, the plan is evaluated, and the sessions note what they hold then.
#include <algorithm>

#include "draft_head/draft_head.h"
#include "forward/run.h"

namespace edgedec {
namespace {

// Evaluate a plan for which the states of its sessions are prepared; they end the forward, however it ends.
Outcome evaluate_with_states(ec_model &model, Plan &plan, float *logits, int32_t *best,
                             const volatile int32_t *cancel) {
  struct End {
    ~End() {
      for (int32_t i = 0; i < plan.n_items; ++i) plan.items[i].session->states.end(plan.n_folded, done);
    }
    const Plan &plan;
    bool done = false;
  } end = {plan};
  const Outcome outcome = evaluate(model, plan, logits, best, cancel);
  end.done = outcome == Outcome::done;
  return outcome;
}

// Evaluate rows that were evaluated before. Rows of which some layers come later are not folded.
Outcome evaluate_again(const ec_item &item, bool whole, const volatile int32_t *cancel) {
  ec_session &session = *item.session;
  Plan plan = make_plan(*session.model, &item, 1);
  session.cache.prepare(item.n_past, item.n_past + item.n_rows);
  session.columns.prepare(item.n_past, item.n_past + item.n_rows);
  session.states.begin(item, session.notes, whole);
  return evaluate_with_states(*session.model, plan, nullptr, nullptr, cancel);
}

// Evaluate the rows of an item, which begins with the layer first_layer, again in the layers below it, as they were.
Outcome renew_below(const ec_item &item, const volatile int32_t *cancel) {
  const size_t n = (size_t)item.groups[0].first_layer, n_layer = (size_t)item.session->model->config.n_layer;
  for (int32_t begin = item.n_past, end = begin + item.n_rows; begin < end;) {
    ec_item below{};
    ec_group group{};
    std::vector<float> vectors;
    below.session = item.session, below.places = item.places, below.parents = item.parents;
    item.session->notes.describe(begin, end, &below, &group, &vectors);
    std::vector<uint8_t> attn(n_layer, 0), mlp(n_layer, 0);
    std::copy_n(group.attn, n, attn.begin());
    std::copy_n(group.mlp, n, mlp.begin());
    group.attn = attn.data(), group.mlp = mlp.data();
    if (item.parents != nullptr && below.n_rows != item.n_rows)
      throw Invalid("the rows of a tree ran through different half-layers");
    const Outcome outcome = evaluate_again(below, false, cancel);
    if (outcome != Outcome::done) return outcome;
    begin += below.n_rows;
  }
  return Outcome::done;
}

// Return items with the rows of draft heads behind their own.
std::vector<ec_item> widened(const ec_model &model, const ec_item *items, int32_t n_items) {
  std::vector<ec_item> wide(items, items + n_items);
  int64_t n_rows = 0;
  for (const ec_item &item : wide) n_rows += item.n_rows;
  for (ec_item &item : wide) {
    if (item.session == nullptr || !item.session->draft_head) continue;
    check_item(model, item);
    const int32_t n_own = item.n_rows;
    item = item.session->draft_head->widened(item, (int32_t)std::max<int64_t>(0, model.max_rows - n_rows));
    n_rows += item.n_rows - n_own;
  }
  return wide;
}

}  // namespace

Outcome renew(const ec_item &item, const volatile int32_t *cancel) {
  ec_session &session = *item.session;
  const int32_t n_past = item.n_past, of_states = session.states.held_before(n_past);
  if (of_states < n_past || session.states.is_behind(n_past)) session.states.go_back(of_states);
  else if (session.columns.held_before(n_past) == n_past) return Outcome::done;
  const int32_t first = std::min(session.columns.held_before(n_past), of_states);
  try {
    Outcome outcome = Outcome::done;
    for (int32_t begin = first; begin < n_past && outcome == Outcome::done;) {
      ec_item again{};
      ec_group group{};
      std::vector<float> vectors;
      again.session = &session, again.places = item.places;
      session.notes.describe(begin, std::min(n_past, begin + session.model->max_rows), &again, &group,
                             &vectors);
      outcome = evaluate_again(again, true, cancel);
      begin += again.n_rows;
    }
    const bool resumes = item.n_groups > 0 && item.groups[0].first_layer > 0;  // an end of a text alone has no rows
    if (outcome == Outcome::done && session.states.is_used() && resumes) outcome = renew_below(item, cancel);
    if (outcome != Outcome::done) session.columns.forget(first);
    return outcome;
  } catch (...) {
    session.columns.forget(first);
    throw;
  }
}

Outcome forward(ec_model &model, const ec_item *items, int32_t n_items, float *logits, int32_t *best,
                const volatile int32_t *cancel) {
  if (!model.finished || model.elsewhere)
    throw Invalid("the model is not finished, or another library evaluates its text");
  const std::vector<ec_item> wide = widened(model, items, n_items);
  Plan plan = make_plan(model, wide.data(), n_items);
  if (plan.n_wanted > model.max_rows) throw Invalid("too many rows of logits are wanted");
  for (int32_t i = 0; i < n_items; ++i) {
    const Outcome outcome = renew(items[i], cancel);
    if (outcome != Outcome::done) return outcome;
  }
  for (int32_t i = 0; i < n_items; ++i) {
    items[i].session->cache.prepare(items[i].n_past, items[i].n_past + wide[(size_t)i].n_rows);
    items[i].session->notes.begin(items[i]);
    items[i].session->columns.begin(items[i]);
    items[i].session->states.begin(items[i], items[i].session->notes);
  }
  for (int32_t i = 0; i < n_items; ++i)
    if (items[i].session->draft_head) items[i].session->draft_head->before(items[i], plan, plan.first_row[(size_t)i]);
  const Outcome outcome = evaluate_with_states(model, plan, logits, best, cancel);
  if (outcome != Outcome::done) return outcome;
  count_experts(model, plan);
  for (int32_t i = 0; i < n_items; ++i) items[i].session->notes.note(items[i]);
  for (int32_t i = 0; i < n_items; ++i)
    if (items[i].session->draft_head) items[i].session->draft_head->after(items[i]);
  return Outcome::done;
}

}  // namespace edgedec
