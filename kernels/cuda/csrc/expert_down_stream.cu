// Down of a token's chosen experts and their weighted sum, for few generated rows from sm_80 on,
// and with it the expert that every token takes. A block has 16 rows of all of them: their bytes,
// contiguous whether they lie by tiles or by rows, are on their way to its shared memory before
// tokens come; then a warp takes one chunk of one expert, or a few. -D FORMAT; OTHER, of the
// expert that every token takes; ALONE 1 if there is none; WARPS, as many as a block may have;
// TILES 1 and MANY 0; PUSH 1, where what is made is this rank's part of a sum and goes to the
// others at once.
#include "expert_chunks.cuh"
#include "expert_fetch.cuh"
#include "expert_table.cuh"
#include "grid.cuh"
#include "group_push.cuh"
#include "tiles.cuh"

using namespace voltapile;

#ifndef ALONE
#define ALONE 0
#endif
#ifndef PUSH
#define PUSH 0
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

// 16 rows of a matrix in shared memory, as they lie.
template <class Format>
struct Rows {
  using C = Chunks<Format>;
  int k, bytes;
  Lay lay;

  __device__ __forceinline__ Rows(int k, bool is_tiled)
      : k(k), bytes(16 * C{k}.row_bytes()), lay(lay_of(is_tiled, C::BYTES, bytes / 16)) {}

  // Of one chunk and its token, by a warp that has met: sums of 16 rows.
  __device__ __forceinline__ void multiply(const std::uint8_t* memory, int chunk,
                                           const std::uint8_t* slot, float* kept, int lane) const {
    const Tile tile{lane};
    int at[Tile::ROWS];
#pragma unroll
    for (int i = 0; i < Tile::ROWS; ++i) at[i] = tile.row(i) * lay.row + chunk * lay.chunk;
    float sums[2];
    WholeBlock<Format>::multiply_one(memory, at, slot, lane, C{k}.groups(chunk), sums);
    if ((lane & 3) == 0)
#pragma unroll
      for (int i = 0; i < 2; ++i) kept[tile.row(i)] = sums[i];
  }
};
#endif

// grid: (rows / 16, tokens), as many warps as suit. inner: [tokens * used][k], other_inner
// [tokens][other_k] or null; out [tokens][rows]: the weighted sum over a token's experts in the
// order of `chosen`, then the one that all take. tiled: bit 0 if experts lie by tiles, 1 if the one
// that all take does. What was chosen is there before the wait, since expert_up_stream is the
// kernel before; so it has asked for all of its own weights.
extern "C" __global__ void __launch_bounds__(IS_ALONE ? 32 * WARPS : 448, IS_ALONE ? 3 : 2)
    expert_down_stream(const Expert* table, int count, int first, const int* chosen,
                       const float* shares, const float* inner, float* out, int used, int k,
                       int rows, int accumulate, int tiled, const std::uint8_t* other_down,
                       const float* other_inner, int other_k
#if PUSH
                       , const Group* group, int rank, int ranks
#endif
                       ) {
#if VP_ARCH >= 800
  extern __shared__ __align__(128) std::uint8_t shared[];
  __shared__ Present here;
  __shared__ Bell bells[MOST_USED + 1];
  __shared__ float sums[(MOST_USED + 1) * 16];
  const int warp = own_warp(), lane = threadIdx.x & 31, warps = blockDim.x >> 5;
  const long long token = blockIdx.y, unit = blockIdx.x;
#if PUSH
  const Outgoing<true, 1> line{group, rank, ranks};
#else
  const Outgoing<false, 1> line{};
#endif
  const Rows<F> tiles(k, tiled & 1);
  const Rows<O> other_tile(IS_ALONE ? 0 : other_k, tiled & 2);
  const Chunks<F> cut{k};
  const Chunks<O> other_cut{other_tile.k};
  here.find(Experts{table, count, first}, chosen + token * used, shares + token * used, used);
  __syncwarp();
  const int chunks = cut.count(), items = here.count * chunks, others = other_cut.count();
  const int results = here.count + (others > 0), all = items + others;
  // Tiles, a token's chunk for each warp, items' sums.
  std::uint8_t* other_memory = shared + used * tiles.bytes;
  std::uint8_t* slot = other_memory + (IS_ALONE ? 0 : other_tile.bytes) + warp * SLOT;
  float* kept = reinterpret_cast<float*>(slot + (warps - warp) * SLOT);
#pragma unroll 1
  for (int n = warp; n < results; n += warps) {
    make_bells(bells + n, 1);
    if (!IS_ALONE && n == here.count)
      fetch(other_memory, other_down + unit * other_tile.bytes, other_tile.bytes, bells + n, lane);
    else
      fetch(shared + n * tiles.bytes, here.down[n] + unit * tiles.bytes, tiles.bytes, bells + n,
            lane);
  }
  const float* own_inner = inner + token * used * k;
  const float* others_inner = other_inner + token * other_k;
  // A walk goes over a token's experts as over tiles; behind them are items of the one that all
  // take.
  const auto load = [&](const Walk& at, int item) {
    return !IS_ALONE && item >= items
               ? other_cut.load(others_inner, item - items, lane)
               : cut.load(own_inner + here.ranks[at.tile] * k, at.chunk, lane);
  };
  Walk ahead(warp, chunks), walk = ahead;
  const bool writes = threadIdx.x < 16;
  float* to = out + token * rows + 16 * unit + threadIdx.x;
  if (warp == warps - 1) line.begin(token, 1, lane);
  grid_wait();
  if (!PUSH) grid_launch();
  Held held;
  if (warp < all) held = load(ahead, warp);
  const float before = writes && accumulate ? *to : 0.0f;
  if (!HAS_BELLS) {
    commit_copies();
    wait_for_copies<0>();
  }
  __syncthreads();
#pragma unroll 1
  for (int item = warp; item < all; item += warps, walk.advance(warps, chunks)) {
    const Held own = held;
    const bool is_other = !IS_ALONE && item >= items;
    ahead.advance(warps, chunks);
    if (item + warps < all) held = load(ahead, item + warps);
    if (is_other)
      WholeTokens<O>::put(slot, own, lane);
    else
      WholeTokens<F>::put(slot, own, lane);
    __syncwarp();
    hear(bells + (is_other ? here.count : walk.tile), true);
    if (is_other)
      other_tile.multiply(other_memory, item - items, slot, kept + 16 * item, lane);
    else
      tiles.multiply(shared + walk.tile * tiles.bytes, walk.chunk, slot, kept + 16 * item, lane);
    __syncwarp();  // the token has been read
  }
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < 16 * results; i += blockDim.x) {
    const int n = i / 16, own = n < here.count ? chunks : others;
    const float* from = kept + n * chunks * 16 + i % 16;
    float sum = 0.0f;
#pragma unroll 4
    for (int chunk = 0; chunk < own; ++chunk) sum += from[16 * chunk];
    sums[i] = n < here.count ? here.weights[n] * sum : sum;
  }
  __syncthreads();
  if (!writes) return;
  float sum = 0.0f;
#pragma unroll 4
  for (int n = 0; n < results; ++n) sum += sums[16 * n + threadIdx.x];
  sum = accumulate ? before + sum : sum;
  *to = sum;
  line.send(sum, 0, 16 * unit + threadIdx.x);
#endif
}
