// A chunk of 256 columns times 16 or 32 tokens, as its bytes lie: what matmul_block.cuh does for a
// few tokens, with the same bits, in loops that stay small. From sm_90 on.
//
// Sixteen warps that are at sixteen places of a long way want more instructions than the cache
// beside a scheduler keeps; here each one that was fetched is run several times.
#pragma once
#include "matmul_chunk.cuh"

#if VP_ARCH >= 900
namespace voltapile {

// A chunk of a tile as it lies in memory (tiles.cuh) and is copied: row behind row.
template <class F>
struct Dense {
  static constexpr int ROW = Codec<F>::BYTES, SIZE = 16 * ROW;
  static __device__ __forceinline__ int row_start(const std::uint8_t*, int row) {
    return row * ROW;
  }
};

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

  // Adds the products of 16 rows times T, of which this lane's start at at[t][i], to total.
  template <int T>
  static __device__ __forceinline__ void add(const std::uint8_t* memory,
                                             const int (&at)[T][Tile::ROWS],
                                             const BlockTokens<F>& tokens, const Tile& tile,
                                             Sums (&total)[T]) {
    const Seats<F> seats(tokens, tile);
    const int p = tile.unit(0);
    unsigned scales[T][2], later[T][2];  // of this run's groups and those behind, a byte each
#pragma unroll
    for (int i = 0; i < 2 * T; ++i) {
      const Heads heads{*reinterpret_cast<const uint4*>(memory + at[i / 2][i % 2])};
      scales[i / 2][i % 2] = heads.scales(0), later[i / 2][i % 2] = heads.scales(1);
    }
    Sums sum[T] = {};
#pragma unroll 1
    for (int run = 0; run < 4; ++run) {
      Unit a[T][2][2];
      float scale[T][2][2];
#pragma unroll
      for (int n = 0; n < 2 * T; ++n) {
        const int t = n / 2, i = n % 2;
        const uint2 two =
            *reinterpret_cast<const uint2*>(memory + at[t][i] + 16 + 8 * p + 32 * run);
        const unsigned x = two.x >> 8, y = two.y >> 8;
        a[t][0][i] = {{two.x & 0x000f000f, x & 0x000f000f, two.y & 0x000f000f, y & 0x000f000f}};
        a[t][1][i] = {{two.x & 0x00f000f0, x & 0x00f000f0, two.y & 0x00f000f0, y & 0x00f000f0}};
        scale[t][0][i] = Block<F>::scale_of(scales[t][i], 0);
        scale[t][1][i] = Block<F>::scale_of(scales[t][i], 1);
        scales[t][i] = __funnelshift_r(scales[t][i], later[t][i], 16);
        later[t][i] >>= 16;
      }
#pragma unroll
      for (int odd = 0; odd < 2; ++odd)
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
          const Unit b = seats.unit(2 * run + odd, pass);
#pragma unroll
          for (int t = 0; t < T; ++t) {
            float c[Tile::VALUES] = {};
            Tile::multiply(c, a[t][odd], &b, 0);
            Tile::multiply(c, a[t][odd], &b, 1);
#pragma unroll
            for (int e = 0; e < Tile::VALUES; ++e)
              sum[t][pass][e] = fmaf(scale[t][odd][Tile::row_of(e)], c[e], sum[t][pass][e]);
          }
        }
    }
#pragma unroll
    for (int t = 0; t < T; ++t) {
      Unit least[2];
      float2 factor[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const Heads heads{*reinterpret_cast<const uint4*>(memory + at[t][i])};
        least[i] = heads.minima_of(p);
        factor[i] = half_values(heads.v.x);
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
          const float part = fmaf(by.x, sum[t][pass][e], by.y * c[e]);
          total[t][pass][e] += seats.scale(pass, Tile::token_of(e)) * part;
        }
      }
    }
  }
};

template <>
struct Crowd<formats::Q6_K> {
  using F = formats::Q6_K;

