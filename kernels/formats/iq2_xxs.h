// IQ2_XXS: d f16@0, 8 groups of 8 bytes @2: four entries u8, then u32 of four times seven signs
// and 4 bits of scale n. y = d (n + 1/2) / 4 times the signed entry.
#pragma once
#include "codebooks.h"
#include "grid_iq2.h"

namespace voltapile::formats {

struct IQ2_XXS {
  static constexpr int type = 16, length = 256, bytes = 66;

  VP_HD static void unpack(const std::uint8_t* b, float* y) {
    const float d = half_at(b);
    for (int g = 0; g < 8; ++g) {
      const std::uint8_t* entries = b + 2 + 8 * g;
      const std::uint32_t rest = u32_at(entries + 4);
      const float scale = d * (0.5f + static_cast<float>(rest >> 28)) * 0.25f;
      for (int l = 0; l < 4; ++l) {
        const std::uint32_t signs = even_signs(rest >> (7 * l) & 127);
        for (int j = 0; j < 8; ++j)
          *y++ = scale * with_sign(iq2_element(iq2xxs_grid[entries[l]], j), signs, j);
      }
    }
  }
};

}  // namespace voltapile::formats
