// The grids of kernels/formats with their elements as bytes, for lookups of eight or four at once.
#pragma once
#include <cstdint>

namespace voltapile {

struct Codebooks {
  std::uint64_t iq1[2048];  // 8 element + 15
  std::uint64_t iq2xxs[256], iq2xs[512], iq2s[1024];
  std::uint32_t iq3xxs[256], iq3s[512];
};

extern const Codebooks codebooks;

}  // namespace voltapile
