// How what several warps, and then several pieces, found about the same rows becomes one result, in
// an order that follows from their numbers alone: a strand's shares 0 to 3 in turn, its shares 4 to
// 7 in turn, both, the strands, and the pieces in turn. (attention_blocks.cuh: across blocks.)
#pragma once
#include "attention_copied.cuh"

namespace voltapile {

constexpr int STRANDS = 4, THREADS = 32 * STRANDS, ROWS = 16 * ROW_TILES;
constexpr int HALF = 8;  // rows that are joined at once: those of one i (Mma::row)

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

// Of a row, DIM columns, and behind them the largest score and the sum of exponentials.
struct Ends {
  float rows[STRANDS][HALF][DIM + 8];
};

// Four columns of a row.
struct Part {
  float most = -infinity(), sum = 0.0f;
  float4 out{0, 0, 0, 0};
};

// What sums so far (largest score `most`) and later ones are multiplied by when they are joined.
struct Weights {
  float before, next;
  __device__ Weights(float& most, float next_most) {
    const float larger = fmaxf(most, next_most), shift = larger == -infinity() ? 0.0f : larger;
    before = exp2_fast(most - shift), next = exp2_fast(next_most - shift);
    most = larger;
  }
  __device__ float join(float x, float y) const { return __fmaf_rn(y, next, __fmul_rn(x, before)); }
};

__device__ __forceinline__ void join_part(Part& all, const Part& next) {
  const Weights weights(all.most, next.most);
  all.sum = weights.join(all.sum, next.sum);
  all.out = {weights.join(all.out.x, next.out.x), weights.join(all.out.y, next.out.y),
             weights.join(all.out.z, next.out.z), weights.join(all.out.w, next.out.w)};
}

// A share's sums join those of the shares before it: in registers where one block takes them all.
__device__ __forceinline__ void join_share(Sums& all, const Sums& share) {
#pragma unroll
  for (int t = 0; t < ROW_TILES; ++t)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Weights weights(all.running[t][i].m, share.running[t][i].m);
      all.sum[t][i] = weights.join(all.sum[t][i], row_sum(share.sum[t][i]));
#pragma unroll
      for (int c = 0; c < DIM / 16; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& x = all.out[t][c].e[(e & 1) + 2 * i + 4 * (e >> 1)];
          x = weights.join(x, share.out[t][c].e[(e & 1) + 2 * i + 4 * (e >> 1)]);
        }
    }
}

// Where a strand of a block that has all shares keeps what the first half of them gave.
template <bool HAS_ALL>
struct KeptSums {
  static constexpr int EACH = 2 + DIM / 4;  // of a row, a lane's
  float at[2 * ROW_TILES][EACH][32];

  __device__ __forceinline__ void keep(const Sums& sums, int lane) {
#pragma unroll
    for (int m = 0; m < 2 * ROW_TILES; ++m) {
      at[m][0][lane] = sums.running[m / 2][m % 2].m, at[m][1][lane] = sums.sum[m / 2][m % 2];
#pragma unroll
      for (int n = 0; n < DIM / 4; ++n)
        at[m][2 + n][lane] = sums.out[m / 2][n / 4].e[element(m, n)];
    }
  }
  // Those before `sums`, which become all.
  __device__ __forceinline__ void join(Sums& sums, int lane) const {
#pragma unroll
    for (int m = 0; m < 2 * ROW_TILES; ++m) {
      float most = at[m][0][lane];
      const Weights weights(most, sums.running[m / 2][m % 2].m);
      sums.running[m / 2][m % 2].m = most;
      float& sum = sums.sum[m / 2][m % 2];
      sum = weights.join(at[m][1][lane], sum);
#pragma unroll
      for (int n = 0; n < DIM / 4; ++n) {
        float& x = sums.out[m / 2][n / 4].e[element(m, n)];
        x = weights.join(at[m][2 + n][lane], x);
      }
    }
  }

 private:
  // Of a row's four in a Square.
  static __device__ constexpr int element(int m, int n) {
    return (n & 1) + 2 * (m % 2) + 4 * (n >> 1 & 1);
  }
};
template <>
struct KeptSums<false> {
  __device__ void keep(const Sums&, int) {}
  __device__ void join(Sums&, int) const {}
};

