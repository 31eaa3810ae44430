// Pairs of a token and one of its experts, for generated rows from sm_80 on. Of those with the same
// expert the first one's block works for all, so that weights are read once. It changes no sum.
// -D FORMAT; OTHER, of the expert that every token takes; WARPS and DEPTH as in expert_strip.cuh.
#pragma once
#include "expert_strip.cuh"
#include "expert_table.cuh"
#include "state_rows.cuh"

namespace voltapile {

#if VP_ARCH >= 800
using F = formats::FORMAT;
using O = formats::OTHER;

// Lane i gets the pair that comes `first` + i-th of those with this expert, or -1; and all of them
// are counted. The whole warp calls.
__device__ __forceinline__ int pair_with(const int* chosen, int pairs, int expert, int first,
                                         int& count) {
  const int lane = threadIdx.x & 31;
  int mine = -1;
  count = 0;
#pragma unroll 4
  for (int base = 0; base < pairs; base += 32) {
    const int at = base + lane;
    unsigned same = __ballot_sync(ALL, at < pairs && chosen[at] == expert);
    int skip = first + lane - count;
    count += __popc(same);
    if (skip < 0 || skip >= __popc(same)) continue;
#pragma unroll 1
    while (skip-- > 0) same &= same - 1;
    mine = base + __ffs(static_cast<int>(same)) - 1;
  }
  return mine;
}

// Turns of up to `room` pairs that have the expert of pair `own`, if it is the first of them.
// work(count, pair of token i) by all threads; list: [MOST_TOKENS] in shared memory.
template <class Work>
__device__ __forceinline__ void for_twins(const int* chosen, int pairs, int own, int room,
                                          bool is_single, int* list, Work work) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  for (int first = 0;; first += room) {
    int count = 1, mine = own;
    if (!is_single) mine = pair_with(chosen, pairs, chosen[own], first, count);
    if (first == 0 && __shfl_sync(ALL, mine, 0) != own) return;
    __syncthreads();  // the list, and what is behind it, has been read
    if (warp == 0 && lane < MOST_TOKENS) list[lane] = mine;
    __syncthreads();
    work(min(room, count - first));
    if (first + room >= count) return;
  }
}
#endif

}  // namespace voltapile
