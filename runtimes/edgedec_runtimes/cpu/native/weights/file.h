// Reading pages of a file that the caller has opened, and memory that begins at a page.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include <atomic>
#include <memory>
#include <new>
#include <stdexcept>

namespace edgedec {

// Thrown where a file can't be read; the C interface returns EC_UNREADABLE.
struct Unreadable : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Reading around the system's cache takes offsets, lengths and addresses that are multiples of this.
constexpr uint64_t IO_ALIGNMENT = 4096;
constexpr uint64_t io_floor(uint64_t n) { return n / IO_ALIGNMENT * IO_ALIGNMENT; }
constexpr uint64_t io_ceil(uint64_t n) { return io_floor(n + IO_ALIGNMENT - 1); }

// Memory that files are read to lies in huge pages where the system has them: a disk then writes to one piece of memory
// and not to many, which took a virtual disk half the time.
constexpr uint64_t HUGE_PAGE = 2 << 20;
struct AlignedDelete {
  void operator()(uint8_t *p) const { ::operator delete(p, std::align_val_t(HUGE_PAGE)); }
};
using AlignedMemory = std::unique_ptr<uint8_t[], AlignedDelete>;
AlignedMemory aligned_memory(uint64_t n_bytes);

// Zeroed memory, which takes the system's where it is written, in huge pages: behind 32,000 tokens a step takes 1.3
// times as long where each 4 kB of keys and values are looked up. Empty where the system has none.
std::shared_ptr<uint8_t> huge_memory(size_t n_bytes);
// Give the system back what lies in some of that memory.
void give_back(uint8_t *start, size_t n_bytes);

class File {
 public:
  File() = default;
  // `file` is a descriptor, on Windows a handle, which the caller keeps open.
  File(int64_t file, uint64_t n_bytes) : file_(file), n_bytes_(n_bytes) {}
  uint64_t n_bytes() const { return n_bytes_; }
  // Read the pages of the file that hold [offset, offset + n_bytes) to `out`, which has room for whole pages. Return
  // false where `stop` became true first. Throws Unreadable.
  bool read_pages(uint64_t offset, uint64_t n_bytes, uint8_t *out, const std::atomic<bool> *stop) const;

 private:
  int64_t file_ = -1;
  uint64_t n_bytes_ = 0;
};

}  // namespace edgedec
