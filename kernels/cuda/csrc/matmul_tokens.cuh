// Activations on their way to tensor cores: float32 rows to scaled halves in the order of units.
//
// Each token's part of a chunk gets a power of two that brings its largest value to 2^14..2^15, so
// that outliers do not overflow and the rest keeps its precision; the sums of the product are
// multiplied by its inverse. X_PLANES 2 keeps what the first half leaves, times 2^11.
// One warp stages for itself; columns behind k are zero.
#pragma once
#include "mma.cuh"

#ifndef MANY
#define MANY 0
#endif

namespace voltapile {

constexpr bool IS_ASYNC = VP_ARCH >= 800;
// Tokens come in PASSES times eight at most; -D MANY: 0 for one pass, 1 for as many as suit, 2 or 4
// for so many. Passes without a token are left out, at the price of branches, but with MANY 2 or 4.
constexpr bool LEAVES_OUT = MANY < 2;
constexpr int PASSES = !MANY ? 1 : MANY == 2 || !IS_ASYNC ? 2 : 4;

__device__ __forceinline__ float4 four_columns(const float* row, int column, int k) {
  if ((k & 3) == 0)
    return column < k ? *reinterpret_cast<const float4*>(row + column) : float4{0, 0, 0, 0};
  return {column < k ? row[column] : 0, column + 1 < k ? row[column + 1] : 0,
          column + 2 < k ? row[column + 2] : 0, column + 3 < k ? row[column + 3] : 0};
}

// Of two that are not negative; from sm_80 on what is no number is larger.
__device__ __forceinline__ float larger_of(float a, float b) {
#if VP_ARCH < 800
  return fmaxf(a, b);
#elif defined(VP_EMULATION)
  return a >= b || a != a ? a : b;
#else
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(a) : "f"(a), "f"(b));
  return a;
#endif
}
__device__ __forceinline__ float largest_of(float4 v) {
  return larger_of(larger_of(fabsf(v.x), fabsf(v.y)), larger_of(fabsf(v.z), fabsf(v.w)));
}

// The largest of all lanes' numbers, of which none is negative: as bits they have the same order.
__device__ __forceinline__ float largest_of_warp(float x) {
#if VP_ARCH >= 800 && !defined(VP_EMULATION)
  return __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(x)));
#else
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) x = larger_of(x, __shfl_xor_sync(~0u, x, step));
  return x;
#endif
}

// 2^e <= largest < 2^(e + 1) gives 2^(14 - e) and its inverse; e is at least -100.
__device__ __forceinline__ float2 scales_for(float largest) {
  const int e = max(static_cast<int>(__float_as_uint(largest) >> 23), 27);
  return {__uint_as_float(static_cast<unsigned>(268 - e) << 23),
          __uint_as_float(static_cast<unsigned>(e - 14) << 23)};
}

// The same for multiples of the least half, 2^-24, of so many bits: 2^(BITS - 25 - e) and its
// inverse. From 2^(102 + BITS) on that is no number, and so is what it makes.
template <int BITS>
__device__ __forceinline__ float2 exact_scales_for(float largest) {
  const int e = max(static_cast<int>(__float_as_uint(largest) >> 23), 27);
  const unsigned inverse = e < 229 + BITS ? static_cast<unsigned>(e + 25 - BITS) << 23 : 0x7fc00000;
  return {__uint_as_float(static_cast<unsigned>(max(229 + BITS - e, 0)) << 23),
          __uint_as_float(inverse)};
}

// The same where each group of a chunk has as many bits of its own, unless its values are more than
// 2^15 below the chunk's largest. Multiples of 2^-24 times 2^up are halves of the chunk's scale.
struct GroupScale {
  float scale, inverse;  // the inverse is the chunk's: of what the halves are
  int up;                // 0 to 15
};
template <int BITS>
__device__ __forceinline__ GroupScale exact_scale_of(float of_group, float of_chunk) {
  const int e = max(static_cast<int>(__float_as_uint(of_chunk) >> 23), 27), least = e - 15;
  const int own = max(static_cast<int>(__float_as_uint(of_group) >> 23), least);
  const unsigned inverse = e < 229 + BITS ? static_cast<unsigned>(e + 10 - BITS) << 23 : 0x7fc00000;
  return {__uint_as_float(static_cast<unsigned>(max(229 + BITS - own, 0)) << 23),
          __uint_as_float(inverse), own - least};
}

