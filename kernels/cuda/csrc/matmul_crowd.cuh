// A chunk of 256 columns of 16 rows times 16 or 32 tokens, as its bytes lie: what matmul_block.cuh
// does for a few tokens, with the same bits, in loops that stay small. For compute capability 9.0.
//
// Four warps do it at once, each with rows of its own and all with the same tokens. They multiply
// together (warpgroup.cuh), and what a product costs a warp is unpacking and its sums. Where these
// are rounded the tensor core does it as for a warp alone: 216 million sums had the same bits (an
// H200, 2026-11-30).
#pragma once
#include "matmul_chunk.cuh"
#include "warpgroup.cuh"

#if VP_ARCH == 900
namespace voltapile {

// A chunk of a tile as it lies in memory (tiles.cuh) and is copied: row behind row.
template <class F>
struct Dense {
  static constexpr int ROW = Codec<F>::BYTES, SIZE = 16 * ROW;
  static __device__ __forceinline__ int row_start(const std::uint8_t*, int row) {
    return row * ROW;
  }
};

// What a lane reads of tokens in the order of CrowdOrder.
struct View {
  static constexpr int ROOM = 8 * PASSES;
  const std::uint8_t* memory;
  Descriptor all;
  int lane;

  __device__ __forceinline__ Descriptor pieces(int group) const {
    return all.after(CrowdOrder::ROW * ROOM * (group / 2) + 64 * (group % 2));
  }
  // Of two times eight tokens, sums as mma_16816 wants them.
  __device__ __forceinline__ Unit pairs(int two) const {
    const int own = 16 * (lane >> 3 & 1) + 256 * (lane >> 4) + 32 * (lane & 7);
    const std::uint8_t* place = memory + CrowdOrder::sums(ROOM) + own + 512 * two;
    Unit found;
    load_matrices(found.r, reinterpret_cast<const std::uint16_t*>(place));
    return found;
  }
  // Of the tokens of the lane's sums.
  __device__ __forceinline__ float2 scales(int pass) const {
    const std::uint8_t* own = memory + CrowdOrder::scales(ROOM) + 8 * (lane & 3);
    return *reinterpret_cast<const float2*>(own + 32 * pass);
  }
};

// sum += scale c, of an exact c.
__device__ __forceinline__ void add_group(Sums& sum, const float (&scale)[2], const Sums& c) {
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass)
#pragma unroll
    for (int e = 0; e < Tile::VALUES; ++e)
      sum[pass][e] = fmaf(scale[Tile::row_of(e)], c[pass][e], sum[pass][e]);
}

// total += scale part, of element e. A token's scale is a power of two, so nothing is rounded that
// a product apart would round otherwise, of numbers down to 2^-126.
__device__ __forceinline__ void add_scaled(float& total, float2 scales, int e, float part) {
  total = fmaf(Tile::token_of(e) ? scales.y : scales.x, part, total);
}

template <class F>
struct Crowd;

template <>
struct Crowd<formats::Q4_K> {
  using F = formats::Q4_K;

