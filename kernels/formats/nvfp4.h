// NVFP4: E4M3 scales s[4]@0 of 16 columns each, q[32]@4, e2m1 values stored doubled; columns j and
// j + 8 of 16 share a byte. y = U(s) value[q], U half of the scale's value and 0 for 0x7F. A
// tensor's factor, where the file has one, is not in the block.
#pragma once
#include "bits.h"

namespace voltapile::formats {

struct NVFP4 {
  static constexpr int type = 40, length = 64, bytes = 36;

  VP_HD static float scale_of(std::uint32_t s) {
    // As a half with the same exponent and mantissa, but for the exponents' zeros: 8 and 1 apart.
    return s == 0x7F ? 0.0f : 128.0f * half_to_float((s & 0x7F) << 7);
  }

  VP_HD static void unpack(const std::uint8_t* b, float* y) {
    for (int part = 0; part < 4; ++part) {
      const float d = scale_of(b[part]);
      for (int j = 0; j < 16; ++j)
        y[16 * part + j] = d * fp4_value(nibble(b[4 + 8 * part + j % 8], j / 8));
    }
  }
};

// The same behind a float, which multiplies it: what a GPU makes of a file's blocks at load.
struct NVFP4_SCALED {
  static constexpr int type = 1 << 16 | 40, length = 64, bytes = 40;

  VP_HD static void unpack(const std::uint8_t* b, float* y) {
    const float factor = from_bits(u32_at(b));
    NVFP4::unpack(b + 4, y);
    for (int e = 0; e < 64; ++e) y[e] *= factor;
  }
};

}  // namespace voltapile::formats
