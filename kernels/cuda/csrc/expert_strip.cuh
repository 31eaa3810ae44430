// Some tiles of 16 rows of one matrix, or of a gate and its up, times up to four tokens, by a
// block, from sm_80 on. A tile's sums are made chunk by chunk, in the order of columns, whoever
// makes them: they depend neither on the number of warps nor on other tokens. Knows nothing of
// experts.
//
// An item is a chunk of a tile; warp w takes items w, w + WARPS, ..., and has DEPTH of them on the
// way. -D WARPS, DEPTH; TILES 1 and MANY 0.
#pragma once
#include "expert_block.cuh"
#include "grid.cuh"
#include "matmul_epilogue.cuh"

namespace voltapile {

#if VP_ARCH >= 800
constexpr int MOST_TOKENS = 4;

template <class F>
__device__ __forceinline__ int row_bytes_of(int k) {
  return static_cast<unsigned>(k) / F::length * F::bytes;
}
// A warp's number, of which the compiler knows that all lanes have the same: else it makes code for
// lanes that part from each other. All of them call.
__device__ __forceinline__ int own_warp() { return __shfl_sync(~0u, threadIdx.x >> 5, 0); }
__device__ __forceinline__ constexpr int whole(int bytes) { return (bytes + 127) & ~127; }

// A chunk of 16 rows times the tokens of its slot; a warp's ring of such chunks.
template <class F>
struct Ring {
  using M = ChunkMemory<F>;
  using Raw = typename M::Raw;
  using Staged = typename M::Staged;
  using Whole = WholeTokens<typename Either<IS_WHOLE<F>, F, formats::Q4_K>::type>;
  static constexpr int BYTES = Codec<F>::BYTES, COLUMNS = 32 * Codec<F>::GROUPS;

  static __device__ constexpr int bytes(int places) {
    return whole(places * Raw::SIZE + M::SCALES);
  }
  static __device__ __forceinline__ int chunks(int k) {
    return static_cast<unsigned>(k + COLUMNS - 1) / COLUMNS;
  }
  static __device__ __forceinline__ int slot_bytes(int room) {
    return ((IS_WHOLE<F> ? Whole::PER_TOKEN : Staged::PER_TOKEN) * room + 15) & ~15;
  }
  // row: a tile's first. The copy is not committed.
  static __device__ __forceinline__ void begin(const Raw& raw, std::uint8_t* place,
                                               const std::uint8_t* row, int chunk, int row_bytes) {
    if constexpr (IS_K<F>)
      raw.begin_whole(place, row + chunk * BYTES);
    else
      raw.begin(place, row + chunk * BYTES, row_bytes - chunk * BYTES);
  }

  // One token's part of a chunk, as it is asked for.
  struct Held {
    float4 a, b;
  };
  static __device__ __forceinline__ Held load(const float* row, int k, int chunk, int lane) {
    Held held;
    if constexpr (IS_WHOLE<F>) Whole::load(row, chunk * COLUMNS, k, lane, held.a, held.b);
    return held;
  }
  static __device__ __forceinline__ void put(const Held& held, std::uint8_t* slot, int room,
                                             int token, const float* row, int k, int chunk,
                                             int lane) {
    if constexpr (IS_WHOLE<F>) {
      Whole::put(slot + token * Whole::PER_TOKEN, held.a, held.b, lane);
    } else if constexpr (Order<F>::IS_BLOCK) {
      float4 a{}, b{};
      // Whole columns, or whole groups of them: k is a multiple of what a format has in a block.
      const int column = chunk * COLUMNS;
      if (IS_K<F> || column + Order<F>::column(lane >> 2, lane & 3) < k)
        Staged::load_whole(row, column, lane, a, b);
      Staged(slot, room).put(token, a, b, lane);
    } else {
      Staged staged(slot, room);
      staged.units += 4 * token, staged.sums += token, staged.scales += token;
      staged.stage(row, 1, k, chunk * COLUMNS, lane);
    }
  }

  // places: of the ring. kept: [token][16 rows].
  static __device__ __forceinline__ void multiply(std::uint8_t* ring, int place, int places,
                                                  const Raw& raw, const std::uint8_t* row,
                                                  int chunk, std::uint8_t* slot, int room,
                                                  const Tile& tile, float* kept) {
    const std::uint8_t* first = row + chunk * BYTES;
    if constexpr (IS_WHOLE<F>) {
      int at[Tile::ROWS];
      float sums[2];
#pragma unroll
      for (int i = 0; i < Tile::ROWS; ++i)
        at[i] = place * Raw::SIZE + raw.row_start(first, tile.row(i));
      WholeBlock<F>::multiply(ring, at, slot, room, tile.lane, sums);
      const int token = tile.lane & 3;
      if (token < room)
        for (int i = 0; i < 2; ++i) kept[token * 16 + tile.row(i)] = sums[i];
    } else {
      float part[PASSES][Tile::VALUES];
      multiply_any<F>(ring, place * Raw::SIZE, ring + places * Raw::SIZE, first, raw,
                      Staged(slot, room), tile, part);
#pragma unroll
      for (int e = 0; e < Tile::VALUES; ++e) {
        const int token = tile.sum_token(Tile::token_of(e));
        if (token < room) kept[token * 16 + tile.sum_row(Tile::row_of(e))] = part[0][e];
      }
    }
  }
};

// Goes through items first, first + step, ...: which tile and which of its chunks.
struct Walk {
  int tile = 0, chunk;

