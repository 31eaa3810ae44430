// IQ2_S: d f16@0, low entry bits q[32]@2, signs[32]@34, high entry bits qh[8]@66, scale nibbles
// sc[8]@74. y = d (n + 1/2) / 4 times the signed entry.
#pragma once
#include "codebooks.h"
#include "grid_iq2.h"

namespace voltapile::formats {

struct IQ2_S {
  static constexpr int type = 22, length = 256, bytes = 82;

  VP_HD static void unpack(const std::uint8_t* b, float* y) {
    const float d = half_at(b);
    for (int k = 0; k < 32; ++k) {
      const int g = k / 4, l = k % 4;
      const int entry = b[2 + k] | (b[66 + g] >> (2 * l) & 3) << 8;
      const int n = nibble(b[74 + g], l / 2);
      const float scale = d * (0.5f + static_cast<float>(n)) * 0.25f;
      for (int j = 0; j < 8; ++j)
        *y++ = scale * with_sign(iq2_element(iq2s_grid[entry], j), b[34 + k], j);
    }
  }
};

}  // namespace voltapile::formats
