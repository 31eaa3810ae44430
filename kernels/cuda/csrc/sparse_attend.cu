// Attention to chosen blocks of positions and to those behind the last whole block: a block takes
// one token and up to 16 query heads of one KV head, over a piece of what the token sees. Its warps
// take 16 positions each in turn, wherever those lie, and meet at the end. See kernels/families.py.
//
// Pieces are cut by what may be chosen, whatever else is computed. -D HEAD_DIM, KIND (f16, or 3:
// told at run time)
#include "attention_tile.cuh"
#include "grid.cuh"

namespace voltapile {

constexpr int STEP = 16, WARPS = 4, THREADS = 32 * WARPS, ROWS = 16;
constexpr int HALF = 8;  // rows that warps join at once: those of one i (Mma::row)
constexpr unsigned EVERY = 0xffffffffu;

// STEP positions of one warp, as halves.
struct Tile16 {
  half_bits at[STEP * PITCH];
};
// Where copies need no registers, values are on their way while keys are multiplied; else a warp
// has one tile for both.
constexpr int TILES_OF_WARP = IS_ASYNC ? 2 : 1;
struct Ends {
  float most[WARPS][HALF], sum[WARPS][HALF];
  float out[WARPS][HALF][DIM + 8];
};
struct __align__(16) Shared {
  union {
    Tile16 tiles[WARPS][TILES_OF_WARP];
    Ends ends;
  };
  half_bits q[ROWS * PITCH];
  float factor[ROWS];
};

// What a token sees, counted from its first chosen block on.
struct Seen {
  const int* cells;  // of blocks from the piece's first on: where their first position is cached
  int block, first, end;

  __device__ __forceinline__ int cell(int i) const {
    return cells[i / block - first] + i % block;
  }
};

// Sixteen bytes of a cache become halves in shared memory.
template <int TYPE>
__device__ __forceinline__ void put_piece(half_bits* to, const uint4& d, unsigned scale) {
  uint4* out = reinterpret_cast<uint4*>(to);
  if constexpr (TYPE == F16) {
    out[0] = d;
  } else {
    const unsigned words[4] = {d.x, d.y, d.z, d.w};
    const float offset = TYPE == Q8_0 ? 1152.0f : 1032.0f;
    scale |= scale << 16;
#pragma unroll
    for (int i = 0; i < (TYPE == Q8_0 ? 2 : 4); ++i) {
      uint4 y;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const unsigned word = words[TYPE == Q8_0 ? 2 * i + j : 2 * (i % 2) + j];
        const unsigned bytes = TYPE == Q8_0 ? word ^ 0x80808080u
                               : i < 2      ? word & 0x0f0f0f0fu
                                            : word >> 4 & 0x0f0f0f0fu;
        unsigned low, high;
        spread(bytes, low, high);
        (j ? y.z : y.x) = scaled(low, offset, scale), (j ? y.w : y.y) = scaled(high, offset, scale);
      }
      out[i] = y;
    }
  }
}

// STEP positions from i on, by registers; what is behind the piece's end becomes zeros.
template <int TYPE>
__device__ __forceinline__ void read_as(half_bits* tile, const Cache& cache, const Seen& seen,
                                        int i, int lane) {
  constexpr int EACH = values_of(TYPE), WIDE = DIM / EACH;
  for (int at = lane; at < STEP * WIDE; at += 32) {
    const int r = at / WIDE, c = at % WIDE;
    uint4 data{0, 0, 0, 0};
    unsigned scale = 0;
    if (i + r < seen.end && c * EACH < cache.dim) {
      const int cell = seen.cell(i + r), page = cell / PAGE;
      const unsigned char* head = cache.base + page * head_bytes(TYPE, cache.dim);
      const int place = cell % PAGE * (cache.dim / EACH) + c;
      data = __ldcg(reinterpret_cast<const uint4*>(head) + place);
      if (TYPE != F16)
        scale = __ldcg(reinterpret_cast<const half_bits*>(head + integer_bytes(TYPE, cache.dim)) +
                       place);
    }
    put_piece<TYPE>(tile + r * PITCH + c * EACH, data, scale);
  }
}
__device__ __forceinline__ void read(half_bits* tile, const Cache& cache, const Seen& seen, int i,
                                     int lane) {
  const int kind = KIND == ANY ? cache.kind : KIND;
  if (kind == F16) read_as<F16>(tile, cache, seen, i, lane);
  if (kind == Q8_0) read_as<Q8_0>(tile, cache, seen, i, lane);
  if (kind == Q4_0) read_as<Q4_0>(tile, cache, seen, i, lane);
  __syncwarp();
}

