// From the bytes of a GGUF row to the registers of a tensor core: the fast unpack of each format.
//
// Codec<F> describes a row's groups of 32 columns (mma.cuh tells what a unit is):
//   GROUPS   groups that kernels take in one step (a chunk); BYTES of it in a row
//   ALIGN    every block starts at a multiple of it
//   SPAN     groups that unpack() gives at once, since they share bytes
//   SCALES   scales of a group (2: one for each 16 columns); OFFSET: whether offsets are not 0
//   PLANES   1, or 2 where a weight is the sum of a half and of another half times 2^-11
//   X_PLANES the same of the activations that suit the format
//   EXACT_BITS  of activations, so many that sums of a group are exact; 0: all of a half
//   EXPAND   there is no fast unpack: floats are made of a chunk first
//   NATURAL  columns in a unit's registers are (0,1) (2,3), else (0,2) (1,3)
//   unpack(row, span, p, out)   out[SPAN * PLANES]: integers, exact in half precision
//   scale(row, i)               {scale, offset} of the i-th run: weight = scale * integer + offset
// `row` is where the chunk starts, in shared or global memory. Integers are put into the mantissa
// of a half whose unit in the last place is one: 16 + q for 4 bits, 32 + q for 5 ... ; the constant
// is subtracted here, or belongs to the offset where a format has one anyway.
// Tests hold all of it against the scalar truth in formats/*.h.
#pragma once
#include "formats/registry.h"
#include "half.cuh"
#include "mma.cuh"

