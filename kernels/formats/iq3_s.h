// IQ3_S: d f16@0, low entry bits q[64]@2, ninth bits qh[8]@66, sign nibbles [32]@74, scale nibbles
// sc[4]@106. y = d (1 + 2 n) times the signed entry.
#pragma once
#include "codebooks.h"
#include "grid_iq3.h"

namespace voltapile::formats {

struct IQ3_S {
  static constexpr int type = 21, length = 256, bytes = 110;

  VP_HD static void unpack(const std::uint8_t* b, float* y) {
    const float d = half_at(b);
    for (int t = 0; t < 64; ++t) {
      const int g = t / 8, entry = b[2 + t] | (b[66 + g] >> (t % 8) & 1) << 8;
      const int signs = nibble(b[74 + t / 2], t % 2);
      const float scale = d * static_cast<float>(1 + 2 * nibble(b[106 + g / 2], g % 2));
      for (int j = 0; j < 4; ++j)
        *y++ = scale * with_sign(iq3s_element(iq3s_grid[entry], j), signs, j);
    }
  }
};

}  // namespace voltapile::formats
