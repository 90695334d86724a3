// Keeping threads to processor cores. Only Linux lets a program do so; elsewhere nothing of this has an effect.
#pragma once
#include <stdint.h>

#include <vector>

namespace edgedec {

// Have this thread run on those of some logical processors that it may run on. Where there is none, nothing changes.
void keep_to(const std::vector<int32_t> &cpus);

// Does the same while it exists; with no logical processors it does nothing.
class KeptTo {
 public:
  explicit KeptTo(const std::vector<int32_t> &cpus);
  ~KeptTo();
  KeptTo(const KeptTo &) = delete;
  KeptTo &operator=(const KeptTo &) = delete;

 private:
  std::vector<uint64_t> before_;  // the mask that the thread had; empty where it was not changed
};

}  // namespace edgedec
