// Q4_K: d f16@0, dmin f16@2, 6-bit scales and minima s[12]@4, q[128]@16.
#pragma once
#include "bits.h"

namespace voltapile::formats {

struct Q4_K {
  static constexpr int type = 12, length = 256, bytes = 144;

  VP_HD static void unpack(const std::uint8_t* b, float* y) {
    const float d = half_at(b), dmin = half_at(b + 2);
    for (int g = 0; g < 8; ++g) {
      const float scale = d * k_scale(b + 4, g), least = dmin * k_min(b + 4, g);
      const std::uint8_t* q = b + 16 + 32 * (g / 2);
      for (int i = 0; i < 32; ++i) y[32 * g + i] = scale * nibble(q[i], g % 2) - least;
    }
  }
};

}  // namespace voltapile::formats
