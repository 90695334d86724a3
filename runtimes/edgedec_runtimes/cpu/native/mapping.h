// Mapped files whose pages may become unreadable: cut short by another process, or on a disk that fails. POSIX systems send
// SIGBUS then, which ends a process. While a Mapping lives, a handler of ours turns a fault inside it into zeros and a flag.
#pragma once
#include <stdint.h>

#include "file.h"

namespace edgedec {

struct MappedRange;

// One mapped file, or a part of one. On Windows, which lets nobody cut a mapped file short, it does nothing.
class Mapping {
 public:
  // [data, data + n_bytes) is mapped, beginning at a page, until the Mapping is gone. `file` is its descriptor, borrowed,
  // or negative: a change of the file that causes no fault goes unnoticed then.
  Mapping(const void *data, uint64_t n_bytes, int64_t file);
  ~Mapping();
  Mapping(const Mapping &) = delete;
  Mapping &operator=(const Mapping &) = delete;
  // Throws Unreadable where a page could not be read, or the file's size or time of modification is another than at the
  // beginning. Also puts the handler back on top of one that was installed after it.
  void check() const;

 private:
  MappedRange *range_ = nullptr;
  int64_t file_ = -1, pid_ = 0;
  int64_t n_file_bytes_ = 0, modified_s_ = 0, modified_ns_ = 0;
};

// Lets SIGBUS reach its handler in this thread: a fault while the signal is blocked ends the process at once.
class FaultsUnblocked {
 public:
  FaultsUnblocked();
  ~FaultsUnblocked();

 private:
  bool was_blocked_ = false;
};

// The same for good, for threads of our own.
void unblock_faults();

}  // namespace edgedec
