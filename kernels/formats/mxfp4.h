// MXFP4: exponent E u8@0, q[16]@1, e2m1 values stored doubled. y = 2^(E - 128) value[q].
#pragma once
#include "bits.h"

namespace voltapile::formats {

struct MXFP4 {
  static constexpr int type = 39, length = 32, bytes = 17;

  VP_HD static void unpack(const std::uint8_t* b, float* y) {
    const std::uint32_t e8 = b[0];
    const float d = from_bits(e8 < 2 ? 0x00200000u << e8 : (e8 - 1) << 23);
    for (int e = 0; e < 32; ++e) y[e] = d * fp4_value(nibble(b[1 + e % 16], e / 16));
  }
};

}  // namespace voltapile::formats
