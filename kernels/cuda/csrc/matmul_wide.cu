// The product of several rows from sm_80 on. Like matmul_stream.cu, but tokens come as records that
// matmul_staged.cu made, a warp's chunk at a time, and with each of them it takes HELD tiles, so
// that records are read once for HELD times 16 rows of weights. Sums are made in the same order.
//
// A step is one tile's part of one chunk; a warp's ring of DEPTH places is filled that many steps
// ahead, and with the first tile of a chunk come its records, to one of two places in turn. From
// sm_90 on each is one copy, and a place's bell tells of both. A block takes every n-th unit, and
// `room` tokens, 8 PASSES at most. -D: FORMAT; OTHER, of the matrices whose bit in `others` is set,
// which blocks from first_other on take; DEPTH 2; WARPS; TILES 1; MANY 0 or 2.
#include "grid.cuh"
#include "matmul_ring.cuh"

using namespace voltapile;

#if VP_ARCH >= 800
constexpr int HELD = 4;
static_assert(DEPTH == 2);  // steps of one tile each may come so many chunks ahead

// Walks over every `step`-th unit of the matrices whose bit in `mask` is set. A gate and its up are
// one unit.
struct Walk {
  const Product& all;
  unsigned mask;
  int step, m = -1, index, limit = 0;  // among the units of matrix m
  Matrix matrix;

  __device__ __forceinline__ Walk(const Product& all, unsigned mask, int begin, int step)
      : all(all), mask(all.is_glu() ? 1 : mask), step(step), index(begin) {
    find();
  }
  // The one that comes `count` later.
  __device__ __forceinline__ Walk after(int count) const {
    Walk found = *this;
    found.index += count * step;
    if (found.index >= found.limit) found.find();
    return found;
  }
  // How many there are from here on.
  __device__ __forceinline__ int left() const {
    int count = 0, at = index;
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      if (i < m) continue;
      const int units = mask >> i & 1 ? all.matrices[i].rows / 16 : 0;
      if (at < units) count += (units - 1 - at) / step + 1;
      at = at < units ? at + ((units - 1 - at) / step + 1) * step - units : at - units;
    }
    return count;
  }
  __device__ __forceinline__ int row() const { return 16 * index; }

 private:
  __device__ __forceinline__ void find() {
#pragma unroll 1
    while (index >= limit && m < 3) {
      index -= limit;
      ++m;
      matrix = m == 0 ? all.matrices[0] : m == 1 ? all.matrices[1] : all.matrices[2];
      limit = m < 3 && mask >> m & 1 ? matrix.rows / 16 : 0;
    }
  }
};

// The end of a unit, a thread for each of its [token][16 rows].
struct Ending {
  const Product& all;
  const Walk& unit;
  int i, row, token;
  bool is_there;
  float before = 0;  // asked for early

  __device__ __forceinline__ Ending(const Product& all, const Walk& unit, int i)
      : all(all), unit(unit), i(i), row(unit.row() + i % 16), token(i / 16) {
    is_there = token < all.tokens;
    if (is_there && all.kind == ADD) before = out();
  }
  __device__ __forceinline__ float& out() const {
    return unit.matrix.out[static_cast<long long>(token) * unit.matrix.rows + row];
  }
  // sums: [tile of the unit][warp][token][16 rows], `one` of them a warp.
  __device__ __forceinline__ void write(const float* sums, int one) const {
    if (!is_there) return;
    float value = 0, up = 0;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) value += sums[warp * one + i];
    const float* bias = unit.matrix.bias;
    if (bias != nullptr) value += bias[row];
    if (all.is_glu()) {
#pragma unroll
      for (int warp = 0; warp < WARPS; ++warp) up += sums[(WARPS + warp) * one + i];
      if (all.matrices[1].bias != nullptr) up += all.matrices[1].bias[row];
      value = activated(value, all.kind) * up;
    }
    out() = all.kind == ADD ? before + value : value;
  }
};

