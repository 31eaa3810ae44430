// Down of a token's chosen experts and their weighted sum, for few generated rows from sm_80 on,
// and with it the expert that every token takes. A block has 16 rows of all of them: their bytes,
// contiguous whether they lie by tiles or by rows, are on their way to its shared memory before
// tokens come; then a warp takes one chunk of one expert, or a few. -D FORMAT; OTHER, of the
// expert that every token takes; ALONE 1 if there is none, else WARPS, as many as a block may have;
// TILES 1 and MANY 0; TAIL 1, where what is made is this rank's part of a sum, which is made here,
// too (group_tail.cuh): blocks may be more than find room at once, since they start in order.
#include "expert_chunks.cuh"
#include "expert_fetch.cuh"
#include "expert_table.cuh"
#include "grid.cuh"
#include "group_tail.cuh"
#include "tiles.cuh"

using namespace voltapile;

#ifndef ALONE
#define ALONE 0
#endif
#ifndef TAIL
#define TAIL 0
#endif
// 24 warps, of one token, find room beside a block of expert_up_stream, and twice as many do not:
// of two blocks of a multiprocessor all others would wait for the second one.
#if ALONE && !defined(VP_EMULATION)
#define BOUNDS __maxnreg__((Equal<formats::FORMAT, formats::Q5_K>::value ? 64 : 56))
#else
#define BOUNDS __launch_bounds__(32 * WARPS, 1)
#endif
constexpr bool IS_ALONE = ALONE;
#if VP_ARCH >= 800
using F = formats::FORMAT;
using O = formats::OTHER;
constexpr int MOST_USED = 32;
constexpr bool IS_AHEAD = !IS_ALONE && !IS_K<F>;  // others have one chunk a warp, or no registers
constexpr int SLOT =
    Chunks<O>::SLOT > Chunks<F>::SLOT ? Chunks<O>::SLOT : Chunks<F>::SLOT;

// What a block keeps of a token's experts that are here, in the order of `chosen`.
struct Kept {
  float weights[MOST_USED];
  int ranks[MOST_USED];
};
// A token's experts that are here. Each warp finds them for itself, and a lane has the expert of
// its rank: so loads come first, and nobody waits. Before the wait, so past the first cache, which
// may hold an earlier layer's.
struct Present {
  const std::uint8_t* down = nullptr;
  int at = -1, count;  // the lane's one, and of all

  __device__ __forceinline__ Present(const Experts& experts, const int* chosen, int used,
                                     int lane) {
    const Expert* own = lane < used ? experts.find(__ldcg(chosen + lane)) : nullptr;
    const unsigned there = __ballot_sync(~0u, own != nullptr);
    count = __popc(there);
    if (own != nullptr) down = own->matrices[DOWN], at = __popc(there & ((1u << lane) - 1));
  }
  // By the whole warp; n: the same for all of it, less than `count`.
  __device__ __forceinline__ int rank(int n) const {
    return __ffs(static_cast<int>(__ballot_sync(~0u, at == n))) - 1;
  }
  __device__ __forceinline__ const std::uint8_t* down_of(int n) const {
    const auto whole = reinterpret_cast<std::uint64_t>(down);
    const int from = rank(n);
    const unsigned low = __shfl_sync(~0u, static_cast<unsigned>(whole), from);
    const unsigned high = __shfl_sync(~0u, static_cast<unsigned>(whole >> 32), from);
    return reinterpret_cast<const std::uint8_t*>(std::uint64_t{high} << 32 | low);
  }
  // By one warp; others see it when they have met that.
  __device__ __forceinline__ void keep(Kept& kept, const float* shares, int lane) const {
    if (at < 0) return;
    kept.weights[at] = __ldcg(shares + lane);
    kept.ranks[at] = lane;
  }
};

// 16 rows of a matrix in shared memory, as they lie. `place`: with what is read behind them, for
// nothing, where groups of columns are no whole fours; there nothing may be on its way.
template <class Format>
struct Rows {
  using C = Chunks<Format>;
  static constexpr int BEHIND = 112;  // three groups of Q8_0, a multiple of 16
  int k, bytes, place;
  Lay lay;

  __device__ __forceinline__ Rows(int k, bool is_tiled)
      : k(k),
        bytes(16 * C{k}.row_bytes()),
        place(bytes + (!IS_K<Format> && k % 128 ? BEHIND : 0)),
        lay(lay_of(is_tiled, C::BYTES, bytes / 16)) {}

  // Of one chunk and its token, by a warp that has met: sums of 16 rows.
  __device__ __forceinline__ void multiply(const std::uint8_t* memory, int chunk,
                                           const std::uint8_t* slot, float* kept, int lane) const {
    const Tile tile{lane};
    int at[Tile::ROWS];
#pragma unroll
    for (int i = 0; i < Tile::ROWS; ++i) at[i] = tile.row(i) * lay.row + chunk * lay.chunk;
    const float sum = WholeBlock<Format>::multiply_one(memory, at, slot, lane, C{k}.groups(chunk));
    if ((lane & 2) == 0) kept[tile.row(lane & 1)] = sum;
  }
};
#endif

