// Matrices in GGUF formats, and the Commands that multiply with them.
//
// The arithmetic: activations are rounded to 16-bit integers with one scale for every 32 values,
// products and sums inside a block are exact integers, sums over blocks are float32 in an order
// that depends on K and the instruction set alone: one row gives the same bits in any company.
// Float formats multiply float32 activations. An activation that is not finite makes its row NaN
// or infinite. Commands use Team::local (256 KiB do) and, unless the step is small, one barrier.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "engine.h"

namespace voltapile {

struct Matrix {
  int type = 0;                         // ggml type id
  std::int64_t rows = 0, cols = 0;      // N, K
  std::int64_t row_bytes = 0;
  const std::uint8_t* data = nullptr;   // not owned; alive as long as the Matrix's Python owner
  // Of all values, where the file has it in a tensor of its own; of each expert, where they are
  // many. Not owned. null: 1
  const float* factors = nullptr;

  float factor() const { return factors ? *factors : 1.f; }
};

// True where make_linear and make_embed know the type.
bool is_supported(int type);

// One product of a Linear: out[t * out_stride + n] (+)= x[t] . weight[n] + bias[n].
struct Product {
  const Matrix* weight = nullptr;
  const float* bias = nullptr;  // may be null
  float* out = nullptr;
  std::int64_t out_stride = 0;  // in floats
  bool accumulate = false;
};

enum class Activation { silu, gelu_tanh };

// All products share x [tokens, K] (float32, contiguous). `quantised` is scratch of at least
// quantised_bytes(tokens, K), 64-byte aligned, private to the command until it has run.
std::int64_t quantised_bytes(std::int64_t tokens, std::int64_t cols);
std::unique_ptr<Command> make_linear(const float* x, std::int64_t tokens,
                                     std::vector<Product> products, std::uint8_t* quantised);

// out [tokens, F] = activation(gate x + gate_bias) * (up x + up_bias).
std::unique_ptr<Command> make_glu(const float* x, std::int64_t tokens, const Matrix* gate,
                                  const Matrix* up, const float* gate_bias, const float* up_bias,
                                  Activation activation, float* out, std::uint8_t* quantised);

// out [tokens, D] = rows of table, times scale.
std::unique_ptr<Command> make_embed(const Matrix* table, const std::int32_t* tokens,
                                    std::int64_t num_tokens, float scale, float* out);
// The same for a table of more rows than tokens.
std::unique_ptr<Command> make_embed_rows(const Matrix* table, const std::int64_t* rows,
                                         std::int64_t count, float* out);

// Scalar unpack of n values from data, the truth of kernels/formats. Throws std::invalid_argument
// for an unknown type, for a part of a block and where the bytes are too few.
void unpack(int type, const std::uint8_t* data, std::int64_t bytes, std::int64_t n, float* out);

// The instruction set in use: "plain", "avx2" or "avx512"; set_isa refuses what the CPU lacks.
const char* isa();
bool set_isa(const char* name);

}  // namespace voltapile
