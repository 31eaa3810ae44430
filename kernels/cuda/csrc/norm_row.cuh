// How a row's root mean square norm adds up, wherever it is made: norm.cu, group_norm.cu,
// matmul_staged.cu, and matmul_stream.cu and route_row.cuh, which norm what they read, give the
// same bits.
//
// Columns are cut to runs of 256; of a run, lane l has the eight from 8 l on. Multiply-adds are
// written out, so that no compiler's choice changes a bit.
#pragma once
#include "block.cuh"

namespace voltapile {

constexpr int RUN = 256;

// Of a lane's eight columns.
__device__ __forceinline__ float squares_of(float4 a, float4 b) {
  const float first = fmaf(a.w, a.w, fmaf(a.z, a.z, fmaf(a.y, a.y, a.x * a.x)));
  const float second = fmaf(b.w, b.w, fmaf(b.z, b.z, fmaf(b.y, b.y, b.x * b.x)));
  return first + second;
}

// What columns times their weights are multiplied by, of a row whose squares are added up.
__device__ __forceinline__ float factor_of(float squares, float inverse, float eps) {
  float mean = fmaf(squares, inverse, eps);
#ifdef VP_EMULATION
  return 1.0f / sqrtf(mean);
#else
  asm("rsqrt.approx.ftz.f32 %0, %0;" : "+f"(mean));  // of a number that is not tiny
  return mean;
#endif
}

// The same; sums: of the runs, of which there are MOST at most. Every lane gets it.
template <int MOST = 1 << 20>
__device__ __forceinline__ float norm_factor(const float* sums, int runs, float inverse, float eps,
                                             int lane) {
  constexpr int LANES = MOST <= 8 ? 8 : MOST <= 16 ? 16 : 32;  // others would add zeros
  const int own = lane & LANES - 1;
  float sum = own < runs ? sums[own] : 0.0f;
  if constexpr (MOST > 32) {
#pragma unroll 1
    for (int first = 32; first < runs; first += 32)
      if (first + own < runs) sum += sums[first + own];
  }
#pragma unroll
  for (int step = LANES / 2; step > 0; step >>= 1) sum += __shfl_xor_sync(ALL, sum, step);
  return factor_of(sum, inverse, eps);
}

__device__ __forceinline__ float4 scaled(float4 v, float4 w) {
  return {v.x * w.x, v.y * w.y, v.z * w.z, v.w * w.w};
}
__device__ __forceinline__ float4 scaled(float4 v, float factor) {
  return {v.x * factor, v.y * factor, v.z * factor, v.w * factor};
}

}  // namespace voltapile
