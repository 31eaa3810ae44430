// From S residual streams of a few tokens to one input, in two launches: a block of stream_down has
// some rows of the small matrix and one stream, a block of stream_up some columns of all streams.
// Both add to the streams what the layer's half before computed; stream_up keeps the sum.
//
// All in float32; a sum's order knows its matrix alone, so that a row's bits depend on no company.
// -D FORMAT of the three matrices; ROWS of a block of stream_down.
#include "attention_copies.cuh"
#include "grid.cuh"
#include "row_sums.cuh"

namespace voltapile {

using Format = formats::FORMAT;
constexpr int STREAMS = 4;  // most
constexpr int TOKENS = 8;   // of a block
constexpr int PASS = 2;     // of which stream_down has so many in registers
constexpr int PART = 32;    // columns that an item of stream_up sums
constexpr bool IS_STAGED = Format::length > 1;  // rows come by way of shared memory
static_assert(ROWS < SUMS);  // and the squares

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// How much each stream gets of what was computed before; it is added as in stream_add.
struct Before {
  const float* inject;  // [tokens][S]
  int count;

  __device__ __forceinline__ float share(long long t, int stream) const {
    return 2.0f * sigmoid(inject[t * count + stream] / count);
  }
};

// Sixteen bytes to shared memory, there after wait_for_copies at the latest.
__device__ __forceinline__ void copy_whole(void* to, const void* from) {
#if VP_ARCH >= 800
  copy_async(to, from, 16);
#else
  *static_cast<uint4*>(to) = *static_cast<const uint4*>(from);
#endif
}

// A row's product with PART columns of each token's `lows`, to out[token * apart].
__device__ __forceinline__ void multiply_part(const std::uint8_t* row, const float* lows, int low,
                                              int piece, int tokens, float* out, int apart) {
  float sum[TOKENS] = {};
#pragma unroll (IS_STAGED ? PART / EIGHT : 1)
  for (int i = 0; i < PART / EIGHT; ++i) {
    const int at = PART * piece + EIGHT * i;
    if (at >= low) break;
    const auto raw = Eight<Format>::read(row, at);
    const float factor = Eight<Format>::factor(raw);
    float w[EIGHT];
    Eight<Format>::values(raw, w);
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
      if (t >= tokens) continue;
      const float4* in = reinterpret_cast<const float4*>(lows + t * low + at);
      const float4 a = in[0], b = in[1];
      float part = w[0] * a.x;
      part = fmaf(w[1], a.y, part), part = fmaf(w[2], a.z, part), part = fmaf(w[3], a.w, part);
      part = fmaf(w[4], b.x, part), part = fmaf(w[5], b.y, part), part = fmaf(w[6], b.z, part);
      sum[t] = fmaf(factor, fmaf(w[7], b.w, part), sum[t]);
    }
  }
#pragma unroll
  for (int t = 0; t < TOKENS; ++t)
    if (t < tokens) out[t * apart] = sum[t];
}

}  // namespace voltapile

using namespace voltapile;

// grid: (rows of both matrices / ROWS * S, tokens / TOKENS), width / 8 threads, eight columns each.
// parts: [tokens][S][low + injects]: a stream's part of each row's product; factors: [tokens][S],
// what its norm multiplies by.
extern "C" __global__ void __launch_bounds__(512)
stream_down(const float* x, const float* inject_before, const float* y_before, const float* norm,
            const std::uint8_t* down, const std::uint8_t* inject, float* parts, float* factors,
            int tokens, int width, int count, int low, int injects, float eps) {
  __shared__ float sums[PASS][16][SUMS];
  grid_launch();
  const int stream = blockIdx.x % count, first = blockIdx.x / count * ROWS, all = low + injects;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  const int column = EIGHT * threadIdx.x;
  const bool is_in = column < width;
  const int at = stream * width + (is_in ? column : 0);
  typename Eight<Format>::Raw raw[ROWS];
  const long long row_size = row_bytes<Format>(count * width);
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const int row = min(first + r, all - 1);
    const std::uint8_t* from = row < low ? down + row * row_size : inject + (row - low) * row_size;
    raw[r] = Eight<Format>::read(from, at);
  }
  float weight[EIGHT];
