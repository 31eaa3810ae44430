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

namespace voltapile {

#ifndef VP_EMULATION
__device__ __forceinline__ __half2 pair_of(unsigned bits) {
  return *reinterpret_cast<const __half2*>(&bits);
}
__device__ __forceinline__ unsigned half_mul(unsigned a, unsigned b) {
  const __half2 product = __hmul2(pair_of(a), pair_of(b));
  return *reinterpret_cast<const unsigned*>(&product);
}
__device__ __forceinline__ unsigned half_fma(unsigned a, unsigned b, unsigned c) {
  const __half2 sum = __hfma2(pair_of(a), pair_of(b), pair_of(c));
  return *reinterpret_cast<const unsigned*>(&sum);
}
#endif

// In shared memory, for `room` tokens of a chunk:
//   units   [8][room][4] Units: of piece 4 h + p the word k: [4 h + k][token][p]
//   sums    [room][4]: pairs for groups 2 p and 2 p + 1, over 2^6, and what they leave times 2^11
//   scales  [room] what sums of products are multiplied by
struct DirectTokens {
  Unit* units;
  uint2* sums;
  float* scales;
  int room;

  static __device__ constexpr int bytes(int room) { return (548 * room + 15) / 16 * 16; }

  __device__ DirectTokens(std::uint8_t* memory, int room) : room(room) {
    units = reinterpret_cast<Unit*>(memory);
    sums = reinterpret_cast<uint2*>(units + 32 * room);
    scales = reinterpret_cast<float*>(sums + 4 * room);
  }
  __device__ __forceinline__ int some(int token) const { return token < room ? token : 0; }

  // Lane 16 h + 4 k + p. x: the first token's row, at the chunk.
  __device__ __forceinline__ void stage(const float* x, int tokens, int k, int lane) {
    const int p = lane & 3, span = 2 * (lane >> 4) + (p >> 1);
    const float* first = x + 64 * span + 16 * (p & 1) + (lane & 12);
#pragma unroll 2
    for (int token = 0; token < tokens; ++token, first += k) {
      const float4 a = *reinterpret_cast<const float4*>(first);
      const float4 b = *reinterpret_cast<const float4*>(first + 32);
      float largest = fmaxf(largest_of(a), largest_of(b));
#pragma unroll
      for (int step = 16; step > 0; step >>= 1)
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
      const float2 scale = scales_for(largest);
      Unit unit;
      float low = pack_four<false>(a, scale.x, unit.r, nullptr);
      float high = pack_four<false>(b, scale.x, unit.r + 2, nullptr);
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        const int step = i ? 2 << i : 1;
        low += __shfl_xor_sync(~0u, low, step);
        high += __shfl_xor_sync(~0u, high, step);
      }
      *reinterpret_cast<uint4*>(units + ((lane >> 2) * room + token) * 4 + p) =
          uint4{unit.r[0], unit.r[1], unit.r[2], unit.r[3]};
      if ((lane & 13) == 0) {
        low *= 0x1p-6f;
        high *= 0x1p-6f;
        const unsigned pair = half_pair(low, high);
        const float2 kept = half_values(pair);
        sums[4 * token + span] =
            uint2{pair, half_pair((low - kept.x) * 2048.0f, (high - kept.y) * 2048.0f)};
      }
      if (lane == 0) scales[token] = scale.y;
    }
  }
};

// One block of each of 16 rows: what a lane needs of it.
struct DirectBlock {
  uint4 head[Tile::ROWS], quants[Tile::ROWS][Tile::UNITS][2];

