// Some tiles of 16 rows of one matrix, or of a gate and its up, times up to four tokens, by a
// block, from sm_80 on. A tile's sums are made chunk by chunk, in the order of columns, whoever
// makes them: they depend neither on the number of warps nor on other tokens. Knows nothing of
// experts.
//
// An item is a chunk of a tile; warp w takes items w, w + WARPS, ..., and has DEPTH of them on the
// way, or two, if they are large. -D WARPS, DEPTH; TILES 1 and MANY 0.
#pragma once
#include "expert_chunks.cuh"
#include "grid.cuh"
#include "matmul_epilogue.cuh"

namespace voltapile {

#if VP_ARCH >= 800
constexpr int MOST_TOKENS = 4;

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
// memory: tokens, rings, items' sums.
template <class F>
struct Strip {
  using C = Chunks<F>;
  using Raw = Stage<C::BYTES, Codec<F>::ALIGN>;
  static constexpr int PLACES = Raw::SIZE > MUCH && DEPTH > 2 ? 2 : DEPTH;
  static constexpr int RING = whole(PLACES * Raw::SIZE);
  int tiles, k, last_row, room;
  std::uint8_t* memory;

  __device__ __forceinline__ int slot_bytes() const { return C::SLOT * room; }

  // first_of(tile): its first row. Of `from`, in turn, by all threads: arrive(), when `count`
  // tokens can be read, at row(token); see(token, chunk, values of this lane), by the warp that
  // puts them down; meet(), when all have been seen. If weights are asked for before it arrives
  // (is_early), they may be old; else what is asked for first comes first.
  template <class First, class From>
  __device__ __forceinline__ Sums multiply(int count, First first_of, From& from,
                                           bool is_early) const {
    const int lane = threadIdx.x & 31, warp = own_warp();
    const C cut{k};
    const int chunks = cut.count(), row_bytes = cut.row_bytes();
    const int slot = slot_bytes(), tokens_bytes = whole(chunks * slot);
    std::uint8_t* ring = memory + tokens_bytes + warp * RING;
    float* kept = reinterpret_cast<float*>(memory + tokens_bytes + WARPS * RING);
    const Raw raw(row_bytes, last_row, lane);
    const auto row_of = [&](int token) { return from.row(token); };
    Asked<F> asked(k, count, chunks, warp, lane);
    Walk ahead(warp, chunks), own = ahead;
    const int asks = is_early ? 0 : -PLACES;
    int place = 0;
    // The first PLACES turns fill the ring. One loop: code that runs once comes from far away.
#pragma unroll 1
    for (int turn = -PLACES; turn <= 0 || own.tile < tiles; ++turn) {
      if (turn == asks) {
        from.arrive();
        asked.begin(row_of);
      }
      if (turn == 0) {
        asked.finish(row_of, [&](int token, int chunk, const Held& held) {
          WholeTokens<F>::put(memory + chunk * slot + token * C::SLOT, held, lane);
          from.see(token, chunk, cut, held);
        });
        __syncthreads();
        from.meet();
      }
      if (turn >= 0 && own.tile < tiles) {
        wait_for_copies<PLACES - 1>();
        __syncwarp();
        multiply_item(ring + place * Raw::SIZE, raw, first_of(own.tile), own.chunk,
                      kept + (own.tile * chunks + own.chunk) * 16 * room, lane);
        __syncwarp();  // what was read may be overwritten
        own.advance(WARPS, chunks);
      }
      if (ahead.tile < tiles) {
        raw.begin_whole(ring + place * Raw::SIZE, first_of(ahead.tile) + ahead.chunk * C::BYTES);
        ahead.advance(WARPS, chunks);
      }
      commit_copies();
      place = place + 1 < PLACES ? place + 1 : 0;
    }
    __syncthreads();
    return {kept, chunks, room};
  }

 private:
  // kept: [token][16 rows].
  __device__ __forceinline__ void multiply_item(const std::uint8_t* place, const Raw& raw,
                                                const std::uint8_t* row, int chunk, float* kept,
                                                int lane) const {
    const Tile tile{lane};
    int at[Tile::ROWS];
#pragma unroll
    for (int i = 0; i < Tile::ROWS; ++i)
      at[i] = raw.row_start(row + chunk * C::BYTES, tile.row(i));
    float sums[2];
    WholeBlock<F>::multiply(place, at, memory + chunk * slot_bytes(), room, lane,
                            C{k}.groups(chunk), sums);
    const int token = lane & 3;
    if (token >= room) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) kept[token * 16 + tile.row(i)] = sums[i];
  }
};
#endif

}  // namespace voltapile
