// Vectors of four lanes in plain C++, for any little-endian CPU (GCC's and Clang's vector types).
//
// Weights' bytes are widened to pairs of 16-bit integers; a record holds the integers of columns
// (4j, 4j + 2), (4j + 1, 4j + 3) for j = 0..7. Float products are rounded before they are added.
#pragma once
#include <cstdint>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "isa_table.h"

namespace voltapile::plain {

typedef std::int32_t I __attribute__((vector_size(16)));
typedef std::uint32_t U __attribute__((vector_size(16)));
typedef float F __attribute__((vector_size(16)));

struct Weights {
  I even[8], odd[8];
};

struct V {
  static constexpr int lanes = 4, float_tokens = 2;
  static constexpr float range = 32767;

  static F zero() { return set(0.f); }
  static F set(float x) { return F{x, x, x, x}; }
  static F broadcast(const std::uint8_t* p) { return set(read<float>(p)); }
  static F load(const float* p) { return read<F>(p); }
  static void store(float* p, F x) { __builtin_memcpy(p, &x, sizeof x); }
  static F add(F a, F b) { return a + b; }
  static F sub(F a, F b) { return a - b; }
  static F mul(F a, F b) { return a * b; }
  static F div(F a, F b) { return a / b; }
  static F fma(F a, F b, F c) { return a * b + c; }
  static F min(F a, F b) { return a < b ? a : b; }
  static F max(F a, F b) { return a > b ? a : b; }
  static F round(F x) { return to_float(to_int(x)); }
  static float sum(F x) { return (x[0] + x[2]) + (x[1] + x[3]); }

  static I bits(std::uint32_t x) { return (I)U{x, x, x, x}; }
  static I and_(I a, I b) { return a & b; }
  static I or_(I a, I b) { return a | b; }
  static I xor_(I a, I b) { return a ^ b; }
  static I sub_int(I a, I b) { return a - b; }
  static I mul_int(I a, I b) { return (I)((U)a * (U)b); }
  template <int n> static I shr(I x) { return (I)((U)x >> n); }
  template <int n> static I shl(I x) { return (I)((U)x << n); }
  static I shift_right_signed(I x, int n) { return x >> n; }
  // To nearest even for |x| < 2^22; anything for others.
  static I to_int(F x) { return (I)((U)(x + set(12582912.f)) - (U)bits(0x4b400000)); }
  static F to_float(I x) { return __builtin_convertvector(x, F); }
  static F power_of_2(I n) { return (F)shl<23>((I)((U)n + (U)bits(127))); }
  // The exponent is moved by a product, which is exact for denormals too.
  static F half(I x) {
    const I magnitude = shl<13>(x & bits(0x7fff)), sign = shl<16>(x & bits(0x8000));
    const F scaled = (F)magnitude * set(5.192296858534828e33f);  // 2^112
    const I endless = magnitude | bits(0x7f800000);
    const I value = magnitude >= bits(0x0f800000) ? endless : (I)scaled;
    return (F)(value | sign);
  }
  static I lookup(const std::uint8_t* table, I x) {
    std::uint8_t bytes[16];
    __builtin_memcpy(bytes, &x, 16);
    for (std::uint8_t& byte : bytes) byte = table[byte];
    return read<I>(bytes);
  }

  template <class T> static T read(const void* p) {
    T x;
    __builtin_memcpy(&x, p, sizeof x);
    return x;
  }
  static I load1(const std::uint8_t* p, std::int64_t stride) {
    return I{read<std::int32_t>(p), read<std::int32_t>(p + stride),
             read<std::int32_t>(p + 2 * stride), read<std::int32_t>(p + 3 * stride)};
  }
  static void load4(const std::uint8_t* p, std::int64_t stride, I* out) {
    for (int j = 0; j < 4; ++j) out[j] = load1(p + 4 * j, stride);
  }
  static void prefetch(const std::uint8_t*, int) {}

  static Weights prepare(const I* w) {
    Weights out;
    for (int j = 0; j < 8; ++j) {
      out.even[j] = w[j] & bits(0x00ff00ff);
      out.odd[j] = shr<8>(w[j]) & bits(0x00ff00ff);
    }
    return out;
  }
  // Both products of the pairs in w and x, added.
  static I pair_products(I w, std::int32_t x) {
#if defined(__SSE2__)  // which has no other product of integers
    return (I)_mm_madd_epi16((__m128i)w, _mm_set1_epi32(x));
#else
    return (w & bits(0xffff)) * static_cast<std::int16_t>(x) + (w >> 16) * (x >> 16);
#endif
  }
  // minus holds the negative sum of the integers. Exact: 32 * 255 * 32767 < 2^28.
  template <int from, int to, int zero>
  static I dot(const Weights& w, const std::uint8_t* x, const std::uint8_t* minus) {
    I even = bits(0), odd = even;
    if constexpr (zero > 0)
      even = shl<__builtin_ctz(zero)>(bits(read<std::uint32_t>(minus)));
#pragma GCC unroll 8
    for (int j = from; j < to; ++j) {
      even += pair_products(w.even[j], read<std::int32_t>(x + 8 * j));
      odd += pair_products(w.odd[j], read<std::int32_t>(x + 8 * j + 4));
    }
    return even + odd;
  }

  static F load_part(const std::uint8_t* p, std::int64_t n) {
    F x = zero();
    __builtin_memcpy(&x, p, n >= lanes ? sizeof x : static_cast<std::size_t>(4 * n));
    return x;
  }
  static I load_shorts(const std::uint8_t* p, std::int64_t n) {
    std::uint16_t s[lanes] = {};
    __builtin_memcpy(s, p, n >= lanes ? sizeof s : static_cast<std::size_t>(2 * n));
    return I{s[0], s[1], s[2], s[3]};
  }
  static F half_part(const std::uint8_t* p, std::int64_t n) { return half(load_shorts(p, n)); }
  static F brain_part(const std::uint8_t* p, std::int64_t n) {
    return (F)shl<16>(load_shorts(p, n));
  }

  // The largest magnitude of 32 values; compared as integers, so that a NaN is the largest.
  static float largest(const float* x) {
    I most = bits(0);
    for (int i = 0; i < 32; i += lanes) {
      const I magnitude = read<I>(x + i) & bits(0x7fffffff);
      most = most > magnitude ? most : magnitude;
    }
    std::int32_t all = 0;
    for (int i = 0; i < lanes; ++i) all = all > most[i] ? all : most[i];
    return read<float>(&all);
  }
  static void store_integers(const float* x, float inverse, std::uint8_t* out, int* sums) {
    for (int half = 0; half < 2; ++half) {
      I sum = bits(0);
      for (int i = 16 * half; i < 16 * half + 16; i += lanes) {
        const I a = to_int(load(x + i) * set(inverse));
        sum += a;
        const std::int16_t pairs[4] = {
            static_cast<std::int16_t>(a[0]), static_cast<std::int16_t>(a[2]),
            static_cast<std::int16_t>(a[1]), static_cast<std::int16_t>(a[3])};
        __builtin_memcpy(out + 2 * i, pairs, sizeof pairs);
      }
      sums[half] = sum[0] + sum[1] + sum[2] + sum[3];
    }
  }
};

}  // namespace voltapile::plain
