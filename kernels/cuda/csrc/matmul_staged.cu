// Tokens as records for matmul_wide.cu and matmul_cluster.cu, once for all blocks: [chunk][token]
// of them in global memory. -D FORMAT and OTHER, which matmul_block.cuh knows; MANY 2.
#include "grid.cuh"
#include "matmul_chunk.cuh"

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