// What is copied to a warp's memory: a ring of chunks, behind it two chunks' tokens. The whole warp
// calls all of this. Lane 0 asks: an elected one (bell.cuh) saves no loop over threads here, and
// was 3 % more instructions.
template <class F>
struct Arrivals {
  using M = TileMemory<F>;
  std::uint8_t* ring;
  Bell* bells;
  int tokens_bytes, set_bytes, lane;  // of this turn's tokens, and of as many as there may be

  __device__ __forceinline__ std::uint8_t* tokens(int turn) const {
    return ring + DEPTH * M::CHUNK + (turn & 1) * set_bytes;
  }
  __device__ __forceinline__ void begin() const {
#if VP_ARCH >= 900
    if (is_elected())  // by one thread: matmul_cluster.cu tells why
#pragma unroll
      for (int i = 0; i < DEPTH; ++i) make_bell(bells + i);
    tell_bells();
    __syncwarp();
#endif
  }
  // with_tokens: they are fetched to the same place, sooner or later. is_again: the place has been
  // read, and that of the tokens.
  __device__ __forceinline__ void fetch_weights(int place, const std::uint8_t* from,
                                                bool with_tokens, bool is_again) const {
#if VP_ARCH >= 900
    if (lane == 0) {
      if (is_again) order_copies();
      expect(bells + place, M::CHUNK + (with_tokens ? tokens_bytes : 0));
    }
#endif
    copy(ring + place * M::CHUNK, from, M::CHUNK, place);
  }
  __device__ __forceinline__ void fetch_tokens(int place, const std::uint8_t* from,
                                               int turn) const {
    copy(tokens(turn), from, tokens_bytes, place);
  }
  // PENDING: groups of copies that were closed and need not be there yet.
  template <int PENDING>
  __device__ __forceinline__ void wait_for(int place, bool is_odd) const {
#if VP_ARCH >= 900
    await_own(bells + place, is_odd);
#else
    wait_for_copies<PENDING>();
    __syncwarp();
#endif
  }
  __device__ __forceinline__ void close() const {
#if VP_ARCH < 900
    commit_copies();
#endif
  }

 private:
  __device__ __forceinline__ void copy(std::uint8_t* to, const std::uint8_t* from, int bytes,
                                       int place) const {
#if VP_ARCH >= 900
    if (lane == 0) copy_whole(to, from, bytes, bells + place);
#else
    for (int i = 16 * lane; i < bytes; i += 512) copy_async(to + i, from + i, 16);
#endif
  }
};

// The next step of a warp that is to be fetched.
template <class F>
struct Steps {
  using M = TileMemory<F>;
  const Product& all;
  const Walk& units;  // at the block's first
  const std::uint8_t* records;
  int warp, chunks, tiles, all_tokens, row_bytes;
  int round = 0, j = 0, chunk, turn = 0;

  // The j-th tile of the block.
  __device__ __forceinline__ Walk unit(int tile) const {
    return units.after(all.is_glu() ? tile >> 1 : tile);
  }
  __device__ __forceinline__ void fetch_weights(const Arrivals<F>& arrivals, int place,
                                                bool is_again) const {
    const Walk at = unit(round + j);
    const std::uint8_t* weights =
        all.is_glu() && j & 1 ? all.matrices[1].weights : at.matrix.weights;
    const std::uint8_t* from =
        weights + static_cast<long long>(at.row()) * row_bytes + chunk * M::CHUNK;
    arrivals.fetch_weights(place, from, j == 0, is_again);
  }
  __device__ __forceinline__ void fetch_tokens(const Arrivals<F>& arrivals, int place) const {
    if (j > 0) return;
    const long long from = static_cast<long long>(chunk) * M::tokens_bytes(all_tokens);
    arrivals.fetch_tokens(place, records + from, turn);
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
};

// Fills the ring: weights before the wait for earlier kernels, records after it.
template <class F>
__device__ __forceinline__ void begin_steps(Steps<F>& steps, const Arrivals<F>& arrivals) {
  Steps<F> first = steps;
  arrivals.begin();
#pragma unroll
  for (int i = 0; i < DEPTH; ++i)
    if (steps.is_in()) {
      steps.fetch_weights(arrivals, i, false);
      steps.next();
    }
  grid_wait();
#pragma unroll
  for (int i = 0; i < DEPTH; ++i) {
    if (first.is_in()) {
      first.fetch_tokens(arrivals, i);
      first.next();
    }
    // Weights are in the first group, so that one more may be on its way than later.
    arrivals.close();
  }
}

// One unit's sums, or those of a gate or its up, are put down; at the last of them it ends.
template <class F>
__device__ __forceinline__ void end_tile(const Product& all, const Steps<F>& steps, int tile,
                                         const float (&total)[PASSES][Tile::VALUES], int warp,
                                         float* sums) {
  const int subs = all.is_glu() ? 2 : 1, sub = tile & (subs - 1), one = 16 * all.room;
  float* set = sums + (sub * WARPS + warp) * one;
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass)
    keep_sums_of(total[pass], Tile{static_cast<int>(threadIdx.x & 31)}, 8 * pass, all.room, set);
  if (sub < subs - 1) return;
  const Walk unit = steps.unit(tile);
  const Ending ending(all, unit, threadIdx.x);
  __syncthreads();
  ending.write(sums, one);
  __syncthreads();
}

