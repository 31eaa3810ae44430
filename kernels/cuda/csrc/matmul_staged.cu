// Tokens as records for matmul_wide.cu, once for all blocks: [chunk][token] of them in global
// memory. -D FORMAT, one that matmul_block.cuh knows; MANY 2.
#include "grid.cuh"
#include "matmul_order.cuh"

using namespace voltapile;

// grid: (chunks / 8, tokens), 256 threads: a warp for a chunk of a token. k: a multiple of 256
extern "C" __global__ void __launch_bounds__(256)
    stage_tokens(const float* x, std::uint8_t* records, int k, int tokens) {
  using Staged = BlockTokens<formats::FORMAT>;
  grid_launch();
  grid_wait();
  const int lane = threadIdx.x & 31, chunk = blockIdx.x * 8 + (threadIdx.x >> 5);
  if (256 * chunk >= k) return;
  float4 a, b;
  Staged::load_whole(x + static_cast<long long>(blockIdx.y) * k, 256 * chunk, lane, a, b);
  Staged(records + static_cast<long long>(chunk) * Staged::bytes(tokens), tokens)
      .put(blockIdx.y, a, b, lane);
}
