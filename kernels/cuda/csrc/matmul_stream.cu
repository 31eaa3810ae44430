// The product of few rows from sm_80 on: blocks stay, and each warp streams its chunks of weights,
// which lie by tiles (tiles.cuh), through a ring of `depth` places in shared memory, without a
// pause from one tile to the next.
//
// A gate's tile and its up's are one unit. A block has TEAMS teams of WARPS warps, and each takes
// every n-th unit of its format's; its warps share the columns as in matmul_rows.cu and sums are
// made in the same order, so bits are the same. Tokens are staged once, for all columns, and may be
// normed by that; before they are read, the ring is already being filled (grid.cuh).
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
  __device__ __forceinline__ void fetch(const ChunkRing<F>& ring, int place) {
    if (unit < units.count) {
      ring.fetch(place, from);
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

// All units of this block, of those that are dealt to `blocks`.
// Shared memory: a bell for each place of each ring and one for gains, rings, tokens, sums, gains.
template <class F>
__device__ __forceinline__ void stream(const Product& all, Norm norm, const Tail& tail,
                                       const Units& units, int block, int blocks, int depth,
                                       std::uint8_t* shared) {
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
#pragma unroll 1
  for (int i = 0; i < depth; ++i) {
    ahead.prepare();
    ahead.fetch(ring, i);
  }

  if (TAIL && warp_of_block == ALL_WARPS - 1) {
    tail.begin(lane);
    grid_launch();
  }
  const Tile tile{lane};
  const int chunks = chunks_of<F>(all.k), one = 16 * all.tokens;
  const int subs = !TAIL && all.is_glu() ? 2 : 1;
  const int slot_bytes = M::tokens_bytes(all.tokens);
  std::uint8_t* tokens = shared + BELLS + ALL_WARPS * M::ring_bytes(depth);
  norm.sums = reinterpret_cast<float*>(tokens + aligned(chunks * slot_bytes));  // till units end
  norm.gains = norm.sums + TEAMS * 2 * WARPS * subs * one;
  norm.bell = bells + DEPTH * ALL_WARPS;
  float* sums = norm.sums + team * 2 * WARPS * subs * one;
  if (norm.gain != nullptr) norm.ask(all.k);
  Ending ending(units, 32 * warp + lane);
  if (ONE) ending.find(unit);  // where there are registers to keep it in

  // A sum over ranks is finished a turn later, while others' parts of it come; so there is one
  // more turn, of no unit.
  const int end = TAIL ? units.count + step : units.count;
  float sent = 0;
  // The first turn waits, and stages tokens: what turns have in common is then ready before that.
  for (int count = 0; count == 0 || unit < end; ++count, unit += step) {
    if (count == 0) {
      stage<F>(all, norm, tokens, warp_of_block, lane);
      __syncthreads();
      if (unit >= units.count) break;
    }
    // Two sets of sums in turn, so that a set is read while the next is made.
    float* set = same_memory(sums + (count & 1) * WARPS * subs * one);
    for (int sub = 0; sub < subs && (!TAIL || unit < units.count); ++sub) {
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
        ahead.fetch(ring, ring.place);
        ring.advance();
      }
      keep_sums_of(total[0], tile, 0, all.tokens, set + (sub * WARPS + warp) * one);
    }
    meet_team(team);
    if (!ONE) ending.find(unit);
    if (TAIL) {
      const float part = unit < units.count ? ending.send(set, unit, tail) : 0;
      if (count > 0) ending.settle(sent, unit - step, tail);
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
                  int depth, const float* gain, float eps, float share
#if TAIL
                  , Group* group, int rank, int ranks
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
#else
  const Tail tail{};
  grid_launch();
#endif
  constexpr bool IS_SAME = Equal<formats::FORMAT, formats::OTHER>::value;
  const int block = blockIdx.x, blocks = gridDim.x;
  if (!IS_SAME && block >= first_other)
    stream<formats::OTHER>(all, norm, tail, {all, other_first, other_second, other_count},
                           block - first_other, blocks - first_other, depth, memory);
  else
    stream<formats::FORMAT>(all, norm, tail, {all, first, second, count}, block,
                            IS_SAME ? blocks : first_other, depth, memory);
#endif
}
