// The product of few rows from sm_80 on: blocks stay, and each warp streams its chunks of weights
// through a ring of DEPTH places in shared memory, without a pause from one tile to the next.
//
// A tile is 16 rows of weights; a gate and its up are two tiles of one unit. A block has TEAMS
// teams of WARPS warps, and each takes every n-th unit of its format's; its warps share the columns
// as in matmul_rows.cu and sums are made in the same order, so bits are the same. Tokens are staged
// once, for all columns; before they are read, the ring is already being filled (grid.cuh).
// -D: FORMAT; OTHER, of the matrices whose bit in `others` is set, which blocks from first_other on
// take; DEPTH; TEAMS; WARPS; BLOCKS of a multiprocessor that registers suffice for; TILES 1 and
// MANY 0.
#include "grid.cuh"
#include "matmul_chunk.cuh"
#include "matmul_epilogue.cuh"
#include "matmul_ring.cuh"

using namespace voltapile;

#if VP_ARCH >= 800
// All units of this block: those of the matrices in `mask`, dealt to blocks `block` of `blocks`.
template <class F>
__device__ __forceinline__ void stream(const Product& all, unsigned mask, int block, int blocks,
                                       std::uint8_t* shared) {
  using M = RingMemory<F>;
  const int lane = threadIdx.x & 31, warp_of_block = threadIdx.x >> 5;
  const int team = warp_of_block / WARPS, warp = warp_of_block % WARPS;
  const Tile tile{lane};
  const int chunks = (all.k + M::COLUMNS - 1) / M::COLUMNS, row_bytes = row_bytes_of<F>(all.k);
  const int subs = all.is_glu() ? 2 : 1, one = 16 * all.room;
  const int slot_bytes = M::tokens_bytes(all.room), all_tokens = aligned(chunks * slot_bytes);
  std::uint8_t* memory = shared + all_tokens + warp_of_block * M::WARP;
  float* sums = reinterpret_cast<float*>(shared + all_tokens + TEAMS * WARPS * M::WARP) +
                team * 2 * WARPS * subs * one;

  const typename M::Raw raw(row_bytes, 15, lane);
  Cursor unit(all, mask, block + team * blocks, TEAMS * blocks);
  Ahead<F> ahead(unit, warp, chunks, row_bytes);
#pragma unroll
  for (int i = 0; i < DEPTH; ++i) ahead.fetch(raw, memory, i);
  grid_wait();
  M::stage(all, shared, warp_of_block, TEAMS * WARPS, chunks, lane);
  __syncthreads();

  int place = 0;
  for (int count = 0; unit.is_in(); ++count, unit.next()) {
    const int value = threadIdx.x % (32 * WARPS);
    const bool finishes = warp < (all.tokens + 1) / 2;
    Finish finish(all, unit, value);
    if (finishes) finish.begin();
    // Two sets of sums in turn, so that a set is read while the next is made.
    float* set = sums + (count & 1) * WARPS * subs * one;
    for (int sub = 0; sub < subs; ++sub) {
      float total[PASSES][Tile::VALUES] = {};
#pragma unroll 1
      for (int chunk = warp; chunk < chunks; chunk += WARPS) {
        wait_for_copies<DEPTH - 1>();
        __syncwarp();
        M::multiply(memory, place, raw, ahead.skew(place), shared + chunk * slot_bytes, all.room,
                    tile, total);
        __syncwarp();  // what was read may be overwritten
        ahead.fetch(raw, memory, place);
        place = place + 1 < DEPTH ? place + 1 : 0;
      }
      keep_sums_of(total[0], tile, 0, all.room, set + (sub * WARPS + warp) * one);
    }
    meet_team(team);
    if (finishes) finish.write(set, one);
  }
}
#endif

extern "C" __global__ void __launch_bounds__(32 * TEAMS * WARPS, BLOCKS)
    matmul_stream(const std::uint8_t* weights0, const float* bias0, float* out0, int rows0,
                  const std::uint8_t* weights1, const float* bias1, float* out1, int rows1,
                  const std::uint8_t* weights2, const float* bias2, float* out2, int rows2,
                  const float* x, int k, int tokens, int room, int epilogue, int others,
                  int first_other) {
#if VP_ARCH >= 800
  extern __shared__ __align__(128) std::uint8_t shared[];
  grid_launch();
  const Product all{{{weights0, bias0, out0, rows0},
                     {weights1, bias1, out1, rows1},
                     {weights2, bias2, out2, rows2}},
                    x, k, tokens, room, static_cast<Epilogue>(epilogue)};
  constexpr bool IS_SAME = Equal<formats::FORMAT, formats::OTHER>::value;
  const int block = blockIdx.x, blocks = gridDim.x;
  if (!IS_SAME && block >= first_other)
    stream<formats::OTHER>(all, others, block - first_other, blocks - first_other, shared);
  else
    stream<formats::FORMAT>(all, ~others & 7, block, IS_SAME ? blocks : first_other, shared);
#endif
}
