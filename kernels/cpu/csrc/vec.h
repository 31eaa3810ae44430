// Vectors of W floats for the instruction set that the including file is compiled for.
//
// Everything lives in namespace VOLTAPILE_ISA and uses no std templates, so that no function
// compiled for a newer CPU is linked in place of a common one.
#pragma once
#include <cstdint>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace voltapile {
namespace VOLTAPILE_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float Vec __attribute__((vector_size(4 * W)));
typedef std::int32_t Int __attribute__((vector_size(4 * W)));
typedef float LooseVec __attribute__((vector_size(4 * W), aligned(4), may_alias));

inline Vec load(const float* p) { return *reinterpret_cast<const LooseVec*>(p); }
inline void store(float* p, Vec x) { *reinterpret_cast<LooseVec*>(p) = x; }

inline Vec splat(float x) {
#if defined(__AVX512F__)
  return (Vec)_mm512_set1_ps(x);
#elif defined(__AVX2__)
  return (Vec)_mm256_set1_ps(x);
#else
  return Vec{x, x, x, x};
#endif
}

// a * b + c, rounded once where the instruction set does.
inline Vec madd(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

inline Vec bits_to_vec(Int x) { return (Vec)x; }
inline Int vec_to_bits(Vec x) { return (Int)x; }

// These hand a NaN in x on.
inline Vec at_most(Vec x, Vec limit) { return x > limit ? limit : x; }
inline Vec at_least(Vec x, Vec limit) { return x < limit ? limit : x; }

inline float sum_lanes(Vec x) {
  float part[W];
  store(part, x);
  for (int half = W / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) part[i] += part[i + half];
  }
  return part[0];
}

inline float max_lanes(Vec x) {
  float part[W];
  store(part, x);
  float best = part[0];
  for (int i = 1; i < W; ++i) best = part[i] > best ? part[i] : best;
  return best;
}

// e^x within 2 units of the last place; 0 below -86.9, where results would leave the normals.
inline Vec exp_vec(Vec x) {
  const Vec low = splat(-86.9f), magic = splat(12582912.0f);  // 1.5 * 2^23: rounds to an integer
  const Vec y = at_most(at_least(x, low), splat(88.0f));
  const Vec shifted = madd(y, splat(1.44269504f), magic);
  const Vec n = shifted - magic;
  Vec r = madd(n, splat(-0.693359375f), y);
  r = madd(n, splat(2.12194440e-4f), r);
  Vec p = splat(1.9875691500e-4f);
  p = madd(p, r, splat(1.3981999507e-3f));
  p = madd(p, r, splat(8.3334519073e-3f));
  p = madd(p, r, splat(4.1665795894e-2f));
  p = madd(p, r, splat(1.6666665459e-1f));
  p = madd(p, r, splat(5.0000001201e-1f));
  p = madd(p, r * r, r) + splat(1.0f);
  const Vec scaled = bits_to_vec(vec_to_bits(p) + (vec_to_bits(shifted) << 23));
  const Vec result = y != y ? y : scaled;  // a NaN's exponent bits must not be added to
  return x < low ? splat(0.0f) : result;
}

inline float exp_one(float x) {
  float part[W];
  store(part, exp_vec(splat(x)));
  return part[0];
}

// --- narrow types -----------------------------------------------------------------------------

inline Vec load_half(const std::uint16_t* p) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
  return (Vec)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  Int h;
  for (int i = 0; i < W; ++i) h[i] = p[i];
  const Int special = (h & 0x7c00) == 0x7c00;
  Int value = vec_to_bits(bits_to_vec((h & 0x7fff) << 13) * splat(0x1p112f));
  value |= (special & 0x7f800000) | ((h & 0x8000) << 16);
  return bits_to_vec(value);
#endif
}

inline Vec load_bytes(const std::int8_t* p) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
#elif defined(__AVX2__)
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
#else
  Vec x;
  for (int i = 0; i < W; ++i) x[i] = p[i];
  return x;
#endif
}

inline float half_to_float(std::uint16_t h) {
#if defined(__AVX2__)
  return _cvtsh_ss(h);
#else
  std::uint16_t padded[W] = {h};
  float part[W];
  store(part, load_half(padded));
  return part[0];
#endif
}

// Round to nearest even; what is too large becomes the largest finite half.
inline std::uint16_t to_half(float x) {
  x = x > 65504.0f ? 65504.0f : x;
  x = x < -65504.0f ? -65504.0f : x;
#if defined(__AVX2__)
  return static_cast<std::uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT));
#else
  std::uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  const std::uint32_t sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return static_cast<std::uint16_t>(sign | 0x7e00);
  if (magnitude < 0x38800000) {  // subnormal: let the float adder round at 2^-24
    float y;
    __builtin_memcpy(&y, &magnitude, 4);
    y += 0.5f;
    __builtin_memcpy(&bits, &y, 4);
    return static_cast<std::uint16_t>(sign | (bits - 0x3f000000));
  }
  const std::uint32_t rounded = magnitude + 0xfff + ((magnitude >> 13) & 1);
  return static_cast<std::uint16_t>(sign | ((rounded - 0x38000000) >> 13));
#endif
}

}  // namespace
}  // namespace VOLTAPILE_ISA
}  // namespace voltapile
