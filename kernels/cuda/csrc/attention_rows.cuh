// Which positions a token sees, and the rows that one block computes: the query heads of one KV
// head for neighbouring tokens of a slot. Row m of a block is token m / G, head m % G of the group.
//
// How a token's positions are cut into pieces depends on that token alone, never on its company or
// on the launch: pieces begin at multiples of their length, the least multiple of GRAIN, and at least
// PIECE, that needs no more than `most` of them. This, and products whose rows do not know each other, is why a row has the
// same bits alone and among others.
#pragma once
#include "half.cuh"

namespace voltapile {

using half_bits = std::uint16_t;

// The pages of a piece are dealt to so many shares in turn; each is summed up for itself, and then
// they are joined, whether one block or several took them.
constexpr int SHARES = VP_ARCH >= 900 ? 8 : 1;
constexpr int GRAIN = 64 * SHARES;  // positions: a page of each share
constexpr int PIECE = VP_ARCH >= 900 ? 2048 : 128;

#ifndef VP_EMULATION
__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
#endif

struct Span {
  int low, high;  // sees positions low <= p < high
  int piece;      // length of its pieces
  __device__ int first() const { return low / piece; }
  __device__ int last() const { return (high - 1) / piece; }
};

// limit: positions that a page table has room for
__device__ __forceinline__ Span span_of(int position, int limit, int window, int most) {
  Span s;
  s.high = max(1, min(position + 1, limit));
  s.low = window > 0 ? max(0, s.high - window) : 0;
  s.piece = max(PIECE, ((s.high - s.low + most - 1) / most + GRAIN - 1) / GRAIN * GRAIN);
  return s;
}

// For who attends to a part of the positions (kernels/positions.py): how much each row's result
// weighs. A token at position -1 sees nothing.
struct Weighing {
  float* weights;  // log(sum(exp(score))) of each query head; null: nobody asks
  const int* positions;
  int num_heads;
  __device__ bool sees(long long query) const { return positions[query / num_heads] >= 0; }
  // most: the largest score to the exponent of 2; sum: of the others' powers beside it
  __device__ void write(long long query, float most, float sum) const {
    weights[query] = sees(query) ? __fmaf_rn(most, 0.6931471806f, logf(sum)) : -infinity();
  }
};

// Right to about 1e-7 of 1, which a soft cap multiplies by some tens.
__device__ __forceinline__ float tanh_fast(float x) {
  return 1.0f - __fdividef(2.0f, 1.0f + exp2_fast(2.885390082f * x));
}

// The fp16 form of a query: times a power of two that brings its largest value to [128, 256).
// Returns the power that undoes it. A warp calls; x: `dim` floats, to: DIM halves. IN_FOURS: of each
// 16, halves 2 c, 2 c + 1, 8 + 2 c and 9 + 2 c become four neighbours from 4 c on (ByteTile).
template <int DIM, bool IN_FOURS = false>
__device__ __forceinline__ float stage_query(const float* x, int dim, half_bits* to, int lane) {
  constexpr int EACH = (DIM + 127) / 128;
  float4 v[EACH];
  unsigned most = 0;
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int at = 128 * i + 4 * lane;
    v[i] = at < dim ? *reinterpret_cast<const float4*>(x + at) : float4{0, 0, 0, 0};
    most = max(max(most, __float_as_uint(v[i].x) << 1), __float_as_uint(v[i].y) << 1);
    most = max(max(most, __float_as_uint(v[i].z) << 1), __float_as_uint(v[i].w) << 1);
  }
  for (int step = 16; step > 0; step >>= 1)
    most = max(most, __shfl_xor_sync(0xffffffffu, most, step));
  int exponent = static_cast<int>(most >> 24) - 127;
  if (exponent == 128 || exponent < -100) exponent = 7;  // not finite, or as good as zero
  const float up = __uint_as_float((127u + 7 - exponent) << 23);
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int at = 128 * i + 4 * lane;
    if (at < DIM) {
      uint2 h;
      h.x = half_pair(v[i].x * up, v[i].y * up), h.y = half_pair(v[i].z * up, v[i].w * up);
      if (IN_FOURS) {
        half_bits* pairs = to + at / 16 * 16 + at % 16 / 2;
        *reinterpret_cast<unsigned*>(pairs) = h.x, *reinterpret_cast<unsigned*>(pairs + 8) = h.y;
      } else {
        *reinterpret_cast<uint2*>(to + at) = h;
      }
    }
  }
  return __uint_as_float((127u - 7 + exponent) << 23);
}

}  // namespace voltapile
