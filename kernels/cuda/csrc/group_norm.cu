// The sum that ends a part of a layer, and the norm that begins the next one: a block for each row,
// whose threads keep what they send, add and norm. Values go where those go that products sum in
// their tail, so any rank may do either.
#include "attention_copies.cuh"
#include "grid.cuh"
#include "group_tail.cuh"
#include "norm_row.cuh"

extern __shared__ __align__(16) unsigned char shared[];

namespace voltapile {

constexpr int HELD = 2;  // float4 of a thread, a lane's columns of a run
constexpr int MOST_THREADS = LONGEST_ROW / (4 * HELD);

__device__ __forceinline__ float4 zeros() { return make_float4(0.0f, 0.0f, 0.0f, 0.0f); }
__device__ __forceinline__ float4 plus(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// This thread's part of a row of `count` float4.
struct Place {
  int count;
  __device__ __forceinline__ int operator()(int i) const { return HELD * threadIdx.x + i; }
  __device__ __forceinline__ bool has(int i) const { return (*this)(i) < count; }

  __device__ __forceinline__ void load(const float* row, float4 (&values)[HELD]) const {
#pragma unroll
    for (int i = 0; i < HELD; ++i)
      values[i] = has(i) ? reinterpret_cast<const float4*>(row)[(*this)(i)] : zeros();
  }
  __device__ __forceinline__ void store(float* row, const float4 (&values)[HELD]) const {
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
      if (has(i)) reinterpret_cast<float4*>(row)[(*this)(i)] = values[i];
    }
  }
  // Of this block's row of an exchange; the next four lies behind.
  __device__ __forceinline__ uint4* words(unsigned* room) const {
    const int column = 4 * HELD * threadIdx.x;
    return reinterpret_cast<uint4*>(room + TILE_WORDS * (column / 16) + 16 * blockIdx.x +
                                    column % 16);
  }
  // To shared memory, where it is when copies were waited for.
  __device__ __forceinline__ void fetch(const float* row, float* to) const {
#if VP_ARCH >= 800
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
      if (has(i)) copy_async(to + 4 * (*this)(i), row + 4 * (*this)(i), 16);
    }
    commit_copies();
#else
    float4 values[HELD];
    load(row, values);
    store(to, values);
#endif
  }
};

// This rank's part of the row, to all others; neighbours write what lies side by side.
__device__ __forceinline__ void push(const Tail& tail, const Place& at,
                                     const float4 (&values)[HELD]) {
#pragma unroll 1
  for (int r = 0; r < tail.ranks; ++r) {
    if (r == tail.rank) continue;
    uint4* to = at.words(Tail::ways()[r].out);
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
      if (at.has(i)) store_four(to + i, hidden(values[i]));
    }
  }
}

// What the peer has sent; its place is then empty again.
__device__ __forceinline__ void pull(int other, const Place& at, Wait& wait,
                                     float4 (&values)[HELD]) {
  const Tail::Way way = Tail::ways()[other];
  uint4* from = at.words(way.in);
  bool has_come;
  do {
    has_come = true;
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
      if (!at.has(i)) continue;
      const uint4 words = load_four(from + i);
      has_come &= is_whole(words);
      values[i] = shown(words);
    }
  } while (!has_come && !wait.is_over(other));
#pragma unroll
  for (int i = 0; i < HELD; ++i) {
    if (at.has(i)) store_four(from + i, uint4{0, 0, 0, 0});
  }
  way.settle();
}

// Of sums, with weights that are near.
__device__ __forceinline__ void put_norm(const Place& at, const float* weights, float norm,
                                         const float4 (&sums)[HELD], float* out) {
  float4 values[HELD];
  at.load(weights, values);
#pragma unroll
  for (int i = 0; i < HELD; ++i) values[i] = scaled(scaled(sums[i], values[i]), norm);
  at.store(out, values);
}

}  // namespace voltapile

using namespace voltapile;

// x (rows of n) += the sum of the parts, added in the order of ranks; out = rms_norm of x.
// grid: (rows), a warp for each run of a row; n is a multiple of 4. shared: 8 n bytes.
extern "C" __global__ void __launch_bounds__(MOST_THREADS, 1)
group_sum_norm(Group* group, const float* part, float* x, const float* weight, float* out, int n,
               float eps, int rank, int ranks) {
  __shared__ float scratch[32];
  const int lane = threadIdx.x & 31, runs = (n + RUN - 1) / RUN;
  const float inverse = 1.0f / n;
  const Tail tail{group, rank, ranks};
  const Place at = {n / 4};
  const long long begin = static_cast<long long>(blockIdx.x) * n;
  float* weights = reinterpret_cast<float*>(shared);
  float* before = weights + n;
  float4 values[HELD], sum[HELD];
  at.fetch(weight, weights);
  if (threadIdx.x < 32) tail.begin(threadIdx.x);
  __syncthreads();
  grid_launch();
  Wait wait(group);
  const auto own = [&] {
    values[0] = values[1] = zeros();
    if (part != nullptr) at.load(part + begin, values);
  };
  grid_wait();
  own();
  push(tail, at, values);
  at.fetch(x + begin, before);
#pragma unroll 1  // what a wait that lasts does is long
  for (int i = 0; i < ranks; ++i) {
    const int r = ranks == 2 ? i ^ rank : i;  // the sum of two is the same either way
    if (r != rank) pull(r, at, wait, values);
    else if (i > 0) own();  // again: there are no registers for it meanwhile
#pragma unroll
    for (int j = 0; j < HELD; ++j) sum[j] = i == 0 ? values[j] : plus(sum[j], values[j]);
  }
  wait.end();
#if VP_ARCH >= 800
  wait_for_copies<0>();
#endif
  at.load(before, values);
#pragma unroll
  for (int i = 0; i < HELD; ++i) sum[i] = at.has(i) ? plus(values[i], sum[i]) : zeros();
  const float squares = warp_join(squares_of(sum[0], sum[1]), Add());
  if (lane == 0) scratch[threadIdx.x / 32] = squares;
  at.store(x + begin, sum);
  __syncthreads();
  put_norm(at, weights, norm_factor(scratch, runs, inverse, eps, lane), sum, out + begin);
}
