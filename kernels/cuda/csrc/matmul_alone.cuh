// Chunks of Q4_K, Q5_K and Q8_0 times a token that is alone, from sm_80 on: in whole numbers, with
// the bits that it has in company (matmul_block.cuh, matmul_chunk.cuh), since sums of a group are
// exact either way.
//
// Columns of the tensor core are runs of two groups, instead of tokens, and of each its upper bytes
// and its lower ones: a lane takes the codes of one run, and columns 2 p and 2 p + 1 are zero but
// in the lanes that have run p. Compiled without contraction: fmaf stands where it is meant.
#pragma once
#include "matmul_order.cuh"
#include "matmul_words.cuh"
#include "unpack.cuh"

#if VP_ARCH >= 800
namespace voltapile {

// c += a b over 32 columns of bytes; a is signed or not, b is.
template <bool IS_SIGNED>
__device__ __forceinline__ void mma_codes(int (&c)[4], const unsigned (&a)[4], unsigned b0,
                                          unsigned b1) {
#ifdef VP_EMULATION
  (IS_SIGNED ? mma_signed_32 : mma_bytes_32)(c, a[0], a[1], a[2], a[3], b0, b1);
#else
  if constexpr (IS_SIGNED)
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// What is left of a word without `part` of its bits: as a multiply-add, since those that mask are
// what lanes wait for.
__device__ __forceinline__ unsigned without(unsigned word, unsigned part) {
#ifndef VP_EMULATION
  asm("mad.lo.u32 %0, %1, 0xffffffff, %0;" : "+r"(word) : "r"(part));
  return word;
#else
  return word - part;
#endif
}

// Sums of a lane's two groups, of both its rows.
template <bool IS_SIGNED>
struct Groups {
  int run;     // this lane's: they go from lane to lane, and lane 0 has the last
  uint4 b[4];  // the token's bytes: of the even group, of the odd one
  int even[4] = {}, odd[4] = {};  // of both rows sums of upper bytes, of lower ones

  static __device__ __forceinline__ int run_of(const Tile& tile) { return (tile.unit(0) + 3) & 3; }
  __device__ __forceinline__ Groups(const std::uint8_t* token, const Tile& tile)
      : run(run_of(tile)) {
    const int n = tile.token();
    const std::uint8_t* own = token + 128 * run + 32 * (n & 1);
    const bool is_own = n >> 1 == tile.unit(0);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      b[i] = uint4{0, 0, 0, 0};
      if (is_own) b[i] = *reinterpret_cast<const uint4*>(own + 64 * (i / 2) + 16 * (i & 1));
    }
  }
  // Eight columns of each: words 2 k and 2 k + 1 of a group, of both rows in turn.
  __device__ __forceinline__ void add(int k, const unsigned (&of_even)[4],
                                      const unsigned (&of_odd)[4]) {
    const uint4 &one = b[k / 2], &other = b[2 + k / 2];
    const int word = 2 * (k & 1);
    mma_codes<IS_SIGNED>(even, of_even, word_of(one, word), word_of(one, word + 1));
    mma_codes<IS_SIGNED>(odd, of_odd, word_of(other, word), word_of(other, word + 1));
  }
  // Of row i and an even or odd group.
  __device__ __forceinline__ int whole_of(int i, int is_odd) const {
    const int(&own)[4] = is_odd ? odd : even;
    return 256 * own[2 * i] + own[2 * i + 1];
  }
  __device__ __forceinline__ float sum_of(int i, int is_odd) const {  // which is exact
    return static_cast<float>(whole_of(i, is_odd));
  }
  // Goes through the runs in order: add(i, sum) adds a lane's own to that of row i. Only lane 0's
  // sums are whole.
  template <class Add>
  __device__ __forceinline__ void join(const Tile& tile, float (&sum)[2], Add add) const {
    sum[0] = sum[1] = 0;
#pragma unroll
    for (int step = 0; step < 4; ++step)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (step > 0) sum[i] = __shfl_sync(~0u, sum[i], (tile.lane & 28) | run);
        sum[i] = add(i, sum[i]);
      }
  }
};

