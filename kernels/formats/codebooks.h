// What the codebook formats share: element j of a grid entry, and signs.
//
// An entry of a grid packs its elements, the first in the lowest bits: 2 bits each in the grids of
// IQ1 and IQ2, 3 bits each in those of IQ3. The grids themselves are in grid_*.h.
#pragma once
#include "bits.h"

namespace voltapile::formats {

VP_HD constexpr int iq1_element(std::uint32_t entry, int j) {
  return static_cast<int>(entry >> (2 * j) & 3) - 1;
}
VP_HD constexpr int iq2_element(std::uint32_t entry, int j) {
  const std::uint32_t digit = entry >> (2 * j) & 3;
  return digit == 0 ? 8 : digit == 1 ? 25 : 43;
}
VP_HD constexpr int iq3xxs_element(std::uint32_t entry, int j) {
  const int digit = static_cast<int>(entry >> (3 * j) & 7);
  return 8 * digit + (digit < 7 ? 4 : 6);
}
VP_HD constexpr int iq3s_element(std::uint32_t entry, int j) {
  return 2 * static_cast<int>(entry >> (3 * j) & 7) + 1;
}

// Eight signs of which seven are stored: the last makes the number of minus signs even.
VP_HD std::uint32_t even_signs(std::uint32_t seven) {
  const std::uint32_t fold = (seven ^ seven >> 4) & 15;
  return seven | (0x6996u >> fold & 1) << 7;  // bit i of 0x6996 is the parity of i
}

VP_HD float with_sign(int magnitude, std::uint32_t signs, int j) {
  const float value = static_cast<float>(magnitude);
  return signs >> j & 1 ? -value : value;
}

}  // namespace voltapile::formats
