// What matmul_stream.cu and matmul_wide.cu are made of: which tiles a block takes, a warp's ring of
// chunks, the end of a unit.
#pragma once
#include "matmul_chunk.cuh"
#include "matmul_epilogue.cuh"

namespace voltapile {

__device__ __forceinline__ constexpr int aligned(int bytes) { return (bytes + 127) / 128 * 128; }

template <class F>
__device__ __forceinline__ int row_bytes_of(int k) {
  return k / F::length * F::bytes;
}

struct Product {
  Matrix matrices[3];
  const float* x;
  int k, tokens, room;
  Epilogue kind;

  __device__ __forceinline__ bool is_glu() const { return kind >= SILU; }
};

// Walks over every `step`-th unit of the matrices whose bit in `mask` is set. A gate and its up are
// one unit.
struct Cursor {
  const Product& all;
  unsigned mask;
  int step, m = -1, index, limit = 0;  // among the units of matrix m
  Matrix matrix;

  __device__ __forceinline__ Cursor(const Product& all, unsigned mask, int begin, int step)
      : all(all), mask(all.is_glu() ? 1 : mask), step(step), index(begin) {
    find();
  }
  __device__ __forceinline__ bool is_in() const { return m < 3; }
  __device__ __forceinline__ void next() {
    index += step;
    if (index >= limit) find();
  }
  // The one that comes `count` later.
  __device__ __forceinline__ Cursor after(int count) const {
    Cursor found = *this;
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
      const int units = mask >> i & 1 ? (all.matrices[i].rows + 15) / 16 : 0;
      if (at < units) count += (units - 1 - at) / step + 1;
      at = at < units ? at + ((units - 1 - at) / step + 1) * step - units : at - units;
    }
    return count;
  }
  // The first row that is meant; near the end of a matrix tiles begin earlier.
  __device__ __forceinline__ int row() const { return 16 * index; }

 private:
  __device__ __forceinline__ void find() {
#pragma unroll 1
    while (index >= limit && m < 3) {
      index -= limit;
      ++m;
      matrix = m == 0 ? all.matrices[0] : m == 1 ? all.matrices[1] : all.matrices[2];
      limit = m < 3 && mask >> m & 1 ? (matrix.rows + 15) / 16 : 0;
    }
  }
};

// The threads that share a product's columns meet; -D TEAMS of them are in a block.
__device__ __forceinline__ void meet_team(int team) {
#ifdef VP_EMULATION
  team_barrier(team + 1, 32 * WARPS);
#else
  asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(32 * WARPS) : "memory");
#endif
}

// How a warp works on one chunk, and what it keeps for it.
template <class F>
struct RingMemory {
  using M = ChunkMemory<F>;
  using Staged = typename M::Staged;
  static constexpr int BYTES = Codec<F>::BYTES, COLUMNS = 32 * Codec<F>::GROUPS;
  // Rows start at multiples of 16 bytes where chunks do: the launcher sees to it.
  using Raw = Stage<BYTES, BYTES % 16 == 0 ? 16 : Codec<F>::ALIGN>;
  static constexpr int SCALES = M::HAS_SCALES ? M::SCALES : 0;
  static constexpr int WARP = aligned(DEPTH * Raw::SIZE + SCALES);

  static __device__ __forceinline__ int tokens_bytes(int room) {
    return (Staged::PER_TOKEN * room + 15) / 16 * 16;
  }

  // The tokens of every `step`-th chunk. What comes from far away is asked for SEVERAL at a time.
  static __device__ __forceinline__ void stage(const Product& all, std::uint8_t* memory, int chunk,
                                               int step, int chunks, int lane) {
    const int size = tokens_bytes(all.room);
    if constexpr (Order<F>::IS_BLOCK) {
      constexpr int SEVERAL = 3;
      int token = 0;
      while (chunk < chunks) {
        float4 a[SEVERAL], b[SEVERAL];
        int chunk_of[SEVERAL], token_of[SEVERAL];
#pragma unroll
        for (int i = 0; i < SEVERAL; ++i) {
          chunk_of[i] = chunk, token_of[i] = token;
          if (chunk >= chunks) continue;
          Staged::load_whole(all.x + token * all.k, chunk * COLUMNS, lane, a[i], b[i]);
          token = token + 1 < all.tokens ? token + 1 : 0;
          chunk += token == 0 ? step : 0;
        }
#pragma unroll
        for (int i = 0; i < SEVERAL; ++i)
          if (chunk_of[i] < chunks)
            Staged(memory + chunk_of[i] * size, all.room).put(token_of[i], a[i], b[i], lane);
      }
    } else {
      for (; chunk < chunks; chunk += step)
        Staged(memory + chunk * size, all.room)
            .stage(all.x, all.tokens, all.k, chunk * COLUMNS, lane);
    }
  }

