// Experts of many tokens: pairs of a token and one of its experts, sorted by expert, so that a tile
// of tokens has one expert. Everything is planned on the device. Products are those of
// expert_batch.cuh, before sm_80 of gemm_tile.cuh.
//
// A place is a pair's number in that order. -D FORMAT; PLANE 0; TILES and PITCH as in
// expert_batch.cuh. Functions that do not need FORMAT are compiled with any.
#include "expert_batch.cuh"
#include "expert_table.cuh"
#include "grid.cuh"

namespace voltapile {

using F = formats::FORMAT;
using C = Codec<F>;

// Of one expert; in global memory.
struct Group {
  int expert, first, count;  // places first to first + count - 1; expert: its number in the table
};

#if VP_ARCH < 800
// The first of the 32 tokens that a warp has.
__device__ __forceinline__ int first_of(int warp) { return (warp & 1) * 32; }

// Sums of 128 rows times 64 tokens. row_begin: where one of the 128 rows is, whose chunks are
// chunk_bytes apart; token_at: the units of one of the tokens. count: of tokens.
template <class Row, class Token>
__device__ __forceinline__ void multiply_tile(const Row& row_begin, int chunk_bytes,
                                              const Token& token_at, int groups,
                                              std::uint8_t* shared, int count, int warp,
                                              const Tile& tile, float (&total)[SUMS]) {
  std::uint8_t *row_units = shared, *token_units = shared + ROWS * STRIDE;
  constexpr int TASKS = ROWS * (GROUPS / C::SPAN);  // row, span
  const int p = threadIdx.x & 3;
  for (int first = 0; first < groups; first += GROUPS) {
#pragma unroll 1
    for (int task = threadIdx.x >> 2; task < TASKS; task += THREADS / 4) {
      const int row = task % ROWS, span = first / C::SPAN + task / ROWS, group = span * C::SPAN;
      std::uint8_t* to = row_units + row * STRIDE + 64 * (group - first);
      if (group < groups) {
        const Bytes chunk = row_begin(row) + group / C::GROUPS * chunk_bytes;
        unpack_to<C>(chunk, span % (C::GROUPS / C::SPAN), p, to);
      } else {
        *reinterpret_cast<uint4*>(to + 16 * p) = uint4{0, 0, 0, 0};
      }
    }
#pragma unroll 2
    for (int task = threadIdx.x; task < TOKENS * GROUPS * 4; task += THREADS) {
      const int token = task / (GROUPS * 4), unit = task % (GROUPS * 4);
      *reinterpret_cast<uint4*>(token_units + token * STRIDE + 16 * unit) =
          first + unit / 4 < groups ? token_at(token)[first * 4 + unit] : uint4{0, 0, 0, 0};
    }
    __syncthreads();
    if (first_of(warp) < count)
      multiply_step(row_units + (warp >> 1) * 32 * STRIDE, token_units + first_of(warp) * STRIDE,
                    tile, total);
    __syncthreads();
  }
}
#endif

// Exclusive sums of two counts for each of the block's 1024 threads.
__device__ __forceinline__ void sum_before(int& a, int& b, int (*scratch)[2]) {
  const int own_a = a, own_b = b;
  for (int step = 1; step < 1024; step <<= 1) {
    scratch[threadIdx.x][0] = a, scratch[threadIdx.x][1] = b;
    __syncthreads();
    if (static_cast<int>(threadIdx.x) >= step)
      a += scratch[threadIdx.x - step][0], b += scratch[threadIdx.x - step][1];
    __syncthreads();
  }
  a -= own_a, b -= own_b;
}

}  // namespace voltapile

using namespace voltapile;

// grid: (1), 1024 threads; no more than 1024 experts. order: [pairs]: the pair at each place;
// tiles: [most] of up to `size` tokens, those that are not needed have none.
extern "C" __global__ void __launch_bounds__(1024)
expert_plan(const int* chosen, int* order, Group* tiles, int pairs, int count, int first,
            int most, int size) {
  __shared__ int counts[1024], scratch[1024][2], used_tiles;
  grid_launch();
  grid_wait();
  const int expert = threadIdx.x;
  counts[expert] = 0;
  __syncthreads();
  for (int pair = threadIdx.x; pair < pairs; pair += 1024) {
    const int local = chosen[pair] - first;
    if (local >= 0 && local < count) atomicAdd(counts + local, 1);
  }
  __syncthreads();
  const int own = counts[expert], own_tiles = (own + size - 1) / size;
  int place = own, tile = own_tiles;
  sum_before(place, tile, scratch);
  for (int i = 0; i < own_tiles; ++i)
    tiles[tile + i] = {expert, place + i * size, min(size, own - i * size)};
  if (threadIdx.x == 1023) used_tiles = tile + own_tiles;
  counts[expert] = place;  // the next that is free
  __syncthreads();
  for (int i = used_tiles + threadIdx.x; i < most; i += 1024) tiles[i] = {0, 0, 0};
  for (int pair = threadIdx.x; pair < pairs; pair += 1024) {
    const int local = chosen[pair] - first;
    if (local >= 0 && local < count) order[atomicAdd(counts + local, 1)] = pair;
  }
}

