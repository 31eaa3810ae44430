// What a kernel of chosen experts writes for the next one, which is there before it ends and need
// not wait for a whole kernel and its last block. Who has read all leaves zeros.
//
// From expert_up_stream to expert_down_stream: each number is there when it is no longer 0. A
// number that is 0 becomes -0, which changes no sum. From route to both: of each rank an expert and
// its share, with a tag of these launches, since not all that is posted is read.
#pragma once
#include "grid.cuh"
#include "half.cuh"

namespace voltapile {

#ifdef VP_EMULATION
constexpr int MOST_LOOKS = 1 << 30;
#else
constexpr int MOST_LOOKS = 1 << 14;  // some milliseconds; then one waits for the kernel after all
#endif

__device__ __forceinline__ void post(float* to, float value) {
  value = value == 0.0f ? -0.0f : value;
#ifdef VP_EMULATION
  *to = value;
#else
  asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" ::"l"(to), "f"(value) : "memory");
#endif
}
__device__ __forceinline__ void post_four(float* to, const float4& v) {
  post(to, v.x), post(to + 1, v.y), post(to + 2, v.z), post(to + 3, v.w);
}
__device__ __forceinline__ unsigned look_at_one(const float* from) {
#ifdef VP_EMULATION
  return *reinterpret_cast<const volatile unsigned*>(from);
#else
  unsigned value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
#endif
}
__device__ __forceinline__ float4 look_at_four(const float* from) {
#ifdef VP_EMULATION
  const volatile float* v = from;
  return {v[0], v[1], v[2], v[3]};
#else
  float4 v;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(from)
               : "memory");
  return v;
#endif
}

__device__ __forceinline__ bool is_posted(const float4& v) {
  return min(min(__float_as_uint(v.x), __float_as_uint(v.y)),
             min(__float_as_uint(v.z), __float_as_uint(v.w))) != 0;
}

// How to load what may not be there yet, and in no case what the first cache has. As Known.
struct Fresh {
  static __device__ __forceinline__ float4 four(const float* from) { return look_at_four(from); }
  static __device__ __forceinline__ float4 four(const float* row, int column, int k) {
    if (column < k) return four(row + column);
    return {-0.0f, -0.0f, -0.0f, -0.0f};
  }
};

using Post = unsigned long long;  // a share, a tag of 16 bits, an expert
constexpr int POST_STEP = 32;     // ranks are 256 bytes apart, for many look at them

__device__ __forceinline__ void post_choice(Post* posts, unsigned rank, unsigned tag,
                                            unsigned expert, float share) {
  const Post post = static_cast<Post>(__float_as_uint(share)) << 32 | tag << 16 | expert;
#ifdef VP_EMULATION
  posts[POST_STEP * rank] = post;
#else
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(posts + POST_STEP * rank), "l"(post)
               : "memory");
#endif
}
// Waits for it. 0 if it does not come, so that one has to wait for the kernel.
__device__ __forceinline__ Post look_for(const Post* posts, unsigned rank, unsigned tag) {
#pragma unroll 1
  for (int looks = 0; looks < MOST_LOOKS; ++looks) {
    Post post;
#ifdef VP_EMULATION
    post = *const_cast<const volatile Post*>(posts + POST_STEP * rank);
#else
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];"
                 : "=l"(post)
                 : "l"(posts + POST_STEP * rank)
                 : "memory");
#endif
    if ((static_cast<unsigned>(post) >> 16) == tag) return post;
  }
  return 0;
}
__device__ __forceinline__ int expert_of(Post post) { return post & 0xffff; }
__device__ __forceinline__ float share_of(Post post) {
  return __uint_as_float(static_cast<unsigned>(post >> 32));
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
