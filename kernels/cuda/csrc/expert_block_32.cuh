// As expert_block.cuh, of formats whose blocks have 32 columns, a group: Q5_1 and Q8_0. The sum of
// a chunk is that of four: of groups f and f + 4 each, so that one token's has the same bits.
#pragma once
#include "expert_block.cuh"

namespace voltapile {

#if VP_ARCH >= 800
// What a format has to tell of a block: its size; the bytes of columns 4 p.. and 16 + 4 p..; what
// a sum of products is multiplied by, and what the sum of the token's numbers is.
struct Five {
  static constexpr int BYTES = 24;
  static constexpr bool HAS_OFFSET = true;

  // Four bits of each byte, and the fifth ones of four neighbours.
  static __device__ __forceinline__ unsigned codes(unsigned four, unsigned fifth) {
    return four & 0x0f0f0f0fu | (fifth & 15) * 0x02040810u & 0x10101010u;
  }
  static __device__ __forceinline__ void codes(const std::uint8_t* memory, int block, int p,
                                               unsigned (&a)[2]) {
    const unsigned fifth = *reinterpret_cast<const unsigned*>(memory + block + 4) >> 4 * p;
    const unsigned word = *reinterpret_cast<const unsigned*>(memory + block + 8 + 4 * p);
    a[0] = codes(word, fifth);
    a[1] = codes(word >> 4, fifth >> 16);
  }
  static __device__ __forceinline__ float2 factors(const std::uint8_t* memory, int block) {
    return half_values(*reinterpret_cast<const unsigned*>(memory + block));
  }
  static __device__ __forceinline__ void mma(int (&c)[4], const unsigned (&a)[2][2], unsigned b0,
                                             unsigned b1) {
    mma_bytes_32(c, a[0][0], a[1][0], a[0][1], a[1][1], b0, b1);
  }
};
struct Eight {
  static constexpr int BYTES = 34;
  static constexpr bool HAS_OFFSET = false;

  static __device__ __forceinline__ void codes(const std::uint8_t* memory, int block, int p,
                                               unsigned (&a)[2]) {
    const EndWords words(memory, block + 2 + 4 * p);
    a[0] = words.at(0);
    a[1] = words.at(16);
  }
  static __device__ __forceinline__ float2 factors(const std::uint8_t* memory, int block) {
    return {half_value(*reinterpret_cast<const std::uint16_t*>(memory + block)), 0.0f};
  }
  static __device__ __forceinline__ void mma(int (&c)[4], const unsigned (&a)[2][2], unsigned b0,
                                             unsigned b1) {
    mma_signed_32(c, a[0][0], a[1][0], a[0][1], a[1][1], b0, b1);
  }
};

// Of a token that has all columns, those of the first group of four; and what is of group f.
__device__ __forceinline__ const std::uint8_t* column_of_one(const std::uint8_t* token, int lane) {
  return token + 64 * (lane >> 3) + 32 * (lane >> 2 & 1) + 8 * (lane & 3);
}
__device__ __forceinline__ unsigned of_run(unsigned word, int f, int lane) {
  return lane >> 3 == f ? word : 0;
}

template <class T, class B>
struct ByGroups {
  static __device__ __forceinline__ void add(float& sum, float2 factor, const int* c, float all) {
    sum = fmaf(factor.x, static_cast<float>(256 * c[0] + c[1]), sum);
    if (B::HAS_OFFSET) sum = fmaf(factor.y, all, sum);
  }
  // Of a token's numbers in a group.
  static __device__ __forceinline__ float sum_of(const std::uint8_t* token, int group) {
    if constexpr (B::HAS_OFFSET)
      return reinterpret_cast<const float*>(token + T::SUMS)[group];
    else
      return 0.0f;
  }

  static __device__ __forceinline__ void multiply(const std::uint8_t* memory,
                                                  const int (&at)[Tile::ROWS],
                                                  const std::uint8_t* tokens, int room, int lane,
                                                  int groups, float (&sums)[2]) {
    const std::uint8_t* column = column_of(tokens, T::PER_TOKEN, room, lane);
    const int p = lane & 3;
    const std::uint8_t* own = tokens + (p < room ? p : 0) * T::PER_TOKEN;
    float parts[4][2] = {};
#pragma unroll 1
    for (int first = 0; first < groups; first += 4) {
#pragma unroll
      for (int f = 0; f < 4; ++f) {
        const int group = first + f;
        if (group >= groups) break;
        unsigned a[2][2];
#pragma unroll
        for (int i = 0; i < 2; ++i) B::codes(memory, at[i] + B::BYTES * group, p, a[i]);
        const uint2 b = *reinterpret_cast<const uint2*>(column + 64 * group);
        int c[4] = {};
        B::mma(c, a, b.x, b.y);
#pragma unroll
        for (int i = 0; i < 2; ++i)
          add(parts[f][i], B::factors(memory, at[i] + B::BYTES * group), c + 2 * i,
              sum_of(own, group));
      }
    }
    const float scale = *reinterpret_cast<const float*>(own + T::SCALE);
#pragma unroll
    for (int i = 0; i < 2; ++i)
      sums[i] = scale * ((parts[0][i] + parts[1][i]) + (parts[2][i] + parts[3][i]));
  }

  // Groups are read by fours, also behind a row's last one.
  static __device__ __forceinline__ float multiply_one(const std::uint8_t* memory,
                                                       const int (&at)[Tile::ROWS],
                                                       const std::uint8_t* token, int lane,
                                                       int groups) {
    const std::uint8_t* column = column_of_one(token, lane);
    const int p = lane & 3;
    float parts[2] = {};
#pragma unroll 1
    for (int first = 0; first < groups; first += 4) {
      const int group = first + p;
      const uint2 b = *reinterpret_cast<const uint2*>(column + 64 * first);
      int c[4] = {};
#pragma unroll
      for (int f = 0; f < 4; ++f) {
        unsigned a[2][2];
#pragma unroll
        for (int i = 0; i < 2; ++i) B::codes(memory, at[i] + B::BYTES * (first + f), p, a[i]);
        B::mma(c, a, of_run(b.x, f, lane), of_run(b.y, f, lane));
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 factor = B::factors(memory, at[i] + B::BYTES * group);
        if (group < groups) add(parts[i], factor, c + 2 * i, sum_of(token, group));
      }
    }
    float sum = p & 1 ? parts[1] : parts[0];
    sum += __shfl_xor_sync(~0u, p & 1 ? parts[0] : parts[1], 1);
    return *reinterpret_cast<const float*>(token + T::SCALE) *
           (sum + __shfl_xor_sync(~0u, sum, 2));
  }
};
template <>
struct WholeBlock<formats::Q5_1> : ByGroups<WholeTokens<formats::Q5_1>, Five> {};
template <>
struct WholeBlock<formats::Q8_0> : ByGroups<WholeTokens<formats::Q8_0>, Eight> {};
#endif

}  // namespace voltapile
