// Checks how the threads of a forward share out its work: shares by speed, stages with threads that are slow, late or
// missing, and the pool. To be built with -fsanitize=thread as well.
//
//   threads_test          prints what failed; exits with 1 where anything did
#include <stdio.h>

#include <atomic>
#include <chrono>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "threads/pool.h"
#include "threads/shares.h"
#include "threads/stages.h"

using namespace edgedec;

namespace {

int n_checked = 0, n_failed = 0;

void expect(bool holds, const std::string &what) {
  ++n_checked;
  if (holds) return;
  ++n_failed;
  printf("failed: %s\n", what.c_str());
}

void sleep_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

std::vector<int64_t> sizes(const std::vector<double> &speeds, int64_t n) {
  const std::vector<double> cuts = cuts_by_speed(speeds);
  std::vector<int64_t> sizes;
  for (size_t i = 0; i < speeds.size(); ++i)
    sizes.push_back(share_begin(cuts, (int)i + 1, n) - share_begin(cuts, (int)i, n));
  return sizes;
}

void check_shares() {
  using Sizes = std::vector<int64_t>;
  expect(sizes({1, 1}, 10) == Sizes{5, 5}, "equal threads have equal shares");
  expect(sizes({1, 1}, 1) == Sizes{1, 0}, "one piece is the caller's");
  expect(sizes({3, 1}, 12) == Sizes{9, 3}, "a thread of three times the speed has three times the pieces");
  expect(sizes({2, 2, 2, 2, 1, 1, 1, 1}, 96) == Sizes{16, 16, 16, 16, 8, 8, 8, 8}, "four fast cores and four slow ones");
  std::mt19937 random(1);
  for (int i = 0; i < 200; ++i) {
    std::vector<double> speeds;
    for (uint32_t j = 0; j <= random() % 20; ++j) speeds.push_back(0.06 + random() % 1000 / 300.0);
    const int64_t n = random() % 5000;
    int64_t all = 0;
    bool positive = true;
    for (int64_t size : sizes(speeds, n)) {
      positive = positive && size >= 0;
      all += size;
    }
    expect(positive && all == n, "shares of random speeds make up the whole");
  }
}

void check_speeds() {
  std::vector<double> speeds = {1, 1, 1};
  for (int i = 0; i < 60; ++i) speeds = learned_speeds(speeds, {{40, 1}, {10, 1}, {0, 0}});
  expect(speeds[0] > 3.99 * speeds[1] && speeds[0] < 4.01 * speeds[1], "speeds become those that are seen");
  expect(speeds[2] == 1, "a thread that did nothing keeps its speed");
  expect(learned_speeds({2, 1}, {{0, 0}, {0, 0}}) == std::vector<double>{2, 1}, "nothing done, nothing learned");
  for (int i = 0; i < 60; ++i) speeds = learned_speeds(speeds, {{1000, 1}, {1, 1}, {1000, 1}});
  expect(speeds[1] >= speeds[0] / 16, "the slowest thread has a sixteenth of the fastest one's speed");
}

// What a stage computes for a piece from all of the stage before, so that a stage that began too early would be seen.
uint64_t mixed(const std::vector<uint64_t> &before, uint64_t piece) {
  uint64_t sum = piece * 0x9E3779B97F4A7C15u;
  for (uint64_t value : before) sum = (sum ^ value) * 0xBF58476D1CE4E5B9u;
  return sum;
}

struct Chain {
  std::vector<size_t> pieces;                  // of each stage
  std::vector<std::vector<uint64_t>> values;   // [stage][piece]
  std::vector<std::vector<int>> n_written;     // [stage][piece]

  explicit Chain(int n_stages) {
    std::mt19937 random(2);
    for (int s = 0; s < n_stages; ++s) {
      pieces.push_back(s % 3 == 0 ? 1 : random() % 40);
      values.emplace_back(pieces.back());
      n_written.emplace_back(pieces.back());
    }
  }

  std::vector<std::vector<uint64_t>> expected() const {
    std::vector<std::vector<uint64_t>> all = {{}};
    for (size_t n : pieces) {
      std::vector<uint64_t> stage;
      for (size_t p = 0; p < n; ++p) stage.push_back(mixed(all.back(), p));
      all.push_back(stage);
    }
    all.erase(all.begin());
    return all;
  }

