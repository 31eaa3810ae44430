// BF16: the upper half of a float32.
#pragma once
#include "bits.h"

namespace voltapile::formats {

struct BF16 {
  static constexpr int type = 30, length = 1, bytes = 2;

  VP_HD static void unpack(const std::uint8_t* b, float* y) {
    y[0] = from_bits(u16_at(b) << 16);
  }
};

}  // namespace voltapile::formats
