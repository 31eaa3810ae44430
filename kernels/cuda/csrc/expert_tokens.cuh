// A token's part of 256 columns in whole numbers, as expert_block.cuh multiplies it, from sm_80 on:
// 16 bits with one scale, of which the largest value becomes 32512, in two planes of bytes.
//
// Knows in which order lanes take the columns of each format; nothing of matrices.
#pragma once
#include "matmul_chunk.cuh"

namespace voltapile {

#if VP_ARCH >= 800
__device__ __forceinline__ unsigned largest_of_lanes(unsigned x) {
#ifdef VP_EMULATION
  for (int step = 16; step > 0; step >>= 1) x = max(x, __shfl_xor_sync(~0u, x, step));
  return x;
#else
  return __reduce_max_sync(~0u, x);
#endif
}
__device__ __forceinline__ int sum_of_bytes(unsigned word) {
#ifdef VP_EMULATION
  int sum = 0;
  for (int i = 0; i < 4; ++i) sum += static_cast<std::int8_t>(word >> 8 * i);
  return sum;
#else
  return __dp4a(static_cast<int>(word), 0x01010101, 0);
#endif
}

// Of a number that is not tiny.
__device__ __forceinline__ float inverse_of(float x) {
#ifdef VP_EMULATION
  return 1.0f / x;
#else
  asm("rcp.approx.ftz.f32 %0, %0;" : "+f"(x));
  return x;
#endif
}

// What a lane asks for: eight values.
struct Held {
  float4 a, b;
};
// The same as bytes, the upper ones and the lower ones, four a word.
struct Bytes16 {
  uint2 high, low;
};
__device__ __forceinline__ void split(const float4& v, float scale, unsigned& high,
                                      unsigned& low) {
  // Added to 1.5 x 2^23 and 128, a number and 128 are in the last bits of the sum.
  constexpr float MAGIC = 12583040.0f;
  const float values[4] = {v.x, v.y, v.z, v.w};
  unsigned q[4];  // second bytes are the upper ones, first ones less 128 the lower
#pragma unroll
  for (int i = 0; i < 4; ++i) q[i] = __float_as_uint(fmaf(values[i], scale, MAGIC));
  const unsigned first = __byte_perm(q[0], q[1], 0x5140), second = __byte_perm(q[2], q[3], 0x5140);
  low = __byte_perm(first, second, 0x5410) ^ 0x80808080;
  high = __byte_perm(first, second, 0x7632);
}

// In shared memory, of a token: [8 groups][2 planes][32 bytes], what a format adds, its scale. The
// lane that loads them says which eight columns belong together.
template <class F>
struct WholeTokens;

// Puts bytes to their place, and tells the scale that undoes theirs.
__device__ __forceinline__ float put_eight(std::uint8_t* own, const Held& held, int lane,
                                           Bytes16& bytes) {
  // As numbers without a sign: what is infinite or no number is largest, and stays so.
  unsigned most = 0;
  const float values[8] = {held.a.x, held.a.y, held.a.z, held.a.w,
                           held.b.x, held.b.y, held.b.z, held.b.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) most = max(most, __float_as_uint(values[i]) & 0x7fffffffu);
  most = max(largest_of_lanes(most), 0x0da24260u);  // 1e-30
  const float largest = __uint_as_float(most), scale = 32512.0f * inverse_of(largest);
  split(held.a, scale, bytes.high.x, bytes.low.x);
  split(held.b, scale, bytes.high.y, bytes.low.y);
  std::uint8_t* at = own + 64 * (lane >> 2) + 8 * (lane & 3);
  *reinterpret_cast<uint2*>(at) = bytes.high;
  *reinterpret_cast<uint2*>(at + 32) = bytes.low;
  return largest * (1.0f / 32512.0f);
}
// Over the numbers of group lane / 4.
__device__ __forceinline__ int sum_of_group(const Bytes16& bytes) {
  int sum = 256 * (sum_of_bytes(bytes.high.x) + sum_of_bytes(bytes.high.y)) +
            sum_of_bytes(bytes.low.x) + sum_of_bytes(bytes.low.y);
  sum += __shfl_xor_sync(~0u, sum, 1);
  return sum + __shfl_xor_sync(~0u, sum, 2);
}

template <>
struct WholeTokens<formats::Q4_K> {
  static constexpr int PER_TOKEN = 576, SUMS = 512, SCALE = 544;

  static __device__ __forceinline__ Held load(const float* row, int column, int, int lane) {
    const float4* from = reinterpret_cast<const float4*>(row + column + 8 * lane);
    return {from[0], from[1]};
  }
  static __device__ __forceinline__ void put(std::uint8_t* own, const Held& held, int lane) {
    Bytes16 bytes;
    const float scale = put_eight(own, held, lane, bytes);
    const int sum = sum_of_group(bytes);
    const float low = sum * 0x1p-6f, high = __shfl_xor_sync(~0u, low, 4);
    if ((lane & 7) == 0) {
      const unsigned pair = half_pair(low, high);
      const float2 kept = half_values(pair);
      reinterpret_cast<uint2*>(own + SUMS)[lane >> 3] =
          uint2{pair, half_pair((low - kept.x) * 2048.0f, (high - kept.y) * 2048.0f)};
    }
    if (lane == 0) *reinterpret_cast<float*>(own + SCALE) = scale;
  }
};
template <>
struct WholeTokens<formats::Q5_K> : WholeTokens<formats::Q4_K> {};
template <>
struct WholeTokens<formats::Q6_K> {
  static constexpr int PER_TOKEN = 576, SCALE = 544;

  static __device__ __forceinline__ Held load(const float* row, int column, int k, int lane) {
    return WholeTokens<formats::Q4_K>::load(row, column, k, lane);
  }
  static __device__ __forceinline__ void put(std::uint8_t* own, const Held& held, int lane) {
    Bytes16 bytes;
    const float scale = put_eight(own, held, lane, bytes);
    if (lane == 0) *reinterpret_cast<float*>(own + SCALE) = scale;
  }
};

// Groups of 32 columns, of which the last chunk may have fewer than eight.
template <>
struct WholeTokens<formats::Q5_1> {
  static constexpr int PER_TOKEN = 576, SUMS = 512, SCALE = 544;

  static __device__ __forceinline__ Held load(const float* row, int column, int k, int lane) {
    const int first = column + 32 * (lane >> 2) + 4 * (lane & 3);
    return {four_columns(row, first, k), four_columns(row, first + 16, k)};
  }
  static __device__ __forceinline__ void put(std::uint8_t* own, const Held& held, int lane) {
    Bytes16 bytes;
    const float scale = put_eight(own, held, lane, bytes);
    const int sum = sum_of_group(bytes);
    if ((lane & 3) == 0) reinterpret_cast<float*>(own + SUMS)[lane >> 2] = static_cast<float>(sum);
    if (lane == 0) *reinterpret_cast<float*>(own + SCALE) = scale;
  }
};
template <>
struct WholeTokens<formats::Q8_0> {
  static constexpr int PER_TOKEN = 576, SCALE = 544;

  static __device__ __forceinline__ Held load(const float* row, int column, int k, int lane) {
    return WholeTokens<formats::Q5_1>::load(row, column, k, lane);
  }
  static __device__ __forceinline__ void put(std::uint8_t* own, const Held& held, int lane) {
    Bytes16 bytes;
    const float scale = put_eight(own, held, lane, bytes);
    if (lane == 0) *reinterpret_cast<float*>(own + SCALE) = scale;
  }
};
#endif

}  // namespace voltapile
