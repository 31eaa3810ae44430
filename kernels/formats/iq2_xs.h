// IQ2_XS: d f16@0, w u16[32]@2 (9 bits of entry, seven signs), scale nibbles sc[8]@66.
// y = d (n + 1/2) / 4 times the signed entry.
#pragma once
#include "codebooks.h"
#include "grid_iq2.h"

namespace voltapile::formats {

struct IQ2_XS {
  static constexpr int type = 17, length = 256, bytes = 74;

  VP_HD static void unpack(const std::uint8_t* b, float* y) {
    const float d = half_at(b);
    for (int k = 0; k < 32; ++k) {
      const std::uint32_t w = u16_at(b + 2 + 2 * k), signs = even_signs(w >> 9);
      const int n = nibble(b[66 + k / 4], k % 4 / 2);
      const float scale = d * (0.5f + static_cast<float>(n)) * 0.25f;
      for (int j = 0; j < 8; ++j)
        *y++ = scale * with_sign(iq2_element(iq2xs_grid[w & 511], j), signs, j);
    }
  }
};

}  // namespace voltapile::formats
