// The product of several rows from sm_80 on. Like matmul_stream.cu, but tokens come as records that
// matmul_staged.cu made, a warp's chunk at a time, and with each of them it takes HELD tiles, so
// that records are read once for HELD times 16 rows of weights. Sums are made in the same order.
//
// A step is one tile's part of one chunk; a warp's ring of DEPTH places is filled that many steps
// ahead, and with the first tile of a chunk come its records, to one of two places in turn. A block
// takes every n-th unit, and `room` tokens, 8 PASSES at most. -D: FORMAT; OTHER, of the matrices
// whose bit in `others` is set, which blocks from first_other on take; DEPTH; WARPS; TILES 1; MANY
// 0 or 2.
#include "grid.cuh"
#include "matmul_chunk.cuh"
#include "matmul_epilogue.cuh"
#include "matmul_ring.cuh"

using namespace voltapile;

#if VP_ARCH >= 800
constexpr int HELD = 4;

// The next step of a warp that is to be fetched.
template <class F>
struct Steps {
  using M = RingMemory<F>;
  using Raw = typename M::Raw;
  const Product& all;
  const Cursor& units;  // at the block's first
  const std::uint8_t* records;
  int warp, chunks, tiles, all_tokens, row_bytes;
  int round = 0, j = 0, chunk, turn = 0;
  unsigned skews = 0;

  // The j-th tile of the block.
  __device__ __forceinline__ Cursor unit(int tile) const {
    return units.after(all.is_glu() ? tile >> 1 : tile);
  }
  __device__ __forceinline__ void fetch_weights(const Raw& raw, std::uint8_t* ring, int place) {
    const Cursor at = unit(round + j);
    const std::uint8_t* weights =
        all.is_glu() && j & 1 ? all.matrices[1].weights : at.matrix.weights;
    const std::uint8_t* from =
        weights + static_cast<long long>(first_row_of(at.row(), at.matrix.rows)) * row_bytes +
        chunk * M::BYTES;
    raw.begin_whole(ring + place * Raw::SIZE, from);
    skews = (skews & ~(15u << 4 * place)) |
            (static_cast<unsigned>(reinterpret_cast<std::uint64_t>(from)) & 15) << 4 * place;
  }
  __device__ __forceinline__ void fetch_records(std::uint8_t* tokens, int lane) const {
    const std::uint8_t* from =
        records + static_cast<long long>(chunk) * M::tokens_bytes(all_tokens);
    std::uint8_t* to = tokens + (turn & 1) * M::tokens_bytes(all.room);
    for (int i = 16 * lane; i < M::tokens_bytes(all.tokens); i += 512)
      copy_async(to + i, from + i, 16);
  }
  __device__ __forceinline__ bool is_in() const { return round < tiles; }
  __device__ __forceinline__ void next() {
    if (++j < min(HELD, tiles - round)) return;
    j = 0;
    ++turn;
    chunk += WARPS;
    if (chunk < chunks) return;
    chunk = warp;
    round += HELD;
  }
  __device__ __forceinline__ const std::uint8_t* skew(int place) const {
    return reinterpret_cast<const std::uint8_t*>(
        static_cast<std::uint64_t>(skews >> 4 * place & 15));
  }
};

// Fills the ring: weights before the wait for earlier kernels, records after it.
template <class F>
__device__ __forceinline__ void begin_steps(Steps<F>& steps, const typename RingMemory<F>::Raw& raw,
                                            std::uint8_t* ring, std::uint8_t* tokens, int lane) {
  Steps<F> first = steps;
#pragma unroll
  for (int i = 0; i < DEPTH; ++i)
    if (steps.is_in()) {
      steps.fetch_weights(raw, ring, i);
      steps.next();
    }
  grid_wait();
#pragma unroll
  for (int i = 0; i < DEPTH; ++i)
    if (first.is_in()) {
      if (first.j == 0) first.fetch_records(tokens, lane);
      first.next();
    }
  commit_copies();
  wait_for_copies<0>();
  __syncwarp();
}

