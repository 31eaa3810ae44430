// Attention to chosen blocks of positions and to those behind the last whole block: a block takes
// one token and up to 16 query heads of one KV head, over a piece of what the token sees. Its warps
// take 16 positions each in turn, wherever those lie, and meet at the end; pieces meet in
// sparse_join.cu. See kernels/families.py.
//
// Pieces are cut by what may be chosen, whatever else is computed. -D HEAD_DIM, KIND (f16, or 3:
// told at run time)
#include "attention_tile.cuh"
#include "grid.cuh"
#include "sparse_rows.cuh"

namespace voltapile {

constexpr int WARPS = 4, THREADS = 32 * WARPS, ROWS = 16;
constexpr int HALF = 8;  // rows that warps join at once: those of one i (Mma::row)
constexpr unsigned EVERY = 0xffffffffu;

// STEP positions of one warp, as halves.
struct Tile16 {
  half_bits at[STEP * PITCH];
};
// Where copies need no registers, values are on their way while keys are multiplied; else a warp
// has one tile for both.
constexpr int TILES_OF_WARP = IS_ASYNC ? 2 : 1;
// Of a row, DIM columns, and behind them the largest score and the sum of exponentials.
struct Ends {
  float rows[WARPS][HALF][DIM + 8];
};
struct __align__(16) Shared {
  union {
    Tile16 tiles[WARPS][TILES_OF_WARP];
    Ends ends;
  };
  half_bits q[ROWS * PITCH];
  float factor[ROWS];
};

// STEP positions from i on, on their way by copies, if there are any.
__device__ __forceinline__ void ask(half_bits* tile, const Cache& cache, const Seen& seen, int i,
                                    int lane) {
  constexpr int WIDE = DIM / 8;
  static_assert(32 % WIDE == 0);
  if (i < seen.end) {
    const int own = lane / WIDE, c = lane % WIDE;
    half_bits* to = tile + own * PITCH + 8 * c;
#pragma unroll 4
    for (int r = own; r < STEP; r += 32 / WIDE, to += 32 / WIDE * PITCH) {
      const bool is_in = i + r < seen.end;
      const unsigned cell = seen.cell(is_in ? i + r : i);
      const unsigned char* row = cache.base + static_cast<std::uint64_t>(cell) * (2 * DIM);
      copy_async(to, row + 16 * (c ^ turn_of(cell, WIDE)), is_in ? 16 : 0);
    }
  }
  commit_copies();
}

// A warp's rows of queries, on their way together. Behind the last one that is used it comes again.
struct Queries {
  static constexpr int COUNT = ROWS / WARPS;
  int head[COUNT];
  Query<DIM> row[COUNT];

  __device__ __forceinline__ void find(const int* heads, int used, int warp) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) head[i] = heads[min(warp + WARPS * i, used - 1)];
  }
  // q: the token's, of all heads
  __device__ __forceinline__ void read(const float* q, int dim, int lane) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) row[i].read(q + head[i] * dim, dim, lane);
  }
  __device__ __forceinline__ void stage(Shared& sh, float scale, int warp, int lane) const {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const int r = warp + WARPS * i;
      const float power = row[i].template stage<false>(sh.q + r * PITCH, lane);
      if (lane == 0) sh.factor[r] = power * scale;
    }
  }
};

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

// Scores become probabilities, and the sums so far, if there are any, are multiplied by `alpha`;
// where tensor cores truncate, the caller does that.
__device__ __forceinline__ void soften(Square& s, Sums& sums, float (&alpha)[2],
                                       const float* factor, int i, int end, int lane) {
  bool moves = false;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    finish_scores(s, h, i, 0, end, factor[Mma::row(lane, h)], 0.0f, lane);
    const bool has_sums = sums.running[h].m != -infinity();
    const float shift = sums.running[h].take(row_max(largest(s, h)), alpha[h]);
    sums.sum[h] = __fmaf_rn(sums.sum[h], alpha[h], exponentials(s, h, shift));
    moves |= has_sums && alpha[h] != 1.0f;
  }
  if (TRUNCATES || __ballot_sync(EVERY, moves) == 0) return;
#pragma unroll
  for (int c = 0; c < DIM / 16; ++c)
#pragma unroll
    for (int e = 0; e < 8; ++e)
      sums.out[c].e[e] = __fmul_rn(sums.out[c].e[e], alpha[e >> 1 & 1]);
}

