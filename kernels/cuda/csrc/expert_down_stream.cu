// Down of a token's chosen experts and their weighted sum, for few generated rows from sm_80 on,
// and with it the expert that every token takes. A block has 16 rows of all of them: their bytes
// lie in its shared memory, row by row, before tokens come; then a warp takes one chunk of one
// expert, or a few. -D FORMAT; OTHER, of the expert that every token takes; ALONE 1 if there is
// none; WARPS, as many as a block may have; TILES 1 and MANY 0.
#include "expert_chunks.cuh"
#include "expert_table.cuh"
#include "grid.cuh"
#include "matmul_epilogue.cuh"

using namespace voltapile;

#ifndef ALONE
#define ALONE 0
#endif
constexpr bool IS_ALONE = ALONE;
#if VP_ARCH >= 800
using F = formats::FORMAT;
using O = formats::OTHER;
constexpr int MOST_USED = 32;
constexpr int SLOT =
    Chunks<O>::SLOT > Chunks<F>::SLOT ? Chunks<O>::SLOT : Chunks<F>::SLOT;

// A token's experts that are here, in the order of `chosen`.
struct Present {
  const std::uint8_t* down[MOST_USED];
  float weights[MOST_USED];
  int ranks[MOST_USED], count;

  // By each warp for itself, with the same result: then loads come first, and nobody waits.
  // Before the wait, so past the first cache, which may hold an earlier layer's.
  __device__ __forceinline__ void find(const Experts& experts, const int* chosen,
                                       const float* shares, int used) {
    const int lane = threadIdx.x & 31;
    const Expert* own = lane < used ? experts.find(__ldcg(chosen + lane)) : nullptr;
    const unsigned there = __ballot_sync(~0u, own != nullptr);
    const int at = __popc(there & ((1u << lane) - 1));
    if (own != nullptr) {
      down[at] = own->matrices[DOWN];
      weights[at] = __ldcg(shares + lane);
      ranks[at] = lane;
    }
    if (lane == 0) count = __popc(there);
  }
};

// 16 rows of a matrix in shared memory, whole, each as it lies within 16 bytes.
template <class Format>
struct Rows {
  static constexpr int SLACK = Codec<Format>::ALIGN >= 16 ? 0 : 16 - Codec<Format>::ALIGN;
  int bytes, stride, last_row;

  __device__ __forceinline__ Rows(int k, int last_row)
      : bytes(Chunks<Format>{k}.row_bytes()), stride(odd_sixteens(bytes + SLACK)),
        last_row(last_row) {}
  __device__ __forceinline__ static int skew(const std::uint8_t* p) {
    return SLACK ? static_cast<int>(reinterpret_cast<std::uint64_t>(p) & 15) : 0;
  }
  // memory: of the tile that begins at `first`.
  __device__ __forceinline__ void begin(std::uint8_t* memory, const std::uint8_t* first, int row,
                                        int lane) const {
    const std::uint8_t* from = first + min(row, last_row) * bytes;
    const int less = skew(from);
#pragma unroll 1
    for (int at = 16 * lane; at < bytes + less; at += 512)
      copy_async(memory + row * stride + at, from - less + at, 16);
  }
  // Sums of 16 rows are kept where the token was.
  __device__ __forceinline__ void multiply(const std::uint8_t* memory, const std::uint8_t* first,
                                           int k, int chunk, std::uint8_t* slot, int lane) const {
    const Tile tile{lane};
    int at[Tile::ROWS];
#pragma unroll
    for (int i = 0; i < Tile::ROWS; ++i) {
      const int row = tile.row(i);
      at[i] = row * stride + skew(first + min(row, last_row) * bytes) +
              chunk * Chunks<Format>::BYTES;
    }
    float sums[2];
    WholeBlock<Format>::multiply_one(memory, at, slot, lane, Chunks<Format>{k}.groups(chunk), sums);
    __syncwarp();  // the token has been read
    if ((lane & 3) == 0)
#pragma unroll
      for (int i = 0; i < 2; ++i) reinterpret_cast<float*>(slot)[tile.row(i)] = sums[i];
  }
};
#endif

