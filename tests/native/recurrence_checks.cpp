// What a session with recurrent states holds after forwards of all kinds, and the order in which trees are gone through.
#include <math.h>

#include <memory>

#include "checks.h"
#include "forward/recurrent_state.h"
#include "forward/tree_order.h"

using namespace edgedec;

namespace checks {
namespace {

constexpr int32_t N_TOKENS = 20000;

RecurrentShape small_shape() {
  RecurrentShape shape;
  shape.layers = {0};
  shape.n_head = shape.n_key_head = 1;
  shape.n_key = 2, shape.n_value = 3, shape.n_column = 5, shape.n_back = 3;
  return shape;
}

// States and notes of a session, whose forwards fold as the first layer of a model would.
struct Session {
  RecurrentState states{small_shape()};
  RowNotes notes{1, 10, 4};
  std::vector<int32_t> tokens = std::vector<int32_t>(N_TOKENS, 1);

  void forward(int32_t n_past, int32_t n_rows, std::vector<int32_t> wanted, bool done = true, bool whole = true) {
    uint8_t none = 0;
    ec_item item{};
    ec_group group{};
    group.n_rows = n_rows, group.tokens = tokens.data(), group.mlp = whole ? nullptr : &none;
    item.n_past = n_past, item.n_rows = n_rows, item.groups = &group, item.n_groups = 1;
    item.n_wanted = (int32_t)wanted.size(), item.wanted = wanted.data();
    notes.begin(item);
    states.begin(item, notes);
    states.end(done ? 1 : 0, done);
    if (done) notes.note(item);
  }
  std::vector<int32_t> all(int32_t n) {
    std::vector<int32_t> rows((size_t)n);
    for (int32_t i = 0; i < n; ++i) rows[(size_t)i] = i;
    return rows;
  }
};

void check_held_rows(const Kernels &kernels) {
  Session session;
  session.forward(0, 200, {199});  // a prompt
  expect(session.states.held_before(200) == 200, kernels, "a prompt's end is held");
  expect(session.states.held_before(168) == 168, kernels, "the last rows of a prompt can be taken back");
  expect(session.states.held_before(167) == 0, kernels, "rows before them can't");
  expect(session.states.record(164, 0) == nullptr && session.states.record(165, 0) != nullptr, kernels,
         "the log begins with the columns that the rows behind it go over");
  session.forward(200, 9, session.all(9));  // a draft
  for (int32_t n = 200; n <= 209; ++n)
    expect(session.states.held_before(n) == n, kernels, "every row of a draft can be rejected");
  expect(session.states.held_before(190) == 168, kernels, "a checkpoint is at the prompt's end");
  session.forward(203, 1, {0});
  session.forward(204, 1, {0});
  expect(session.states.held_before(204) == 204 && session.states.held_before(203) == 168, kernels,
         "what a forward accepted is folded by the next one");
  session.states.go_back(168);
  expect(session.states.held_before(168) == 168 && session.states.held_before(167) == 0, kernels,
         "a checkpoint is gone back to");
  Session of_drafts;
  of_drafts.forward(0, 50, {49});
  of_drafts.forward(50, 1, {0});
  for (int32_t i = 0; i < 5; ++i) of_drafts.forward(51 + i, 1, {0}, true, false);  // through some layers
  expect(of_drafts.states.held_before(51) == 51, kernels, "rows through some layers are not folded");
  of_drafts.forward(51, 40, of_drafts.all(40));
  expect(of_drafts.states.held_before(51) == 51, kernels, "a long draft is not folded");
}

void check_checkpoints(const Kernels &kernels) {
  Session session;
  int32_t n = 0;
  for (; n < 16000; n += 250) session.forward(n, 250, {});  // a long prompt
  expect(session.states.held_before(n) == n, kernels, "a long prompt's end is held");
  int32_t n_checkpoints = 0, last = 0;
  for (int32_t i = 1; i < n - LOGGED_ROWS; ++i)
    if (session.states.held_before(i) == i) ++n_checkpoints, last = i;
  expect(n_checkpoints == MOST_CHECKPOINTS, kernels, "there are as many checkpoints as may be");
  expect(n - last < 2 * CHECKPOINT_ROWS, kernels, "the last one is near the end");
  expect(session.states.held_before(n / 2) > 0, kernels, "some are far before it");
  session.forward(n, 100, {99}, false);  // cancelled before any layer was done
  expect(session.states.held_before(n) == n, kernels, "what was cancelled changes nothing");
  RecurrentState fork(session.states, n);
  session.forward(n, 1, {0});
  session.forward(n + 1, 1, {0});
  expect(fork.held_before(n) == n && fork.held_before(n - 20) == n - 20, kernels, "a fork goes its own way");
}

void check_tree(const Kernels &kernels, const std::vector<int32_t> &parents) {
  const int32_t n = (int32_t)parents.size();
  const std::vector<TreeStep> steps = tree_steps(parents.data(), n);
  std::vector<int32_t> kept((size_t)n_kept(steps), -2);
  int32_t state = -1, n_rows = 0;  // the row that the state has ended with
  bool follows = true;
  for (const TreeStep &step : steps) {
    if (step.load >= 0) state = kept[(size_t)step.load];
    if (step.row >= 0) follows = follows && state == parents[(size_t)step.row], state = step.row, ++n_rows;
    if (step.keep >= 0) kept[(size_t)step.keep] = state;
  }
  expect(follows && n_rows == n, kernels, "every row of a tree follows its parent, once");
  expect(n_kept(steps) <= 1 + (int32_t)log2(n + 1), kernels, "few states of a tree are kept");
}

}  // namespace

void check_recurrence() {
  const Kernels &kernels = *portable_kernels();
  check_held_rows(kernels);
  check_checkpoints(kernels);
  std::mt19937 random(3);
  for (int32_t n = 1; n <= 200; ++n) {
    std::vector<int32_t> parents;
    for (int32_t i = 0; i < n; ++i) parents.push_back((int32_t)(random() % (uint32_t)(i + 1)) - 1);
    check_tree(kernels, parents);
    for (int32_t i = 0; i < n; ++i) parents[(size_t)i] = i % 2 == 0 ? i - 2 : i - 1;  // a chain with leaves
    if (n > 1) parents[0] = -1, check_tree(kernels, parents);
    for (int32_t i = 0; i < n; ++i) parents[(size_t)i] = i - 1;
    check_tree(kernels, parents);
  }
}

}  // namespace checks
