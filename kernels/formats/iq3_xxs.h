// IQ3_XXS: d f16@0, entries q[64]@2, u32[8]@66 of four times seven signs and 4 bits of scale n.
// y = d (n + 1/2) / 2 times the signed entry.
#pragma once
#include "codebooks.h"
#include "grid_iq3.h"

namespace voltapile::formats {

struct IQ3_XXS {
  static constexpr int type = 18, length = 256, bytes = 98;

  VP_HD static void unpack(const std::uint8_t* b, float* y) {
    const float d = half_at(b);
    for (int g = 0; g < 8; ++g) {
      const std::uint32_t rest = u32_at(b + 66 + 4 * g);
      const float scale = d * (0.5f + static_cast<float>(rest >> 28)) * 0.5f;
      for (int t = 0; t < 8; ++t) {
        const std::uint32_t signs = even_signs(rest >> (7 * (t / 2)) & 127) >> (4 * (t % 2));
        const std::uint32_t entry = iq3xxs_grid[b[2 + 8 * g + t]];
        for (int j = 0; j < 4; ++j) *y++ = scale * with_sign(iq3xxs_element(entry, j), signs, j);
      }
    }
  }
};

}  // namespace voltapile::formats
