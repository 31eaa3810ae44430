// One chunk of columns of 16 rows times the tokens of a block, by one warp.
//
// For formats that matmul_block.cuh takes as they are, its work; for the others the general way
// through their Codec.
#pragma once
#include "either.cuh"
#include "matmul_block.cuh"

namespace voltapile {

constexpr int MUCH = 3072;  // bytes in flight that need no third stage

template <class A, class B>
struct Equal {
  static constexpr bool value = false;
};
template <class A>
struct Equal<A, A> {
  static constexpr bool value = true;
};

// Whether blocks go from global memory to registers (matmul_direct.cuh).
template <class F>
constexpr bool IS_DIRECT = !IS_ASYNC && Equal<F, formats::Q4_K>::value;

// What a warp keeps in shared memory: raw chunks, floats of an expanded one, scales, tokens. The
// launcher computes the same sizes.
template <class F>
struct ChunkMemory {
  using C = Codec<F>;
  using Raw = Stage<C::BYTES, C::ALIGN>;
  using Values = Codec<typename Either<C::EXPAND, Expanded, F>::type>;  // that are unpacked
  static constexpr int STAGES = !IS_ASYNC ? 1 : Raw::SIZE > MUCH ? 2 : 3;
  using Staged = typename Either<Order<F>::IS_BLOCK, BlockTokens<F>, Tokens<Values>>::type;
  static constexpr bool HAS_SCALES = !C::NATURAL && !Order<F>::IS_BLOCK;
  static constexpr int EXPANDED_STRIDE = 1040, EXPANDED = C::EXPAND ? 16 * EXPANDED_STRIDE : 0;
  static constexpr int SCALES = HAS_SCALES ? C::GROUPS * C::SCALES * 16 * 8 : 0;
  static constexpr int SUMS = 1024;  // of two tiles and eight tokens, in the end
  static constexpr int FIXED = IS_DIRECT<F> ? SUMS : STAGES * Raw::SIZE + EXPANDED + SCALES;
  static __device__ constexpr int bytes(int room) {
    return (FIXED + room * Staged::PER_TOKEN + 127) / 128 * 128;
  }
};

// Products of one group with the tokens of one pass, added to sum. units, sums: of the group.
template <class C>
__device__ __forceinline__ void multiply_group(
    const Unit (&a)[C::PLANES][Tile::ROWS * Tile::UNITS], const float2 (&scale)[C::SCALES][2],
    const Tokens<C>& tokens, const Unit* units, const float* sums, int pass, const Tile& tile,
    float (&sum)[Tile::VALUES]) {
  const int column = tokens.some(8 * pass + tile.token());
  Unit b[C::X_PLANES][Tile::UNITS];
#pragma unroll
  for (int plane = 0; plane < C::X_PLANES; ++plane)
#pragma unroll
    for (int i = 0; i < Tile::UNITS; ++i)
      b[plane][i] = unit_at(units + plane * tokens.plane_stride() + 4 * column + tile.unit(i));
  float c[C::SCALES][Tile::VALUES] = {}, rest[Tile::VALUES] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    Tile::multiply(c[half % C::SCALES], a[0], b[0], half);
    if constexpr (C::X_PLANES > 1) Tile::multiply(rest, a[0], b[C::X_PLANES - 1], half);
    if constexpr (C::PLANES > 1) Tile::multiply(rest, a[C::PLANES - 1], b[0], half);
  }
#pragma unroll
  for (int e = 0; e < Tile::VALUES; ++e) {
#pragma unroll
    for (int s = 0; s < C::SCALES; ++s)
      sum[e] = fmaf(scale[s][Tile::row_of(e)].x, c[s][e], sum[e]);
    if constexpr (C::PLANES > 1 || C::X_PLANES > 1) sum[e] = fmaf(rest[e], 0x1p-11f, sum[e]);
  }
  if constexpr (C::OFFSET) {
#pragma unroll
    for (int s = 0; s < C::SCALES; ++s)
#pragma unroll
      for (int i = 0; i < Tile::TOKENS; ++i) {
        const float all = sums[s * tokens.room + tokens.some(8 * pass + tile.sum_token(i))];
#pragma unroll
        for (int e = 0; e < Tile::VALUES; ++e)
          if (Tile::token_of(e) == i) sum[e] = fmaf(scale[s][Tile::row_of(e)].y, all, sum[e]);
      }
  }
}

