// Q6_K: ql[128]@0, qh[64]@128, i8 scales[16]@192, d f16@208. y = d sc (q - 32).
#pragma once
#include "bits.h"

namespace voltapile::formats {

struct Q6_K {
  static constexpr int type = 14, length = 256, bytes = 210;

  VP_HD static void unpack(const std::uint8_t* b, float* y) {
    const float d = half_at(b + 208);
    for (int e = 0; e < 256; ++e) {
      const int half = e / 128, part = e % 128 / 32, l = e % 32;
      const int low = nibble(b[64 * half + 32 * (part % 2) + l], part / 2);
      const int q = low | (b[128 + 32 * half + l] >> (2 * part) & 3) << 4;
      const float scale = d * static_cast<std::int8_t>(b[192 + e / 16]);
      y[e] = scale * (q - 32);
    }
  }
};

}  // namespace voltapile::formats
