// How what several warps, and then several blocks, found about the same rows becomes one result, in
// an order that follows from their numbers alone.
#pragma once
#include "attention_strand.cuh"

namespace voltapile {

constexpr int STRANDS = 4, THREADS = 32 * STRANDS, ROWS = 16 * ROW_TILES;
constexpr int HALF = 8;          // rows that are joined at once: those of one i (Mma::row)
constexpr int MOST_PIECES = 257; // attention.most_pieces, and one more behind a window

struct __align__(16) Row {
  float factor;   // of scores
  int low, high;  // sees positions low <= p < high
  int slot;       // of `partial`, or of the output where there is one piece; -1: none
};

// Of a strand's rows so far: largest score, sums of exponentials (a lane's part) and of values.
struct Sums {
  Square out[ROW_TILES][DIM / 16];
  Running running[ROW_TILES][2];
  float sum[ROW_TILES][2] = {};
};

struct Ends {
  float most[STRANDS][HALF], sum[STRANDS][HALF];
  float out[STRANDS][HALF][DIM + 8];
};

// Adds one row's four columns from d on of all strands. Returns what they are to be divided by.
__device__ __forceinline__ float add_strands(const Ends& ends, int r, int d, float4& all,
                                             float& most) {
  most = ends.most[0][r];
#pragma unroll
  for (int s = 1; s < STRANDS; ++s) most = fmaxf(most, ends.most[s][r]);
  const float shift = most == -infinity() ? 0.0f : most;
  float total = 0.0f;
  all = float4{0, 0, 0, 0};
#pragma unroll
  for (int s = 0; s < STRANDS; ++s) {
    const float weight = exp2_fast(ends.most[s][r] - shift);
    const float4 v = *reinterpret_cast<const float4*>(ends.out[s][r] + d);
    total = __fmaf_rn(weight, ends.sum[s][r], total);
    all.x = __fmaf_rn(weight, v.x, all.x), all.y = __fmaf_rn(weight, v.y, all.y);
    all.z = __fmaf_rn(weight, v.z, all.z), all.w = __fmaf_rn(weight, v.w, all.w);
  }
  return total;
}

__device__ __forceinline__ float4 divided(const float4& x, float by) {
  return float4{x.x / by, x.y / by, x.z / by, x.w / by};
}

// The strands of a block become its piece: to `partial` and `stats`, or, if it is the only one,
// normalised to `attended`.
__device__ __forceinline__ void write_piece(Ends& ends, const Row* rows, const Sums& sums,
                                            int used, bool is_only, float* attended,
                                            float* partial, float2* stats, int dim, int warp,
                                            int lane) {
#pragma unroll
  for (int t = 0; t < ROW_TILES; ++t)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (16 * t + Mma::row_of(0, i) >= used) continue;
      const int own = Mma::number(lane);
      const float all = row_sum(sums.sum[t][i]);
      __syncthreads();  // who read what was here before is done
      if (16 * t + Mma::row(lane, i) < used) {
        if (Mma::pair(lane) == 0)
          ends.most[warp][own] = sums.running[t][i].m, ends.sum[warp][own] = all;
#pragma unroll
        for (int c = 0; c < DIM / 16; ++c)
          KvTile::write(ends.out[warp][own] + 16 * c, sums.out[t][c], i, lane);
      }
      __syncthreads();
      for (int at = threadIdx.x; at < HALF * DIM / 4; at += THREADS) {
        const int r = at / (DIM / 4), d = at % (DIM / 4) * 4, row = 16 * t + Mma::row_of(r, i);
        if (row >= used || rows[row].slot < 0 || d >= dim) continue;
        float4 sum;
        float most;
        const float total = add_strands(ends, r, d, sum, most);
        const long long slot = rows[row].slot;
        if (!is_only && d == 0) stats[slot] = float2{most, total};
        *reinterpret_cast<float4*>((is_only ? attended : partial) + slot * dim + d) =
            is_only ? divided(sum, total) : sum;
      }
    }
}

// Whether this block is the last of `count` to come; the ticket is 0 again then.
__device__ __forceinline__ bool is_last(int& answer, unsigned* ticket, int count) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();  // what all threads wrote comes before
    answer = atomicInc(ticket, count - 1) == count - 1u;
    __threadfence();
  }
  __syncthreads();
  return answer;
}

// What a row's pieces weigh, to shared memory, and the sum of exponentials behind them. A warp
// calls.
__device__ __forceinline__ void weigh_pieces(float* weights, const float2* stats, int pieces,
                                             int lane) {
  constexpr int EACH = (MOST_PIECES + 31) / 32;
  float2 stat[EACH];
  float most = -infinity(), total = 0.0f;
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int at = 32 * i + lane;
    stat[i] = at < pieces ? __ldcg(stats + at) : float2{-infinity(), 0.0f};
    most = fmaxf(most, stat[i].x);
  }
  for (int step = 16; step > 0; step >>= 1)
    most = fmaxf(most, __shfl_xor_sync(WHOLE_WARP, most, step));
  const float shift = most == -infinity() ? 0.0f : most;
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const float weight = exp2_fast(stat[i].x - shift);
    if (32 * i + lane < pieces) weights[32 * i + lane] = weight;
    total = __fmaf_rn(weight, stat[i].y, total);
  }
  for (int step = 16; step > 0; step >>= 1) total += __shfl_xor_sync(WHOLE_WARP, total, step);
  if (lane == 0) weights[MOST_PIECES] = total;
}

// Of one row, four columns of all pieces, weighed. Others wrote them: read past the first cache.
__device__ __forceinline__ float4 add_pieces(const float* weights, const float* partial,
                                             int pieces, int dim) {
  float4 sum{0, 0, 0, 0};
#pragma unroll 16
  for (int i = 0; i < pieces; ++i) {
    const float weight = weights[i];
    const float4 v = __ldcg(reinterpret_cast<const float4*>(partial + i * dim));
    sum.x = __fmaf_rn(weight, v.x, sum.x), sum.y = __fmaf_rn(weight, v.y, sum.y);
    sum.z = __fmaf_rn(weight, v.z, sum.z), sum.w = __fmaf_rn(weight, v.w, sum.w);
  }
  return sum;
}

}  // namespace voltapile
