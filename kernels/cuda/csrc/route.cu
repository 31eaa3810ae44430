// From router logits to a token's experts and their weights, and the gates beside them.
#include "state_rows.cuh"

using namespace voltapile;
using u64 = unsigned long long;

constexpr int PER_BLOCK = 4;  // experts of a block of `route`
constexpr int SLOTS = 4;      // float4 of a router's row that a thread asks for at once
constexpr int THREADS = 256;
#ifndef KIND
#define KIND 0  // of a router's values, as in state_rows.cuh
#endif
#ifndef HELD
#define HELD 32  // logits of a lane: experts are no more than 32 times as many
#endif

__device__ __forceinline__ unsigned largest_of_warp(unsigned x) {
#if VP_ARCH >= 800 && !defined(VP_EMULATION)
  return __reduce_max_sync(ALL, x);
#else
  return warp_join(x, Max());
#endif
}

// Of numbers: their bits in their order, and back.
__device__ __forceinline__ unsigned ordered(float x) {
  const unsigned bits = __float_as_uint(x);
  return bits ^ (static_cast<unsigned>(static_cast<int>(bits) >> 31) | 0x80000000u);
}
__device__ __forceinline__ float from_ordered(unsigned bits) {
  const unsigned is_negative = static_cast<unsigned>(static_cast<int>(~bits) >> 31);
  return __uint_as_float(bits ^ (is_negative | 0x80000000u));
}

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

// A token's choice, by a warp; a lane has HELD logits. The largest, of equal ones the first expert.
// Weights are shares of the chosen ones, so that the others' sum cancels.
__device__ __forceinline__ void choose(const float* logits, int* chosen, float* weights,
                                       u64* counts, int experts, int used) {
  const int lane = threadIdx.x & 31, left = experts - lane;
  float values[HELD], best = -3.4e38f;
#pragma unroll
  for (int i = 0; i < HELD; ++i) values[i] = __ldcg(logits + min(32 * i + lane, experts - 1));
#pragma unroll
  for (int i = 0; i < HELD; ++i) best = fmaxf(best, values[i]);
  best = from_ordered(largest_of_warp(ordered(best)));
  // They are not negative, so their bits are in their order, and one is added: what is taken has
  // nothing. What is no number comes last.
  unsigned bits[HELD];
#pragma unroll
  for (int i = 0; i < HELD; ++i) {
    const float value = expf(values[i] - best);
    bits[i] = 32 * i < left ? 1u + (value >= 0.0f ? __float_as_uint(value) : 0u) : 0u;
  }
  float mine = 0.0f, all = 0.0f;
#pragma unroll 1
  for (int rank = 0; rank < used; ++rank) {
    unsigned own = 0, at = 0xffffffffu;
#pragma unroll
    for (int i = HELD - 1; i >= 0; --i)
      if (bits[i] >= own) own = bits[i], at = 32 * i + lane;
    const unsigned most = largest_of_warp(own);
    // The first expert of the lanes that have it, which are seldom several.
    const unsigned lanes = __ballot_sync(ALL, own == most);
    at = __popc(lanes) > 1 ? ~largest_of_warp(own == most ? ~at : 0u)
                           : __shfl_sync(ALL, at, __ffs(static_cast<int>(lanes)) - 1);
#pragma unroll
    for (int i = 0; i < HELD; ++i) bits[i] = 32 * i + lane == at ? 0u : bits[i];
    const float value = __uint_as_float(most - 1u);
    all += value;
    if (lane == rank) mine = value;
    if (lane == 0) {
      chosen[rank] = static_cast<int>(at);
      atomicAdd(counts + at, static_cast<u64>(1));
    }
  }
  if (lane < used) weights[lane] = mine / all;
}

// Four values of the router from `at` on, which is a multiple of 4.
__device__ __forceinline__ float4 four_of(const void* router, long long at) {
  if (KIND == 0) return *reinterpret_cast<const float4*>(static_cast<const float*>(router) + at);
  const uint2 pairs =
      *reinterpret_cast<const uint2*>(static_cast<const unsigned short*>(router) + at);
  if (KIND == 1) {
    const float2 low = half_values(pairs.x), high = half_values(pairs.y);
    return {low.x, low.y, high.x, high.y};
  }
  return {__uint_as_float(pairs.x << 16), __uint_as_float(pairs.x & 0xffff0000u),
          __uint_as_float(pairs.y << 16), __uint_as_float(pairs.y & 0xffff0000u)};
}

