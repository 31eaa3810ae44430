// A head of q, k or v between its product and attention, in a warp's registers: lane i has values
// i, 32 + i and so on.
#pragma once
#include "attention_store.cuh"

namespace voltapile {

// factors: weights of the norm.
template <int PIECES>
__device__ __forceinline__ void norm_head(float (&held)[PIECES], const float (&factors)[PIECES],
                                          int dim, float eps) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < PIECES; ++i) sum += held[i] * held[i];
  for (int step = 16; step > 0; step >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  const float norm = 1.0f / sqrtf(sum / dim + eps);
#pragma unroll
  for (int i = 0; i < PIECES; ++i) held[i] = held[i] * norm * factors[i];
}

// To a head of a page, at `place`. row: shared memory for as many values, the warp's.
template <int PIECES>
__device__ __forceinline__ void store_head(const float (&held)[PIECES], unsigned char* head,
                                           int kind, int place, int dim, float* row) {
  const int lane = threadIdx.x & 31;
  if (kind == F16) {
#pragma unroll
    for (int i = 0; i < PIECES; ++i)
      if (32 * i + lane < dim) store_half(head, place, dim, 32 * i + lane, held[i]);
    return;
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < PIECES; ++i) row[32 * i + lane] = held[i];
  __syncwarp();
#pragma unroll 1
  for (int block = 0; 32 * block < dim; ++block)
    store_integers(head, kind, place, dim, block, row[32 * block + lane]);
}

}  // namespace voltapile
