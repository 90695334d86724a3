// What threads need of the system. Only Linux lets a program keep a thread to processor cores; elsewhere keep_to() and
// KeptTo have no effect.
#pragma once
#include <stdint.h>

#include <vector>

namespace edgedec {

// Return the number of this process, which a process that fork() made does not share; 0 where there is no fork().
int64_t process_id();

// Leave the core to other threads for a moment, some 0.1 milliseconds.
void nap();

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