#if VP_ARCH >= 800
// grid: (rows / 64 TILES, tiles), 256 threads. halves: [tokens][k / 32][4] units, scales [tokens].
// inner: [places][rows]: silu(gate x) * up x. A tile's first octet is of the gate, its second of
// up. rows is a multiple of 8.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    expert_group_up(const Expert* table, const Group* tiles, const int* order, const uint4* halves,
                    const float* scales, float* inner, int used, int rows, int k, int is_tiled) {
  extern __shared__ __align__(128) std::uint8_t shared[];
  __shared__ const uint4* units[BATCH];
  __shared__ int tokens[BATCH];
  __shared__ Bytes matrices[2];  // not in registers, of which there are too few
  grid_launch();
  grid_wait();
  const Group own = tiles[blockIdx.y];
  if (own.count == 0) return;
  if (threadIdx.x < BATCH) {
    const int token = order[own.first + min(static_cast<int>(threadIdx.x), own.count - 1)] / used;
    tokens[threadIdx.x] = token;
    units[threadIdx.x] = halves + static_cast<long long>(token) * (k / 8);
  }
  if (threadIdx.x < 2) matrices[threadIdx.x] = table[own.expert].matrices[threadIdx.x];
  __syncthreads();
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int first_row = 8 * TILES * (blockIdx.x * WARPS + warp);
  const int row_bytes = k / F::length * F::bytes;
  const Lay lay = lay_of(HAS_TILES<F> && is_tiled, C::BYTES, row_bytes);
  BatchSums total = {};
  multiply_batch<F>(
      [&](int octet) {
        const int row = min(first_row + 8 * (octet >> 1), rows - 8);
        return row_at(matrices[octet & 1], lay, row, row_bytes);
      },
      is_tiled, units, k, own.count, shared, total);
#pragma unroll
  for (int i = 0; i < TILES * BATCH / 8 * 2; ++i) {
    const int m = i / (BATCH / 4), n = i / 2 % (BATCH / 8), e = i % 2;
    const int row = first_row + 8 * m + (lane >> 2), token = 8 * n + 2 * (lane & 3) + e;
    if (row >= rows || token >= own.count) continue;
    const float scale = scales[tokens[token]], value = total[m][n][e] * scale;
    inner[static_cast<long long>(own.first + token) * rows + row] =
        value / (1.0f + expf(-value)) * (total[m][n][2 + e] * scale);
  }
}

// grid: (rows / 128 TILES, tiles), 256 threads. halves, scales: of places. parts: [pairs][rows].
// rows is a multiple of 8.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    expert_group_down(const Expert* table, const Group* tiles, const int* order,
                      const uint4* halves, const float* scales, float* parts, int rows, int k,
                      int is_tiled) {
  extern __shared__ __align__(128) std::uint8_t shared[];
  __shared__ const uint4* units[BATCH];
  grid_launch();
  grid_wait();
  const Group own = tiles[blockIdx.y];
  if (own.count == 0) return;
  if (threadIdx.x < BATCH)
    units[threadIdx.x] =
        halves + static_cast<long long>(
                     own.first + min(static_cast<int>(threadIdx.x), own.count - 1)) * (k / 8);
  __syncthreads();
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int first_row = 16 * TILES * (blockIdx.x * WARPS + warp);
  const int row_bytes = k / F::length * F::bytes;
  const Lay lay = lay_of(HAS_TILES<F> && is_tiled, C::BYTES, row_bytes);
  const Bytes weights = table[own.expert].matrices[DOWN];
  BatchSums total = {};
  multiply_batch<F>(
      [&](int octet) {
        return row_at(weights, lay, min(first_row + 8 * octet, rows - 8), row_bytes);
      },
      is_tiled, units, k, own.count, shared, total);
#pragma unroll
  for (int i = 0; i < TILES * BATCH / 8 * 4; ++i) {
    const int m = i / (BATCH / 2), n = i / 4 % (BATCH / 8), e = i % 4;
    const int row = first_row + 16 * m + 8 * (e >> 1) + (lane >> 2);
    const int token = 8 * n + 2 * (lane & 3) + (e & 1), place = own.first + token;
    if (row >= rows || token >= own.count) continue;
    parts[static_cast<long long>(order[place]) * rows + row] = total[m][n][e] * scales[place];
  }
}
#else
// grid: (rows / 64, tiles), 256 threads. halves: [tokens][k / 32][4] units, scales [tokens]. inner:
// [places][rows]: silu(gate x) * up x. Of a warp's 32 rows 16 are the gate's, 16 those of up.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    expert_group_up(const Expert* table, const Group* tiles, const int* order, const uint4* halves,
                    const float* scales, float* inner, int used, int rows, int k, int is_tiled) {
  extern __shared__ __align__(128) std::uint8_t shared[];
  __shared__ int tokens[TOKENS];
  __shared__ Bytes matrices[2];  // not in registers, of which there are too few
  grid_launch();
  grid_wait();
  const Group own = tiles[blockIdx.y];
  if (own.count == 0) return;
  const int first_row = blockIdx.x * 64, groups = k / 32, warp = threadIdx.x >> 5;
  const Tile tile{static_cast<int>(threadIdx.x & 31)};
  const int row_bytes = k / F::length * F::bytes;
  const Lay lay = lay_of(HAS_TILES<F> && is_tiled, C::BYTES, row_bytes);
  if (threadIdx.x < TOKENS)
    tokens[threadIdx.x] =
        order[own.first + min(static_cast<int>(threadIdx.x), own.count - 1)] / used;
  if (threadIdx.x < 2) matrices[threadIdx.x] = table[own.expert].matrices[threadIdx.x];
  __syncthreads();
  float total[SUMS] = {};
  multiply_tile(
      [&](int row) {
        const int there = min(first_row + (row >> 5) * 16 + (row & 15), rows - 1);
        return row_at(matrices[row >> 4 & 1], lay, there, row_bytes);
      },
      lay.chunk,
      [&](int token) { return halves + static_cast<long long>(tokens[token]) * groups * 4; },
      groups, shared, own.count, warp, tile, total);
#pragma unroll
  for (int i = 0; i < 4 * Tile::VALUES; ++i) {
    const int n = i / Tile::VALUES, e = i % Tile::VALUES;
    const float gate_sum = tile.fold(total[i]);
    const float up_sum = tile.fold(total[4 * Tile::VALUES + i]);
    const int row = first_row + (warp >> 1) * 16 + tile.sum_row(Tile::row_of(e));
    const int token = first_of(warp) + 8 * n + dealt(tile.sum_token(Tile::token_of(e)));
    if (!tile.owns_sums() || row >= rows || token >= own.count) continue;
    const float scale = scales[tokens[token]], value = gate_sum * scale;
    inner[static_cast<long long>(own.first + token) * rows + row] =
        value / (1.0f + expf(-value)) * (up_sum * scale);
  }
}

