// The product of few rows from sm_80 on: blocks stay, and each warp streams its chunks of weights,
// which lie by tiles (tiles.cuh), through a ring of `depth` places in shared memory, without a
// pause from one tile to the next.
//
// A gate's tile and its up's are one unit. A block has TEAMS teams of WARPS warps, and each takes
// every n-th unit of its format's; its warps share the columns as in matmul_rows.cu and sums are
// made in the same order, so bits are the same. Tokens are staged once, for all columns, and may be
// normed by that; before they are read, the ring is already being filled (grid.cuh).
// What is asked for at the start holds up whatever is asked for then, the tokens too: all blocks'
// rings are 18 MB, 4.6 us of an H200's memory. So where a block begins no sooner than the kernel
// before it ends, it asks for `early` places of its rings, and for the others behind its tokens.
// Units of the two formats are counted apart; blocks from first_other on take OTHER's.
// -D: FORMAT; OTHER; DEPTH, the most places of a ring; TEAMS; WARPS, eight, or twice as many with
// one chunk of columns each; THREADS that a multiprocessor's registers shall suffice for; TILES 1
// and MANY 0; ONE, whether it is known that there is but one token; TAIL 1, where what is made is
// this rank's part of a sum, which is made here, too (group_tail.cuh): there is one matrix then,
// no gate, and nothing to norm, and code for those is left out.
#include "grid.cuh"
#include "group_tail.cuh"
#include "matmul_norm.cuh"

using namespace voltapile;

#ifndef TAIL
#define TAIL 0
#endif

#if VP_ARCH >= 800
// The units of this block's format. They are counted through its matrices; addresses of all that a
// matrix has are as if the first of these units were the first of the matrix.
struct Units {
  const Product& all;
  int first, second, count;  // where the second and the third matrix begin, and the end

  __device__ __forceinline__ Matrix matrix(int unit) const {
    Matrix found = all.matrices[0];
    if (TAIL) return found;
    if (unit >= first) found = all.matrices[1];
    if (unit >= second) found = all.matrices[2];
    return found;
  }
};

// The next chunk of a warp that is to be fetched.
template <class F>
struct Ahead {
  using M = TileMemory<F>;
  const Units& units;
  int unit, step, warp, chunks;
  int sub = 0, left;  // tile of the unit, and how many chunks of it are to come
  const std::uint8_t* from;

  __device__ __forceinline__ Ahead(const Units& units, int unit, int step, int warp)
      : units(units), unit(unit), step(step), warp(warp), chunks(chunks_of<F>(units.all.k)) {
    if (warp >= chunks) this->unit = units.count;
    find();
  }
  // Finds the next tile where the last one's chunks are all fetched.
  __device__ __forceinline__ void prepare() {
    if (left > 0) return;
    sub = !TAIL && units.all.is_glu() ? 1 - sub : 0;
    if (sub == 0) unit += step;
    find();
  }
  // To a place of the ring, if there is a chunk.
  __device__ __forceinline__ void fetch(const ChunkRing<F>& ring, int place, bool is_again) {
    if (unit < units.count) {
      ring.fetch(place, from, is_again);
      from += WARPS * M::CHUNK;
      --left;
    }
    ring.close();
  }

