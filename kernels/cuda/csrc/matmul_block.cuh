// Chunks of 256 columns that are multiplied as their bytes lie: Q4_K, Q6_K and Q8_0. A lane takes
// bytes that are neighbours; matmul_order.cuh tells which columns that makes.
//
// Compiled without contraction, so that kernels for different numbers of tokens cannot round
// differently: fmaf stands where it is meant.
#pragma once
#include "matmul_alone.cuh"
#include "matmul_stage.cuh"
#include "unpack_k.cuh"

namespace voltapile {

template <class F>
struct Block;

// Nibbles stay where they are: as halves they are q 2^-24 and q 2^-20. Sums of a group are exact
// until its scale comes.
template <>
struct Block<formats::Q4_K> {
  using F = formats::Q4_K;
  static constexpr int LANE_UNITS = Tile::ROWS * Tile::UNITS;

  static __device__ __forceinline__ float scale_of(unsigned four, int group) {
    return Heads::scale_of(four, group);
  }
  static __device__ __forceinline__ void multiply(const std::uint8_t* memory,
                                                  const int (&at)[Tile::ROWS],
                                                  const BlockTokens<F>& tokens, const Tile& tile,
                                                  float (&part)[PASSES][Tile::VALUES]) {
#if VP_ARCH >= 800
    if (tokens.is_alone()) return Alone<F>::multiply(memory, at, tokens.memory, tile, part);
#endif
    Heads heads[Tile::ROWS];
#pragma unroll
    for (int i = 0; i < Tile::ROWS; ++i)
      heads[i].v = *reinterpret_cast<const uint4*>(memory + at[i]);
    float sum[PASSES][Tile::VALUES] = {};
#pragma unroll
    for (int run = 0; run < 4; ++run) {
      Unit a[2][LANE_UNITS];
#pragma unroll
      for (int u = 0; u < LANE_UNITS; ++u) {
        const uint2 two = *reinterpret_cast<const uint2*>(
            memory + at[u / Tile::UNITS] + 16 + 32 * run + 8 * tile.unit(u % Tile::UNITS));
        const unsigned x = two.x >> 8, y = two.y >> 8;
        a[0][u] = {{two.x & 0x000f000f, x & 0x000f000f, two.y & 0x000f000f, y & 0x000f000f}};
        a[1][u] = {{two.x & 0x00f000f0, x & 0x00f000f0, two.y & 0x00f000f0, y & 0x00f000f0}};
      }
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const int group = 2 * run + odd;
        unsigned scales[Tile::ROWS];
        float scale[2];
#pragma unroll
        for (int i = 0; i < Tile::ROWS; ++i) scales[i] = heads[i].scales(group / 4);
#pragma unroll
        for (int i = 0; i < 2; ++i) scale[i] = scale_of(tile.of_sum_row(scales, i), group);
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
          if (LEAVES_OUT && pass > 0 && 8 * pass >= tokens.room) continue;
          const std::uint8_t* record = tokens.record(8 * pass + tile.token());
          Unit b[Tile::UNITS];
          float c[Tile::VALUES] = {};
#pragma unroll
          for (int u = 0; u < Tile::UNITS; ++u)
            b[u] = tokens.unit(record, group, tile.unit(u));
          Tile::multiply(c, a[odd], b, 0);
          Tile::multiply(c, a[odd], b, 1);
#pragma unroll
          for (int e = 0; e < Tile::VALUES; ++e)
            sum[pass][e] = fmaf(scale[Tile::row_of(e)], c[e], sum[pass][e]);
        }
      }
    }
    Unit least[LANE_UNITS];
    unsigned factors[Tile::ROWS];
#pragma unroll
    for (int u = 0; u < LANE_UNITS; ++u)
      least[u] = heads[u / Tile::UNITS].minima_of(tile.unit(u % Tile::UNITS));
#pragma unroll
    for (int i = 0; i < Tile::ROWS; ++i) factors[i] = heads[i].v.x;
    float2 factor[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      factor[i] = half_values(tile.of_sum_row(factors, i));
      factor[i] = {factor[i].x * 0x1p24f, factor[i].y * -64.0f};
    }
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
      if (LEAVES_OUT && pass > 0 && 8 * pass >= tokens.room) continue;
      const std::uint8_t* record = tokens.record(8 * pass + tile.token());
      Unit b[Tile::UNITS];
      float c[Tile::VALUES] = {};
#pragma unroll
      for (int u = 0; u < Tile::UNITS; ++u) {
        const uint2 pair = tokens.sums(record, tile.unit(u));
        b[u] = {{pair.x, pair.y, 0, 0}};
      }
      Tile::multiply(c, least, b, 0);
#pragma unroll
      for (int e = 0; e < Tile::VALUES; ++e) {
        const float2 by = factor[Tile::row_of(e)];
        const float scale = tokens.scale(8 * pass + tile.sum_token(Tile::token_of(e)));
        part[pass][e] = scale * fmaf(by.x, sum[pass][e], by.y * c[e]);
      }
    }
  }
};