  // Adds the products of 16 rows, of which this lane's start at at[i], to total.
  static __device__ __forceinline__ void add(const std::uint8_t* memory,
                                             const int (&at)[Tile::ROWS], const View& tokens,
                                             const Tile& tile, Sums& total) {
    const int p = tile.unit(0);
    unsigned scales[2], later[2];  // of four groups and those behind, a byte each
    uint2 two[2];                  // bytes of a run of two groups
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Heads heads{*reinterpret_cast<const uint4*>(memory + at[i])};
      scales[i] = heads.scales(0), later[i] = heads.scales(1);
      two[i] = bytes_of(memory + at[i], p, 0);
    }
    const unsigned zero = tile.lane >> 5;  // in a register, so that magic numbers are in some
    Sums sum = {};
#pragma unroll
    for (int four = 0; four < 2; ++four) {
#pragma unroll
      for (int run = 0; run < 2; ++run) {
        Unit a[2][2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const unsigned x = two[i].x >> 8, y = two[i].y >> 8;
          a[0][i] = {
              {two[i].x & 0x000f000f, x & 0x000f000f, two[i].y & 0x000f000f, y & 0x000f000f}};
          a[1][i] = {
              {two[i].x & 0x00f000f0, x & 0x00f000f0, two[i].y & 0x00f000f0, y & 0x00f000f0}};
        }
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          Sums c;
          float scale[2];
          begin_products(a[odd]);
          multiply_group<false>(c, a[odd], tokens.pieces(4 * four + 2 * run + odd));
          commit_products();
#pragma unroll
          for (int i = 0; i < 2; ++i) {  // the last time for nobody
            if (odd) two[i] = bytes_of(memory + at[i], p, 2 * four + run + 1);
            scale[i] = scale_of(scales[i], 2 * run + odd, zero);
          }
          await_products(c);
          add_group(sum, scale, c);
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) scales[i] = later[i];
    }
    finish(memory, at, tokens, tile, sum, total);
  }

 private:
  // As Heads::scale_of: over 16 for odd ones.
  static __device__ __forceinline__ float scale_of(unsigned four, int group, unsigned zero) {
    const unsigned magic = (group & 1 ? 0x49000000u : 0x4b000000u) | zero;
    return __uint_as_float(__byte_perm(four, magic, 0x7440 + group)) -
           (group & 1 ? 524288.0f : 8388608.0f);
  }
  static __device__ __forceinline__ uint2 bytes_of(const std::uint8_t* row, int p, int run) {
    return *reinterpret_cast<const uint2*>(row + 16 + 8 * p + 32 * run);
  }
  static __device__ __forceinline__ void finish(const std::uint8_t* memory,
                                                const int (&at)[Tile::ROWS], const View& tokens,
                                                const Tile& tile, const Sums& sum, Sums& total) {
    Unit least[2];
    float2 factor[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Heads heads{*reinterpret_cast<const uint4*>(memory + at[i])};
      least[i] = heads.minima_of(tile.unit(0));
      factor[i] = half_values(heads.v.x);
      factor[i] = {factor[i].x * 0x1p24f, factor[i].y * -64.0f};
    }
#pragma unroll
    for (int two = 0; two < PASSES / 2; ++two) {
      const Unit pairs = tokens.pairs(two);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int pass = 2 * two + n;
        const Unit b{{pairs.r[2 * n], pairs.r[2 * n + 1], 0, 0}};
        const float2 scales = tokens.scales(pass);
        float c[Tile::VALUES] = {};
        Tile::multiply(c, least, &b, 0);
#pragma unroll
        for (int e = 0; e < Tile::VALUES; ++e) {
          const float2 by = factor[Tile::row_of(e)];
          add_scaled(total[pass][e], scales, e, fmaf(by.x, sum[pass][e], by.y * c[e]));
        }
      }
    }
  }
};

template <>
struct Crowd<formats::Q6_K> {
  using F = formats::Q6_K;

  static __device__ __forceinline__ void add(const std::uint8_t* memory,
                                             const int (&at)[Tile::ROWS], const View& tokens,
                                             const Tile& tile, Sums& total) {
    const int p = tile.unit(0);
    Words rows[2];
    Block<F>::Scale scales[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      rows[i] = Words(memory, at[i]);
#pragma unroll
      for (int f = 0; f < 4; ++f)
        scales[i][f] = Block<F>::scale_of(rows[i].at(192 + 8 * (p >> 1) + 4 * (f >> 1)), p, f);
    }
    Sums sum = {};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      // A word of lower bits, and the upper ones that belong to it.
      const int turn = 4 * Order<F>::word(k, p) + 16 * (p & 1);
      const int low = turn + 64 * (p >> 1), upper = turn + 32 * (p >> 1) + 128;
      Unit a[2][2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const unsigned up = rows[i].at(upper), one = rows[i].at(low), two = rows[i].at(low + 32);
        const Block<F>::Scale* s = scales[i];
        Unit *first = &a[0][i], *second = &a[1][i];
        Block<F>::unpack(one, up << 4, s[0], s[2], first->r, first->r + 2);
        Block<F>::unpack(one >> 8, up >> 4, s[0], s[2], first->r + 1, first->r + 3);
        Block<F>::unpack(two, up << 2, s[1], s[3], second->r, second->r + 2);
        Block<F>::unpack(two >> 8, up >> 6, s[1], s[3], second->r + 1, second->r + 3);
      }
      Sums c;  // of 64 columns
      begin_products(a[0]);
      multiply_group<false>(c, a[0], tokens.pieces(2 * k));
      commit_products();
      await_products(c);
      begin_products(a[1]);
      multiply_group<true>(c, a[1], tokens.pieces(2 * k + 1));
      commit_products();
      await_products(c);
#pragma unroll
      for (int pass = 0; pass < PASSES; ++pass)
#pragma unroll
        for (int e = 0; e < Tile::VALUES; ++e) sum[pass][e] += c[pass][e];
    }
    float d[2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
      d[i] = half_value(*reinterpret_cast<const std::uint16_t*>(memory + at[i] + 208)) * 0x1p16f;
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
      const float2 by = tokens.scales(pass);
#pragma unroll
      for (int e = 0; e < Tile::VALUES; ++e)
        add_scaled(total[pass][e], by, e, d[Tile::row_of(e)] * sum[pass][e]);
    }
  }
};