 private:
  __device__ __forceinline__ void find() {
    left = static_cast<unsigned>(chunks - 1 - warp) / WARPS + 1;
    const std::uint8_t* weights = sub ? units.all.matrices[1].weights : units.matrix(unit).weights;
    from = weights + static_cast<long long>(unit * chunks + warp) * M::CHUNK;
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
__device__ __forceinline__ float* afresh(float* place) {
#ifndef VP_EMULATION
  asm volatile("" : "+l"(place));
#endif
  return place;
}

// The same memory, whose address is not made anew wherever a register is short.
template <class T>
__device__ __forceinline__ T* same_memory(T* shared) {
#ifdef VP_EMULATION
  return shared;
#else
  const int address = afresh(static_cast<int>(__cvta_generic_to_shared(shared)));
  return static_cast<T*>(__cvta_shared_to_generic(address));
#endif
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

// What a thread has to do with the end of a unit: with value i of those that a warp has.
struct Ending {
  const Units& units;
  int i, one;              // values of a warp: [token][16 rows]
  float* place = nullptr;  // that the value goes to
  float bias = 0, bias_of_up = 0;

  __device__ __forceinline__ Ending(const Units& units, int i)
      : units(units), i(i), one(16 * units.all.tokens) {}
  // Reads nothing that kernels make.
  __device__ __forceinline__ void find(int unit) {
    if (i / 16 >= units.all.tokens || unit >= units.count) return;
    unit = afresh(unit);
    const Matrix matrix = units.matrix(unit);
    const int own = 16 * unit + i % 16;
    if (!TAIL) place = afresh(matrix.out + static_cast<long long>(i / 16) * matrix.rows + own);
    bias = matrix.bias != nullptr ? matrix.bias[own] : 0;
    const float* up = units.all.matrices[1].bias;
    if (units.all.is_glu() && up != nullptr) bias_of_up = up[own];
  }
  // sums: [tile of the unit][warp][token][16 rows].
  __device__ __forceinline__ void write(const float* sums) const {
    if (i / 16 >= units.all.tokens) return;
    float value = whole(sums) + bias;
    if (units.all.is_glu())
      value = activated(value, units.all.kind) * (whole(sums + WARPS * one) + bias_of_up);
    if (units.all.kind == ADD) add_to(place, value);
    else *place = value;
  }

  // Of a sum over ranks: this rank's part, to all others; 0 where there is none.
  __device__ __forceinline__ float send(const float* sums, int unit, const Tail& tail) const {
    if (i / 16 >= units.all.tokens) return 0;
    const float part = whole(sums) + bias;
    tail.send(part, place_of(unit));
    return part;
  }
  // With what the others have sent. x is asked for before they are waited for.
  __device__ __forceinline__ void settle(float part, int unit, const Tail& tail) const {
    if (i / 16 >= units.all.tokens) return;
    const Matrix& matrix = units.all.matrices[0];
    const int own = afresh(i);
    float* to = matrix.out + own / 16 * matrix.rows + 16 * afresh(unit) + own % 16;
    const bool adds = units.all.kind == ADD;
    const float before = adds ? *to : 0.0f;
    const float total = tail.total(part, place_of(unit));
    *to = adds ? before + total : total;
  }

 private:
  __device__ __forceinline__ int place_of(int unit) const {
    return TILE_WORDS * afresh(unit) + afresh(i);
  }
  // Never -0, so that adding 0 leaves it as it is.
  __device__ __forceinline__ float whole(const float* sums) const {
    float value = 0;
#pragma unroll
    for (int warp = 0; warp < CLASSES; ++warp) {
      float sum = sums[warp * one + i];
      if (WARPS > CLASSES) sum += sums[(warp + CLASSES) * one + i];
      value += sum;
    }
    return value;
  }
};

// What comes behind a product. A block asks the L2 cache for some bytes of it when memory has
// little to do: when all its own weights are on their way (early), and while it waits for other
// ranks (late); for so few that nothing else waits for them long.
struct Sequel {
  const std::uint8_t* weights;
  int stride, tiles;  // of a tile; how many there are, one for each block
  int early, late;    // bytes

  // By a warp that is together.
  __device__ __forceinline__ void ask_early(int block) const { ask(block, 0, early); }
  __device__ __forceinline__ void ask_late(int block) const { ask(block, early, late); }

 private:
  __device__ __forceinline__ void ask(int block, int first, int bytes) const {
#if VP_ARCH >= 900 && !defined(VP_EMULATION)
    if (bytes == 0 || block >= tiles || !is_elected()) return;
    const std::uint8_t* from = weights + static_cast<long long>(block) * stride + first;
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
#endif
  }
};

// All units of this block, of those that are dealt to `blocks`.
// Shared memory: a bell for each place of each ring and one for gains, rings, tokens, sums, gains.
template <class F>
__device__ __forceinline__ void stream(const Product& all, Norm norm, const Tail& tail,
                                       const Units& units, int block, int blocks, int depth,
                                       int early, const Sequel& sequel, std::uint8_t* shared) {
  using M = TileMemory<F>;
  constexpr int ALL_WARPS = TEAMS * WARPS, BELLS = aligned(8 * (DEPTH * ALL_WARPS + 1));
  // One number for the whole warp: branches on it need no code for lanes that go apart.
  const int lane = afresh(threadIdx.x & 31);
  const int warp_of_block = __shfl_sync(~0u, threadIdx.x >> 5, 0);
  const int team = static_cast<unsigned>(warp_of_block) / WARPS, warp = warp_of_block & WARPS - 1;
  Bell* bells = reinterpret_cast<Bell*>(shared);
  ChunkRing<F> ring(shared + BELLS + warp_of_block * M::ring_bytes(depth),
                    bells + DEPTH * warp_of_block, depth, lane);
  const int step = TEAMS * blocks;
  int unit = block + team * blocks;
  Ahead<F> ahead(units, unit, step, warp);
  const auto fill = [&](int first, int end) {
#pragma unroll 1
    for (int i = first; i < end; ++i) {
      ahead.prepare();
      ahead.fetch(ring, i, false);
    }
  };
  const int chunks = chunks_of<F>(all.k), one = 16 * all.tokens;
  const int subs = !TAIL && all.is_glu() ? 2 : 1;
  const int slot_bytes = M::tokens_bytes(all.tokens);
  std::uint8_t* tokens = shared + BELLS + ALL_WARPS * M::ring_bytes(depth);
  norm.sums = reinterpret_cast<float*>(tokens + aligned(chunks * slot_bytes));  // till units end
  norm.gains = norm.sums + TEAMS * 2 * WARPS * subs * one;
  norm.bell = bells + DEPTH * ALL_WARPS;
  if (norm.gain != nullptr) norm.ask(all.k);  // first, since they come in the order of asking
  fill(0, early);

  if (TAIL && warp_of_block == ALL_WARPS - 1) {
    tail.begin(lane);
    grid_launch();
  }
  const Tile tile{lane};
  float* sums = norm.sums + team * 2 * WARPS * subs * one;
  Ending ending(units, 32 * warp + lane);
  if (ONE) ending.find(unit);  // where there are registers to keep it in

  float sent = 0;  // of a sum over ranks, which is finished while others' parts of it come
  // The first turn waits, and stages tokens: what turns have in common is then ready before that.
  for (int count = 0; count == 0 || unit < units.count; ++count, unit += step) {
    if (count == 0) {
      stage<F>(all, norm, tokens, warp_of_block, lane, [&] {
        fill(early, depth);
        if (TAIL && warp_of_block == WARPS - 1) sequel.ask_early(block);
      });
      __syncthreads();
      if (unit >= units.count) break;
    }
    // Two sets of sums in turn, so that a set is read while the next is made.
    float* set = same_memory(sums + (count & 1) * WARPS * subs * one);
    for (int sub = 0; sub < subs; ++sub) {
      float total[PASSES][Tile::VALUES] = {};
#pragma unroll 1
      for (int chunk = warp; chunk < chunks; chunk += WARPS) {
        ahead.prepare();
        ring.await_chunk();
        float part[PASSES][Tile::VALUES];
        multiply_any<F>(ring.places, ring.place * M::CHUNK, ring.places + depth * M::CHUNK, nullptr,
                        M(), typename M::Staged(tokens + chunk * slot_bytes, all.tokens), tile,
                        part);
#pragma unroll
        for (int e = 0; e < Tile::VALUES; ++e) total[0][e] = total[0][e] + part[0][e];
        __syncwarp();  // what was read may be overwritten
        ahead.fetch(ring, ring.place, true);
        ring.advance();
      }
      keep_sums_of(total[0], tile, 0, all.tokens, set + (sub * WARPS + warp) * one);
    }
    meet_team(team);
    if (!ONE) ending.find(unit);
    if (TAIL) {
      const float part = ending.send(set, unit, tail);
      const bool is_last = unit + step >= units.count;
      if (is_last && warp_of_block == WARPS - 1) sequel.ask_late(block);
      // What the turn before has sent, and in the last turn what this one has.
#pragma unroll 1
      for (int back = count > 0; back >= !is_last; --back)
        ending.settle(back ? sent : part, unit - back * step, tail);
      sent = part;
    } else {
      ending.write(set);
    }
    if (ONE) ending.find(unit + step);
  }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    matmul_stream(const std::uint8_t* weights0, const float* bias0, float* out0, int rows0,
                  const std::uint8_t* weights1, const float* bias1, float* out1, int rows1,
                  const std::uint8_t* weights2, const float* bias2, float* out2, int rows2,
                  const float* x, int k, int tokens, int epilogue, int first, int second,
                  int count, int other_first, int other_second, int other_count, int first_other,
                  int depth, int early, const float* gain, float eps, float share
#if TAIL
                  , Group* group, int rank, int ranks, const std::uint8_t* next,
                  int next_stride, int next_tiles, int next_early, int next_late
#endif
                  ) {
#if VP_ARCH >= 800
  extern __shared__ __align__(128) std::uint8_t shared[];
  std::uint8_t* memory = same_memory(shared);
  const Product all{{{weights0, bias0, out0, rows0},
                     {weights1, bias1, out1, rows1},
                     {weights2, bias2, out2, rows2}},
                    x, k, ONE ? 1 : tokens, ONE ? 1 : tokens, static_cast<Epilogue>(epilogue)};
  const Norm norm{TAIL ? nullptr : gain, eps, share};
#if TAIL
  const Tail tail{group, rank, ranks};
  const Sequel sequel{next, next_stride, next_tiles, next_early, next_late};
#else
  const Tail tail{};
  const Sequel sequel{};
  grid_launch();
#endif
  constexpr bool IS_SAME = Equal<formats::FORMAT, formats::OTHER>::value;
  const int block = blockIdx.x, blocks = gridDim.x;
  if (!IS_SAME && block >= first_other)
    stream<formats::OTHER>(all, norm, tail, {all, other_first, other_second, other_count},
                           block - first_other, blocks - first_other, depth, early, sequel,
                           memory);
  else
    stream<formats::FORMAT>(all, norm, tail, {all, first, second, count}, block,
                            IS_SAME ? blocks : first_other, depth, early, sequel, memory);
#endif
}
