// Blocks of a cluster (from sm_90 on): they are on the GPU together and write into each other's
// shared memory. -D SPLIT: how many there are.
//
// What is sent tells a Bell of the block that gets it, so that nobody meets and nothing is fenced:
// each time that it is told to expect some bytes, it rings when so many have come.
#pragma once
#include "half.cuh"

namespace voltapile {

using Bell = std::uint64_t;  // in shared memory

#if VP_ARCH >= 900 && !defined(VP_EMULATION)
#define VP_CLUSTER __cluster_dims__(SPLIT, 1, 1)

__device__ __forceinline__ unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}
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
__device__ __forceinline__ void make_bell(Bell* bell) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(bell)) : "memory");
}
// By one thread.
__device__ __forceinline__ void expect(Bell* bell, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                   shared_address(bell)),
               "r"(bytes)
               : "memory");
}
// Until it has rung an odd number of times (is_odd), or an even one. The caller must know that the
// ring before that has been: rings are told apart by their parity.
__device__ __forceinline__ void await(Bell* bell, bool is_odd) {
  asm volatile(
      "{\n"
      ".reg .pred is_done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 is_done, [%0], %1;\n"
      "@!is_done bra again;\n"
      "}\n" ::"r"(shared_address(bell)),
      "r"(is_odd ? 0 : 1)
      : "memory");
}
// To where `mine` is in another block, or this one; its bell hears of eight bytes.
__device__ __forceinline__ void send(float2 pair, float2* mine, Bell* bell, int block) {
  const unsigned to = address_in(shared_address(mine), block);
  const unsigned its_bell = address_in(shared_address(bell), block);
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];"
      ::"r"(to), "f"(pair.x), "f"(pair.y), "r"(its_bell)
      : "memory");
}
// A multiple of 16 bytes of global memory to this block's shared memory; the bell hears of them. By
// one thread, the one that has made the bell or one that has met it since.
__device__ __forceinline__ void copy_whole(void* shared, const void* global, int bytes,
                                           Bell* bell) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      ::"r"(shared_address(shared)), "l"(global), "r"(bytes), "r"(shared_address(bell))
      : "memory");
}
// This block's part of the dynamic shared memory.
__device__ __forceinline__ std::uint8_t* own_memory(std::uint8_t* shared) { return shared; }
#else
#define VP_CLUSTER
#endif

}  // namespace voltapile