// The warp's sums of four values, with the bits of warp_join: lanes 8 e to 8 e + 7 get value e's.
__device__ __forceinline__ float join_four(const float (&sum)[PER_BLOCK], int lane) {
  static_assert(PER_BLOCK == 4);
  const bool is_upper = lane & 16, is_odd = lane & 8;
  const float a = (is_upper ? sum[2] : sum[0]) +
                  __shfl_xor_sync(ALL, is_upper ? sum[0] : sum[2], 16);
  const float b = (is_upper ? sum[3] : sum[1]) +
                  __shfl_xor_sync(ALL, is_upper ? sum[1] : sum[3], 16);
  float all = (is_odd ? b : a) + __shfl_xor_sync(ALL, is_odd ? a : b, 8);
#pragma unroll
  for (int step = 4; step > 0; step >>= 1) all += __shfl_xor_sync(ALL, all, step);
  return all;
}

// grid: (experts / PER_BLOCK, tokens / 8), 256 threads, which share each row's columns; the block
// of these tokens that ends last chooses, a warp for each. router: [experts][k], of -D KIND; k is a
// multiple of 4. logits: [tokens][experts]; counts: [2][experts], of prompts' tokens and of the
// first `generated` ones; tickets: zeros between two launches.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
route(const float* x, const void* router, float* logits, int* chosen, float* weights, u64* counts,
      unsigned* tickets, int experts, int used, int tokens, int generated, int k,
      int is_rounded) {
  __shared__ float parts[8][PER_BLOCK][THREADS / 32];
  __shared__ bool is_last;
  grid_launch();
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, expert = blockIdx.x * PER_BLOCK;
  const int first = blockIdx.y * 8, count = min(8, tokens - first), fours = k >> 2;
#pragma unroll 1
  for (int start = 0; start < fours; start += THREADS * SLOTS) {
    float4 w[PER_BLOCK][SLOTS], v[SLOTS];
#pragma unroll
    for (int e = 0; e < PER_BLOCK; ++e)
#pragma unroll
      for (int i = 0; i < SLOTS; ++i) {
        const int at = start + THREADS * i + threadIdx.x;
        const long long row = static_cast<long long>(min(expert + e, experts - 1)) * k;
        w[e][i] = at < fours ? four_of(router, row + 4 * at) : make_float4(0, 0, 0, 0);
      }
    if (start == 0) grid_wait();
    const auto load = [&](int token) {
      const float4* own = reinterpret_cast<const float4*>(x + static_cast<long long>(token) * k);
#pragma unroll
      for (int i = 0; i < SLOTS; ++i) {
        const int at = start + THREADS * i + threadIdx.x;
        v[i] = at < fours ? own[at] : make_float4(0, 0, 0, 0);
      }
    };
    load(first);
#pragma unroll 1
    for (int t = 0; t < count; ++t) {
      float sum[PER_BLOCK] = {};
#pragma unroll
      for (int i = 0; i < SLOTS; ++i) {
        v[i] = {rounded(v[i].x, is_rounded), rounded(v[i].y, is_rounded),
                rounded(v[i].z, is_rounded), rounded(v[i].w, is_rounded)};
#pragma unroll
        for (int e = 0; e < PER_BLOCK; ++e) {
          sum[e] = fmaf(v[i].x, w[e][i].x, sum[e]);
          sum[e] = fmaf(v[i].y, w[e][i].y, sum[e]);
          sum[e] = fmaf(v[i].z, w[e][i].z, sum[e]);
          sum[e] = fmaf(v[i].w, w[e][i].w, sum[e]);
        }
      }
      if (t + 1 < count) load(first + t + 1);
      const float all = join_four(sum, lane);
      if ((lane & 7) == 0) {
        float& part = parts[t][lane >> 3][warp];
        part = start == 0 ? all : part + all;
      }
    }
  }
  __syncthreads();
  if (threadIdx.x < count * PER_BLOCK) {
    const int t = threadIdx.x / PER_BLOCK, e = threadIdx.x % PER_BLOCK;
    float all = 0.0f;
#pragma unroll
    for (int w = 0; w < THREADS / 32; ++w) all += parts[t][e][w];
    if (expert + e < experts)
      logits[static_cast<long long>(first + t) * experts + expert + e] = all;
  }
  if (warp == 0) {  // that has written them all
    __threadfence();
    __syncwarp();
    if (lane == 0) is_last = atomicInc(tickets + blockIdx.y, gridDim.x - 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (!is_last || warp >= count) return;
  __threadfence();
  const long long token = first + warp;
  choose(logits + token * experts, chosen + token * used, weights + token * used,
         counts + (token < generated ? experts : 0), experts, used);
}

// grid: (experts / 128, tokens / 16), 128 threads: logits of prompts' rows. A warp has four tokens,
// a lane experts lane, lane + 32, ... of 128; columns come by 32. k is a multiple of 4.
extern "C" __global__ void __launch_bounds__(128)
route_many(const float* x, const void* router, float* logits, int experts, int tokens, int k,
           int is_rounded) {
  constexpr int COLUMNS = 32, STRIDE = COLUMNS + 4, ROWS = 128, ROUND = 16;
  __shared__ __align__(16) float rows[ROWS * STRIDE], own[16 * STRIDE];
  grid_launch();
  grid_wait();
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int first = blockIdx.x * ROWS, token = blockIdx.y * 16;
  // What this thread loads of each 16 rows: four columns of one.
  const int row = threadIdx.x >> 3, column = 4 * (threadIdx.x & 7);
  const float4* from = reinterpret_cast<const float4*>(
      x + static_cast<long long>(min(token + row, tokens - 1)) * k + column);
  const auto weight = [&](int i, int start) {
    const long long at = static_cast<long long>(min(first + ROUND * i + row, experts - 1)) * k;
    return start + column < k ? four_of(router, at + start + column)
                              : make_float4(0, 0, 0, 0);
  };
  const auto value = [&](int start) {
    return start + column < k ? from[start / 4] : make_float4(0, 0, 0, 0);
  };
  float4 w[ROWS / ROUND], v = value(0);
#pragma unroll
  for (int i = 0; i < ROWS / ROUND; ++i) w[i] = weight(i, 0);
  float sum[4][4] = {};
  for (int start = 0; start < k; start += COLUMNS) {
    __syncthreads();  // what was read may be overwritten
#pragma unroll
    for (int i = 0; i < ROWS / ROUND; ++i)
      *reinterpret_cast<float4*>(rows + (ROUND * i + row) * STRIDE + column) = w[i];
    *reinterpret_cast<float4*>(own + row * STRIDE + column) =
        make_float4(rounded(v.x, is_rounded), rounded(v.y, is_rounded), rounded(v.z, is_rounded),
                    rounded(v.w, is_rounded));
    __syncthreads();
    v = value(start + COLUMNS);
#pragma unroll
    for (int i = 0; i < ROWS / ROUND; ++i) w[i] = weight(i, start + COLUMNS);
#pragma unroll
    for (int c = 0; c < COLUMNS; c += 4) {
      float4 a[4];
#pragma unroll
      for (int t = 0; t < 4; ++t)
        a[t] = *reinterpret_cast<const float4*>(own + (4 * warp + t) * STRIDE + c);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float4 b = *reinterpret_cast<const float4*>(rows + (32 * e + lane) * STRIDE + c);
#pragma unroll
        for (int t = 0; t < 4; ++t) {
          sum[t][e] = fmaf(a[t].x, b.x, sum[t][e]);
          sum[t][e] = fmaf(a[t].y, b.y, sum[t][e]);
          sum[t][e] = fmaf(a[t].z, b.z, sum[t][e]);
          sum[t][e] = fmaf(a[t].w, b.w, sum[t][e]);
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int t = token + 4 * warp + i / 4, expert = first + 32 * (i % 4) + lane;
    if (t < tokens && expert < experts)
      logits[static_cast<long long>(t) * experts + expert] = sum[i / 4][i % 4];
  }
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

// grid: (tokens, width / 256). x: [tokens][heads][2][dim], a token's are `width`; first, second:
// [tokens][heads][dim]
extern "C" __global__ void split_heads(const float* x, float* first, float* second, int width,
                                       int dim) {
  grid_launch();
  grid_wait();
  const unsigned i = blockIdx.y * blockDim.x + threadIdx.x, half = width / 2;
  if (i >= width) return;
  const unsigned part = i / dim, at = part / 2 * dim + (i - part * dim);
  const long long token = blockIdx.x;
  (part & 1 ? second : first)[token * half + at] = x[token * width + i];
}
