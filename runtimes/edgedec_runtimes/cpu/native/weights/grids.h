// The look-up grids of the IQ types: runs of 8 or 4 weights that a number in the file stands for.
#pragma once
#include <stdint.h>

#include <vector>

namespace edgedec {

// Entries of a grid. Element i of an entry is a magnitude's number: `bits` bits of the entry, from bit i * bits on.
struct Grid {
  int32_t bits, elements;
  std::vector<uint16_t> entries;

  int32_t at(uint32_t entry, int32_t i) const { return entries[entry] >> (bits * i) & ((1 << bits) - 1); }
};

// Return the grid of a type that has one. IQ1_M has that of IQ1_S.
const Grid &grid_of(int32_t type);

}  // namespace edgedec