template <class F>
struct Alone;

template <>
struct Alone<formats::Q4_K> {
  using F = formats::Q4_K;

  // What a lane reads of weights.
  struct Chunk {
    Heads heads[2];
    uint4 words[2][2];  // of its run, half after half, of both rows

    __device__ __forceinline__ Chunk() {}
    __device__ __forceinline__ Chunk(const std::uint8_t* memory, const int (&at)[Tile::ROWS],
                                     const Tile& tile) {
      const int run = Groups<false>::run_of(tile);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const std::uint8_t* row = memory + at[i];
        heads[i].v = *reinterpret_cast<const uint4*>(row);
#pragma unroll
        for (int half = 0; half < 2; ++half)
          words[half][i] =
              *reinterpret_cast<const uint4*>(row + 16 + 32 * run + 16 * (half ^ (run & 1)));
      }
    }
  };

  static __device__ __forceinline__ void multiply(const std::uint8_t* memory,
                                                  const int (&at)[Tile::ROWS],
                                                  const std::uint8_t* token, const Tile& tile,
                                                  float (&part)[PASSES][Tile::VALUES]) {
    multiply(Chunk(memory, at, tile), token, tile, part);
  }
  static __device__ __forceinline__ void multiply(const Chunk& chunk, const std::uint8_t* token,
                                                  const Tile& tile,
                                                  float (&part)[PASSES][Tile::VALUES]) {
    using T = BlockTokens<F>;
    Groups<false> groups(token, tile);
    const int p = tile.unit(0), turned = groups.run & 1;
    float scale[2][2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const unsigned four = chunk.heads[i].scales(groups.run >> 1);
      scale[i][0] = Heads::number_at(four, 2 * turned, 0x4b000000);
      scale[i][1] = Heads::number_at(four, 2 * turned + 1, 0x49000000);
    }
    const Unit least[2] = {chunk.heads[0].minima_of(p), chunk.heads[1].minima_of(p)};
    const uint2 pair = T::sums(token, p);
    const Unit sums{{pair.x, pair.y, 0, 0}};
    float c[Tile::VALUES] = {};
    Tile::multiply(c, least, &sums, 0);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      unsigned low[4], high[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const unsigned word = word_of(chunk.words[k / 2][i & 1], 2 * (k & 1) + i / 2);
        low[i] = word & 0x0f0f0f0f, high[i] = without(word, low[i]);
      }
      groups.add(k, low, high);
    }
    float sum[2], of_group[2][2];
#pragma unroll
    for (int i = 0; i < 4; ++i) of_group[i / 2][i & 1] = groups.sum_of(i / 2, i & 1);
    groups.join(tile, sum, [&](int i, float all) {
      return fmaf(scale[i][1], of_group[i][1], fmaf(scale[i][0], of_group[i][0], all));
    });
    const float factor = *reinterpret_cast<const float*>(token + T::SCALE);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 by = half_values(chunk.heads[i].v.x);
      part[0][2 * i] = factor * fmaf(by.x * 0x1p-24f, sum[i], by.y * -64.0f * c[2 * i]);
      part[0][2 * i + 1] = 0;
    }
  }
};

template <>
struct Alone<formats::Q8_0> {
  using F = formats::Q8_0;

