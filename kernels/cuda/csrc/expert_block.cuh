// Chunks of 256 columns in whole numbers, from sm_80 on: 16 rows of weights as bytes, times up to
// four tokens as 16-bit numbers (expert_tokens.cuh), whose two bytes are two columns of the tensor
// core's 8. Sums are exact until scales come that are halves: those of a chunk of a K format
// (here), of a group of others (expert_block_32.cuh).
//
// Lane l holds the sums of rows row(0) and row(1) of mma.cuh's Tile, and of token l % 4. One token
// can have all columns: columns 2 f and 2 f + 1 are then those of run f of four, and no others', so
// that a lane has the sums and the scale of one run. The bits are the same.
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
__device__ __forceinline__ void mma_bytes_16(int (&c)[4], unsigned a0, unsigned a1, unsigned b0) {
  asm("mma.sync.aligned.m16n8k16.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
      "{%0,%1,%2,%3};"
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

// That of a token that has all columns, in the first run of four; runs are `step` bytes apart.
__device__ __forceinline__ const std::uint8_t* column_of_one(const std::uint8_t* token, int step,
                                                             int lane) {
  return token + step * (lane >> 3) + 32 * (lane >> 2 & 1) + 8 * (lane & 3);
}
__device__ __forceinline__ unsigned of_run(unsigned word, int run, int lane) {
  return lane >> 3 == run ? word : 0;
}
__device__ __forceinline__ void join_runs(int (&total)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    total[i] += __shfl_xor_sync(~0u, total[i], 1);
    total[i] += __shfl_xor_sync(~0u, total[i], 2);
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
    finish(heads, tokens, room, total, lane, sums);
  }

  static __device__ __forceinline__ void multiply_one(const std::uint8_t* memory,
                                                      const int (&at)[Tile::ROWS],
                                                      const std::uint8_t* token, int lane, int,
                                                      float (&sums)[2]) {
    const int p = lane & 3;
    Heads heads[2];
    uint2 fifth[2] = {}, b[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      heads[i].v = *reinterpret_cast<const uint4*>(memory + at[i]);
      if (FIFTH) fifth[i] = *reinterpret_cast<const uint2*>(memory + at[i] + 16 + 8 * p);
      b[i] = *reinterpret_cast<const uint2*>(column_of_one(token, 128, lane) + 64 * i);
    }
    int c[2][4] = {};  // of groups 2 p and 2 p + 1
#pragma unroll
    for (int run = 0; run < 4; ++run) {
      const int from = CODES + 32 * run + 8 * p;
      const uint2 one = *reinterpret_cast<const uint2*>(memory + at[0] + from);
      const uint2 two = *reinterpret_cast<const uint2*>(memory + at[1] + from);
#pragma unroll
      for (int odd = 0; odd < 2; ++odd)
        mma_bytes_32(c[odd], codes(one.x, fifth[0].x, run, odd), codes(two.x, fifth[1].x, run, odd),
                     codes(one.y, fifth[0].y, run, odd), codes(two.y, fifth[1].y, run, odd),
                     of_run(b[odd].x, run, lane), of_run(b[odd].y, run, lane));
    }
    int total[SETS][4] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const unsigned pair = heads[i].scales(p >> 1) >> 16 * (p & 1);
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const int scale = pair >> 8 * odd & 255;
        total[odd % SETS][2 * i] += scale * c[odd][2 * i];
        total[odd % SETS][2 * i + 1] += scale * c[odd][2 * i + 1];
      }
    }
#pragma unroll
    for (int set = 0; set < SETS; ++set) join_runs(total[set]);
    finish(heads, token, 1, total, lane, sums);
  }

 private:
  static __device__ __forceinline__ void finish(const Heads (&heads)[2],
                                                const std::uint8_t* tokens, int room,
                                                const int (&total)[SETS][4], int lane,
                                                float (&sums)[2]) {
    const int p = lane & 3;
    // Minima of groups 2 p and 2 p + 1 times the sums of their columns, of token n / 2.
    const Unit least[2] = {heads[0].minima_of(p), heads[1].minima_of(p)};
    const int column_token = lane >> 3, token = p < room ? p : 0;
    const uint2 pair = reinterpret_cast<const uint2*>(
        tokens + (column_token < room ? column_token : 0) * T::PER_TOKEN + T::SUMS)[p];
    const Unit b{{pair.x, pair.y, 0, 0}};
    float c[Tile::VALUES] = {};
    Tile::multiply(c, least, &b, 0);
    const float scale = *reinterpret_cast<const float*>(tokens + token * T::PER_TOKEN + T::SCALE);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 factor = half_values(heads[i].v.x);
      float high = static_cast<float>(total[0][2 * i]);
      float low = static_cast<float>(total[0][2 * i + 1]);
      if (SETS > 1) {
        high = fmaf(static_cast<float>(total[SETS - 1][2 * i]), 0.0625f, high);
        low = fmaf(static_cast<float>(total[SETS - 1][2 * i + 1]), 0.0625f, low);
      }
      sums[i] = scale * fmaf(factor.x, fmaf(high, 256.0f, low), factor.y * -64.0f * c[2 * i]);
    }
  }
};
template <>
struct WholeBlock<formats::Q4_K> : FourBits<16, false> {};
template <>
struct WholeBlock<formats::Q5_K> : FourBits<48, true> {};

