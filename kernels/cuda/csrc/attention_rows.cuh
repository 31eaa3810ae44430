// Which positions a token sees, and the rows that one block computes: the query heads of one KV
// head for neighbouring tokens of a slot. Row m of a block is token m / G, head m % G of the group.
//
// How a token's positions are cut into pieces depends on that token alone, never on its company or
// on the launch: up to WHOLE positions are one piece; else pieces begin at multiples of their
// length, the least multiple of GRAIN, and at least LEAST (behind a window WHOLE), that needs no
// more than `most` of them. This, and products whose rows do not know each other, is why a row has
// the same bits alone and among others.
#pragma once
#include "half.cuh"

namespace voltapile {

using half_bits = std::uint16_t;

// The pages of a piece are dealt to so many shares in turn; each is summed up for itself, and then
// they are joined, whether one block or several took them.
constexpr int SHARES = VP_ARCH >= 900 ? 8 : 1;
constexpr int GRAIN = 64 * SHARES;  // positions: a page of each share
constexpr int WHOLE = VP_ARCH >= 900 ? 2048 : 128, LEAST = VP_ARCH >= 900 ? 1024 : 128;

#ifndef VP_EMULATION
__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// 1 / x, rounded as a division rounds it, of what is neither tiny nor huge.
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return __fmaf_rn(y, -__fmaf_rn(x, y, -1.0f), y);
}
#endif

struct Sight {
  int low, high;  // sees positions low <= p < high
};
struct Span {
  int low, high;
  int piece;        // length of its pieces
  int first, last;  // pieces that have what it sees
};

// limit: positions that a page table has room for
__device__ __forceinline__ Sight sight_of(int position, int limit, int window) {
  const int high = max(1, min(position + 1, limit));
  return {window > 0 ? max(0, high - window) : 0, high};
}
// A call: kernels ask in several places, once each, and its code would be most of theirs.
__device__ __noinline__ Span span_of(int position, int limit, int window, int most) {
  const Sight seen = sight_of(position, limit, window);
  Span s{seen.low, seen.high, WHOLE, 0, 0};
  if (s.high <= WHOLE) return s;
  const unsigned step = most * GRAIN, length = s.high - s.low;
  s.piece = max(window > 0 ? WHOLE : LEAST, static_cast<int>((length + step - 1) / step) * GRAIN);
  const unsigned piece = s.piece;
  s.first = s.low / piece, s.last = (s.high - 1) / piece;
  return s;
}

// For who attends to a part of the positions (kernels/positions.py): how much each row's result
// weighs. A token at position -1 sees nothing.
struct Weighing {
  float* weights;  // log(sum(exp(score))) of each query head; null: nobody asks
  const int* positions;
  int num_heads;
};

// Whether a row sees anything; what it weighs is written if `writes`. most: the largest score to
// the exponent of 2; sum: of the others' powers beside it. A call, for it is rarely wanted.
__device__ __noinline__ bool weigh(Weighing of, int query, bool writes, float most, float sum) {
  const bool sees = of.positions[static_cast<unsigned>(query) / of.num_heads] >= 0;
  if (writes)
    of.weights[query] = sees ? __fmaf_rn(most, 0.6931471806f, logf(sum)) : -infinity();
  return sees;
}

// Right to about 1e-7 of 1, which a soft cap multiplies by some tens.
__device__ __forceinline__ float tanh_fast(float x) {
  return 1.0f - __fdividef(2.0f, 1.0f + exp2_fast(2.885390082f * x));
}

__device__ __forceinline__ unsigned warp_largest(unsigned x) {
#if VP_ARCH >= 800 && !defined(VP_EMULATION)
  return __reduce_max_sync(0xffffffffu, x);
#else
  for (int step = 16; step > 0; step >>= 1) x = max(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
#endif
}

// A query on its way to fp16, which a warp holds: times a power of two that brings its largest
// value to [128, 256).
template <int DIM>
struct Query {
  static constexpr int EACH = (DIM + 127) / 128;
  float4 v[EACH];

  // x: `dim` floats
  __device__ __forceinline__ void read(const float* x, int dim, int lane) {
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int at = 128 * i + 4 * lane;
      v[i] = at < dim ? *reinterpret_cast<const float4*>(x + at) : float4{0, 0, 0, 0};
    }
  }
  // Returns the power that undoes it. to: DIM halves. IN_FOURS: of each 16, halves 2 c, 2 c + 1,
  // 8 + 2 c and 9 + 2 c become four neighbours from 4 c on (ByteTile).
  template <bool IN_FOURS>
  __device__ __forceinline__ float stage(half_bits* to, int lane) const {
    unsigned most = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      most = max(max(most, __float_as_uint(v[i].x) << 1), __float_as_uint(v[i].y) << 1);
      most = max(max(most, __float_as_uint(v[i].z) << 1), __float_as_uint(v[i].w) << 1);
    }
    most = warp_largest(most);
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
          *reinterpret_cast<unsigned*>(pairs) = h.x;
          *reinterpret_cast<unsigned*>(pairs + 8) = h.y;
        } else {
          *reinterpret_cast<uint2*>(to + at) = h;
        }
      }
    }
    return __uint_as_float((127u - 7 + exponent) << 23);
  }
};

template <int DIM>
__device__ __forceinline__ float stage_query(const float* x, int dim, half_bits* to, int lane) {
  Query<DIM> query;
  query.read(x, dim, lane);
  return query.template stage<false>(to, lane);
}

}  // namespace voltapile
