// IQ1_S: d f16@0, low entry bits q[32]@2, u16[8]@34: four times 3 high entry bits, 3 bits of scale
// n, the sign of delta. y = d (2 n + 1) (entry +- 1/8).
#pragma once
#include "codebooks.h"
#include "grid_iq1.h"

namespace voltapile::formats {

struct IQ1_S {
  static constexpr int type = 19, length = 256, bytes = 50;

  VP_HD static void unpack(const std::uint8_t* b, float* y) {
    const float d = half_at(b);
    for (int g = 0; g < 8; ++g) {
      const std::uint32_t h = u16_at(b + 34 + 2 * g);
      const float scale = d * static_cast<float>(2 * (h >> 12 & 7) + 1);
      const float delta = h & 0x8000 ? -0.125f : 0.125f;
      for (int l = 0; l < 4; ++l) {
        const std::uint32_t entry = iq1s_grid[b[2 + 4 * g + l] | (h >> (3 * l) & 7) << 8];
        for (int j = 0; j < 8; ++j)
          *y++ = scale * (static_cast<float>(iq1_element(entry, j)) + delta);
      }
    }
  }
};

}  // namespace voltapile::formats
