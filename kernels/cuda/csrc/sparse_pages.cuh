// Where the indexer's cache keeps the keys of a slot's blocks of positions. Knows no kernel.
#pragma once
#include "half.cuh"

namespace voltapile {

constexpr int PAGE = 64;  // positions of a page

struct Pages {
  const int* table;  // [slots][width]
  int width, pages;

  // -1 for none.
  __device__ __forceinline__ int at(int slot, unsigned position) const {
    const int index = position / PAGE;
    const int page = index < width ? table[slot * width + index] : -1;
    return page < pages ? page : -1;
  }
};

// Where a key lies in its array, counted in floats: key `place` of a page that has `each` of them.
__device__ __forceinline__ std::uint64_t key_of(int page, int each, int place, int dim) {
  return static_cast<std::uint64_t>(static_cast<unsigned>(page * each + place)) * dim;
}

}  // namespace voltapile
