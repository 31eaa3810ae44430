// TQ2_0: q[64]@0, d f16@64. y = d (q - 1).
#pragma once
#include "bits.h"

namespace voltapile::formats {

struct TQ2_0 {
  static constexpr int type = 35, length = 256, bytes = 66;

  VP_HD static void unpack(const std::uint8_t* b, float* y) {
    const float d = half_at(b + 64);
    for (int e = 0; e < 256; ++e) {
      const int q = b[32 * (e / 128) + e % 32] >> (2 * (e % 128 / 32)) & 3;
      y[e] = d * (q - 1);
    }
  }
};

}  // namespace voltapile::formats
