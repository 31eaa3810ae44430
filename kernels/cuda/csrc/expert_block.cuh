// Chunks of 256 columns in whole numbers, from sm_80 on: 16 rows of weights as bytes, times up to
// four tokens as 16-bit numbers (expert_tokens.cuh), whose two bytes are two columns of the tensor
// core's 8. Sums are exact until scales come that are halves: those of a chunk of a K format
// (here), of a group of others (expert_block_32.cuh).
//
// Lane l holds the sums of rows row(0) and row(1) of mma.cuh's Tile, and of token l % 4. One token
// can have all columns: lanes p bring codes of a part of their own, which columns 2 p and 2 p + 1
// take, and no others. A lane then has the sums and the scales of its part; in the end it has the
// sum of row(l % 2). The bits are the same.
#pragma once
#include "expert_tokens.cuh"

namespace voltapile {

#if VP_ARCH >= 800
#ifndef VP_EMULATION
__device__ __forceinline__ void mma_bytes_32(int (&c)[4], unsigned a0, unsigned a1, unsigned a2,
                                             unsigned a3, unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_signed_16(int (&c)[4], unsigned a0, unsigned a1, unsigned b0) {
  asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(b0));
}
__device__ __forceinline__ void mma_signed_32(int (&c)[4], unsigned a0, unsigned a1, unsigned a2,
                                              unsigned a3, unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
#endif
// Column n = lane / 4 is a token's plane.
__device__ __forceinline__ const std::uint8_t* column_of(const std::uint8_t* tokens, int size,
                                                         int room, int lane) {
  const int token = lane >> 3;
  return tokens + (token < room ? token : 0) * size + 32 * (lane >> 2 & 1) + 8 * (lane & 3);
}

// 16 bytes of the upper ones, or 32 later of the lower ones, of a token that has all columns:
// columns 2 p and 2 p + 1 are what lanes p bring of A, since others bring nothing of B.
template <class T>
__device__ __forceinline__ T own_bytes(const std::uint8_t* from, int lane) {
  T bytes{};
  if (lane >> 3 == (lane & 3)) bytes = *reinterpret_cast<const T*>(from + 8 * (lane & 4));
  return bytes;
}
// Of four lanes p the sums; row p & 1 is left to each.
__device__ __forceinline__ void join_runs(const int (&total)[4], int (&own)[2], int lane) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int sent = lane & 1 ? total[i] : total[2 + i];
    own[i] = (lane & 1 ? total[2 + i] : total[i]) + __shfl_xor_sync(~0u, sent, 1);
    own[i] += __shfl_xor_sync(~0u, own[i], 2);
  }
}

// multiply(), of `room` tokens, and multiply_one(). sums: of the lane's two rows and its token. at:
// where its rows start. groups: of 32 columns; always eight in K formats.
template <class F>
struct WholeBlock;

// Q4_K and, with a FIFTH bit, Q5_K. CODES: where a block's lower bits begin.
template <int CODES, bool FIFTH>
struct FourBits {
  using T = WholeTokens<formats::Q4_K>;
  static constexpr int SETS = FIFTH ? 1 : 2;  // of sums: upper four bits are left where they are

  // Of group 2 run + odd. fifth: the row's upper bits, one of each group in a byte.
  static __device__ __forceinline__ unsigned codes(unsigned word, unsigned fifth, int run,
                                                   int odd) {
    if (!FIFTH) return word & (odd ? 0xf0f0f0f0u : 0x0f0f0f0fu);
    const int up = 4 - 2 * run - odd;
    const unsigned bits = up >= 0 ? fifth << up : fifth >> -up;
    return (odd ? word >> 4 : word) & 0x0f0f0f0fu | bits & 0x10101010u;
  }

  static __device__ __forceinline__ void multiply(const std::uint8_t* memory,
                                                  const int (&at)[Tile::ROWS],
                                                  const std::uint8_t* tokens, int room, int lane,
                                                  int groups, float (&sums)[2]) {
    const int p = lane & 3;
    Heads heads[2];
    uint2 fifth[2] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      heads[i].v = *reinterpret_cast<const uint4*>(memory + at[i]);
      if (FIFTH) fifth[i] = *reinterpret_cast<const uint2*>(memory + at[i] + 16 + 8 * p);
    }
    const std::uint8_t* column = column_of(tokens, T::PER_TOKEN, room, lane);
    int total[SETS][4] = {};
#pragma unroll
    for (int run = 0; run < 4; ++run) {
      const int from = CODES + 32 * run + 8 * p;
      const uint2 one = *reinterpret_cast<const uint2*>(memory + at[0] + from);
      const uint2 two = *reinterpret_cast<const uint2*>(memory + at[1] + from);
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const int group = 2 * run + odd;
        const uint2 b = *reinterpret_cast<const uint2*>(column + 64 * group);
        int c[4] = {};
        mma_bytes_32(c, codes(one.x, fifth[0].x, run, odd), codes(two.x, fifth[1].x, run, odd),
                     codes(one.y, fifth[0].y, run, odd), codes(two.y, fifth[1].y, run, odd), b.x,
                     b.y);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int scale = __byte_perm(heads[i].scales(group / 4), 0, 0x4440 + group % 4);
          total[odd % SETS][2 * i] += scale * c[2 * i];
          total[odd % SETS][2 * i + 1] += scale * c[2 * i + 1];
        }
      }
    }
    float c[Tile::VALUES];
    minima(heads, tokens, room, lane, c);
    const float scale = *reinterpret_cast<const float*>(
        tokens + (p < room ? p : 0) * T::PER_TOKEN + T::SCALE);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int own[SETS][2];
