// What attention found, times gates that a product has left beside the queries.
#include "grid.cuh"
#include "stream_share.cuh"

using namespace voltapile;

// grid: (width / 256, tokens). y: [tokens][width], heads of `dim` *= sigmoid(gate); from a head's
// gate to the next are `apart` values.
extern "C" __global__ void gate_heads(float* y, const float* gate, int width, int dim, int apart) {
  grid_launch();
  grid_wait();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= width) return;
  const long long token = blockIdx.y, row = token * (width / dim) + i / dim;
  y[token * width + i] *= sigmoid(gate[row * apart + i % dim]);
}
