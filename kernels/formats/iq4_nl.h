// IQ4_NL: d f16@0, q[16]@2, indices into 16 uneven values. y = d value[q].
#pragma once
#include "bits.h"

namespace voltapile::formats {

struct IQ4_NL {
  static constexpr int type = 20, length = 32, bytes = 18;

  VP_HD static void unpack(const std::uint8_t* b, float* y) {
    const float d = half_at(b);
    for (int e = 0; e < 32; ++e) y[e] = d * iq4_value(nibble(b[2 + e % 16], e / 16));
  }
};

}  // namespace voltapile::formats
