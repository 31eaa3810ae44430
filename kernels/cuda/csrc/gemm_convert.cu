// To and from the product of many rows: activations and weights as halves, and finished sums.
//
// Halves lie in the order of units (mma.cuh), the same for both factors: [row][group][p][8]. A
// token's row gets one power of two (matmul_tokens.cuh). -D FORMAT; PLANE 1 asks for what the first
// halves leave, times 2^11. The functions that do not need FORMAT are compiled with any.
#include "matmul_tokens.cuh"
#include "tiles.cuh"
#include "unpack_k.cuh"

using namespace voltapile;

// Two integers and {scale, offset} to two halves, or what they leave.
__device__ __forceinline__ unsigned scaled_pair(unsigned pair, float2 scale) {
  const float2 v = half_values(pair);
  unsigned high, low;
  split_pair(fmaf(scale.x, v.x, scale.y), fmaf(scale.x, v.y, scale.y), high, low);
  return PLANE == 0 ? high : low;
}

template <class C>
__device__ __forceinline__ void write_units(Bytes chunk, int span, int p, uint4* out, int groups) {
  Unit found[C::SPAN * C::PLANES];
  C::unpack(chunk, span, p, found);
#pragma unroll
  for (int g = 0; g < C::SPAN; ++g) {
    if (g >= groups) return;
    Unit u = found[g * C::PLANES + (C::PLANES > 1 ? PLANE : 0)];
    if constexpr (!C::NATURAL) {
      const int run = (span * C::SPAN + g) * C::SCALES;
#pragma unroll
      for (int i = 0; i < 4; ++i)
        u.r[i] = scaled_pair(u.r[i], C::scale(chunk, run + (i >> 1) % C::SCALES));
    }
    out[4 * g + p] = uint4{u.r[0], u.r[1], u.r[2], u.r[3]};
  }
}

// grid: (4 * spans of a row / 256, rows). out: [rows][k / 32][4] units. k is a multiple of 32.
extern "C" __global__ void weights_to_half(Bytes weights, uint4* out, int rows, int k,
                                           int is_tiled) {
  using F = formats::FORMAT;
  using C = Codec<F>;
  const int index = blockIdx.x * blockDim.x + threadIdx.x;
  const int groups = k / 32, row_bytes = k / F::length * F::bytes;
  const Lay lay = lay_of(HAS_TILES<F> && is_tiled, C::BYTES, row_bytes);
  for (int row = blockIdx.y; row < rows; row += gridDim.y) {
    const Bytes own_row = row_at(weights, lay, row, row_bytes);
    uint4* out_row = out + static_cast<long long>(row) * groups * 4;
    if constexpr (C::EXPAND) {
      __shared__ __align__(16) float floats[32 * 260];
      float* own = floats + 260 * threadIdx.x;
      if (index < k / 256) {
        F::unpack(own_row + static_cast<long long>(index) * lay.chunk, own);
        for (int i = 0; i < 32; ++i)
          write_units<Codec<Expanded>>(reinterpret_cast<Bytes>(own), i >> 2, i & 3,
                                       out_row + 32 * index + 4 * (i >> 2), 1);
      }
    } else {
      const int span = index >> 2, first = span * C::SPAN;
      if (first < groups)
        write_units<C>(own_row + static_cast<long long>(first / C::GROUPS) * lay.chunk,
                       span % (C::GROUPS / C::SPAN), index & 3, out_row + 4 * first,
                       groups - first);
    }
  }
}

// grid: (tokens), 256 threads. halves: [planes][tokens][k / 32][4] units; scales: [tokens].
extern "C" __global__ void tokens_to_half(const float* x, uint4* halves, float* scales, int k,
                                          int planes) {
  __shared__ float largest_of_warp[8];
  const long long token = blockIdx.x, units = k / 8;
  const float* row = x + token * k;
  float largest = 0;
  for (int i = threadIdx.x; i < k / 4; i += blockDim.x)
    largest = fmaxf(largest, largest_of(four_columns(row, 4 * i, k)));
#pragma unroll
  for (int step = 16; step > 0; step >>= 1)
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
  if ((threadIdx.x & 31) == 0) largest_of_warp[threadIdx.x >> 5] = largest;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 8; ++i) largest = fmaxf(largest, largest_of_warp[i]);
  const float2 scale = scales_for(largest);
  if (threadIdx.x == 0) scales[token] = scale.y;
  using C = Codec<formats::FORMAT>;
  for (int i = threadIdx.x; i < units; i += blockDim.x) {
    const int column = 32 * (i >> 2) + 4 * (i & 3);
    Unit high, low;
    pack_four<C::NATURAL>(four_columns(row, column, k), scale.x, high.r, low.r);
    pack_four<C::NATURAL>(four_columns(row, column + 16, k), scale.x, high.r + 2, low.r + 2);
    halves[token * units + i] = uint4{high.r[0], high.r[1], high.r[2], high.r[3]};
    if (planes > 1)
      halves[(gridDim.x + token) * units + i] = uint4{low.r[0], low.r[1], low.r[2], low.r[3]};
  }
}

// grid: (n / 256, tokens). epilogue as in matmul_epilogue.cuh: 0 plain, 1 add, 2 silu, 3 gelu, the
// last two with the sums of up. May run in place.
extern "C" __global__ void finish_sums(const float* sums, const float* up_sums,
                                       const float* scales, const float* bias,
                                       const float* up_bias, float* out, int n, int epilogue) {
  const int column = blockIdx.x * blockDim.x + threadIdx.x;
  if (column >= n) return;
  const long long token = blockIdx.y, at = token * n + column;
  const float scale = scales[token];
  float value = sums[at] * scale;
  if (bias != nullptr) value += bias[column];
  if (epilogue >= 2) {
    float up = up_sums[at] * scale;
    if (up_bias != nullptr) up += up_bias[column];
    float slope = value;
    if (epilogue == 3)
      slope = 1.5957691216057308f * (value + 0.044715f * value * value * value);
    value = value / (1.0f + expf(-slope)) * up;
  }
  out[at] = epilogue == 1 ? out[at] + value : value;
}
