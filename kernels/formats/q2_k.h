// Q2_K: scales sc[16]@0 (low: scale, high: minimum), q[64]@16, d f16@80, dmin f16@82.
#pragma once
#include "bits.h"

namespace voltapile::formats {

struct Q2_K {
  static constexpr int type = 10, length = 256, bytes = 84;

  VP_HD static void unpack(const std::uint8_t* b, float* y) {
    const float d = half_at(b + 80), dmin = half_at(b + 82);
    for (int e = 0; e < 256; ++e) {
      const int sc = b[e / 16], q = b[16 + 32 * (e / 128) + e % 32] >> (2 * (e % 128 / 32)) & 3;
      const float scale = d * (sc & 15), least = dmin * (sc >> 4);
      y[e] = scale * q - least;
    }
  }
};

}  // namespace voltapile::formats