  static __device__ __forceinline__ void multiply(const std::uint8_t* memory,
                                                  const int (&at)[Tile::ROWS],
                                                  const std::uint8_t* token, const Tile& tile,
                                                  float (&part)[PASSES][Tile::VALUES]) {
    using T = BlockTokens<F>;
    Groups<true> groups(token, tile);
    EndWords words[2][2];
    float sum[2], scale[2][2], of_group[2][2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int own = at[i / 2] + 68 * groups.run + 34 * (i & 1);
      words[i / 2][i & 1] = EndWords(memory, own + 2);
      scale[i / 2][i & 1] = half_value(*reinterpret_cast<const std::uint16_t*>(memory + own));
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      unsigned a[2][4];
#pragma unroll
      for (int i = 0; i < 8; ++i)
        a[i & 1][i / 2] = words[i / 2 & 1][i & 1].at(8 * k + 4 * (i / 4));
      groups.add(k, a[0], a[1]);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 up = reinterpret_cast<const float2*>(token + T::SUMS)[groups.run];
      of_group[i][0] = groups.sum_of(i, 0) * up.x, of_group[i][1] = groups.sum_of(i, 1) * up.y;
    }
    groups.join(tile, sum, [&](int i, float all) {
      return fmaf(scale[i][1], of_group[i][1], fmaf(scale[i][0], of_group[i][0], all));
    });
    const float factor = *reinterpret_cast<const float*>(token + T::SCALE);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      part[0][2 * i] = factor * sum[i];
      part[0][2 * i + 1] = 0;
    }
  }
};

template <>
struct Alone<formats::Q5_K> {
  // rows: this lane's. sums: of the token's groups. factor: what all is multiplied by.
  static __device__ __forceinline__ void multiply(const std::uint8_t* const (&rows)[Tile::ROWS],
                                                  const std::uint8_t* token, const float* sums,
                                                  float factor, const Tile& tile,
                                                  float (&part)[PASSES][Tile::VALUES]) {
    Groups<false> groups(token, tile), fifths = groups;  // four bits of codes, and the fifth ones
    const int run = groups.run, turned = run & 1;
    const unsigned of_even = 0x01010101u << 2 * run, of_odd = of_even << 1;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint4 words[2], ups[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const std::uint8_t* from = rows[i] + 16 * (half ^ turned);
        ups[i] = *reinterpret_cast<const uint4*>(from + 16);
        words[i] = *reinterpret_cast<const uint4*>(from + 48 + 32 * run);
      }
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        unsigned low[4], high[4], even[4], odd[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const unsigned word = word_of(words[i & 1], 2 * k + i / 2);
          const unsigned up = word_of(ups[i & 1], 2 * k + i / 2);
          low[i] = word & 0x0f0f0f0f, high[i] = without(word, low[i]);
          even[i] = up & of_even, odd[i] = up & of_odd;
        }
        groups.add(2 * half + k, low, high);
        fifths.add(2 * half + k, even, odd);
      }
    }
    const float all[2] = {sums[2 * run] * 0x1p24f, sums[2 * run + 1] * 0x1p24f};
    float sum[2], of_group[2][2];
    float2 scale[2][2];  // as Codec::scale makes them: codes are 32 more there
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Heads heads{*reinterpret_cast<const uint4*>(rows[i])};
      const unsigned scales = heads.scales(run >> 1), minima = heads.minima(run >> 1);
      const float2 d = half_values(heads.v.x);
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const float s = d.x * Heads::number_at(scales, 2 * turned + odd, 0x4b000000);
        const float least = Heads::number_at(minima, 2 * turned + odd, 0x4b000000);
        scale[i][odd] = {s, -(32 * s + d.y * least)};
        // 4 or 16 times the sum, which is exact.
        const int whole = groups.whole_of(i, odd) * (odd ? 1 : 4) +
                          fifths.whole_of(i, odd) * ((odd ? 128 : 64) >> 2 * run);
        const float codes = static_cast<float>(whole) * (odd ? 0x1p-4f : 0x1p-2f);
        of_group[i][odd] = fmaf(all[odd], 32.0f, codes);
      }
    }
    groups.join(tile, sum, [&](int i, float before) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        before = fmaf(scale[i][odd].x, of_group[i][odd], before);
        before = fmaf(scale[i][odd].y, all[odd], before);
      }
      return before;
    });
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      part[0][2 * i] = factor * (sum[i] * 0x1p-24f);
      part[0][2 * i + 1] = 0;
    }
  }
};

}  // namespace voltapile
#endif