__device__ __forceinline__ void add_values(Sums& sums, const Square& s, const float (&alpha)[2],
                                           const half_bits* values, int lane) {
  const Mma::A p = Mma::from_square(s, lane);
#pragma unroll
  for (int c = 0; c < DIM / 16; ++c) {
    Square& out = sums.out[c];
    const Mma::B b = Mma::load_b_rows(values + 16 * c, PITCH, lane);
    if (!TRUNCATES) {
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
  if (IS_ASYNC)
#pragma unroll 1
    for (int n = 0; n < 2; ++n) ask(n ? v : k, n ? values : keys, seen, i, lane);
  OnWay on_way;  // values while keys are multiplied, then the next keys
  if (!IS_ASYNC) on_way.ask(keys, seen, i, lane);
  for (; i < seen.end; i += STEP * WARPS) {
    Square s;
    float alpha[2];
    if (IS_ASYNC) wait_for_copies<1>();
    else on_way.put(k, keys, seen, i, lane), on_way.ask(values, seen, i, lane);
    __syncwarp();
    score(s, sh.q, k, lane);
    __syncwarp();
    if (IS_ASYNC) ask(k, keys, seen, i + STEP * WARPS, lane);
    soften(s, sums, alpha, sh.factor, i, seen.end, lane);
    if (IS_ASYNC) wait_for_copies<1>();
    else on_way.put(v, values, seen, i, lane), on_way.ask(keys, seen, i + STEP * WARPS, lane);
    __syncwarp();
    add_values(sums, s, alpha, v, lane);
    __syncwarp();
    if (IS_ASYNC) ask(v, values, seen, i + STEP * WARPS, lane);
  }
  if (IS_ASYNC) wait_for_copies<0>();
}

// Where rows' results go, and what they are: divided by their sums where there is one piece.
struct Target {
  float* out;
  float2* stats;
  const int* heads;  // of rows
  unsigned first;    // the token's first row
  int dim, pieces, piece;
};

// The warps' sums of HALF rows become one: rows of the block from Mma::row_of(0, i) on. A call, for
// its code runs twice.
__device__ __noinline__ void join_rows(const Ends& ends, Target to, int i, int used) {
#pragma unroll 1
  for (int at = threadIdx.x; at < HALF * DIM / 4; at += THREADS) {
    const unsigned r = at / (DIM / 4), d = at % (DIM / 4) * 4, dim = width_of(to.dim);
    const int row = Mma::row_of(r, i);
    if (row >= used || d >= dim) continue;
    float2 stats[WARPS];
#pragma unroll
    for (int w = 0; w < WARPS; ++w)
      stats[w] = *reinterpret_cast<const float2*>(ends.rows[w][r] + DIM);
    float most = stats[0].x, total = 0.0f;
#pragma unroll
    for (int w = 1; w < WARPS; ++w) most = fmaxf(most, stats[w].x);
    float4 all{0, 0, 0, 0};
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      const float weight = exp2_fast(stats[w].x - most);
      const float4 v = *reinterpret_cast<const float4*>(ends.rows[w][r] + d);
      total = __fmaf_rn(weight, stats[w].y, total);
      all = {__fmaf_rn(weight, v.x, all.x), __fmaf_rn(weight, v.y, all.y),
             __fmaf_rn(weight, v.z, all.z), __fmaf_rn(weight, v.w, all.w)};
    }
    const unsigned place = (to.first + to.heads[row]) * to.pieces + to.piece;
    const float factor = to.pieces == 1 ? reciprocal(total) : 1.0f;
    *reinterpret_cast<float4*>(to.out + place * dim + d) =
        float4{all.x * factor, all.y * factor, all.z * factor, all.w * factor};
    if (to.pieces > 1 && d == 0) to.stats[place] = {most, total};
  }
}

// The warps' sums of `used` rows.
__device__ __forceinline__ void join_warps(Ends& ends, const Sums& sums, const Target& to, int used,
                                           int warp, int lane) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (Mma::row_of(0, i) >= used) continue;
    float* own = ends.rows[warp][Mma::number(lane)];
    const float sum = row_sum(sums.sum[i]);
    __syncthreads();  // what was there is done with
    if (Mma::pair(lane) == 0)
      *reinterpret_cast<float2*>(own + DIM) = float2{sums.running[i].m, sum};
#pragma unroll
    for (int c = 0; c < DIM / 16; ++c)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        *reinterpret_cast<float2*>(own + 16 * c + 8 * h + 2 * Mma::pair(lane)) =
            float2{sums.out[c].e[4 * h + 2 * i], sums.out[c].e[4 * h + 2 * i + 1]};
    __syncthreads();
    join_rows(ends, to, i, used);
  }
}

}  // namespace voltapile

