// Where the bytes of a matrix are: by tiles of 16 rows, chunk of 256 columns behind chunk, or row
// by row as in the file (tiles.py). A tile begins where its first row would in the file.
#pragma once
#include "formats/registry.h"
#include "half.cuh"

namespace voltapile {

// From a row of a tile to the next, and from a chunk of it to the next, in bytes.
struct Lay {
  int row, chunk;
};

// chunk_bytes: of 256 columns of a row. row_bytes: of all of them.
__device__ __forceinline__ Lay lay_of(bool is_tiled, int chunk_bytes, int row_bytes) {
  return is_tiled ? Lay{chunk_bytes, 16 * chunk_bytes} : Lay{row_bytes, chunk_bytes};
}

// What never lies by tiles needs no code for it.
template <class F>
constexpr bool HAS_TILES = false;
template <>
constexpr bool HAS_TILES<formats::Q4_K> = true;
template <>
constexpr bool HAS_TILES<formats::Q5_K> = true;
template <>
constexpr bool HAS_TILES<formats::Q6_K> = true;
template <>
constexpr bool HAS_TILES<formats::Q8_0> = true;

// Where any row begins; its chunks are lay.chunk apart.
__device__ __forceinline__ const std::uint8_t* row_at(const std::uint8_t* matrix, Lay lay,
                                                      long long row, long long row_bytes) {
  return matrix + (row & ~15ll) * row_bytes + (row & 15) * lay.row;
}

// Block number `block` of a row that has `blocks` of them, of format F.
template <class F>
__device__ __forceinline__ const std::uint8_t* block_at(const std::uint8_t* matrix, bool is_tiled,
                                                        long long row, int block, int blocks) {
  static_assert(256 % F::length == 0);
  constexpr int EACH = 256 / F::length;  // of a chunk
  const Lay lay = lay_of(HAS_TILES<F> && is_tiled, EACH * F::bytes, blocks * F::bytes);
  return row_at(matrix, lay, row, static_cast<long long>(blocks) * F::bytes) +
         block / EACH * lay.chunk + block % EACH * F::bytes;
}

}  // namespace voltapile