// The same on their way, if there are any.
__device__ __forceinline__ void ask(half_bits* tile, const Cache& cache, const Seen& seen, int i,
                                    int lane) {
  constexpr int WIDE = DIM / 8;
  if (i < seen.end) {
#pragma unroll 4
    for (int at = lane; at < STEP * WIDE; at += 32) {
      const int r = at / WIDE, c = at % WIDE;
      const bool is_in = i + r < seen.end;
      const int cell = seen.cell(is_in ? i + r : i);
      const unsigned char* from = cache.base + (static_cast<long long>(cell) * DIM + 8 * c) * 2;
      copy_async(tile + r * PITCH + 8 * c, from, is_in ? 16 : 0);
    }
  }
  commit_copies();
}

// Of a warp's rows so far.
struct Sums {
  Square out[DIM / 16];
  Running running[2];
  float sum[2] = {};
};

__device__ __forceinline__ void score(Square& s, const half_bits* q, const half_bits* keys,
                                      int lane) {
  constexpr int CHAINS = TRUNCATES ? (DIM + CHAIN - 1) / CHAIN : 2;
  Square part[CHAINS];
#pragma unroll
  for (int n = 0; n < CHAINS; ++n) part[n].clear();
#pragma unroll
  for (int k = 0; k < DIM; k += 16)
    Mma::product(part[TRUNCATES ? k / CHAIN : k / 16 % 2], Mma::load_a(q + k, PITCH, lane),
                 Mma::load_b(keys + k, PITCH, lane));
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    s.e[e] = part[0].e[e];
#pragma unroll
    for (int n = 1; n < CHAINS; ++n) s.e[e] += part[n].e[e];
  }
}

// Scores become probabilities; alpha: what the sums so far are to be multiplied by.
__device__ __forceinline__ void soften(Square& s, Sums& sums, float (&alpha)[2],
                                       const float* factor, int i, int end, int lane) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    finish_scores(s, h, i, 0, end, factor[Mma::row(lane, h)], 0.0f, lane);
    const float shift = sums.running[h].take(row_max(largest(s, h)), alpha[h]);
    sums.sum[h] = __fmaf_rn(sums.sum[h], alpha[h], exponentials(s, h, shift));
  }
}

__device__ __forceinline__ void add_values(Sums& sums, const Square& s, const float (&alpha)[2],
                                           const half_bits* values, int lane) {
  const Mma::A p = Mma::from_square(s, lane);
  const bool moves = !TRUNCATES && __ballot_sync(EVERY, alpha[0] != 1.0f || alpha[1] != 1.0f) != 0;
#pragma unroll
  for (int c = 0; c < DIM / 16; ++c) {
    Square& out = sums.out[c];
    const Mma::B b = Mma::load_b_rows(values + 16 * c, PITCH, lane);
    if (!TRUNCATES) {
      if (moves)
#pragma unroll
        for (int e = 0; e < 8; ++e) out.e[e] = __fmul_rn(out.e[e], alpha[e >> 1 & 1]);
      Mma::product_by_rows(out, p, b);
      continue;
    }
    Square fresh;
    fresh.clear();
    Mma::product_by_rows(fresh, p, b);
#pragma unroll
    for (int e = 0; e < 8; ++e) out.e[e] = __fmaf_rn(out.e[e], alpha[e >> 1 & 1], fresh.e[e]);
  }
}

