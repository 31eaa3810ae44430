// The scalar truth, by type id.
#include <stdexcept>
#include <string>

#include "../../formats/registry.h"
#include "matmul.h"
#include "matmul_formats.h"

namespace voltapile {
namespace {

#define ROW(Format)                                                          \
  {formats::Format::type, formats::Format::length, formats::Format::bytes, \
   formats::Format::unpack},
const FormatRow rows[] = {VP_FORMATS(ROW)};
#undef ROW

}  // namespace

const FormatRow* find_format(int type) {
  for (const FormatRow& row : rows)
    if (row.type == type) return &row;
  return nullptr;
}

bool is_supported(int type) { return find_format(type) != nullptr; }

void unpack(int type, const std::uint8_t* data, std::int64_t bytes, std::int64_t n, float* out) {
  const FormatRow* format = find_format(type);
  if (!format) throw std::invalid_argument("unsupported tensor type " + std::to_string(type));
  if (n % format->length != 0 || bytes < n / format->length * format->bytes)
    throw std::invalid_argument("tensor type " + std::to_string(type) + ": " +
                                std::to_string(bytes) + " bytes for " + std::to_string(n) +
                                " values");
  for (std::int64_t i = 0; i < n; i += format->length, data += format->bytes)
    format->unpack(data, out + i);
}

}  // namespace voltapile