template <class F>
__device__ __forceinline__ void multiply_wide(const Product& all, const std::uint8_t* records,
                                              int all_tokens, unsigned mask, int block, int blocks,
                                              std::uint8_t* shared) {
  using M = RingMemory<F>;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const Tile tile{lane};
  const int chunks = all.k / M::COLUMNS, row_bytes = row_bytes_of<F>(all.k);
  const int subs = all.is_glu() ? 2 : 1, one = 16 * all.room;
  const int set_bytes = M::tokens_bytes(all.room);
  const Cursor units(all, mask, block, blocks);
  const int tiles = units.left() * subs;
  std::uint8_t* ring = shared + warp * (M::WARP + aligned(2 * set_bytes));
  std::uint8_t* tokens = ring + M::WARP;
  float* sums = reinterpret_cast<float*>(shared + WARPS * (M::WARP + aligned(2 * set_bytes)));

  const typename M::Raw raw(row_bytes, 15, lane);
  Steps<F> steps{all,        units,     records, warp, chunks, warp < chunks ? tiles : 0,
                 all_tokens, row_bytes, 0,       0,    warp};
  begin_steps(steps, raw, ring, tokens, lane);
  int place = 0, turn = 0;
  for (int round = 0; round < tiles; round += HELD) {
    float total[HELD][PASSES][Tile::VALUES] = {};
#pragma unroll 1
    for (int chunk = warp; chunk < chunks; chunk += WARPS, ++turn) {
      const typename M::Staged staged(tokens + (turn & 1) * set_bytes, all.room);
#pragma unroll
      for (int t = 0; t < HELD; ++t) {
        if (round + t >= tiles) break;
        wait_for_copies<DEPTH - 1>();
        __syncwarp();
        float part[PASSES][Tile::VALUES];
        multiply_any<F>(ring, place * M::Raw::SIZE, nullptr, steps.skew(place), raw, staged, tile,
                        part);
        __syncwarp();  // what was read may be overwritten
        if (steps.is_in()) {
          steps.fetch_weights(raw, ring, place);
          if (steps.j == 0) steps.fetch_records(tokens, lane);
          steps.next();
        }
        commit_copies();
        place = place + 1 < DEPTH ? place + 1 : 0;
#pragma unroll
        for (int i = 0; i < PASSES * Tile::VALUES; ++i) {
          const int pass = i / Tile::VALUES, e = i % Tile::VALUES;
          total[t][pass][e] = total[t][pass][e] + part[pass][e];
        }
      }
    }
#pragma unroll
    for (int t = 0; t < HELD; ++t) {
      if (round + t >= tiles) break;
      const int sub = t & (subs - 1);
      float* set = sums + (sub * WARPS + warp) * one;
#pragma unroll
      for (int pass = 0; pass < PASSES; ++pass)
        keep_sums_of(total[t][pass], tile, 8 * pass, all.room, set);
      if (sub < subs - 1) continue;
      const Cursor unit = steps.unit(round + t);
      Finish finish(all, unit, threadIdx.x);
      finish.begin();
      __syncthreads();
      finish.write(sums, one);
      __syncthreads();
    }
  }
}
#endif

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    matmul_wide(const std::uint8_t* weights0, const float* bias0, float* out0, int rows0,
                const std::uint8_t* weights1, const float* bias1, float* out1, int rows1,
                const std::uint8_t* weights2, const float* bias2, float* out2, int rows2,
                const std::uint8_t* records, const std::uint8_t* other_records, int k, int tokens,
                int room, int epilogue, int others, int first_other) {
#if VP_ARCH >= 800
  extern __shared__ __align__(128) std::uint8_t shared[];
  grid_launch();
  const long long first = static_cast<long long>(blockIdx.y) * room;
  const Product all{{{weights0, bias0, out0 + first * rows0, rows0},
                     {weights1, bias1, out1 + first * rows1, rows1},
                     {weights2, bias2, out2 + first * rows2, rows2}},
                    nullptr,
                    k,
                    min(room, tokens - static_cast<int>(first)),
                    room,
                    static_cast<Epilogue>(epilogue)};
  constexpr bool IS_SAME = Equal<formats::FORMAT, formats::OTHER>::value;
  const int block = blockIdx.x, blocks = gridDim.x;
  const long long skipped = first * BlockTokens<formats::FORMAT>::PER_TOKEN;
  if (!IS_SAME && block >= first_other)
    multiply_wide<formats::OTHER>(all, other_records + skipped, tokens, others,
                                  block - first_other, blocks - first_other, shared);
  else
    multiply_wide<formats::FORMAT>(all, records + skipped, tokens, ~others & 7, block,
                                   IS_SAME ? blocks : first_other, shared);
#endif
}
