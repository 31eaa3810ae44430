// Eight neighbouring columns of a row of a small matrix, which one thread multiplies in float32:
// read ahead as Raw, later floats. Of the formats in which mixes of streams are kept.
#pragma once
#include "formats/registry.h"
#include "half.cuh"

namespace voltapile {

constexpr int EIGHT = 8;  // columns

template <class F>
struct Eight;

// As if the word changed here: what follows from it is made anew, instead of being kept in
// registers over a loop.
__device__ __forceinline__ void renew(unsigned& word) {
#ifndef VP_EMULATION
  asm volatile("" : "+r"(word));
#endif
}

// A block is two bytes of scale and 32 of values, so a word may begin at an odd half of one.
template <>
struct Eight<formats::Q8_0> {
  struct Raw {
    unsigned low, high, scale;
  };
  // at: the first of the eight, in the row that begins at `row`.
  static __device__ __forceinline__ Raw read(const std::uint8_t* row, int at) {
    const std::uint8_t* block = row + at / 32 * 34;
    const unsigned short* bits = reinterpret_cast<const unsigned short*>(block + 2 + at % 32);
    return {bits[0] | static_cast<unsigned>(bits[1]) << 16,
            bits[2] | static_cast<unsigned>(bits[3]) << 16,
            *reinterpret_cast<const unsigned short*>(block)};
  }
  // The same in fewer loads, of a block that begins at a whole word or, is_odd, at the second half
  // of one: what was asked for, and Raw of it.
  struct Asked {
    unsigned words[3], scale;
  };
  static __device__ __forceinline__ Asked ask(const std::uint8_t* block, int at, bool is_odd) {
    const unsigned* from = reinterpret_cast<const unsigned*>(block + (is_odd ? -2 : 0) + at);
    return {{from[0], from[1], from[2]}, *reinterpret_cast<const unsigned short*>(block)};
  }
  static __device__ __forceinline__ Raw found(const Asked& from, bool is_odd) {
    const unsigned pick = is_odd ? 0x7654 : 0x5432;
    return {__byte_perm(from.words[0], from.words[1], pick),
            __byte_perm(from.words[1], from.words[2], pick), from.scale};
  }
  // The sum over the eight of weight times x is factor(raw) times that with these values.
  static __device__ __forceinline__ void values(const Raw& raw, float (&out)[EIGHT]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // 2^23 + 128 + q, by its bits
      out[i] = byte(raw.low ^ 0x80808080u, i);
      out[4 + i] = byte(raw.high ^ 0x80808080u, i);
    }
  }
  static __device__ __forceinline__ float factor(const Raw& raw) { return half_value(raw.scale); }
  static __device__ __forceinline__ void renew(Raw& raw) {
    voltapile::renew(raw.low), voltapile::renew(raw.high), voltapile::renew(raw.scale);
  }

 private:
  static __device__ __forceinline__ float byte(unsigned word, int i) {
    return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440 | i)) - 8388736.0f;
  }
};

template <>
struct Eight<formats::F32> {
  struct Raw {
    float4 low, high;
  };
  using Asked = Raw;
  static __device__ __forceinline__ Raw ask(const std::uint8_t* row, int at, bool) {
    return read(row, at);
  }
  static __device__ __forceinline__ Raw found(const Raw& from, bool) { return from; }
  static __device__ __forceinline__ Raw read(const std::uint8_t* row, int at) {
    const float4* from = reinterpret_cast<const float4*>(row + 4 * at);
    return {from[0], from[1]};
  }
  static __device__ __forceinline__ void values(const Raw& raw, float (&out)[EIGHT]) {
    out[0] = raw.low.x, out[1] = raw.low.y, out[2] = raw.low.z, out[3] = raw.low.w;
    out[4] = raw.high.x, out[5] = raw.high.y, out[6] = raw.high.z, out[7] = raw.high.w;
  }
  static __device__ __forceinline__ float factor(const Raw&) { return 1.0f; }
  static __device__ __forceinline__ void renew(Raw&) {}
};

// Two bytes a value, as IS_BRAIN tells.
template <bool IS_BRAIN>
struct EightHalves {
  struct Raw {
    uint4 words;
  };
  using Asked = Raw;
  static __device__ __forceinline__ Raw ask(const std::uint8_t* row, int at, bool) {
    return read(row, at);
  }
  static __device__ __forceinline__ Raw found(const Raw& from, bool) { return from; }
  static __device__ __forceinline__ Raw read(const std::uint8_t* row, int at) {
    return {*reinterpret_cast<const uint4*>(row + 2 * at)};
  }
  static __device__ __forceinline__ void values(const Raw& raw, float (&out)[EIGHT]) {
    const unsigned words[4] = {raw.words.x, raw.words.y, raw.words.z, raw.words.w};
#pragma unroll
    for (int i = 0; i < EIGHT; ++i) {
      const unsigned bits = words[i / 2] >> (i % 2 * 16) & 0xffff;
      out[i] = IS_BRAIN ? __uint_as_float(bits << 16) : half_value(bits);
    }
  }
  static __device__ __forceinline__ float factor(const Raw&) { return 1.0f; }
  static __device__ __forceinline__ void renew(Raw& raw) {
    voltapile::renew(raw.words.x), voltapile::renew(raw.words.y);
    voltapile::renew(raw.words.z), voltapile::renew(raw.words.w);
  }
};
template <>
struct Eight<formats::F16> : EightHalves<false> {};
template <>
struct Eight<formats::BF16> : EightHalves<true> {};

template <class F>
__device__ __forceinline__ long long row_bytes(int columns) {
  return static_cast<long long>(columns) / F::length * F::bytes;
}

}  // namespace voltapile
