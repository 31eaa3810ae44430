// What expert_up_stream writes for expert_down_stream, which is there before that ends: each number
// is there when it is no longer 0, so nobody has to wait for a whole kernel and its last block. A
// number that is 0 becomes -0, which changes no sum. Who has read all leaves zeros.
#pragma once
#include "grid.cuh"
#include "half.cuh"

namespace voltapile {

constexpr int MOST_LOOKS = 1 << 14;  // some milliseconds; then one waits for the kernel after all

__device__ __forceinline__ void post(float* to, float value) {
  value = value == 0.0f ? -0.0f : value;
#ifdef VP_EMULATION
  *to = value;
#else
  asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" ::"l"(to), "f"(value) : "memory");
#endif
}
__device__ __forceinline__ unsigned look_at_one(const float* from) {
#ifdef VP_EMULATION
  return __float_as_uint(*from);
#else
  unsigned value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
#endif
}
__device__ __forceinline__ float4 look_at_four(const float* from) {
#ifdef VP_EMULATION
  return *reinterpret_cast<const float4*>(from);
#else
  float4 v;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(from)
               : "memory");
  return v;
#endif
}

// Those who read the same mail: `warps` of this block, and so of others.
struct Readers {
  int* done;  // in shared memory, 0 first
  unsigned* ticket;
  unsigned seen = ~0u;

  __device__ __forceinline__ static unsigned last() { return gridDim.x * gridDim.y - 1; }
  // By one lane of each warp, when it has all that it wants to read.
  __device__ __forceinline__ void leave(int warps) {
    if (atomicAdd(done, 1) == warps - 1) seen = atomicInc(ticket, last());
  }
  // By the same lane, later: whether nobody reads any more.
  __device__ __forceinline__ bool is_last() const { return seen == last(); }
};

}  // namespace voltapile
