// The fast unpack of the formats with blocks of 256 columns; unpack.cuh tells what a Codec is.
//
// A chunk is one block. Formats without a Codec (codebooks, ternary digits) go through their scalar
// unpack: Codec<Expanded> then reads the floats that it left.
#pragma once
#include "unpack.cuh"

namespace voltapile {

template <>
struct Codec<formats::Q4_K> : Quantised {
  static constexpr int ALIGN = 16, BYTES = 144, SPAN = 2;
  static constexpr bool OFFSET = true;
  static __device__ __forceinline__ void unpack(Bytes row, int span, int p, Unit* out) {
    for (int i = 0; i < 2; ++i) {
      const unsigned w = word_at<ALIGN>(row + 16 + 32 * span + 4 * p + 16 * i);
      four_bits(w, 0, out[0].r + 2 * i);
      four_bits(w, 1, out[1].r + 2 * i);
    }
  }
  static __device__ __forceinline__ float2 scale(Bytes row, int i) {
    const float s = half_from(row) * formats::k_scale(row + 4, i);
    return {s, -(16 * s + half_from(row + 2) * formats::k_min(row + 4, i))};
  }
};

template <>
struct Codec<formats::Q5_K> : Quantised {
  static constexpr int ALIGN = 16, BYTES = 176, SPAN = 2, EXACT_BITS = VP_ARCH >= 800 ? 13 : 0;
  static constexpr bool OFFSET = true;
  static __device__ __forceinline__ void unpack(Bytes row, int span, int p, Unit* out) {
    for (int i = 0; i < 2; ++i) {
      const unsigned h = word_at<ALIGN>(row + 16 + 4 * p + 16 * i);
      const unsigned w = word_at<ALIGN>(row + 48 + 32 * span + 4 * p + 16 * i);
      for (int high = 0; high < 2; ++high) {
        unsigned top[2];
        for (int odd = 0; odd < 2; ++odd)
          top[odd] = field(h, 2 * span + high, odd, 9, 0x02000200);
        five_bits(w, high, top, out[high].r + 2 * i);
      }
    }
  }
  static __device__ __forceinline__ float2 scale(Bytes row, int i) {
    const float s = half_from(row) * formats::k_scale(row + 4, i);
    return {s, -(32 * s + half_from(row + 2) * formats::k_min(row + 4, i))};
  }
};

template <>
struct Codec<formats::Q6_K> : Quantised {
  static constexpr int ALIGN = 2, BYTES = 210, SPAN = 4, SCALES = 2;
  static __device__ __forceinline__ void unpack(Bytes row, int span, int p, Unit* out) {
    const auto at = reinterpret_cast<std::uint64_t>(row);
    const unsigned* words = reinterpret_cast<const unsigned*>(row - (at & 3));
    const unsigned shift = static_cast<unsigned>(at & 3) * 8;
    const auto word = [&](int n) { return __funnelshift_r(words[n], words[n + 1], shift); };
    for (int i = 0; i < 2; ++i) {
      const unsigned top = word(32 + 8 * span + p + 4 * i);
      const unsigned low[2] = {word(16 * span + p + 4 * i), word(16 * span + 8 + p + 4 * i)};
      for (int part = 0; part < 4; ++part) {
        const unsigned four = low[part & 1] >> (part & 2 ? 4 : 0) & 0x0f0f0f0f;
        const unsigned two = part < 2 ? top << (4 - 2 * part) : top >> (2 * part - 4);
        const unsigned q = four | (two & 0x30303030);
        out[part].r[2 * i] = half_add(__byte_perm(q, 0x64646464, 0x4240), 0xe420e420);
        out[part].r[2 * i + 1] = half_add(__byte_perm(q, 0x64646464, 0x4341), 0xe420e420);
      }
    }
  }
  static __device__ __forceinline__ float2 scale(Bytes row, int i) {
    return {half_from(row + 208) * static_cast<std::int8_t>(row[192 + i]), 0.0f};
  }
};

template <>
struct Codec<formats::Q3_K> : Quantised {
  static constexpr int ALIGN = 2, BYTES = 110, SPAN = 4, SCALES = 2;
  static __device__ __forceinline__ void unpack(Bytes row, int span, int p, Unit* out) {
    for (int i = 0; i < 2; ++i) {
      const unsigned w = word_at<ALIGN>(row + 32 + 32 * span + 4 * p + 16 * i);
      const unsigned top = word_at<ALIGN>(row + 4 * p + 16 * i);
      for (int part = 0; part < 4; ++part)
        for (int odd = 0; odd < 2; ++odd) {
          const unsigned q = field(w, 2 * part, odd, 7, 0x01800180) |
                             field(top, 4 * span + part, odd, 9, 0x02000200);
          out[part].r[2 * i + odd] = half_add(q | 0x48004800, 0xca00ca00);  // 8 + q - 12
        }
    }
  }
  static __device__ __forceinline__ float2 scale(Bytes row, int i) {
    const Bytes s = row + 96;
    const int low = nibble(s[i & 7], i >> 3), top = s[8 + (i & 3)] >> (2 * (i >> 2)) & 3;
    return {half_from(row + 108) * ((low | top << 4) - 32), 0.0f};
  }
};

template <>
struct Codec<formats::Q2_K> : Quantised {
  static constexpr int ALIGN = 4, BYTES = 84, SPAN = 4, SCALES = 2;
  static constexpr bool OFFSET = true;
  static __device__ __forceinline__ void unpack(Bytes row, int span, int p, Unit* out) {
    for (int i = 0; i < 2; ++i) {
      const unsigned w = word_at<ALIGN>(row + 16 + 32 * span + 4 * p + 16 * i);
      for (int part = 0; part < 4; ++part)
        for (int odd = 0; odd < 2; ++odd)  // 4 + q
          out[part].r[2 * i + odd] = field(w, 2 * part, odd, 8, 0x03000300) | 0x44004400;
    }
  }
  static __device__ __forceinline__ float2 scale(Bytes row, int i) {
    const float s = half_from(row + 80) * (row[i] & 15);
    return {s, -(4 * s + half_from(row + 82) * (row[i] >> 4))};
  }
};

template <>
struct Codec<formats::IQ4_XS> : Quantised {
  static constexpr int ALIGN = 8, BYTES = 136;
  static __device__ __forceinline__ void unpack(Bytes row, int group, int p, Unit* out) {
    look_up(word_at<ALIGN>(row + 8 + 16 * group + 4 * p), IQ4_TABLE, *out);
  }
  static __device__ __forceinline__ float2 scale(Bytes row, int i) {
    const unsigned tops = *reinterpret_cast<const std::uint16_t*>(row + 2);
    const int sc = nibble(row[4 + (i >> 1)], i & 1) | (tops >> (2 * i) & 3) << 4;
    return {half_from(row) * (sc - 32), 0.0f};
  }
};

// 256 floats that a scalar unpack wrote.
struct Expanded {};
template <>
struct Codec<Expanded> : Floats {
  static constexpr int GROUPS = 8, BYTES = 1024, ALIGN = 4, X_PLANES = 1;
  static __device__ __forceinline__ void unpack(Bytes row, int group, int p, Unit* out) {
    Codec<formats::F32>::unpack(row, group, p, out);
  }
};

// Formats that are expanded first: chunks of one block.
template <class F>
struct Scalar : Floats {
  static constexpr int GROUPS = 8, BYTES = F::bytes, ALIGN = 2, X_PLANES = 1;
  static constexpr bool EXPAND = true;
  static_assert(F::length == 256 && F::bytes % 2 == 0);
};
#define VP_SCALAR(NAME) \
  template <>           \
  struct Codec<formats::NAME> : Scalar<formats::NAME> {};
VP_SCALAR(IQ1_S)
VP_SCALAR(IQ1_M)
VP_SCALAR(IQ2_XXS)
VP_SCALAR(IQ2_XS)
VP_SCALAR(IQ2_S)
VP_SCALAR(IQ3_XXS)
VP_SCALAR(IQ3_S)
VP_SCALAR(TQ1_0)
VP_SCALAR(TQ2_0)
#undef VP_SCALAR

}  // namespace voltapile
