#include "weights/file.h"

#include <string>
#include <system_error>
#if defined(_WIN32)
#include <windows.h>
#else
#include <errno.h>
#include <unistd.h>
#endif
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace edgedec {
namespace {

constexpr uint64_t PIECE = 4 << 20;  // read between two checks of `stop`

[[noreturn]] void fail(int code) {
  throw Unreadable("reading the weights failed: " + std::system_category().message(code));
}

// Return the number of bytes read, 0 at the end of the file.
uint64_t read_some(int64_t file, uint64_t offset, uint64_t n_bytes, uint8_t *out) {
#if defined(_WIN32)
  OVERLAPPED at{};
  at.Offset = (DWORD)offset;
  at.OffsetHigh = (DWORD)(offset >> 32);
  DWORD n = 0;
  if (!ReadFile((HANDLE)(intptr_t)file, out, (DWORD)n_bytes, &n, &at)) {
    const DWORD error = GetLastError();
    if (error != ERROR_HANDLE_EOF) fail((int)error);
  }
  return n;
#else
  for (;;) {
    const ssize_t n = pread((int)file, out, (size_t)n_bytes, (off_t)offset);
    if (n >= 0) return (uint64_t)n;
    if (errno != EINTR) fail(errno);
  }
#endif
}

}  // namespace

AlignedMemory aligned_memory(uint64_t n_bytes) {
  AlignedMemory memory((uint8_t *)::operator new((size_t)n_bytes, std::align_val_t(HUGE_PAGE)));
#if defined(__linux__)
  if (n_bytes >= HUGE_PAGE) madvise(memory.get(), (size_t)(n_bytes / HUGE_PAGE * HUGE_PAGE), MADV_HUGEPAGE);
#endif
  return memory;
}

std::shared_ptr<uint8_t> huge_memory(size_t n_bytes) {
#if defined(__linux__)
  if (n_bytes >= HUGE_PAGE) {
    const size_t n_mapped = n_bytes + HUGE_PAGE;
    void *all = mmap(nullptr, n_mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (all == MAP_FAILED) return nullptr;
    uint8_t *start = (uint8_t *)(((uintptr_t)all + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
    madvise(start, n_bytes, MADV_HUGEPAGE);
    return std::shared_ptr<uint8_t>(start, [all, n_mapped](uint8_t *) { munmap(all, n_mapped); });
  }
#endif
  (void)n_bytes;
  return nullptr;
}

void give_back(uint8_t *start, size_t n_bytes) {
#if defined(__linux__)
  const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), begin = ((uintptr_t)start + page - 1) / page * page;
  const uintptr_t end = ((uintptr_t)start + n_bytes) / page * page;
  if (end > begin) madvise((void *)begin, end - begin, MADV_DONTNEED);
#endif
  (void)start, (void)n_bytes;
}

bool File::read_pages(uint64_t offset, uint64_t n_bytes, uint8_t *out, const std::atomic<bool> *stop) const {
  const uint64_t needed = offset + n_bytes, end = io_ceil(needed);
  for (uint64_t at = io_floor(offset); at < needed;) {
    if (stop != nullptr && stop->load(std::memory_order_relaxed)) return false;
    const uint64_t piece = end - at < PIECE ? end - at : PIECE;
    const uint64_t n = read_some(file_, at, piece, out);
    // Fewer bytes than wanted mean the end of the file, or a stop within a page: read that page again.
    const uint64_t whole = at + n >= needed ? n : io_floor(n);
    if (whole == 0)
      throw Unreadable("the file of the weights ends at " + std::to_string(at + n) + " bytes, " +
                       std::to_string(n_bytes_) + " were expected");
    at += whole;
    out += whole;
  }
  return true;
}

}  // namespace edgedec