template <class F>
__device__ __forceinline__ void multiply_wide(const Product& all, const std::uint8_t* records,
                                              int all_tokens, unsigned mask, int block, int blocks,
                                              std::uint8_t* shared) {
  using M = TileMemory<F>;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const Tile tile{lane};
  const int chunks = all.k / M::COLUMNS, set_bytes = M::tokens_bytes(all.room);
  const int warp_bytes = aligned(DEPTH * M::CHUNK + 2 * set_bytes);
  const Walk units(all, mask, block, blocks);
  const int tiles = units.left() * (all.is_glu() ? 2 : 1);
  std::uint8_t* memory = shared + aligned(DEPTH * WARPS * sizeof(Bell));
  float* sums = reinterpret_cast<float*>(memory + WARPS * warp_bytes);

  const Arrivals<F> arrivals{memory + warp * warp_bytes,
                             reinterpret_cast<Bell*>(shared) + DEPTH * warp,
                             M::tokens_bytes(all.tokens), set_bytes, lane};
  Steps<F> steps{all, units, records, warp, chunks, warp < chunks ? tiles : 0, all_tokens,
                 row_bytes_of<F>(all.k), 0, 0, warp};
  begin_steps(steps, arrivals);
  int place = 0, turn = 0;
  bool is_odd = true;
  for (int round = 0; round < tiles; round += HELD) {
    float total[HELD][PASSES][Tile::VALUES] = {};
#pragma unroll 1
    for (int chunk = warp; chunk < chunks; chunk += WARPS, ++turn) {
      const typename M::Staged staged(arrivals.tokens(turn), all.room);
#pragma unroll
      for (int t = 0; t < HELD; ++t) {
        if (round + t >= tiles) break;
        arrivals.template wait_for<DEPTH - 1>(place, is_odd);
        float part[PASSES][Tile::VALUES];
        multiply_any<F>(arrivals.ring, place * M::CHUNK, nullptr, nullptr, M(), staged, tile, part);
        __syncwarp();  // what was read may be overwritten
        if (steps.is_in()) {
          steps.fetch_weights(arrivals, place, true);
          steps.fetch_tokens(arrivals, place);
          steps.next();
        }
        arrivals.close();
        place ^= 1;
        is_odd ^= place == 0;
#pragma unroll
        for (int i = 0; i < PASSES * Tile::VALUES; ++i) {
          const int pass = i / Tile::VALUES, e = i % Tile::VALUES;
          total[t][pass][e] = total[t][pass][e] + part[pass][e];
        }
      }
    }
#pragma unroll
    for (int t = 0; t < HELD; ++t)
      if (round + t < tiles) end_tile(all, steps, round + t, total[t], warp, sums);
  }
}
#endif

extern "C" __global__ void __launch_bounds__(32 * WARPS, MANY > 0)
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