  template <int T>
  static __device__ __forceinline__ void add(const std::uint8_t* memory,
                                             const int (&at)[T][Tile::ROWS],
                                             const BlockTokens<F>& tokens, const Tile& tile,
                                             Sums (&total)[T]) {
    const Seats<F> seats(tokens, tile);
    const int p = tile.unit(0);
    Words rows[T][2];
    Block<F>::Scale scales[T][2][4];
#pragma unroll
    for (int n = 0; n < 2 * T; ++n) {
      Words& own = rows[n / 2][n % 2];
      own = Words(memory, at[n / 2][n % 2]);
#pragma unroll
      for (int f = 0; f < 4; ++f)
        scales[n / 2][n % 2][f] =
            Block<F>::scale_of(own.at(192 + 8 * (p >> 1) + 4 * (f >> 1)), p, f);
    }
    Sums sum[T] = {};
#pragma unroll 1
    for (int k = 0; k < 4; ++k) {
      // A word of lower bits, and the upper ones that belong to it.
      const int turn = 4 * Order<F>::word(k, p) + 16 * (p & 1);
      const int low = turn + 64 * (p >> 1), upper = turn + 32 * (p >> 1) + 128;
      Unit a[T][2][2];
#pragma unroll
      for (int n = 0; n < 2 * T; ++n) {
        const int t = n / 2, i = n % 2;
        const Words& own = rows[t][i];
        const unsigned up = own.at(upper), one = own.at(low), two = own.at(low + 32);
        const Block<F>::Scale* s = scales[t][i];
        Unit *first = &a[t][0][i], *second = &a[t][1][i];
        Block<F>::unpack(one, up << 4, s[0], s[2], first->r, first->r + 2);
        Block<F>::unpack(one >> 8, up >> 4, s[0], s[2], first->r + 1, first->r + 3);
        Block<F>::unpack(two, up << 2, s[1], s[3], second->r, second->r + 2);
        Block<F>::unpack(two >> 8, up >> 6, s[1], s[3], second->r + 1, second->r + 3);
      }
#pragma unroll
      for (int pass = 0; pass < PASSES; ++pass) {
        const Unit b[2] = {seats.unit(2 * k, pass), seats.unit(2 * k + 1, pass)};
#pragma unroll
        for (int t = 0; t < T; ++t) {
          float c[Tile::VALUES] = {};  // of 64 columns
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            Tile::multiply(c, a[t][i], b + i, 0);
            Tile::multiply(c, a[t][i], b + i, 1);
          }
#pragma unroll
          for (int e = 0; e < Tile::VALUES; ++e) sum[t][pass][e] += c[e];
        }
      }
    }
#pragma unroll
    for (int t = 0; t < T; ++t) {
      float d[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int place = at[t][i] + 208;
        d[i] = half_value(*reinterpret_cast<const std::uint16_t*>(memory + place)) * 0x1p16f;
      }
#pragma unroll
      for (int pass = 0; pass < PASSES; ++pass)
#pragma unroll
        for (int e = 0; e < Tile::VALUES; ++e)
          total[t][pass][e] +=
              seats.scale(pass, Tile::token_of(e)) * (d[Tile::row_of(e)] * sum[t][pass][e]);
    }
  }
};

template <>
struct Crowd<formats::Q8_0> {
  using F = formats::Q8_0;

  template <int T>
  static __device__ __forceinline__ void add(const std::uint8_t* memory,
                                             const int (&at)[T][Tile::ROWS],
                                             const BlockTokens<F>& tokens, const Tile& tile,
                                             Sums (&total)[T]) {
    const Seats<F> seats(tokens, tile);
    Words words[T][2][2];  // of even and odd groups: they differ by 34 bytes, pairs of them by 68
#pragma unroll
    for (int n = 0; n < 4 * T; ++n)
      words[n / 4][n & 1][n >> 1 & 1] =
          Words(memory, at[n / 4][n >> 1 & 1] + 34 * (n & 1) + 2 + 8 * tile.unit(0));
    Sums sum[T] = {};
#pragma unroll 1
    for (int pair = 0; pair < 4; ++pair) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        Unit a[T][2];
        float d[T][2];
#pragma unroll
        for (int m = 0; m < 2 * T; ++m) {
          const int t = m / 2, i = m % 2;
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            const unsigned w = words[t][odd][i].at(68 * pair + 4 * n) ^ 0x80808080;
            a[t][i].r[2 * n] = half_add(__byte_perm(w, 0x64646464, 0x4140), SHIFT_OF_PAIRS);
            a[t][i].r[2 * n + 1] = half_add(__byte_perm(w, 0x64646464, 0x4342), SHIFT_OF_PAIRS);
          }
          d[t][i] = half_value(*reinterpret_cast<const std::uint16_t*>(memory + at[t][i] +
                                                                       68 * pair + 34 * odd));
        }
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
          const Unit b = seats.unit(2 * pair + odd, pass);
#pragma unroll
          for (int t = 0; t < T; ++t) {
            float c[Tile::VALUES] = {};
            Tile::multiply(c, a[t], &b, 0);
            Tile::multiply(c, a[t], &b, 1);
#pragma unroll
            for (int e = 0; e < Tile::VALUES; ++e)
              sum[t][pass][e] = fmaf(d[t][Tile::row_of(e)], c[e], sum[t][pass][e]);
          }
        }
      }
    }
#pragma unroll
    for (int t = 0; t < T; ++t)
#pragma unroll
      for (int pass = 0; pass < PASSES; ++pass)
#pragma unroll
        for (int e = 0; e < Tile::VALUES; ++e)
          total[t][pass][e] += seats.scale(pass, Tile::token_of(e)) * sum[t][pass][e];
  }
};

// Adds the products of T tiles' chunks, `here` one behind another, as multiply_any makes them.
template <class F, int T>
__device__ __forceinline__ void add_chunk(std::uint8_t* memory, int here, std::uint8_t* behind,
                                          const typename ChunkMemory<F>::Staged& tokens,
                                          const Tile& tile, Sums (&total)[T]) {
  if constexpr (Order<F>::IS_BLOCK) {
    int at[T][Tile::ROWS];
#pragma unroll
    for (int n = 0; n < T * Tile::ROWS; ++n)
      at[n / Tile::ROWS][n % Tile::ROWS] = here + n / Tile::ROWS * Dense<F>::SIZE +
                                           Dense<F>::ROW * tile.row(n % Tile::ROWS);
    Crowd<F>::add(memory, at, tokens, tile, total);
  } else {
    static_assert(T == 1);
    Sums part;
    multiply_chunk<F>(memory + here, behind, nullptr, Dense<F>(), tokens, tile, part);
#pragma unroll
    for (int i = 0; i < PASSES * Tile::VALUES; ++i)
      total[0][i / Tile::VALUES][i % Tile::VALUES] += part[i / Tile::VALUES][i % Tile::VALUES];
  }
}

}  // namespace voltapile
#endif
