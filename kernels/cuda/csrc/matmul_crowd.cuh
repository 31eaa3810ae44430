// A chunk of 256 columns times 16 or 32 tokens, as its bytes lie: what matmul_block.cuh does for a
// few tokens, with the same bits, in loops that stay small. From sm_90 on.
//
// Sixteen warps that are at sixteen places of a long way want more instructions than the cache
// beside a scheduler keeps; here each one that was fetched is run several times.
#pragma once
#include "matmul_chunk.cuh"

#if VP_ARCH >= 900
namespace voltapile {

template <class F>
struct Crowd;

// What a lane reads of tokens: its unit of a group, of its token of each eight.
template <class F>
struct Seats {
  using T = BlockTokens<F>;
  static constexpr int EIGHT = 8 * T::PER_TOKEN;
  const std::uint8_t *units, *sums, *scales;

  __device__ __forceinline__ Seats(const T& tokens, const Tile& tile) {
    const std::uint8_t* own = tokens.memory + tile.token() * T::PER_TOKEN;
    units = own + 16 * tile.unit(0);
    sums = own + T::SUMS + 8 * tile.unit(0);
    scales = tokens.memory + tile.sum_token(0) * T::PER_TOKEN + T::SCALE;
  }
  __device__ __forceinline__ Unit unit(int group, int pass) const {
    return unit_at(reinterpret_cast<const Unit*>(units + 64 * group + EIGHT * pass));
  }
  __device__ __forceinline__ uint2 pair(int pass) const {
    return *reinterpret_cast<const uint2*>(sums + EIGHT * pass);
  }
  // Of the lane's i-th token.
  __device__ __forceinline__ float scale(int pass, int i) const {
    return *reinterpret_cast<const float*>(scales + EIGHT * pass + T::PER_TOKEN * i);
  }
};

using Sums = float[PASSES][Tile::VALUES];

template <>
struct Crowd<formats::Q4_K> {
  using F = formats::Q4_K;

  // Adds the products of 16 rows, of which this lane's two start at at[i], to total.
  static __device__ __forceinline__ void add(const std::uint8_t* memory,
                                             const int (&at)[Tile::ROWS],
                                             const BlockTokens<F>& tokens, const Tile& tile,
                                             Sums& total) {
    const Seats<F> seats(tokens, tile);
    const int p = tile.unit(0);
    Heads heads[2];
    unsigned scales[2], later[2];  // of this run's groups and those behind, a byte each
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      heads[i].v = *reinterpret_cast<const uint4*>(memory + at[i]);
      scales[i] = heads[i].scales(0), later[i] = heads[i].scales(1);
    }
    Sums sum = {};
#pragma unroll 1
    for (int run = 0; run < 4; ++run) {
      Unit a[2][2];
      float scale[2][2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint2 two =
            *reinterpret_cast<const uint2*>(memory + at[i] + 16 + 8 * p + 32 * run);
        const unsigned x = two.x >> 8, y = two.y >> 8;
        a[0][i] = {{two.x & 0x000f000f, x & 0x000f000f, two.y & 0x000f000f, y & 0x000f000f}};
        a[1][i] = {{two.x & 0x00f000f0, x & 0x00f000f0, two.y & 0x00f000f0, y & 0x00f000f0}};
        scale[0][i] = Block<F>::scale_of(scales[i], 0);
        scale[1][i] = Block<F>::scale_of(scales[i], 1);
        scales[i] = __funnelshift_r(scales[i], later[i], 16);
        later[i] >>= 16;
      }
#pragma unroll
      for (int odd = 0; odd < 2; ++odd)
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
          const Unit b = seats.unit(2 * run + odd, pass);
          float c[Tile::VALUES] = {};
          Tile::multiply(c, a[odd], &b, 0);
          Tile::multiply(c, a[odd], &b, 1);
#pragma unroll
          for (int e = 0; e < Tile::VALUES; ++e)
            sum[pass][e] = fmaf(scale[odd][Tile::row_of(e)], c[e], sum[pass][e]);
        }
    }
    const Unit least[2] = {heads[0].minima_of(p), heads[1].minima_of(p)};
    float2 factor[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      factor[i] = half_values(heads[i].v.x);
      factor[i] = {factor[i].x * 0x1p24f, factor[i].y * -64.0f};
    }
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
      const uint2 pair = seats.pair(pass);
      const Unit b{{pair.x, pair.y, 0, 0}};
      float c[Tile::VALUES] = {};
      Tile::multiply(c, least, &b, 0);
#pragma unroll
      for (int e = 0; e < Tile::VALUES; ++e) {
        const float2 by = factor[Tile::row_of(e)];
        const float part = fmaf(by.x, sum[pass][e], by.y * c[e]);
        total[pass][e] += seats.scale(pass, Tile::token_of(e)) * part;
      }
    }
  }
};

template <>
struct Crowd<formats::Q6_K> {
  using F = formats::Q6_K;

