// TQ1_0: q[48]@0 of five ternary digits each, q[4]@48 of four, d f16@52. y = d (digit - 1).
#pragma once
#include "bits.h"

namespace voltapile::formats {

// Digit n of a byte: the byte is a fraction of 256 in base 3, rounded up.
VP_HD int ternary_digit(std::uint32_t byte, int n) {
  const std::uint8_t powers[5] = {1, 3, 9, 27, 81};
  return static_cast<int>((byte * powers[n] & 255) * 3 >> 8);
}

struct TQ1_0 {
  static constexpr int type = 34, length = 256, bytes = 54;

  VP_HD static void unpack(const std::uint8_t* b, float* y) {
    const float d = half_at(b + 52);
    for (int n = 0; n < 5; ++n)
      for (int i = 0; i < 32; ++i) *y++ = d * (ternary_digit(b[i], n) - 1);
    for (int n = 0; n < 5; ++n)
      for (int i = 32; i < 48; ++i) *y++ = d * (ternary_digit(b[i], n) - 1);
    for (int n = 0; n < 4; ++n)
      for (int i = 48; i < 52; ++i) *y++ = d * (ternary_digit(b[i], n) - 1);
  }
};

}  // namespace voltapile::formats
