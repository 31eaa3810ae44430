// From router logits to a token's experts and their weights, and the gates beside them.
#include "state_rows.cuh"

using namespace voltapile;
using u64 = unsigned long long;

constexpr int HELD = 32;   // logits of a lane, most
constexpr int AHEAD = 16;  // float4 of a router's row that a lane asks for at once
constexpr unsigned TAKEN = 0xffffffffu;

struct Larger {
  __device__ u64 operator()(u64 a, u64 b) const { return a > b ? a : b; }
};

// float32 to the nearest BF16, ties to even.
__device__ __forceinline__ float rounded(float x, int is_rounded) {
  const unsigned bits = __float_as_uint(x);
  return is_rounded ? __uint_as_float((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u) : x;
}

// grid: (n / 256)
extern "C" __global__ void round_to_bf16(const float* x, float* out, long long n) {
  grid_launch();
  grid_wait();
  const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) out[i] = rounded(x[i], 1);
}

// A token's choice, by a warp. The largest shares, of equal ones the first expert.
__device__ __forceinline__ void choose(const float* logits, int* chosen, float* weights,
                                       u64* counts, int experts, int used) {
  const int lane = threadIdx.x & 31;
  float shares[HELD], best = -3.4e38f, sum = 0.0f;
#pragma unroll
  for (int i = 0; i < HELD; ++i) {
    const int at = 32 * i + lane;
    shares[i] = at < experts ? __ldcg(logits + at) : -3.4e38f;
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
      if (at < experts && bits[i] != TAKEN)
        key = Larger()(key, static_cast<u64>(bits[i]) << 32 | (0xffffffffu - at));
    }
    key = warp_join(key, Larger());
    const unsigned expert = 0xffffffffu - static_cast<unsigned>(key);
#pragma unroll
    for (int i = 0; i < HELD; ++i)
      if (32 * i + lane == expert) bits[i] = TAKEN;
    const float share = __uint_as_float(static_cast<unsigned>(key >> 32));
    all += share;
    if (lane == rank) mine = share;
    if (lane == 0) {
      chosen[rank] = static_cast<int>(expert);
      atomicAdd(counts + expert, static_cast<u64>(1));
    }
  }
  if (lane < used) weights[lane] = mine / all;
}

// Four values of the router from `at` on.
__device__ __forceinline__ float4 four_of(const void* router, int kind, long long at) {
  if (kind == 0) return *reinterpret_cast<const float4*>(static_cast<const float*>(router) + at);
  return make_float4(tap_at(router, kind, at), tap_at(router, kind, at + 1),
                     tap_at(router, kind, at + 2), tap_at(router, kind, at + 3));
}

// grid: (experts / 8, tokens / 8), 256 threads: a warp has an expert's row, for eight tokens; the
// block of these tokens that ends last chooses, a warp for each. router: [experts][k], of `kind` as in
// state_rows.cuh; k is a multiple of 4. logits: [tokens][experts]; counts: [2][experts], of prompts'
// tokens and of the first `generated` ones; tickets: zeros between two launches.
extern "C" __global__ void __launch_bounds__(256)
route(const float* x, const void* router, float* logits, int* chosen, float* weights, u64* counts,
      unsigned* tickets, int kind, int experts, int used, int tokens, int generated, int k,
      int is_rounded) {
  __shared__ bool is_last;
  grid_launch();
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, expert = blockIdx.x * 8 + warp;
  const int first = blockIdx.y * 8, count = min(8, tokens - first), fours = k / 4;
  const long long row = static_cast<long long>(min(expert, experts - 1)) * k;
  float sum[8] = {};
  for (int start = 0; start < fours; start += 32 * AHEAD) {
    float4 w[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const int at = start + 32 * i + lane;
      w[i] = at < fours ? four_of(router, kind, row + 4 * at) : make_float4(0, 0, 0, 0);
    }
    if (start == 0) grid_wait();
#pragma unroll
    for (int t = 0; t < 8; ++t) {
      if (t >= count) break;
      const float4* own = reinterpret_cast<const float4*>(x + static_cast<long long>(first + t) * k);
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        const int at = start + 32 * i + lane;
        if (at >= fours) break;
        const float4 v = own[at];
        sum[t] = fmaf(rounded(v.x, is_rounded), w[i].x, sum[t]);
        sum[t] = fmaf(rounded(v.y, is_rounded), w[i].y, sum[t]);
        sum[t] = fmaf(rounded(v.z, is_rounded), w[i].z, sum[t]);
        sum[t] = fmaf(rounded(v.w, is_rounded), w[i].w, sum[t]);
      }
    }
  }
#pragma unroll
  for (int t = 0; t < 8; ++t) {
    const float all = warp_join(sum[t], Add());
    if (lane == t && t < count && expert < experts)
      logits[static_cast<long long>(first + t) * experts + expert] = all;
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0)
    is_last = atomicInc(tickets + blockIdx.y, gridDim.x - 1) == gridDim.x - 1;
  __syncthreads();
  if (!is_last || warp >= count) return;
  __threadfence();
  const long long token = first + warp;
  choose(logits + token * experts, chosen + token * used, weights + token * used,
         counts + (token < generated ? experts : 0), experts, used);
}

// grid: (tokens / 4), 128 threads: the choice alone, where logits are there.
extern "C" __global__ void __launch_bounds__(128)
choose_experts(const float* logits, int* chosen, float* weights, u64* counts, int experts, int used,
               int tokens, int generated) {
  grid_launch();
  grid_wait();
  const long long token = blockIdx.x * 4 + threadIdx.x / 32;
  if (token >= tokens) return;
  choose(logits + token * experts, chosen + token * used, weights + token * used,
         counts + (token < generated ? experts : 0), experts, used);
}

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