template <>
struct WholeBlock<formats::Q6_K> {
  using T = WholeTokens<formats::Q6_K>;

  // Words of 64 columns' lower bits and of their upper ones to those of four runs.
  static __device__ __forceinline__ void codes(const Words& words, int half, int part,
                                               unsigned (&a)[4]) {
    const unsigned up = words.at(128 + 32 * half + 16 * part);
    const unsigned one = words.at(64 * half + 16 * part);
    const unsigned two = words.at(64 * half + 32 + 16 * part);
    a[0] = (one & 0x0f0f0f0f) | (up << 4 & 0x30303030);
    a[1] = (two & 0x0f0f0f0f) | (up << 2 & 0x30303030);
    a[2] = (one >> 4 & 0x0f0f0f0f) | (up & 0x30303030);
    a[3] = (two >> 4 & 0x0f0f0f0f) | (up >> 2 & 0x30303030);
  }
  // totals: of the upper bytes and of the lower ones, for each row.
  static __device__ __forceinline__ void finish(const std::uint8_t* memory,
                                                const int (&at)[Tile::ROWS],
                                                const int (&total)[4], float scale,
                                                float (&sums)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float d = half_value(*reinterpret_cast<const std::uint16_t*>(memory + at[i] + 208));
      const float sum = fmaf(static_cast<float>(total[2 * i]), 256.0f,
                             static_cast<float>(total[2 * i + 1]));
      sums[i] = scale * (d * sum);
    }
  }

  static __device__ __forceinline__ void multiply(const std::uint8_t* memory,
                                                  const int (&at)[Tile::ROWS],
                                                  const std::uint8_t* tokens, int room, int lane,
                                                  int, float (&sums)[2]) {
    const std::uint8_t* column = column_of(tokens, T::PER_TOKEN, room, lane);
    const int p = lane & 3, token = p < room ? p : 0;
    const std::uint8_t* own = tokens + token * T::PER_TOKEN;
    const Words rows[2] = {Words(memory, at[0]), Words(memory, at[1])};
    const Words own_words[2] = {Words(memory, at[0] + 4 * p), Words(memory, at[1] + 4 * p)};
    int total[4] = {};
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      unsigned scales[2][2];
      uint2 b[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scales[i / 2][i % 2] = rows[i / 2].at(192 + 8 * half + 4 * (i % 2));
        b[i] = *reinterpret_cast<const uint2*>(column + 64 * (4 * half + i));
      }
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        unsigned a[2][4];
#pragma unroll
        for (int i = 0; i < 2; ++i) codes(own_words[i], half, part, a[i]);
#pragma unroll
        for (int f = 0; f < 4; ++f) {
          const int run = 8 * half + 2 * f + part;
          const int4 less = reinterpret_cast<const int4*>(own + T::OFFSETS)[run];
          int c[4] = {less.x, less.y, less.z, less.w};
          mma_bytes_16(c, a[0][f], a[1][f], part ? b[f].y : b[f].x);
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
    finish(memory, at, total, *reinterpret_cast<const float*>(own + T::SCALE), sums);
  }

  static __device__ __forceinline__ void multiply_one(const std::uint8_t* memory,
                                                      const int (&at)[Tile::ROWS],
                                                      const std::uint8_t* token, int lane, int,
                                                      float (&sums)[2]) {
    const int p = lane & 3;
    const std::uint8_t* column = column_of_one(token, 64, lane);
    const Words words[2] = {Words(memory, at[0] + 4 * p), Words(memory, at[1] + 4 * p)};
    int total[4] = {};
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      int scales[2];  // of both parts
#pragma unroll
      for (int i = 0; i < 2; ++i)
        scales[i] = *reinterpret_cast<const std::int16_t*>(memory + at[i] + 192 + 8 * half + 2 * p);
      const uint2 b = *reinterpret_cast<const uint2*>(column + 256 * half);
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        unsigned a[2][4];
#pragma unroll
        for (int i = 0; i < 2; ++i) codes(words[i], half, part, a[i]);
        const int run = 8 * half + 2 * p + part;
        const int4 less = reinterpret_cast<const int4*>(token + T::OFFSETS)[run];
        int c[4] = {less.x, less.y, less.z, less.w};
#pragma unroll
        for (int f = 0; f < 4; ++f)
          mma_bytes_16(c, a[0][f], a[1][f], of_run(part ? b.y : b.x, f, lane));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int scale = part ? scales[i] >> 8 : static_cast<std::int8_t>(scales[i]);
          total[2 * i] += scale * c[2 * i];
          total[2 * i + 1] += scale * c[2 * i + 1];
        }
      }
    }
    join_runs(total);
    finish(memory, at, total, *reinterpret_cast<const float*>(token + T::SCALE), sums);
  }
};
#endif

}  // namespace voltapile
