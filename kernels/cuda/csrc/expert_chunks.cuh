// How matrices are cut to chunks that warps take, for kernels of chosen experts from sm_80 on.
#pragma once
#include "expert_block_32.cuh"

namespace voltapile {

#if VP_ARCH >= 800
// Whether rows are whole chunks of 256 columns.
template <class F>
constexpr bool IS_K = Equal<F, formats::Q4_K>::value || Equal<F, formats::Q5_K>::value ||
                      Equal<F, formats::Q6_K>::value;

// How a matrix with rows of k columns is cut.
template <class F>
struct Chunks {
  static constexpr int COLUMNS = 256, BYTES = Codec<F>::BYTES;
  static constexpr int SLOT = WholeTokens<F>::PER_TOKEN;
  int k;

  __device__ __forceinline__ int count() const {
    return static_cast<unsigned>(k + COLUMNS - 1) / COLUMNS;
  }
  __device__ __forceinline__ int groups(int chunk) const {
    return IS_K<F> ? 8 : min(8, (k - chunk * COLUMNS) / 32);
  }
  __device__ __forceinline__ int row_bytes() const {
    return static_cast<unsigned>(k) / F::length * F::bytes;
  }
  __device__ __forceinline__ Held load(const float* row, int chunk, int lane) const {
    return WholeTokens<F>::load(row, chunk * COLUMNS, k, lane);
  }
};

// Goes through items first, first + step, ...: which tile and which of its chunks.
struct Walk {
  int tile = 0, chunk;

  __device__ __forceinline__ Walk(int first, int chunks) : chunk(first) { settle(chunks); }
  __device__ __forceinline__ void advance(int step, int chunks) {
    chunk += step;
    settle(chunks);
  }
  __device__ __forceinline__ void settle(int chunks) {
#pragma unroll 1
    while (chunk >= chunks) chunk -= chunks, ++tile;
  }
};

// A warp's number, of which the compiler knows that all lanes have the same: else it makes code for
// lanes that part from each other. All of them call.
__device__ __forceinline__ int own_warp() { return __shfl_sync(~0u, threadIdx.x >> 5, 0); }
__device__ __forceinline__ constexpr int whole(int bytes) { return (bytes + 127) & ~127; }
#endif

}  // namespace voltapile
