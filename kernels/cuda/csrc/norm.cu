// Root mean square norms over runs of n values. How many threads work on a run follows from n
// alone, so that a run's bits depend on nothing beside it.
#include "block.cuh"

namespace voltapile {

__device__ __forceinline__ void finish(float* out, int i, float value, int accumulate) {
  out[i] = accumulate ? out[i] + value : value;
}

}  // namespace voltapile

using namespace voltapile;

// grid: (runs); a block for each run of n values
extern "C" __global__ void rms_norm_rows(const float* x, const float* weight, float* out, int n,
                                         float eps, int accumulate) {
  __shared__ float scratch[32];
  x += static_cast<long long>(blockIdx.x) * n;
  out += static_cast<long long>(blockIdx.x) * n;
  float sum = 0.0f;
  if (n % 4 == 0) {
    const float4* x4 = reinterpret_cast<const float4*>(x);
    for (int i = threadIdx.x; i < n / 4; i += blockDim.x) {
      const float4 v = x4[i];
      sum += (v.x * v.x + v.y * v.y) + (v.z * v.z + v.w * v.w);
    }
  } else {
    for (int i = threadIdx.x; i < n; i += blockDim.x) sum += x[i] * x[i];
  }
  sum = block_join(sum, scratch, Add());
  const float norm = 1.0f / sqrtf(sum / n + eps);
  if (n % 4 == 0) {
    const float4* x4 = reinterpret_cast<const float4*>(x);
    const float4* w4 = reinterpret_cast<const float4*>(weight);
    float4* out4 = reinterpret_cast<float4*>(out);
    for (int i = threadIdx.x; i < n / 4; i += blockDim.x) {
      const float4 v = x4[i], w = w4[i];
      float4 y = make_float4(v.x * norm * w.x, v.y * norm * w.y, v.z * norm * w.z,
                             v.w * norm * w.w);
      if (accumulate) {
        const float4 old = out4[i];
        y = make_float4(old.x + y.x, old.y + y.y, old.z + y.z, old.w + y.w);
      }
      out4[i] = y;
    }
  } else {
    for (int i = threadIdx.x; i < n; i += blockDim.x)
      finish(out, i, x[i] * norm * weight[i], accumulate);
  }
}

// grid: (runs / 4), 128 threads; a warp for each run of n <= 512 values (heads of q and k)
extern "C" __global__ void rms_norm_heads(const float* x, const float* weight, float* out, int n,
                                          float eps, int accumulate, int runs) {
  const int run = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x & 31;
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