  // first: an address with the last four bits of the chunk's.
  static __device__ __forceinline__ void multiply(std::uint8_t* memory, int place, const Raw& raw,
                                                  const std::uint8_t* first, std::uint8_t* tokens,
                                                  int room, const Tile& tile,
                                                  float (&total)[PASSES][Tile::VALUES]) {
    float part[PASSES][Tile::VALUES];
    multiply_any<F>(memory, place * Raw::SIZE, memory + DEPTH * Raw::SIZE, first, raw,
                    Staged(tokens, room), tile, part);
#pragma unroll
    for (int i = 0; i < PASSES * Tile::VALUES; ++i) {
      const int pass = i / Tile::VALUES, e = i % Tile::VALUES;
      total[pass][e] = total[pass][e] + part[pass][e];
    }
  }
};

// The next chunk of a warp that is to be fetched.
template <class F>
struct Ahead {
  using M = RingMemory<F>;
  Cursor unit;
  int warp, chunks, row_bytes, sub = 0, chunk;
  const std::uint8_t* first;  // of the tile
  unsigned skews = 0;         // the last four bits of what went to each place

  __device__ __forceinline__ Ahead(const Cursor& begin, int warp, int chunks, int row_bytes)
      : unit(begin), warp(warp), chunks(chunks), row_bytes(row_bytes), chunk(warp) {
    if (warp >= chunks) unit.m = 3;
    find();
  }
  // To a place of the ring, if there is a chunk.
  __device__ __forceinline__ void fetch(const typename M::Raw& raw, std::uint8_t* memory,
                                        int place) {
    if (unit.is_in()) {
      const std::uint8_t* from = first + chunk * M::BYTES;
      raw.begin_whole(memory + place * M::Raw::SIZE, from);
      if constexpr (M::Raw::SLACK > 0)
        skews = (skews & ~(15u << 4 * place)) |
                (static_cast<unsigned>(reinterpret_cast<std::uint64_t>(from)) & 15) << 4 * place;
      chunk += WARPS;
      if (chunk >= chunks) {
        chunk = warp;
        if (unit.all.is_glu() && sub == 0) {
          sub = 1;
        } else {
          sub = 0;
          unit.next();
        }
        find();
      }
    }
    commit_copies();
  }
  __device__ __forceinline__ const std::uint8_t* skew(int place) const {
    return reinterpret_cast<const std::uint8_t*>(
        static_cast<std::uint64_t>(M::Raw::SLACK > 0 ? skews >> 4 * place & 15 : 0));
  }

 private:
  __device__ __forceinline__ void find() {
    const std::uint8_t* weights = sub ? unit.all.matrices[1].weights : unit.matrix.weights;
    first = weights +
            static_cast<long long>(first_row_of(unit.row(), unit.matrix.rows)) * row_bytes;
  }
};

// This warp's sums as [token][16 rows], of tokens from `first` on.
__device__ __forceinline__ void keep_sums_of(const float (&total)[Tile::VALUES], const Tile& tile,
                                             int first, int room, float* kept) {
#pragma unroll
  for (int e = 0; e < Tile::VALUES; ++e) {
    const int token = first + tile.sum_token(Tile::token_of(e));
    if (token < room) kept[token * 16 + tile.sum_row(Tile::row_of(e))] = total[e];
  }
}

// What a thread of a group has to do with the end of a unit: values i of its [token][16 rows].
struct Finish {
  const Product& all;
  const Cursor& unit;
  int i, row, token;
  bool is_there;
  float before = 0;  // asked for early

  __device__ __forceinline__ Finish(const Product& all, const Cursor& unit, int i)
      : all(all), unit(unit), i(i), token(i / 16) {}
  __device__ __forceinline__ void begin() {
    const int rows = unit.matrix.rows;
    row = first_row_of(unit.row(), rows) + i % 16;
    is_there = row >= unit.row() && row < rows && token < all.tokens;
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

}  // namespace voltapile
