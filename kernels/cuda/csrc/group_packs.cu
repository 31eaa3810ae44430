// Collectives of small arrays by packs: whoever has a pack writes it to whom it concerns, and
// polls. No barrier, no fence, no host. A thread has one pack of each exchange; blocks are SLOTS
// threads at most, a grid PACK_BLOCKS at most, and both are the same on all ranks. `first`: where
// in the arrays this launch begins.
#include "grid.cuh"
#include "group.cuh"

namespace voltapile {

__device__ __forceinline__ void put(float* out, long long first, long long count, Sum sum,
                                    Sum old) {
  if (first < count) out[first] = old.x + sum.x;
  if (first + 1 < count) out[first + 1] = old.y + sum.y;
  if (first + 2 < count) out[first + 2] = old.z + sum.z;
}

// What is to be added to: -0 where nothing is, since x + -0 is x.
__device__ __forceinline__ Sum old_of(const float* out, long long first, long long count,
                                      int accumulate) {
  Sum old = {-0.0f, -0.0f, -0.0f};
  if (accumulate) old.start(words_at(reinterpret_cast<const unsigned*>(out), first, count));
  return old;
}

// Every thread of the block has made `exchanges` with the others.
__device__ __forceinline__ void count_up(Group* group, const int* others, int number, int mine,
                                         unsigned exchanges) {
  __syncthreads();
  const int i = threadIdx.x;
  if (i < number && i != mine) group->packs[others ? others[i] : i][blockIdx.x] += exchanges;
}

}  // namespace voltapile

using namespace voltapile;

// out (+)= the sum of all parts, added in the order of ranks: each pack goes to everybody.
extern "C" __global__ void __launch_bounds__(512, 2)
group_sum(Group* group, const float* part, float* out, long long first, long long count,
          int accumulate, int rank, int ranks) {
  grid_wait();
  grid_launch();
  const int block = blockIdx.x;
  const long long at = first + 3LL * (block * static_cast<int>(blockDim.x) + threadIdx.x);
  const Pack own = words_at(reinterpret_cast<const unsigned*>(part), at, count);
#pragma unroll 1
  for (int r = 0; r < ranks; ++r) {
    if (r != rank) push(group->peers[r], group->packs[r][block] + 1, own);
  }
  const Sum old = old_of(out, at, count, accumulate);
  Wait wait(group);
  Sum sum;
#pragma unroll 1
  for (int r = 0; r < ranks; ++r) {
    const Pack words =
        r == rank ? own : pull(group->peers[r], r, group->packs[r][block] + 1, wait);
    if (r == 0) sum.start(words);
    else sum.add(words);
  }
  wait.end();
  put(out, at, count, sum, old);
  count_up(group, nullptr, ranks, rank, 1);
}