#pragma unroll
      for (int set = 0; set < SETS; ++set)
        own[set][0] = total[set][2 * i], own[set][1] = total[set][2 * i + 1];
      sums[i] = finish(half_values(heads[i].v.x), own, c[2 * i], scale);
    }
  }

  static __device__ __forceinline__ float multiply_one(const std::uint8_t* memory,
                                                       const int (&at)[Tile::ROWS],
                                                       const std::uint8_t* token, int lane, int) {
    const int p = lane & 3;
    Heads heads[2];
    int c[2][4] = {};  // of groups 2 p and 2 p + 1
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      const int from = 16 * (half ^ p & 1);  // so that lanes meet other banks
      uint4 words[2], fifth[2] = {}, b[2] = {};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        words[i] = *reinterpret_cast<const uint4*>(memory + at[i] + CODES + 32 * p + from);
        if (FIFTH) fifth[i] = *reinterpret_cast<const uint4*>(memory + at[i] + 16 + from);
        b[i] = own_bytes<uint4>(token + 128 * p + 64 * i + from, lane);
      }
#pragma unroll
      for (int k = 0; k < 4; k += 2)
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          unsigned a[4];
#pragma unroll
          for (int i = 0; i < 4; ++i)
            a[i] = codes(word_of(words[i & 1], k + i / 2),
                         word_of(fifth[i & 1], k + i / 2) >> 2 * p, 0, odd);
          mma_bytes_32(c[odd], a[0], a[1], a[2], a[3], word_of(b[odd], k), word_of(b[odd], k + 1));
        }
    }
    int total[SETS][4] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      heads[i].v = *reinterpret_cast<const uint4*>(memory + at[i]);
      const unsigned pair = heads[i].scales(p >> 1) >> 16 * (p & 1);
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const int scale = pair >> 8 * odd & 255;
        total[odd % SETS][2 * i] += scale * c[odd][2 * i];
        total[odd % SETS][2 * i + 1] += scale * c[odd][2 * i + 1];
      }
    }
    int own[SETS][2];
#pragma unroll
    for (int set = 0; set < SETS; ++set) join_runs(total[set], own[set], lane);
    float c_of[Tile::VALUES];
    minima(heads, token, 1, lane, c_of);
    return finish(half_values(p & 1 ? heads[1].v.x : heads[0].v.x), own, p & 1 ? c_of[2] : c_of[0],
                  *reinterpret_cast<const float*>(token + T::SCALE));
  }

 private:
  // Minima of groups 2 p and 2 p + 1 times the sums of their columns, of token n / 2.
  static __device__ __forceinline__ void minima(const Heads (&heads)[2],
                                                const std::uint8_t* tokens, int room, int lane,
                                                float (&c)[Tile::VALUES]) {
    const int p = lane & 3, token = lane >> 3;
    const Unit least[2] = {heads[0].minima_of(p), heads[1].minima_of(p)};
    const uint2 pair = reinterpret_cast<const uint2*>(
        tokens + (token < room ? token : 0) * T::PER_TOKEN + T::SUMS)[p];
    const Unit b{{pair.x, pair.y, 0, 0}};
#pragma unroll
    for (float& each : c) each = 0.0f;
    Tile::multiply(c, least, &b, 0);
  }
  // Of a row: totals of upper bytes and of lower ones; least: its minima's; scale: the token's.
  static __device__ __forceinline__ float finish(float2 factor, const int (&total)[SETS][2],
                                                 float least, float scale) {
    float high = static_cast<float>(total[0][0]), low = static_cast<float>(total[0][1]);
    if (SETS > 1) {
      high = fmaf(static_cast<float>(total[SETS - 1][0]), 0.0625f, high);
      low = fmaf(static_cast<float>(total[SETS - 1][1]), 0.0625f, low);
    }
    return scale * fmaf(factor.x, fmaf(high, 256.0f, low), factor.y * -64.0f * least);
  }
};
template <>
struct WholeBlock<formats::Q4_K> : FourBits<16, false> {};
template <>
struct WholeBlock<formats::Q5_K> : FourBits<48, true> {};

template <>
struct WholeBlock<formats::Q6_K> {
  using T = WholeTokens<formats::Q6_K>;