  // offset: of this lane's rows from `first`.
  __device__ __forceinline__ void load(const std::uint8_t* first, const int (&offset)[Tile::ROWS],
                                       const Tile& tile) {
#pragma unroll
    for (int i = 0; i < Tile::ROWS; ++i) {
      const uint4* row = reinterpret_cast<const uint4*>(first + offset[i]);
      head[i] = __ldg(row);
#pragma unroll
      for (int j = 0; j < 2 * Tile::UNITS; ++j)
        quants[i][j >> 1][j & 1] = __ldg(row + 1 + 4 * (j & 1) + tile.unit(j >> 1));
    }
  }
  // Six bits of each of groups 4 h .. 4 h + 3, a byte each.
  __device__ __forceinline__ unsigned scales(int i, int h) const {
    return h ? (head[i].w & 0x0f0f0f0f) | (head[i].y >> 2 & 0x30303030) : head[i].y & 0x3f3f3f3f;
  }
  __device__ __forceinline__ unsigned minima(int i, int h) const {
    return h ? (head[i].w >> 4 & 0x0f0f0f0f) | (head[i].z >> 2 & 0x30303030)
             : head[i].z & 0x3f3f3f3f;
  }
  // Minima of groups 2 p and 2 p + 1, and again times 2^-11.
  __device__ __forceinline__ Unit minima_of(int i, int p) const {
    const unsigned four = minima(i, p >> 1);
    const unsigned pair = __byte_perm(four, 0x64646464, p & 1 ? 0x4342 : 0x4140);
    const unsigned two = half_add(pair, 0xe400e400);
    return {{two, half_mul(two, 0x10001000), 0, 0}};
  }
};

__device__ __forceinline__ unsigned word_of(const uint4& v, int k) {
  return k == 0 ? v.x : k == 1 ? v.y : k == 2 ? v.z : v.w;
}

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
      const unsigned four = block.scales(u / Tile::UNITS, h);
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
        const int token = tokens.some(8 * pass + tile.token());
        float c[Tile::VALUES] = {};  // of 64 columns
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const Unit* units = tokens.units + ((4 * h + 2 * pair + k) * tokens.room + token) * 4;
          Unit b[Tile::UNITS];
#pragma unroll
          for (int i = 0; i < Tile::UNITS; ++i) b[i] = unit_at(units + tile.unit(i));
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
    least[u] = block.minima_of(u / Tile::UNITS, tile.unit(u % Tile::UNITS));
#pragma unroll
  for (int i = 0; i < Tile::ROWS; ++i) factors[i] = block.head[i].x;
  float2 factor[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    factor[i] = half_values(tile.of_sum_row(factors, i));
    factor[i] = {factor[i].x * 0x1p19f, factor[i].y * -64.0f};
  }
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) {
    if (pass > 0 && 8 * pass >= tokens.room) continue;
    const int token = tokens.some(8 * pass + tile.token());
    float c[Tile::VALUES] = {};
    Unit b[Tile::UNITS];
#pragma unroll
    for (int i = 0; i < Tile::UNITS; ++i) {
      const uint2 pair = tokens.sums[4 * token + tile.unit(i)];
      b[i] = {{pair.x, pair.y, 0, 0}};
    }
    Tile::multiply(c, least, b, 0);
#pragma unroll
    for (int e = 0; e < Tile::VALUES; ++e) {
      const float2 by = factor[Tile::row_of(e)];
      const int column = tokens.some(8 * pass + tile.sum_token(Tile::token_of(e)));
      const float whole = fmaf(by.x, sum[pass][e], by.y * c[e]);
      total[pass][e] = fmaf(tokens.scales[column], whole, total[pass][e]);
    }
  }
}

// What a block works on.
struct Job {
  const std::uint8_t* first[TILES];  // row of each tile
  const float* x;
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
  const int size = slots > 1 ? DirectTokens::bytes(job.room) : 0;
  int offset[Tile::ROWS];
#pragma unroll
  for (int i = 0; i < Tile::ROWS; ++i)
    offset[i] = min(tile.row(i), job.last_row) * (chunks * BYTES);
  DirectBlock held[2];
#pragma unroll
  for (int slot = 0; slot < 2; ++slot) {
    const int chunk = warp + slot % (2 / TILES) * WARPS;
    if (chunk < chunks) held[slot].load(job.first[slot % TILES] + chunk * BYTES, offset, tile);
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
        staged.stage(job.x + chunk * 256, job.tokens, job.k, tile.lane);
        __syncwarp();
      }
      multiply_block(held[slot], staged, tile, total[t]);
      if (TILES == 1 || slot == 1) memory += size;
      if (chunk + STEP < chunks)
        held[slot].load(job.first[t] + (chunk + STEP) * BYTES, offset, tile);
    }
  }
  __syncwarp();
}

}  // namespace voltapile