  // Go through all stages as one thread of several; delay(stage, piece) is called within each computation.
  template <class Delay>
  void go(Stages &stages, int thread, Delay delay) {
    const std::vector<uint64_t> none;
    for (size_t s = 0; s < pieces.size(); ++s) {
      const std::vector<uint64_t> &before = s == 0 ? none : values[s - 1];
      uint64_t value = 0;
      const auto compute = [&](int64_t piece) {
        value = mixed(before, (uint64_t)piece);
        delay((int)s, piece);
      };
      const auto write = [&](int64_t piece) {
        values[s][(size_t)piece] = value;
        ++n_written[s][(size_t)piece];
      };
      const int64_t n = (int64_t)pieces[s];
      if (s % 2 == 0) {
        stages.each_of_two_parts(thread, n, 1.0, true, compute, write);
      } else {
        stages.each(thread, n, [&](int64_t piece) {
          value = mixed(before, (uint64_t)piece);
          write(piece);
        });
      }
    }
  }

  void check(const std::string &what) const {
    bool once = true;
    for (const auto &stage : n_written)
      for (int n : stage) once = once && n == 1;
    expect(values == expected(), what + ": the values are those of one thread");
    expect(once, what + ": each piece is written once");
  }
};

void check_slow_threads() {
  for (int n_threads : {1, 2, 3, 8}) {
    std::vector<double> speeds((size_t)n_threads, 1.0);
    for (int i = 0; i < 4; ++i) {
      Chain chain(300);
      Stages stages(cuts_by_speed(speeds), 64);
      Pool::shared(n_threads).run([&](int thread) {
        chain.go(stages, thread, [&](int stage, int64_t piece) {
          if (thread == n_threads - 1 && i > 0 && (stage * 7 + piece) % 61 == 0) sleep_ms(i);
        });
      });
      chain.check(std::to_string(n_threads) + " threads, one of which sleeps");
      speeds = learned_speeds(speeds, stages.efforts());
    }
  }
}

void check_late_thread() {
  // A thread that holds a piece until the others have ended all stages: without a second computation nobody would.
  Chain chain(40);
  Stages stages(cuts_by_speed({1, 1}), 64);
  std::atomic<bool> holds{false}, ended{false};
  std::thread late([&] {
    chain.go(stages, 1, [&](int, int64_t) {
      holds = true;
      for (int ms = 0; ms < 10000 && !ended; ++ms) sleep_ms(1);
    });
  });
  std::thread other([&] {
    while (!holds) sleep_ms(1);
    chain.go(stages, 0, [](int, int64_t) {});
    expect(!ended, "the other thread comes first");
    ended = true;
  });
  // The late thread can only hold a piece of a stage that it reaches alone.
  other.join();
  late.join();
  chain.check("a thread that is late");
}

void check_missing_thread() {
  Chain chain(100);
  Stages stages(cuts_by_speed({1, 5, 1}), 64);
  chain.go(stages, 0, [](int, int64_t) {});
  chain.check("two threads that never come");
  for (int thread : {1, 2}) chain.go(stages, thread, [](int, int64_t) { expect(false, "late threads find nothing to do"); });
  chain.check("two threads that come at the end");
}

void check_pool() {
  std::atomic<int> n_run{0};
  std::atomic<bool> second{false};
  for (int i = 0; i < 2000; ++i)
    Pool::shared(3).run([&](int thread) {
      if (thread == 1) second = true;
      ++n_run;
    });
  expect(n_run >= 2000 && n_run <= 6000, "a job runs once on a thread");
  for (int i = 0; i < 100 && !second; ++i)
    Pool::shared(3).run([&](int thread) {
      if (thread == 1) second = true;
      for (int ms = 0; ms < 100 && !second; ++ms) sleep_ms(1);
    });
  expect(second, "other threads take part");
}

}  // namespace

int main() {
  check_shares();
  check_speeds();
  check_slow_threads();
  check_late_thread();
  check_missing_thread();
  check_pool();
  printf("threads: %d of %d checks failed\n", n_failed, n_checked);
  return n_failed != 0;
}
