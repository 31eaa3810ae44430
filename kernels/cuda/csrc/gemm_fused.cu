// The product of many rows straight from quantised weights: a tile is unpacked to halves in shared
// memory, then multiplied on tensor cores.
//
// A block takes 128 rows and 64 tokens; columns in steps of 128 (four groups). Eight warps, each 32
// rows by 32 tokens. Sums of 64 columns are made afresh on the tensor core and added in float32.
// Two blocks share a multiprocessor, so that one unpacks while the other multiplies. -D FORMAT;
// PLANE as in gemm_convert.cu.
#include "gemm_tile.cuh"
#include "tiles.cuh"

using namespace voltapile;

// grid: (rows / 128, tokens / 64), 256 threads. halves: [tokens][k / 32][4] units. k is a multiple
// of 32. sums[token][row] = or += factor * product.
extern "C" __global__ void __launch_bounds__(THREADS, VP_ARCH >= 800 ? 2 : 1)
    gemm_fused(Bytes weights, const uint4* halves, float* sums, int rows, int tokens, int k,
               float factor, int adds, int is_tiled) {
  using F = formats::FORMAT;
  using C = Codec<F>;
  extern __shared__ __align__(128) std::uint8_t shared[];
  std::uint8_t *row_units = shared, *token_units = shared + ROWS * STRIDE;
  const int first_row = blockIdx.x * ROWS, first_token = blockIdx.y * TOKENS;
  const int groups = k / 32, warp = threadIdx.x >> 5;
  const Tile tile{static_cast<int>(threadIdx.x & 31)};
  const int row_bytes = k / F::length * F::bytes;
  const Lay lay = lay_of(HAS_TILES<F> && is_tiled, C::BYTES, row_bytes);
  const Bytes first_tile = weights + static_cast<long long>(first_row) * row_bytes;
  constexpr int TASKS = ROWS * 4 * (GROUPS / C::SPAN);  // row, span, p
  const int p = threadIdx.x & 3;
  float total[SUMS] = {};

  for (int first = 0; first < groups; first += GROUPS) {
#pragma unroll 1
    for (int task = threadIdx.x >> 2; task < TASKS / 4; task += THREADS / 4) {
      const int row = task % ROWS, span = first / C::SPAN + task / ROWS, group = span * C::SPAN;
      std::uint8_t* to = row_units + row * STRIDE + 64 * (group - first);
      if (group < groups) {
        const int there = min(row, rows - 1 - first_row);
        const Bytes chunk = first_tile + (there >> 4) * 16 * row_bytes + (there & 15) * lay.row +
                            group / C::GROUPS * lay.chunk;
        unpack_to<C>(chunk, span % (C::GROUPS / C::SPAN), p, to);
      } else {
        *reinterpret_cast<uint4*>(to + 16 * p) = uint4{0, 0, 0, 0};
      }
    }
#pragma unroll 2
    for (int task = threadIdx.x; task < TOKENS * GROUPS * 4; task += THREADS) {
      const int token = task / (GROUPS * 4), unit = task % (GROUPS * 4);
      const int there = min(first_token + token, tokens - 1);
      const bool is_there = first + unit / 4 < groups;
      *reinterpret_cast<uint4*>(token_units + token * STRIDE + 16 * unit) =
          is_there ? halves[(static_cast<long long>(there) * groups + first) * 4 + unit]
                   : uint4{0, 0, 0, 0};
    }
    __syncthreads();
    multiply_step(row_units + (warp >> 1) * 32 * STRIDE, token_units + (warp & 1) * 32 * STRIDE,
                  tile, total);
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < SUMS; ++i) {
    const int m = i / Tile::VALUES / 4, n = i / Tile::VALUES % 4, e = i % Tile::VALUES;
    const int row = first_row + (warp >> 1) * 32 + 16 * m + tile.sum_row(Tile::row_of(e));
    const int token = first_token + (warp & 1) * 32 + 8 * n +
                      dealt(tile.sum_token(Tile::token_of(e)));
    const float sum = tile.fold(total[i]) * factor;
    if (!tile.owns_sums() || row >= rows || token >= tokens) continue;
    float* out = sums + static_cast<long long>(token) * rows + row;
    *out = adds ? *out + sum : sum;
  }
}