using namespace voltapile;

// grid: (KV heads * parts of their query heads * pieces, tokens), 128 threads. heads: int[kv_heads
// + 1 + H], where each KV head's query heads begin and end, then those. out: [tokens][H][value_dim]
// if pieces is 1, else [tokens][H][pieces][value_dim] with stats [tokens][H][pieces]: the largest
// score, sum. shift: a block has 1 << shift positions. Shared: Shared, then ints for a piece's
// blocks.
extern "C" __global__ void __launch_bounds__(THREADS, IS_ASYNC ? 2 : 1)
attend_to(const float* q, const unsigned char* keys, const unsigned char* values, const int* table,
          const int* slots, const int* positions, const int* blocks, const int* heads, float* out,
          float2* stats, int kv_heads, int num_heads, int key_dim, int value_dim, int key_kind,
          int value_kind, int width, int pages, int shift, int most, int pieces, int piece,
          int parts, float scale) {
  extern __shared__ __align__(128) std::uint8_t shared[];
  Shared& sh = *reinterpret_cast<Shared*>(shared);
  int* cells = reinterpret_cast<int*>(shared + sizeof(Shared));
  grid_launch();
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, t = blockIdx.y;
  const unsigned one = pieces == 1 ? blockIdx.x : blockIdx.x / pieces;
  const int own_piece = blockIdx.x - one * pieces, kv_head = parts == 1 ? one : one / parts;
  const int begin = heads[kv_head] + static_cast<int>(one - kv_head * parts) * ROWS;
  const int used = min(ROWS, heads[kv_head + 1] - begin), position = positions[t];
  const int *own = heads + kv_heads + 1 + begin, *pages_of = table + slots[t] * width;
  const int whole = (position + 1) >> shift, kept = min(whole, (width * PAGE) >> shift);
  const int chosen = min(kept, most);
  const int count = position + 1 - ((whole - chosen) << shift);
  const int start = own_piece * piece, end = pieces == 1 ? count : min(start + piece, count);
  const int first = start >> shift, last = ((pieces == 1 ? count : start + piece) - 1) >> shift;
  const auto put_cell = [&](int i, int block) {
    const unsigned at = (i < chosen ? block : whole) << shift, index = at / PAGE;
    const int page = index < width ? pages_of[index] : 0;
    const int sane = page >= 0 && page < pages ? page : 0;
    cells[i - first] = (sane * kv_heads + kv_head) * PAGE + at % PAGE;
  };
  // Where all whole blocks are chosen, what is seen is known before the choice is.
  const bool sees_all = chosen == kept;
  Queries queries{};
  if (used > 0) queries.find(own, used, warp);
  if (sees_all)
#pragma unroll 1
    for (int i = first + threadIdx.x; i <= last; i += THREADS) put_cell(i, i);
  grid_wait();
  if (used <= 0) return;
  queries.read(q + static_cast<unsigned>(t * num_heads) * width_of(key_dim), width_of(key_dim),
               lane);
  if (!sees_all) {
    int i = first + threadIdx.x, block = blocks[t * most + min(i, most - 1)];
#pragma unroll 1
    for (; i <= last; i += THREADS) {
      const int own_block = block;
      block = blocks[t * most + min(i + THREADS, most - 1)];
      put_cell(i, own_block);
    }
  }
  queries.stage(sh, scale, warp, lane);
  const Target to{out, stats, own, static_cast<unsigned>(t * num_heads), value_dim, pieces,
                  own_piece};
  if (start >= end) {  // asked so late, for what all of it takes shall be on its way together
    if (threadIdx.x < used)
      stats[(to.first + own[threadIdx.x]) * pieces + own_piece] = {-infinity(), 0.0f};
    return;
  }
  __syncthreads();
  Sums sums;
  const Seen seen{cells, shift, first, end};
  go_through(sums, sh, {keys, key_kind, key_dim}, {values, value_kind, value_dim}, seen, start,
             warp, lane);
  join_warps(sh.ends, sums, to, used, warp, lane);
}
