// Products of tiles and activations alone: in the cache, and from memory beside a plain read of the same bytes.
//
//   products sets                  the instruction sets of this processor, one a line
//   products cache SET TYPES        nanoseconds a block (32 columns of 16 rows) and multiply-adds a second
//   products memory SET THREADS HUGE TYPES AHEADS
//                                  gigabytes a second of a plain read and of products with n rows
//   products count SET              one product of each type with 1 to 16 rows, between an emulator's marks
//
// TYPES are names with commas between them, or "all". AHEADS are how far ahead weights are fetched, L1+L2 in bytes with
// commas between them, as 4608+0,0+8064,0+4096x3, where x3 is how many times they are fetched into the L2 cache; "usual"
// is what the kernels do by themselves. All are measured in turn.
//
// Every line of the output is one JSON object. benchmarks/forwards/products.py builds and runs this program.
#if defined(EDGEDEC_HAS_X86)
#include <immintrin.h>
#endif
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "kernels/kernel_sets.h"
#include "weights/tensor_types.h"
#include "weights/tiles.h"

using namespace edgedec;

struct Type {
  int32_t type;
  const char *name;
};
constexpr Type TYPES[] = {{Q4_0, "Q4_0"},       {Q4_1, "Q4_1"},   {Q5_0, "Q5_0"},       {Q5_1, "Q5_1"},
                          {Q8_0, "Q8_0"},       {Q4_K, "Q4_K"},   {Q5_K, "Q5_K"},       {Q6_K, "Q6_K"},
                          {Q3_K, "Q3_K"},       {Q2_K, "Q2_K"},   {IQ4_NL, "IQ4_NL"},   {IQ4_XS, "IQ4_XS"},
                          {MXFP4, "MXFP4"},     {IQ3_S, "IQ3_S"}, {IQ3_XXS, "IQ3_XXS"}, {IQ2_S, "IQ2_S"},
                          {IQ2_XXS, "IQ2_XXS"}, {IQ1_S, "IQ1_S"}, {TQ2_0, "TQ2_0"},
                          {Q2_0, "Q2_0"},       {Q1_0, "Q1_0"}};
static bool wanted(const Type &type, const char *types) {
  const std::string all = std::string(",") + types + ",";
  return !strcmp(types, "all") || all.find(std::string(",") + type.name + ",") != std::string::npos;
}
constexpr int ROWS[] = {1, 2, 3, 4, 5, 6, 8, 12, 16};
constexpr int64_t COLUMNS = 1536;
constexpr int PANEL_ROWS = 32;              // as in forward/run.h
constexpr size_t FROM_MEMORY = 256u << 20;  // bytes, more than any cache of a small machine

static double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

static const Kernels *kernels_of(const char *name) {
  for (const Kernels *const *k = all_kernels(); *k != nullptr; ++k)
    if (!strcmp((*k)->name, name) && (*k)->supported()) return *k;
  fprintf(stderr, "no instruction set %s on this processor\n", name);
  exit(1);
}

// Multiply-adds of bytes a second that one core makes when nothing has to be loaded or unpacked; 0 where none is known.
#if defined(EDGEDEC_HAS_X86)
constexpr int64_t STEPS = 4000000;
constexpr int CHAINS = 10;  // sums that go on at the same time, all in registers
#define UNROLL_CHAINS _Pragma("GCC unroll 10")

__attribute__((target("avx512f,avx512bw,avx512vnni"))) static void multiply_avx512() {
  __m512i sums[CHAINS], x = _mm512_set1_epi8(3), y = _mm512_set1_epi8(2);
  for (int i = 0; i < CHAINS; ++i) sums[i] = _mm512_setzero_si512();
  for (int64_t k = 0; k < STEPS; ++k) {
    UNROLL_CHAINS for (int i = 0; i < CHAINS; ++i) sums[i] = _mm512_dpbusd_epi32(sums[i], x, y);
    __asm__ volatile("" : "+v"(x), "+v"(y));
  }
  for (int i = 1; i < CHAINS; ++i) sums[0] = _mm512_add_epi32(sums[0], sums[i]);
  volatile int sink = _mm512_cvtsi512_si32(sums[0]);
  (void)sink;
}