// Four values to two registers, and the sum of what they became.
template <bool NATURAL>
__device__ __forceinline__ float pack_four(float4 v, float scale, unsigned* high, unsigned* low) {
  const float second = NATURAL ? v.y : v.z, third = NATURAL ? v.z : v.y;
  const float a = v.x * scale, b = second * scale, c = third * scale, d = v.w * scale;
  high[0] = half_pair(a, b);
  high[1] = half_pair(c, d);
  const float2 ab = half_values(high[0]), cd = half_values(high[1]);
  if (low != nullptr) {
    low[0] = half_pair((a - ab.x) * 2048.0f, (b - ab.y) * 2048.0f);
    low[1] = half_pair((c - cd.x) * 2048.0f, (d - cd.y) * 2048.0f);
  }
  return (ab.x + ab.y) + (cd.x + cd.y);
}

// Eight values as whole numbers times 2^-24, of two bytes each; four columns a word.
struct PutBytes {
  uint2 high, low;
};
// Its second byte is the upper one, its first the lower one and 128.
__device__ __forceinline__ unsigned whole_of(float x) {
  return __float_as_uint(fmaf(x, 0x1p24f, 12582912.0f + 128.0f));
}
template <bool NATURAL>
__device__ __forceinline__ PutBytes put_bytes_of(const Unit& unit) {
  unsigned high[2], low[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float2 x = half_values(unit.r[2 * i]), y = half_values(unit.r[2 * i + 1]);
    const unsigned second = whole_of(NATURAL ? x.y : y.x), third = whole_of(NATURAL ? y.x : x.y);
    const unsigned one = __byte_perm(whole_of(x.x), second, 0x5140);
    const unsigned two = __byte_perm(third, whole_of(y.y), 0x5140);
    low[i] = __byte_perm(one, two, 0x5410) ^ 0x80808080;
    high[i] = __byte_perm(one, two, 0x7632);
  }
  return {{high[0], high[1]}, {low[0], low[1]}};
}

// In shared memory, for `room` tokens:
//   units   [X_PLANES][GROUPS][room][4] Units
//   sums    [GROUPS * SCALES][room] of what the units hold; only if the format has offsets
//   scales  [room] what sums of products are multiplied by
// A token that is alone (matmul_alone.cuh) is kept as bytes instead of units:
//   [GROUPS][2] its upper bytes, its lower ones: 32, of which in every other pair of groups the
//   second 16 come first
template <class C>
struct Tokens {
  static constexpr int PER_TOKEN =
      C::X_PLANES * C::GROUPS * 64 + (C::OFFSET ? C::GROUPS * C::SCALES * 4 : 0) + 4;
  Unit* units;
  float *sums, *scales;
  int room;

  __device__ Tokens(std::uint8_t* memory, int room) : room(room) {
    units = reinterpret_cast<Unit*>(memory);
    scales = reinterpret_cast<float*>(units + C::X_PLANES * C::GROUPS * 4 * room);
    sums = scales + room;
  }

  // Of units, from those of one group to the next.
  __device__ __forceinline__ int group_stride() const { return 4 * room; }
  __device__ __forceinline__ int plane_stride() const { return C::GROUPS * 4 * room; }
  // A token, or another where there is none: its sums are nobody's.
  __device__ __forceinline__ int some(int token) const { return token < room ? token : 0; }
  __device__ __forceinline__ float scale(int token) const { return scales[some(token)]; }
  __device__ __forceinline__ bool is_alone() const {
    return C::EXACT_BITS > 0 && PASSES == 1 && room == 1;
  }

