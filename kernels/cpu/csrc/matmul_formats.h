// The formats of kernels/formats as a table for run time.
#pragma once
#include <cstdint>

namespace voltapile {

struct FormatRow {
  int type, length, bytes;  // ggml id; values and bytes of a block
  void (*unpack)(const std::uint8_t* block, float* out);
};

const FormatRow* find_format(int type);  // null if unknown

}  // namespace voltapile
