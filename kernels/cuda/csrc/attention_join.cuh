// How what several warps, and then several blocks, found about the same rows becomes one result, in
// an order that follows from their numbers alone.
#pragma once
#include "attention_strand.cuh"

namespace voltapile {

constexpr int STRANDS = 4, THREADS = 32 * STRANDS, ROWS = 16 * ROW_TILES;
constexpr int HALF = 8;  // rows that are joined at once: those of one i (Mma::row)
constexpr int EACH = HALF * DIM / 4 / BLOCKS;  // of those, items of a block: four columns of a row

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

#if VP_ARCH >= 900 && !defined(VP_EMULATION)
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {  // for all blocks of the cluster that go on
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}
template <class T>
__device__ __forceinline__ const T* of_block(const T* mine, int block) {
  const T* its;
  asm("mapa.u64 %0, %1, %2;" : "=l"(its) : "l"(mine), "r"(block));
  return its;
}
#else
__device__ __forceinline__ void cluster_arrive() {}
__device__ __forceinline__ void cluster_wait() {}
template <class T>
__device__ __forceinline__ const T* of_block(const T* mine, int) {
  return mine;
}
#endif

__device__ __forceinline__ Part part_of(const Ends* ends, int strand, int r, int d) {
  return {ends->most[strand][r], ends->sum[strand][r],
          *reinterpret_cast<const float4*>(ends->out[strand][r] + d)};
}

// Of one strand, in all `blocks` of a piece: each has a share.
__device__ __forceinline__ Part join_blocks(const Ends& ends, int blocks, int strand, int r,
                                            int d) {
  Part parts[BLOCKS], all;
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b)
    if (b < blocks) parts[b] = part_of(of_block(&ends, b), strand, r, d);
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b) join_part(all, parts[b]);
  return all;
}

// All strands together.
__device__ __forceinline__ Part join_strands(const Part (&parts)[STRANDS]) {
  Part all;
#pragma unroll
  for (int s = 0; s < STRANDS; ++s) all.most = fmaxf(all.most, parts[s].most);
  const float shift = all.most == -infinity() ? 0.0f : all.most;
#pragma unroll
  for (int s = 0; s < STRANDS; ++s) {
    const float weight = exp2_fast(parts[s].most - shift);
    const float4& v = parts[s].out;
    all.sum = __fmaf_rn(weight, parts[s].sum, all.sum);
    all.out = {__fmaf_rn(weight, v.x, all.out.x), __fmaf_rn(weight, v.y, all.out.y),
               __fmaf_rn(weight, v.z, all.out.z), __fmaf_rn(weight, v.w, all.out.w)};
  }
  return all;
}

__device__ __forceinline__ float4 divided(const float4& x, float by) {
  const float factor = 1.0f / by;
  return float4{x.x * factor, x.y * factor, x.z * factor, x.w * factor};
}

struct Target {
  float *attended, *partial;  // the latter and `stats` where a row has several pieces
  float2* stats;
  bool is_only;
  int dim;
  Weighing weighing;
};

// Four columns of a row's result; query: token * H + head.
__device__ __forceinline__ void write_result(const Target& to, const Part& part, long long query,
                                             int d) {
  float4 out = divided(part.out, part.sum);
  if (to.weighing.weights != nullptr) {
    if (!to.weighing.sees(query)) out = float4{0, 0, 0, 0};
    if (d == 0) to.weighing.write(query, part.most, part.sum);
  }
  *reinterpret_cast<float4*>(to.attended + query * to.dim + d) = out;
}

__device__ __forceinline__ void write_part(const Target& to, const Part& part, long long slot,
                                           int d) {
  if (to.is_only) {
    write_result(to, part, slot, d);
    return;
  }
  if (d == 0) to.stats[slot] = float2{part.most, part.sum};
  *reinterpret_cast<float4*>(to.partial + slot * to.dim + d) = part.out;
}

