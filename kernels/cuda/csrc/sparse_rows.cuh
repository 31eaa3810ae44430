// Rows of a cache at positions that lie anywhere, by registers of one warp. HEAD_DIM, KIND as in
// attention_tile.cuh.
#pragma once
#include "attention_tile.cuh"

namespace voltapile {

constexpr int STEP = 16;  // positions of a warp
// Sixteen bytes of a lane on their way; more of them would spill.
constexpr int AT_ONCE = VP_ARCH == 750 || (VP_ARCH < 750 && KIND == F16) ? 4 : 8;

// What a token sees, counted from its first chosen block on.
struct Seen {
  const int* cells;  // of blocks from the piece's first on: where their first position is cached
  int shift, first, end;  // shift: a block has 1 << shift positions

  __device__ __forceinline__ int cell(int i) const {
    return cells[(i >> shift) - first] + (i & ((1 << shift) - 1));
  }
};

// Sixteen bytes of a cache become halves in shared memory.
template <int TYPE>
__device__ __forceinline__ void put_piece(half_bits* to, const uint4& d, unsigned scale) {
  uint4* out = reinterpret_cast<uint4*>(to);
  if constexpr (TYPE == F16) {
    out[0] = d;
  } else {
    const unsigned words[4] = {d.x, d.y, d.z, d.w};
    const float offset = TYPE == Q8_0 ? 1152.0f : 1032.0f;
    scale |= scale << 16;
#pragma unroll
    for (int i = 0; i < (TYPE == Q8_0 ? 2 : 4); ++i) {
      uint4 y;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const unsigned word = words[TYPE == Q8_0 ? 2 * i + j : 2 * (i % 2) + j];
        const unsigned bytes = TYPE == Q8_0 ? word ^ BYTE_SIGNS
                               : i < 2      ? word & 0x0f0f0f0fu
                                            : word >> 4 & 0x0f0f0f0fu;
        unsigned low, high;
        spread(bytes, low, high);
        (j ? y.z : y.x) = scaled(low, offset, scale), (j ? y.w : y.y) = scaled(high, offset, scale);
      }
      out[i] = y;
    }
  }
}

// STEP positions from i on, by registers: of a lane's sixteen bytes AT_ONCE, which are on their way
// together, for one after another each would take a memory's latency. Behind the piece's end its
// last position comes again, and behind a row's end its last bytes: nothing is multiplied by them
// but zeros, and no load hangs on a branch.
struct OnWay {
  uint4 data[AT_ONCE];
  half_bits scale[AT_ONCE];

  template <int TYPE>
  static constexpr int COUNT = STEP * DIM / values_of(TYPE) / 32;  // of a lane
  template <int TYPE>
  static constexpr int TOGETHER = COUNT<TYPE> < AT_ONCE ? COUNT<TYPE> : AT_ONCE;

  // from: a multiple of AT_ONCE
  template <int TYPE>
  __device__ __forceinline__ void ask_as(const Cache& cache, const Seen& seen, int i, int from,
                                         int lane) {
    constexpr int EACH = values_of(TYPE), WIDE = DIM / EACH;
    const unsigned wide = width_of(cache.dim) / EACH, c = min(lane % WIDE + 0u, wide - 1);
    const unsigned apart = head_bytes(TYPE, width_of(cache.dim));
#pragma unroll
    for (int n = 0; n < TOGETHER<TYPE>; ++n) {
      const int at = min(i + lane / WIDE + (from + n) * (32 / WIDE), seen.end - 1);
      const unsigned cell = seen.cell(at), own = cell % PAGE;
      const unsigned char* head = cache.base + static_cast<std::uint64_t>(cell / PAGE) * apart;
      data[n] =
          __ldcg(reinterpret_cast<const uint4*>(head) + (own * wide + (c ^ turn_of(own, wide))));
      if (TYPE != F16)
        scale[n] = __ldcg(reinterpret_cast<const half_bits*>(
                              head + integer_bytes(TYPE, width_of(cache.dim))) +
                          (own * wide + c));
    }
  }
  template <int TYPE>
  __device__ __forceinline__ void put_as(half_bits* tile, const Cache& cache, const Seen& seen,
                                         int i, int lane) {
    constexpr int EACH = values_of(TYPE), WIDE = DIM / EACH, ROW = 32 / WIDE * PITCH;
    half_bits* to = tile + lane / WIDE * PITCH + lane % WIDE * EACH;
#pragma unroll
    for (int from = 0; from < COUNT<TYPE>; from += AT_ONCE) {
      if (from > 0) ask_as<TYPE>(cache, seen, i, from, lane);
#pragma unroll
      for (int n = 0; n < TOGETHER<TYPE>; ++n)
        put_piece<TYPE>(to + (from + n) * ROW, data[n], scale[n]);
    }
  }
  __device__ __forceinline__ void ask(const Cache& cache, const Seen& seen, int i, int lane) {
    const int kind = KIND == ANY ? cache.kind : KIND;
    if (i >= seen.end) return;
    if (kind == F16) ask_as<F16>(cache, seen, i, 0, lane);
    if (kind == Q8_0) ask_as<Q8_0>(cache, seen, i, 0, lane);
    if (kind == Q4_0) ask_as<Q4_0>(cache, seen, i, 0, lane);
  }
  // What was asked, at the same i.
  __device__ __forceinline__ void put(half_bits* tile, const Cache& cache, const Seen& seen, int i,
                                      int lane) {
    const int kind = KIND == ANY ? cache.kind : KIND;
    if (kind == F16) put_as<F16>(tile, cache, seen, i, lane);
    if (kind == Q8_0) put_as<Q8_0>(tile, cache, seen, i, lane);
    if (kind == Q4_0) put_as<Q4_0>(tile, cache, seen, i, lane);
  }
};

}  // namespace voltapile
