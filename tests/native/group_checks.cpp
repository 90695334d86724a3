// Which rows attend to which spans together: sessions that share pages, forks of forks, and what has pages of its own.
#include <algorithm>
#include <memory>

#include "checks.h"
#include "forward/attention_groups.h"
#include "forward/plan.h"

using namespace edgedec;

namespace checks {
namespace {

constexpr int32_t N_CTX = 6000;

// Sessions without a model, and a plan with some rows of each.
struct Planned {
  KVShape shape;
  std::vector<std::unique_ptr<ec_session>> sessions;
  std::vector<ec_item> items;
  Plan plan{};

  explicit Planned(int32_t type = EC_KV_INT8) : shape({{1, 32}}, type, 0) {}

  // Add a session that holds n_past tokens and has n_rows rows. Of a session that is there already it shares n_shared.
  void add(int32_t n_past, int32_t n_rows, int parent = -1, int32_t n_shared = 0) {
    KVCache cache = parent < 0 ? KVCache(shape, N_CTX) : KVCache(sessions[(size_t)parent]->cache, n_shared);
    sessions.push_back(std::make_unique<ec_session>(nullptr, std::move(cache)));
    sessions.back()->cache.prepare(n_shared, n_past + n_rows);
    ec_item item{};
    item.session = sessions.back().get();
    item.n_past = n_past;
    item.n_rows = n_rows;
    items.push_back(item);
  }

  AttentionSteps steps() {
    plan.items = items.data();
    for (int32_t i = 0; i < (int32_t)items.size(); ++i) {
      const ec_item &item = items[(size_t)i];
      item.session->cache.prepare(item.n_past, item.n_past + item.n_rows);
      const size_t begin = plan.all_rows.size(), end = begin + (size_t)item.n_rows;
      plan.all_ranges.push_back({begin, end, begin});
      for (int32_t r = 0; r < item.n_rows; ++r) {
        plan.rows.push_back({i, r, nullptr, 0, item.n_past + r, item.n_past + r, 0, 0, 0, 0});
        plan.all_rows.push_back((int32_t)begin + r);
      }
      plan.most_slots = std::max(plan.most_slots, item.n_past + item.n_rows);
    }
    return attention_steps(plan, plan.all_rows, plan.all_ranges);
  }
};

// A group as text: its rows, its spans, and whether there are earlier and later ones.
std::string described(const AttentionGroup &group) {
  std::string rows;
  for (const AttentionGroup::Row &row : group.rows) rows += std::to_string(row.place) + " ";
  return rows + (group.resumed ? ".." : "") + std::to_string(group.begin) + "-" + std::to_string(group.end) +
         (group.unfinished ? ".." : "");
}

void expect_steps(Planned &planned, const std::vector<std::vector<std::string>> &expected, const std::string &what) {
  std::vector<std::vector<std::string>> found;
  bool counted = true;
  for (const std::vector<AttentionGroup> &groups : planned.steps()) {
    size_t n_before = 0;
    found.emplace_back();
    for (const AttentionGroup &group : groups) {
      counted = counted && group.n_before == n_before;
      n_before += group.rows.size();
      found.back().push_back(described(group));
    }
  }
  expect(found == expected && counted, *portable_kernels(), "groups of rows: " + what);
}

}  // namespace

void check_groups() {
  Planned alone;
  alone.add(700, 3);
  expect_steps(alone, {{"0 1 2 0-6"}}, "one session");

  Planned own;
  own.add(700, 1);
  own.add(700, 1);
  expect_steps(own, {{"0 0-6", "1 0-6"}}, "pages of their own");

  Planned forks;  // 700 tokens end in the sixth span
  forks.add(700, 1);
  forks.add(700, 2, 0, 700);
  forks.add(800, 1, 0, 700);
  expect_steps(forks, {{"0 1 2 3 0-5.."}, {"0 ..5-7", "1 2 ..5-7", "3 ..5-7"}}, "forks");

  Planned few;
  few.add(255, 1);
  few.add(255, 1, 0, 255);
  expect_steps(few, {{"0 0-2", "1 0-2"}}, "too few shared tokens");

  for (int32_t n : {4095, 4096}) {
    Planned halves(EC_KV_F16);
    halves.add(n, 1);
    halves.add(n, 1, 0, n);
    if (n < 4096) expect_steps(halves, {{"0 0-32", "1 0-32"}}, "too few shared halves");
    else expect_steps(halves, {{"0 1 0-32.."}, {"0 ..32-33", "1 ..32-33"}}, "shared halves");
  }

  Planned nested;  // the second and the fourth share 1,100 tokens, the third is a stranger
  nested.add(400, 1);
  nested.add(1100, 1, 0, 400);
  nested.add(400, 1);
  nested.add(1100, 1, 1, 1100);
  expect_steps(nested, {{"0 1 3 0-3..", "2 0-9"}, {"0 ..3-9", "1 3 ..3-8.."}, {"1 ..8-9", "3 ..8-9"}},
               "forks of forks");

  Planned back;  // the second went back to 300 tokens, the pages behind them are shared still
  back.add(900, 1);
  back.add(300, 1, 0, 900);
  expect_steps(back, {{"0 1 0-2.."}, {"0 ..2-8", "1 ..2-8"}}, "a fork that went back");
}

}  // namespace checks
