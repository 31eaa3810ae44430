// The product of few rows from sm_80 on: blocks stay, and each warp streams its chunks of weights
// through a ring of DEPTH places in shared memory, without a pause from one tile to the next.
//
// A tile is 16 rows of weights; a gate and its up are two tiles of one unit. A block has TEAMS
// teams of WARPS warps, and each takes every n-th unit of its format's; its warps share the columns
// as in matmul_rows.cu and sums are made in the same order, so bits are the same. Tokens are staged
// once, for all columns, and may be normed by that; before they are read, the ring is already being
// filled (grid.cuh).
// -D: FORMAT; OTHER, of the matrices whose bit in `others` is set, which blocks from first_other on
// take; DEPTH; TEAMS; WARPS, eight, or twice as many with one chunk of columns each; THREADS that a
// multiprocessor's registers shall suffice for, more than a block has, so that blocks of the next
// kernels find room beside it; TILES 1 and MANY 0; PUSH 1, where what is made is this rank's part
// of a sum and goes to the others at once.
#include "grid.cuh"
#include "group_push.cuh"
#include "matmul_norm.cuh"

using namespace voltapile;

#if VP_ARCH >= 800
// The units of this block's format, counted through its matrices.
struct Units {
  const Product& all;
  int first, second, count;  // where the second and the third matrix begin, and the end

  __device__ __forceinline__ Units(const Product& all, unsigned mask) : all(all) {
    first = units_of(mask, 0);
    second = first + (all.is_glu() ? 0 : units_of(mask, 1));
    count = second + (all.is_glu() ? 0 : units_of(mask, 2));
  }
  __device__ __forceinline__ int units_of(unsigned mask, int m) const {
    return mask >> m & 1 ? (all.matrices[m].rows + 15) >> 4 : 0;
  }
  __device__ __forceinline__ int before(int unit) const {  // in earlier matrices
    return unit < first ? 0 : unit < second ? first : second;
  }
  // Of a tile's address: where its chunks lie within 16 bytes depends on no more.
  __device__ __forceinline__ unsigned low_bits(int unit, int sub, int row_bytes) const {
    const Matrix found = matrix(unit);
    const int row = first_row_of(16 * (unit - before(unit)), found.rows);
    return static_cast<unsigned>(reinterpret_cast<std::uint64_t>(
               sub ? all.matrices[1].weights : found.weights)) +
           static_cast<unsigned>(row) * row_bytes;
  }
  __device__ __forceinline__ Matrix matrix(int unit) const {
    Matrix found = all.matrices[0];
    if (unit >= first) found = all.matrices[1];
    if (unit >= second) found = all.matrices[2];
    return found;
  }
};

// How a lane's vectors of a chunk follow each other. Where rows lie in shared memory as close as
// they are copied, they go on from row to row; else a turn takes whole rows.
template <class F>
struct Vectors {
  using Raw = typename RingMemory<F>::Raw;
  static constexpr int VECTORS = Raw::VECTORS;
  static constexpr bool IS_DENSE = Raw::STRIDE == 16 * VECTORS;
  static constexpr int ROWS = 32 / VECTORS;  // of a turn, if it takes whole ones
  static constexpr int TURNS = IS_DENSE ? Raw::TURNS : (16 + ROWS - 1) / ROWS;
  static constexpr int KEPT = IS_DENSE ? TURNS : 1;                   // offsets
  static constexpr int APART = IS_DENSE ? 512 : ROWS * Raw::STRIDE;  // turns, in shared memory

  static __device__ __forceinline__ bool is_in(int lane, int turn) {
    if (IS_DENSE)
      return 16 * VECTORS % 32 == 0 || turn < TURNS - 1 || lane + 32 * turn < 16 * VECTORS;
    return lane < ROWS * VECTORS &&
           (16 % ROWS == 0 || turn < TURNS - 1 || turn * ROWS + lane / VECTORS < 16);
  }
  static __device__ __forceinline__ unsigned offset(int lane, int turn, int row_bytes) {
    static_assert(VECTORS < 60);
    const int index = lane + 32 * turn, row = index * (65536 / VECTORS + 1) >> 16;
    return min(row, 15) * row_bytes + 16 * (index - row * VECTORS);
  }
  static __device__ __forceinline__ int place(int lane) {
    return IS_DENSE ? 16 * lane : lane / VECTORS * Raw::STRIDE + lane % VECTORS * 16;
  }
};

// The next chunk of a warp that is to be fetched.
template <class F>
struct Ahead {
  using M = RingMemory<F>;
  using V = Vectors<F>;
  const Units& units;
  int unit, step, warp, lane, chunks, row_bytes, left = 0, tiles = 0;  // tiles of the unit to come
  const std::uint8_t* from;
  unsigned offsets[V::KEPT];  // of this lane's vectors from the chunk's first row

