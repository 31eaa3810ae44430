// Root mean square norms over runs of n values, each with bits that depend on nothing beside it
// (norm_row.cuh). Weights are there before the kernel before this one has ended. -D HELD: float4
// that a thread keeps; with few of them a block finds room beside a product that still runs.
#include "grid.cuh"
#include "half.cuh"
#include "norm_row.cuh"

namespace voltapile {

__device__ __forceinline__ void finish(float* out, int i, float value, int accumulate) {
  out[i] = accumulate ? out[i] + value : value;
}

}  // namespace voltapile

using namespace voltapile;

// Of n values that are no multiple of 4.
__device__ __forceinline__ void norm_of_any(const float* x, const float* weight, float* out, int n,
                                            float eps, int accumulate, float* scratch) {
  float sum = 0.0f;
#pragma unroll 1
  for (int i = threadIdx.x; i < n; i += blockDim.x) sum += x[i] * x[i];
  const float norm = 1.0f / sqrtf(block_join(sum, scratch, Add()) / n + eps);
#pragma unroll 1
  for (int i = threadIdx.x; i < n; i += blockDim.x)
    finish(out, i, x[i] * norm * weight[i], accumulate);
}

// grid: (runs); a block for each run of n values: with n a multiple of 4 no more than 4 HELD times
// as many as there are threads. What is read from far away is asked for at once. Bits are
// those of norm_row.cuh, as products make them that norm what they read.
extern "C" __global__ void __launch_bounds__(1024)
rms_norm_rows(const float* x, const float* weight, float* out, int n, float eps, int accumulate) {
  __shared__ float scratch[64];
  grid_launch();
  x += static_cast<long long>(blockIdx.x) * n;
  out += static_cast<long long>(blockIdx.x) * n;
  if (n % 4 != 0) {
    grid_wait();
    norm_of_any(x, weight, out, n, eps, accumulate, scratch);
    return;
  }
  const float4* x4 = reinterpret_cast<const float4*>(x);
  const float4* w4 = reinterpret_cast<const float4*>(weight);
  float4* out4 = reinterpret_cast<float4*>(out);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  const int count = n / 4, runs = (n + RUN - 1) / RUN;
  const int first = RUN / 4 * warp + 2 * lane, step = RUN / 4 * warps;  // in float4
  const float inverse = 1.0f / n;
  float4 v[HELD], w[HELD];
#pragma unroll
  for (int i = 0; i < HELD; ++i) {
    const int at = first + i / 2 * step + i % 2;
    w[i] = at < count ? w4[at] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  grid_wait();
#pragma unroll
  for (int i = 0; i < HELD; ++i) {
    const int at = first + i / 2 * step + i % 2;
    v[i] = at < count ? x4[at] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
#pragma unroll
  for (int i = 0; i < HELD; i += 2) {
    const float sum = warp_join(squares_of(v[i], v[i + 1]), Add());
    const int run = warp + i / 2 * warps;
    if (lane == 0 && run < runs) scratch[run] = sum;
  }
  __syncthreads();
  const float norm = norm_factor(scratch, runs, inverse, eps, lane);
#pragma unroll
  for (int i = 0; i < HELD; ++i) {
    const int at = first + i / 2 * step + i % 2;
    if (at >= count) break;
    float4 y = scaled(scaled(v[i], w[i]), norm);
    if (accumulate) {
      const float4 old = out4[at];
      y = make_float4(old.x + y.x, old.y + y.y, old.z + y.z, old.w + y.w);
    }
    out4[at] = y;
  }
}

// grid: (runs / 4), 128 threads; a warp for each run of n <= 512 values (heads of q and k)
extern "C" __global__ void rms_norm_heads(const float* x, const float* weight, float* out, int n,
                                          float eps, int accumulate, int runs) {
  const int run = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x & 31;
  grid_launch();
  grid_wait();
  if (run >= runs) return;
  x += static_cast<long long>(run) * n;
  out += static_cast<long long>(run) * n;
  float held[16], sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int at = 32 * i + lane;
    held[i] = at < n ? x[at] : 0.0f;
    sum += held[i] * held[i];
  }
  sum = warp_join(sum, Add());
  const float norm = 1.0f / sqrtf(sum / n + eps);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int at = 32 * i + lane;
    if (at < n) finish(out, at, held[i] * norm * weight[at], accumulate);
  }
}
