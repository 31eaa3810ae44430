// A sum over ranks as products make it in their tail, of a part that lies in memory, for a rank
// whose part is made otherwise, or that has none.
#include "group_tail.cuh"

using namespace voltapile;

// x [tokens][n] (+)= the sum over ranks; part: null for zeros.
// grid: as many blocks as can all run at once; a thread has every so manieth value. All are sent
// before any is waited for.
extern "C" __global__ void group_tail(Group* group, const float* part, float* x, int n, int tokens,
                                      int accumulate, int rank, int ranks) {
  const Tail tail{group, rank, ranks};
  if (threadIdx.x < 32) {
    tail.begin(threadIdx.x);
    grid_launch();
  }
  __syncthreads();
  grid_wait();
  const int one = 16 * tokens, first = blockIdx.x * blockDim.x + threadIdx.x;
  const int step = gridDim.x * blockDim.x;
  const auto place = [&](int i) { return i / one * TILE_WORDS + i % one; };
  const auto at = [&](int i) { return i % one / 16 * n + i / one * 16 + i % 16; };
  const auto own = [&](int i) { return part == nullptr ? 0.0f : part[at(i)]; };
#pragma unroll 1
  for (int i = first; i < n * tokens; i += step) tail.send(own(i), place(i));
#pragma unroll 1
  for (int i = first; i < n * tokens; i += step) {
    const float before = accumulate ? x[at(i)] : 0.0f;
    const float sum = tail.total(own(i), place(i));
    x[at(i)] = accumulate ? before + sum : sum;
  }
}