#if defined(EDGEDEC_HAS_AVXVNNI)
__attribute__((target("avx2,avxvnni"))) static void multiply_avxvnni() {
  __m256i sums[CHAINS], x = _mm256_set1_epi8(3), y = _mm256_set1_epi8(2);
  for (int i = 0; i < CHAINS; ++i) sums[i] = _mm256_setzero_si256();
  for (int64_t k = 0; k < STEPS; ++k) {
    UNROLL_CHAINS for (int i = 0; i < CHAINS; ++i) sums[i] = _mm256_dpbusd_avx_epi32(sums[i], x, y);
    __asm__ volatile("" : "+x"(x), "+x"(y));
  }
  for (int i = 1; i < CHAINS; ++i) sums[0] = _mm256_add_epi32(sums[0], sums[i]);
  volatile int sink = _mm256_cvtsi256_si32(sums[0]);
  (void)sink;
}
#endif

__attribute__((target("avx2"))) static void multiply_avx2() {
  __m256i sums[CHAINS], x = _mm256_set1_epi8(3), y = _mm256_set1_epi8(2);
  for (int i = 0; i < CHAINS; ++i) sums[i] = _mm256_setzero_si256();
  for (int64_t k = 0; k < STEPS; ++k) {
    UNROLL_CHAINS for (int i = 0; i < CHAINS; ++i) sums[i] = _mm256_add_epi16(sums[i], _mm256_maddubs_epi16(x, y));
    __asm__ volatile("" : "+x"(x), "+x"(y));
  }
  for (int i = 1; i < CHAINS; ++i) sums[0] = _mm256_add_epi16(sums[0], sums[i]);
  volatile int sink = _mm256_cvtsi256_si32(sums[0]);
  (void)sink;
}

static double products_a_second(void (*multiply)(), int lanes) {
  double best = 1e9;
  for (int i = 0; i < 5; ++i) {
    const double begin = now();
    multiply();
    best = std::min(best, now() - begin);
  }
  return (double)STEPS * CHAINS * lanes / best;
}
#endif

static double peak(const char *name) {
#if defined(EDGEDEC_HAS_X86)
  if (!strcmp(name, "avx512vnni")) return products_a_second(multiply_avx512, 64);
#if defined(EDGEDEC_HAS_AVXVNNI)
  if (!strcmp(name, "avxvnni")) return products_a_second(multiply_avxvnni, 32);
#endif
  if (!strcmp(name, "avx2")) return products_a_second(multiply_avx2, 32);
#endif
  (void)name;
  return 0;
}

struct Tiles {
  Matrix matrix;
  uint8_t *memory;
  size_t n_bytes, n_mapped;

