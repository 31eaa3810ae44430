// What a strand of attention_decode does with STEP positions: scores, powers, sums of values.
#pragma once
#include "attention_join.cuh"

namespace voltapile {

// Row tiles that no row is in are skipped where that is cheap. (On sm_80 and later branches keep
// the compiler from loading ahead; before, that is welcome: it would spill.)
__device__ __forceinline__ bool is_skipped(int t, int tiles) {
  return VP_ARCH < 800 && t >= tiles;
}

// Half of a tile's rows that none is in.
__device__ __forceinline__ bool is_empty(int t, int i, int used) {
  return VP_ARCH >= 900 && ROW_TILES == 1 && 16 * t + Mma::row_of(0, i) >= used;
}

// s[t] = 16 queries times STEP keys, in two sums where nothing truncates: half the latency.
__device__ __forceinline__ void score(Square (&s)[ROW_TILES], const half_bits* q,
                                      const KvTile& keys, int tiles, int lane) {
  constexpr int CHAINS = TRUNCATES ? (DIM + CHAIN - 1) / CHAIN : 2;
  Square part[CHAINS][ROW_TILES];
#pragma unroll
  for (int n = 0; n < CHAINS; ++n)
#pragma unroll
    for (int t = 0; t < ROW_TILES; ++t) part[n][t].clear();
#pragma unroll
  for (int k = 0; k < DIM; k += KvTile::WIDTH) {
    Mma::B b[KvTile::WIDTH / 16];
    keys.keys(b, k, lane);
#pragma unroll
    for (int j = 0; j < KvTile::WIDTH / 16; ++j) {
      const int n = TRUNCATES ? k / CHAIN : (k / 16 + j) % 2;
#pragma unroll
      for (int t = 0; t < ROW_TILES; ++t)
        if (!is_skipped(t, tiles))
          Mma::product(part[n][t], Mma::load_a(q + 16 * t * PITCH + k + 16 * j, PITCH, lane), b[j]);
    }
  }
#pragma unroll
  for (int t = 0; t < ROW_TILES; ++t)
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      s[t].e[e] = part[0][t].e[e];
#pragma unroll
      for (int n = 1; n < CHAINS; ++n) s[t].e[e] += part[n][t].e[e];
    }
}

// Scores of STEP positions from p on become probabilities, and the sums of values so far, if
// there are any, are multiplied by `alpha`; where tensor cores truncate, the caller does that.
__device__ __forceinline__ void soften(Square (&s)[ROW_TILES], Sums& sums,
                                       float (&alpha)[ROW_TILES][2], const Row* rows, int p,
                                       float cap, int used, int lane) {
  bool moves = false;
#pragma unroll
  for (int t = 0; t < ROW_TILES; ++t)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      alpha[t][i] = 1.0f;
      if (is_skipped(t, (used + 15) / 16) || is_empty(t, i, used)) continue;
      const Row row = rows[16 * t + Mma::row(lane, i)];
      finish_scores(s[t], i, p, row.low, row.high, row.factor, KIND == ANY ? cap : 0.0f, lane);
      const bool has_sums = sums.running[t][i].m != -infinity();
      const float shift = sums.running[t][i].take(row_max(largest(s[t], i)), alpha[t][i]);
      sums.sum[t][i] = __fmaf_rn(sums.sum[t][i], alpha[t][i], exponentials(s[t], i, shift));
      moves |= has_sums && alpha[t][i] != 1.0f;
    }
  if (TRUNCATES || __ballot_sync(WHOLE_WARP, moves) == 0) return;
#pragma unroll
  for (int t = 0; t < ROW_TILES; ++t)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (is_empty(t, i, used)) continue;
#pragma unroll
      for (int c = 0; c < DIM / 16; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& x = sums.out[t][c].e[(e & 1) + 2 * i + 4 * (e >> 1)];
          x = __fmul_rn(x, alpha[t][i]);
        }
    }
}

__device__ __forceinline__ void add_values(Sums& sums, const Square (&s)[ROW_TILES],
                                           const KvTile& values,
                                           const float (&alpha)[ROW_TILES][2], int tiles,
                                           int lane) {
  Mma::A p[ROW_TILES];
#pragma unroll
  for (int t = 0; t < ROW_TILES; ++t) p[t] = Mma::from_square(s[t], lane);
#pragma unroll
  for (int c = 0; c < DIM / 16; c += KvTile::WIDTH / 16) {
    Mma::B b[KvTile::WIDTH / 16];
    values.values(b, 16 * c, lane);
#pragma unroll
    for (int j = 0; j < KvTile::WIDTH / 16; ++j)
#pragma unroll
      for (int t = 0; t < ROW_TILES; ++t) {
        if (is_skipped(t, tiles)) continue;
        Square& out = sums.out[t][c + j];
        if (!TRUNCATES) {
          Mma::product_by_rows(out, p[t], b[j]);
          continue;
        }
        Square fresh;
        fresh.clear();
        Mma::product_by_rows(fresh, p[t], b[j]);
#pragma unroll
        for (int e = 0; e < 8; ++e)
          out.e[e] = __fmaf_rn(out.e[e], alpha[t][e >> 1 & 1], fresh.e[e]);
      }
  }
}

__device__ __forceinline__ void clear(Sums& sums) {
#pragma unroll
  for (int t = 0; t < ROW_TILES; ++t) {
#pragma unroll
    for (int c = 0; c < DIM / 16; ++c) sums.out[t][c].clear();
#pragma unroll
    for (int i = 0; i < 2; ++i) sums.running[t][i] = Running(), sums.sum[t][i] = 0.0f;
  }
}

}  // namespace voltapile
