// Mapped files whose pages may become unreadable, as another process cuts the file short or the disk fails. POSIX systems
// send SIGBUS then, which ends a process. While a Mapping exists, a handler turns a fault inside of it into zeros and a flag.
#pragma once
#include <stdint.h>

#include "weights/file.h"

namespace edgedec {

struct MappedRange;

// A mapped file, or a part of one. On Windows, where no process can cut a mapped file short, it does nothing.
class Mapping {
 public:
  // [data, data + n_bytes) begins at a page and stays mapped until the Mapping is destroyed. `file` is the descriptor, which
  // the caller keeps open; with a negative one, a change of the file that causes no fault goes unnoticed.
  Mapping(const void *data, uint64_t n_bytes, int64_t file);
  ~Mapping();
  Mapping(const Mapping &) = delete;
  Mapping &operator=(const Mapping &) = delete;
  // Throw Unreadable where a page could not be read, or where the file's size or modification time has changed. Also put the
  // handler back on top of a handler that was installed after it.
  void check() const;

 private:
  MappedRange *range_ = nullptr;
  int64_t file_ = -1, pid_ = 0;
  int64_t n_file_bytes_ = 0, modified_s_ = 0, modified_ns_ = 0;
};

// Unblocks SIGBUS in this thread while it exists: a fault while the signal is blocked ends the process at once.
class FaultsUnblocked {
 public:
  FaultsUnblocked();
  ~FaultsUnblocked();

 private:
  bool was_blocked_ = false;
};

// Unblock SIGBUS in this thread for good; for threads that this library makes.
void unblock_faults();

}  // namespace edgedec