#pragma unroll
  for (int i = 0; i < EIGHT; ++i) weight[i] = is_in ? norm[at + i] : 0.0f;
  grid_wait();
  const Before before{inject_before, count};
  for (int begin = blockIdx.y * TOKENS; begin < min(tokens, static_cast<int>(blockIdx.y + 1) * TOKENS);
       begin += PASS) {
    const int here = min(PASS, tokens - begin);
    float own[PASS][EIGHT], squares[PASS];
#pragma unroll
    for (int t = 0; t < PASS; ++t) {
      squares[t] = 0.0f;
      if (t >= here) continue;
      const long long token = begin + t;
      float added[EIGHT];
      eight_of(x + token * count * width + at, own[t]);
      if (y_before != nullptr) {
        eight_of(y_before + token * width + (at - stream * width), added);
        const float share = before.share(token, stream);
#pragma unroll
        for (int i = 0; i < EIGHT; ++i) own[t][i] = fmaf(share, added[i], own[t][i]);
      }
#pragma unroll
      for (int i = 0; i < EIGHT; ++i) {
        squares[t] = is_in ? fmaf(own[t][i], own[t][i], squares[t]) : 0.0f;
        own[t][i] *= weight[i];
      }
    }
    __syncthreads();  // sums may still be read
    float mine[PASS][SUMS] = {};
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      float values[EIGHT];
      Eight<Format>::renew(raw[r]);
      Eight<Format>::values(raw[r], values);
      const float factor = Eight<Format>::factor(raw[r]);
#pragma unroll
      for (int t = 0; t < PASS; ++t) {
        if (t >= here) continue;
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < EIGHT; ++i) sum = fmaf(values[i], own[t][i], sum);
        mine[t][r] = factor * sum;
      }
    }
#pragma unroll
    for (int t = 0; t < PASS; ++t) {
      if (t >= here) continue;
      mine[t][ROWS] = squares[t];
      const float sum = sum_of_mine<SUMS / 2>(mine[t], lane);
      if (lane % 2 == 0) sums[t][warp][lane / 2] = sum;
    }
    __syncthreads();
    const int t = threadIdx.x / SUMS, r = threadIdx.x % SUMS;
    for (int i = t; i < here; i += blockDim.x / SUMS) {
      float square = 0.0f, sum = 0.0f;
#pragma unroll
      for (int w = 0; w < 16; ++w)
        if (w < warps) square += sums[i][w][ROWS], sum += sums[i][w][r];
      const float factor = 1.0f / sqrtf(square / width + eps);
      const long long place = static_cast<long long>(begin + i) * count + stream;
      if (r < ROWS && first + r < all) parts[place * all + first + r] = sum * factor;
      if (first == 0 && r == ROWS) factors[place] = factor;
    }
  }
}

