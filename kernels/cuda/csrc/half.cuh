// Half precision as bits in 32-bit registers, and the few instructions that kernels use on it.
//
// VP_EMULATION: tests compile kernels for the CPU; emulate.h then gives these functions instead.
// Knows nothing of formats and tiles.
#pragma once
#include <cstdint>
#ifndef VP_EMULATION
#include <cuda_fp16.h>
#define VP_ARCH __CUDA_ARCH__

namespace voltapile {

__device__ __forceinline__ float half_value(unsigned bits) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}
__device__ __forceinline__ unsigned half_pair(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const unsigned*>(&pair);
}
__device__ __forceinline__ float2 half_values(unsigned pair) {
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}
__device__ __forceinline__ unsigned half_add(unsigned a, unsigned b) {
  const __half2 sum =
      __hadd2(*reinterpret_cast<const __half2*>(&a), *reinterpret_cast<const __half2*>(&b));
  return *reinterpret_cast<const unsigned*>(&sum);
}

}  // namespace voltapile
#endif