  __device__ __forceinline__ Ahead(const Units& units, int unit, int step, int warp, int lane)
      : units(units), unit(unit - step), step(step), warp(warp), lane(lane),
        chunks(chunks_of<F>(units.all.k)), row_bytes(row_bytes_of<F>(units.all.k)) {
#pragma unroll
    for (int turn = 0; turn < V::KEPT; ++turn) offsets[turn] = V::offset(lane, turn, row_bytes);
    if (warp >= chunks) this->unit = units.count;
  }
  // To a place of the ring, if there is a chunk. The first time only finds one.
  __device__ __forceinline__ void fetch(std::uint8_t* place) {
    if (unit < units.count) {
      if (left > 0) copy(place);
      if (--left <= 0) find();
    }
    commit_copies();
  }

 private:
  __device__ __forceinline__ void copy(std::uint8_t* place) {
    const std::uint8_t* vector = from + offsets[0];
    std::uint8_t* own = place + V::place(lane);
#pragma unroll
    for (int turn = 0; turn < V::TURNS; ++turn) {
      if (V::IS_DENSE) vector = from + offsets[turn];
      if (V::is_in(lane, turn))
        copy_async(own + turn * V::APART, V::Raw::aligned(vector), 16);
      if (!V::IS_DENSE) vector += V::ROWS * row_bytes;
    }
    from += WARPS * M::BYTES;
  }
  __device__ __forceinline__ void find() {
    left = static_cast<unsigned>(chunks - 1 - warp) / WARPS + 1;
    if (tiles == 0) unit += step;
    const Matrix matrix = units.matrix(unit);
    const int row = first_row_of(16 * (unit - units.before(unit)), matrix.rows);
    const std::uint8_t* weights = tiles == 0 ? matrix.weights : units.all.matrices[1].weights;
    from = weights + static_cast<long long>(row) * row_bytes + warp * M::BYTES;
    tiles = tiles == 0 && units.all.is_glu() ? 1 : 0;
  }
};

// The same number, of which the compiler knows nothing: what is made of it is made again, and takes
// no registers meanwhile.
__device__ __forceinline__ int afresh(int number) {
#ifndef VP_EMULATION
  asm volatile("" : "+r"(number));
#endif
  return number;
}

// Without asking what was there. Nobody else adds to it, so there is but one order.
__device__ __forceinline__ void add_to(float* place, float value) {
#ifdef VP_EMULATION
  *place += value;
#else
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(__cvta_generic_to_global(place)), "f"(value)
               : "memory");
#endif
}

constexpr int CLASSES = 8;  // of chunks, whose sums are made first

// What a thread has to do with the end of a unit: value i of its [token][16 rows].
struct Ending {
  const Units& units;
  int unit, i;

  __device__ __forceinline__ Ending(const Units& units, int unit, int i)
      : units(units), unit(unit), i(i) {}
  __device__ __forceinline__ bool is_there(const Matrix& matrix) const {
    return (i / 16 < units.all.tokens) & (row(matrix) >= meant());  // no branch
  }
  __device__ __forceinline__ int meant() const { return 16 * (unit - units.before(unit)); }
  __device__ __forceinline__ int row(const Matrix& matrix) const {
    return first_row_of(meant(), matrix.rows) + i % 16;
  }
  __device__ __forceinline__ float* place(const Matrix& matrix) const {
    return matrix.out + static_cast<long long>(i / 16) * matrix.rows + row(matrix);
  }
  // sums: [tile of the unit][warp][token][16 rows], `one` of them a warp.
  template <class Line>
  __device__ __forceinline__ void write(const float* sums, int one, const Line& line) {
    if (i / 16 >= units.all.tokens) return;
    unit = afresh(unit);
    const Matrix matrix = units.matrix(unit);
    if (!is_there(matrix)) return;
    const int own = row(matrix);
    float value = 0, gate = 0;
#pragma unroll 1
    for (int sub = 0; sub <= units.all.is_glu(); ++sub, sums += WARPS * one) {
      gate = value, value = 0;
#pragma unroll
      for (int warp = 0; warp < CLASSES; ++warp) {
        float sum = sums[warp * one + i];
        if (WARPS > CLASSES) sum += sums[(warp + CLASSES) * one + i];
        value += sum;
      }
      const float* bias = sub ? units.all.matrices[1].bias : matrix.bias;
      if (bias != nullptr) value += bias[own];
    }
    if (units.all.is_glu()) value = activated(gate, units.all.kind) * value;
    if (units.all.kind == ADD) add_to(place(matrix), value);
    else *place(matrix) = value;
    line.send(value, i / 16, own);
  }
};

// Where rows of a chunk that begins at `first` begin in its place of the ring.
template <class F>
struct RowStarts {
  using Raw = typename RingMemory<F>::Raw;
  int row_bytes;
  __device__ __forceinline__ int row_start(const std::uint8_t* first, int row) const {
    return row * Raw::STRIDE + Raw::skew(first + row * row_bytes);
  }
};

