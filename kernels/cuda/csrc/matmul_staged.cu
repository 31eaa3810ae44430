// Tokens as records for matmul_wide.cu and matmul_cluster.cu, once for all blocks: [chunk][token]
// of them in global memory. -D FORMAT and OTHER, which matmul_block.cuh knows; MANY 2.
#include "grid.cuh"
#include "matmul_chunk.cuh"
#include "norm_row.cuh"

using namespace voltapile;

template <class F>
__device__ __forceinline__ void stage_chunk(const float* x, std::uint8_t* records, int chunk,
                                            int token, int tokens, int lane) {
  using Staged = BlockTokens<F>;
  float4 a, b;
  Staged::load_whole(x, 256 * chunk, lane, a, b);
  Staged(records + static_cast<long long>(chunk) * Staged::bytes(tokens), tokens)
      .put(token, a, b, lane);
}

// grid: (chunks / 8, tokens of each format), 256 threads: a warp for a chunk of a token. k: a
// multiple of 256
extern "C" __global__ void __launch_bounds__(256)
    stage_tokens(const float* x, std::uint8_t* records, std::uint8_t* other_records, int k,
                 int tokens) {
  constexpr bool IS_SAME = Equal<formats::FORMAT, formats::OTHER>::value;
  grid_launch();
  const int lane = threadIdx.x & 31;
  const int chunk = blockIdx.x * 8 + __shfl_sync(~0u, threadIdx.x >> 5, 0);
  const int token = blockIdx.y % tokens;
  x += static_cast<long long>(token) * k;
  grid_wait();
  if (256 * chunk >= k) return;
  if (!IS_SAME && blockIdx.y >= tokens)
    stage_chunk<formats::OTHER>(x, other_records, chunk, token, tokens, lane);
  else
    stage_chunk<formats::FORMAT>(x, records, chunk, token, tokens, lane);
}

constexpr int CREW_OF_ROW = 16, HELD = 2;  // warps for a token, and chunks of one
struct Room {                              // a warp's
  float turned[RUN];
  uint4 vain[36];
};

// y: the lane's eight neighbours of a chunk, which go to a token's place among others. turned: 256
// floats of the warp's own.
template <class F>
__device__ __forceinline__ void put_neighbours(const float4 (&y)[2], float* turned,
                                               std::uint8_t* place, int lane) {
  using Staged = BlockTokens<F>;
  float4 a = y[0], b = y[1];
  if constexpr (Order<F>::APART != 4) {
    reinterpret_cast<float4*>(turned)[2 * lane] = y[0];
    reinterpret_cast<float4*>(turned)[2 * lane + 1] = y[1];
    __syncwarp();
    Staged::load_whole(turned, 0, lane, a, b);
    __syncwarp();
  }
  Staged(place, 2).put(0, a, b, lane);  // of several: one that is alone lies otherwise
}

// The same of rows that are normed first, by weights `gain`, with the bits of norm.cu; the normed
// rows go to `out`. grid: (tokens), 512 threads. formats: 2 for other_records, too. From sm_90 on
// the weights' own norm comes first, and goes nowhere, so that code is there when x is.
extern "C" __global__ void __launch_bounds__(32 * CREW_OF_ROW)
    norm_tokens(const float* x, const float* gain, float* out, std::uint8_t* records,
                std::uint8_t* other_records, int k, int tokens, int formats, float eps) {
  constexpr bool IS_SAME = Equal<formats::FORMAT, formats::OTHER>::value;
  constexpr int SIZE = BlockTokens<formats::FORMAT>::PER_TOKEN;
  static_assert(SIZE == sizeof(Room::vain) && SIZE == BlockTokens<formats::OTHER>::PER_TOKEN);
  __shared__ float sums[2][HELD * CREW_OF_ROW];
  __shared__ Room rooms[CREW_OF_ROW];
  grid_launch();
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
  const int token = blockIdx.x, chunks = k / RUN;
  const float inverse = 1.0f / k;
  Room& own = rooms[warp];
  x += static_cast<long long>(token) * k;
  out += static_cast<long long>(token) * k;
  float4 w[HELD][2];
#pragma unroll
  for (int i = 0; i < 2 * HELD; ++i) {
    const int chunk = min(warp + i / 2 * CREW_OF_ROW, chunks - 1);
    w[i / 2][i % 2] = reinterpret_cast<const float4*>(gain + RUN * chunk + 8 * lane)[i % 2];
  }
#pragma unroll 1
  for (bool is_now = VP_ARCH < 900, has_run = false; !has_run; has_run = is_now, is_now = true) {
    if (is_now) grid_wait();
    const float* from = is_now ? x : gain;
    float4 v[HELD][2];
#pragma unroll
    for (int i = 0; i < 2 * HELD; ++i) {
      const int chunk = min(warp + i / 2 * CREW_OF_ROW, chunks - 1);
      v[i / 2][i % 2] = reinterpret_cast<const float4*>(from + RUN * chunk + 8 * lane)[i % 2];
    }
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
      const float sum = warp_join(squares_of(v[i][0], v[i][1]), Add());
      if (lane == 0) sums[is_now][warp + i * CREW_OF_ROW] = sum;
    }
    __syncthreads();
    const float factor = norm_factor(sums[is_now], chunks, inverse, eps, lane);
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
      const int chunk = warp + i * CREW_OF_ROW;
      if (chunk >= chunks) break;
      const float4 y[2] = {scaled(scaled(v[i][0], w[i][0]), factor),
                           scaled(scaled(v[i][1], w[i][1]), factor)};
      float4* to = reinterpret_cast<float4*>(out + RUN * chunk + 8 * lane);
      if (is_now) to[0] = y[0], to[1] = y[1];
      const long long at = (static_cast<long long>(chunk) * tokens + token) * SIZE;
      std::uint8_t* vain = reinterpret_cast<std::uint8_t*>(own.vain);
      put_neighbours<formats::FORMAT>(y, own.turned, is_now ? records + at : vain, lane);
      if (IS_SAME || formats < 2) continue;
      put_neighbours<formats::OTHER>(y, own.turned, is_now ? other_records + at : vain, lane);
    }
  }
}
