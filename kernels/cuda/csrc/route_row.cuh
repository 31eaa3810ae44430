// A row's products with a router's, and its norm beside them: what blocks of `route` do before one
// of them chooses.
//
// A row that is to be normed is multiplied as it is, times the norm's gains; its factor is found
// meanwhile, and logits are scaled by it in the end. So they have other last bits than those of a
// row that was normed before: which it is must not depend on what else is in a step (norms.py).
#pragma once
#include "choice.cuh"
#include "grid.cuh"
#include "norm_row.cuh"
#include "state_rows.cuh"

#ifndef SLOTS
#define SLOTS 4  // float4 of a router's row that a thread asks for at once
#endif
#ifndef ONE
#define ONE 0  // there is one token
#endif
#ifndef KIND
#define KIND 0  // of a router's values, as in state_rows.cuh
#endif

namespace voltapile {

constexpr bool IS_ONE = ONE;
constexpr int THREADS = 256, TEAM = THREADS / 32;
constexpr int TOKENS = IS_ONE ? 1 : 8;  // of a block
constexpr int AHEAD = IS_ONE ? 1 : 2;   // of them are on their way at once
// Its experts: of one token few, since a multiprocessor takes its time to fetch them; more tokens
// are read by each block.
constexpr int EACH = IS_ONE ? 2 : 4;
// Blocks of which a multiprocessor has registers: where a product of one token has most of them,
// there is room for one.
constexpr int BESIDE = IS_ONE && SLOTS == 2 ? 5 : 1;

// float32 to the nearest BF16, ties to even.
__device__ __forceinline__ float rounded(float x) {
  const unsigned bits = __float_as_uint(x);
  return __uint_as_float((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u);
}
__device__ __forceinline__ float4 rounded(float4 v) {
  return {rounded(v.x), rounded(v.y), rounded(v.z), rounded(v.w)};
}

struct Norm {
  const float* gain;  // or null
  float share, eps;   // of a column in the mean
};

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
__device__ __forceinline__ float join_four(float a, float b, float c, float d, int lane) {
  const bool is_upper = lane & 16, is_odd = lane & 8;
  const float first = (is_upper ? c : a) + __shfl_xor_sync(ALL, is_upper ? a : c, 16);
  const float second = (is_upper ? d : b) + __shfl_xor_sync(ALL, is_upper ? b : d, 16);
  float all = (is_odd ? second : first) + __shfl_xor_sync(ALL, is_odd ? first : second, 8);
#pragma unroll
  for (int step = 4; step > 0; step >>= 1) all += __shfl_xor_sync(ALL, all, step);
  return all;
}

// Of a token, by warps: sums of products with each expert, and of squares.
struct Parts {
  float of[EACH + 1][TEAM];

  __device__ __forceinline__ void add(const float (&sum)[EACH], float squares, int warp, int lane,
                                      bool is_first) {
    static_assert(EACH == 2 || EACH == 4);
    const auto put = [&](int i, float all) { of[i][warp] = is_first ? all : of[i][warp] + all; };
    const float third = EACH == 4 ? sum[EACH - 2] : squares;
    const float all = join_four(sum[0], sum[1], third, sum[EACH - 1], lane);
    if ((lane & 7) == 0 && lane >> 3 < (EACH == 4 ? 4 : 3)) put(lane >> 3, all);
    if (EACH == 4) {
      squares = warp_join(squares, Add());
      if (lane == 0) put(EACH, squares);
    }
  }
  __device__ __forceinline__ float joined(int i) const {
    static_assert(TEAM == 8);
    const float* own = of[i];
    return ((own[0] + own[1]) + (own[2] + own[3])) + ((own[4] + own[5]) + (own[6] + own[7]));
  }
};

// A thread's columns of rows of k, from `start` on: of a block's experts, and of the norm's gains.
struct Columns {
  int k, start;
  float4 w[EACH][SLOTS], g[SLOTS];

  __device__ __forceinline__ int place(int i) const {
    return start + THREADS * i + static_cast<int>(threadIdx.x);  // in fours
  }
  __device__ __forceinline__ bool has(int i) const { return place(i) < k >> 2; }

  __device__ __forceinline__ void ask(const void* router, const float* gain, int expert,
                                      int experts) {
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) {
#pragma unroll
      for (int e = 0; e < EACH; ++e) {
        const long long row = static_cast<long long>(min(expert + e, experts - 1)) * k;
        w[e][i] = has(i) ? four_of(router, row + 4 * place(i)) : make_float4(0, 0, 0, 0);
      }
      const float4* gains = reinterpret_cast<const float4*>(gain);
      g[i] = gain != nullptr && has(i) ? gains[place(i)] : make_float4(1, 1, 1, 1);
    }
  }
  __device__ __forceinline__ void load(float4 (&v)[SLOTS], const float* x) const {
#pragma unroll
    for (int i = 0; i < SLOTS; ++i)
      v[i] = has(i) ? reinterpret_cast<const float4*>(x)[place(i)] : make_float4(0, 0, 0, 0);
  }
  // Sums of products with each expert, and of squares.
  __device__ __forceinline__ float multiply(float4 (&v)[SLOTS], int is_rounded,
                                            float (&sum)[EACH]) const {
    float squares = 0.0f;
    if (is_rounded)
#pragma unroll
      for (int i = 0; i < SLOTS; ++i) v[i] = rounded(v[i]);
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) {
      const float4 own = scaled(v[i], g[i]);
#pragma unroll
      for (int e = 0; e < EACH; ++e) {
        sum[e] = fmaf(own.x, w[e][i].x, sum[e]);
        sum[e] = fmaf(own.y, w[e][i].y, sum[e]);
        sum[e] = fmaf(own.z, w[e][i].z, sum[e]);
        sum[e] = fmaf(own.w, w[e][i].w, sum[e]);
      }
      squares = fmaf(v[i].x, v[i].x, fmaf(v[i].y, v[i].y, squares));
      squares = fmaf(v[i].z, v[i].z, fmaf(v[i].w, v[i].w, squares));
    }
    return squares;
  }
};