// A warp's whole way, by every WARPS-th STEP positions.
__device__ __forceinline__ void go_through(Sums& sums, Shared& sh, const Cache& keys,
                                           const Cache& values, const Seen& seen, int start,
                                           int warp, int lane) {
#pragma unroll
  for (int c = 0; c < DIM / 16; ++c) sums.out[c].clear();
  half_bits *k = sh.tiles[warp][0].at, *v = sh.tiles[warp][TILES_OF_WARP - 1].at;
  int i = start + STEP * warp;
  if (IS_ASYNC) ask(k, keys, seen, i, lane), ask(v, values, seen, i, lane);
  for (; i < seen.end; i += STEP * WARPS) {
    Square s;
    float alpha[2];
    if (IS_ASYNC) wait_for_copies<1>(), __syncwarp();
    else read(k, keys, seen, i, lane);
    score(s, sh.q, k, lane);
    __syncwarp();
    if (IS_ASYNC) ask(k, keys, seen, i + STEP * WARPS, lane);
    soften(s, sums, alpha, sh.factor, i, seen.end, lane);
    if (IS_ASYNC) wait_for_copies<1>(), __syncwarp();
    else read(v, values, seen, i, lane);
    add_values(sums, s, alpha, v, lane);
    __syncwarp();
    if (IS_ASYNC) ask(v, values, seen, i + STEP * WARPS, lane);
  }
  if (IS_ASYNC) wait_for_copies<0>();
}

// Where a row's result goes, and what it is: divided by its sum where there is one piece.
struct Target {
  float* out;
  float2* stats;
  int dim, pieces, piece;

  __device__ __forceinline__ void write(long long row, int d, const float4& v, float most,
                                        float sum) const {
    const long long place = row * pieces + piece;
    const float factor = pieces == 1 ? 1.0f / sum : 1.0f;
    *reinterpret_cast<float4*>(out + place * dim + d) =
        float4{v.x * factor, v.y * factor, v.z * factor, v.w * factor};
    if (pieces > 1 && d == 0) stats[place] = {most, sum};
  }
};

// The warps' sums of `used` rows become one; row r is head heads[r] of those from `first` on.
__device__ __forceinline__ void join_warps(Ends& ends, const Sums& sums, const int* heads,
                                           long long first, int used, const Target& to, int warp,
                                           int lane) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int own = Mma::number(lane);
    const float sum = row_sum(sums.sum[i]);
    __syncthreads();  // what was there is done with
    if (Mma::pair(lane) == 0) ends.most[warp][own] = sums.running[i].m, ends.sum[warp][own] = sum;
#pragma unroll
    for (int c = 0; c < DIM / 16; ++c)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        *reinterpret_cast<float2*>(ends.out[warp][own] + 16 * c + 8 * h + 2 * Mma::pair(lane)) =
            float2{sums.out[c].e[4 * h + 2 * i], sums.out[c].e[4 * h + 2 * i + 1]};
    __syncthreads();
    for (int at = threadIdx.x; at < HALF * DIM / 4; at += THREADS) {
      const int r = at / (DIM / 4), d = at % (DIM / 4) * 4, row = Mma::row_of(r, i);
      if (row >= used || d >= to.dim) continue;
      float most = ends.most[0][r], total = 0.0f;
      for (int w = 1; w < WARPS; ++w) most = fmaxf(most, ends.most[w][r]);
      float4 all{0, 0, 0, 0};
      for (int w = 0; w < WARPS; ++w) {
        const float weight = exp2_fast(ends.most[w][r] - most);
        const float4 v = *reinterpret_cast<const float4*>(ends.out[w][r] + d);
        total = __fmaf_rn(weight, ends.sum[w][r], total);
        all = {__fmaf_rn(weight, v.x, all.x), __fmaf_rn(weight, v.y, all.y),
               __fmaf_rn(weight, v.z, all.z), __fmaf_rn(weight, v.w, all.w)};
      }
      to.write(first + heads[row], d, all, most, total);
    }
  }
}

}  // namespace voltapile

using namespace voltapile;

