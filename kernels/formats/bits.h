// The bit tricks that every format shares: half and brain floats, nibbles, 6-bit scales.
//
// Formats describe GGUF quantisations for C++ and CUDA alike: layout, constants and a scalar
// unpack, which is the truth and exact to the bit (-ffp-contract=off, -fmad=false). Nothing here
// knows about vectors, kernels or files. Little-endian hosts only.
#pragma once
#include <cstdint>

#if defined(__CUDACC__)
#define VP_HD __host__ __device__ __forceinline__
#define VP_TABLE static __device__ const
#else
#define VP_HD inline
#define VP_TABLE inline constexpr
#endif

namespace voltapile::formats {

VP_HD float from_bits(std::uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
#endif
}

VP_HD std::uint32_t u16_at(const std::uint8_t* p) {
  return static_cast<std::uint32_t>(p[0]) | static_cast<std::uint32_t>(p[1]) << 8;
}

VP_HD std::uint32_t u32_at(const std::uint8_t* p) { return u16_at(p) | u16_at(p + 2) << 16; }

VP_HD float half_to_float(std::uint32_t h) {
  const std::uint32_t sign = (h & 0x8000) << 16, exponent = h >> 10 & 31, mantissa = h & 1023;
  if (exponent == 0) {  // zero and denormals: mantissa * 2^-24 is exact
    const float value = static_cast<float>(mantissa) * 5.9604644775390625e-8f;
    return sign ? -value : value;
  }
  const std::uint32_t wide = exponent == 31 ? 255 : exponent + 112;
  return from_bits(sign | wide << 23 | mantissa << 13);
}

VP_HD float half_at(const std::uint8_t* p) { return half_to_float(u16_at(p)); }

VP_HD int nibble(std::uint32_t byte, int high) { return byte >> (4 * high) & 15; }

// Scale and minimum of group g (0..7) in the 12 bytes of Q4_K and Q5_K.
VP_HD int k_scale(const std::uint8_t* s, int g) {
  return g < 4 ? s[g] & 63 : (s[g + 4] & 15) | (s[g - 4] >> 6) << 4;
}
VP_HD int k_min(const std::uint8_t* s, int g) {
  return g < 4 ? s[g + 4] & 63 : s[g + 4] >> 4 | (s[g] >> 6) << 4;
}

// The sixteen values of IQ4_NL and IQ4_XS, and of FP4 (e2m1, doubled).
VP_HD int iq4_value(int i) {
  const std::int8_t values[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                  1,    13,   25,  38,  53,  69,  89,  113};
  return values[i];
}
VP_HD int fp4_value(int i) {
  const std::int8_t values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
  return values[i];
}

}  // namespace voltapile::formats