// raw: the chunk of 16 rows in shared memory, where `stage` put what begins at `first`. behind: the
// shared memory that follows the raw chunks.
template <class F, class Raw>
__device__ __forceinline__ void multiply_chunk(
    const std::uint8_t* raw, std::uint8_t* behind, const std::uint8_t* first, const Raw& stage,
    const Tokens<typename ChunkMemory<F>::Values>& tokens, const Tile& tile,
    float (&part)[PASSES][Tile::VALUES]) {
  using M = ChunkMemory<F>;
  using C = typename M::Values;
  float2* scales = reinterpret_cast<float2*>(behind + M::EXPANDED);
  const std::uint8_t* rows[Tile::ROWS];
#pragma unroll
  for (int i = 0; i < Tile::ROWS; ++i)
    rows[i] = raw + stage.row_start(first, tile.row(i));
#if VP_ARCH >= 800
  if constexpr (Codec<F>::EXACT_BITS > 0)
    if (tokens.is_alone())
      return Alone<F>::multiply(rows, reinterpret_cast<const std::uint8_t*>(tokens.units),
                                tokens.sums, tokens.scale(0), tile, part);
#endif
  const int own = tile.lane & 15;
  const std::uint8_t* own_row = raw + stage.row_start(first, own);
  if constexpr (Codec<F>::EXPAND) {
    float* floats = reinterpret_cast<float*>(behind + own * M::EXPANDED_STRIDE);
    if (tile.lane < 16) F::unpack(own_row, floats);
    for (int i = 0; i < Tile::ROWS; ++i) rows[i] = behind + tile.row(i) * M::EXPANDED_STRIDE;
    __syncwarp();
  }
  if constexpr (M::HAS_SCALES) {
#pragma unroll
    for (int run = tile.lane >> 4; run < C::GROUPS * C::SCALES; run += 2)
      scales[16 * run + own] = C::scale(own_row, run);
    __syncwarp();
  }
  const Unit* units = tokens.units;
  const float* sums = tokens.sums;
  float sum[PASSES][Tile::VALUES] = {};
#pragma unroll (C::SPAN > 1 ? 1 : 2)
  for (int span = 0; span < C::GROUPS / C::SPAN; ++span) {
    Unit a[C::SPAN][C::PLANES][Tile::ROWS * Tile::UNITS];
#pragma unroll
    for (int i = 0; i < Tile::ROWS * Tile::UNITS; ++i) {
      Unit found[C::SPAN * C::PLANES];
      C::unpack(rows[i / Tile::UNITS], span, tile.unit(i % Tile::UNITS), found);
#pragma unroll
      for (int g = 0; g < C::SPAN * C::PLANES; ++g) a[g / C::PLANES][g % C::PLANES][i] = found[g];
    }
#pragma unroll
    for (int g = 0; g < C::SPAN; ++g) {
      const int group = span * C::SPAN + g;
      float2 scale[C::SCALES][2];
#pragma unroll
      for (int s = 0; s < 2 * C::SCALES; ++s) {
        const int at = (group * C::SCALES + s / 2) * 16 + tile.sum_row(s % 2);
        scale[s / 2][s % 2] = M::HAS_SCALES ? scales[at] : float2{1.0f, 0.0f};
        if (!tile.owns_sums()) scale[s / 2][s % 2].y = 0.0f;
      }
#pragma unroll
      for (int pass = 0; pass < PASSES; ++pass)
        if (pass == 0 || 8 * pass < tokens.room)
          multiply_group<C>(a[g], scale, tokens, units, sums, pass, tile, sum[pass]);
      units += tokens.group_stride();
      sums += C::SCALES * tokens.room;
    }
  }
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass)
#pragma unroll
    for (int e = 0; e < Tile::VALUES; ++e)
      part[pass][e] = tokens.scale(8 * pass + tile.sum_token(Tile::token_of(e))) * sum[pass][e];
}

// The same, if the format is taken as it lies. here: the chunk, from `memory` on.
template <class F, class Raw>
__device__ __forceinline__ void multiply_any(
    std::uint8_t* memory, int here, std::uint8_t* behind, const std::uint8_t* first,
    const Raw& stage, const typename ChunkMemory<F>::Staged& tokens, const Tile& tile,
    float (&part)[PASSES][Tile::VALUES]) {
  if constexpr (Order<F>::IS_BLOCK) {
    // Rows eight apart begin alike within 16 bytes, since a row has an even number of them.
    const int apart = stage.row_start(nullptr, 8) & ~15;
    int at[Tile::ROWS];
    at[0] = here + stage.row_start(first, tile.row(0));
#pragma unroll
    for (int i = 1; i < Tile::ROWS; ++i) at[i] = at[0] + apart;
    Block<F>::multiply(memory, at, tokens, tile, part);
  } else {
    multiply_chunk<F>(memory + here, behind, first, stage, tokens, tile, part);
  }
}

}  // namespace voltapile
