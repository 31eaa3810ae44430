// Some tiles of 16 rows of one matrix, or of a gate and its up, times up to 8 tokens, by a block,
// from sm_80 on. A tile's sums are made chunk by chunk, in the order of columns, whoever makes them:
// they depend neither on the number of warps nor on other tokens. Knows nothing of experts.
//
// An item is a chunk of a tile; warp w takes items w, w + WARPS, ..., and has DEPTH of them on their
// way. -D WARPS, DEPTH; TILES 1 and MANY 0.
#pragma once
#include "grid.cuh"
#include "matmul_chunk.cuh"
#include "matmul_epilogue.cuh"

namespace voltapile {

#if VP_ARCH >= 800
constexpr int MOST_TOKENS = 8;

template <class F>
__device__ __forceinline__ int row_bytes_of(int k) {
  return k / F::length * F::bytes;
}
__device__ __forceinline__ constexpr int whole(int bytes) { return (bytes + 127) / 128 * 128; }

// A warp's ring of DEPTH chunks.
template <class F>
struct Ring {
  using M = ChunkMemory<F>;
  using Raw = typename M::Raw;
  using Staged = typename M::Staged;
  static constexpr int BYTES = Codec<F>::BYTES, COLUMNS = 32 * Codec<F>::GROUPS;

  static __device__ constexpr int bytes(int places) {
    return whole(places * Raw::SIZE + M::SCALES);
  }
  static __device__ __forceinline__ int chunks(int k) { return (k + COLUMNS - 1) / COLUMNS; }
  static __device__ __forceinline__ int slot_bytes(int room) {
    return (Staged::PER_TOKEN * room + 15) / 16 * 16;
  }
  // row: a tile's first. The copy is not committed.
  static __device__ __forceinline__ void begin(const Raw& raw, std::uint8_t* place,
                                               const std::uint8_t* row, int chunk, int row_bytes) {
    raw.begin(place, row + chunk * BYTES, row_bytes - chunk * BYTES);
  }
  // places: of the ring. slot: the chunk's tokens.
  static __device__ __forceinline__ void multiply(std::uint8_t* ring, int place, int places,
                                                  const Raw& raw, const std::uint8_t* row,
                                                  int chunk, std::uint8_t* slot, int room,
                                                  const Tile& tile, float (&sums)[Tile::VALUES]) {
    float part[PASSES][Tile::VALUES];
    multiply_any<F>(ring, place * Raw::SIZE, ring + places * Raw::SIZE, row + chunk * BYTES, raw,
                    Staged(slot, room), tile, part);
#pragma unroll
    for (int e = 0; e < Tile::VALUES; ++e) sums[e] = part[0][e];
  }
  // One token's part of a chunk.
  static __device__ __forceinline__ void stage(std::uint8_t* slot, int room, int token,
                                               const float* row, int k, int chunk, int lane) {
    Staged staged(slot, room);
    if constexpr (Order<F>::IS_BLOCK) {
      float4 a, b;
      Staged::load(row, chunk * COLUMNS, k, lane, a, b);
      staged.put(token, a, b, lane);
    } else {
      staged.units += 4 * token, staged.sums += token, staged.scales += token;
      staged.stage(row, 1, k, chunk * COLUMNS, lane);
    }
  }
};

// Sums of an item as [token][16 rows].
__device__ __forceinline__ void keep_item(const float (&sums)[Tile::VALUES], const Tile& tile,
                                          int room, float* kept) {
#pragma unroll
  for (int e = 0; e < Tile::VALUES; ++e) {
    const int token = tile.sum_token(Tile::token_of(e));
    if (token < room) kept[token * 16 + tile.sum_row(Tile::row_of(e))] = sums[e];
  }
}

// What a block does: `tiles` tiles of matrices with rows of k columns, `count` tokens, of which
// `room` fit. Its memory: tokens, rings, items' sums.
template <class F>
struct Strip {
  using R = Ring<F>;
  int tiles, k, last_row, room;
  std::uint8_t* memory;

  __device__ __forceinline__ int chunks() const { return R::chunks(k); }
  __device__ __forceinline__ int tokens_bytes() const {
    return whole(chunks() * R::slot_bytes(room));
  }
  __device__ __forceinline__ const float* sums() const {
    return reinterpret_cast<const float*>(memory + tokens_bytes() + WARPS * R::bytes(DEPTH));
  }
  // first_of(tile): its first row. row_of(token): its values. What `arrive` waits for comes after
  // weights are asked for and before tokens are read.
  template <class First, class Row, class Arrive>
  __device__ __forceinline__ void multiply(int count, First first_of, Row row_of,
                                           Arrive arrive) const {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int chunks = this->chunks(), items = tiles * chunks, row_bytes = row_bytes_of<F>(k);
    const int slot = R::slot_bytes(room);
    std::uint8_t* ring = memory + tokens_bytes() + warp * R::bytes(DEPTH);
    float* kept = const_cast<float*>(sums());
    const typename R::Raw raw(row_bytes, last_row, lane);
    const auto fetch = [&](int item, int place) {
      if (item < items)
        R::begin(raw, ring + place * R::Raw::SIZE, first_of(item / chunks), item % chunks,
                 row_bytes);
      commit_copies();
    };
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) fetch(warp + i * WARPS, i);
    arrive();
    for (int job = warp; job < chunks * count; job += WARPS)
      R::stage(memory + job / count * slot, room, job % count, row_of(job % count), k, job / count,
               lane);
    __syncthreads();
    const Tile tile{lane};
    int place = 0;
#pragma unroll 1
    for (int item = warp; item < items; item += WARPS) {
      wait_for_copies<DEPTH - 1>();
      __syncwarp();
      float own[Tile::VALUES];
      R::multiply(ring, place, DEPTH, raw, first_of(item / chunks), item % chunks,
                  memory + item % chunks * slot, room, tile, own);
      __syncwarp();  // what was read may be overwritten
      fetch(item + DEPTH * WARPS, place);
      place = place + 1 < DEPTH ? place + 1 : 0;
      keep_item(own, tile, room, kept + item * 16 * room);
    }
    __syncthreads();
  }
  // Of a row of a tile; after multiply().
  __device__ __forceinline__ float sum(int tile, int token, int row) const {
    const float* at = sums() + (tile * chunks() * room + token) * 16 + row;
    float all = 0.0f;
    for (int chunk = 0; chunk < chunks(); ++chunk) all += at[chunk * room * 16];
    return all;
  }
};
#endif

}  // namespace voltapile
