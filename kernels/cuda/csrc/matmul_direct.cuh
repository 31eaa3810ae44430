// Blocks of Q4_K straight from global memory to the registers of the tensor core, by one warp.
//
// A lane loads 16 bytes of quants at a time: piece j (0..7) of a row's block is bytes 16 j.., low
// nibbles of group 2 (j / 2) and high ones of the next. Lane unit p takes pieces p and 4 + p, so
// tokens are staged in that order of columns. A nibble left in place is a denormal half, q 2^-24 or
// q 2^-20; times its scale it is a multiple of 2^-19 and exact. Minima times the tokens' sums are
// one more product: sums as halves and what these leave. Compiled without contraction.
#pragma once
#include "grid.cuh"
#include "matmul_chunk.cuh"
#include "tiles.cuh"

namespace voltapile {

using DirectTokens = BlockTokens<formats::Q4_K>;

// One block of each of 16 rows: what a lane needs of it.
struct DirectBlock {
  Heads heads[Tile::ROWS];
  uint4 quants[Tile::ROWS][Tile::UNITS][2];

  // offset: of this lane's rows from `first`.
  __device__ __forceinline__ void load(const std::uint8_t* first, const int (&offset)[Tile::ROWS],
                                       const Tile& tile) {
#pragma unroll
    for (int i = 0; i < Tile::ROWS; ++i) {
      const uint4* row = reinterpret_cast<const uint4*>(first + offset[i]);
      heads[i].v = __ldg(row);
#pragma unroll
      for (int j = 0; j < 2 * Tile::UNITS; ++j)
        quants[i][j >> 1][j & 1] = __ldg(row + 1 + 4 * (j & 1) + tile.unit(j >> 1));
    }
  }
};

__device__ __forceinline__ void multiply_block(const DirectBlock& block,
                                               const DirectTokens& tokens, const Tile& tile,
                                               float (&total)[PASSES][Tile::VALUES]) {
  constexpr int LANE_UNITS = Tile::ROWS * Tile::UNITS;
  float sum[PASSES][Tile::VALUES] = {};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    unsigned low[LANE_UNITS], high[LANE_UNITS];  // scales times 2^5, times 2
#pragma unroll
    for (int u = 0; u < LANE_UNITS; ++u) {
      const unsigned four = block.heads[u / Tile::UNITS].scales(h);
      const unsigned select = 0x4040 + (tile.unit(u % Tile::UNITS) >> 1) * 0x0202;
      low[u] = half_fma(__byte_perm(four, 0x64646464, select), 0x50005000, 0xf800f800);
      high[u] = half_fma(__byte_perm(four, 0x64646464, select + 0x0101), 0x40004000, 0xe800e800);
    }
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      Unit a[2][LANE_UNITS];
#pragma unroll
      for (int k = 0; k < 2; ++k)
#pragma unroll
        for (int u = 0; u < LANE_UNITS; ++u) {
          const uint4& piece = block.quants[u / Tile::UNITS][u % Tile::UNITS][h];
          const unsigned even = word_of(piece, 2 * pair + k), odd = even >> 8;
          a[k][u] = {{half_mul(even & 0x000f000f, low[u]), half_mul(odd & 0x000f000f, low[u]),
                      half_mul(even & 0x00f000f0, high[u]), half_mul(odd & 0x00f000f0, high[u])}};
        }
#pragma unroll
      for (int pass = 0; pass < PASSES; ++pass) {
        if (pass > 0 && 8 * pass >= tokens.room) continue;
        const std::uint8_t* record = tokens.record(8 * pass + tile.token());
        float c[Tile::VALUES] = {};  // of 64 columns
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          Unit b[Tile::UNITS];
#pragma unroll
          for (int i = 0; i < Tile::UNITS; ++i)
            b[i] = tokens.unit(record, 4 * h + 2 * pair + k, tile.unit(i));
          Tile::multiply(c, a[k], b, 0);
          Tile::multiply(c, a[k], b, 1);
        }
#pragma unroll
        for (int e = 0; e < Tile::VALUES; ++e) sum[pass][e] += c[e];
      }
    }
  }
  Unit least[LANE_UNITS];
  unsigned factors[Tile::ROWS];
