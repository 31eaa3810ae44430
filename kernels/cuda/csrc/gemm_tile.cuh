// A tile of the product of many rows: 128 rows of weights unpacked to halves in shared memory,
// times 64 tokens. Eight warps, each 32 rows by 32 tokens; columns in steps of 128. Knows neither
// where rows come from nor where sums go. -D PLANE as in gemm_convert.cu.
#pragma once
#include "mma.cuh"
#include "unpack_k.cuh"

namespace voltapile {

constexpr int ROWS = 128, TOKENS = 64, GROUPS = 4, THREADS = 256;
// Bytes of a row of units. Lanes that read 16 bytes together meet distinct banks.
constexpr int STRIDE = GROUPS * 64 + (VP_ARCH >= 750 ? 32 : 16);
constexpr int SUMS = 2 * 4 * Tile::VALUES;

// Which of eight tokens is column n of a tile: dealt as the rows are.
__device__ __forceinline__ int dealt(int n) {
  return VP_ARCH >= 750 ? (n < 4 ? 2 * n : 2 * n - 7) : n;
}

// Integers of a group to weights. scales: {scale, offset} of its runs.
template <class C>
__device__ __forceinline__ void finish_unit(Unit& u, const float2 (&scales)[C::SCALES]) {
  if constexpr (!C::NATURAL) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 s = scales[C::SCALES == 1 ? 0 : i >> 1], v = half_values(u.r[i]);
      u.r[i] = half_pair(fmaf(s.x, v.x, s.y), fmaf(s.x, v.y, s.y));
    }
  }
}

// Units of one row, span and p as finished halves to shared memory.
template <class C>
__device__ __forceinline__ void unpack_to(Bytes chunk, int span, int p, std::uint8_t* row) {
  Unit found[C::SPAN * C::PLANES];
  C::unpack(chunk, span, p, found);
#pragma unroll
  for (int g = 0; g < C::SPAN; ++g) {
    Unit u = found[g * C::PLANES + (C::PLANES > 1 ? PLANE : 0)];
    float2 scales[C::SCALES];
#pragma unroll
    for (int half = 0; half < C::SCALES; ++half)
      scales[half] = C::scale(chunk, (span * C::SPAN + g) * C::SCALES + half);
    finish_unit<C>(u, scales);
    *reinterpret_cast<uint4*>(row + 64 * g + 16 * p) = uint4{u.r[0], u.r[1], u.r[2], u.r[3]};
  }
}

__device__ __forceinline__ Unit unit_at(const std::uint8_t* row, int group, int p) {
  const uint4 v = *reinterpret_cast<const uint4*>(row + 64 * group + 16 * p);
  return {{v.x, v.y, v.z, v.w}};
}

// Adds the products of a step to total: this warp's 2 tiles of rows times 4 of tokens.
__device__ __forceinline__ void multiply_step(const std::uint8_t* rows, const std::uint8_t* tokens,
                                              const Tile& tile, float (&total)[SUMS]) {
#pragma unroll 1
  for (int pair = 0; pair < GROUPS; pair += 2) {
    Unit a[2][2][Tile::ROWS * Tile::UNITS];
#pragma unroll
    for (int i = 0; i < 4 * Tile::ROWS * Tile::UNITS; ++i) {
      const int held = i % (Tile::ROWS * Tile::UNITS), m = i / (Tile::ROWS * Tile::UNITS) % 2;
      const int g = i / (2 * Tile::ROWS * Tile::UNITS);
      a[g][m][held] = unit_at(rows + (16 * m + tile.row(held / Tile::UNITS)) * STRIDE, pair + g,
                              tile.unit(held % Tile::UNITS));
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      float sum[2][Tile::VALUES] = {};
#pragma unroll
      for (int g = 0; g < 2; ++g) {
        Unit b[Tile::UNITS];
#pragma unroll
        for (int i = 0; i < Tile::UNITS; ++i)
          b[i] = unit_at(tokens + (8 * n + dealt(tile.token())) * STRIDE, pair + g, tile.unit(i));
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int m = 0; m < 2; ++m) Tile::multiply(sum[m], a[g][m], b, half);
      }
#pragma unroll
      for (int i = 0; i < 2 * Tile::VALUES; ++i)
        total[i / Tile::VALUES * 4 * Tile::VALUES + n * Tile::VALUES + i % Tile::VALUES] +=
            sum[i / Tile::VALUES][i % Tile::VALUES];
    }
  }
}

}  // namespace voltapile