// grid: (width / columns, tokens / TOKENS). out: [tokens][width], the mean of the normed streams
// times sigmoid(up silu(scale * low)); injected: [tokens][injects]. x changes in place.
// Shared: the block's rows of `up`, if they are staged; floats [TOKENS][low], [PART's][TOKENS][rows].
extern "C" __global__ void __launch_bounds__(512)
stream_up(float* x, const float* inject_before, const float* y_before, const float* norm,
          const std::uint8_t* up, const float* parts, const float* factors, float* out,
          float* injected, int tokens, int width, int count, int low, int injects, int columns,
          int staged_bytes, float scale) {
  extern __shared__ __align__(128) std::uint8_t shared[];
  grid_launch();
  const int first = blockIdx.x * columns, own = min(columns, width - first), rows = own * count;
  const int row_size = static_cast<int>(row_bytes<Format>(low)), all = low + injects;
  float* lows = reinterpret_cast<float*>(shared + staged_bytes);
  float* gates = lows + TOKENS * low;
  if constexpr (IS_STAGED) {
    const int bytes = own * row_size;  // of a stream
    const long long apart = static_cast<long long>(width) * row_size;
    const std::uint8_t* from = up + static_cast<long long>(first) * row_size;
    if ((bytes | row_size * first | row_size * width) % 16 == 0) {
#pragma unroll 4
      for (int i = 16 * threadIdx.x; i < count * bytes; i += 16 * blockDim.x)
        copy_whole(shared + i, from + i / bytes * apart + i % bytes);
    } else {
      for (int i = 2 * threadIdx.x; i < count * bytes; i += 2 * blockDim.x)
        *reinterpret_cast<unsigned short*>(shared + i) =
            *reinterpret_cast<const unsigned short*>(from + i / bytes * apart + i % bytes);
    }
    commit_copies();
  }
  grid_wait();
  const int begin = blockIdx.y * TOKENS, here = min(TOKENS, tokens - begin);
  // What this thread joins in the end, asked for early: one column of one token.
  const bool joins = static_cast<int>(threadIdx.x) < here * own;
  const int column = joins ? first + static_cast<int>(threadIdx.x) % own : first;
  const long long token = begin + (joins ? static_cast<int>(threadIdx.x) / own : 0);
  float value[STREAMS], weight[STREAMS], share[STREAMS], added = 0.0f;
  if (y_before != nullptr) added = y_before[token * width + column];
#pragma unroll
  for (int s = 0; s < STREAMS; ++s) {
    if (s >= count) continue;
    value[s] = x[(token * count + s) * width + column];
    weight[s] = factors[token * count + s];
    share[s] = y_before != nullptr ? inject_before[token * count + s] : 0.0f;
  }
  // Of row i of `down`, counted over all tokens, or of `inject` behind them.
  const auto product = [&](int t, int row) {
    float part[STREAMS], sum = 0.0f;
    const float* from = parts + static_cast<long long>(begin + t) * count * all + row;
#pragma unroll
    for (int s = 0; s < STREAMS; ++s) part[s] = s < count ? from[s * all] : 0.0f;
#pragma unroll
    for (int s = 0; s < STREAMS; ++s)
      if (s < count) sum += part[s];
    return sum;
  };
  for (int i = threadIdx.x; i < here * low; i += blockDim.x) {
    const float sum = scale * product(i / low, i % low);
    lows[i] = sum * sigmoid(sum);
  }
  if (blockIdx.x == 0)
    for (int i = threadIdx.x; i < here * injects; i += blockDim.x)
      injected[static_cast<long long>(begin) * injects + i] =
          product(i / injects, low + i % injects);
#pragma unroll
  for (int s = 0; s < STREAMS; ++s) {
    if (s >= count) continue;
    weight[s] *= norm[s * width + column];
    if (y_before == nullptr) continue;
    value[s] = fmaf(2.0f * sigmoid(share[s] / count), added, value[s]);
    if (joins) x[(token * count + s) * width + column] = value[s];
  }
  if constexpr (IS_STAGED) wait_for_copies<0>();
  __syncthreads();
  const int pieces = (low + PART - 1) / PART;
  for (int item = threadIdx.x; item < rows * pieces; item += blockDim.x) {
    const int row = item % rows, piece = item / rows;
    const std::uint8_t* from =
        IS_STAGED ? shared + row * row_size
                  : up + (static_cast<long long>(row / own) * width + first + row % own) * row_size;
    multiply_part(from, lows, low, piece, here, gates + piece * TOKENS * rows + row, rows);
  }
  __syncthreads();
  if (!joins) return;
  float mean = 0.0f;
#pragma unroll
  for (int s = 0; s < STREAMS; ++s) {
    if (s >= count) continue;
    const float* own_gates = gates + (threadIdx.x / own) * rows + s * own + threadIdx.x % own;
    float gate = 0.0f;
#pragma unroll 4
    for (int piece = 0; piece < pieces; ++piece) gate += own_gates[piece * TOKENS * rows];
    mean += value[s] * weight[s] * sigmoid(gate);
  }
  out[token * width + column] = mean / count;
}