#pragma unroll
  for (int u = 0; u < LANE_UNITS; ++u)
    least[u] = block.heads[u / Tile::UNITS].minima_of(tile.unit(u % Tile::UNITS));
#pragma unroll
  for (int i = 0; i < Tile::ROWS; ++i) factors[i] = block.heads[i].v.x;
  float2 factor[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    factor[i] = half_values(tile.of_sum_row(factors, i));
    factor[i] = {factor[i].x * 0x1p19f, factor[i].y * -64.0f};
  }
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) {
    if (pass > 0 && 8 * pass >= tokens.room) continue;
    const std::uint8_t* record = tokens.record(8 * pass + tile.token());
    float c[Tile::VALUES] = {};
    Unit b[Tile::UNITS];
#pragma unroll
    for (int i = 0; i < Tile::UNITS; ++i) {
      const uint2 pair = tokens.sums(record, tile.unit(i));
      b[i] = {{pair.x, pair.y, 0, 0}};
    }
    Tile::multiply(c, least, b, 0);
#pragma unroll
    for (int e = 0; e < Tile::VALUES; ++e) {
      const float2 by = factor[Tile::row_of(e)];
      const float scale = tokens.scale(8 * pass + tile.sum_token(Tile::token_of(e)));
      const float whole = fmaf(by.x, sum[pass][e], by.y * c[e]);
      total[pass][e] = fmaf(scale, whole, total[pass][e]);
    }
  }
}

// What a block works on.
struct Job {
  const std::uint8_t* first[TILES];  // row of each tile
  const float* x;
  bool is_tiled;
  int last_row, k, tokens, room;  // last_row: of every tile, 15 unless the matrix has fewer

  // A register cannot be indexed.
  __device__ __forceinline__ const std::uint8_t* first_of(int tile) const {
    const std::uint8_t* found = first[0];
#pragma unroll
    for (int t = 1; t < TILES; ++t) found = tile == t ? first[t] : found;
    return found;
  }
};

// All chunks of this warp: two blocks are on their way, of two tiles or of two chunks. memory: of
// `slots` chunks' tokens; if all of the warp's fit, they stay there, and are staged if is_first.
__device__ __forceinline__ void multiply_direct(const Job& job, std::uint8_t* memory, int warp,
                                                int slots, bool is_first, const Tile& tile,
                                                float (&total)[TILES][PASSES][Tile::VALUES]) {
  static_assert(TILES <= 2);
  constexpr int BYTES = formats::Q4_K::bytes, STEP = 2 / TILES * WARPS;
  const int chunks = job.k / 256;
  const Lay lay = lay_of(job.is_tiled, BYTES, chunks * BYTES);
  const int size = slots > 1 ? DirectTokens::bytes(job.room) : 0;
  int offset[Tile::ROWS];
#pragma unroll
  for (int i = 0; i < Tile::ROWS; ++i)
    offset[i] = min(tile.row(i), job.last_row) * lay.row;
  DirectBlock held[2];
#pragma unroll
  for (int slot = 0; slot < 2; ++slot) {
    const int chunk = warp + slot % (2 / TILES) * WARPS;
    if (chunk < chunks) held[slot].load(job.first[slot % TILES] + chunk * lay.chunk, offset, tile);
  }
  grid_wait();
#pragma unroll 1
  for (int start = warp; start < chunks; start += STEP) {
#pragma unroll
    for (int slot = 0; slot < 2; ++slot) {
      const int chunk = start + slot % (2 / TILES) * WARPS, t = slot % TILES;
      if (chunk >= chunks) break;
      DirectTokens staged(memory, job.room);
      if ((TILES == 1 || slot == 0) && is_first) {
        __syncwarp();  // what was read may be overwritten
        staged.stage(job.x, job.tokens, job.k, chunk * 256, tile.lane);
        __syncwarp();
      }
      multiply_block(held[slot], staged, tile, total[t]);
      if (TILES == 1 || slot == 1) memory += size;
      if (chunk + STEP < chunks)
        held[slot].load(job.first[t] + (chunk + STEP) * lay.chunk, offset, tile);
    }
  }
  __syncwarp();
}

}  // namespace voltapile
