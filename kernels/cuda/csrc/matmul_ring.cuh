// What matmul_stream.cu and matmul_wide.cu are made of: which tiles a block takes, a warp's ring of
// chunks, the end of a unit.
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

// Walks over every `step`-th unit of the matrices whose bit in `mask` is set. A gate and its up are
// one unit.
struct Cursor {
  const Product& all;
  unsigned mask;
  int step, m = -1, index, limit = 0;  // among the units of matrix m
  Matrix matrix;

  __device__ __forceinline__ Cursor(const Product& all, unsigned mask, int begin, int step)
      : all(all), mask(all.is_glu() ? 1 : mask), step(step), index(begin) {
    find();
  }
  __device__ __forceinline__ bool is_in() const { return m < 3; }
  __device__ __forceinline__ void next() {
    index += step;
    if (index >= limit) find();
  }
  // The one that comes `count` later.
  __device__ __forceinline__ Cursor after(int count) const {
    Cursor found = *this;
    found.index += count * step;
    if (found.index >= found.limit) found.find();
    return found;
  }
  // How many there are from here on.
  __device__ __forceinline__ int left() const {
    int count = 0, at = index;
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      if (i < m) continue;
      const int units = mask >> i & 1 ? (all.matrices[i].rows + 15) / 16 : 0;
      if (at < units) count += (units - 1 - at) / step + 1;
      at = at < units ? at + ((units - 1 - at) / step + 1) * step - units : at - units;
    }
    return count;
  }
  // The first row that is meant; near the end of a matrix tiles begin earlier.
  __device__ __forceinline__ int row() const { return 16 * index; }

 private:
  __device__ __forceinline__ void find() {
#pragma unroll 1
    while (index >= limit && m < 3) {
      index -= limit;
      ++m;
      matrix = m == 0 ? all.matrices[0] : m == 1 ? all.matrices[1] : all.matrices[2];
      limit = m < 3 && mask >> m & 1 ? (matrix.rows + 15) / 16 : 0;
    }
  }
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
// one copy that rings a bell; before sm_90 by copies of all lanes, a group for each chunk. The whole
// warp calls all of this, and is past what it has read of a place before that is filled again.
template <class F>
struct Ring {
  static constexpr int CHUNK = TileMemory<F>::CHUNK;
  std::uint8_t* places;
  Bell* bells;
  int depth, lane;
  int place = 0;       // that is read next
  bool is_odd = true;  // how often its bell has rung then

  __device__ __forceinline__ Ring(std::uint8_t* places, Bell* bells, int depth, int lane)
      : places(places), bells(bells), depth(depth), lane(lane) {
#if VP_ARCH >= 900
    if (is_elected()) {
#pragma unroll
      for (int i = 0; i < DEPTH; ++i) make_bell(bells + i);
      tell_bells();
    }
#endif
  }
  __device__ __forceinline__ void fetch(int to, const std::uint8_t* from) const {
#if VP_ARCH >= 900
    if (is_elected()) {
      expect(bells + to, CHUNK);
      copy_whole(places + to * CHUNK, from, CHUNK, bells + to);
    }
#else
    std::uint8_t* own = places + to * CHUNK + 16 * lane;
#pragma unroll
    for (int at = 0; at < CHUNK; at += 512)
      if (at + 512 <= CHUNK || at + 16 * lane < CHUNK) copy_async(own + at, from + 16 * lane + at, 16);
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

// How a warp works on one chunk, and what it keeps for it.
template <class F>
struct RingMemory {
  using M = ChunkMemory<F>;
  using Staged = typename M::Staged;
  static constexpr int BYTES = Codec<F>::BYTES, COLUMNS = 32 * Codec<F>::GROUPS;
  // Rows start at multiples of 16 bytes where chunks do: the launcher sees to it.
  using Raw = Stage<BYTES, BYTES % 16 == 0 ? 16 : Codec<F>::ALIGN>;
  static constexpr int SCALES = M::HAS_SCALES ? M::SCALES : 0;
  static constexpr int WARP = aligned(DEPTH * Raw::SIZE + SCALES);

  static __device__ __forceinline__ int tokens_bytes(int room) {
    return (Staged::PER_TOKEN * room + 15) & ~15;
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

// What a thread of a group has to do with the end of a unit: values i of its [token][16 rows].
struct Finish {
  const Product& all;
  const Cursor& unit;
  int i, row, token;
  bool is_there;
  float before = 0;  // asked for early

  __device__ __forceinline__ Finish(const Product& all, const Cursor& unit, int i)
      : all(all), unit(unit), i(i), token(i / 16) {}
  __device__ __forceinline__ void begin() {
    const int rows = unit.matrix.rows;
    row = first_row_of(unit.row(), rows) + i % 16;
    is_there = row >= unit.row() && row < rows && token < all.tokens;
    if (is_there && all.kind == ADD) before = out();
  }
  __device__ __forceinline__ float& out() const {
    return unit.matrix.out[static_cast<long long>(token) * unit.matrix.rows + row];
  }
  // sums: [tile of the unit][warp][token][16 rows], `one` of them a warp.
  __device__ __forceinline__ void write(const float* sums, int one) const {
    if (!is_there) return;
    float value = 0, up = 0;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) value += sums[warp * one + i];
    const float* bias = unit.matrix.bias;
    if (bias != nullptr) value += bias[row];
    if (all.is_glu()) {
#pragma unroll
      for (int warp = 0; warp < WARPS; ++warp) up += sums[(WARPS + warp) * one + i];
      if (all.matrices[1].bias != nullptr) up += all.matrices[1].bias[row];
      value = activated(value, all.kind) * up;
    }
    out() = all.kind == ADD ? before + value : value;
  }
};

}  // namespace voltapile
