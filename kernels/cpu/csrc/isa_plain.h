// Vectors in plain C++, for any little-endian CPU: arrays of 8 lanes that compilers vectorise.
//
// A record holds the 32 integers in order. Products of floats are rounded before they are added.
#pragma once
#include <cstdint>

#include "../../formats/bits.h"
#include "isa_table.h"

namespace voltapile::plain {

constexpr int kLanes = 8;

struct I {
  std::int32_t v[kLanes];
};
struct F {
  float v[kLanes];
};
struct Weights {
  std::int16_t w[32][kLanes];  // [column][row]
};

template <class Out, class Op>
inline Out each(Op op) {
  Out out;
  for (int i = 0; i < kLanes; ++i) out.v[i] = op(i);
  return out;
}

struct V {
  static constexpr int lanes = kLanes, float_tokens = 1;
  static constexpr float range = 32767;

  static F zero() { return set(0.f); }
  static F set(float x) {
    return each<F>([&](int) { return x; });
  }
  static F broadcast(const std::uint8_t* p) { return set(formats::from_bits(word(p))); }
  static F load(const float* p) {
    return each<F>([&](int i) { return p[i]; });
  }
  static void store(float* p, const F& x) {
    for (int i = 0; i < lanes; ++i) p[i] = x.v[i];
  }
  static F add(const F& a, const F& b) {
    return each<F>([&](int i) { return a.v[i] + b.v[i]; });
  }
  static F sub(const F& a, const F& b) {
    return each<F>([&](int i) { return a.v[i] - b.v[i]; });
  }
  static F mul(const F& a, const F& b) {
    return each<F>([&](int i) { return a.v[i] * b.v[i]; });
  }
  static F div(const F& a, const F& b) {
    return each<F>([&](int i) { return a.v[i] / b.v[i]; });
  }
  static F fma(const F& a, const F& b, const F& c) {
    return each<F>([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
  }
  static F min(const F& a, const F& b) {
    return each<F>([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
  }
  static F max(const F& a, const F& b) {
    return each<F>([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
  }
  static F round(const F& x) { return to_float(to_int(x)); }
  static float sum(const F& x) {
    const float* v = x.v;
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
  }

  static I bits(std::uint32_t x) {
    return each<I>([&](int) { return static_cast<std::int32_t>(x); });
  }
  static I and_(const I& a, const I& b) {
    return each<I>([&](int i) { return a.v[i] & b.v[i]; });
  }
  static I or_(const I& a, const I& b) {
    return each<I>([&](int i) { return a.v[i] | b.v[i]; });
  }
  static I xor_(const I& a, const I& b) {
    return each<I>([&](int i) { return a.v[i] ^ b.v[i]; });
  }
  static I sub_int(const I& a, const I& b) {
    return each<I>([&](int i) { return a.v[i] - b.v[i]; });
  }
  static I mul_int(const I& a, const I& b) {
    return each<I>([&](int i) { return static_cast<std::int32_t>(u(a.v[i]) * u(b.v[i])); });
  }
  template <int n> static I shr(const I& x) {
    return each<I>([&](int i) { return static_cast<std::int32_t>(u(x.v[i]) >> n); });
  }
  template <int n> static I shl(const I& x) {
    return each<I>([&](int i) { return static_cast<std::int32_t>(u(x.v[i]) << n); });
  }
  static I shift_right_signed(const I& x, int n) {
    return each<I>([&](int i) { return x.v[i] >> n; });
  }
  // To nearest even for |x| < 2^22; anything for others.
  static std::int32_t nearest(float x) {
    const float shifted = x + 12582912.f;
    std::int32_t bits;
    __builtin_memcpy(&bits, &shifted, 4);
    return static_cast<std::int32_t>(u(bits) - 0x4b400000u);
  }
  static I to_int(const F& x) {
    return each<I>([&](int i) { return nearest(x.v[i]); });
  }
  static F to_float(const I& x) {
    return each<F>([&](int i) { return static_cast<float>(x.v[i]); });
  }
  static F power_of_2(const I& n) {
    return each<F>([&](int i) { return formats::from_bits(u(n.v[i] + 127) << 23); });
  }
  static F half(const I& x) {
    return each<F>([&](int i) { return formats::half_to_float(u(x.v[i]) & 0xffff); });
  }
  static I lookup(const std::uint8_t* table, const I& x) {
    return each<I>([&](int i) {
      const std::uint32_t four = u(x.v[i]);
      std::uint32_t out = 0;
      for (int byte = 0; byte < 32; byte += 8) out |= u(table[four >> byte & 15]) << byte;
      return static_cast<std::int32_t>(out);
    });
  }

  static std::uint32_t u(std::int32_t x) { return static_cast<std::uint32_t>(x); }
  static std::uint32_t word(const std::uint8_t* p) {
    std::uint32_t x;
    __builtin_memcpy(&x, p, 4);
    return x;
  }
  static I load1(const std::uint8_t* p, std::int64_t stride) {
    return each<I>([&](int i) { return static_cast<std::int32_t>(word(p + i * stride)); });
  }
  static void load4(const std::uint8_t* p, std::int64_t stride, I* out) {
    for (int j = 0; j < 4; ++j) out[j] = load1(p + 4 * j, stride);
  }
  static void prefetch(const std::uint8_t*, int) {}

  static Weights prepare(const I* w) {
    Weights out;
    for (int k = 0; k < 32; ++k)
      for (int i = 0; i < lanes; ++i)
        out.w[k][i] = static_cast<std::int16_t>(u(w[k / 4].v[i]) >> (8 * (k % 4)) & 255);
    return out;
  }
  // Exact: 32 * 255 * 32767 < 2^28.
  template <int from, int to>
  static I dot(const Weights& weights, const std::uint8_t* x) {
    std::int16_t a[32];
    __builtin_memcpy(a, x, sizeof a);
    I sums = bits(0);
    for (int k = 4 * from; k < 4 * to; ++k)
      for (int i = 0; i < lanes; ++i)
        sums.v[i] += static_cast<std::int32_t>(weights.w[k][i]) * static_cast<std::int32_t>(a[k]);
    return sums;
  }

  static F load_part(const std::uint8_t* p, std::int64_t n) {
    return each<F>([&](int i) { return i < n ? formats::from_bits(word(p + 4 * i)) : 0.f; });
  }
  static F half_part(const std::uint8_t* p, std::int64_t n) {
    return each<F>([&](int i) { return i < n ? formats::half_at(p + 2 * i) : 0.f; });
  }
  static F brain_part(const std::uint8_t* p, std::int64_t n) {
    return each<F>(
        [&](int i) { return i < n ? formats::from_bits(formats::u16_at(p + 2 * i) << 16) : 0.f; });
  }

  // The largest magnitude of 32 values; compared as integers, so that a NaN is the largest.
  static float largest(const float* x) {
    std::uint32_t most = 0;
    for (int i = 0; i < 32; ++i) {
      const std::uint32_t magnitude = word(reinterpret_cast<const std::uint8_t*>(x + i)) << 1 >> 1;
      most = magnitude > most ? magnitude : most;
    }
    return formats::from_bits(most);
  }
  static void store_integers(const float* x, float inverse, std::uint8_t* out, int* sums) {
    for (int half = 0; half < 2; ++half) {
      sums[half] = 0;
      for (int i = 16 * half; i < 16 * half + 16; ++i) {
        const std::int16_t a = static_cast<std::int16_t>(nearest(x[i] * inverse));
        __builtin_memcpy(out + 2 * i, &a, 2);
        sums[half] += a;
      }
    }
  }
};

}  // namespace voltapile::plain
