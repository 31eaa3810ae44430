// From S residual streams of a few tokens to one input, in two launches: a block of stream_down has
// some rows of the small matrix and one stream, a block of stream_up some columns of all streams.
// Both add to the streams what the layer's half before computed; stream_up keeps the sum.
//
// All in float32; a sum's order knows its matrix alone, so that a row's bits depend on no company.
// Code is kept short where it runs once: a layer's kernels push each other's out of caches.
// -D FORMAT of the three matrices; ROWS of a block of stream_down; TOKENS of a block.
#include "attention_copies.cuh"
#include "bell.cuh"
#include "grid.cuh"
#include "row_sums.cuh"
#include "stream_share.cuh"
#include "tiles.cuh"

namespace voltapile {

using Format = formats::FORMAT;
constexpr int STREAMS = 4;
constexpr int PASS = TOKENS > 1 ? 2 : 1;  // of tokens, that stream_down has in registers at once
constexpr int SEVERAL = 4;  // warps' sums that are read at once
constexpr int PART = 32;    // columns that an item of stream_up sums
constexpr bool IS_STAGED = Format::length > 1;  // rows come by way of shared memory
static_assert(!IS_STAGED || Format::length % PART == 0);
constexpr int KEPT = TOKENS == 1 && IS_STAGED ? 2 : 0;  // items of a thread, in registers
static_assert(ROWS < SUMS);  // and the squares

// Number i of some that each token has `each` of.
struct Place {
  int t, i;
  __device__ __forceinline__ Place(int i, int each)
      : t(TOKENS > 1 ? i / each : 0), i(TOKENS > 1 ? i % each : i) {}
};

// Sixteen bytes to shared memory, there after wait_for_copies at the latest.
__device__ __forceinline__ void copy_whole(void* to, const void* from) {
#if VP_ARCH >= 800
  copy_async(to, from, 16);
#else
  *static_cast<uint4*>(to) = *static_cast<const uint4*>(from);
#endif
}

// `value`, for whose use others must have come: else the compiler waits for it before it asks for
// them. none: 0, which it does not know.
__device__ __forceinline__ float behind(float value, float one, float two, unsigned none) {
  return __uint_as_float(__float_as_uint(value) |
                         ((__float_as_uint(one) ^ __float_as_uint(two)) & none));
}

// Of a row PART columns from `at` on, and where their sum goes.
struct Item {
  typename Eight<Format>::Raw raw[PART / EIGHT];
  int at, to;

