#include "threads/shares.h"

#include <algorithm>

namespace edgedec {
namespace {

constexpr double LEARNED = 0.25;
constexpr double SLOWEST = 1.0 / 16;
constexpr double SHORTEST = 20e-6;  // seconds: less than this says nothing about a thread

}  // namespace

std::vector<double> learned_speeds(const std::vector<double> &speeds, const std::vector<Effort> &efforts) {
  Effort all;
  for (const Effort &effort : efforts) all = {all.work + effort.work, all.seconds + effort.seconds};
  std::vector<double> learned = speeds;
  if (!(all.work > 0 && all.seconds > SHORTEST)) return learned;
  for (size_t i = 0; i < learned.size(); ++i) {
    if (efforts[i].seconds < SHORTEST) continue;
    const double seen = efforts[i].work / efforts[i].seconds / (all.work / all.seconds);
    learned[i] += LEARNED * (seen - learned[i]);
  }
  const double least = SLOWEST * *std::max_element(learned.begin(), learned.end());
  for (double &speed : learned) speed = std::max(speed, least);
  return learned;
}

std::vector<double> cuts_by_speed(const std::vector<double> &speeds) {
  double all = 0, before = 0;
  for (double speed : speeds) all += speed;
  std::vector<double> cuts;
  for (double speed : speeds) {
    cuts.push_back(before / all);
    before += speed;
  }
  cuts.push_back(1);
  return cuts;
}

}  // namespace edgedec
