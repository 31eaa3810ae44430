// Rows of a token embedding: FORMAT's scalar unpack, times a scale. A thread unpacks a whole block,
// so blocks of many values go there and back through shared memory: a row is read and written by
// neighbours. A token that is no row of the table becomes NaN, which ends its request with an error.
#include "formats/registry.h"

using Format = voltapile::formats::FORMAT;

constexpr int UNITS = Format::length >= 1024 ? 1 : 1024 / Format::length;  // blocks at once
constexpr int BYTES = UNITS * Format::bytes;
constexpr int WIDE = Format::length + (Format::length > 1);  // lanes' values meet distinct banks

// grid: (values of a row / 1024, tokens), 128 threads
extern "C" __global__ void __launch_bounds__(128)
embed(const unsigned char* table, const int* tokens, float* out, int vocab, int blocks,
      float scale) {
  __shared__ unsigned char raw[BYTES];
  __shared__ float unpacked[UNITS * WIDE];
  const int first = blockIdx.x * UNITS, count = min(UNITS, blocks - first);
  const int token = tokens[blockIdx.y];
  const bool is_there = token >= 0 && token < vocab;
  const long long row = is_there ? token : 0;
  const unsigned char* from = table + (row * blocks + first) * Format::bytes;
  float* y = out + (static_cast<long long>(blockIdx.y) * blocks + first) * Format::length;
#pragma unroll 8
  for (int i = threadIdx.x; i < count * Format::bytes; i += 128) raw[i] = from[i];
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += 128)
    Format::unpack(raw + i * Format::bytes, unpacked + i * WIDE);
  __syncthreads();
  for (int i = threadIdx.x; i < count * Format::length; i += 128) {
    const float value = unpacked[i / Format::length * WIDE + i % Format::length];
    y[i] = !is_there ? __int_as_float(0x7fffffff) : scale == 1.0f ? value : value * scale;
  }
}