// Of `count` parts (at least one), one after another; load(i): the i-th. Some are on their way at
// once; in the last round those that are not there have no weight, so that loads wait for nothing.
template <class Load>
__device__ __forceinline__ Part join_in_turn(int count, Load load) {
  constexpr int AT_ONCE = 10;
  Part all;
  int first = 0;
#pragma unroll 1
  do {
    Part parts[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) parts[i] = load(min(first + i, count - 1));
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      if (first + i >= count) parts[i].most = -infinity();
      join_part(all, parts[i]);
    }
    first += AT_ONCE;
  } while (first < count);
  return all;
}

__device__ __forceinline__ Part part_of(const float* row, int d) {
  const float2 stats = *reinterpret_cast<const float2*>(row + DIM);
  return {stats.x, stats.y, *reinterpret_cast<const float4*>(row + static_cast<unsigned>(d))};
}

// All strands together; part(s): of strand s, in shared memory.
template <class Get>
__device__ __forceinline__ Part join_strands(Get part) {
  Part all;
#pragma unroll
  for (int s = 0; s < STRANDS; ++s) all.most = fmaxf(all.most, part(s).most);
  const float shift = all.most == -infinity() ? 0.0f : all.most;
#pragma unroll
  for (int s = 0; s < STRANDS; ++s) {
    const Part own = part(s);
    const float weight = exp2_fast(own.most - shift);
    all.sum = __fmaf_rn(weight, own.sum, all.sum);
    all.out = {__fmaf_rn(weight, own.out.x, all.out.x), __fmaf_rn(weight, own.out.y, all.out.y),
               __fmaf_rn(weight, own.out.z, all.out.z), __fmaf_rn(weight, own.out.w, all.out.w)};
  }
  return all;
}

struct Target {
  float *attended, *partial;  // the latter and `stats` where a row has several pieces
  float2* stats;
  bool is_only;
  int dim;
  Weighing weighing;
};

// Four columns of a row's result; query: token * H + head.
__device__ __forceinline__ void write_result(const Target& to, const Part& part, int query,
                                             int d) {
  const float factor = reciprocal(part.sum);
  float4 out{part.out.x * factor, part.out.y * factor, part.out.z * factor, part.out.w * factor};
  if (to.weighing.weights != nullptr && !weigh(to.weighing, query, d == 0, part.most, part.sum))
    out = float4{0, 0, 0, 0};
  const unsigned row = query;
  *reinterpret_cast<float4*>(to.attended + row * width_of(to.dim) + d) = out;
}

// slot: of `partial`, or a query
__device__ __forceinline__ void write_part(const Target& to, const Part& part, int slot, int d) {
  if (to.is_only) {
    write_result(to, part, slot, d);
    return;
  }
  if (d == 0) to.stats[slot] = float2{part.most, part.sum};
  *reinterpret_cast<float4*>(to.partial + slot * width_of(to.dim) + d) = part.out;
}

// Of HALF rows, all columns: where a piece is one block's. A call, for its code runs for each HALF.
__device__ __noinline__ void write_rows(const Ends& ends, const Row* rows, int first, int i,
                                        int used, Target to) {
#pragma unroll 1
  for (int at = threadIdx.x; at < HALF * DIM / 4; at += THREADS) {
    const int r = at / (DIM / 4), d = at % (DIM / 4) * 4, row = first + Mma::row_of(r, i);
    if (row >= used || rows[row].slot < 0 || d >= width_of(to.dim)) continue;
    const Part all = join_strands([&](int s) { return part_of(ends.rows[s][r], d); });
    write_part(to, all, rows[row].slot, d);
  }
}

// atomicInc() behind all that this block wrote, and before all that it will read: one fence, where
// two of the strictest kind cost as much as the rest.
__device__ __forceinline__ unsigned take_ticket(unsigned* ticket, unsigned most) {
#ifdef VP_EMULATION
  return atomicInc(ticket, most);
#else
  unsigned old;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(ticket), "r"(most)
               : "memory");
  return old;
#endif
}

// Of one row, four columns of all its pieces. Others wrote them: read past the first cache.
__device__ __forceinline__ Part join_pieces(const float* partial, const float2* stats, int pieces,
                                            int dim) {
  return join_in_turn(pieces, [&](int i) {
    const float2 stat = __ldcg(stats + i);
    return Part{stat.x, stat.y, __ldcg(reinterpret_cast<const float4*>(partial + i * dim))};
  });
}

}  // namespace voltapile
