// Rows of a token embedding: FORMAT's scalar unpack straight to the output, times a scale.
// A token that is no row of the table becomes NaN, which ends its request with an error.
#include "formats/registry.h"

using Format = voltapile::formats::FORMAT;

// grid: (blocks of a row / blockDim, tokens)
extern "C" __global__ void embed(const unsigned char* table, const int* tokens, float* out,
                                 int vocab, int blocks, float scale) {
  const int block = blockIdx.x * blockDim.x + threadIdx.x;
  if (block >= blocks) return;
  const int token = tokens[blockIdx.y];
  float* y = out + (static_cast<long long>(blockIdx.y) * blocks + block) * Format::length;
  if (token < 0 || token >= vocab) {
    for (int i = 0; i < Format::length; ++i) y[i] = __int_as_float(0x7fffffff);
    return;
  }
  const long long place = static_cast<long long>(token) * blocks + block;
  Format::unpack(table + place * Format::bytes, y);
  if (scale == 1.0f) return;
  for (int i = 0; i < Format::length; ++i) y[i] *= scale;
}
