// Products of one token with chosen experts: a warp's way through chunks of their matrices.
//
// An item is a chunk of columns of TILES times 16 rows, for one token; warp w takes items w,
// w + WARPS, ... What an item's product is added to is up to the caller, in an order that depends
// on shapes alone. -D FORMAT, WARPS, TILES; MANY 0.
#pragma once
#include "expert_table.cuh"
#include "grid.cuh"
#include "matmul_chunk.cuh"
#include "matmul_direct.cuh"
#include "matmul_epilogue.cuh"
#include "tiles.cuh"

namespace voltapile {

struct Item {
  const std::uint8_t* first[TILES];  // rows
  const float* x;                    // the token's row
  int chunk;

  __device__ __forceinline__ const std::uint8_t* tile(int t) const {
    return t == 0 ? first[0] : first[TILES - 1];
  }
};

template <class F>
__device__ __forceinline__ int row_bytes_of(int k) {
  return k / F::length * F::bytes;
}
template <class F>
__device__ __forceinline__ Lay lay_of_rows(bool is_tiled, int k) {
  return lay_of(HAS_TILES<F> && is_tiled, Codec<F>::BYTES, row_bytes_of<F>(k));
}
template <class F>
__device__ __forceinline__ int chunks_of(int k) {
  constexpr int COLUMNS = 32 * Codec<F>::GROUPS;
  return (k + COLUMNS - 1) / COLUMNS;
}

// Straight from global memory to registers; before sm_80.
template <class Where, class Take>
__device__ __forceinline__ void multiply_items_direct(int items, int k, const Lay& lay,
                                                      int last_row, std::uint8_t* memory, int warp,
                                                      const Tile& tile, Where where, Take take) {
  int offset[Tile::ROWS];
#pragma unroll
  for (int i = 0; i < Tile::ROWS; ++i) offset[i] = min(tile.row(i), last_row) * lay.row;
#pragma unroll 1
  for (int item = warp; item < items; item += WARPS) {
    const Item at = where(item);
    DirectBlock held[TILES];
#pragma unroll
    for (int t = 0; t < TILES; ++t) held[t].load(at.first[t] + at.chunk * lay.chunk, offset, tile);
    const DirectTokens staged(memory, 1);
    __syncwarp();  // what was read may be overwritten
    staged.stage(at.x, 1, k, at.chunk * 256, tile.lane);
    __syncwarp();
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      float part[PASSES][Tile::VALUES] = {};
      multiply_block(held[t], staged, tile, part);
      take(item, t, part[0]);
    }
  }
}

template <class F, class Where, class Take>
__device__ __forceinline__ void multiply_items_staged(int items, int k, const Lay& lay,
                                                      int last_row, std::uint8_t* memory, int warp,
                                                      const Tile& tile, Where where, Take take) {
  using M = ChunkMemory<F>;
  using Raw = typename M::Raw;
  constexpr int STAGES = M::STAGES, BYTES = Codec<F>::BYTES, COLUMNS = 32 * Codec<F>::GROUPS;
  constexpr int AHEAD = IS_ASYNC ? STAGES - 1 : 1;
  const int row_bytes = row_bytes_of<F>(k);
  typename M::Staged staged(memory + M::FIXED, 1);
  Raw raw(lay.row, last_row, tile.lane);
  const auto fetch = [&](int step, int slot) {
    const int item = warp + step / TILES * WARPS;
    if (item < items) {
      const Item at = where(item);
      const std::uint8_t* first = at.tile(step % TILES) + at.chunk * lay.chunk;
      if constexpr (IS_ASYNC)
        raw.begin(memory + slot * Raw::SIZE, first, row_bytes - at.chunk * BYTES);
      else
        raw.load(first, row_bytes - at.chunk * BYTES);
    }
    if constexpr (IS_ASYNC) commit_copies();
  };
  for (int step = 0; step < AHEAD; ++step) fetch(step, step);
  int slot = 0, step = 0;
#pragma unroll 1
  for (int item = warp; item < items; item += WARPS) {
    const Item at = where(item);
    staged.stage(at.x, 1, k, at.chunk * COLUMNS, tile.lane);
#pragma unroll
    for (int t = 0; t < TILES; ++t, ++step) {
      const int next = slot + AHEAD < STAGES ? slot + AHEAD : slot + AHEAD - STAGES;
      if constexpr (IS_ASYNC)
        wait_for_copies<AHEAD - 1>();
      else
        raw.store(memory + slot * Raw::SIZE);
      __syncwarp();
      fetch(step + AHEAD, next);
      float part[PASSES][Tile::VALUES];
      multiply_any<F>(memory, slot * Raw::SIZE, memory + STAGES * Raw::SIZE,
                      at.first[t] + at.chunk * lay.chunk, raw, staged, tile, part);
      take(item, t, part[0]);
      __syncwarp();  // what was read may be overwritten
      slot = slot + 1 < STAGES ? slot + 1 : 0;
    }
  }
}

// memory: the warp's own, ChunkMemory<F>::bytes(1).
template <class F, class Where, class Take>
__device__ __forceinline__ void multiply_items(int items, int k, const Lay& lay, int last_row,
                                               std::uint8_t* memory, int warp, const Tile& tile,
                                               Where where, Take take) {
  if constexpr (IS_DIRECT<F>)
    multiply_items_direct(items, k, lay, last_row, memory + ChunkMemory<F>::FIXED, warp, tile,
                          where, take);
  else
    multiply_items_staged<F>(items, k, lay, last_row, memory, warp, tile, where, take);
}

// The one token's sums of 16 rows.
__device__ __forceinline__ void keep_rows(const float (&sums)[Tile::VALUES], const Tile& tile,
                                          float* kept) {
#pragma unroll
  for (int e = 0; e < Tile::VALUES; ++e) {
    const float sum = tile.fold(sums[e]);
    if (tile.owns_sums() && tile.sum_token(Tile::token_of(e)) == 0)
      kept[tile.sum_row(Tile::row_of(e))] = sum;
  }
}

}  // namespace voltapile
