// Q3_K: third bits hm[32]@0, q[64]@32, 6-bit scales s[12]@96, d f16@108. y = d sc (q - 4).
#pragma once
#include "bits.h"

namespace voltapile::formats {

struct Q3_K {
  static constexpr int type = 11, length = 256, bytes = 110;

  VP_HD static void unpack(const std::uint8_t* b, float* y) {
    const float d = half_at(b + 108);
    const std::uint8_t* s = b + 96;
    for (int e = 0; e < 256; ++e) {
      const int g = e / 16;
      const int sc = (nibble(s[g % 8], g / 8) | (s[8 + g % 4] >> (2 * (g / 4)) & 3) << 4) - 32;
      const int low = b[32 + 32 * (e / 128) + e % 32] >> (2 * (e % 128 / 32)) & 3;
      const int q = low | (b[e % 32] >> (e / 32) & 1) << 2;
      const float scale = d * sc;
      y[e] = scale * (q - 4);
    }
  }
};

}  // namespace voltapile::formats