// The same in two steps for many ranks, three for several islands: each mate adds one slice of the
// array, first its island's parts in their order, then the islands' sums in theirs, and gives the
// result to its mates. So of what crosses between islands each rank writes a mates-th only.
extern "C" __global__ void __launch_bounds__(512, 2)
group_sum_slices(Group* group, const float* part, float* out, long long first, long long count,
                 int accumulate) {
  grid_wait();
  grid_launch();
  const int block = blockIdx.x, mates = group->mates, mate = group->mate;
  const long long slice = 3LL * gridDim.x * blockDim.x;  // floats
  const long long at = first + 3LL * (block * static_cast<int>(blockDim.x) + threadIdx.x);
  const unsigned* words = reinterpret_cast<const unsigned*>(part);
  Wait wait(group);
#pragma unroll 1
  for (int j = 0; j < mates; ++j) {
    const int r = group->mate_ranks[j];
    if (j != mate)
      push(group->peers[r], group->packs[r][block] + 1, words_at(words, at + j * slice, count));
  }
  Sum sum;
#pragma unroll 1
  for (int j = 0; j < mates; ++j) {
    const int r = group->mate_ranks[j];
    const Pack theirs = j == mate
        ? words_at(words, at + mate * slice, count)
        : pull(group->peers[r], r, group->packs[r][block] + 1, wait);
    if (j == 0) sum.start(theirs);
    else sum.add(theirs);
  }
  const Pack island = sum.words();
#pragma unroll 1
  for (int k = 0; k < group->islands; ++k) {
    const int r = group->partner_ranks[k];
    if (k != group->island) push(group->peers[r], group->packs[r][block] + 1, island);
  }
#pragma unroll 1
  for (int k = 0; k < group->islands; ++k) {
    const int r = group->partner_ranks[k];
    const Pack theirs =
        k == group->island ? island : pull(group->peers[r], r, group->packs[r][block] + 1, wait);
    if (k == 0) sum.start(theirs);
    else sum.add(theirs);
  }
  const Pack total = sum.words();
#pragma unroll 1
  for (int j = 0; j < mates; ++j) {
    const int r = group->mate_ranks[j];
    if (j != mate) push(group->peers[r], group->packs[r][block] + 2, total);
  }
#pragma unroll 1
  for (int j = 0; j < mates; ++j) {
    const int r = group->mate_ranks[j];
    sum.start(j == mate ? total : pull(group->peers[r], r, group->packs[r][block] + 2, wait));
    const long long place = at + j * slice;
    put(out, place, count, sum, old_of(out, place, count, accumulate));
  }
  wait.end();
  count_up(group, group->mate_ranks, mates, mate, 2);
  count_up(group, group->partner_ranks, group->islands, group->island, 1);
}

// out [rows, stride]: columns[r]..columns[r + 1] of each row are rank r's part [rows, width].
extern "C" __global__ void __launch_bounds__(512, 2)
group_gather(Group* group, const unsigned* part, unsigned* out, long long first, int rows,
             const int* columns, int rank, int ranks) {
  grid_wait();
  grid_launch();
  const int block = blockIdx.x;
  const long long at = first + 3LL * (block * static_cast<int>(blockDim.x) + threadIdx.x);
  const int stride = columns[ranks];
  const int mine = columns[rank + 1] - columns[rank];
  const Pack own = words_at(part, at, rows * mine);
#pragma unroll 1
  for (int r = 0; r < ranks; ++r) {
    if (r != rank) push(group->peers[r], group->packs[r][block] + 1, own);
  }
  Wait wait(group);
#pragma unroll 1
  for (int r = 0; r < ranks; ++r) {
    const Pack words =
        r == rank ? own : pull(group->peers[r], r, group->packs[r][block] + 1, wait);
    const int width = columns[r + 1] - columns[r];
    const unsigned values[3] = {words.x, words.y, words.z};
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      const int from = static_cast<int>(at) + i;
      if (from >= rows * width) break;
      const int row = from / width;
      out[static_cast<long long>(row) * stride + columns[r] + from - row * width] = values[i];
    }
  }
  wait.end();
  count_up(group, nullptr, ranks, rank, 1);
}

// x as it is on rank `source`. All write, so that all know how far the others have read.
extern "C" __global__ void __launch_bounds__(512, 2)
group_broadcast(Group* group, unsigned* x, long long first, long long count, int source, int rank,
                int ranks) {
  grid_wait();
  grid_launch();
  const int block = blockIdx.x;
  const long long at = first + 3LL * (block * static_cast<int>(blockDim.x) + threadIdx.x);
  const Pack own = words_at(x, at, count);
#pragma unroll 1
  for (int r = 0; r < ranks; ++r) {
    if (r != rank) push(group->peers[r], group->packs[r][block] + 1, own);
  }
  Wait wait(group);
#pragma unroll 1
  for (int r = 0; r < ranks; ++r) {
    if (r == rank) continue;
    const Pack words = pull(group->peers[r], r, group->packs[r][block] + 1, wait);
    if (r != source) continue;
    if (at < count) x[at] = words.x;
    if (at + 1 < count) x[at + 1] = words.y;
    if (at + 2 < count) x[at + 2] = words.z;
  }
  wait.end();
  count_up(group, nullptr, ranks, rank, 1);
}
