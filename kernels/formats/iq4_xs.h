// IQ4_XS: d f16@0, scale tops u16@2, scale nibbles sl[4]@4, q[128]@8; values as IQ4_NL.
#pragma once
#include "bits.h"

namespace voltapile::formats {

struct IQ4_XS {
  static constexpr int type = 23, length = 256, bytes = 136;

  VP_HD static void unpack(const std::uint8_t* b, float* y) {
    const float d = half_at(b);
    const std::uint32_t tops = u16_at(b + 2);
    for (int g = 0; g < 8; ++g) {
      const int sc = nibble(b[4 + g / 2], g % 2) | (tops >> (2 * g) & 3) << 4;
      const float scale = d * (sc - 32);
      for (int i = 0; i < 32; ++i)
        y[32 * g + i] = scale * iq4_value(nibble(b[8 + 16 * g + i % 16], i / 16));
    }
  }
};

}  // namespace voltapile::formats