  Tiles(int32_t type, size_t at_least, bool huge) {
    const size_t tile = tile_bytes(type, TILE_ROWS, COLUMNS);
    const int64_t n_tiles = (int64_t)((at_least + tile - 1) / tile);
    n_bytes = n_tiles * tile;
    n_mapped = (n_bytes + 65536 + (2u << 20) - 1) >> 21 << 21;
    memory = (uint8_t *)aligned_alloc(2u << 20, n_mapped);
    if (memory == nullptr) exit(2);
    madvise(memory, n_mapped, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    memset(memory, 0x23, n_mapped);  // scales and minimums are then common numbers
    matrix = {type, n_tiles * TILE_ROWS, COLUMNS, memory};
  }
  ~Tiles() { free(memory); }
  int64_t n_tiles() const { return matrix.n_rows / TILE_ROWS; }
};

struct Inputs {
  std::vector<ActivationBlock> blocks;
  Activations activations;
  Inputs(const Kernels *kernels) : blocks(2 * COLUMNS / 32), activations{blocks.data(), nullptr, COLUMNS} {
    std::vector<float> x(COLUMNS);
    for (int row = 0; row < 16; ++row) {
      for (auto &value : x) value = rand() / (float)RAND_MAX - .5f;
      kernels->quantize(activations, row, 0, COLUMNS, x.data());
    }
  }
};

static void in_cache(const Kernels *kernels, const char *types) {
  const double most = peak(kernels->name);
  printf("{\"set\": \"%s\", \"peak_gmacs\": %.1f}\n", kernels->name, most / 1e9);
  Inputs in(kernels);
  std::vector<float> y(16 * 16 * 64);
  for (const Type &type : TYPES) {
    if (!wanted(type, types)) continue;
    Tiles tiles(type.type, 60000, false);  // fits the L2 cache of any core
    const double n_blocks = (double)tiles.n_tiles() * COLUMNS / 32;
    for (int n : ROWS) {
      double best = 1e9;
      for (int i = 0; i < 60; ++i) {
        const double begin = now();
        for (int j = 0; j < 10; ++j)
          kernels->matmul(tiles.matrix, 0, tiles.n_tiles(), in.activations, 0, n, y.data(), tiles.matrix.n_rows);
        best = std::min(best, (now() - begin) / 10);
      }
      const double products = 512.0 * n * n_blocks / best;
      printf("{\"type\": \"%s\", \"n\": %d, \"ns_block\": %.2f, \"gb_s\": %.1f, \"gmacs\": %.1f, \"of_peak\": %.3f}\n",
             type.name, n, best / n_blocks * 1e9, tiles.n_bytes / best / 1e9, products / 1e9,
             most > 0 ? products / most : 0.0);
    }
  }
}

#if defined(__aarch64__)
// count_instructions.c counts between these.
static void begin_count() { __asm__ volatile("hint #112" ::: "memory"); }
static void end_count() { __asm__ volatile("hint #113" ::: "memory"); }

static void one_by_one(const Kernels *kernels) {
  Inputs in(kernels);
  std::vector<float> y(16 * 16 * 64);
  for (const Type &type : TYPES) {
    Tiles tiles(type.type, 60000, false);
    for (int n = 1; n <= 16; ++n) {
      begin_count();
      kernels->matmul(tiles.matrix, 0, tiles.n_tiles(), in.activations, 0, n, y.data(), tiles.matrix.n_rows);
      end_count();
      printf("{\"type\": \"%s\", \"n\": %d, \"blocks\": %lld}\n", type.name, n,
             (long long)(tiles.n_tiles() * COLUMNS / 32));
    }
  }
}
#endif

// With the widest loads that the processor has: others reach two thirds of its memory's speed.
#if defined(EDGEDEC_HAS_X86) && defined(__linux__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
static uint64_t read_plainly(const uint8_t *p, size_t n) {
  typedef uint64_t Wide __attribute__((vector_size(64)));
  Wide sums[4] = {};
  for (size_t i = 0; i + 256 <= n; i += 256)
    for (int j = 0; j < 4; ++j) sums[j] += *(const Wide *)(p + i + 64 * j);
  const Wide all = sums[0] + sums[1] + sums[2] + sums[3];
  return all[0] + all[7];
}

// Seconds that the slowest of `n_threads` takes for its part of the work, all begun at once.
template <class Part>
static double together(int n_threads, Part part) {
  std::atomic<int> ready{0};
  std::vector<double> seconds(n_threads);
  auto work = [&](int i) {
    ++ready;
    while (ready.load() < n_threads) {}
    const double begin = now();
    part(i);
    seconds[i] = now() - begin;
  };
  std::vector<std::thread> others;
  for (int i = 1; i < n_threads; ++i) others.emplace_back(work, i);
  work(0);
  for (auto &other : others) other.join();
  return *std::max_element(seconds.begin(), seconds.end());
}

struct Setting {
  std::string name;
  std::vector<Ahead> ahead;  // by rows
};

static std::vector<Setting> settings_of(const std::string &names) {
  std::vector<Setting> found;
  for (size_t begin = 0; begin <= names.size();) {
    const size_t end = std::min(names.find(',', begin), names.size());
    Ahead ahead = {USUAL_AHEAD, 0, 0};
    const std::string name = names.substr(begin, end - begin);
    const int n_read = sscanf(name.c_str(), "%d+%dx%d", &ahead.l1, &ahead.l2, &ahead.l2_times);
    if (name != "usual" && n_read < 2) {
      fprintf(stderr, "%s is not how far ahead weights are fetched: L1+L2 in bytes\n", name.c_str());
      exit(1);
    }
    if (n_read == 2) ahead.l2_times = ahead.l2 != 0;
    found.push_back({name, std::vector<Ahead>(AHEAD_ROWS, ahead)});
    begin = end + 1;
  }
  return found;
}

static void from_memory(const Kernels *kernels, int n_threads, bool huge, const char *types, const char *aheads) {
  static volatile uint64_t sink;
  Inputs in(kernels);
  const std::vector<Setting> settings = settings_of(aheads);
  for (const Type &type : TYPES) {
    if (!wanted(type, types)) continue;
    Tiles tiles(type.type, FROM_MEMORY, huge);
    const int64_t n_tiles = tiles.n_tiles();
    const size_t tile = tiles.n_bytes / n_tiles;
    std::vector<std::vector<float>> panels(n_threads, std::vector<float>(16 * PANEL_ROWS));  // as in a forward
    std::vector<double> plain;
    std::vector<std::vector<double>> seconds(settings.size() * std::size(ROWS));  // [rows][settings]
    auto begin_of = [&](int i) { return n_tiles * i / n_threads; };
    for (int repeat = 0; repeat < 7; ++repeat) {
      plain.push_back(together(n_threads, [&](int i) {
        sink = sink + read_plainly(tiles.memory + begin_of(i) * tile, (begin_of(i + 1) - begin_of(i)) * tile);
      }));
      for (size_t k = 0; k < seconds.size(); ++k) {
        tiles.matrix.ahead = settings[k % settings.size()].ahead.data();
        seconds[k].push_back(together(n_threads, [&](int i) {
          for (int64_t t = begin_of(i); t < begin_of(i + 1); t += PANEL_ROWS / TILE_ROWS)
            kernels->matmul(tiles.matrix, t, std::min<int64_t>(t + PANEL_ROWS / TILE_ROWS, begin_of(i + 1)),
                            in.activations, 0, ROWS[k / settings.size()], panels[i].data(), PANEL_ROWS);
        }));
      }
    }
    const auto print = [&](int n, const std::string &ahead, std::vector<double> &all) {
      std::sort(all.begin(), all.end());
      printf("{\"type\": \"%s\", \"n\": %d, \"ahead\": \"%s\", \"threads\": %d, \"huge\": %s, \"gb_s\": %.2f, "
             "\"best_gb_s\": %.2f}\n",
             type.name, n, ahead.c_str(), n_threads, huge ? "true" : "false", tiles.n_bytes / all[all.size() / 2] / 1e9,
             tiles.n_bytes / all[0] / 1e9);
    };
    print(0, "", plain);
    for (size_t k = 0; k < seconds.size(); ++k)
      print(ROWS[k / settings.size()], settings[k % settings.size()].name, seconds[k]);
    fflush(stdout);
  }
}

int main(int argc, char **argv) {
  if (argc == 2 && !strcmp(argv[1], "sets")) {
    for (const Kernels *const *k = all_kernels(); *k != nullptr; ++k)
      if ((*k)->supported()) puts((*k)->name);
  } else if (argc == 4 && !strcmp(argv[1], "cache")) in_cache(kernels_of(argv[2]), argv[3]);
  else if (argc == 7 && !strcmp(argv[1], "memory"))
    from_memory(kernels_of(argv[2]), atoi(argv[3]), atoi(argv[4]) != 0, argv[5], argv[6]);
#if defined(__aarch64__)
  else if (argc == 3 && !strcmp(argv[1], "count")) one_by_one(kernels_of(argv[2]));
#endif
  else
    return fprintf(stderr, "usage: products sets | cache SET TYPES | memory SET THREADS HUGE TYPES AHEADS | count SET\n"), 1;
}
