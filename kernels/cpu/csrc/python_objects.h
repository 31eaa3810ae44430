// Matrices and caches as Python holds them, and how arguments become pointers.
#pragma once
#include <optional>
#include <stdexcept>
#include <string>

#include "kernels.h"
#include "matmul.h"
#include "python_engine.h"

namespace voltapile {

// A Matrix and the owner of its bytes.
struct MatrixObject {
  // factors: of each expert, or one; none: 1.
  MatrixObject(Array<const std::uint8_t> data, int type, std::int64_t rows, std::int64_t cols,
               std::optional<Floats> factors)
      : data(data), factors(factors) {
    if (!is_supported(type)) throw std::invalid_argument("unsupported tensor type");
    matrix.type = type;
    matrix.rows = rows;
    matrix.cols = cols;
    matrix.row_bytes = rows ? static_cast<std::int64_t>(data.size()) / rows : 0;
    matrix.data = data.data();
    matrix.factors = factors && factors->size() ? factors->data() : nullptr;
  }
  Array<const std::uint8_t> data;
  std::optional<Floats> factors;
  Matrix matrix;
};

struct CacheObject {
  CacheObject(BytesOut keys, BytesOut values, std::int64_t pages, std::int64_t kv_heads,
              std::int64_t page_tokens, std::int64_t key_dim, std::int64_t value_dim,
              const std::string& key_type, const std::string& value_type)
      : keys(keys), values(values) {
    layout = {keys.data(), values.data(), kv_type(key_type), kv_type(value_type),
              pages, kv_heads, page_tokens, pitch(page_tokens), key_dim, value_dim};
    const auto bytes = [](const BytesOut& x) { return static_cast<std::int64_t>(x.size()); };
    if (bytes(keys) < pages * kv_heads * layout.key_head_bytes() ||
        bytes(values) < pages * kv_heads * layout.value_head_bytes() + 128) {
      throw std::invalid_argument("kv cache: the arrays are too small");
    }
  }
  static std::int64_t pitch(std::int64_t page_tokens) {
    return (page_tokens + KvLayout::kPitch - 1) / KvLayout::kPitch * KvLayout::kPitch;
  }
  static KvType kv_type(const std::string& name) {
    if (name == "f32") return KvType::f32;
    if (name == "f16") return KvType::f16;
    if (name == "q8_0") return KvType::q8_0;
    throw std::invalid_argument("kv cache: unknown type " + name);
  }
  BytesOut keys, values;
  KvLayout layout;
};

inline Places places(const Ints& slots, const Ints& positions, const Ints& table) {
  return {slots.data(), positions.data(), table.data(), static_cast<std::int64_t>(table.shape(1)),
          static_cast<std::int64_t>(positions.size())};
}

inline const Matrix* matrix_of(nb::handle object) {
  return &nb::cast<MatrixObject&>(object).matrix;
}

inline const float* data_or_null(const std::optional<Floats>& x) { return x ? x->data() : nullptr; }

inline std::int64_t length(const Floats& x) { return static_cast<std::int64_t>(x.size()); }

}  // namespace voltapile
