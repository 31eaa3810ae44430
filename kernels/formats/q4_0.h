// Q4_0: d f16@0, q[16]@2; low nibbles are the first half. y = d (q - 8).
#pragma once
#include "bits.h"

namespace voltapile::formats {

struct Q4_0 {
  static constexpr int type = 2, length = 32, bytes = 18;

  VP_HD static void unpack(const std::uint8_t* b, float* y) {
    const float d = half_at(b);
    for (int e = 0; e < 32; ++e) y[e] = d * (nibble(b[2 + e % 16], e / 16) - 8);
  }
};

}  // namespace voltapile::formats