  // is_odd: see Eight
  __device__ __forceinline__ void read(const std::uint8_t* block, bool is_odd, int low) {
#pragma unroll
    for (int i = 0; i < PART / EIGHT; ++i)
      if (IS_STAGED || at + EIGHT * i < low)
        raw[i] = Eight<Format>::found(Eight<Format>::ask(block, EIGHT * i, is_odd), is_odd);
  }
};

// An item's product with each token's `lows`, to out[token * apart].
__device__ __forceinline__ void multiply_item(const Item& item, const float* lows, int low,
                                              int tokens, float* out, int apart) {
  float sum[TOKENS] = {};
#pragma unroll
  for (int i = 0; i < PART / EIGHT; ++i) {
    const int at = item.at + EIGHT * i;
    if (!IS_STAGED && at >= low) break;
    auto raw = item.raw[i];
    Eight<Format>::renew(raw);  // it is kept, and not what it unpacks to
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

// 256 columns of a row.
constexpr int CHUNK_BYTES = 256 / Format::length * Format::bytes;

// Sixteen bytes of a tiled matrix after the other, of rows from `first` on.
__device__ __forceinline__ void stage_tiled(std::uint8_t* to, const std::uint8_t* up, int row_size,
                                            int first, int bytes) {
#pragma unroll 1
  for (int i = 16 * threadIdx.x; i < bytes; i += 16 * blockDim.x) {
    const int own = i / row_size, at = i - own * row_size, chunk = at / CHUNK_BYTES;
    const Lay lay = lay_of(true, CHUNK_BYTES, row_size);
    copy_whole(to + i, row_at(up, lay, first + own, row_size) + chunk * lay.chunk + at -
                           chunk * CHUNK_BYTES);
  }
}

// A block's rows of `up`, those of a stream together, on their way to shared memory. From sm_90 on
// that is a copy for each stream, where those are whole sixteens: then the bell tells.
__device__ __forceinline__ bool stage_rows(std::uint8_t* to, const std::uint8_t* up, int row_size,
                                           int first, int own, int width, bool is_tiled,
                                           Bell* bell) {
  const int bytes = own * row_size;  // of a stream
  const bool is_whole = (bytes | row_size * first | row_size * width) % 16 == 0;
  const std::uint8_t* from = up + static_cast<long long>(first) * row_size;
#if VP_ARCH >= 900
  if (is_whole && !is_tiled) {
    if (threadIdx.x == 0) {
      make_bell(bell);
      tell_bells();
      expect(bell, STREAMS * bytes);
#pragma unroll
      for (int s = 0; s < STREAMS; ++s)
        copy_whole(to + s * bytes, from + static_cast<long long>(s * width) * row_size, bytes,
                   bell);
    }
    return true;
  }
#endif
#pragma unroll 1
  for (int s = 0; s < STREAMS; ++s) {
    if (HAS_TILES<Format> && is_tiled)
      stage_tiled(to, up, row_size, s * width + first, bytes);
    else if (is_whole)
#pragma unroll 1
      for (int i = 16 * threadIdx.x; i < bytes; i += 16 * blockDim.x) copy_whole(to + i, from + i);
    else
#pragma unroll 1
      for (int i = 2 * threadIdx.x; i < bytes; i += 2 * blockDim.x)
        *reinterpret_cast<unsigned short*>(to + i) =
            *reinterpret_cast<const unsigned short*>(from + i);
    to += bytes, from += static_cast<long long>(width) * row_size;
  }
  commit_copies();
  return false;
}

// The same rows are there; the block meets.
__device__ __forceinline__ void await_rows(bool has_bell, Bell* bell) {
  wait_for_copies<0>();
  __syncthreads();
#if VP_ARCH >= 900
  if (has_bell) await_own(bell, true);
#endif
}

// Of row `row` of both matrices that stream_down had, for a token.
__device__ __forceinline__ float sum_of_streams(const float* parts, int token, int all, int row) {
  const float* from = parts + token * STREAMS * all + row;
  float part[STREAMS], sum = 0.0f;
#pragma unroll
  for (int s = 0; s < STREAMS; ++s) part[s] = from[s * all];
#pragma unroll
  for (int s = 0; s < STREAMS; ++s) sum += part[s];
  return sum;
}

}  // namespace voltapile

using namespace voltapile;

// grid: ((low / ROWS + injects / ROWS) * S, tokens / TOKENS), width / 8 threads of eight columns.
// parts: [tokens][S][low + injects]: a stream's part of each row's product; factors: [tokens][S],
// what its norm multiplies by; inverse: 1 / width. Little is computed before weights are asked for,
// since blocks often find room when the product before ends.
// The bounds leave registers to the kernels beside it.
extern "C" __global__ void __launch_bounds__(TOKENS == 1 ? 640 : 512, 1)
stream_down(const float* x, const float* inject_before, const float* y_before, const float* norm,
            const std::uint8_t* down, const std::uint8_t* inject, float* parts, float* factors,
            int tokens, int width, int low, int injects, float eps, float inverse, int is_tiled) {
  __shared__ float sums[PASS][16][SUMS];
  grid_launch();
  const int stream = blockIdx.x % STREAMS, own_rows = blockIdx.x / STREAMS * ROWS;
  const int of_down = (low + ROWS - 1) / ROWS * ROWS, all = low + injects;
  const bool is_down = own_rows < of_down;
  const int first = is_down ? own_rows : own_rows - of_down, count = is_down ? low : injects;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  const int column = EIGHT * threadIdx.x;
  const bool is_in = column < width;
  const int at = stream * width + (is_in ? column : 0);
  const int row_size = static_cast<int>(row_bytes<Format>(STREAMS * width));
  const Lay lay = lay_of(HAS_TILES<Format> && is_tiled && is_down, CHUNK_BYTES, row_size);
  const std::uint8_t* from = (is_down ? down : inject) + at / 256 * lay.chunk +
                             at % 256 / Format::length * Format::bytes;
  const bool is_odd = at / Format::length & 1;  // a row is whole words
  typename Eight<Format>::Asked asked[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {  // row_at, in few instructions
    const int row = min(first + r, count - 1);
    const int there = row * lay.row + (row & ~15) * (row_size - lay.row);
    asked[r] = Eight<Format>::ask(from + there, at % Format::length, is_odd);
  }
  float weight[EIGHT];
  eight_of(norm + at, weight);
#pragma unroll
  for (int i = 0; i < EIGHT; ++i) weight[i] = is_in ? weight[i] : 0.0f;
  const int first_token = blockIdx.y * TOKENS;
  const int end = TOKENS == 1 ? first_token + 1 : min(tokens, first_token + TOKENS);
  const bool adds = y_before != nullptr;
  grid_wait();
#pragma unroll 1
  for (int begin = first_token; begin < end; begin += PASS) {
    const int here = PASS == 1 ? 1 : min(PASS, end - begin);
    float own[PASS][EIGHT], squares[PASS];
#pragma unroll
    for (int t = 0; t < PASS; ++t) {
      squares[t] = 0.0f;
      if (t >= here) continue;
      const int token = begin + t;
      // Where nothing is to be added, nothing of the same is: without a branch all comes at once.
      const float* from_x = x + static_cast<long long>(token) * STREAMS * width + at;
      const float* more = adds ? y_before + token * width + (at - stream * width) : from_x;
      float added[EIGHT];
      eight_of(from_x, own[t]);
      eight_of(more, added);
      const float injected = *(adds ? inject_before + token * STREAMS + stream : from_x);
      const float late = behind(injected, own[t][7], added[7], is_tiled >> 1);
      const float share = share_of(late, STREAMS) * (adds ? 1.0f : 0.0f);
#pragma unroll
      for (int i = 0; i < EIGHT; ++i) own[t][i] = fmaf(share, added[i], own[t][i]);
#pragma unroll
      for (int i = 0; i < EIGHT; ++i) {
        squares[t] = is_in ? fmaf(own[t][i], own[t][i], squares[t]) : 0.0f;
        own[t][i] *= weight[i];
      }
    }
    if (begin > first_token) __syncthreads();  // sums may still be read
    float mine[PASS][SUMS] = {};
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      float values[EIGHT];
      auto raw = Eight<Format>::found(asked[r], is_odd);
      Eight<Format>::renew(raw);  // it is kept, and not what it unpacks to
      Eight<Format>::values(raw, values);
      const float factor = Eight<Format>::factor(raw);
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
#pragma unroll 1
      for (int w = 0; w < warps; w += SEVERAL)
#pragma unroll
        for (int n = 0; n < SEVERAL; ++n)
          if (w + n < warps) square += sums[i][w + n][ROWS], sum += sums[i][w + n][r];
      const float factor = inverse_root(fmaf(square, inverse, eps));
      const int place = (begin + i) * STREAMS + stream;
      if (r < ROWS && first + r < count)
        parts[static_cast<long long>(place) * all + (is_down ? 0 : low) + first + r] = sum * factor;
      if (own_rows == 0 && r == ROWS) factors[place] = factor;
    }
  }
}

// grid: (width / columns, tokens / TOKENS). out: [tokens][width], the mean of the normed streams
// times sigmoid(up silu(scale * low)); injected: [tokens][injects]. x changes in place.
// Shared: the block's rows of `up`, if they are staged; floats [TOKENS][low],
// [PART's][TOKENS][rows].
extern "C" __global__ void __launch_bounds__(TOKENS == 1 ? 768 : 512, 1)
stream_up(float* x, const float* inject_before, const float* y_before, const float* norm,
          const std::uint8_t* up, const float* parts, const float* factors, float* out,
          float* injected, int tokens, int width, int low, int injects, int columns,
          int staged_bytes, float scale, int is_tiled) {
  extern __shared__ __align__(128) std::uint8_t shared[];
  grid_launch();
  const int first = blockIdx.x * columns, own = min(columns, width - first), rows = own * STREAMS;
  const int row_size = static_cast<int>(row_bytes<Format>(low)), all = low + injects;
  const int begin = blockIdx.y * TOKENS, here = TOKENS == 1 ? 1 : min(TOKENS, tokens - begin);
  float* lows = reinterpret_cast<float*>(shared + staged_bytes);
  float* gates = lows + TOKENS * low;
  __shared__ Bell bell;
  bool has_bell = false;
  if constexpr (IS_STAGED)
    has_bell = stage_rows(shared, up, row_size, first, own, width, is_tiled, &bell);
  // What this thread joins in the end, asked for early: one column of one token. The last threads
  // have less else to do.
  const int joiner = blockDim.x - 1 - threadIdx.x;
  const bool joins = joiner < here * own;
  const Place mine(joins ? joiner : 0, own);
  const int column = first + mine.i, token = begin + mine.t, pieces = (low + PART - 1) / PART;
  float weight[STREAMS] = {};
  if (joins)
#pragma unroll
    for (int s = 0; s < STREAMS; ++s) weight[s] = norm[s * width + column];
  const int items = rows * pieces;
  const auto find = [&](int i) {
    const int row = i % rows, piece = i / rows;
    const long long there = static_cast<long long>(row / own) * width + first + row % own;
    Item item;
    item.at = PART * piece, item.to = piece * TOKENS * rows + row;
    const int before = item.at / Format::length * Format::bytes, staged = row * row_size + before;
    item.read(IS_STAGED ? shared + staged : up + there * row_size + before, staged & 2, low);
    return item;
  };
  Item kept[KEPT > 0 ? KEPT : 1];
  if constexpr (KEPT > 0) {
    await_rows(has_bell, &bell);
#pragma unroll
    for (int n = 0; n < KEPT; ++n)
      kept[n] = find(min(static_cast<int>(threadIdx.x + n * blockDim.x), items - 1));
  }
  grid_wait();
  float* streams = x + static_cast<long long>(token) * STREAMS * width + column;
  float added = 0.0f, value[STREAMS] = {}, share[STREAMS] = {}, factor[STREAMS] = {};
  if (joins) {
    if (y_before != nullptr) added = y_before[token * width + column];
#pragma unroll
    for (int s = 0; s < STREAMS; ++s) {
      value[s] = streams[s * width];
      if (y_before != nullptr) share[s] = inject_before[token * STREAMS + s];
      factor[s] = factors[token * STREAMS + s];
    }
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < here * all; i += blockDim.x) {
    const Place place(i, all);
    const float sum = sum_of_streams(parts, begin + place.t, all, place.i), scaled = scale * sum;
    if (place.i < low)
      lows[place.t * low + place.i] = scaled * sigmoid(scaled);
    else if (blockIdx.x == 0)
      injected[(begin + place.t) * injects + place.i - low] = sum;
  }
  if constexpr (IS_STAGED && KEPT == 0)
    await_rows(has_bell, &bell);
  else
    __syncthreads();
#pragma unroll
  for (int n = 0; n < KEPT; ++n)
    multiply_item(kept[n], lows, low, here, gates + kept[n].to, rows);
#pragma unroll 1
  for (int i = threadIdx.x + KEPT * blockDim.x; i < items; i += blockDim.x) {
    const Item item = find(i);
    multiply_item(item, lows, low, here, gates + item.to, rows);
  }
  if (joins && y_before != nullptr) {
#pragma unroll
    for (int s = 0; s < STREAMS; ++s) {
      value[s] = fmaf(share_of(share[s], STREAMS), added, value[s]);
      streams[s * width] = value[s];
    }
  }
  __syncthreads();
  if (!joins) return;
  float mean = 0.0f, gate[STREAMS] = {};
  const float* own_gates = gates + mine.t * rows + mine.i;
#pragma unroll 5
  for (int piece = 0; piece < pieces; ++piece, own_gates += TOKENS * rows)
#pragma unroll
    for (int s = 0; s < STREAMS; ++s) gate[s] += own_gates[s * own];
#pragma unroll
  for (int s = 0; s < STREAMS; ++s) mean += value[s] * (weight[s] * factor[s]) * sigmoid(gate[s]);
  out[token * width + column] = mean / STREAMS;
}
