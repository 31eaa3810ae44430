// Pieces of attention to chosen blocks (sparse_attend.cu) become rows. -D as there.
#include "attention_tile.cuh"
#include "grid.cuh"
#include "stream_share.cuh"

namespace voltapile {

constexpr int JOINERS = 256, AT_ONCE = 9;  // threads, and pieces of each at once
constexpr unsigned EVERY = 0xffffffffu;

// How much each piece of a row weighs; returns their sum. A warp calls.
__device__ __forceinline__ float weigh_pieces(float* weights, const float2* stats, int pieces,
                                              int lane) {
  float most = -infinity(), sum = 0.0f;
#pragma unroll 2
  for (int i = lane; i < pieces; i += 32) most = fmaxf(most, stats[i].x);
#pragma unroll 1
  for (int step = 16; step > 0; step >>= 1) most = fmaxf(most, __shfl_xor_sync(EVERY, most, step));
#pragma unroll 1
  for (int i = lane; i < pieces; i += 32) {
    const float2 own = stats[i];
    const float weight = exp2_fast(own.x - most);
    weights[i] = weight;
    sum = __fmaf_rn(own.y, weight, sum);
  }
#pragma unroll 1
  for (int step = 16; step > 0; step >>= 1) sum += __shfl_xor_sync(EVERY, sum, step);
  return sum;
}

// What has no weight may never have been written.
__device__ __forceinline__ void add_piece(float4& sum, const float4& part, float weight) {
  if (weight == 0.0f) return;
  sum = {__fmaf_rn(part.x, weight, sum.x), __fmaf_rn(part.y, weight, sum.y),
         __fmaf_rn(part.z, weight, sum.z), __fmaf_rn(part.w, weight, sum.w)};
}

}  // namespace voltapile

using namespace voltapile;

// grid: (H, tokens), JOINERS threads; dim: a multiple of 4. shared: floats for `pieces`. Fours of a
// row's columns are dealt to threads, and so are pieces, as far as threads go. gate: of rows, which
// are `apart` values from each other; may be missing. What is joined is multiplied by its sigmoid.
extern "C" __global__ void __launch_bounds__(JOINERS, 1)
join_attended(const float* parts, const float2* stats, const float* gate, float* out, int pieces,
              int dim, int apart) {
  extern __shared__ __align__(128) std::uint8_t shared[];
  float* weights = reinterpret_cast<float*>(shared);
  __shared__ float4 sums[JOINERS];
  __shared__ float total;
  grid_launch();
  const int wide = dim / 4, groups = JOINERS / wide;
  const int group = threadIdx.x / wide, c = threadIdx.x - group * wide;
  grid_wait();
  const unsigned row = blockIdx.y * gridDim.x + blockIdx.x;
  stats += row * pieces;
  const float4* own = reinterpret_cast<const float4*>(parts) +
                      static_cast<std::uint64_t>(row * pieces) * wide + c;
  float4 part[AT_ONCE];
#pragma unroll
  for (int i = 0; i < AT_ONCE; ++i) part[i] = own[min(group + i * groups, pieces - 1) * wide];
  float4 gates{0, 0, 0, 0};
  if (gate != nullptr && group == 0)
    gates = reinterpret_cast<const float4*>(gate + static_cast<std::uint64_t>(row) * apart)[c];
  if (threadIdx.x < 32) {
    const float sum = weigh_pieces(weights, stats, pieces, threadIdx.x);
    if (threadIdx.x == 0) total = sum;
  }
  __syncthreads();
  float4 sum{0, 0, 0, 0};
#pragma unroll 1
  for (int first = group; first < pieces; first += AT_ONCE * groups) {
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int at = first + i * groups;
      if (first != group) part[i] = own[min(at, pieces - 1) * wide];
      add_piece(sum, part[i], at < pieces ? weights[at] : 0.0f);
    }
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (group > 0) return;
#pragma unroll 1
  for (int i = 1; i < groups; ++i) add_piece(sum, sums[i * wide + c], 1.0f);
  const float factor = reciprocal(total);
  sum = {sum.x * factor, sum.y * factor, sum.z * factor, sum.w * factor};
  if (gate != nullptr)  // as attention_gate.cu has it
    sum = {sum.x * sigmoid(gates.x), sum.y * sigmoid(gates.y), sum.z * sigmoid(gates.z),
           sum.w * sigmoid(gates.w)};
  reinterpret_cast<float4*>(out)[row * wide + c] = sum;
}