// grid: (rows / 16, tokens), as many warps as suit. inner: [tokens * used][k], other_inner
// [tokens][other_k] or null; out [tokens][rows]: the weighted sum over a token's experts in the
// order of `chosen`, then the one that all take. What was chosen is there before the wait, since
// expert_up_stream is the kernel before.
extern "C" __global__ void __launch_bounds__(32 * WARPS, IS_ALONE ? 3 : 2)
    expert_down_stream(const Expert* table, int count, int first, const int* chosen,
                       const float* shares, const float* inner, float* out, int used, int k,
                       int rows, int accumulate, const std::uint8_t* other_down,
                       const float* other_inner, int other_k) {
#if VP_ARCH >= 800
  extern __shared__ __align__(128) std::uint8_t shared[];
  __shared__ Present here;
  __shared__ float sums[(MOST_USED + 1) * 16];
  const int warp = own_warp(), lane = threadIdx.x & 31, warps = blockDim.x >> 5;
  const long long token = blockIdx.y;
  const int meant = blockIdx.x * 16, first_row = first_row_of(meant, rows);
  const Chunks<F> cut{k};
  const Chunks<O> other_cut{IS_ALONE ? 0 : other_k};
  const Rows<F> tiles(k, min(15, rows - 1));
  const Rows<O> other_tile(other_cut.k, min(15, rows - 1));
  here.find(Experts{table, count, first}, chosen + token * used, shares + token * used, used);
  __syncwarp();
  const int chunks = cut.count(), items = here.count * chunks, others = other_cut.count();
  const int tile_bytes = 16 * tiles.stride;
  std::uint8_t* other_memory = shared + used * tile_bytes;
  std::uint8_t* slots = other_memory + (IS_ALONE ? 0 : 16 * other_tile.stride);  // [item]
  const auto row_of = [&](int n) {
    return here.down[n] + static_cast<long long>(first_row) * tiles.bytes;
  };
  const std::uint8_t* other_row = other_down + static_cast<long long>(first_row) * other_tile.bytes;
#pragma unroll 1
  for (int row = warp; row < 16 * here.count; row += warps) {
    tiles.begin(shared + row / 16 * tile_bytes, row_of(row / 16), row % 16, lane);
    commit_copies();
    wait_for_copies<3>();  // four rows are on their way: what the kernel before asks for goes first
  }
  if (others > 0)
#pragma unroll 1
    for (int row = warp; row < 16; row += warps)
      other_tile.begin(other_memory, other_row, row, lane);
  commit_copies();
  const int row = first_row + threadIdx.x;
  const bool writes = threadIdx.x < 16 && row >= meant && row < rows;
  float* to = out + token * rows + row;
  const float* own_inner = inner + token * used * k;
  const float* others_inner = other_inner + token * other_k;
  const Walk begin(warp, chunks);
  // A walk goes over a token's experts as over tiles; behind them are items of the one that all
  // take.
  const auto load = [&](const Walk& at, int item) {
    return !IS_ALONE && item >= items
               ? other_cut.load(others_inner, item - items, lane)
               : cut.load(own_inner + here.ranks[at.tile] * k, at.chunk, lane);
  };
  const int all = items + others;
  grid_wait();
  grid_launch();
  Walk walk = begin;
  Held held;
  if (warp < all) held = load(walk, warp);
  const float before = writes && accumulate ? *to : 0.0f;
#pragma unroll 1
  for (int item = warp; item < all; item += warps) {
    const Held own = held;
    walk.advance(warps, chunks);
    if (item + warps < all) held = load(walk, item + warps);
    if (!IS_ALONE && item >= items)
      WholeTokens<O>::put(slots + item * SLOT, own, lane);
    else
      WholeTokens<F>::put(slots + item * SLOT, own, lane);
  }
  wait_for_copies<0>();
  __syncthreads();
  walk = begin;
#pragma unroll 1
  for (int item = warp; item < all; item += warps, walk.advance(warps, chunks)) {
    std::uint8_t* slot = slots + item * SLOT;
    if (!IS_ALONE && item >= items)
      other_tile.multiply(other_memory, other_row, other_k, item - items, slot, lane);
    else
      tiles.multiply(shared + walk.tile * tile_bytes, row_of(walk.tile), k, walk.chunk, slot, lane);
  }
  __syncthreads();
  const int results = here.count + (others > 0);
#pragma unroll 1
  for (int i = threadIdx.x; i < 16 * results; i += blockDim.x) {
    const int n = i / 16, own = n < here.count ? chunks : others;
    const float* from = reinterpret_cast<const float*>(slots + n * chunks * SLOT) + i % 16;
    float sum = 0.0f;
#pragma unroll 4
    for (int chunk = 0; chunk < own; ++chunk) sum += from[SLOT / 4 * chunk];
    sums[i] = n < here.count ? here.weights[n] * sum : sum;
  }
  __syncthreads();
  if (!writes) return;
  float sum = 0.0f;
#pragma unroll 4
  for (int n = 0; n < results; ++n) sum += sums[16 * n + threadIdx.x];
  *to = accumulate ? before + sum : sum;
#endif
}
