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

// grid: (tokens * S): a run of `width` values each, a multiple of 4 and no more than 16 times as
// many as threads. weight: [S][width]. y [tokens][width], inject [tokens][S], or null:
// what is added to x first.
extern "C" __global__ void __launch_bounds__(1024)
stream_norm(float* __restrict__ x, const float* __restrict__ inject, const float* __restrict__ y,
            const float* __restrict__ weight, float* __restrict__ out, int width, int count,
            float eps) {
  constexpr int HELD = 4;
  __shared__ float scratch[32];
  grid_launch();
  const long long run = blockIdx.x;
  const int stream = blockIdx.x % count, fours = width / 4;
  const float4* w4 = reinterpret_cast<const float4*>(weight) + stream * fours;
  const float4* y4 = reinterpret_cast<const float4*>(y + run / count * width);
  float4* x4 = reinterpret_cast<float4*>(x + run * width);
  float4* out4 = reinterpret_cast<float4*>(out + run * width);
  grid_wait();
  float4 v[HELD], added[HELD];
#pragma unroll
  for (int i = 0; i < HELD; ++i) {
    const int at = i * blockDim.x + threadIdx.x;
    v[i] = at < fours ? x4[at] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (y != nullptr && at < fours) added[i] = y4[at];
  }
  const float share = y != nullptr ? share_of(inject[run], count) : 0.0f;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < HELD; ++i) {
    const int at = i * blockDim.x + threadIdx.x;
    if (y != nullptr && at < fours) {
      v[i] = {fmaf(share, added[i].x, v[i].x), fmaf(share, added[i].y, v[i].y),
              fmaf(share, added[i].z, v[i].z), fmaf(share, added[i].w, v[i].w)};
      x4[at] = v[i];
    }
    sum += (v[i].x * v[i].x + v[i].y * v[i].y) + (v[i].z * v[i].z + v[i].w * v[i].w);
  }
  const float factor = inverse_root(block_join(sum, scratch, Add()) / width + eps);
#pragma unroll
  for (int i = 0; i < HELD; ++i) {
    const int at = i * blockDim.x + threadIdx.x;
    if (at >= fours) break;
    const float4 w = w4[at];
    out4[at] = {v[i].x * factor * w.x, v[i].y * factor * w.y, v[i].z * factor * w.z,
                v[i].w * factor * w.w};
  }
}

// grid: (width / 1024, tokens), 256 threads, four columns each. out [tokens][width]: the mean over
// streams of x * sigmoid(gate), or of gate * scales[token] where those are sums of a product of
// many rows.
extern "C" __global__ void stream_mix(const float* __restrict__ x, const float* __restrict__ gate,
                                      const float* __restrict__ scales, float* __restrict__ out,
                                      int width, int count) {
  grid_launch();
  grid_wait();
  const int i = blockIdx.x * blockDim.x + threadIdx.x, fours = width / 4;
  if (i >= fours) return;
  const long long token = blockIdx.y;
  const float4* x4 = reinterpret_cast<const float4*>(x) + token * count * fours + i;
  const float4* gate4 = reinterpret_cast<const float4*>(gate) + token * count * fours + i;
  const float scale = scales != nullptr ? scales[token] : 1.0f;
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
  for (int s = 0; s < count; ++s, x4 += fours, gate4 += fours) {
    const float4 v = *x4, g = *gate4;
    sum.x += v.x * sigmoid(g.x * scale), sum.y += v.y * sigmoid(g.y * scale);
    sum.z += v.z * sigmoid(g.z * scale), sum.w += v.w * sigmoid(g.w * scale);
  }
  reinterpret_cast<float4*>(out)[token * fours + i] = {sum.x / count, sum.y / count,
                                                       sum.z / count, sum.w / count};
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
