// Copies of 16 bytes from global to shared memory that arrive when they are waited for; sm_80 on.
#pragma once
#include "half.cuh"

namespace voltapile {

#ifndef VP_EMULATION
// Behind `valid` bytes there are zeros.
__device__ __forceinline__ void copy_async(void* shared, const void* global, int valid) {
#if VP_ARCH >= 800
  const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(valid)
               : "memory");
#endif
}
__device__ __forceinline__ void commit_copies() {
#if VP_ARCH >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int PENDING>
__device__ __forceinline__ void wait_for_copies() {  // until at most PENDING groups are under way
#if VP_ARCH >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}
// A multiple of 16 bytes come into the L2 cache, where that costs one instruction.
__device__ __forceinline__ void copy_to_l2(const void* global, int bytes) {
#if VP_ARCH >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
#endif
}
#else
inline void copy_to_l2(const void*, int) {}
#endif

}  // namespace voltapile
