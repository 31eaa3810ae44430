// The sum that ends a part of a layer, and the norm that begins the next one: a block for each row,
// whose threads keep what they send, add and norm; little of it in registers, so that it finds room
// beside a product that still runs.
#include "attention_copies.cuh"
#include "grid.cuh"
#include "group.cuh"
#include "norm_row.cuh"

extern __shared__ __align__(16) unsigned char shared[];

namespace voltapile {

constexpr int HELD = 2;  // float4 of a thread, a lane's columns of a run

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
__device__ __forceinline__ void push(const Peer* peers, unsigned exchange, const Place& at,
                                     const float4 (&values)[HELD], int rank, int ranks) {
#pragma unroll 1
  for (int r = 0; r < ranks; ++r) {
    if (r == rank) continue;
    uint4* to = row_of(peers[r].out, exchange, blockIdx.x) + threadIdx.x;
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
      if (at.has(i)) store_four(to + i * ROW_THREADS, hidden(values[i]));
    }
  }
}

// What the peer has pushed; its place is then empty again.
__device__ __forceinline__ void pull(const Peer& peer, int other, unsigned exchange,
                                     const Place& at, Wait& wait, float4 (&values)[HELD]) {
  const int is_narrow = peer.is_narrow;
  uint4* from = row_of(peer.in, exchange, blockIdx.x) + threadIdx.x;
  bool has_come;
  do {
    has_come = true;
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
      if (!at.has(i)) continue;
      const uint4 words = load_four(from + i * ROW_THREADS);
      has_come &= is_whole(words);
      values[i] = shown(words);
    }
  } while (!has_come && !wait.is_over(other));
#pragma unroll
  for (int i = 0; i < HELD; ++i) {
    if (at.has(i)) store_four(from + i * ROW_THREADS, uint4{0, 0, 0, 0});
  }
  if (is_narrow) order_all();  // before the host's memory is told of the next exchange
}

// By one thread: the sum before this one has ended.
__device__ __forceinline__ void await_end(const unsigned* ended, unsigned exchange, int rank,
                                          Wait& wait) {
  while (load_fresh(ended) != exchange && !wait.is_over(rank)) {
  }
  wait.renew();
  __threadfence();
}
// By one thread: of x and of emptied places all has been written.
__device__ __forceinline__ void end(unsigned* ended, unsigned exchange) {
  __threadfence();
  store_fresh(ended, exchange + 1);
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

// x (rows of n) (+)= the sum of the parts, added in the order of ranks; out = rms_norm of x, where
// weight is not null.
// grid: (rows), a warp for each run of a row, and a last one, which has none of the row and keeps
// count of the exchanges; n is a multiple of 4. shared: 8 n bytes. is_pushed: the product that made
// this rank's part has sent it (group_push.cuh), to itself too: then that is polled for as well,
// and seen before the product's launch has ended.
extern "C" __global__ void __launch_bounds__(ROW_THREADS + 32, 1)
group_sum_norm(Group* group, const float* part, float* x, const float* weight, float* out, int n,
               float eps, int rank, int ranks, int is_pushed, int accumulate) {
  __shared__ float scratch[32];
  __shared__ unsigned number;
  __shared__ Peer peers[MOST_RANKS];  // near, since each is asked for when the one before has come
  const int lane = threadIdx.x & 31, runs = (n + RUN - 1) / RUN;
  const float inverse = 1.0f / n;
  const Place at = {n / 4};
  const long long begin = static_cast<long long>(blockIdx.x) * n;
  float* weights = reinterpret_cast<float*>(shared);
  float* before = weights + n;
  float4 values[HELD], sum[HELD];
  if (weight != nullptr) at.fetch(weight, weights);
  const bool keeps_count = threadIdx.x == blockDim.x - 32;  // a warp's first looks for an abort
  unsigned* ended = group->ended + blockIdx.x;
  if (threadIdx.x < ranks) peers[threadIdx.x] = group->peers[threadIdx.x];
  if (keeps_count) number = count_on(group->rows + blockIdx.x);
  __syncthreads();
  grid_launch();
  const unsigned exchange = number;
  Wait wait(group);
  const auto own = [&] {
    values[0] = values[1] = zeros();
    if (part != nullptr) at.load(part + begin, values);
  };
  if (!is_pushed) {
    grid_wait();
    own();
    push(peers, exchange, at, values, rank, ranks);
  } else {
    if (keeps_count) await_end(ended, exchange, rank, wait);
    __syncthreads();
  }
#pragma unroll 1  // what a wait that lasts does is long
  for (int i = 0; i < ranks; ++i) {
    const int r = ranks == 2 ? i ^ rank : i;  // the sum of two is the same either way
    if (r != rank || is_pushed) pull(peers[r], r, exchange, at, wait, values);
    else if (i > 0) own();  // again: there are no registers for it meanwhile
    if (r == rank) wait.renew();
    // Whoever has sent this rank's part has waited for whoever has made x.
    if (r == rank && accumulate) at.fetch(x + begin, before);
#pragma unroll
    for (int j = 0; j < HELD; ++j) sum[j] = i == 0 ? values[j] : plus(sum[j], values[j]);
  }
  wait.end();
  grid_wait();  // others of the product may still read what lies where `out` will
#if VP_ARCH >= 800
  wait_for_copies<0>();
#endif
  if (accumulate) at.load(before, values);
#pragma unroll
  for (int i = 0; i < HELD; ++i) {
    if (accumulate) sum[i] = plus(values[i], sum[i]);
    if (!at.has(i)) sum[i] = zeros();
  }
  const float squares = warp_join(squares_of(sum[0], sum[1]), Add());
  if (lane == 0) scratch[threadIdx.x / 32] = squares;
  at.store(x + begin, sum);
  __syncthreads();
  if (keeps_count) end(ended, exchange);
  if (weight == nullptr) return;
  put_norm(at, weights, norm_factor(scratch, runs, inverse, eps, lane), sum, out + begin);
}
