// F32: plain float32.
#pragma once
#include "bits.h"

namespace voltapile::formats {

struct F32 {
  static constexpr int type = 0, length = 1, bytes = 4;

  VP_HD static void unpack(const std::uint8_t* b, float* y) {
    y[0] = from_bits(u32_at(b));
  }
};

}  // namespace voltapile::formats
