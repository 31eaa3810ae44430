// Residual streams, S of them side by side: norms, the mix of streams to one input, the way back.
#include "block.cuh"
#include "grid.cuh"
#include "stream_share.cuh"

using namespace voltapile;

// grid: (width / 256, tokens * S). out [tokens][S][width]: x [tokens][width] S times.
extern "C" __global__ void streams(const float* x, float* out, int width, int count) {
  grid_launch();
  grid_wait();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  const long long run = blockIdx.y;
  if (i < width) out[run * width + i] = x[run / count * width + i];
}

// grid: (tokens * S), 256 threads: a run of `width` values each. weight: [S][width]
extern "C" __global__ void __launch_bounds__(256)
stream_norm(const float* x, const float* weight, float* out, int width, int count, float eps) {
  __shared__ float scratch[32];
  grid_launch();
  grid_wait();
  x += static_cast<long long>(blockIdx.x) * width;
  out += static_cast<long long>(blockIdx.x) * width;
  weight += static_cast<long long>(blockIdx.x % count) * width;
  float sum = 0.0f;
  for (int i = threadIdx.x; i < width; i += blockDim.x) sum += x[i] * x[i];
  const float factor = 1.0f / sqrtf(block_join(sum, scratch, Add()) / width + eps);
  for (int i = threadIdx.x; i < width; i += blockDim.x) out[i] = x[i] * factor * weight[i];
}

// grid: (width / 256, tokens). out [tokens][width]: the mean over streams of x * sigmoid(gate), or
// of gate * scales[token] where those are sums of a product of many rows.
extern "C" __global__ void stream_mix(const float* __restrict__ x, const float* __restrict__ gate,
                                      const float* __restrict__ scales, float* __restrict__ out,
                                      int width, int count) {
  grid_launch();
  grid_wait();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= width) return;
  const long long token = blockIdx.y;
  const float scale = scales != nullptr ? scales[token] : 1.0f;
  float sum = 0.0f;
#pragma unroll 4
  for (int s = 0; s < count; ++s) {
    const long long at = (token * count + s) * width + i;
    sum += x[at] * sigmoid(gate[at] * scale);
  }
  out[token * width + i] = sum / count;
}

// grid: (width / 256, tokens). stream s of x += 2 sigmoid(inject[token][s] / S) * y
extern "C" __global__ void stream_add(float* __restrict__ x, const float* __restrict__ inject,
                                      const float* __restrict__ y, int width, int count) {
  grid_launch();
  grid_wait();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= width) return;
  const long long token = blockIdx.y;
  const float value = y[token * width + i];
#pragma unroll 4
  for (int s = 0; s < count; ++s) {  // as stream_in.cu has it
    float& place = x[(token * count + s) * width + i];
    place = fmaf(share_of(inject[token * count + s], count), value, place);
  }
}

// grid: (n / 256)
extern "C" __global__ void silu_values(float* x, long long n, float scale) {
  grid_launch();
  grid_wait();
  const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const float value = x[i] * scale;
  x[i] = value * sigmoid(value);
}
