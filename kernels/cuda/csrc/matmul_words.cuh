// What lanes read of chunks in shared memory: words that begin anywhere, the head of a block of
// Q4_K; and halves two at a time. Knows neither tokens nor tensor cores but their units.
#pragma once
#include "mma.cuh"

namespace voltapile {

#ifndef VP_EMULATION
__device__ __forceinline__ __half2 pair_of(unsigned bits) {
  return *reinterpret_cast<const __half2*>(&bits);
}
__device__ __forceinline__ unsigned half_mul(unsigned a, unsigned b) {
  const __half2 product = __hmul2(pair_of(a), pair_of(b));
  return *reinterpret_cast<const unsigned*>(&product);
}
__device__ __forceinline__ unsigned half_fma(unsigned a, unsigned b, unsigned c) {
  const __half2 sum = __hfma2(pair_of(a), pair_of(b), pair_of(c));
  return *reinterpret_cast<const unsigned*>(&sum);
}
#endif

constexpr unsigned SHIFT_OF_PAIRS = 0xe480e480;  // -1152 twice: 1024 + 128

// Words of shared memory that begin at a multiple of two bytes, the same one for a whole chunk.
// Each is made of two that begin at multiples of four, of which the second one may be for nothing.
// Behind a tile something may be on its way, but nothing is read there: of the rows of Q6_K, the
// last one begins between such multiples.
struct Words {
  const std::uint8_t* memory;  // at a multiple of four
  unsigned shift;

  __device__ __forceinline__ Words() {}
  __device__ __forceinline__ Words(const std::uint8_t* memory, int at)
      : memory(memory + (at & ~3)), shift(8 * (at & 3)) {}
  // Those that come a multiple of four later.
  __device__ __forceinline__ Words after(int bytes) const {
    Words found = *this;
    found.memory += bytes;
    return found;
  }
  // offset: a multiple of four, so that nothing but what is known of it is added.
  __device__ __forceinline__ unsigned at(int offset) const {
    const unsigned* words = reinterpret_cast<const unsigned*>(memory + offset);
    return __funnelshift_rc(words[0], words[1], shift);
  }
};
// The same, but the first of the two may be for nothing. In a tile of Q8_0, the first word begins
// between multiples of four, and the last one ends where the tile does.
struct EndWords : Words {
  __device__ __forceinline__ EndWords() {}
  __device__ __forceinline__ EndWords(const std::uint8_t* memory, int at)
      : Words(memory, at - 2) { shift += 16; }
};

// The first 16 bytes of a block of Q4_K: d and the least, then six bits of each of 16 numbers.
struct Heads {
  uint4 v;

  // Byte `group` % 4 of four scales, for even groups; over 16 for odd ones.
  static __device__ __forceinline__ float scale_of(unsigned four, int group) {
    // In a register, so that the selection is part of the instruction; no block is that large.
    const unsigned magic = (group & 1 ? 0x49000000u : 0x4b000000u) | blockDim.x >> 16;
    return __uint_as_float(__byte_perm(four, magic, 0x7440 + group % 4)) -
           (group & 1 ? 524288.0f : 8388608.0f);
  }
  // Any byte, as the last one of a number from `magic` on: 2^23, or 2^19 for what is 16 times it.
  static __device__ __forceinline__ float number_at(unsigned four, int byte, unsigned magic) {
    return __uint_as_float(__byte_perm(four, magic, 0x7440 + byte)) - __uint_as_float(magic);
  }
  // Of groups 4 h .. 4 h + 3, a byte each. Without a branch, since lanes have either h.
  __device__ __forceinline__ unsigned scales(int h) const {
    return ((h ? v.w : v.y) & 0x0f0f0f0f) | (v.y >> 2 * h & 0x30303030);
  }
  __device__ __forceinline__ unsigned minima(int h) const {
    return ((h ? v.w >> 4 : v.z) & 0x0f0f0f0f) | (v.z >> 2 * h & 0x30303030);
  }
  // Minima of groups 2 p and 2 p + 1, and again times 2^-11: one product with the tokens' sums.
  __device__ __forceinline__ Unit minima_of(int p) const {
    const unsigned pair = __byte_perm(minima(p >> 1), 0x64646464, p & 1 ? 0x4342 : 0x4140);
    const unsigned two = half_add(pair, 0xe400e400);
    return {{two, half_mul(two, 0x10001000), 0, 0}};
  }
};

}  // namespace voltapile
