// Some tiles of 16 rows of one matrix, or of a gate and its up, times up to four tokens, by a
// block, from sm_80 on. A tile's sums are made chunk by chunk, in the order of columns, whoever
// makes them: they depend neither on the number of warps nor on other tokens. Knows nothing of
// experts.
//
// An item is a chunk of a tile, which is contiguous (tiles.cuh); warp w takes items w, w + WARPS,
// ..., and has some of them on the way. -D WARPS; TILES 1 and MANY 0.
#pragma once
#include "expert_chunks.cuh"
#include "expert_fetch.cuh"
#include "grid.cuh"
#include "matmul_epilogue.cuh"

namespace voltapile {

#if VP_ARCH >= 800
constexpr int MOST_TOKENS = 4, MOST_DEPTH = HAS_BELLS ? 6 : 4;

// What Strip makes: of each chunk [token of `room`][16 rows], tile after tile.
struct Sums {
  const float* first;
  int chunks, room;

  __device__ __forceinline__ float of(int tile, int token, int row) const {
    const float* at = first + (tile * chunks * room + token) * 16 + row;
    float all = 0.0f;
#pragma unroll 4
    for (int chunk = 0; chunk < chunks; ++chunk) all += at[chunk * room * 16];
    return all;
  }
};

// A warp's way through tokens' chunks w, w + WARPS, ...: SEVERAL are asked for before the first one
// is put down.
template <class F>
struct Asked {
  static constexpr int SEVERAL = 3;
  Chunks<F> cut;
  int count, chunks, warp, lane;
  int token = 0, chunk;
  Held held[SEVERAL];

  __device__ __forceinline__ Asked(int k, int count, int chunks, int warp, int lane)
      : cut{k}, count(warp < chunks ? count : 0), chunks(chunks), warp(warp), lane(lane),
        chunk(warp) {}
  // row_of(token): its values.
  template <class Row>
  __device__ __forceinline__ Held next(Row row_of) {
    Held found;
    if (token < count) {
      found = cut.load(row_of(token), chunk, lane);
      chunk += WARPS;
      if (chunk >= chunks) chunk = warp, ++token;
    }
    return found;
  }
  template <class Row>
  __device__ __forceinline__ void begin(Row row_of) {
#pragma unroll
    for (int i = 0; i < SEVERAL; ++i) held[i] = next(row_of);
  }
  // put(token, chunk, held) for each.
  template <class Row, class Put>
  __device__ __forceinline__ void finish(Row row_of, Put put) {
    int own_token = 0, own_chunk = warp;
#pragma unroll 1
    while (own_token < count) {
      const Held own = held[0];
#pragma unroll
      for (int i = 1; i < SEVERAL; ++i) held[i - 1] = held[i];
      held[SEVERAL - 1] = next(row_of);
      put(own_token, own_chunk, own);
      own_chunk += WARPS;
      if (own_chunk >= chunks) own_chunk = warp, ++own_token;
    }
  }
};

// What a block does: `tiles` tiles of matrices with rows of k columns, and `room` tokens, most. Its
// memory: bells, warps' rings of `depth` chunks, tokens, items' sums.
template <class F>
struct Strip {
  using C = Chunks<F>;
  static constexpr int SIZE = 16 * C::BYTES, BELLS = whole(sizeof(Bell) * WARPS * MOST_DEPTH);
  int tiles, k, room, depth;
  std::uint8_t* memory;

  __device__ __forceinline__ int slot_bytes() const { return C::SLOT * room; }
  __device__ __forceinline__ std::uint8_t* tokens() const {
    return memory + BELLS + WARPS * depth * SIZE;
  }
  __device__ __forceinline__ std::uint8_t* end() const {
    return tokens() + C{k}.count() * room * (C::SLOT + 64 * tiles);
  }
  // A warp's own, for all that a block multiplies: bells go on ringing.
  __device__ __forceinline__ PieceRing<SIZE> ring() const {
    const int warp = own_warp();
    return {memory + BELLS + warp * depth * SIZE,
            reinterpret_cast<Bell*>(memory) + warp * MOST_DEPTH, depth,
            static_cast<int>(threadIdx.x & 31)};
  }

  // first_of(tile): its bytes. Of `from`, by all threads: row(token), of `count` tokens;
  // see(token, chunk, values of this lane), by the warp that puts them down; arrive(), after which
  // they can be read, if weights are asked for before that (IS_EARLY), and nothing else. When all
  // weights are asked for, the next kernel may ask for its own; of a single token (IS_LONE) when
  // rings are full, since it needs longer than the rest takes to come so far.
  template <class First, class From>
  __device__ __forceinline__ Sums multiply(int count, First first_of, From& from,
                                           PieceRing<SIZE>& ring) const {
    const int lane = threadIdx.x & 31, warp = own_warp();
    const C cut{k};
    const int chunks = cut.count(), slot = slot_bytes();
    std::uint8_t* put_down = tokens();
    float* kept = reinterpret_cast<float*>(put_down + chunks * slot);
    const auto row_of = [&](int token) { return from.row(token); };
    Asked<F> asked(k, count, chunks, warp, lane);
    Walk ahead(warp, chunks), own = ahead;
    const auto ask = [&](bool is_again) {
      const bool is_left = ahead.tile < tiles;
      ring.ask(is_left ? first_of(ahead.tile) + ahead.chunk * SIZE : nullptr, is_again);
      if (is_left) ahead.advance(WARPS, chunks);
    };
    if (!From::IS_EARLY) {
      asked.begin(row_of);
    }
#pragma unroll 1
    for (int i = 0; i < depth; ++i) ask(!From::IS_LONE);  // a single token has one turn
    if (From::IS_EARLY) {
      from.arrive();
      asked.begin(row_of);
    }
    if (From::IS_LONE || ahead.tile >= tiles) grid_launch();
    asked.finish(row_of, [&](int token, int chunk, const Held& held) {
      WholeTokens<F>::put(put_down + chunk * slot + token * C::SLOT, held, lane);
      from.see(token, chunk, cut, held);
    });
    // A warp multiplies no other chunks than it has put down, where they are dealt evenly.
    if (chunks % WARPS == 0)
      __syncwarp();
    else
      __syncthreads();
    const Tile tile{lane};
    const int at[2] = {tile.row(0) * C::BYTES, tile.row(1) * C::BYTES};
#pragma unroll 1
    for (; own.tile < tiles; own.advance(WARPS, chunks)) {
      const std::uint8_t* piece = ring.next();
      float sums[2], *to = kept + (own.tile * chunks + own.chunk) * 16 * room;
      WholeBlock<F>::multiply(piece, at, put_down + own.chunk * slot, room, lane, 8, sums);
      if ((lane & 3) < room)
#pragma unroll
        for (int i = 0; i < 2; ++i) to[(lane & 3) * 16 + tile.row(i)] = sums[i];
      __syncwarp();  // what was read may be overwritten
      ask(true);
      if (!From::IS_LONE && ahead.tile >= tiles) grid_launch();
    }
    __syncthreads();
    return {kept, chunks, room};
  }
};
#endif

}  // namespace voltapile
