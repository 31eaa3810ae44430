// IQ1_M: low entry bits q[32]@0, nibbles h[16]@32 (3 high entry bits, the sign of delta), u16[4]@48
// whose low 12 bits are four scales n and whose high 4 are a part of d. y as IQ1_S.
#pragma once
#include "codebooks.h"
#include "grid_iq1.h"

namespace voltapile::formats {

struct IQ1_M {
  static constexpr int type = 29, length = 256, bytes = 56;

  VP_HD static void unpack(const std::uint8_t* b, float* y) {
    std::uint32_t half = 0;
    for (int i = 0; i < 4; ++i) half |= u16_at(b + 48 + 2 * i) >> 12 << (4 * i);
    const float d = half_to_float(half);
    for (int k = 0; k < 32; ++k) {
      const int h = nibble(b[32 + k / 2], k % 2);
      const std::uint32_t n = u16_at(b + 48 + 2 * (k / 8)) >> (3 * (k / 2 % 4)) & 7;
      const float scale = d * static_cast<float>(2 * n + 1), delta = h & 8 ? -0.125f : 0.125f;
      const std::uint32_t entry = iq1s_grid[b[k] | (h & 7) << 8];
      for (int j = 0; j < 8; ++j)
        *y++ = scale * (static_cast<float>(iq1_element(entry, j)) + delta);
    }
  }
};

}  // namespace voltapile::formats
