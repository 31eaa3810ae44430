// How a thread's eight floats of a piece travel to another rank, and how they are read and written.
//
// Plain: as they are, 32 bytes. Eights: in 16, as integers of 14 bits, one power of two for all
// eight, and a flag, so that a reader may poll. None is off by more than 2^-13 of the largest; a
// half keeps 11 bits of each value. The range is a float's. What is not finite makes all eight
// NaNs. Only sums over prompt rows may take eights, since bits then depend on how many rows there
// are.
#pragma once
#include "group_wires.cuh"

namespace voltapile {

struct Eight {
  float4 a, b;
};

__device__ __forceinline__ float4 plus(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}
__device__ __forceinline__ Eight plus(const Eight& x, const Eight& y) {
  return {plus(x.a, y.a), plus(x.b, y.b)};
}
__device__ __forceinline__ float4 nothing() { return make_float4(0.0f, 0.0f, 0.0f, 0.0f); }

__device__ __forceinline__ void put_four(float* out, int i, float4 value, int accumulate) {
  float4* to = reinterpret_cast<float4*>(out) + i;
  *to = accumulate ? plus(*to, value) : value;
}

// `at`: where in an array the block's piece begins; length: of the piece, in float4.
struct Plain {
  static constexpr int THREADS = 512;

  static __device__ __forceinline__ Eight load(const float* x, long long at, int length) {
    const int i = threadIdx.x;
    const float4* from = reinterpret_cast<const float4*>(x + at);
    return {x != nullptr && i < length ? from[i] : nothing(),
            x != nullptr && i + THREADS < length ? from[i + THREADS] : nothing()};
  }
  static __device__ __forceinline__ void write(float* room, int length, const Eight& value) {
    const int i = threadIdx.x;
    float4* to = reinterpret_cast<float4*>(room);
    if (i < length) to[i] = value.a;
    if (i + THREADS < length) to[i + THREADS] = value.b;
  }
  static __device__ __forceinline__ Eight read(const float* room, int length) {
    const int i = threadIdx.x;
    const float4* from = reinterpret_cast<const float4*>(room);
    return {i < length ? load_far(from + i) : nothing(),
            i + THREADS < length ? load_far(from + i + THREADS) : nothing()};
  }
  static __device__ __forceinline__ void put(float* out, long long at, int length,
                                             const Eight& value, int accumulate) {
    const int i = threadIdx.x;
    if (i < length) put_four(out + at, i, value.a, accumulate);
    if (i + THREADS < length) put_four(out + at, i + THREADS, value.b, accumulate);
  }
  static __device__ __forceinline__ Eight rounded(const Eight& value) { return value; }
};

struct Eights {
  static constexpr int BITS = 14, LARGEST = (1 << (BITS - 1)) - 1;
  static constexpr int LEAST = 13;  // exponent: what is smaller shares its unit

  static __device__ __forceinline__ float power(int exponent) {
    return __uint_as_float(static_cast<unsigned>(exponent) << 23);
  }
  static __device__ __forceinline__ unsigned top(float x) {
    return __float_as_uint(x) & ~(1u << 31);
  }
  static __device__ __forceinline__ unsigned top(float4 x) {
    return max(max(top(x.x), top(x.y)), max(top(x.z), top(x.w)));
  }
  // A power of two that rounding came to would not round to itself again.
  static __device__ __forceinline__ unsigned whole(float x) {
    const int value = static_cast<int>(rintf(x));
    return static_cast<unsigned>(max(-LARGEST, min(value, LARGEST))) & ((1u << BITS) - 1);
  }
  static __device__ __forceinline__ unsigned two(float x, float y, float scale) {
    return whole(x * scale) | whole(y * scale) << BITS;
  }
  static __device__ __forceinline__ float value(unsigned word, float unit) {
    return static_cast<float>(static_cast<int>(word << (32 - BITS)) >> (32 - BITS)) * unit;
  }
  // The last word ends with the exponent and a flag of eight bits.
  static __device__ __forceinline__ uint4 pack(const Eight& v, unsigned flag = 0) {
    const int e = max(static_cast<int>(max(top(v.a), top(v.b)) >> 23), LEAST);
    const float scale = power(254 + BITS - 2 - e);
    const unsigned last = two(v.b.z, v.b.w, scale);  // 28 bits, four of them in each other word
    return uint4{two(v.a.x, v.a.y, scale) | last << 28, two(v.a.z, v.a.w, scale) | last >> 4 << 28,
                 two(v.b.x, v.b.y, scale) | last >> 8 << 28,
                 last >> 12 | static_cast<unsigned>(e) << 16 | flag << 24};
  }
  static __device__ __forceinline__ unsigned flag_of(uint4 words) { return words.w >> 24; }
  static __device__ __forceinline__ Eight unpack(uint4 w) {
    const unsigned e = w.w >> 16 & 255;
    const unsigned last = w.x >> 28 | w.y >> 28 << 4 | w.z >> 28 << 8 | w.w << 12;
    const float unit = e == 255 ? __uint_as_float(0x7fc00000u) : power(e - (BITS - 2));
    return {make_float4(value(w.x, unit), value(w.x >> BITS, unit), value(w.y, unit),
                        value(w.y >> BITS, unit)),
            make_float4(value(w.z, unit), value(w.z >> BITS, unit), value(last, unit),
                        value(last >> BITS, unit))};
  }

  static __device__ __forceinline__ bool is_in(int length) {
    return 2 * static_cast<int>(threadIdx.x) < length;
  }
  static __device__ __forceinline__ Eight load(const float* x, long long at, int length) {
    if (x == nullptr || !is_in(length)) return {nothing(), nothing()};
    const float4* from = reinterpret_cast<const float4*>(x + at) + 2 * threadIdx.x;
    return {from[0], from[1]};
  }
  static __device__ __forceinline__ void write(float* room, int length, const Eight& value) {
    if (is_in(length)) reinterpret_cast<uint4*>(room)[threadIdx.x] = pack(value);
  }
  static __device__ __forceinline__ Eight read(const float* room, int length) {
    if (!is_in(length)) return {nothing(), nothing()};
    return unpack(load_four(reinterpret_cast<const uint4*>(room) + threadIdx.x));
  }
  static __device__ __forceinline__ void put(float* out, long long at, int length,
                                             const Eight& value, int accumulate) {
    if (!is_in(length)) return;
    put_four(out + at, 2 * threadIdx.x, value.a, accumulate);
    put_four(out + at, 2 * threadIdx.x + 1, value.b, accumulate);
  }
  // As the others see it.
  static __device__ __forceinline__ Eight rounded(const Eight& value) {
    return unpack(pack(value));
  }
};

}  // namespace voltapile
