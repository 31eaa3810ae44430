// Vectors of AVX-512 (F, BW, DQ, VL, VNNI): 16 lanes, u8 x s8 products by vpdpbusd.
//
// An activation integer a is 256 high + low with both halves signed bytes, hence the range.
// In a record: 32 high bytes, then 32 low bytes.
#pragma once
#include <immintrin.h>

#include <cstdint>

#include "isa_table.h"

namespace voltapile::avx512 {

using I = __m512i;
using F = __m512;

struct Weights {
  I w[8];
};

struct V {
  static constexpr int lanes = 16, float_tokens = 4;
  static constexpr float range = 32639;  // 127 * 256 + 127

  static F zero() { return _mm512_setzero_ps(); }
  static F set(float x) { return _mm512_set1_ps(x); }
  static F broadcast(const std::uint8_t* p) {
    return _mm512_castsi512_ps(_mm512_set1_epi32(word(p)));
  }
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F min(F a, F b) { return _mm512_min_ps(a, b); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static F round(F x) { return _mm512_roundscale_ps(x, 0); }
  static float sum(F x) {
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
  }

  static I bits(std::uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
  static I and_(I a, I b) { return _mm512_and_si512(a, b); }
  static I or_(I a, I b) { return _mm512_or_si512(a, b); }
  static I xor_(I a, I b) { return _mm512_xor_si512(a, b); }
  static I sub_int(I a, I b) { return _mm512_sub_epi32(a, b); }
  static I mul_int(I a, I b) { return _mm512_mullo_epi32(a, b); }
  template <int n> static I shr(I x) { return n ? _mm512_srli_epi32(x, n) : x; }
  template <int n> static I shl(I x) { return n ? _mm512_slli_epi32(x, n) : x; }
  static I shift_right_signed(I x, int n) { return _mm512_srai_epi32(x, n); }
  static I to_int(F x) { return _mm512_cvtps_epi32(x); }
  static F to_float(I x) { return _mm512_cvtepi32_ps(x); }
  static F power_of_2(I n) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, bits(127)), 23));
  }
  static F half(I x) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(x)); }
  static I lookup(const std::uint8_t* table, I x) {
    const __m128i t = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(t), x);
  }

  static int word(const std::uint8_t* p) {
    int x;
    __builtin_memcpy(&x, p, 4);
    return x;
  }

  static __m128i load16(const std::uint8_t* p) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  }
  VP_INLINE static __m256i pair(const std::uint8_t* p, std::int64_t stride) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(load16(p)), load16(p + stride), 1);
  }
  // Rows r, r + 4, r + 8, r + 12 in the four quarters.
  VP_INLINE static I quarters(const std::uint8_t* p, std::int64_t stride) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(pair(p, 4 * stride)),
                              pair(p + 8 * stride, 4 * stride), 1);
  }
  VP_INLINE static void load4(const std::uint8_t* p, std::int64_t stride, I* out) {
    const I a = quarters(p, stride), b = quarters(p + stride, stride);
    const I c = quarters(p + 2 * stride, stride), d = quarters(p + 3 * stride, stride);
    const I ab = _mm512_unpacklo_epi32(a, b), cd = _mm512_unpacklo_epi32(c, d);
    const I ab2 = _mm512_unpackhi_epi32(a, b), cd2 = _mm512_unpackhi_epi32(c, d);
    out[0] = _mm512_unpacklo_epi64(ab, cd);
    out[1] = _mm512_unpackhi_epi64(ab, cd);
    out[2] = _mm512_unpacklo_epi64(ab2, cd2);
    out[3] = _mm512_unpackhi_epi64(ab2, cd2);
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
    return {{w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7]}};
  }
  // minus holds the negative sum of the integers.
  template <int zero> static I product_of(const std::uint8_t* minus) {
    if constexpr (zero < 0) return _mm512_setzero_si512();
    else return shl<__builtin_ctz(zero)>(_mm512_set1_epi32(word(minus)));
  }
  // Exact: |low sum|, |high sum| <= 32 * 255 * 128 < 2^21, and their mix is below 2^29.
  template <int from, int to, int zero>
  VP_INLINE static I dot(const Weights& weights, const std::uint8_t* x,
                         const std::uint8_t* minus) {
    I high = _mm512_setzero_si512(), low = product_of<zero>(minus);
#pragma GCC unroll 8
    for (int j = from; j < to; ++j) {
      high = _mm512_dpbusd_epi32(high, weights.w[j], _mm512_set1_epi32(word(x + 4 * j)));
      low = _mm512_dpbusd_epi32(low, weights.w[j], _mm512_set1_epi32(word(x + 32 + 4 * j)));
    }
    return _mm512_add_epi32(_mm512_slli_epi32(high, 8), low);
  }

  static __mmask16 first(std::int64_t n) {
    return static_cast<__mmask16>((1 << n) - 1);
  }
  static F load_part(const std::uint8_t* p, std::int64_t n) {
    return n >= lanes ? _mm512_loadu_ps(p) : _mm512_maskz_loadu_ps(first(n), p);
  }
  static __m256i load_shorts(const std::uint8_t* p, std::int64_t n) {
    return n >= lanes ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))
                      : _mm256_maskz_loadu_epi16(first(n), p);
  }
  static F half_part(const std::uint8_t* p, std::int64_t n) {
    return _mm512_cvtph_ps(load_shorts(p, n));
  }
  static F brain_part(const std::uint8_t* p, std::int64_t n) {
    const I wide = _mm512_cvtepu16_epi32(load_shorts(p, n));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
  }

  // The largest magnitude of 32 values; compared as integers, so that a NaN is the largest.
  static float largest(const float* x) {
    const I mask = bits(0x7fffffff);
    const I a = and_(_mm512_loadu_si512(x), mask), b = and_(_mm512_loadu_si512(x + 16), mask);
    return _mm_cvtss_f32(_mm_castsi128_ps(
        _mm_cvtsi32_si128(_mm512_reduce_max_epi32(_mm512_max_epi32(a, b)))));
  }
  static void store_integers(const float* x, float inverse, std::uint8_t* out, int* sums) {
    for (int i = 0; i < 2; ++i) {
      const I a = to_int(mul(load(x + 16 * i), set(inverse)));
      const I high = _mm512_srai_epi32(_mm512_add_epi32(a, bits(128)), 8);
      store16(out + 16 * i, high);
      store16(out + 32 + 16 * i, a);  // the low byte is what is left
      sums[i] = _mm512_reduce_add_epi32(a);
    }
  }
  static void store16(std::uint8_t* p, I x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x));
  }
};

}  // namespace voltapile::avx512
