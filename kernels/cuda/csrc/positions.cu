// What ranks need beside attention that share out positions: kernels/positions.py tells what it
// means.
#include "grid.cuh"

namespace voltapile {

__device__ __forceinline__ float nothing() { return __int_as_float(0xff800000); }  // its weight

}  // namespace voltapile

using namespace voltapile;

// grid: (n / blockDim). Where each token stands among the positions that are kept here. Attention
// reads that as soon as it starts, which the kernel after this one, waiting as this does, allows.
extern "C" __global__ void keep_seen(const int* positions, int* seen, int n, int part, int parts,
                                     int run) {
  const int t = blockIdx.x * blockDim.x + threadIdx.x;
  if (t >= n) return;
  const int end = positions[t] + 1, cycle = run * parts;
  const int own = max(0, min(end % cycle - part * run, run));
  seen[t] = end / cycle * run + own - 1;
}

// Tokens that are kept elsewhere go to the padding slot.
extern "C" __global__ void keep_stored(const int* positions, const int* slots, const int* seen,
                                       int* stored, int* stored_slots, int n, int part, int parts,
                                       int run, int padding) {
  const int t = blockIdx.x * blockDim.x + threadIdx.x;
  if (t >= n) return;
  stored[t] = max(0, seen[t]);
  stored_slots[t] = positions[t] / run % parts == part ? slots[t] : padding;
}

// grid: (width / blockDim, tokens). o [T, width] = each of its heads times its share of all parts'.
// all_weights: [T, parts * heads]. What weighs nothing is zero, whatever it was.
extern "C" __global__ void weigh(float* o, const float* weights, const float* all_weights,
                                 int width, int heads, int parts) {
  grid_launch();
  grid_wait();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= width) return;
  const long long token = blockIdx.y;
  const int head = i / (width / heads);
  const float* each = all_weights + token * parts * heads + head;
  float most = nothing(), sum = 0.0f;
  for (int part = 0; part < parts; ++part) most = fmaxf(most, each[part * heads]);
  for (int part = 0; part < parts; ++part) sum += expf(each[part * heads] - most);
  const float mine = weights[token * heads + head];
  float& x = o[token * width + i];
  x = mine == nothing() ? 0.0f : x * (expf(mine - most) / sum);
}

// grid: (width / blockDim, tokens). out [T, width] = columns of x [T, whole] from `offset` on.
extern "C" __global__ void take_columns(const float* x, float* out, int width, int whole,
                                        int offset) {
  grid_launch();
  grid_wait();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= width) return;
  const long long token = blockIdx.y;
  out[token * width + i] = x[token * whole + offset + i];
}