  __device__ __forceinline__ Walk(int first, int chunks) : chunk(first) { settle(chunks); }
  __device__ __forceinline__ void advance(int step, int chunks) {
    chunk += step;
    settle(chunks);
  }
  __device__ __forceinline__ void settle(int chunks) {
#pragma unroll 1
    while (chunk >= chunks) chunk -= chunks, ++tile;
  }
};

// What Strip makes: of each chunk [token of `room`][16 rows], tile after tile.
struct Sums {
  const float* first;
  int chunks, room;

  __device__ __forceinline__ float of(int tile, int token, int row) const {
    const float* at = first + (tile * chunks * room + token) * 16 + row;
    float all = 0.0f;
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) all += at[chunk * room * 16];
    return all;
  }
};

// What a block does: `tiles` tiles of matrices with rows of k columns, and `room` tokens, most. Its
// memory: tokens, rings, items' sums.
template <class F>
struct Strip {
  using R = Ring<F>;
  int tiles, k, last_row, room;
  std::uint8_t* memory;

  __device__ __forceinline__ int chunks() const { return R::chunks(k); }
  __device__ __forceinline__ int tokens_bytes() const {
    return whole(chunks() * R::slot_bytes(room));
  }
  // By all warps. The next is asked for before one is put down.
  template <class Row>
  __device__ __forceinline__ void stage(int count, Row row_of, int warp, int lane) const {
    const int slot = R::slot_bytes(room), chunks = this->chunks();
    int token = 0, chunk = warp;
    if (chunk >= chunks || count <= 0) return;
    const float* row = row_of(0);
    typename R::Held held = R::load(row, k, chunk, lane);
#pragma unroll 1
    while (token < count) {
      const typename R::Held now = held;
      const float* own_row = row;
      const int own_token = token, own_chunk = chunk;
      chunk += WARPS;
      if (chunk >= chunks) {
        chunk = warp;
        if (++token < count) row = row_of(token);
      }
      if (token < count) held = R::load(row, k, chunk, lane);
      R::put(now, memory + own_chunk * slot, room, own_token, own_row, k, own_chunk, lane);
    }
  }
  // first_of(tile): its first row. row_of(token): its values. What `arrive` waits for comes after
  // weights are asked for and before tokens are read.
  template <class First, class Row, class Arrive>
  __device__ __forceinline__ Sums multiply(int count, First first_of, Row row_of,
                                           Arrive arrive) const {
    const int lane = threadIdx.x & 31, warp = own_warp();
    const int chunks = this->chunks(), row_bytes = row_bytes_of<F>(k);
    const int slot = R::slot_bytes(room);
    std::uint8_t* ring = memory + tokens_bytes() + warp * R::bytes(DEPTH);
    float* kept = reinterpret_cast<float*>(memory + tokens_bytes() + WARPS * R::bytes(DEPTH));
    const typename R::Raw raw(row_bytes, last_row, lane);
    Walk ahead(warp, chunks), own = ahead;
    const Tile tile{lane};
    int place = 0;
    // The first DEPTH turns fill the ring. One loop, since code that runs once comes from far away.
#pragma unroll 1
    for (int turn = -DEPTH; turn < 0 || own.tile < tiles; ++turn) {
      if (turn >= 0) {
        wait_for_copies<DEPTH - 1>();
        __syncwarp();
        R::multiply(ring, place, DEPTH, raw, first_of(own.tile), own.chunk,
                    memory + own.chunk * slot, room, tile,
                    kept + (own.tile * chunks + own.chunk) * 16 * room);
        __syncwarp();  // what was read may be overwritten
        own.advance(WARPS, chunks);
      }
      if (ahead.tile < tiles) {
        R::begin(raw, ring + place * R::Raw::SIZE, first_of(ahead.tile), ahead.chunk, row_bytes);
        ahead.advance(WARPS, chunks);
      }
      commit_copies();
      place = place + 1 < DEPTH ? place + 1 : 0;
      if (turn == -1) {
        arrive();
        stage(count, row_of, warp, lane);
        __syncthreads();
      }
    }
    __syncthreads();
    return {kept, chunks, room};
  }
};
#endif

}  // namespace voltapile
