// From router logits to a token's experts and their weights, and the gates beside them.
#include "choice.cuh"
#include "state_rows.cuh"

using namespace voltapile;

#ifndef SLOTS
#define SLOTS 4  // float4 of a router's row that a thread asks for at once
#endif
constexpr int PER_BLOCK = 4;  // experts of a block of `route`
constexpr int THREADS = 256;
#ifndef KIND
#define KIND 0  // of a router's values, as in state_rows.cuh
#endif

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

// Products of a thread's columns of a token with those of each expert.
__device__ __forceinline__ void multiply(float4 (&v)[SLOTS], const float4 (&w)[PER_BLOCK][SLOTS],
                                         float (&sum)[PER_BLOCK], int is_rounded) {
#pragma unroll
  for (int i = 0; i < SLOTS; ++i) {
    v[i] = {rounded(v[i].x, is_rounded), rounded(v[i].y, is_rounded), rounded(v[i].z, is_rounded),
            rounded(v[i].w, is_rounded)};
#pragma unroll
    for (int e = 0; e < PER_BLOCK; ++e) {
      sum[e] = fmaf(v[i].x, w[e][i].x, sum[e]);
      sum[e] = fmaf(v[i].y, w[e][i].y, sum[e]);
      sum[e] = fmaf(v[i].z, w[e][i].z, sum[e]);
      sum[e] = fmaf(v[i].w, w[e][i].w, sum[e]);
    }
  }
}

// The logits of a block's experts, for up to eight tokens from `first` on.
__device__ __forceinline__ void put_logits(const float* x, const void* router, unsigned* inbox,
                                           int first, int count, int experts, int k,
                                           int is_rounded) {
  __shared__ float parts[8][PER_BLOCK][THREADS / 32];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, expert = blockIdx.x * PER_BLOCK;
  const int fours = k >> 2;
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
      multiply(v, w, sum, is_rounded);
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
      leave(inbox + static_cast<long long>(first + t) * experts + expert + e, key_of(all));
  }
}

// grid: (experts / PER_BLOCK + 1, tokens / 8), 256 threads, which share columns; the last block
// of these tokens chooses. What it waits for is a key itself, so there is neither a fence nor
// a ticket; blocks start in order, so the others have started. router: [experts][k], of -D KIND;
// k is a multiple of 4. inbox: [tokens][experts], zeros between two launches; counts: [2][experts],
// of prompts' tokens and of the first `generated` ones. Shared: Choice of each token of a block,
// which are 1, 2, 4 or 8.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
route(const float* x, const void* router, unsigned* inbox, int* chosen, float* weights, u64* counts,
      int experts, int used, int tokens, int generated, int k, int is_rounded) {
  extern __shared__ __align__(128) std::uint8_t shared[];
  grid_launch();
  const int first = blockIdx.y * 8, count = min(8, tokens - first);
  if (blockIdx.x + 1 < gridDim.x) {
    put_logits(x, router, inbox, first, count, experts, k, is_rounded);
    return;
  }
  const unsigned bits = count == 1 ? 8 : count == 2 ? 7 : count <= 4 ? 6 : 5;
  const Crew crew{threadIdx.x & ((1u << bits) - 1), bits};
  const int place = threadIdx.x >> bits;
  const long long token = first + place;
  const bool is_there = place < count;
  Choice& own = reinterpret_cast<Choice*>(shared)[place];
  grid_wait();
  if (is_there) collect(inbox + token * experts, own.keys, experts, crew);
  choose(own, chosen + token * used, weights + token * used,
         counts + (token < generated ? experts : 0), is_there ? used : 0, crew);
}