template <>
struct Crowd<formats::Q8_0> {
  using F = formats::Q8_0;

  static __device__ __forceinline__ void add(const std::uint8_t* memory,
                                             const int (&at)[Tile::ROWS], const View& tokens,
                                             const Tile& tile, Sums& total) {
    EndWords words[2][2];  // of even and odd groups: they differ by 34 bytes, pairs of them by 68
#pragma unroll
    for (int n = 0; n < 4; ++n)
      words[n & 1][n >> 1] = EndWords(memory, at[n >> 1] + 34 * (n & 1) + 2 + 8 * tile.unit(0));
    Sums sum = {};
#pragma unroll 1
    for (int pair = 0; pair < 4; ++pair) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        Unit a[2];
        float d[2];
        Sums c;
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          const int i = m / 2, n = m % 2;
          const unsigned w = words[odd][i].at(68 * pair + 4 * n) ^ 0x80808080;
          a[i].r[2 * n] = half_add(__byte_perm(w, 0x64646464, 0x4140), SHIFT_OF_PAIRS);
          a[i].r[2 * n + 1] = half_add(__byte_perm(w, 0x64646464, 0x4342), SHIFT_OF_PAIRS);
        }
        begin_products(a);
        multiply_group<false>(c, a, tokens.pieces(2 * pair + odd));
        commit_products();
#pragma unroll
        for (int i = 0; i < 2; ++i)
          d[i] = half_value(
              *reinterpret_cast<const std::uint16_t*>(memory + at[i] + 68 * pair + 34 * odd));
        await_products(c);
        add_group(sum, d, c);
      }
    }
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
      const float2 by = tokens.scales(pass);
#pragma unroll
      for (int e = 0; e < Tile::VALUES; ++e)
        add_scaled(total[pass][e], by, e, sum[pass][e]);
    }
  }
};

// Tokens of a chunk: CrowdOrder, but those of formats that go through their Codec.
template <class F>
struct CrowdTokens {
  static constexpr bool IS_BLOCK = Order<F>::IS_BLOCK;
  using Staged = typename Either<IS_BLOCK, BlockTokens<F, CrowdOrder>,
                                 typename ChunkMemory<F>::Staged>::type;
};

// Adds the products of a tile's chunk, as multiply_any makes them. All four warps of a group come
// here together with the same tokens.
template <class F>
__device__ __forceinline__ void add_chunk(std::uint8_t* memory, int here, std::uint8_t* behind,
                                          const typename CrowdTokens<F>::Staged& tokens,
                                          Descriptor pieces, const Tile& tile, Sums& total) {
  if constexpr (Order<F>::IS_BLOCK) {
    int at[Tile::ROWS];
#pragma unroll
    for (int i = 0; i < Tile::ROWS; ++i) at[i] = here + Dense<F>::ROW * tile.row(i);
    Crowd<F>::add(memory, at, View{tokens.memory, pieces, tile.lane}, tile, total);
  } else {
    Sums part;
    multiply_chunk<F>(memory + here, behind, nullptr, Dense<F>(), tokens, tile, part);
#pragma unroll
    for (int i = 0; i < PASSES * Tile::VALUES; ++i)
      total[i / Tile::VALUES][i % Tile::VALUES] += part[i / Tile::VALUES][i % Tile::VALUES];
  }
}

}  // namespace voltapile
#endif
