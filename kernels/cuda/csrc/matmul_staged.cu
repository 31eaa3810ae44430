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
  const bool is_other = !IS_SAME && blockIdx.y >= tokens;
  const int lane = threadIdx.x & 31, token = blockIdx.y - (is_other ? tokens : 0);
  const int chunk = blockIdx.x * 8 + __shfl_sync(~0u, threadIdx.x >> 5, 0);
  x += static_cast<long long>(token) * k;
  grid_wait();
  if (256 * chunk >= k) return;
  if (!IS_SAME && is_other)
    stage_chunk<formats::OTHER>(x, other_records, chunk, token, tokens, lane);
  else
    stage_chunk<formats::FORMAT>(x, records, chunk, token, tokens, lane);
}

// A lane's eight neighbours of a chunk go to a token's record, times `factor`. turned: the same of
// all lanes, one behind the other.
template <class F>
__device__ __forceinline__ void put_neighbours(float4 a, float4 b, const float4* turned,
                                               float factor, std::uint8_t* record, int lane) {
  using Staged = BlockTokens<F>;
  if constexpr (Order<F>::APART != 4)
    Staged::load_whole(reinterpret_cast<const float*>(turned), 0, lane, a, b);
  // Room of several: one that is alone lies otherwise.
  Staged(record, 2).template put<false>(0, scaled(a, factor), scaled(b, factor), lane);
}

constexpr int MOST_CHUNKS = 32;

// The same of rows that are normed first, by weights `gain`, with the bits of norm.cu; the normed
// rows go to `out`, if that is not null. share: 1 / k. grid: (tokens), a warp for each chunk.
// Nothing is decided, and little is held, so that several blocks find room where a product leaves a
// multiprocessor.
extern "C" __global__ void __launch_bounds__(32 * MOST_CHUNKS)
    norm_tokens(const float* x, const float* gain, float* out, std::uint8_t* records,
                std::uint8_t* other_records, int k, int tokens, float share, float eps) {
  using First = formats::FORMAT;
  using Second = formats::OTHER;
  constexpr bool IS_SAME = Equal<First, Second>::value;
  constexpr int SIZE = BlockTokens<First>::PER_TOKEN;
  static_assert(SIZE == BlockTokens<Second>::PER_TOKEN);
  __shared__ float sums[MOST_CHUNKS];
  __shared__ float4 turned[MOST_CHUNKS][RUN / 4];
  grid_launch();
  const int lane = threadIdx.x & 31, chunk = __shfl_sync(~0u, threadIdx.x >> 5, 0);
  const int token = blockIdx.x, at = RUN * chunk + 8 * lane;
  const long long place = (static_cast<long long>(chunk) * tokens + token) * SIZE;
  const float4* from = reinterpret_cast<const float4*>(x + static_cast<long long>(token) * k + at);
  float4* to = reinterpret_cast<float4*>(out + static_cast<long long>(token) * k + at);
  const float4 v = reinterpret_cast<const float4*>(gain + at)[0];
  const float4 w = reinterpret_cast<const float4*>(gain + at)[1];
  grid_wait();
  float4 a = from[0], b = from[1];
  const float sum = warp_join(squares_of(a, b), Add());
  if (lane == 0) sums[chunk] = sum;
  a = scaled(a, v), b = scaled(b, w);
  float4* own = turned[chunk];
  if constexpr (Order<First>::APART != 4 || Order<Second>::APART != 4)
    own[2 * lane] = a, own[2 * lane + 1] = b;
  __syncthreads();
  const float factor = norm_factor<MOST_CHUNKS>(sums, blockDim.x / 32, share, eps, lane);
  put_neighbours<First>(a, b, own, factor, records + place, lane);
  if (!IS_SAME) put_neighbours<Second>(a, b, own, factor, other_records + place, lane);
  if (out != nullptr) to[0] = scaled(a, factor), to[1] = scaled(b, factor);
}
