// What kernels share in which a thread has eight columns of several rows: reading them, and sums
// over a warp.
#pragma once
#include "block.cuh"
#include "mix_weights.cuh"

namespace voltapile {

constexpr int SUMS = 16;  // of a warp at once

__device__ __forceinline__ void eight_of(const float* from, float (&out)[EIGHT]) {
  const float4 a = reinterpret_cast<const float4*>(from)[0];
  const float4 b = reinterpret_cast<const float4*>(from)[1];
  out[0] = a.x, out[1] = a.y, out[2] = a.z, out[3] = a.w;
  out[4] = b.x, out[5] = b.y, out[6] = b.z, out[7] = b.w;
}

// Sums of SUMS values over a warp; lane 2 i gets that of value i.
template <int WIDTH>
__device__ __forceinline__ float sum_of_mine(float (&a)[SUMS], int lane) {
  if constexpr (WIDTH == 0) {
    return a[0] + __shfl_xor_sync(ALL, a[0], 1);
  } else {
    const bool is_upper = lane & 2 * WIDTH;
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
      const float sent = is_upper ? a[i] : a[i + WIDTH], kept = is_upper ? a[i + WIDTH] : a[i];
      a[i] = kept + __shfl_xor_sync(ALL, sent, 2 * WIDTH);
    }
    return sum_of_mine<WIDTH / 2>(a, lane);
  }
}

}  // namespace voltapile
