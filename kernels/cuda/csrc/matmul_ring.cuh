// What matmul_stream.cu and matmul_wide.cu are made of: a product, what a chunk takes, a warp's
// ring of them, its sums.
#pragma once
#include "bell.cuh"
#include "matmul_chunk.cuh"
#include "matmul_epilogue.cuh"

namespace voltapile {

__device__ __forceinline__ constexpr int aligned(int bytes) { return (bytes + 127) & ~127; }

template <class F>
__device__ __forceinline__ int row_bytes_of(unsigned k) {
  return k / F::length * F::bytes;
}

struct Product {
  Matrix matrices[3];
  const float* x;
  int k, tokens, room;
  Epilogue kind;

  __device__ __forceinline__ bool is_glu() const { return kind >= SILU; }
};

// The threads that share a product's columns meet; -D TEAMS of them are in a block.
__device__ __forceinline__ void meet_team(int team) {
#ifdef VP_EMULATION
  team_barrier(team + 1, 32 * WARPS);
#else
  asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(32 * WARPS) : "memory");
#endif
}

// A matrix by tiles (tiles.cuh): what a warp works on at once is one chunk of one of them, and lies
// in shared memory as in the matrix.
template <class F>
struct TileMemory {
  using M = ChunkMemory<F>;
  using Staged = typename M::Staged;
  static constexpr int BYTES = Codec<F>::BYTES, CHUNK = 16 * BYTES;
  static constexpr int COLUMNS = 32 * Codec<F>::GROUPS;
  static constexpr int SCALES = M::HAS_SCALES ? M::SCALES : 0;

  // A warp's ring of so many places, and behind it what it keeps of scales.
  static __device__ __forceinline__ int ring_bytes(int depth) {
    return aligned(depth * CHUNK + SCALES);
  }
  static __device__ __forceinline__ int tokens_bytes(int room) {
    return (Staged::PER_TOKEN * room + 15) & ~15;
  }
  // As multiply_any asks for it.
  static __device__ __forceinline__ int row_start(const std::uint8_t*, int row) {
    return row * BYTES;
  }
};

// A warp's chunks on their way to shared memory, to `depth` places in turn, DEPTH at most: each by
// one copy that rings a bell; before sm_90 by copies of all lanes, a group for each chunk. The
// whole warp calls all of this, and is past what it has read of a place before that is filled
// again (is_again).
template <class F>
struct ChunkRing {
  static constexpr int CHUNK = TileMemory<F>::CHUNK;
  std::uint8_t* places;
  Bell* bells;
  int depth, lane;
  int place = 0;       // that is read next
  bool is_odd = true;  // how often its bell has rung then

  __device__ __forceinline__ ChunkRing(std::uint8_t* places, Bell* bells, int depth, int lane)
      : places(places), bells(bells), depth(depth), lane(lane) {
#if VP_ARCH >= 900
    if (is_elected()) {
#pragma unroll
      for (int i = 0; i < DEPTH; ++i) make_bell(bells + i);
      tell_bells();
    }
#endif
  }
  __device__ __forceinline__ void fetch(int to, const std::uint8_t* from, bool is_again) const {
#if VP_ARCH >= 900
    if (is_elected()) {
      if (is_again) order_copies();
      expect(bells + to, CHUNK);
      copy_whole(places + to * CHUNK, from, CHUNK, bells + to);
    }
#else
    std::uint8_t* own = places + to * CHUNK + 16 * lane;
#pragma unroll
    for (int at = 0; at < CHUNK; at += 512)
      if (at + 512 <= CHUNK || at + 16 * lane < CHUNK)
        copy_async(own + at, from + 16 * lane + at, 16);
#endif
  }
  // Behind each fetch, also where nothing was left to fetch.
  __device__ __forceinline__ void close() const {
#if VP_ARCH < 900
    commit_copies();
#endif
  }
  __device__ __forceinline__ void await_chunk() const {
#if VP_ARCH >= 900
    await_own(bells + place, is_odd);
#else
    if (depth == DEPTH) wait_for_copies<DEPTH - 1>();
    else wait_for_copies<1>();
    __syncwarp();
#endif
  }
  __device__ __forceinline__ void advance() {
    if (++place < depth) return;
    place = 0;
    is_odd = !is_odd;
  }
};

// This warp's sums as [token][16 rows], of tokens from `first` on.
__device__ __forceinline__ void keep_sums_of(const float (&total)[Tile::VALUES], const Tile& tile,
                                             int first, int room, float* kept) {
#pragma unroll
  for (int e = 0; e < Tile::VALUES; ++e) {
    const int token = first + tile.sum_token(Tile::token_of(e));
    if (token < room) kept[token * 16 + tile.sum_row(Tile::row_of(e))] = total[e];
  }
}

}  // namespace voltapile
