// Vectors of AVX2 with FMA and F16C: 8 lanes, i16 x i16 products by vpmaddwd.
//
// The weights' bytes are widened once into even and odd columns; a record holds the integers of
// columns (4j, 4j + 2), (4j + 1, 4j + 3) for j = 0..7.
#pragma once
#include <immintrin.h>

#include <cstdint>

#include "isa_table.h"

namespace voltapile::avx2 {

using I = __m256i;
using F = __m256;

struct Weights {
  I even[8], odd[8];
};

struct V {
  static constexpr int lanes = 8, float_tokens = 2;
  static constexpr float range = 32767;

  static F zero() { return _mm256_setzero_ps(); }
  static F set(float x) { return _mm256_set1_ps(x); }
  static F broadcast(const std::uint8_t* p) {
    return _mm256_castsi256_ps(_mm256_set1_epi32(word(p)));
  }
  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, F x) { _mm256_storeu_ps(p, x); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F min(F a, F b) { return _mm256_min_ps(a, b); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  static F round(F x) { return _mm256_round_ps(x, 8); }  // to nearest, quietly
  static float sum(F x) {
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
  }

  static I bits(std::uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
  static I and_(I a, I b) { return _mm256_and_si256(a, b); }
  static I or_(I a, I b) { return _mm256_or_si256(a, b); }
  static I xor_(I a, I b) { return _mm256_xor_si256(a, b); }
  static I sub_int(I a, I b) { return _mm256_sub_epi32(a, b); }
  static I mul_int(I a, I b) { return _mm256_mullo_epi32(a, b); }
  template <int n> static I shr(I x) { return n ? _mm256_srli_epi32(x, n) : x; }
  template <int n> static I shl(I x) { return n ? _mm256_slli_epi32(x, n) : x; }
  static I shift_right_signed(I x, int n) { return _mm256_srai_epi32(x, n); }
  static I to_int(F x) { return _mm256_cvtps_epi32(x); }
  static F to_float(I x) { return _mm256_cvtepi32_ps(x); }
  static F power_of_2(I n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, bits(127)), 23));
  }
  static F half(I x) {
    const I low = and_(x, bits(0xffff));
    return _mm256_cvtph_ps(
        _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1)));
  }
  static I lookup(const std::uint8_t* table, I x) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load16(table)), x);
  }

  static int word(const std::uint8_t* p) {
    int x;
    __builtin_memcpy(&x, p, 4);
    return x;
  }

  static __m128i load16(const std::uint8_t* p) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  }
  // Rows r and r + 4 in the two halves.
  VP_INLINE static I halves(const std::uint8_t* p, std::int64_t stride) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(load16(p)), load16(p + 4 * stride), 1);
  }
  VP_INLINE static void load4(const std::uint8_t* p, std::int64_t stride, I* out) {
    const I a = halves(p, stride), b = halves(p + stride, stride);
    const I c = halves(p + 2 * stride, stride), d = halves(p + 3 * stride, stride);
    const I ab = _mm256_unpacklo_epi32(a, b), cd = _mm256_unpacklo_epi32(c, d);
    const I ab2 = _mm256_unpackhi_epi32(a, b), cd2 = _mm256_unpackhi_epi32(c, d);
    out[0] = _mm256_unpacklo_epi64(ab, cd);
    out[1] = _mm256_unpackhi_epi64(ab, cd);
    out[2] = _mm256_unpacklo_epi64(ab2, cd2);
    out[3] = _mm256_unpackhi_epi64(ab2, cd2);
  }
  VP_INLINE static I load1(const std::uint8_t* p, std::int64_t stride) {
    I out[4];
    load4(p, stride, out);
    return out[0];
  }
  // Volatile, or the compiler gathers the prefetches of a whole step in one place.
  VP_INLINE static void prefetch(const std::uint8_t* p, int bytes) {
    for (int i = 0; i < bytes; i += 64) asm volatile("prefetcht1 %0" : : "m"(p[i]));
  }

  VP_INLINE static Weights prepare(const I* w) {
    Weights out;
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
      out.even[j] = and_(w[j], bits(0x00ff00ff));
      out.odd[j] = _mm256_srli_epi16(w[j], 8);
    }
    return out;
  }
  // minus holds the negative sum of the integers.
  template <int zero> static I product_of(const std::uint8_t* minus) {
    if constexpr (zero < 0) return _mm256_setzero_si256();
    else return shl<__builtin_ctz(zero)>(_mm256_set1_epi32(word(minus)));
  }
  // Exact: 32 * 255 * 32767 < 2^28.
  template <int from, int to, int zero>
  VP_INLINE static I dot(const Weights& w, const std::uint8_t* x, const std::uint8_t* minus) {
    I even = product_of<zero>(minus), odd = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int j = from; j < to; ++j) {
      const I xe = _mm256_set1_epi32(word(x + 8 * j)), xo = _mm256_set1_epi32(word(x + 8 * j + 4));
      even = _mm256_add_epi32(even, _mm256_madd_epi16(w.even[j], xe));
      odd = _mm256_add_epi32(odd, _mm256_madd_epi16(w.odd[j], xo));
    }
    return _mm256_add_epi32(even, odd);
  }

  static F load_part(const std::uint8_t* p, std::int64_t n) {
    if (n >= lanes) return _mm256_loadu_ps(reinterpret_cast<const float*>(p));
    float part[lanes] = {};
    __builtin_memcpy(part, p, static_cast<std::size_t>(4 * n));
    return _mm256_loadu_ps(part);
  }
  static __m128i load_shorts(const std::uint8_t* p, std::int64_t n) {
    if (n >= lanes) return load16(p);
    std::uint8_t part[2 * lanes] = {};
    __builtin_memcpy(part, p, static_cast<std::size_t>(2 * n));
    return load16(part);
  }
  static F half_part(const std::uint8_t* p, std::int64_t n) {
    return _mm256_cvtph_ps(load_shorts(p, n));
  }
  static F brain_part(const std::uint8_t* p, std::int64_t n) {
    const I wide = _mm256_cvtepu16_epi32(load_shorts(p, n));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
  }

  // The largest magnitude of 32 values; compared as integers, so that a NaN is the largest.
  static float largest(const float* x) {
    I most = _mm256_setzero_si256();
    for (int i = 0; i < 4; ++i)
      most = _mm256_max_epi32(
          most, _mm256_castps_si256(_mm256_and_ps(
                    load(x + 8 * i), _mm256_castsi256_ps(bits(0x7fffffff)))));
    __m128i q = _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    q = _mm_max_epi32(q, _mm_shuffle_epi32(q, 0x4e));
    q = _mm_max_epi32(q, _mm_shuffle_epi32(q, 0xb1));
    return _mm_cvtss_f32(_mm_castsi128_ps(q));
  }
  static void store_integers(const float* x, float inverse, std::uint8_t* out, int* sums) {
    for (int i = 0; i < 4; ++i) {
      const I a = to_int(mul(load(x + 8 * i), set(inverse)));
      // words (a0 a2) (a1 a3) of each half
      const I later = _mm256_slli_epi32(_mm256_shuffle_epi32(a, 0x4e), 16);
      const I pairs = _mm256_blend_epi16(a, later, 0xaa);
      _mm_storel_epi64(reinterpret_cast<__m128i*>(out + 16 * i), _mm256_castsi256_si128(pairs));
      _mm_storel_epi64(reinterpret_cast<__m128i*>(out + 16 * i + 8),
                       _mm256_extracti128_si256(pairs, 1));
      sums[i / 2] = (i % 2 ? sums[i / 2] : 0) + sum_int(a);
    }
  }
  static int sum_int(I x) {
    __m128i q = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    q = _mm_add_epi32(q, _mm_shuffle_epi32(q, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(q, _mm_shuffle_epi32(q, 0xb1)));
  }
};

}  // namespace voltapile::avx2
