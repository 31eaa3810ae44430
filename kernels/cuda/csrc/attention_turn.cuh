// A head of q or k between its product and attention: normed, if the model does that, and rotated;
// and heads of k and v on their way into a page. A warp has a head. Nothing is contracted, so that
// every kernel has the same bits.
#pragma once
#include "attention_store.cuh"

namespace voltapile {

// Of a token: pair i is (i, i + apart), or of neighbours with 1 apart.
struct Turns {
  int pairs, apart, shift, mask;  // of d, so that there is one path

  __device__ __forceinline__ Turns(int pairs, int apart)
      : pairs(pairs), apart(apart), shift(apart == 1), mask(2 * shift - 1) {}
  __device__ __forceinline__ bool is_second(int d) const { return (d & mask) >= apart; }
  __device__ __forceinline__ int pair_of(int d) const {
    return (is_second(d) ? d - apart : d) >> shift;
  }
};

// Lane i has value i of each 32. weight: of the norm, or null; angles: of the token, or null.
template <int LONGEST>
struct Head {
  static constexpr int PIECES = (LONGEST + 31) / 32;
  float held[PIECES], factors[PIECES];
  float2 turn[PIECES];

  __device__ __forceinline__ void read_constants(const float* weight, const float* angles,
                                                 const Turns& turns, int dim, int lane) {
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
      const int d = 32 * i + lane;
      factors[i] = weight != nullptr && d < dim ? weight[d] : 1.0f;
      if (angles != nullptr && d < 2 * turns.pairs)
        turn[i] = reinterpret_cast<const float2*>(angles)[turns.pair_of(d)];
    }
  }
  __device__ __forceinline__ void read(const float* from, int dim, int lane) {
#pragma unroll
    for (int i = 0; i < PIECES; ++i) held[i] = 32 * i + lane < dim ? from[32 * i + lane] : 0.0f;
  }
  __device__ __forceinline__ void norm(int dim, float eps) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < PIECES; ++i) sum = __fadd_rn(sum, __fmul_rn(held[i], held[i]));
    for (int step = 16; step > 0; step >>= 1)
      sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, step));
    const float norm = 1.0f / sqrtf(__fadd_rn(sum / dim, eps));
#pragma unroll
    for (int i = 0; i < PIECES; ++i) held[i] = __fmul_rn(__fmul_rn(held[i], norm), factors[i]);
  }
  // row: room for the head in shared memory, where it is left.
  __device__ __forceinline__ void rotate(const Turns& turns, float* row, int lane) {
    put(row, lane);
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
      const int d = 32 * i + lane;
      if (d >= 2 * turns.pairs) break;
      const bool is_second = turns.is_second(d);
      const float other = __fmul_rn(row[is_second ? d - turns.apart : d + turns.apart], turn[i].y);
      const float own = __fmul_rn(held[i], turn[i].x);
      held[i] = is_second ? __fadd_rn(other, own) : __fsub_rn(own, other);
    }
    __syncwarp();
  }
  __device__ __forceinline__ void put(float* row, int lane) const {
#pragma unroll
    for (int i = 0; i < PIECES; ++i) row[32 * i + lane] = held[i];
    __syncwarp();
  }
};

// What lies at `row` becomes part of the cache. A call, since it is code that few warps run.
__device__ __noinline__ void store_head(Spot to, const float* row, int kind, int dim) {
  const int lane = threadIdx.x & 31;
#pragma unroll 1
  for (int block = 0; 32 * block < dim; ++block) {
    const int d = 32 * block + lane;
    if (kind != F16)
      store_integers(to, kind, dim, block, row[d]);
    else if (d < dim)
      store_half(to, d, row[d]);
  }
}

}  // namespace voltapile
