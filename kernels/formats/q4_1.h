// Q4_1: d f16@0, m f16@2, q[16]@4; low nibbles are the first half. y = d q + m.
#pragma once
#include "bits.h"

namespace voltapile::formats {

struct Q4_1 {
  static constexpr int type = 3, length = 32, bytes = 20;

  VP_HD static void unpack(const std::uint8_t* b, float* y) {
    const float d = half_at(b), m = half_at(b + 2);
    for (int e = 0; e < 32; ++e) y[e] = d * nibble(b[4 + e % 16], e / 16) + m;
  }
};

}  // namespace voltapile::formats