  // A word of lower bits to those of two groups, less 32 and four times as large: with a sign,
  // which is their first bit turned. up: their upper bits, from the third and from the seventh on.
  static __device__ __forceinline__ void codes(unsigned up, unsigned low, unsigned& one,
                                               unsigned& two) {
    constexpr unsigned LOW = 0x3c3c3c3c, HIGH = 0xc0c0c0c0;
#ifdef VP_EMULATION
    up ^= 0x88888888u;
#else
    asm("xor.b32 %0, %0, 0x88888888;" : "+r"(up));  // here, not behind each shift
#endif
    one = low << 2 & LOW | up << 4 & HIGH;
    two = low >> 2 & LOW | up & HIGH;
  }
  static __device__ __forceinline__ int scale_at(const std::uint8_t* memory, int at, int run) {
    return reinterpret_cast<const std::int8_t*>(memory)[at + 192 + run];
  }
  // total: of the upper bytes and of the lower ones; scale: the token's.
  static __device__ __forceinline__ float finish(const std::uint8_t* memory, int at, int high,
                                                 int low, float scale) {
    const float d = half_value(*reinterpret_cast<const std::uint16_t*>(memory + at + 208));
    return scale * (0.25f * d * fmaf(static_cast<float>(high), 256.0f, static_cast<float>(low)));
  }

  static __device__ __forceinline__ void multiply(const std::uint8_t* memory,
                                                  const int (&at)[Tile::ROWS],
                                                  const std::uint8_t* tokens, int room, int lane,
                                                  int, float (&sums)[2]) {
    const int p = lane & 3;
    const std::uint8_t* column = column_of(tokens, T::PER_TOKEN, room, lane) - 4 * p;
    const Words rows[2] = {Words(memory, at[0]), Words(memory, at[1])};
    const Words own[2] = {Words(memory, at[0] + 4 * p), Words(memory, at[1] + 4 * p)};
    int total[4] = {};
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      unsigned scales[2][2];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        scales[i / 2][i % 2] = rows[i / 2].at(192 + 8 * half + 4 * (i % 2));
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        unsigned a[2][4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int from = 64 * half + 16 * part;
          const unsigned up = own[i].at(128 + 32 * half + 16 * part);
          codes(up << 2, own[i].at(from), a[i][0], a[i][2]);
          codes(up, own[i].at(from + 32), a[i][1], a[i][3]);
        }
#pragma unroll
        for (int f = 0; f < 4; ++f) {
          int c[4] = {};
          const std::uint8_t* b = column + 64 * (4 * half + f) + 16 * part;
          mma_signed_16(c, a[0][f], a[1][f], *reinterpret_cast<const unsigned*>(b));
          const int byte = 2 * (f & 1) + part;
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int scale = static_cast<std::int8_t>(scales[i][f / 2] >> 8 * byte);
            total[2 * i] += scale * c[2 * i];
            total[2 * i + 1] += scale * c[2 * i + 1];
          }
        }
      }
    }
    const float scale = *reinterpret_cast<const float*>(
        tokens + (p < room ? p : 0) * T::PER_TOKEN + T::SCALE);
#pragma unroll
    for (int i = 0; i < 2; ++i)
      sums[i] = finish(memory, at[i], total[2 * i], total[2 * i + 1], scale);
  }

  // Lane p has 16 columns of each group of one half.
  static __device__ __forceinline__ float multiply_one(const std::uint8_t* memory,
                                                       const int (&at)[Tile::ROWS],
                                                       const std::uint8_t* token, int lane, int) {
    const int p = lane & 3, half = p >> 1, part = p & 1;
    Words lows[2] = {Words(memory, at[0] + 64 * half + 16 * part),
                     Words(memory, at[1] + 64 * half + 16 * part)};
    Words ups[2] = {lows[0].after(128 - 32 * half), lows[1].after(128 - 32 * half)};
    const std::uint8_t* bytes = token + 256 * half + 16 * part;
    int c[4][4] = {};
#pragma unroll 1
    for (int k = 0; k < 2; ++k) {
      unsigned a[4][4];  // of groups, in the order of A
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const unsigned up = ups[i & 1].at(4 * (i / 2));
        codes(up << 2, lows[i & 1].at(4 * (i / 2)), a[0][i], a[2][i]);
        codes(up, lows[i & 1].at(32 + 4 * (i / 2)), a[1][i], a[3][i]);
      }
#pragma unroll
      for (int f = 0; f < 4; ++f) {
        const uint2 b = own_bytes<uint2>(bytes + 64 * f, lane);
        mma_signed_32(c[f], a[f][0], a[f][1], a[f][2], a[f][3], b.x, b.y);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) lows[i].memory += 8, ups[i].memory += 8;
      bytes += 8;
    }
    int total[4] = {}, own[2];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int f = i / 2, row = i & 1;
      const int scale = scale_at(memory, at[row], 8 * half + 2 * f + part);
      total[2 * row] += scale * c[f][2 * row];
      total[2 * row + 1] += scale * c[f][2 * row + 1];
    }
    join_runs(total, own, lane);
    return finish(memory, p & 1 ? at[1] : at[0], own[0], own[1],
                  *reinterpret_cast<const float*>(token + T::SCALE));
  }
};
#endif

}  // namespace voltapile