// (q - 32) s as a half, rounded once; d and the rest of the powers of two come last.
template <>
struct Block<formats::Q6_K> {
  using F = formats::Q6_K;
  static constexpr int LANE_UNITS = Tile::ROWS * Tile::UNITS;

  struct Scale {  // of a run of 16 columns: for nibbles at bit 0, at bit 4, and of the 32
    unsigned low, high, offset;
  };
  // field: 0..3 of the lane's bits. pair: the word with its scale and the next but one.
  static __device__ __forceinline__ Scale scale_of(unsigned pair, int p, int field) {
    const unsigned select = 0x4040 + ((p & 1) + 2 * (field & 1)) * 0x0101;
    const unsigned s =
        half_add(__byte_perm(pair ^ 0x80808080, 0x64646464, select), SHIFT_OF_PAIRS);
    return {half_mul(s, 0x5c005c00), half_mul(s, 0x4c004c00), half_mul(s, 0x90009000)};
  }
  // Columns of fields f (nibbles at bit 0) and f + 2 (at bit 4). up: bits 4, 5 and 8, 9 of its
  // halves are theirs.
  static __device__ __forceinline__ void unpack(unsigned low, unsigned up, const Scale& first,
                                                const Scale& second, unsigned* a, unsigned* b) {
    *a = half_fma((low & 0x000f000f) | (up & 0x00300030), first.low, first.offset);
    *b = half_fma((low & 0x00f000f0) | (up & 0x03000300), second.high, second.offset);
  }

  // memory: 16 rows, of which this lane's start at `at`.
  static __device__ __forceinline__ void multiply(const std::uint8_t* memory,
                                                  const int (&at)[Tile::ROWS],
                                                  const BlockTokens<F>& tokens, const Tile& tile,
                                                  float (&part)[PASSES][Tile::VALUES]) {
    // Of this lane, k-th in turn: a word of lower bits, and the upper ones that belong to it.
    int lows[Tile::UNITS][4], uppers[Tile::UNITS][4];
#pragma unroll
    for (int i = 0; i < 4 * Tile::UNITS; ++i) {
      const int p = tile.unit(i / 4), turn = 4 * Order<F>::word(i % 4, p) + 16 * (p & 1);
      lows[i / 4][i % 4] = turn + 64 * (p >> 1);
      uppers[i / 4][i % 4] = turn + 32 * (p >> 1) + 128;
    }
    Words rows[Tile::ROWS] = {Words(memory, at[0])};  // which are a multiple of 16 bytes apart
#pragma unroll
    for (int i = 1; i < Tile::ROWS; ++i) rows[i] = rows[0].after(at[i] - at[0]);
    Scale scales[LANE_UNITS][4];
#pragma unroll
    for (int u = 0; u < LANE_UNITS; ++u) {
      const int p = tile.unit(u % Tile::UNITS);
      const Words& words = rows[u / Tile::UNITS];
      const unsigned pairs[2] = {words.at(192 + 8 * (p >> 1)), words.at(196 + 8 * (p >> 1))};
#pragma unroll
      for (int f = 0; f < 4; ++f) scales[u][f] = scale_of(pairs[f >> 1], p, f);
    }
    float sum[PASSES][Tile::VALUES] = {};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      Unit a[2][LANE_UNITS];
#pragma unroll
      for (int u = 0; u < LANE_UNITS; ++u) {
        const Words& words = rows[u / Tile::UNITS];
        const int low = lows[u % Tile::UNITS][k], upper = uppers[u % Tile::UNITS][k];
        const unsigned up = words.at(upper), one = words.at(low), two = words.at(low + 32);
        const Scale* s = scales[u];
        unpack(one, up << 4, s[0], s[2], a[0][u].r, a[0][u].r + 2);
        unpack(one >> 8, up >> 4, s[0], s[2], a[0][u].r + 1, a[0][u].r + 3);
        unpack(two, up << 2, s[1], s[3], a[1][u].r, a[1][u].r + 2);
        unpack(two >> 8, up >> 6, s[1], s[3], a[1][u].r + 1, a[1][u].r + 3);
      }
#pragma unroll
      for (int pass = 0; pass < PASSES; ++pass) {
        if (LEAVES_OUT && pass > 0 && 8 * pass >= tokens.room) continue;
        const std::uint8_t* record = tokens.record(8 * pass + tile.token());
        float c[Tile::VALUES] = {};  // of 64 columns
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          Unit b[Tile::UNITS];
#pragma unroll
          for (int u = 0; u < Tile::UNITS; ++u)
            b[u] = tokens.unit(record, 2 * k + i, tile.unit(u));
          Tile::multiply(c, a[i], b, 0);
          Tile::multiply(c, a[i], b, 1);
        }
#pragma unroll
        for (int e = 0; e < Tile::VALUES; ++e) sum[pass][e] += c[e];
      }
    }
    unsigned factors[Tile::ROWS];
