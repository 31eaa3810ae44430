// Attention of many rows: a block takes some rows (query heads of one KV head times neighbouring
// tokens of a prompt) through all positions that they see. Each warp owns its rows; queries wait in
// shared memory, scores become probabilities in registers. Where tensor cores truncate, a tile's
// products are summed afresh and added in fp32. Rows do not know each other, so a prompt may be cut
// anywhere.
// -D HEAD_DIM, KIND
#include "attention_tile.cuh"

namespace voltapile {

constexpr int ROW_TILES = IS_ASYNC && DIM <= 128 ? 2 : 1;  // of a warp
constexpr int WARPS = VP_ARCH >= 800 ? 8 / ROW_TILES : 4;
constexpr int THREADS = 32 * WARPS, ROWS = 16 * ROW_TILES * WARPS;
constexpr int COLUMNS = DIM / 16, GROUPS = TILE / 16;
constexpr int STAGES = IS_ASYNC ? 2 : 1;
constexpr bool PREFETCHES = DIM <= 128 && KIND != ANY;  // there are registers for it

#ifndef VP_EMULATION
extern __shared__ __align__(16) unsigned char shared[];
#endif

struct Shared {
  half_bits q[ROWS * PITCH];
  half_bits keys[STAGES][TILE * PITCH];                 // without cp.async the values follow there
  half_bits values[IS_ASYNC ? 2 : 1][IS_ASYNC ? TILE * PITCH : 8];
  float factor[ROWS];
  int low[ROWS], high[ROWS], out[ROWS];  // out: token * H + head, -1: none
};

struct Bounds {
  int low, high;              // positions that any row sees
  int first_full, last_full;  // positions that all rows see
};

__device__ __forceinline__ void fetch_async(const Cache& c, int at, int p, const Bounds& seen,
                                            half_bits* tile) {
  fetch_halves<TILE, DIM, THREADS>(tile, PITCH, c.head(at), p % PAGE, seen.low - p, seen.high - p,
                                   threadIdx.x);
}

// s[g][i] = 16 queries from row i * apart on times 16 keys from row 16 g on, for i < used.
template <int GROUPS, int COUNT>
__device__ __forceinline__ void scores(Square (&s)[GROUPS][COUNT], const half_bits* q, int apart,
                                       const half_bits* keys, int used, int lane) {
#pragma unroll
  for (int start = 0; start < DIM; start += CHAIN) {
    Square part[GROUPS][COUNT];
#pragma unroll
    for (int g = 0; g < GROUPS; ++g)
#pragma unroll
      for (int i = 0; i < COUNT; ++i) part[g][i].clear();
#pragma unroll
    for (int k = start; k < min(DIM, start + CHAIN); k += 16) {
      Mma::A a[COUNT];
#pragma unroll
      for (int i = 0; i < COUNT; ++i)
        if (i < used) a[i] = Mma::load_a(q + i * apart * PITCH + k, PITCH, lane);
#pragma unroll
      for (int g = 0; g < GROUPS; ++g) {
        const Mma::B b = Mma::load_b(keys + 16 * g * PITCH + k, PITCH, lane);
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
          if (i < used) Mma::product(part[g][i], a[i], b);
      }
    }
#pragma unroll
    for (int g = 0; g < GROUPS; ++g)
#pragma unroll
      for (int i = 0; i < COUNT; ++i)
#pragma unroll
        for (int e = 0; e < 8; ++e)
          s[g][i].e[e] = start == 0 ? part[g][i].e[e] : s[g][i].e[e] + part[g][i].e[e];
  }
}

// Positions and queries of the block's rows, to shared memory.
__device__ __forceinline__ void stage_rows(Shared& sh, const float* q, const int* positions,
                                           const int* own, int members, int begin, int first,
                                           int rows, int num_heads, int dim, int limit, int window,
                                           float scale) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  for (int m = threadIdx.x; m < ROWS; m += THREADS) {
    const bool is_used = m < rows;
    const int r = first + m, t = begin + (is_used ? r / members : 0);
    const Sight s = sight_of(is_used ? positions[t] : 0, limit, window);
    sh.low[m] = is_used ? s.low : 0;
    sh.high[m] = is_used ? s.high : 0;
    sh.out[m] = is_used ? t * num_heads + own[r % members] : -1;
  }
#pragma unroll 4
  for (int i = 0; i < ROWS / WARPS; ++i) {
    const int m = warp + i * WARPS, r = first + m;
    half_bits* to = sh.q + m * PITCH;
    if (m < rows) {
      const long long token = begin + r / members, at = token * num_heads + own[r % members];
      const float power = stage_query<DIM>(q + at * dim, dim, to, lane);
      if (lane == 0) sh.factor[m] = power * scale;
    } else {
      for (int j = lane; j < DIM; j += 32) to[j] = 0;
      if (lane == 0) sh.factor[m] = 0.0f;
    }
  }
}

