// Cutting the pieces of a stage into one share for each thread, as large as the thread is fast. Cores differ: there are fast
// and slow ones in one processor, and one that another process keeps busy has half its speed.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include <vector>

namespace edgedec {

// What a thread has done: an amount of work, in any unit, and the seconds that it took.
struct Effort {
  double work = 0, seconds = 0;
};

// How fast threads are, each as a multiple of their common speed; 1 for a thread of which nothing is known yet.
// Return the speeds after a forward in which the threads made these efforts: each goes a quarter of the way to what was
// seen. A thread that did nothing keeps its speed. None is below 1/16 of the fastest.
std::vector<double> learned_speeds(const std::vector<double> &speeds, const std::vector<Effort> &efforts);

// Return where the shares of threads begin and end as parts of a whole: [0, ..., 1], one more than there are threads.
std::vector<double> cuts_by_speed(const std::vector<double> &speeds);

// Return the number of the first of n pieces that belongs to a share; that of the share behind the last one is n.
inline int64_t share_begin(const std::vector<double> &cuts, int share, int64_t n) {
  return (int64_t)(cuts[(size_t)share] * (double)n + 0.5);
}

}  // namespace edgedec