// The same place in shared memory, as an address that is worked out here and not where it is used.
template <class T>
__device__ __forceinline__ const T& found(const T& place) {
#ifdef VP_EMULATION
  return place;
#else
  unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(&place));
  asm volatile("" : "+r"(address));
  return *static_cast<const T*>(__cvta_shared_to_generic(address));
#endif
}

// The logits of a block's experts, for up to eight tokens from `first` on.
__device__ __forceinline__ void put_logits(const float* x, const void* router, unsigned* inbox,
                                           const Norm& norm, int first, int count, int experts,
                                           int k, int is_rounded) {
  __shared__ __align__(16) Parts parts[TOKENS];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, expert = blockIdx.x * EACH;
  x += static_cast<long long>(first) * k;
#pragma unroll 1
  for (int start = 0; 4 * start < k; start += THREADS * SLOTS) {
    Columns columns{k, start};
    columns.ask(router, norm.gain, expert, experts);
    if (start == 0) grid_wait();
    float4 rows[AHEAD][SLOTS];
    const auto load = [&](int i, int t) {
      if (t < count) columns.load(rows[i], x + static_cast<long long>(t) * k);
    };
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) load(i, i);
#pragma unroll 1
    for (int t = 0; t < count; t += AHEAD)
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        if (t + i >= count) break;
        float sum[EACH] = {};
        const float squares = columns.multiply(rows[i], is_rounded, sum);
        load(i, t + i + AHEAD);
        parts[t + i].add(sum, squares, warp, lane, start == 0);
      }
  }
  static_assert(TOKENS * EACH <= 32);
  const int t = lane / EACH, e = lane % EACH;
  const Parts& own = found(parts[t & TOKENS - 1]);
  unsigned* to = inbox + static_cast<long long>(first + t) * experts + expert + e;
  const bool is_own = warp == 0 && t < count && expert + e < experts;
  __syncthreads();
  if (!is_own) return;
  float all = own.joined(e), factor = factor_of(own.joined(EACH), norm.share, norm.eps);
  if (norm.gain == nullptr) factor = 1.0f;
  leave(to, key_of(all * factor));
}

// A row's norm, with the bits of norm.cu. k: whole runs, which fit the block.
__device__ __forceinline__ void put_normed(const float* x, const Norm& norm, float* out, int k) {
  __shared__ float sums[SLOTS / 2 * TEAM];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, runs = k / RUN;
  const auto run = [&](int i) { return warp + TEAM * (i / 2); };
  const auto place = [&](int i) { return RUN / 4 * run(i) + 2 * lane + i % 2; };
  float4 v[SLOTS], g[SLOTS];
#pragma unroll
  for (int i = 0; i < SLOTS; ++i)
    if (run(i) < runs) g[i] = reinterpret_cast<const float4*>(norm.gain)[place(i)];
  grid_wait();
#pragma unroll
  for (int i = 0; i < SLOTS; ++i)
    if (run(i) < runs) v[i] = reinterpret_cast<const float4*>(x)[place(i)];
#pragma unroll
  for (int i = 0; i < SLOTS; i += 2) {
    if (run(i) >= runs) break;
    const float sum = warp_join(squares_of(v[i], v[i + 1]), Add());
    if (lane == 0) sums[run(i)] = sum;
  }
  __syncthreads();
  const float factor = norm_factor<SLOTS / 2 * TEAM>(sums, runs, norm.share, norm.eps, lane);
#pragma unroll
  for (int i = 0; i < SLOTS; ++i)
    if (run(i) < runs)
      reinterpret_cast<float4*>(out)[place(i)] = scaled(scaled(v[i], g[i]), factor);
}

}  // namespace voltapile
