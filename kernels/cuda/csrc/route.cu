// From router logits to a token's experts and their weights, and the gates beside them.
#include "block.cuh"
#include "grid.cuh"

using namespace voltapile;
using u64 = unsigned long long;

constexpr int HELD = 32;  // logits of a lane, most

struct Larger {
  __device__ u64 operator()(u64 a, u64 b) const { return a > b ? a : b; }
};

// grid: (n / 256). float32 to the nearest BF16, ties to even.
extern "C" __global__ void round_to_bf16(const float* x, float* out, long long n) {
  grid_launch();
  grid_wait();
  const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const unsigned bits = __float_as_uint(x[i]);
  out[i] = __uint_as_float((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u);
}

// grid: (tokens / 4), 128 threads: a warp for each token. The largest shares, of equal ones the
// first expert. counts: [2][experts], of prompts' tokens and of the first `generated` ones.
extern "C" __global__ void __launch_bounds__(128)
route(const float* logits, int* chosen, float* weights, u64* counts, int experts, int used,
      int tokens, int generated) {
  grid_launch();
  grid_wait();
  const int token = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x & 31;
  if (token >= tokens) return;
  logits += static_cast<long long>(token) * experts;
  float shares[HELD], best = -3.4e38f, sum = 0.0f;
#pragma unroll
  for (int i = 0; i < HELD; ++i) {
    const int at = 32 * i + lane;
    shares[i] = at < experts ? logits[at] : -3.4e38f;
    best = fmaxf(best, shares[i]);
  }
  best = warp_join(best, Max());
#pragma unroll
  for (int i = 0; i < HELD; ++i) {
    shares[i] = 32 * i + lane < experts ? expf(shares[i] - best) : 0.0f;
    sum += shares[i];
  }
  sum = warp_join(sum, Add());
  // Shares are not negative, so their bits are in their order; what is no number comes last.
  unsigned bits[HELD];
#pragma unroll
  for (int i = 0; i < HELD; ++i) {
    const float share = shares[i] / sum;
    bits[i] = share >= 0.0f ? __float_as_uint(share) : 0u;
  }
  float mine = 0.0f, all = 0.0f;
  for (int rank = 0; rank < used; ++rank) {
    u64 key = 0;
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
      const unsigned at = 32 * i + lane;
      if (at < experts && bits[i] != 0xffffffffu)
        key = Larger()(key, static_cast<u64>(bits[i]) << 32 | (0xffffffffu - at));
    }
    key = warp_join(key, Larger());
    const unsigned expert = 0xffffffffu - static_cast<unsigned>(key);
#pragma unroll
    for (int i = 0; i < HELD; ++i)
      if (32 * i + lane == expert) bits[i] = 0xffffffffu;  // taken
    const float share = __uint_as_float(static_cast<unsigned>(key >> 32));
    all += share;
    if (lane == rank) mine = share;
    if (lane == 0) {
      chosen[token * used + rank] = static_cast<int>(expert);
      atomicAdd(counts + (token < generated ? experts : 0) + expert, static_cast<u64>(1));
    }
  }
  if (lane < used) weights[token * used + lane] = mine / all;
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// grid: (rows), 256 threads. y [rows][n] *= sigmoid(x [rows][k] . weight [k])
extern "C" __global__ void gate_rows(float* y, const float* x, const float* weight, int n, int k) {
  __shared__ float scratch[32];
  grid_launch();
  grid_wait();
  x += static_cast<long long>(blockIdx.x) * k;
  y += static_cast<long long>(blockIdx.x) * n;
  float sum = 0.0f;
  for (int i = threadIdx.x; i < k; i += blockDim.x) sum += x[i] * weight[i];
  const float factor = sigmoid(block_join(sum, scratch, Add()));
  for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] *= factor;
}

// grid: (n / 256)
extern "C" __global__ void gate_values(float* y, const float* gate, long long n) {
  grid_launch();
  grid_wait();
  const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) y[i] *= sigmoid(gate[i]);
}

// grid: (n / 256). out = silu(gate) * up
extern "C" __global__ void join_gate(const float* gate, const float* up, float* out, long long n) {
  grid_launch();
  grid_wait();
  const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) out[i] = gate[i] * sigmoid(gate[i]) * up[i];
}

// grid: (n / 256). x: [heads][2][dim]; first, second: [heads][dim]
extern "C" __global__ void split_heads(const float* x, float* first, float* second, long long n,
                                       int dim) {
  grid_launch();
  grid_wait();
  const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const long long head = i / (2 * dim), at = i % (2 * dim);
  (at < dim ? first : second)[head * dim + at % dim] = x[i];
}