// grid: (rows / 128, tiles), 256 threads. halves, scales: of places. parts: [pairs][rows]
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    expert_group_down(const Expert* table, const Group* tiles, const int* order,
                      const uint4* halves, const float* scales, float* parts, int rows, int k,
                      int is_tiled) {
  extern __shared__ __align__(128) std::uint8_t shared[];
  grid_launch();
  grid_wait();
  const Group own = tiles[blockIdx.y];
  if (own.count == 0) return;
  const int first_row = blockIdx.x * ROWS, groups = k / 32, warp = threadIdx.x >> 5;
  const Tile tile{static_cast<int>(threadIdx.x & 31)};
  const int row_bytes = k / F::length * F::bytes;
  const Lay lay = lay_of(HAS_TILES<F> && is_tiled, C::BYTES, row_bytes);
  const Bytes weights = table[own.expert].matrices[DOWN];
  float total[SUMS] = {};
  multiply_tile(
      [&](int row) { return row_at(weights, lay, min(first_row + row, rows - 1), row_bytes); },
      lay.chunk,
      [&](int token) {
        return halves + static_cast<long long>(own.first + min(token, own.count - 1)) * groups * 4;
      },
      groups, shared, own.count, warp, tile, total);
#pragma unroll
  for (int i = 0; i < SUMS; ++i) {
    const int m = i / Tile::VALUES / 4, n = i / Tile::VALUES % 4, e = i % Tile::VALUES;
    const float sum = tile.fold(total[i]);
    const int row = first_row + (warp >> 1) * 32 + 16 * m + tile.sum_row(Tile::row_of(e));
    const int token = first_of(warp) + 8 * n + dealt(tile.sum_token(Tile::token_of(e)));
    if (!tile.owns_sums() || row >= rows || token >= own.count) continue;
    const int place = own.first + token;
    parts[static_cast<long long>(order[place]) * rows + row] = sum * scales[place];
  }
}
#endif

// grid: (rows / 256, tokens). out (+)= the sum over a token's experts that are here, in their
// order, and other_parts [tokens][rows], of the one that all take, or null.
extern "C" __global__ void __launch_bounds__(256)
expert_join(const int* chosen, const float* weights, const float* parts, const float* other_parts,
            float* out, int used, int rows, int count, int first, int accumulate) {
  grid_launch();
  grid_wait();
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  const long long token = blockIdx.y;
  float sum = 0.0f;
  for (int rank = 0; rank < used; ++rank) {
    const long long pair = token * used + rank;
    const int local = chosen[pair] - first;
    if (local >= 0 && local < count) sum += weights[pair] * parts[pair * rows + row];
  }
  if (other_parts != nullptr) sum += other_parts[token * rows + row];
  float* to = out + token * rows + row;
  *to = accumulate ? *to + sum : sum;
}
