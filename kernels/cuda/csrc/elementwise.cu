// What touches every value once: soft caps, rows picked by an index.
#include "grid.cuh"

using namespace voltapile;

// grid: (n / blockDim)
extern "C" __global__ void softcap(float* x, long long n, float cap) {
  grid_launch();
  grid_wait();
  const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) x[i] = cap * tanhf(x[i] / cap);
}

// grid: (width / blockDim, rows). width in words of 4 bytes.
extern "C" __global__ void gather(const unsigned* x, const int* index, unsigned* out, int width) {
  grid_launch();
  grid_wait();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= width) return;
  const long long row = blockIdx.y;
  out[row * width + i] = x[static_cast<long long>(index[row]) * width + i];
}
