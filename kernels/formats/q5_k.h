// Q5_K: d f16@0, dmin f16@2, s[12]@4 as Q4_K, fifth bits h[32]@16, q[128]@48.
#pragma once
#include "bits.h"

namespace voltapile::formats {

struct Q5_K {
  static constexpr int type = 13, length = 256, bytes = 176;

  VP_HD static void unpack(const std::uint8_t* b, float* y) {
    const float d = half_at(b), dmin = half_at(b + 2);
    for (int g = 0; g < 8; ++g) {
      const float scale = d * k_scale(b + 4, g), least = dmin * k_min(b + 4, g);
      const std::uint8_t* low = b + 48 + 32 * (g / 2);
      for (int i = 0; i < 32; ++i) {
        const int q = nibble(low[i], g % 2) | (b[16 + i] >> g & 1) << 4;
        y[32 * g + i] = scale * q - least;
      }
    }
  }
};

}  // namespace voltapile::formats