  static __device__ __forceinline__ void add(const std::uint8_t* memory,
                                             const int (&at)[Tile::ROWS],
                                             const BlockTokens<F>& tokens, const Tile& tile,
                                             Sums& total) {
    const Seats<F> seats(tokens, tile);
    const int p = tile.unit(0);
    const Words rows[2] = {Words(memory, at[0]), Words(memory, at[1])};
    Block<F>::Scale scales[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int f = 0; f < 4; ++f)
        scales[i][f] =
            Block<F>::scale_of(rows[i].at(192 + 8 * (p >> 1) + 4 * (f >> 1)), p, f);
    Sums sum = {};
#pragma unroll 1
    for (int k = 0; k < 4; ++k) {
      // A word of lower bits, and the upper ones that belong to it.
      const int turn = 4 * ((k + p) & 3) + 16 * (p & 1);
      const int low = turn + 64 * (p >> 1), upper = turn + 32 * (p >> 1) + 128;
      Unit a[2][2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const unsigned up = rows[i].at(upper), one = rows[i].at(low), two = rows[i].at(low + 32);
        const Block<F>::Scale* s = scales[i];
        Block<F>::unpack(one, up << 4, s[0], s[2], a[0][i].r, a[0][i].r + 2);
        Block<F>::unpack(one >> 8, up >> 4, s[0], s[2], a[0][i].r + 1, a[0][i].r + 3);
        Block<F>::unpack(two, up << 2, s[1], s[3], a[1][i].r, a[1][i].r + 2);
        Block<F>::unpack(two >> 8, up >> 6, s[1], s[3], a[1][i].r + 1, a[1][i].r + 3);
      }
#pragma unroll
      for (int pass = 0; pass < PASSES; ++pass) {
        float c[Tile::VALUES] = {};  // of 64 columns
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const Unit b = seats.unit(2 * k + i, pass);
          Tile::multiply(c, a[i], &b, 0);
          Tile::multiply(c, a[i], &b, 1);
        }
#pragma unroll
        for (int e = 0; e < Tile::VALUES; ++e) sum[pass][e] += c[e];
      }
    }
    float d[2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
      d[i] = half_value(*reinterpret_cast<const std::uint16_t*>(memory + at[i] + 208)) * 0x1p16f;
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass)
#pragma unroll
      for (int e = 0; e < Tile::VALUES; ++e)
        total[pass][e] +=
            seats.scale(pass, Tile::token_of(e)) * (d[Tile::row_of(e)] * sum[pass][e]);
  }
};

template <>
struct Crowd<formats::Q8_0> {
  using F = formats::Q8_0;

  static __device__ __forceinline__ void add(const std::uint8_t* memory,
                                             const int (&at)[Tile::ROWS],
                                             const BlockTokens<F>& tokens, const Tile& tile,
                                             Sums& total) {
    const Seats<F> seats(tokens, tile);
    Words words[2][2];  // of even and odd groups: they differ by 34 bytes, pairs of them by 68
#pragma unroll
    for (int n = 0; n < 4; ++n)
      words[n & 1][n >> 1] = Words(memory, at[n >> 1] + 34 * (n & 1) + 2 + 8 * tile.unit(0));
    Sums sum = {};
#pragma unroll 1
    for (int pair = 0; pair < 4; ++pair) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        Unit a[2];
        float d[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            const unsigned w = words[odd][i].at(68 * pair + 4 * n) ^ 0x80808080;
            a[i].r[2 * n] = half_add(__byte_perm(w, 0x64646464, 0x4140), SHIFT_OF_PAIRS);
            a[i].r[2 * n + 1] = half_add(__byte_perm(w, 0x64646464, 0x4342), SHIFT_OF_PAIRS);
          }
          d[i] = half_value(
              *reinterpret_cast<const std::uint16_t*>(memory + at[i] + 68 * pair + 34 * odd));
        }
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
          const Unit b = seats.unit(2 * pair + odd, pass);
          float c[Tile::VALUES] = {};
          Tile::multiply(c, a, &b, 0);
          Tile::multiply(c, a, &b, 1);
#pragma unroll
          for (int e = 0; e < Tile::VALUES; ++e)
            sum[pass][e] = fmaf(d[Tile::row_of(e)], c[e], sum[pass][e]);
        }
      }
    }
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass)
#pragma unroll
      for (int e = 0; e < Tile::VALUES; ++e)
        total[pass][e] += seats.scale(pass, Tile::token_of(e)) * sum[pass][e];
  }
};

// Adds a chunk's products to total, as multiply_any makes them.
template <class F, class Raw>
__device__ __forceinline__ void add_chunk(std::uint8_t* memory, int here, std::uint8_t* behind,
                                          const std::uint8_t* first, const Raw& stage,
                                          const typename ChunkMemory<F>::Staged& tokens,
                                          const Tile& tile, Sums& total) {
  if constexpr (Order<F>::IS_BLOCK) {
    int at[Tile::ROWS];
#pragma unroll
    for (int i = 0; i < Tile::ROWS; ++i) at[i] = here + stage.row_start(first, tile.row(i));
    Crowd<F>::add(memory, at, tokens, tile, total);
  } else {
    Sums part;
    multiply_chunk<F>(memory + here, behind, first, stage, tokens, tile, part);
#pragma unroll
    for (int i = 0; i < PASSES * Tile::VALUES; ++i)
      total[i / Tile::VALUES][i % Tile::VALUES] += part[i / Tile::VALUES][i % Tile::VALUES];
  }
}

}  // namespace voltapile
#endif