namespace voltapile {

using formats::nibble;
using Bytes = const std::uint8_t*;

template <class F>
struct Codec;

template <int ALIGN>
__device__ __forceinline__ unsigned word_at(Bytes p) {
  if constexpr (ALIGN >= 4) {
    return *reinterpret_cast<const unsigned*>(p);
  } else {
    const auto at = reinterpret_cast<std::uint64_t>(p);
    const unsigned* words = reinterpret_cast<const unsigned*>(p - (at & 3));
    return __funnelshift_r(words[0], words[1], static_cast<unsigned>(at & 3) * 8);
  }
}
__device__ __forceinline__ float half_from(Bytes p) {
  return half_value(*reinterpret_cast<const std::uint16_t*>(p));
}

// Bits of x moved up by n places, down if n is negative. It is a rotation: what comes in from the
// other end must be masked away.
__device__ __forceinline__ unsigned moved(unsigned x, int n) {
  return __funnelshift_l(x, x, static_cast<unsigned>(n) & 31);
}

// The field that starts at bit `from` of each byte of w goes to bit `to` of each half: bytes 0 and
// 2 for odd = 0, bytes 1 and 3 for odd = 1. mask: the field where it arrives, in both halves.
__device__ __forceinline__ unsigned field(unsigned w, int from, int odd, int to, unsigned mask) {
  return moved(w, to - from - 8 * odd) & mask;
}

// Four bits of each byte: 16 + q. `high`: the upper four.
__device__ __forceinline__ void four_bits(unsigned w, int high, unsigned* out) {
  for (int odd = 0; odd < 2; ++odd)
    out[odd] = field(w, 4 * high, odd, 6, 0x03c003c0) | 0x4c004c00;
}
// Four bits of each byte of w, the fifth at bit 9 of each half of top[2]: 32 + q.
__device__ __forceinline__ void five_bits(unsigned w, int high, const unsigned* top,
                                          unsigned* out) {
  for (int odd = 0; odd < 2; ++odd)
    out[odd] = field(w, 4 * high, odd, 5, 0x01e001e0) | 0x50005000 | top[odd];
}
__device__ __forceinline__ void add_to_all(Unit& unit, unsigned pair) {
  for (int i = 0; i < 4; ++i) unit.r[i] = half_add(unit.r[i], pair);
}

// Sixteen values by their indices, the nibbles of w. table: the values plus 128, four a word.
__device__ __forceinline__ void look_up(unsigned w, const unsigned (&table)[4], Unit& out) {
  unsigned found[2];
  for (int i = 0; i < 2; ++i) {
    const unsigned bits = w >> (16 * i), select = bits & 0x7777;
    const unsigned low = __byte_perm(table[0], table[1], select);
    const unsigned high = __byte_perm(table[2], table[3], select);
    found[i] = __byte_perm(low, high, 0x3210 | (bits & 0x8888) >> 1);
  }
  const unsigned pick[4] = {0x0400, 0x0602, 0x0501, 0x0703};
  for (int i = 0; i < 4; ++i)
    out.r[i] = (__byte_perm(found[0], found[1], pick[i]) & 0x00ff00ff) | 0x64006400;
  add_to_all(out, 0xe480e480);  // -1152
}

struct Quantised {
  static constexpr int GROUPS = 8, SPAN = 1, SCALES = 1, PLANES = 1, X_PLANES = 1, EXACT_BITS = 0;
  static constexpr bool OFFSET = false, NATURAL = false, EXPAND = false;
};

template <>
struct Codec<formats::Q4_0> : Quantised {
  static constexpr int ALIGN = 2, BYTES = 8 * 18;
  static __device__ __forceinline__ void unpack(Bytes row, int group, int p, Unit* out) {
    const unsigned w = word_at<ALIGN>(row + 18 * group + 2 + 4 * p);
    four_bits(w, 0, out->r);
    four_bits(w, 1, out->r + 2);
    add_to_all(*out, 0xce00ce00);  // -24: q - 8
  }
  static __device__ __forceinline__ float2 scale(Bytes row, int i) {
    return {half_from(row + 18 * i), 0.0f};
  }
};

template <>
struct Codec<formats::Q4_1> : Quantised {
  static constexpr int ALIGN = 4, BYTES = 8 * 20;
  static constexpr bool OFFSET = true;
  static __device__ __forceinline__ void unpack(Bytes row, int group, int p, Unit* out) {
    const unsigned w = word_at<ALIGN>(row + 20 * group + 4 + 4 * p);
    four_bits(w, 0, out->r);
    four_bits(w, 1, out->r + 2);
  }
  static __device__ __forceinline__ float2 scale(Bytes row, int i) {
    const float d = half_from(row + 20 * i);
    return {d, half_from(row + 20 * i + 2) - 16 * d};
  }
};

// The fifth bits of unit p, bits 4p..4p+3 and 16+4p.. of h, moved to bit 9 of the halves.
__device__ __forceinline__ void fifth_bits(unsigned h, int p, unsigned (&top)[4]) {
  for (int i = 0; i < 2; ++i) {
    const unsigned spread = (h >> (4 * p + 16 * i) & 15) * 0x00800200u;
    top[2 * i] = spread & 0x02000200;
    top[2 * i + 1] = spread >> 1 & 0x02000200;
  }
}

template <>
struct Codec<formats::Q5_0> : Quantised {
  static constexpr int ALIGN = 2, BYTES = 8 * 22;
  static __device__ __forceinline__ void unpack(Bytes row, int group, int p, Unit* out) {
    const Bytes block = row + 22 * group;
    unsigned top[4];
    fifth_bits(word_at<ALIGN>(block + 2), p, top);
    const unsigned w = word_at<ALIGN>(block + 6 + 4 * p);
    five_bits(w, 0, top, out->r);
    five_bits(w, 1, top + 2, out->r + 2);
    add_to_all(*out, 0xd200d200);  // -48: q - 16
  }
  static __device__ __forceinline__ float2 scale(Bytes row, int i) {
    return {half_from(row + 22 * i), 0.0f};
  }
};

template <>
struct Codec<formats::Q5_1> : Quantised {
  static constexpr int ALIGN = 8, BYTES = 8 * 24;
  static constexpr bool OFFSET = true;
  static __device__ __forceinline__ void unpack(Bytes row, int group, int p, Unit* out) {
    const Bytes block = row + 24 * group;
    unsigned top[4];
    fifth_bits(word_at<ALIGN>(block + 4), p, top);
    const unsigned w = word_at<ALIGN>(block + 8 + 4 * p);
    five_bits(w, 0, top, out->r);
    five_bits(w, 1, top + 2, out->r + 2);
  }
  static __device__ __forceinline__ float2 scale(Bytes row, int i) {
    const float d = half_from(row + 24 * i);
    return {d, half_from(row + 24 * i + 2) - 32 * d};
  }
};

template <>
struct Codec<formats::Q8_0> : Quantised {
  static constexpr int ALIGN = 2, BYTES = 8 * 34;
  static __device__ __forceinline__ void unpack(Bytes row, int group, int p, Unit* out) {
    for (int i = 0; i < 2; ++i) {
      const unsigned w = word_at<ALIGN>(row + 34 * group + 2 + 4 * p + 16 * i) ^ 0x80808080;
      out->r[2 * i] = __byte_perm(w, 0x64646464, 0x4240);
      out->r[2 * i + 1] = __byte_perm(w, 0x64646464, 0x4341);
    }
    add_to_all(*out, 0xe480e480);  // -1152
  }
  static __device__ __forceinline__ float2 scale(Bytes row, int i) {
    return {half_from(row + 34 * i), 0.0f};
  }
};

// Values plus 128.
__device__ constexpr unsigned IQ4_TABLE[4] = {0x3f2d1801, 0x766a5d4f, 0xa6998d81, 0xf1d9c5b5};

template <>
struct Codec<formats::IQ4_NL> : Quantised {
  static constexpr int ALIGN = 2, BYTES = 8 * 18;
  static __device__ __forceinline__ void unpack(Bytes row, int group, int p, Unit* out) {
    look_up(word_at<ALIGN>(row + 18 * group + 2 + 4 * p), IQ4_TABLE, *out);
  }
  static __device__ __forceinline__ float2 scale(Bytes row, int i) {
    return {half_from(row + 18 * i), 0.0f};
  }
};

template <>
struct Codec<formats::MXFP4> : Quantised {
  static constexpr int ALIGN = 1, BYTES = 8 * 17;
  // e2m1 is a half with a shorter exponent: its bits make 2^-14 times the value (denormals too).
  static __device__ __forceinline__ void unpack(Bytes row, int group, int p, Unit* out) {
    const unsigned w = word_at<ALIGN>(row + 17 * group + 1 + 4 * p);
    for (int i = 0; i < 4; ++i) {
      const int high = i >> 1, odd = i & 1;
      out->r[i] = field(w, 4 * high, odd, 9, 0x0e000e00) | field(w, 4 * high, odd, 12, 0x80008000);
    }
  }
  static __device__ __forceinline__ float2 scale(Bytes row, int i) {
    const unsigned e = row[17 * i];
    const float d = formats::from_bits(e < 2 ? 0x00200000u << e : (e - 1) << 23);
    return {d * 32768.0f, 0.0f};
  }
};

// Blocks of 64 columns; columns j and j + 8 of 16 share a byte. Values as MXFP4's.
template <>
struct Codec<formats::NVFP4_SCALED> : Quantised {
  static constexpr int ALIGN = 8, BYTES = 4 * 40, SCALES = 2;
  static __device__ __forceinline__ void unpack(Bytes row, int group, int p, Unit* out) {
    for (int half = 0; half < 2; ++half) {
      const int at = 40 * (group >> 1) + 8 + 16 * (group & 1) + 8 * half + 4 * (p & 1);
      const unsigned w = word_at<ALIGN>(row + at) >> 4 * (p >> 1);
      for (int odd = 0; odd < 2; ++odd)
        out->r[2 * half + odd] =
            field(w, 0, odd, 9, 0x0e000e00) | field(w, 0, odd, 12, 0x80008000);
    }
  }
  static __device__ __forceinline__ float2 scale(Bytes row, int i) {
    const Bytes block = row + 40 * (i >> 2);
    const float factor = *reinterpret_cast<const float*>(block);
    return {factor * formats::NVFP4::scale_of(block[4 + (i & 3)]) * 32768.0f, 0.0f};
  }
};

template <>
struct Codec<formats::F16> {
  static constexpr int GROUPS = 4, BYTES = 4 * 64, ALIGN = 2, SPAN = 1, SCALES = 1, PLANES = 1;
  static constexpr int X_PLANES = 2, EXACT_BITS = 0;
  static constexpr bool OFFSET = false, NATURAL = true, EXPAND = false;
  static __device__ __forceinline__ void unpack(Bytes row, int group, int p, Unit* out) {
    for (int i = 0; i < 4; ++i)
      out->r[i] = word_at<ALIGN>(row + 64 * group + 32 * (i >> 1) + 8 * p + 4 * (i & 1));
  }
  static __device__ __forceinline__ float2 scale(Bytes, int) { return {1.0f, 0.0f}; }
};

// Two values as halves, and what is left of them times 2^11. Beyond the range of a half: its end.
__device__ __forceinline__ void split_pair(float a, float b, unsigned& high, unsigned& low) {
  a = fminf(fmaxf(a, -65504.0f), 65504.0f);
  b = fminf(fmaxf(b, -65504.0f), 65504.0f);
  high = half_pair(a, b);
  const float2 rounded = half_values(high);
  low = half_pair((a - rounded.x) * 2048.0f, (b - rounded.y) * 2048.0f);
}

struct Floats {
  static constexpr int SPAN = 1, SCALES = 1, PLANES = 2, X_PLANES = 2, EXACT_BITS = 0;
  static constexpr bool OFFSET = false, NATURAL = true, EXPAND = false;
  static __device__ __forceinline__ float2 scale(Bytes, int) { return {1.0f, 0.0f}; }
};

template <>
struct Codec<formats::BF16> : Floats {
  static constexpr int GROUPS = 4, BYTES = 4 * 64, ALIGN = 2;
  static __device__ __forceinline__ void unpack(Bytes row, int group, int p, Unit* out) {
    for (int i = 0; i < 4; ++i) {
      const unsigned w =
          word_at<ALIGN>(row + 64 * group + 32 * (i >> 1) + 8 * p + 4 * (i & 1));
      split_pair(__uint_as_float(w << 16), __uint_as_float(w & 0xffff0000), out[0].r[i],
                 out[1].r[i]);
    }
  }
};

template <>
struct Codec<formats::F32> : Floats {
  static constexpr int GROUPS = 2, BYTES = 2 * 128, ALIGN = 4;
  static __device__ __forceinline__ void unpack(Bytes row, int group, int p, Unit* out) {
    for (int i = 0; i < 4; ++i) {
      const float* at = reinterpret_cast<const float*>(row + 128 * group + 64 * (i >> 1) + 16 * p);
      split_pair(at[2 * (i & 1)], at[2 * (i & 1) + 1], out[0].r[i], out[1].r[i]);
    }
  }
};

}  // namespace voltapile
