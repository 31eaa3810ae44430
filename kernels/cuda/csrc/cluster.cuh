// Blocks of a cluster (from sm_90 on): they are on the GPU together and write into each other's
// shared memory. -D SPLIT: how many there are.
//
// What is sent tells a Bell of the block that gets it, so that nobody meets and nothing is fenced.
#pragma once
#include "bell.cuh"

namespace voltapile {

#if VP_ARCH >= 900 && !defined(VP_EMULATION)
#define VP_CLUSTER __cluster_dims__(SPLIT, 1, 1)

__device__ __forceinline__ unsigned address_in(unsigned mine, int block) {
  unsigned its;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(its) : "r"(mine), "r"(block));
  return its;
}
// All threads of all blocks arrive, then wait. Nobody sends before all blocks have begun, which
// takes a meeting; what bells were made before it is known after it.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}
// To where `mine` is in another block, or this one; its bell hears of the bytes.
__device__ __forceinline__ void send(float2 pair, float2* mine, Bell* bell, int block) {
  const unsigned to = address_in(shared_address(mine), block);
  const unsigned its_bell = address_in(shared_address(bell), block);
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];"
      ::"r"(to), "f"(pair.x), "f"(pair.y), "r"(its_bell)
      : "memory");
}
__device__ __forceinline__ void send(float4 four, float4* mine, Bell* bell, int block) {
  const unsigned to = address_in(shared_address(mine), block);
  const unsigned its_bell = address_in(shared_address(bell), block);
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(to),
      "f"(four.x), "f"(four.y), "f"(four.z), "f"(four.w), "r"(its_bell)
      : "memory");
}
// This block's part of the dynamic shared memory.
__device__ __forceinline__ std::uint8_t* own_memory(std::uint8_t* shared) { return shared; }
#else
#define VP_CLUSTER
#endif

}  // namespace voltapile