__device__ __forceinline__ Bounds bounds_of(const Shared& sh, int rows) {
  const int lane = threadIdx.x & 31;
  Bounds b{1 << 30, 0, 0, 1 << 30};
  for (int m = lane; m < rows; m += 32) {
    b.low = min(b.low, sh.low[m]), b.first_full = max(b.first_full, sh.low[m]);
    b.high = max(b.high, sh.high[m]), b.last_full = min(b.last_full, sh.high[m]);
  }
  for (int step = 16; step > 0; step >>= 1) {
    b.low = min(b.low, __shfl_xor_sync(0xffffffffu, b.low, step));
    b.high = max(b.high, __shfl_xor_sync(0xffffffffu, b.high, step));
    b.first_full = max(b.first_full, __shfl_xor_sync(0xffffffffu, b.first_full, step));
    b.last_full = min(b.last_full, __shfl_xor_sync(0xffffffffu, b.last_full, step));
  }
  return b;
}

// Scores of a warp's rows become probabilities.
__device__ __forceinline__ void soften(const Shared& sh, Square (&s)[GROUPS][ROW_TILES],
                                       Running (&running)[ROW_TILES][2],
                                       float (&alpha)[ROW_TILES][2], float (&sum)[ROW_TILES][2],
                                       int p, bool is_full, float cap, int warp, int lane) {
#pragma unroll
  for (int t = 0; t < ROW_TILES; ++t)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = 16 * (warp * ROW_TILES + t) + Mma::row(lane, i);
      const int low = is_full ? 0 : sh.low[row], high = is_full ? 1 << 30 : sh.high[row];
      float most = -infinity();
#pragma unroll
      for (int g = 0; g < GROUPS; ++g) {
        finish_scores(s[g][t], i, p + 16 * g, low, high, sh.factor[row], cap, lane);
        most = fmaxf(most, largest(s[g][t], i));
      }
      const float shift = running[t][i].take(row_max(most), alpha[t][i]);
      float all = 0.0f;
#pragma unroll
      for (int g = 0; g < GROUPS; ++g) all += exponentials(s[g][t], i, shift);
      sum[t][i] = __fmaf_rn(sum[t][i], alpha[t][i], all);
    }
}

__device__ __forceinline__ void add_values(const Square (&s)[GROUPS][ROW_TILES],
                                           const half_bits* values,
                                           Square (&out)[ROW_TILES][COLUMNS],
                                           const float (&alpha)[ROW_TILES][2], int lane) {
  Mma::A p[GROUPS][ROW_TILES];
#pragma unroll
  for (int g = 0; g < GROUPS; ++g)
#pragma unroll
    for (int t = 0; t < ROW_TILES; ++t) p[g][t] = Mma::from_square(s[g][t], lane);
#pragma unroll
  for (int c = 0; c < COLUMNS; ++c) {
    Square sum[ROW_TILES];
#pragma unroll
    for (int t = 0; t < ROW_TILES; ++t)
#pragma unroll
      for (int e = 0; e < 8; ++e)
        sum[t].e[e] = TRUNCATES ? 0.0f : __fmul_rn(out[t][c].e[e], alpha[t][e >> 1 & 1]);
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
      const Mma::B b = Mma::load_b_rows(values + 16 * (g * PITCH + c), PITCH, lane);
#pragma unroll
      for (int t = 0; t < ROW_TILES; ++t) Mma::product_by_rows(sum[t], p[g][t], b);
    }
#pragma unroll
    for (int t = 0; t < ROW_TILES; ++t)
#pragma unroll
      for (int e = 0; e < 8; ++e)
        out[t][c].e[e] = TRUNCATES ? __fmaf_rn(out[t][c].e[e], alpha[t][e >> 1 & 1], sum[t].e[e])
                                   : sum[t].e[e];
  }
}

__device__ __forceinline__ void write_rows(const Shared& sh,
                                           const Square (&out)[ROW_TILES][COLUMNS],
                                           const float (&sum)[ROW_TILES][2], float* y, int dim,
                                           int warp, int lane) {
#pragma unroll
  for (int t = 0; t < ROW_TILES; ++t)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float norm = 1.0f / row_sum(sum[t][i]);
      const int to = sh.out[16 * (warp * ROW_TILES + t) + Mma::row(lane, i)];
      if (to < 0) continue;
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int at = 16 * c + 8 * h + 2 * Mma::pair(lane);
          if (at < dim)
            *reinterpret_cast<float2*>(y + static_cast<long long>(to) * dim + at) = float2{
                out[t][c].e[4 * h + 2 * i] * norm, out[t][c].e[4 * h + 2 * i + 1] * norm};
        }
    }
}

__device__ __forceinline__ void weigh_rows(const Shared& sh,
                                           const Running (&running)[ROW_TILES][2],
                                           const float (&sum)[ROW_TILES][2],
                                           const Weighing& weighing, int warp, int lane) {
#pragma unroll
  for (int t = 0; t < ROW_TILES; ++t)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float all = row_sum(sum[t][i]);
      const int to = sh.out[16 * (warp * ROW_TILES + t) + Mma::row(lane, i)];
      if (to >= 0 && Mma::pair(lane) == 0) weigh(weighing, to, true, running[t][i].m, all);
    }
}

