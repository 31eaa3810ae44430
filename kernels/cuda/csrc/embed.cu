// Rows of a token embedding, times a scale: Format::unpack's own numbers. Formats that embeddings
// mostly have are told value by value, a thread each; of others a thread unpacks a whole block,
// there and back through shared memory. A token that is no row of the table becomes NaN, which ends
// its request with an error.
#include "formats/registry.h"
#include "tiles.cuh"

using namespace voltapile::formats;
using Format = FORMAT;

// One value of a block; tests hold it against unpack.
template <class Any>
struct Value {
  static constexpr bool is_known = false;
  static __device__ float of(const std::uint8_t*, int) { return 0.0f; }
};
template <>
struct Value<Q8_0> {
  static constexpr bool is_known = true;
  static __device__ float of(const std::uint8_t* b, int e) {
    return half_at(b) * static_cast<std::int8_t>(b[2 + e]);
  }
};
template <>
struct Value<Q4_K> {
  static constexpr bool is_known = true;
  static __device__ float of(const std::uint8_t* b, int e) {
    const int g = e / 32;
    const float scale = half_at(b) * k_scale(b + 4, g), least = half_at(b + 2) * k_min(b + 4, g);
    return scale * nibble(b[16 + 32 * (g / 2) + e % 32], g % 2) - least;
  }
};
template <>
struct Value<Q6_K> {
  static constexpr bool is_known = true;
  static __device__ float of(const std::uint8_t* b, int e) {
    const int half = e / 128, part = e % 128 / 32, l = e % 32;
    const int low = nibble(b[64 * half + 32 * (part % 2) + l], part / 2);
    const int q = low | (b[128 + 32 * half + l] >> (2 * part) & 3) << 4;
    const float scale = half_at(b + 208) * static_cast<std::int8_t>(b[192 + e / 16]);
    return scale * (q - 32);
  }
};

constexpr bool BY_VALUE = Value<Format>::is_known;
constexpr int THREADS = BY_VALUE ? 1024 : 128;  // as the launcher knows
constexpr int UNITS = 1024 / Format::length;  // blocks at once
constexpr int BYTES = BY_VALUE ? 1 : UNITS * Format::bytes;
constexpr int WIDE = Format::length + (Format::length > 1);  // lanes' values meet distinct banks

// grid: (values of a row / 1024, tokens), THREADS threads
extern "C" __global__ void __launch_bounds__(THREADS, 1)
embed(const unsigned char* table, const int* tokens, float* out, int vocab, int blocks,
      float scale, int is_tiled) {
  __shared__ unsigned char raw[BYTES];
  __shared__ float unpacked[BY_VALUE ? 1 : UNITS * WIDE];
  const int first = blockIdx.x * UNITS, count = min(UNITS, blocks - first);
  const int token = tokens[blockIdx.y];
  const bool is_there = token >= 0 && token < vocab;
  const long long row = is_there ? token : 0;
  const auto from = [&](int n) {
    return voltapile::block_at<Format>(table, is_tiled, row, first + n, blocks);
  };
  float* y = out + (static_cast<long long>(blockIdx.y) * blocks + first) * Format::length;
  if (!BY_VALUE) {
#pragma unroll 8
    for (int i = threadIdx.x; i < count * Format::bytes; i += THREADS)
      raw[i] = voltapile::HAS_TILES<Format> ? from(i / Format::bytes)[i % Format::bytes]
                                            : from(0)[i];
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += THREADS)
      Format::unpack(raw + i * Format::bytes, unpacked + i * WIDE);
    __syncthreads();
  }
#pragma unroll
  for (int n = 0; n < UNITS * Format::length / THREADS; ++n) {
    const int i = n * THREADS + threadIdx.x, block = i / Format::length, e = i % Format::length;
    if (block >= count) break;
    const float value = BY_VALUE ? Value<Format>::of(from(block), e)
                                 : unpacked[block * WIDE + e];
    y[i] = !is_there ? __int_as_float(0x7fffffff) : scale == 1.0f ? value : value * scale;
  }
}
