// From router logits to a token's experts and their weights, and the gates beside them.
#include "choice.cuh"
#include "route_row.cuh"

using namespace voltapile;

// grid: (n / 256)
extern "C" __global__ void round_to_bf16(const float* x, float* out, long long n) {
  grid_launch();
  grid_wait();
  const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) out[i] = rounded(x[i]);
}

// grid: (experts / EACH, a block for each of up to 8 tokens whose normed row is wanted, and one
// that chooses; tokens / 8), 256 threads, which share columns. What the last block of these tokens
// waits for is a key itself, so there is neither a fence nor a ticket; blocks start in order, so
// the others have started. router: [experts][k], of -D KIND; k is a multiple of 4. inbox:
// [tokens][experts], zeros between two launches; counts: [2][experts], of prompts' tokens and of
// the first `generated` ones. gain: null, or x is to be normed: to `normed` too, if that is not
// null; k is whole runs then, and no more than 1024 SLOTS. Shared: a Choice for each token of a
// block.
extern "C" __global__ void __launch_bounds__(THREADS, BESIDE)
route(const float* x, const void* router, unsigned* inbox, int* chosen, float* weights, u64* counts,
      const float* gain, float* normed, int experts, int used, int tokens, int generated, int k,
      int is_rounded, float share, float eps) {
  extern __shared__ __align__(128) std::uint8_t shared[];
  grid_launch();
  const int first = IS_ONE ? 0 : blockIdx.y * 8, count = IS_ONE ? 1 : min(8, tokens - first);
  const int own = blockIdx.x - (experts + EACH - 1) / EACH;  // behind those that multiply
  if (own < 0) {
    put_logits(x, router, inbox, Norm{gain, share, eps}, first, count, experts, k, is_rounded);
    return;
  }
  if (blockIdx.x + 1 < gridDim.x) {
    const long long row = static_cast<long long>(first + min(own, count - 1)) * k;
    put_normed(x + row, Norm{gain, share, eps}, normed + row, k);
    return;
  }
  const unsigned lane = threadIdx.x & 31, place = threadIdx.x >> 5;
  const long long token = first + place;
  grid_wait();
  if (place >= count) return;
  Keys keys;
  collect(inbox + token * experts, keys, experts, lane);
  choose(keys, reinterpret_cast<Choice*>(shared)[place], chosen + token * used,
         weights + token * used, counts + (token < generated ? experts : 0), used, lane);
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
          is_rounded ? rounded(v[i]) : v[i];
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
  const unsigned lane = threadIdx.x & 31, place = threadIdx.x >> 5;
  const long long token = blockIdx.x * 4 + place;
  if (token >= tokens) return;
  Keys keys;
#pragma unroll
  for (unsigned i = 0; i < HELD; ++i) {
    const int e = 32 * i + lane;
    keys[i] = e < experts ? key_of(logits[token * experts + e]) : 0;
  }
  choose(keys, reinterpret_cast<Choice*>(shared)[place], chosen + token * used,
         weights + token * used, counts + (token < generated ? experts : 0), used, lane);
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