// Rows that see nothing become zeros, after all.
__device__ __noinline__ void hide_rows(const Shared& sh, float* y, Weighing weighing, int dim) {
  __syncthreads();
#pragma unroll 1
  for (int m = 0; m < ROWS; ++m)
    if (sh.out[m] >= 0 && !weigh(weighing, sh.out[m], false, 0.0f, 0.0f))
#pragma unroll 1
      for (int d = threadIdx.x; d < dim; d += THREADS)
        y[static_cast<long long>(sh.out[m]) * dim + d] = 0.0f;
}

}  // namespace voltapile

using namespace voltapile;

// grid: (tiles, KV heads); heads and weights as in attention_decode.cu, plan and tiles as in
// attention_plan.cu
extern "C" __global__ void __launch_bounds__(THREADS, 1)
attention_prefill(const float* q, const unsigned char* key_base, const unsigned char* value_base,
                  const int* table, const int* slots, const int* positions, const int* heads,
                  const int* plan, const int* tiles, float* y, float* weights, int kv_heads,
                  int num_heads, int key_dim, int value_dim, int key_kind, int value_kind,
                  int width, int pages, float scale, float cap, int window) {
  Shared& sh = *reinterpret_cast<Shared*>(shared);
  const int number = plan[1] - 1 - blockIdx.x;  // a prompt's last rows take longest: first
  if (number < 0) return;
  const int* tile = tiles + 3 * number;
  const int begin = tile[0], kv_head = blockIdx.y, lane = threadIdx.x & 31;
  const int warp = threadIdx.x >> 5, first = tile[2] * ROWS;
  const int* own = heads + kv_heads + 1 + heads[kv_head];
  const int members = heads[kv_head + 1] - heads[kv_head];
  const int rows = min(ROWS, tile[1] * members - first);
  if (rows <= 0) return;
  stage_rows(sh, q, positions, own, members, begin, first, rows, num_heads, key_dim, width * PAGE,
             window, scale);
  __syncthreads();
  const Bounds seen = bounds_of(sh, rows);
  const Cache keys{key_base, key_kind, key_dim}, values{value_base, value_kind, value_dim};
  const Pages where{table + static_cast<long long>(slots[begin]) * width, pages, kv_heads, kv_head,
                    width};
  const int start = seen.low / TILE * TILE;
  int page = where.at(start);
  Fetch<TILE, THREADS> fetch(threadIdx.x);
  if (IS_ASYNC) {
    fetch_async(keys, page, start, seen, sh.keys[0]);
    fetch_async(values, page, start, seen, sh.values[0]);
    commit_copies();
  } else if (PREFETCHES) {
    fetch.read(keys, page, start, seen.low, seen.high);
  }
  Square out[ROW_TILES][COLUMNS];
  Running running[ROW_TILES][2];
  float sum[ROW_TILES][2] = {}, alpha[ROW_TILES][2];
#pragma unroll
  for (int t = 0; t < ROW_TILES; ++t)
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) out[t][c].clear();

  int stage = 0;
  for (int p = start; p < seen.high; p += TILE) {
    const int next = p + TILE;
    const bool goes_on = next < seen.high;
    const int next_page = goes_on ? where.at(next) : page;
    if (IS_ASYNC) {
      wait_for_copies<0>();
      __syncthreads();
      if (goes_on) {
        fetch_async(keys, next_page, next, seen, sh.keys[stage ^ 1]);
        fetch_async(values, next_page, next, seen, sh.values[stage ^ 1]);
        commit_copies();
      }
    } else {
      if (!PREFETCHES) fetch.read(keys, page, p, seen.low, seen.high);
      fetch.put(keys, sh.keys[0]);
      __syncthreads();
      if (PREFETCHES) fetch.read(values, page, p, seen.low, seen.high);
    }
    Square s[GROUPS][ROW_TILES];
    scores(s, sh.q + 16 * warp * ROW_TILES * PITCH, 16, sh.keys[stage], ROW_TILES, lane);
    soften(sh, s, running, alpha, sum, p, p >= seen.first_full && next <= seen.last_full, cap, warp,
           lane);
    if (!IS_ASYNC) {
      __syncthreads();
      if (!PREFETCHES) fetch.read(values, page, p, seen.low, seen.high);
      fetch.put(values, sh.keys[0]);
      __syncthreads();
      if (PREFETCHES && goes_on) fetch.read(keys, next_page, next, seen.low, seen.high);
    }
    add_values(s, IS_ASYNC ? sh.values[stage] : sh.keys[0], out, alpha, lane);
    if (IS_ASYNC) stage ^= 1;
    else __syncthreads();
    page = next_page;
  }
  const Weighing weighing{weights, positions, num_heads};
  if (weights != nullptr) weigh_rows(sh, running, sum, weighing, warp, lane);
  write_rows(sh, out, sum, y, value_dim, warp, lane);
  if (weights != nullptr) hide_rows(sh, y, weighing, value_dim);
}
