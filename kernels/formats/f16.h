// F16: IEEE half.
#pragma once
#include "bits.h"

namespace voltapile::formats {

struct F16 {
  static constexpr int type = 1, length = 1, bytes = 2;

  VP_HD static void unpack(const std::uint8_t* b, float* y) {
    y[0] = half_at(b);
  }
};

}  // namespace voltapile::formats
