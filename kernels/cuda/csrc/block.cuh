// Sums and maxima over a block in a fixed order, so that every launch gives the same bits.
// Knows nothing of what is summed. All threads of the block must call; blocks are whole warps.
#pragma once

namespace voltapile {

constexpr unsigned ALL = 0xffffffffu;

template <class T, class Join>
__device__ __forceinline__ T warp_join(T value, Join join) {
  for (int step = 16; step > 0; step >>= 1)
    value = join(value, __shfl_xor_sync(ALL, value, step));
  return value;
}

// Every thread gets the result. scratch: 32 elements of shared memory.
template <class T, class Join>
__device__ __forceinline__ T block_join(T value, T* scratch, Join join) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  value = warp_join(value, join);
  __syncthreads();  // scratch may still be read from the last time
  if (lane == 0) scratch[warp] = value;
  __syncthreads();
  if ((warps & (warps - 1)) == 0) {
    T part = scratch[lane & (warps - 1)];
    for (int step = warps / 2; step > 0; step >>= 1)
      part = join(part, __shfl_xor_sync(ALL, part, step));
    return part;
  }
  T all = scratch[0];
#pragma unroll 1
  for (int w = 1; w < warps; ++w) all = join(all, scratch[w]);
  return all;
}

struct Add {
  template <class T>
  __device__ T operator()(T a, T b) const { return a + b; }
};
struct Max {
  template <class T>
  __device__ T operator()(T a, T b) const { return a > b ? a : b; }
};

}  // namespace voltapile
