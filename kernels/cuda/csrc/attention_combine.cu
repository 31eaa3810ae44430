// Adds what attention_decode left of each token and head, pieces in an order that follows from
// their number alone, and normalises.
#include "attention_rows.cuh"

namespace voltapile {

constexpr int WARPS = 8;

#ifndef VP_EMULATION
extern __shared__ __align__(16) unsigned char shared[];
#endif

struct Shared {
  float4 sums[WARPS][64];
  float totals[WARPS];
};

}  // namespace voltapile

using namespace voltapile;

// grid: (H, tokens or items), 256 threads. See attention_decode.cu for plan, partial and stats.
extern "C" __global__ void __launch_bounds__(256)
attention_combine(const float* partial, const float2* stats, const int* positions, const int* plan,
                  float* out, int first, int num_heads, int dim, int limit, int window, int most,
                  int stride, int chunk) {
  Shared& sh = *reinterpret_cast<Shared*>(shared);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, item = first + blockIdx.y;
  int begin = item, count = 1, base = blockIdx.y;
  if (plan != nullptr) {
    if (item >= plan[0]) return;
    begin = plan[4 + 2 * item], count = plan[5 + 2 * item], base = blockIdx.y * chunk;
  }
  for (int r = 0; r < count; ++r) {
    const Span s = span_of(positions[begin + r], limit, window, most);
    const int pieces = s.last() - s.first() + 1;
    const int at = ((base + r) * num_heads + blockIdx.x) * stride;
    float m = -infinity();
    for (int i = lane; i < pieces; i += 32) m = fmaxf(m, stats[at + i].x);
    for (int step = 16; step > 0; step >>= 1)
      m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, step));
    const float shift = m == -infinity() ? 0.0f : m;
    float4 sum[2] = {};
    float total = 0.0f;
#pragma unroll 4
    for (int i = warp; i < pieces; i += WARPS) {
      const float2 stat = stats[at + i];
      const float weight = exp2_fast(stat.x - shift);
      const float* part = partial + static_cast<long long>(at + i) * dim;
      total = __fmaf_rn(weight, stat.y, total);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int d = 128 * j + 4 * lane;
        if (d >= dim) break;
        const float4 v = *reinterpret_cast<const float4*>(part + d);
        sum[j].x = __fmaf_rn(weight, v.x, sum[j].x), sum[j].y = __fmaf_rn(weight, v.y, sum[j].y);
        sum[j].z = __fmaf_rn(weight, v.z, sum[j].z), sum[j].w = __fmaf_rn(weight, v.w, sum[j].w);
      }
    }
    __syncthreads();  // the last row's sums are read
    sh.sums[warp][lane] = sum[0], sh.sums[warp][32 + lane] = sum[1];
    if (lane == 0) sh.totals[warp] = total;
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < dim) {
      const float* all = reinterpret_cast<const float*>(sh.sums);
      float y = all[threadIdx.x], n = sh.totals[0];
      for (int w = 1; w < WARPS; ++w) y += all[256 * w + threadIdx.x], n += sh.totals[w];
      out[(static_cast<long long>(begin + r) * num_heads + blockIdx.x) * dim + threadIdx.x] = y / n;
    }
  }
}