  // x: the first token's row; column: where the chunk starts.
  __device__ __forceinline__ void stage(const float* x, int tokens, int k, int column, int lane) {
    const int first = column + 32 * (lane % LANES / 4) + 4 * (lane & 3);
    for (int start = 0; start < tokens; start += 32 / LANES) {
      const int token = start + lane / LANES;
      const bool is_there = token < tokens;
      const float* row = x + static_cast<long long>(is_there ? token : 0) * k;
      put_if<true>(token, is_there, four_columns(row, first, k), four_columns(row, first + 16, k),
                   lane);
    }
  }
  // The whole warp puts what it loaded of a token to its place. CAN_BE_ALONE: false where it has
  // company.
  template <bool CAN_BE_ALONE = true>
  __device__ __forceinline__ void put(int token, float4 a, float4 b, int lane) {
    static_assert(LANES == 32);
    put_if<CAN_BE_ALONE>(token, true, a, b, lane);
  }

 private:
  static constexpr int LANES = 4 * C::GROUPS;  // for a token

  template <bool CAN_BE_ALONE>
  __device__ __forceinline__ void put_if(int token, bool is_there, float4 a, float4 b, int lane) {
    const int group = lane % LANES / 4, p = lane & 3;
    float largest = larger_of(largest_of(a), largest_of(b));
    if constexpr (LANES == 32) {
      largest = largest_of_warp(largest);
    } else {
#pragma unroll
      for (int step = LANES / 2; step > 0; step >>= 1)
        largest = larger_of(largest, __shfl_xor_sync(~0u, largest, step));
    }
    const float2 scale =
        C::EXACT_BITS > 0 ? exact_scales_for<C::EXACT_BITS>(largest) : scales_for(largest);
    Unit high, low;
    float sum_a = pack_four<C::NATURAL>(a, scale.x, high.r, C::X_PLANES > 1 ? low.r : nullptr);
    float sum_b =
        pack_four<C::NATURAL>(b, scale.x, high.r + 2, C::X_PLANES > 1 ? low.r + 2 : nullptr);
    if constexpr (C::OFFSET) {
      if (C::SCALES == 1) sum_a += sum_b;
      sum_a += __shfl_xor_sync(~0u, sum_a, 1);
      sum_a += __shfl_xor_sync(~0u, sum_a, 2);
      if (C::SCALES == 2) {
        sum_b += __shfl_xor_sync(~0u, sum_b, 1);
        sum_b += __shfl_xor_sync(~0u, sum_b, 2);
      }
      if (is_there && p == 0) {
        sums[C::SCALES * group * room + token] = sum_a;
        if (C::SCALES == 2) sums[(2 * group + 1) * room + token] = sum_b;
      }
    }
    if (is_there) {
      if (CAN_BE_ALONE && is_alone())
        put_alone(group, p, put_bytes_of<C::NATURAL>(high));
      else
        put(0, group, token, p, high);
      if constexpr (C::X_PLANES > 1) put(1, group, token, p, low);
      if (lane % LANES == 0) scales[token] = scale.y;
    }
  }
  __device__ __forceinline__ void put_alone(int group, int p, const PutBytes& bytes) {
    std::uint8_t* at = reinterpret_cast<std::uint8_t*>(units) + 64 * group + 4 * p;
    const int first = group & 2 ? 16 : 0, second = 16 - first;
    *reinterpret_cast<unsigned*>(at + first) = bytes.high.x;
    *reinterpret_cast<unsigned*>(at + second) = bytes.high.y;
    *reinterpret_cast<unsigned*>(at + 32 + first) = bytes.low.x;
    *reinterpret_cast<unsigned*>(at + 32 + second) = bytes.low.y;
  }
  __device__ __forceinline__ void put(int plane, int group, int token, int p, const Unit& u) {
    *reinterpret_cast<uint4*>(units + ((plane * C::GROUPS + group) * room + token) * 4 + p) =
        uint4{u.r[0], u.r[1], u.r[2], u.r[3]};
  }
};

}  // namespace voltapile