// All units of this block: those of the matrices in `mask`, dealt to blocks `block` of `blocks`.
template <class F, class Line>
__device__ __forceinline__ void stream(const Product& all, Norm norm, const Line& line,
                                       unsigned mask, int block, int blocks, std::uint8_t* shared) {
  using M = RingMemory<F>;
  using Raw = typename M::Raw;
  const int lane = threadIdx.x & 31, warp_of_block = threadIdx.x >> 5;
  const int team = warp_of_block / WARPS, warp = warp_of_block % WARPS;
  const Tile tile{lane};
  const int chunks = chunks_of<F>(all.k), row_bytes = row_bytes_of<F>(all.k);
  const int subs = all.is_glu() ? 2 : 1, one = 16 * all.tokens;
  const int slot_bytes = M::tokens_bytes(all.tokens), all_tokens = aligned(chunks * slot_bytes);
  std::uint8_t* ring = shared + all_tokens + warp_of_block * M::WARP;
  float* sums = reinterpret_cast<float*>(shared + all_tokens + TEAMS * WARPS * M::WARP) +
                team * 2 * WARPS * subs * one;
  norm.sums = sums - team * 2 * WARPS * subs * one;  // whose time comes later
  norm.gains = norm.sums + TEAMS * 2 * WARPS * subs * one;

  const Units units(all, mask);
  const int step = TEAMS * blocks;
  int unit = block + team * blocks;
  Ahead<F> ahead(units, unit, step, warp, lane);
  if (norm.gain != nullptr) norm.ask(all.k);
#pragma unroll 1
  for (int i = -1; i < DEPTH; ++i) ahead.fetch(ring + i * Raw::SIZE);

  int place = 0;
  // The first turn stages tokens: what turns have in common is then ready before the wait.
  for (int count = 0; count == 0 || unit < units.count; ++count, unit += step) {
    if (count == 0) {
      // Of the whole warp, one number: branches on it need no code for lanes that go apart.
      const int first = __shfl_sync(~0u, warp_of_block, 0);
      grid_wait();
      if (warp_of_block == TEAMS * WARPS - 1) line.find(all.tokens, lane);
      stage<F>(all, norm, shared, first, lane);
      __syncthreads();
      if (unit >= units.count) break;
    }
    // Two sets of sums in turn, so that a set is read while the next is made.
    float* set = sums + (count & 1) * WARPS * subs * one;
    for (int sub = 0; sub < subs; ++sub) {
      float total[PASSES][Tile::VALUES] = {};
      unsigned first = units.low_bits(unit, sub, row_bytes) + warp * M::BYTES;
#pragma unroll 1
      for (int chunk = warp; chunk < chunks; chunk += WARPS, first += WARPS * M::BYTES) {
        wait_for_copies<DEPTH - 1>();
        __syncwarp();
        float part[PASSES][Tile::VALUES];
        multiply_any<F>(ring, place * Raw::SIZE, ring + DEPTH * Raw::SIZE,
                        reinterpret_cast<const std::uint8_t*>(static_cast<std::uint64_t>(first)),
                        RowStarts<F>{row_bytes},
                        typename M::Staged(shared + chunk * slot_bytes, all.tokens), tile, part);
#pragma unroll
        for (int e = 0; e < Tile::VALUES; ++e) total[0][e] = total[0][e] + part[0][e];
        __syncwarp();  // what was read may be overwritten
        ahead.fetch(ring + place * Raw::SIZE);
        place = place + 1 < DEPTH ? place + 1 : 0;
      }
      keep_sums_of(total[0], tile, 0, all.tokens, set + (sub * WARPS + warp) * one);
    }
    meet_team(team);
    Ending(units, unit, threadIdx.x % (32 * WARPS)).write(set, one, line);
  }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    matmul_stream(const std::uint8_t* weights0, const float* bias0, float* out0, int rows0,
                  const std::uint8_t* weights1, const float* bias1, float* out1, int rows1,
                  const std::uint8_t* weights2, const float* bias2, float* out2, int rows2,
                  const float* x, int k, int tokens, int epilogue, int others, int first_other,
                  const float* gain, float eps, float share
#if PUSH
                  , const Group* group, int rank, int ranks
#endif
                  ) {
#if VP_ARCH >= 800
  extern __shared__ __align__(128) std::uint8_t shared[];
  grid_launch();
  const Product all{{{weights0, bias0, out0, rows0},
                     {weights1, bias1, out1, rows1},
                     {weights2, bias2, out2, rows2}},
                    x, k, tokens, tokens, static_cast<Epilogue>(epilogue)};
  const Norm norm{gain, eps, share};
#if PUSH
  const Outgoing<true> line{group, rank, ranks};
#else
  const Outgoing<false> line{};
#endif
  constexpr bool IS_SAME = Equal<formats::FORMAT, formats::OTHER>::value;
  const int block = blockIdx.x, blocks = gridDim.x;
  if (!IS_SAME && block >= first_other)
    stream<formats::OTHER>(all, norm, line, others, block - first_other,
                           blocks - first_other, shared);
  else
    stream<formats::FORMAT>(all, norm, line, ~others & 7, block,
                            IS_SAME ? blocks : first_other, shared);
#endif
}
