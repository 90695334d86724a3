#include "threads/system.h"

#include <chrono>
#include <thread>
#if defined(__linux__)
#include <sched.h>
#endif
#if !defined(_WIN32)
#include <unistd.h>
#endif

namespace edgedec {

#if defined(_WIN32)
int64_t process_id() { return 0; }
void nap() { std::this_thread::yield(); }  // the shortest sleep takes a millisecond or more
#else
int64_t process_id() { return getpid(); }
void nap() { std::this_thread::sleep_for(std::chrono::microseconds(50)); }
#endif

#if defined(__linux__)
namespace {

constexpr size_t WORDS = sizeof(cpu_set_t) / sizeof(uint64_t);  // of a mask of 1,024 logical processors
constexpr int32_t BITS = 64;

// Return the mask of this thread; an empty one where the system has more processors than that.
std::vector<uint64_t> current() {
  std::vector<uint64_t> mask(WORDS);
  if (sched_getaffinity(0, sizeof(cpu_set_t), (cpu_set_t *)mask.data()) != 0) mask.clear();
  return mask;
}

void set(const std::vector<uint64_t> &mask) { sched_setaffinity(0, sizeof(cpu_set_t), (const cpu_set_t *)mask.data()); }

// Keep those bits of a mask that are in `cpus`; return false where none is left.
bool reduce(std::vector<uint64_t> &mask, const std::vector<int32_t> &cpus) {
  std::vector<uint64_t> wanted(mask.size());
  for (int32_t cpu : cpus)
    if (cpu >= 0 && (size_t)(cpu / BITS) < wanted.size()) wanted[(size_t)(cpu / BITS)] |= (uint64_t)1 << cpu % BITS;
  bool any = false;
  for (size_t i = 0; i < mask.size(); ++i) any = (mask[i] &= wanted[i]) != 0 || any;
  return any;
}

}  // namespace

void keep_to(const std::vector<int32_t> &cpus) {
  std::vector<uint64_t> mask = current();
  if (reduce(mask, cpus)) set(mask);
}

KeptTo::KeptTo(const std::vector<int32_t> &cpus) {
  if (cpus.empty()) return;
  before_ = current();
  std::vector<uint64_t> mask = before_;
  if (reduce(mask, cpus) && mask != before_) set(mask);
  else before_.clear();
}

KeptTo::~KeptTo() {
  if (!before_.empty()) set(before_);
}
#else
void keep_to(const std::vector<int32_t> &) {}
KeptTo::KeptTo(const std::vector<int32_t> &) {}
KeptTo::~KeptTo() {}
#endif

}  // namespace edgedec
