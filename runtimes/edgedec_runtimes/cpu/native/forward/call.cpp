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

}  // namespace

Outcome renew(ec_session &session, int32_t n_past, const volatile int32_t *cancel) {
  const int32_t of_states = session.states.held_before(n_past);
  if (of_states < n_past) session.states.go_back(of_states);
  int32_t begin = std::min(session.columns.held_before(n_past), of_states);
  for (const int32_t first = begin; begin < n_past;) {
    ec_item item{};
    item.session = &session;
    session.notes.describe(begin, std::min(n_past, begin + session.model->max_rows), &item);
    Plan plan = make_plan(*session.model, &item, 1);
    session.cache.prepare(begin, begin + item.n_rows);
    session.columns.prepare(begin, begin + item.n_rows);
    Outcome outcome = Outcome::cancelled;
    try {
      session.states.begin(item, session.notes);
      outcome = evaluate_with_states(*session.model, plan, nullptr, nullptr, cancel);
    } catch (...) {
      session.columns.forget(first);
      throw;
    }
    if (outcome != Outcome::done) {
      session.columns.forget(first);
      return outcome;
    }
    begin += item.n_rows;
  }
  return Outcome::done;
}

Outcome forward(ec_model &model, const ec_item *items, int32_t n_items, float *logits, int32_t *best,
                const volatile int32_t *cancel) {
  if (!model.finished || model.elsewhere)
    throw Invalid("the model is not finished, or another library evaluates its text");
  Plan plan = make_plan(model, items, n_items);
  if (plan.n_wanted > model.max_rows) throw Invalid("too many rows of logits are wanted");
  for (int32_t i = 0; i < n_items; ++i) {
    const Outcome outcome = renew(*items[i].session, items[i].n_past, cancel);
    if (outcome != Outcome::done) return outcome;
  }
  for (int32_t i = 0; i < n_items; ++i) {
    items[i].session->cache.prepare(items[i].n_past, items[i].n_past + items[i].n_rows);
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
