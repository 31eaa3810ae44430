// Pairs of a token and one of its experts, for generated rows from sm_80 on. Of those with the same
// expert the first one's block works for all, so that weights are read once. It changes no sum.
// -D FORMAT; OTHER, of the expert that every token takes; ALONE 1 if there is none; WARPS.
#pragma once
#include "expert_strip.cuh"
#include "expert_table.cuh"
#include "state_rows.cuh"

namespace voltapile {

#if VP_ARCH >= 800
using F = formats::FORMAT;
using O = formats::OTHER;

#ifndef ALONE
#define ALONE 0
#endif
constexpr bool IS_ALONE = ALONE;

// Of pairs with the expert of pair `own`, from the `first` on: lane i gets the i-th, or -1, and all
// are counted; none if they are another block's. The whole warp calls; past the first cache, which
// may hold an earlier layer's.
__device__ __forceinline__ int twins_of(const int* chosen, int pairs, int own, int first,
                                        int& mine) {
  constexpr int SEVERAL = 4;  // times 32 pairs are asked for at once
  const int lane = threadIdx.x & 31, expert = __ldcg(chosen + own);
  int count = 0;
  mine = -1;
#pragma unroll 1
  for (int base = 0; base < pairs; base += 32 * SEVERAL) {
    int there[SEVERAL];
#pragma unroll
    for (int i = 0; i < SEVERAL; ++i) {
      const int at = base + 32 * i + lane;
      there[i] = at < pairs ? __ldcg(chosen + at) : -1;
    }
#pragma unroll
    for (int i = 0; i < SEVERAL; ++i) {
      unsigned same = __ballot_sync(ALL, there[i] == expert);
      int skip = first + lane - count;
      count += __popc(same);
      if (skip < 0 || skip >= __popc(same)) continue;
#pragma unroll 1
      while (skip-- > 0) same &= same - 1;
      mine = base + 32 * i + __ffs(static_cast<int>(same)) - 1;
    }
  }
  return first == 0 && __shfl_sync(ALL, mine, 0) != own ? 0 : count - first;
}

// A block's tokens: where the rows begin that are read and written, among others of their kind. In
// shared memory; no pointers, of which nobody would know that they point to global memory.
struct Seats {
  long long from[MOST_TOKENS], to[MOST_TOKENS];
};
// Of Strip's tokens: those that sit there, as nothing but rows.
struct Seated {
  const Seats& seats;
  const float* x;
  static constexpr bool IS_EARLY = false, IS_LONE = false;

  // For each of `own` tokens, by a thread; row: that it is written to.
  static __device__ __forceinline__ Seated sit(Seats& seats, const float* x, int own,
                                               unsigned token, unsigned row, int k, int width) {
    __syncthreads();  // what is in shared memory has been read
    if (threadIdx.x < own) {
      seats.from[threadIdx.x] = static_cast<long long>(token) * k;
      seats.to[threadIdx.x] = static_cast<long long>(row) * width;
    }
    __syncthreads();
    return {seats, x};
  }
  __device__ __forceinline__ void arrive() const {}
  __device__ __forceinline__ const float* row(int token) const { return x + seats.from[token]; }
  __device__ __forceinline__ long long to(int token) const { return seats.to[token]; }
  template <class Cut>
  __device__ __forceinline__ void see(int, int, const Cut&, const Held&) const {}
  __device__ __forceinline__ float factor(int) const { return 1.0f; }  // of what is written
};
// The same of a launch's only token, of which nobody has to be told.
struct Lone {
  const float* x;
  long long at;
  static constexpr bool IS_EARLY = false, IS_LONE = true;

  static __device__ __forceinline__ Lone sit(Seats&, const float* x, int, unsigned, unsigned row,
                                             int, int width) {
    return {x, static_cast<long long>(row) * width};
  }
  __device__ __forceinline__ void arrive() const {}
  __device__ __forceinline__ const float* row(int) const { return x; }
  __device__ __forceinline__ long long to(int) const { return at; }
  template <class Cut>
  __device__ __forceinline__ void see(int, int, const Cut&, const Held&) const {}
  __device__ __forceinline__ float factor(int) const { return 1.0f; }
};
#endif

}  // namespace voltapile
