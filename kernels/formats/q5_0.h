// Q5_0: d f16@0, fifth bits u32@2, q[16]@6. y = d (q - 16).
#pragma once
#include "bits.h"

namespace voltapile::formats {

struct Q5_0 {
  static constexpr int type = 6, length = 32, bytes = 22;

  VP_HD static void unpack(const std::uint8_t* b, float* y) {
    const float d = half_at(b);
    const std::uint32_t h = u32_at(b + 2);
    for (int e = 0; e < 32; ++e) {
      const int q = nibble(b[6 + e % 16], e / 16) | (h >> e & 1) << 4;
      y[e] = d * (q - 16);
    }
  }
};

}  // namespace voltapile::formats
