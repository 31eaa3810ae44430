// Q5_1: d f16@0, m f16@2, fifth bits u32@4, q[16]@8. y = d q + m.
#pragma once
#include "bits.h"

namespace voltapile::formats {

struct Q5_1 {
  static constexpr int type = 7, length = 32, bytes = 24;

  VP_HD static void unpack(const std::uint8_t* b, float* y) {
    const float d = half_at(b), m = half_at(b + 2);
    const std::uint32_t h = u32_at(b + 4);
    for (int e = 0; e < 32; ++e) {
      const int q = nibble(b[8 + e % 16], e / 16) | (h >> e & 1) << 4;
      y[e] = d * q + m;
    }
  }
};

}  // namespace voltapile::formats