// Of HALF rows, all columns: where a piece is one block's.
__device__ __forceinline__ void write_rows(const Ends& ends, const Row* rows, int first, int i,
                                           int used, const Target& to) {
  for (int at = threadIdx.x; at < HALF * DIM / 4; at += THREADS) {
    const int r = at / (DIM / 4), d = at % (DIM / 4) * 4, row = first + Mma::row_of(r, i);
    if (row >= used || rows[row].slot < 0 || d >= to.dim) continue;
    Part parts[STRANDS];
#pragma unroll
    for (int s = 0; s < STRANDS; ++s) parts[s] = part_of(&ends, s, r, d);
    write_part(to, join_strands(parts), rows[row].slot, d);
  }
}

using Joined = Part[BLOCKS > 1 ? STRANDS : 1][BLOCKS > 1 ? EACH : 1];

// The same where several blocks have a piece: they deal the rows out. A warp reads one strand of
// all blocks. A call, since its registers would be taken from those of the products.
__device__ __noinline__ void write_dealt_rows(const Ends& ends, Joined& joined, const Row* rows,
                                              int first, int i, int used, int blocks, int rank,
                                              Target to) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  for (int base = rank; base < BLOCKS; base += blocks) {
    for (int n = lane; n < EACH; n += 32) {
      const int at = base * EACH + n, r = at / (DIM / 4);
      if (first + Mma::row_of(r, i) < used)
        joined[warp][n] = join_blocks(ends, blocks, warp, r, at % (DIM / 4) * 4);
    }
    if (base + blocks >= BLOCKS) cluster_arrive();  // nothing more is read
    __syncthreads();
    for (int n = threadIdx.x; n < EACH; n += THREADS) {
      const int at = base * EACH + n, d = at % (DIM / 4) * 4;
      const int row = first + Mma::row_of(at / (DIM / 4), i);
      if (row >= used || rows[row].slot < 0 || d >= to.dim) continue;
      Part parts[STRANDS];
#pragma unroll
      for (int s = 0; s < STRANDS; ++s) parts[s] = joined[s][n];
      write_part(to, join_strands(parts), rows[row].slot, d);
    }
    __syncthreads();
  }
  cluster_wait();  // for those who read here
}

// The strands of all blocks of a piece become its result. blocks: how many there are, of which this
// is number `rank`.
__device__ __forceinline__ void write_piece(Ends& ends, Joined& joined, const Row* rows,
                                            const Sums& sums, int used, int blocks, int rank,
                                            const Target& to, int warp, int lane) {
#pragma unroll
  for (int t = 0; t < ROW_TILES; ++t)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (16 * t + Mma::row_of(0, i) >= used) continue;
      const int own = Mma::number(lane);
      const float sum = TURNS > 1 ? sums.sum[t][i] : row_sum(sums.sum[t][i]);
      __syncthreads();  // tiles are done with
      if (16 * t + Mma::row(lane, i) < used) {
        if (Mma::pair(lane) == 0)
          ends.most[warp][own] = sums.running[t][i].m, ends.sum[warp][own] = sum;
#pragma unroll
        for (int c = 0; c < DIM / 16; ++c)
          KvTile::write(ends.out[warp][own] + 16 * c, sums.out[t][c], i, lane);
      }
      if (BLOCKS == 1) {
        __syncthreads();
        write_rows(ends, rows, 16 * t, i, used, to);
      } else {
        cluster_arrive(), cluster_wait();
        write_dealt_rows(ends, joined, rows, 16 * t, i, used, blocks, rank, to);
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

// Of one row, four columns of all its pieces. Others wrote them: read past the first cache.
__device__ __forceinline__ Part join_pieces(const float* partial, const float2* stats, int pieces,
                                            int dim) {
  constexpr int AT_ONCE = 8;
  Part all;
  for (int first = 0; first < pieces; first += AT_ONCE) {
    Part parts[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      if (first + i >= pieces) break;
      const float2 stat = __ldcg(stats + first + i);
      parts[i] = {stat.x, stat.y,
                  __ldcg(reinterpret_cast<const float4*>(partial + (first + i) * dim))};
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) join_part(all, parts[i]);
  }
  return all;
}

}  // namespace voltapile
