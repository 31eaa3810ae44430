// The sum that ends a part of a layer, and the norm that begins the next one: a block for each row
// gathers its row's packs, keeps the row in shared memory, and norms it there, with the bits of
// norm.cu (norm_row.cuh).
#include "grid.cuh"
#include "group.cuh"
#include "norm_row.cuh"

extern __shared__ __align__(16) unsigned char shared[];

namespace voltapile {

constexpr int HELD = 4;   // float4 that a thread norms
constexpr int PACKS = 3;  // that it sums

__device__ __forceinline__ float4 zeros() { return make_float4(0.0f, 0.0f, 0.0f, 0.0f); }

__device__ __forceinline__ void keep(float* row, int at, int n, Sum values) {
  if (at < n) row[at] = values.x;
  if (at + 1 < n) row[at + 1] = values.y;
  if (at + 2 < n) row[at + 2] = values.z;
}

// Sends this rank's part of a row to all others, and leaves it in shared memory.
__device__ __forceinline__ void push_row(Group* group, const unsigned* part, float* row, int n,
                                         int first, int rank, int ranks) {
  const int packs = (n + 2) / 3;
  Words own[PACKS];
#pragma unroll
  for (int k = 0; k < PACKS; ++k) own[k] = words_at(part, 3 * (k * blockDim.x + threadIdx.x), n);
#pragma unroll 1
  for (int r = 0; r < ranks; ++r) {
    if (r == rank) continue;
    const Peer& peer = group->peers[r];
#pragma unroll
    for (int k = 0; k < PACKS; ++k) {
      const int i = k * blockDim.x + threadIdx.x, block = first + i / SLOTS;
      if (i < packs) push(peer, group->packs[r][block] + 1, own[k], block, i % SLOTS);
    }
  }
#pragma unroll
  for (int k = 0; k < PACKS; ++k) {
    Sum values;
    values.start(own[k]);
    keep(row, 3 * (k * blockDim.x + threadIdx.x), n, values);
  }
}

// x (a row of n) += the sum of the parts; the row is left in shared memory. A row has `units` of
// the blocks that packs are counted by.
__device__ void sum_row(Group* group, const unsigned* part, float* x, float* row, int n, int units,
                        int rank, int ranks) {
  const int packs = (n + 2) / 3, first = blockIdx.x * units;
  push_row(group, part, row, n, first, rank, ranks);
  Wait wait(group);
#pragma unroll 1  // what a wait that lasts does is long
  for (int i = threadIdx.x; i < packs; i += blockDim.x) {
    const int block = first + i / SLOTS;
    const Words old = words_at(reinterpret_cast<const unsigned*>(x), 3 * i, n);
    Sum sum;
#pragma unroll 1
    for (int r = 0; r < ranks; ++r) {
      const Words words = r == rank
          ? words_at(reinterpret_cast<const unsigned*>(row), 3 * i, n)
          : pull(group->peers[r], r, group->packs[r][block] + 1, wait, block, i % SLOTS);
      if (r == 0) sum.start(words);
      else sum.add(words);
    }
    Sum all;
    all.start(old);
    all.add(sum.words());
    keep(row, 3 * i, n, all);
    keep(x, 3 * i, n, all);
  }
  wait.end();
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < units * ranks; i += blockDim.x) {
    if (i % ranks != rank) group->packs[i % ranks][first + i / ranks] += 1;
  }
}

}  // namespace voltapile

using namespace voltapile;

// grid: (rows). n is a multiple of 4, no more than 3 PACKS times the threads; shared: 4 n bytes.
extern "C" __global__ void __launch_bounds__(1024, 1)
group_sum_norm(Group* group, const float* part, float* x, const float* weight, float* out, int n,
               float eps, int units, int rank, int ranks) {
  __shared__ float scratch[64];
  float* row = reinterpret_cast<float*>(shared);
  const float4* w4 = reinterpret_cast<const float4*>(weight);
  const int count = n / 4;
  grid_launch();
  grid_wait();
  const long long begin = static_cast<long long>(blockIdx.x) * n;
  const unsigned* mine = reinterpret_cast<const unsigned*>(part);
  sum_row(group, mine ? mine + begin : mine, x + begin, row, n, units, rank, ranks);
  const float4* row4 = reinterpret_cast<const float4*>(row);
  float4* out4 = reinterpret_cast<float4*>(out + begin);
  float4 v[HELD], w[HELD];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  const int runs = (n + RUN - 1) / RUN;
  const int first = RUN / 4 * warp + 2 * lane, step = RUN / 4 * warps;  // in float4
#pragma unroll
  for (int i = 0; i < HELD; ++i) {
    const int at = first + i / 2 * step + i % 2;
    v[i] = at < count ? row4[at] : zeros();
    w[i] = at < count ? w4[at] : zeros();
  }
#pragma unroll
  for (int i = 0; i < HELD; i += 2) {
    const float sum = warp_join(squares_of(v[i], v[i + 1]), Add());
    const int run = warp + i / 2 * warps;
    if (lane == 0 && run < runs) scratch[run] = sum;
  }
  __syncthreads();
  const float norm = norm_factor(scratch, runs, 1.0f / n, eps, lane);
#pragma unroll
  for (int i = 0; i < HELD; ++i) {
    const int at = first + i / 2 * step + i % 2;
    if (at >= count) break;
    out4[at] = scaled(scaled(v[i], w[i]), norm);
  }
}
