// Chosen experts of few tokens, each token with the bits that it has alone: no order depends on
// what else is computed, and nothing comes from the host. is_tiled: how matrices lie (tiles.cuh).
// -D as in expert_items.cuh; TILES: 2 for expert_up, of which a gate and its up are one each, 1 for
// expert_down.
#include "expert_items.cuh"

using namespace voltapile;
using F = formats::FORMAT;

// Of a multiprocessor; registers for more are not there.
constexpr int MIN_BLOCKS = VP_ARCH >= 800 && Codec<F>::PLANES == 1 ? 16 / WARPS : 1;
constexpr int MOST_USED = 32;

// grid: (rows / 16, or / 32 without a gate; tokens * used). out: [tokens * used][rows]. part: GATE
// for silu(gate x) * up x where is_glu, else which matrix is multiplied.
extern "C" __global__ void __launch_bounds__(32 * WARPS, MIN_BLOCKS)
    expert_up(const Expert* table, int count, int first, const int* chosen, const float* x,
              float* out, int used, int k, int rows, int part, int is_glu, int is_tiled) {
  extern __shared__ __align__(128) std::uint8_t shared[];
  grid_launch();
  grid_wait();
  const int pair = blockIdx.y;
  const Expert* expert = Experts{table, count, first}.find(chosen[pair]);
  if (expert == nullptr) return;
  constexpr int STRIDE = ChunkMemory<F>::bytes(1);
  const int warp = threadIdx.x >> 5, block_rows = is_glu ? 16 : 16 * TILES;
  const int first_row = blockIdx.x * block_rows;
  const Tile tile{static_cast<int>(threadIdx.x & 31)};
  const long long row_bytes = row_bytes_of<F>(k);
  Item all;
#pragma unroll
  for (int t = 0; t < TILES; ++t) {
    const int row = first_row_of(first_row + (is_glu ? 0 : 16 * t), rows);
    all.first[t] = expert->matrices[is_glu ? t : part] + row * row_bytes;
  }
  all.x = x + static_cast<long long>(pair / used) * k;
  float total[TILES][Tile::VALUES] = {};
  multiply_items<F>(
      chunks_of<F>(k), k, lay_of_rows<F>(is_tiled, k), min(15, rows - 1), shared + warp * STRIDE,
      warp, tile,
      [&](int item) {
        Item found = all;
        found.chunk = item;
        return found;
      },
      [&](int, int t, const float(&sums)[Tile::VALUES]) {
#pragma unroll
        for (int i = 0; i < TILES * Tile::VALUES; ++i)
          if (i / Tile::VALUES == t)
            total[i / Tile::VALUES][i % Tile::VALUES] += sums[i % Tile::VALUES];
      });
  float* parts = reinterpret_cast<float*>(shared + WARPS * STRIDE);  // [WARPS][TILES][16]
#pragma unroll
  for (int t = 0; t < TILES; ++t) keep_rows(total[t], tile, parts + (warp * TILES + t) * 16);
  __syncthreads();
  const int i = threadIdx.x, meant = first_row + i / 16 * 16;
  const int row = first_row_of(meant, rows) + i % 16;
  if (i >= block_rows || row < meant || row >= rows) return;
  float value = 0, other = 0;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) value += parts[w * TILES * 16 + i];
  if (is_glu) {
#pragma unroll
    for (int w = 0; w < WARPS; ++w) other += parts[w * TILES * 16 + 16 + i];
    value = activated(value, SILU) * other;
  }
  out[static_cast<long long>(pair) * rows + row] = value;
}

// grid: (rows / 16, tokens). inner: [tokens * used][k]; out [tokens][rows]: the sum over a token's
// experts in the order of `chosen`.
extern "C" __global__ void __launch_bounds__(32 * WARPS, MIN_BLOCKS)
    expert_down(const Expert* table, int count, int first, const int* chosen, const float* weights,
                const float* inner, float* out, int used, int k, int rows, int accumulate,
                int is_tiled) {
  extern __shared__ __align__(128) std::uint8_t shared[];
  __shared__ const std::uint8_t* found[MOST_USED];
  __shared__ int ranks[MOST_USED], here;
  grid_launch();
  grid_wait();
  constexpr int STRIDE = ChunkMemory<F>::bytes(1);
  const int warp = threadIdx.x >> 5, token = blockIdx.y, meant = blockIdx.x * 16;
  const int first_row = first_row_of(meant, rows), chunks = chunks_of<F>(k);
  const Tile tile{static_cast<int>(threadIdx.x & 31)};
  if (threadIdx.x < used) {
    const Expert* expert = Experts{table, count, first}.find(chosen[token * used + threadIdx.x]);
    found[threadIdx.x] = expert == nullptr ? nullptr : expert->matrices[DOWN];
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    int n = 0;
    for (int rank = 0; rank < used; ++rank)
      if (found[rank] != nullptr) ranks[n++] = rank;
    here = n;
  }
  __syncthreads();
  const long long skipped = static_cast<long long>(first_row) * row_bytes_of<F>(k);
  float* parts = reinterpret_cast<float*>(shared + WARPS * STRIDE);  // [expert][chunk][16]
  multiply_items<F>(
      here * chunks, k, lay_of_rows<F>(is_tiled, k), min(15, rows - 1), shared + warp * STRIDE,
      warp, tile,
      [&](int item) {
        const int rank = ranks[item / chunks];
        return Item{{found[rank] + skipped},
                    inner + (static_cast<long long>(token) * used + rank) * k, item % chunks};
      },
      [&](int item, int, const float(&sums)[Tile::VALUES]) {
        keep_rows(sums, tile, parts + item * 16);
      });
  __syncthreads();
  const int i = threadIdx.x, row = first_row + i;
  if (i >= 16 || row < meant || row >= rows) return;
  float* to = out + static_cast<long long>(token) * rows + row;
  float sum = 0;
  for (int n = 0; n < here; ++n) {
    float own = 0;
    for (int chunk = 0; chunk < chunks; ++chunk) own += parts[(n * chunks + chunk) * 16 + i];
    sum += weights[token * used + ranks[n]] * own;
  }
  *to = accumulate ? *to + sum : sum;
}
