// Rows of an n-gram table, a block of values each thread: Format::unpack's own numbers. The table
// may lie in the GPU's memory or in host memory that it sees; or its rows lie there, one for each
// of `rows` in that order, and a number of -1 where none was read. -D FORMAT
#include "formats/registry.h"
#include "grid.cuh"
#include "tiles.cuh"

using Format = voltapile::formats::FORMAT;

// grid: (rows * blocks of a row / 128). out: [rows][blocks][Format::length]
extern "C" __global__ void __launch_bounds__(128)
ngram_gather(const unsigned char* table, const long long* rows, float* out, long long count,
             long long table_rows, int blocks, int is_in_order, int is_tiled) {
  voltapile::grid_launch();
  voltapile::grid_wait();
  const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count * blocks) return;
  const long long row = rows[i / blocks];
  const long long place = is_in_order ? i / blocks : row;
  float values[Format::length];
  float* to = out + i * Format::length;
  if (row >= 0 && row < table_rows) {
    Format::unpack(voltapile::block_at<Format>(table, is_tiled, place,
                                               static_cast<int>(i % blocks), blocks),
                   values);
  } else {
    for (int e = 0; e < Format::length; ++e) values[e] = __int_as_float(0x7fffffff);
  }
#pragma unroll
  for (int e = 0; e < Format::length; ++e) to[e] = values[e];
}