#pragma unroll
    for (int i = 0; i < Tile::ROWS; ++i)
      factors[i] = *reinterpret_cast<const std::uint16_t*>(memory + at[i] + 208);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float d = half_value(tile.of_sum_row(factors, i)) * 0x1p16f;
#pragma unroll
      for (int pass = 0; pass < PASSES; ++pass)
#pragma unroll
        for (int e = 0; e < Tile::VALUES; ++e) {
          const float scale = tokens.scale(8 * pass + tile.sum_token(Tile::token_of(e)));
          if (Tile::row_of(e) == i) part[pass][e] = scale * (d * sum[pass][e]);
        }
    }
  }
};

template <>
struct Block<formats::Q8_0> {
  using F = formats::Q8_0;
  static constexpr int LANE_UNITS = Tile::ROWS * Tile::UNITS;

  static __device__ __forceinline__ void multiply(const std::uint8_t* memory,
                                                  const int (&at)[Tile::ROWS],
                                                  const BlockTokens<F>& tokens, const Tile& tile,
                                                  float (&part)[PASSES][Tile::VALUES]) {
#if VP_ARCH >= 800
    if (tokens.is_alone()) return Alone<F>::multiply(memory, at, tokens.memory, tile, part);
#endif
    float sum[PASSES][Tile::VALUES] = {};
#pragma unroll (IS_ASYNC ? 8 : 1)
    for (int group = 0; group < 8; ++group) {
      Unit a[LANE_UNITS];
#pragma unroll
      for (int u = 0; u < LANE_UNITS; ++u) {
        // Groups differ by 34 bytes, pairs of them by 68: the shift is one of two.
        const int p = tile.unit(u % Tile::UNITS), row = at[u / Tile::UNITS];
        const EndWords words(memory, row + 34 * (group & 1) + 2 + 8 * p);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const unsigned w = words.at(68 * (group / 2) + 4 * i) ^ 0x80808080;
          a[u].r[2 * i] = half_add(__byte_perm(w, 0x64646464, 0x4140), SHIFT_OF_PAIRS);
          a[u].r[2 * i + 1] = half_add(__byte_perm(w, 0x64646464, 0x4342), SHIFT_OF_PAIRS);
        }
      }
      unsigned scales[Tile::ROWS];
      float d[2];
#pragma unroll
      for (int i = 0; i < Tile::ROWS; ++i)
        scales[i] = *reinterpret_cast<const std::uint16_t*>(memory + at[i] + 34 * group);
#pragma unroll
      for (int i = 0; i < 2; ++i) d[i] = half_value(tile.of_sum_row(scales, i));
#pragma unroll
      for (int pass = 0; pass < PASSES; ++pass) {
        if (LEAVES_OUT && pass > 0 && 8 * pass >= tokens.room) continue;
        const std::uint8_t* record = tokens.record(8 * pass + tile.token());
        Unit b[Tile::UNITS];
        float c[Tile::VALUES] = {};
#pragma unroll
        for (int u = 0; u < Tile::UNITS; ++u) b[u] = tokens.unit(record, group, tile.unit(u));
        Tile::multiply(c, a, b, 0);
        Tile::multiply(c, a, b, 1);
#pragma unroll
        for (int e = 0; e < Tile::VALUES; ++e)
          sum[pass][e] = fmaf(d[Tile::row_of(e)], c[e], sum[pass][e]);
      }
    }
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass)
#pragma unroll
      for (int e = 0; e < Tile::VALUES; ++e) {
        part[pass][e] = tokens.scale(8 * pass + tile.sum_token(Tile::token_of(e))) * sum[pass][e];
      }
  }
};

}  // namespace voltapile