// grid: (KV heads * parts of their query heads * pieces, tokens), 128 threads. heads: int[kv_heads
// + 1 + H], where each KV head's query heads begin and end, then those. out: [tokens][H][value_dim]
// if pieces is 1, else [tokens][H][pieces][value_dim] with stats [tokens][H][pieces]: the largest
// score, sum. Shared: Shared, then ints for a piece's blocks.
extern "C" __global__ void __launch_bounds__(THREADS, IS_ASYNC ? 2 : 1)
attend_to(const float* q, const unsigned char* keys, const unsigned char* values, const int* table,
          const int* slots, const int* positions, const int* blocks, const int* counts,
          const int* heads, float* out, float2* stats, int kv_heads, int num_heads, int key_dim,
          int value_dim, int key_kind, int value_kind, int width, int pages, int block, int most,
          int pieces, int piece, int parts, float scale) {
  extern __shared__ __align__(128) std::uint8_t shared[];
  Shared& sh = *reinterpret_cast<Shared*>(shared);
  int* cells = reinterpret_cast<int*>(shared + sizeof(Shared));
  grid_launch();
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, t = blockIdx.y;
  const int own_piece = blockIdx.x % pieces, part = blockIdx.x / pieces % parts;
  const int kv_head = blockIdx.x / (pieces * parts), begin = heads[kv_head] + part * ROWS;
  const int used = min(ROWS, heads[kv_head + 1] - begin), position = positions[t];
  const int *own = heads + kv_heads + 1 + begin, *pages_of = table + slots[t] * width;
  grid_wait();
  if (used <= 0) return;
  const int chosen = counts[t], whole = (position + 1) / block;
  const int count = chosen * block + position + 1 - whole * block;
  const int start = own_piece * piece, end = pieces == 1 ? count : min(start + piece, count);
  const long long first_row = static_cast<long long>(t) * num_heads;
  if (start >= end) {
    for (int r = threadIdx.x; r < used; r += THREADS)
      stats[(first_row + own[r]) * pieces + own_piece] = {-infinity(), 0.0f};
    return;
  }
  const int first = start / block, last = (end - 1) / block;
  for (int i = first + threadIdx.x; i <= last; i += THREADS) {
    const int at = (i < chosen ? blocks[static_cast<long long>(t) * most + i] : whole) * block;
    const int page = at / PAGE < width ? pages_of[at / PAGE] : 0;
    const int sane = page >= 0 && page < pages ? page : 0;
    cells[i - first] = (sane * kv_heads + kv_head) * PAGE + at % PAGE;
  }
  for (int r = warp; r < ROWS; r += WARPS) {
    float power = 0.0f;
    if (r < used)
      power = stage_query<DIM>(q + (first_row + own[r]) * key_dim, key_dim, sh.q + r * PITCH, lane);
    else
      for (int d = lane; d < DIM; d += 32) sh.q[r * PITCH + d] = 0;
    if (lane == 0) sh.factor[r] = power * scale;
  }
  __syncthreads();
  Sums sums;
  const Seen seen{cells, block, first, end};
  go_through(sums, sh, {keys, key_kind, key_dim}, {values, value_kind, value_dim}, seen, start,
             warp, lane);
  join_warps(sh.ends, sums, own, first_row, used, {out, stats, value_dim, pieces, own_piece}, warp,
             lane);
}

// grid: (H, tokens), 128 threads; shared: a float for each piece
extern "C" __global__ void __launch_bounds__(THREADS, 1)
join_attended(const float* parts, const float2* stats, float* out, int pieces, int dim) {
  extern __shared__ __align__(128) std::uint8_t shared[];
  float* weights = reinterpret_cast<float*>(shared);
  __shared__ float total;
  grid_launch();
  grid_wait();
  const long long row = static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x;
  stats += row * pieces, parts += row * pieces * dim;
  if (threadIdx.x < 32) {
    float most = -infinity(), sum = 0.0f;
    for (int i = threadIdx.x; i < pieces; i += 32) most = fmaxf(most, stats[i].x);
    for (int step = 16; step > 0; step >>= 1)
      most = fmaxf(most, __shfl_xor_sync(EVERY, most, step));
    for (int i = threadIdx.x; i < pieces; i += 32) {
      const float2 own = stats[i];
      weights[i] = exp2_fast(own.x - most);
      sum = __fmaf_rn(own.y, weights[i], sum);
    }
    for (int step = 16; step > 0; step >>= 1) sum += __shfl_xor_sync(EVERY, sum, step);
    if (threadIdx.x == 0) total = sum;
  }
  __syncthreads();
  for (int d = threadIdx.x; d < dim; d += THREADS) {
    float sum = 0.0f;
#pragma unroll 8
    for (int i = 0; i < pieces; ++i) {
      const float* part = parts + static_cast<long long>(i) * dim + d;
      sum = weights[i] != 0.0f ? __fmaf_rn(*part, weights[i], sum) : sum;
    }
    out[row * dim + d] = sum / total;
  }
}