// grid: (experts / 128, tokens / 32), 128 threads: logits of prompts. A warp has eight tokens, a
// lane experts lane, lane + 32, ... of 128; columns come by 32, to one of two places. k is a
// multiple of 4.
extern "C" __global__ void __launch_bounds__(128, 2)
route_many(const float* x, const void* router, float* logits, int experts, int tokens, int k,
           int is_rounded) {
  constexpr int COLUMNS = 32, STRIDE = COLUMNS + 4, ROWS = 128, OWN = 8, ROUND = 16;
  __shared__ __align__(16) float held[2][(ROWS + 4 * OWN) * STRIDE];
  grid_launch();
  grid_wait();
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int first = blockIdx.x * ROWS, token = blockIdx.y * 4 * OWN;
  // What this thread loads of each 16 rows: four columns of one.
  const int row = threadIdx.x >> 3, column = 4 * (threadIdx.x & 7);
  float4 w[ROWS / ROUND], v[4 * OWN / ROUND];
  const auto load = [&](int start) {
    const int at = start + column;
#pragma unroll
    for (int i = 0; i < ROWS / ROUND; ++i) {
      const long long from = static_cast<long long>(min(first + ROUND * i + row, experts - 1)) * k;
      w[i] = at < k ? four_of(router, from + at) : make_float4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < 4 * OWN / ROUND; ++i) {
      const long long from = static_cast<long long>(min(token + ROUND * i + row, tokens - 1)) * k;
      v[i] = at < k ? *reinterpret_cast<const float4*>(x + from + at) : make_float4(0, 0, 0, 0);
    }
  };
  load(0);
  float sum[OWN][4] = {};
#pragma unroll 1
  for (int start = 0, place = 0; start < k; start += COLUMNS, place ^= 1) {
    float *rows = held[place], *own = rows + ROWS * STRIDE;
#pragma unroll
    for (int i = 0; i < ROWS / ROUND; ++i)
      *reinterpret_cast<float4*>(rows + (ROUND * i + row) * STRIDE + column) = w[i];
#pragma unroll
    for (int i = 0; i < 4 * OWN / ROUND; ++i)
      *reinterpret_cast<float4*>(own + (ROUND * i + row) * STRIDE + column) =
          make_float4(rounded(v[i].x, is_rounded), rounded(v[i].y, is_rounded),
                      rounded(v[i].z, is_rounded), rounded(v[i].w, is_rounded));
    __syncthreads();  // all have read the other place, too
    if (start + COLUMNS < k) load(start + COLUMNS);
#pragma unroll
    for (int c = 0; c < COLUMNS; c += 4) {
      float4 b[4];
#pragma unroll
      for (int e = 0; e < 4; ++e)
        b[e] = *reinterpret_cast<const float4*>(rows + (32 * e + lane) * STRIDE + c);
#pragma unroll
      for (int t = 0; t < OWN; ++t) {
        const float4 a = *reinterpret_cast<const float4*>(own + (OWN * warp + t) * STRIDE + c);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          sum[t][e] = fmaf(a.x, b[e].x, sum[t][e]);
          sum[t][e] = fmaf(a.y, b[e].y, sum[t][e]);
          sum[t][e] = fmaf(a.z, b[e].z, sum[t][e]);
          sum[t][e] = fmaf(a.w, b[e].w, sum[t][e]);
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 4 * OWN; ++i) {
    const int t = token + OWN * warp + i / 4, expert = first + 32 * (i % 4) + lane;
    if (t < tokens && expert < experts)
      logits[static_cast<long long>(t) * experts + expert] = sum[i / 4][i % 4];
  }
}

// grid: (tokens / 4), 128 threads: the choice alone, where logits are there. Shared: 4 Choices.
extern "C" __global__ void __launch_bounds__(128)
choose_experts(const float* logits, int* chosen, float* weights, u64* counts, int experts, int used,
               int tokens, int generated) {
  extern __shared__ __align__(128) std::uint8_t shared[];
  grid_launch();
  grid_wait();
  const unsigned lane = threadIdx.x & 31;
  const long long token = blockIdx.x * 4 + threadIdx.x / 32;
  const bool is_there = token < tokens;
  Choice& own = reinterpret_cast<Choice*>(shared)[threadIdx.x / 32];
  const float* from = logits + (is_there ? token : 0) * experts;
#pragma unroll
  for (unsigned i = 0; i < HELD; ++i) {
    const int e = 32 * i + lane;
    own.keys[e] = e < experts ? key_of(from[e]) : 0;
  }
  choose(own, chosen + token * used, weights + token * used,
         counts + (token < generated ? experts : 0), is_there ? used : 0, Crew{lane, 5});
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
