// Measuring how fast several threads read the machine's memory, which is the limit of plain decoding.
#include <chrono>
#include <new>
#include <vector>

#include "edgedec_cpu.h"
#include "pool.h"

double ec_read_bandwidth(int32_t n_threads, uint64_t n_bytes) {
  if (n_threads < 1 || n_threads > 256 || n_bytes < 1 << 20 || n_bytes > (uint64_t)1 << 36) return 0;
  try {
    const size_t n = (size_t)n_bytes / 8, part = n / (size_t)n_threads / 8 * 8;
    std::vector<uint64_t> data(n, 1), sums((size_t)n_threads * 8);
    const auto read = [&](int thread) {
      uint64_t lanes[8] = {};
      const uint64_t *p = data.data() + (size_t)thread * part;
      for (size_t i = 0; i < part; i += 8)
        for (size_t j = 0; j < 8; ++j) lanes[j] += p[i + j];
      for (size_t j = 0; j < 8; ++j) sums[(size_t)thread * 8] += lanes[j];
    };
    const auto start = std::chrono::steady_clock::now();
    edgedec::Pool::shared(n_threads).run(read);
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    volatile uint64_t keep = sums[0];
    (void)keep;
    return (double)(part * 8) * n_threads / elapsed.count();
  } catch (const std::bad_alloc &) {
    return 0;
  }
}
