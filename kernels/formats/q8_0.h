// Q8_0: d f16@0, i8[32]@2. y = d q.
#pragma once
#include "bits.h"

namespace voltapile::formats {

struct Q8_0 {
  static constexpr int type = 8, length = 32, bytes = 34;

  VP_HD static void unpack(const std::uint8_t* b, float* y) {
    const float d = half_at(b);
    for (int e = 0; e < 32; ++e) y[e] = d * static_cast<std::int8_t>(b[2 + e]);
  }
};

}  // namespace voltapile::formats