// grid: (rows / 16, tokens), as many warps as suit. inner: [tokens * used][k], other_inner
// [tokens][other_k] or null; out [tokens][rows]: the weighted sum over a token's experts in the
// order of `chosen`, then the one that all take. tiled: bit 0 if experts lie by tiles, 1 if the one
// that all take does. What was chosen is there before the wait, since expert_up_stream, the kernel
// before, has waited for it.
extern "C" __global__ void BOUNDS
    expert_down_stream(const Expert* table, int count, int first, const int* chosen,
                       const float* shares, const float* inner, float* out, int used, int k,
                       int rows, int accumulate, int tiled, const std::uint8_t* other_down,
                       const float* other_inner, int other_k
#if TAIL
                       , Group* group, int rank, int ranks
#endif
                       ) {
#if VP_ARCH >= 800
  extern __shared__ __align__(128) std::uint8_t shared[];
  __shared__ Kept of_experts;
  __shared__ Bell bells[MOST_USED + 1];
  const int warp = own_warp(), lane = threadIdx.x & 31, warps = blockDim.x >> 5;
  const long long token = TAIL ? blockIdx.x : blockIdx.y, unit = TAIL ? blockIdx.y : blockIdx.x;
#if TAIL
  const Tail tail{group, rank, ranks};
#else
  const Tail tail{};
#endif
  const Rows<F> tiles(k, tiled & 1);
  const Rows<O> other_tile(IS_ALONE ? 0 : other_k, tiled & 2);
  const Present here(Experts{table, count, first}, chosen + token * used, used, lane);
  if (warp == warps - 1) here.keep(of_experts, shares + token * used, lane);
  const int chunks = Chunks<F>{k}.count(), others = Chunks<O>{other_tile.k}.count();
  const int items = here.count * chunks, all = items + others;
  const int results = here.count + (others > 0);
  // Tiles, a token's chunk for each warp, items' sums.
  std::uint8_t* other_memory = shared + used * tiles.place;
  std::uint8_t* slot = other_memory + (IS_ALONE ? 0 : other_tile.place) + warp * SLOT;
  float* kept = reinterpret_cast<float*>(slot + (warps - warp) * SLOT);
#pragma unroll 1
  for (int n = warp; n < results; n += warps) {
    make_bells(bells + n, 1);
    if (!IS_ALONE && n == here.count)
      fetch(other_memory, other_down + unit * other_tile.bytes, other_tile.bytes, bells + n, lane);
    else
      fetch(shared + n * tiles.place, here.down_of(n) + unit * tiles.bytes, tiles.bytes, bells + n,
            lane);
  }
  // A chunk of a token's expert, or behind those of the one that all take.
  const float *own_inner = inner + token * used * k, *others_inner = other_inner + token * other_k;
  int item = warp, tile = 0, chunk = 0;
  const auto find = [&] {
    tile = IS_ALONE || item < items ? static_cast<unsigned>(item) / chunks : here.count;
    chunk = item - tile * chunks;
  };
  const auto is_other = [&] { return !IS_ALONE && item >= items; };
  const float* row_from = others_inner;
  if (item < all) {
    find();
    if (!is_other()) row_from = own_inner + here.rank(tile) * k;
  }
  const auto load = [&](const float* from) {
    return is_other() ? Chunks<O>{other_k}.load(from, chunk, lane)
                      : Chunks<F>{k}.load(from, chunk, lane);
  };
  // Sums of rows are made by the first warps: lane l has row l % 4 of theirs, of result l / 4.
  const int row = 4 * warp + (lane & 3);
  const bool writes = warp < 4 && lane < 4;
  float* to = out + token * rows + 16 * unit + row;
  if (TAIL && warp == warps - 1) tail.begin(lane);  // sm_90: before any may start the next kernel
  if (HAS_BELLS) __syncthreads();
  grid_wait();
  grid_launch();
  Held held;
  if (item < all) held = load(row_from);
  const float before = writes && accumulate ? *to : 0.0f;
  if (!HAS_BELLS) {
    commit_copies();
    wait_for_copies<0>();
    __syncthreads();
  }
  // Whether there is one.
  const auto load_next = [&] {
    if ((item += warps) >= all) return false;
    find();
    held = load(is_other() ? others_inner : own_inner + of_experts.ranks[tile] * k);
    return true;
  };
  const auto put = [&] {
    if (is_other())
      WholeTokens<O>::put(slot, held, lane);
    else
      WholeTokens<F>::put(slot, held, lane);
  };
  const auto multiply = [&](int item, int tile, int chunk) {
    __syncwarp();
    hear(bells + tile, true);
    if (!IS_ALONE && item >= items)
      other_tile.multiply(other_memory, chunk, slot, kept + 16 * item, lane);
    else
      tiles.multiply(shared + tile * tiles.place, chunk, slot, kept + 16 * item, lane);
  };
#pragma unroll 1
  while (item < all) {
    put();
    if constexpr (IS_AHEAD) {
      const int own = item, own_tile = tile, own_chunk = chunk;
      load_next();
      multiply(own, own_tile, own_chunk);
    } else {
      multiply(item, tile, chunk);
      if (!load_next()) break;
    }
    __syncwarp();  // the token has been read
  }
  __syncthreads();
  if (warp >= 4) return;
  const int most = max(chunks, others);
  float sum = 0.0f;
#pragma unroll 1
  for (int first_of = 0; first_of < results; first_of += 8) {
    const int n = first_of + (lane >> 2), own = n < here.count ? chunks : n < results ? others : 0;
    const float* sums = kept + n * chunks * 16 + row;
    const float weight = n < here.count ? of_experts.weights[n] : 1.0f;
    float part = 0.0f;
#pragma unroll 1
    for (int at = 0; at < most; at += 4)
#pragma unroll
      for (int i = 0; i < 4; ++i) part += at + i < own ? sums[16 * (at + i)] : 0.0f;
    part *= weight;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += __shfl_sync(~0u, part, 4 * i + (lane & 3));
  }
  if (!writes) return;
  if (TAIL) {
    const int place = TILE_WORDS * unit + 16 * token + row;
    tail.send(sum, place);
    sum = tail.total(sum, place);
  }
  sum = accumulate ? before + sum : sum;
  *to = sum;
#endif
}
