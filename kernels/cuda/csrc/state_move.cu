// What all layers remember of a slot, from their arrays to one piece of page-locked host memory, or
// back: some hundred arrays in one launch, as fast as the link is.
#include "block.cuh"

namespace voltapile {

// By the threads of gridDim.x blocks.
template <class T>
__device__ __forceinline__ void move(unsigned char* to, const unsigned char* from,
                                     long long bytes) {
  const long long count = bytes / static_cast<long long>(sizeof(T));
  const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
#pragma unroll 4
  for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += step)
    reinterpret_cast<T*>(to)[i] = reinterpret_cast<const T*>(from)[i];
}

}  // namespace voltapile

using namespace voltapile;

// grid: (some, arrays), 256 threads. places: [arrays][3]: of each array its address, the bytes of a
// slot (a multiple of 4), and where they lie in `packed` (a multiple of 16).
extern "C" __global__ void __launch_bounds__(256)
move_states(const long long* places, unsigned char* packed, int slot, int is_restored) {
  const long long* own = places + 3 * blockIdx.y;
  const long long bytes = own[1];
  unsigned char* there = reinterpret_cast<unsigned char*>(own[0]) + bytes * slot;
  unsigned char* here = packed + own[2];
  unsigned char* to = is_restored ? there : here;
  const unsigned char* from = is_restored ? here : there;
  if (bytes % 16 == 0)
    move<float4>(to, from, bytes);
  else
    move<unsigned>(to, from, bytes);
}
