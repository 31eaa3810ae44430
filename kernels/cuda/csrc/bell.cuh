// Bells in shared memory, and copies that ring them (from sm_90 on): each time that a bell is told
// to expect some bytes, it rings when so many have come. A copy is one instruction of one thread,
// holds up nobody, and may be any multiple of 16 bytes.
#pragma once
#include "half.cuh"

namespace voltapile {

using Bell = std::uint64_t;  // in shared memory

#if VP_ARCH >= 900 && !defined(VP_EMULATION)
__device__ __forceinline__ unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}
// One thread of a warp that is together, always the same: for what follows the compiler then writes
// no loop over threads, as it does where lane 0 is asked for.
__device__ __forceinline__ bool is_elected() {
  unsigned is_it;
  asm volatile(
      "{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(is_it));
  return is_it;
}
// Bells that were made become known to copies; then other threads are met as usual.
__device__ __forceinline__ void tell_bells() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
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
// The same for what this block has asked for: it forgets nothing that the first cache holds.
__device__ __forceinline__ void await_own(Bell* bell, bool is_odd) {
  asm volatile(
      "{\n"
      ".reg .pred is_done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 is_done, [%0], %1;\n"
      "@!is_done bra again;\n"
      "}\n" ::"r"(shared_address(bell)),
      "r"(is_odd ? 0 : 1)
      : "memory");
}
// By a thread that is about to ask for a copy to a place that it has read or written, or threads
// that it has met since: copies come another way than loads and stores (the async proxy), and a
// meeting alone does not order them behind those.
__device__ __forceinline__ void order_copies() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
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
#endif

}  // namespace voltapile
