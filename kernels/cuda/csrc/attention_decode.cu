// Attention of few rows over long contexts: a block takes one piece of the positions for one KV
// head and all its query heads, of up to `chunk` tokens of a slot, so that keys and values are read
// once. Warps share the positions of a tile for scores, the dimensions for sums of values. What a
// piece gives (not normalised) goes to `partial`; the block that is the last of all pieces adds
// them, in an order that follows from their number alone.
// -D HEAD_DIM, KIND, ROW_TILES (16 rows each)
#include "attention_tile.cuh"

namespace voltapile {

constexpr int WARPS = 4, THREADS = 32 * WARPS, ROWS = 16 * ROW_TILES;
constexpr int GROUPS = TILE / 16, SHARES = WARPS / GROUPS;   // of the warps, for scores
constexpr int MINE = (ROW_TILES + SHARES - 1) / SHARES;      // row tiles of a warp there
constexpr int COLUMNS = (DIM / 16 + WARPS - 1) / WARPS;      // column tiles of a warp, for sums
constexpr int P_PITCH = TILE + PAD;

#ifndef VP_EMULATION
extern __shared__ __align__(16) unsigned char shared[];
#endif

struct Shared {
  half_bits q[ROWS * PITCH];
  half_bits keys[TILE * PITCH];
  half_bits values[IS_ASYNC ? TILE * PITCH : 8];
  half_bits p[ROWS * P_PITCH];
  float most[GROUPS][ROWS];  // largest score of each warp's positions; at the end, their sums
  float factor[ROWS];
  int low[ROWS], high[ROWS];
  int slot[ROWS];  // of `partial`; -1: none
  int kept[4];     // for the end, so that no register holds it meanwhile
};

// Tokens from t on that a block takes together; 0 if another token's block takes t. They are
// neighbours of one slot with pieces of one length, cut after each `chunk` tokens of the slot.
__device__ int tokens_of_item(const int* slots, const int* positions, int t, int first, int last,
                              int chunk, int limit, int window, int most) {
  int start = t;
  while (start > first && slots[start - 1] == slots[t]) --start;
  const int piece = span_of(positions[t], limit, window, most).piece;
  if ((t - start) % chunk != 0 &&
      span_of(positions[t - 1], limit, window, most).piece == piece)
    return 0;
  int count = 1;
  while (t + count < last && slots[t + count] == slots[t] && (t + count - start) % chunk != 0 &&
         span_of(positions[t + count], limit, window, most).piece == piece)
    ++count;
  return count;
}

// Some rows of an item: those from `first` on, of its query heads times tokens.
struct Rows {
  const float* q;
  const int *positions, *own;  // of the item's tokens; the KV head's query heads
  int members, first, rows, num_heads, dim;
};

// What each row sees and where its piece goes, and its query, to shared memory.
__device__ __forceinline__ void stage_rows(Shared& sh, const Rows& item, int piece, int base,
                                           int stride, int limit, int window, int most,
                                           float scale) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  for (int m = threadIdx.x; m < ROWS; m += THREADS) {
    const bool is_used = m < item.rows;
    const int r = item.first + m, t = is_used ? r / item.members : 0;
    const Span s = span_of(item.positions[t], limit, window, most);
    const bool is_seen = is_used && piece >= s.first() && piece <= s.last();
    sh.low[m] = is_used ? s.low : 0;
    sh.high[m] = is_used ? s.high : 0;
    sh.slot[m] = is_seen ? ((base + t) * item.num_heads + item.own[r % item.members]) * stride +
                               piece - s.first()
                         : -1;
  }
  for (int m = warp; m < (item.rows + 15) / 16 * 16; m += WARPS) {
    const int r = item.first + m;
    half_bits* to = sh.q + m * PITCH;
    float power = 0.0f;
    if (m < item.rows) {
      const int at = r / item.members * item.num_heads + item.own[r % item.members];
      power = stage_query<DIM>(item.q + at * item.dim, item.dim, to, lane);
    } else {
      for (int i = lane; i < DIM; i += 32) to[i] = 0;
    }
    if (lane == 0) sh.factor[m] = power * scale;
  }
}

// Probabilities of this warp's scores for the row tiles it shares in, and the sums of all rows.
__device__ __forceinline__ void soften(Shared& sh, Square (&s)[MINE],
                                       Running (&running)[ROW_TILES][2],
                                       float (&alpha)[ROW_TILES][2], float (&sum)[MINE][2],
                                       int tiles, int group, int share, int lane) {
#pragma unroll
  for (int t = 0; t < ROW_TILES; ++t) {
    if (t >= tiles) break;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = 16 * t + Mma::row(lane, i);
      float most = sh.most[0][row];
#pragma unroll
      for (int g = 1; g < GROUPS; ++g) most = fmaxf(most, sh.most[g][row]);
      const float shift = running[t][i].take(most, alpha[t][i]);
      if (t % SHARES != share) continue;
      Square& mine = s[t / SHARES];
      float& all = sum[t / SHARES][i];
      all = __fmaf_rn(all, alpha[t][i], exponentials(mine, i, shift));
      half_bits* p = sh.p + row * P_PITCH + 16 * group + 2 * Mma::pair(lane);
      *reinterpret_cast<unsigned*>(p) = half_pair(mine.e[2 * i], mine.e[2 * i + 1]);
      *reinterpret_cast<unsigned*>(p + 8) = half_pair(mine.e[4 + 2 * i], mine.e[5 + 2 * i]);
    }
  }
}

// out = out * alpha + p * values, for this warp's columns.
__device__ __forceinline__ void add_values(const Shared& sh, const half_bits* values,
                                           Square (&out)[ROW_TILES][COLUMNS],
                                           const float (&alpha)[ROW_TILES][2], int tiles, int warp,
                                           int lane) {
#pragma unroll
  for (int c = 0; c < COLUMNS; ++c) {
    const int column = 16 * (warp + c * WARPS);
    if (column >= DIM) break;
    Square fresh[ROW_TILES];
#pragma unroll
    for (int t = 0; t < ROW_TILES; ++t) fresh[t].clear();
#pragma unroll
    for (int k = 0; k < TILE; k += 16) {
      const Mma::B b = Mma::load_b_rows(values + k * PITCH + column, PITCH, lane);
#pragma unroll
      for (int t = 0; t < ROW_TILES; ++t)
        if (t < tiles)
          Mma::product_by_rows(fresh[t], Mma::load_a(sh.p + 16 * t * P_PITCH + k, P_PITCH, lane),
                               b);
    }
#pragma unroll
    for (int t = 0; t < ROW_TILES; ++t)
      if (t < tiles)
#pragma unroll
        for (int e = 0; e < 8; ++e)
          out[t][c].e[e] = __fmaf_rn(out[t][c].e[e], alpha[t][e >> 1 & 1], fresh[t].e[e]);
  }
}

// The block's piece is done: sums of rows, then everything to `partial` and `stats`.
__device__ __forceinline__ void write_piece(Shared& sh, const Square (&out)[ROW_TILES][COLUMNS],
                                            const Running (&running)[ROW_TILES][2],
                                            const float (&sum)[MINE][2], float* partial,
                                            float2* stats, int dim, int tiles, int group,
                                            int share, int warp, int lane) {
#pragma unroll
  for (int j = 0; j < MINE; ++j)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int t = j * SHARES + share;
      const float all = row_sum(sum[j][i]);
      if (t < tiles && Mma::pair(lane) == 0) sh.most[group][16 * t + Mma::row(lane, i)] = all;
    }
  __syncthreads();
#pragma unroll
  for (int t = 0; t < ROW_TILES; ++t) {
    if (t >= tiles) break;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = 16 * t + Mma::row(lane, i), slot = sh.slot[row];
      if (slot < 0) continue;
      if (warp == 0 && Mma::pair(lane) == 0) {
        float all = sh.most[0][row];
#pragma unroll
        for (int g = 1; g < GROUPS; ++g) all += sh.most[g][row];
        stats[slot] = float2{running[t][i].m, all};
      }
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int at = 16 * (warp + c * WARPS) + 8 * h + 2 * Mma::pair(lane);
          if (at < dim)
            *reinterpret_cast<float2*>(partial + static_cast<long long>(slot) * dim + at) =
                float2{out[t][c].e[4 * h + 2 * i], out[t][c].e[4 * h + 2 * i + 1]};
        }
    }
  }
}

__device__ __forceinline__ void keep_for_end(Shared& sh, int begin, int base, int pieces,
                                             int rows) {
  if (threadIdx.x != 0) return;
  sh.kept[0] = begin, sh.kept[1] = base, sh.kept[2] = pieces, sh.kept[3] = rows;
}

// Whether this block is the last of `count` to come; the ticket is 0 again then.
__device__ __forceinline__ bool is_last(Shared& sh, unsigned* ticket, int count) {
  __threadfence();  // what all threads wrote comes before
  __syncthreads();
  if (threadIdx.x == 0) sh.low[0] = atomicInc(ticket, count - 1) == count - 1u;
  __syncthreads();
  __threadfence();
  return sh.low[0];
}

// A warp adds the pieces of one row and normalises. Others wrote them: read past the first cache.
// A call, since its registers would be taken from those of the products.
__device__ __noinline__ void join_pieces(const float* partial, const float2* stats, int pieces,
                                            float* out, int dim) {
  constexpr int EACH = (DIM + 127) / 128;
  const int lane = threadIdx.x & 31;
  float most = -infinity(), total = 0.0f;
  for (int i = lane; i < pieces; i += 32) most = fmaxf(most, __ldcg(stats + i).x);
  for (int step = 16; step > 0; step >>= 1)
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, step));
  const float shift = most == -infinity() ? 0.0f : most;
  float4 sum[EACH] = {};
  for (int from = 0; from < pieces; from += 32) {
    const int count = min(32, pieces - from);
    const float2 stat = lane < count ? __ldcg(stats + from + lane) : float2{-infinity(), 0.0f};
    const float mine = exp2_fast(stat.x - shift);
    total = __fmaf_rn(mine, stat.y, total);
#pragma unroll 8
    for (int i = 0; i < count; ++i) {
      const float weight = __shfl_sync(0xffffffffu, mine, i);
      const float* part = partial + static_cast<long long>(from + i) * dim;
#pragma unroll
      for (int j = 0; j < EACH; ++j) {
        const int d = 128 * j + 4 * lane;
        if (d >= dim) break;
        const float4 v = __ldcg(reinterpret_cast<const float4*>(part + d));
        sum[j].x = __fmaf_rn(weight, v.x, sum[j].x), sum[j].y = __fmaf_rn(weight, v.y, sum[j].y);
        sum[j].z = __fmaf_rn(weight, v.z, sum[j].z), sum[j].w = __fmaf_rn(weight, v.w, sum[j].w);
      }
    }
  }
  for (int step = 16; step > 0; step >>= 1) total += __shfl_xor_sync(0xffffffffu, total, step);
#pragma unroll
  for (int j = 0; j < EACH; ++j) {
    const int d = 128 * j + 4 * lane;
    if (d < dim)
      *reinterpret_cast<float4*>(out + d) = float4{sum[j].x / total, sum[j].y / total,
                                                   sum[j].z / total, sum[j].w / total};
  }
}

}  // namespace voltapile

using namespace voltapile;

#if VP_ARCH == 750  // whose compiler would rather spill than have fewer blocks at once
#define VP_LEAST_BLOCKS , 1
#else
#define VP_LEAST_BLOCKS
#endif

// grid: (tokens or items * pieces, KV heads * parts of their rows)
// heads: int[kv_heads + 1 + H], where each KV head's query heads begin and end, then those
// plan: null, or of attention_plan.cu: int count, -, -, -, then (first token, tokens) of each item
// partial: float[tokens * H * stride, value_dim], stats: largest score and sum alike
// tickets: a zero for each token or item and blockIdx.y
extern "C" __global__ void __launch_bounds__(THREADS VP_LEAST_BLOCKS)
attention_decode(const float* q, const unsigned char* key_base, const unsigned char* value_base,
                 const int* table, const int* slots, const int* positions, const int* heads,
                 const int* plan, float* partial, float2* stats, unsigned* tickets,
                 float* attended, int first, int last, int parts,
                 int kv_heads, int num_heads, int key_dim, int value_dim, int key_kind,
                 int value_kind, int width, int pages, float scale, float cap, int window, int most,
                 int stride, int chunk, int pieces) {
  Shared& sh = *reinterpret_cast<Shared*>(shared);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int group = warp % GROUPS, share = warp / GROUPS, limit = width * PAGE;
  const int number = blockIdx.x / pieces, item = first + number;
  int begin = item, count = 0, base = number;
  if (plan != nullptr) {
    if (item >= plan[0]) return;
    begin = plan[4 + 2 * item], count = plan[5 + 2 * item], base = number * chunk;
  } else {
    count = tokens_of_item(slots, positions, item, first, last, chunk, limit, window, most);
    if (count == 0) return;
  }
  const int kv_head = blockIdx.y / parts, part = blockIdx.y % parts;
  const int* own = heads + kv_heads + 1 + heads[kv_head];
  const int members = heads[kv_head + 1] - heads[kv_head];
  const int rows = min(ROWS, count * members - part * ROWS), tiles = (rows + 15) / 16;
  if (rows <= 0) return;

  Span whole = span_of(positions[begin], limit, window, most);  // of all tokens together
  for (int t = 1; t < count; ++t) {
    const Span s = span_of(positions[begin + t], limit, window, most);
    whole.low = min(whole.low, s.low), whole.high = max(whole.high, s.high);
  }
  keep_for_end(sh, begin, base, whole.last() - whole.first() + 1, rows);
  const int piece = whole.first() + blockIdx.x % pieces;
  const int start = max(piece * whole.piece, whole.low / TILE * TILE);
  const int end = min((piece + 1) * whole.piece, whole.high);
  if (start >= end) return;
  const Cache keys{key_base, key_kind, key_dim}, values{value_base, value_kind, value_dim};
  const Pages where{table + static_cast<long long>(slots[begin]) * width, pages, kv_heads, kv_head,
                    width};
  Fetch<THREADS> fetch;
  int page = where.at(start);
  if (IS_ASYNC) {
    fetch_async<THREADS>(keys, page, start, whole.low, whole.high, sh.keys);
    commit_copies();
    fetch_async<THREADS>(values, page, start, whole.low, whole.high, sh.values);
    commit_copies();
  } else {
    fetch.read(keys, page, start, whole.low, whole.high);
  }

  const Rows mine{q + static_cast<long long>(begin) * num_heads * key_dim, positions + begin, own,
                  members, part * ROWS, rows, num_heads, key_dim};
  stage_rows(sh, mine, piece, base, stride, limit, window, most, scale);

  Square out[ROW_TILES][COLUMNS];
  Running running[ROW_TILES][2];
  float sum[MINE][2] = {}, alpha[ROW_TILES][2];
#pragma unroll
  for (int t = 0; t < ROW_TILES; ++t)
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) out[t][c].clear();
  half_bits* value_tile = IS_ASYNC ? sh.values : sh.keys;

  for (int p = start; p < end; p += TILE) {
    const int next = p + TILE < end ? where.at(p + TILE) : page;
    const bool is_first = p == start;  // its values are under way
    if (!IS_ASYNC) fetch.put(keys, sh.keys);
    else if (is_first) wait_for_copies<1>();
    else wait_for_copies<0>();
    __syncthreads();
    if (!IS_ASYNC) {
      fetch.read(values, page, p, whole.low, whole.high);
    } else if (!is_first) {
      fetch_async<THREADS>(values, page, p, whole.low, whole.high, sh.values);
      commit_copies();
    }
    Square scored[1][MINE], (&s)[MINE] = scored[0];
    scores(scored, sh.q + 16 * share * PITCH, 16 * SHARES, sh.keys + 16 * group * PITCH,
           (tiles - share + SHARES - 1) / SHARES, lane);
#pragma unroll
    for (int j = 0; j < MINE; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = 16 * (j * SHARES + share) + Mma::row(lane, i);
        if (row >= 16 * tiles) break;
        finish_scores(s[j], i, p + 16 * group, sh.low[row], sh.high[row], sh.factor[row], cap,
                      lane);
        const float larger = row_max(largest(s[j], i));
        if (Mma::pair(lane) == 0) sh.most[group][row] = larger;
      }
    __syncthreads();  // and the keys are done with
    if (IS_ASYNC) {
      if (p + TILE < end)
        fetch_async<THREADS>(keys, next, p + TILE, whole.low, whole.high, sh.keys);
      commit_copies();
    }
    soften(sh, s, running, alpha, sum, tiles, group, share, lane);
    if (IS_ASYNC) wait_for_copies<1>();
    else fetch.put(values, value_tile);
    __syncthreads();
    if (!IS_ASYNC && p + TILE < end) fetch.read(keys, next, p + TILE, whole.low, whole.high);
    add_values(sh, value_tile, out, alpha, tiles, warp, lane);
    if (!IS_ASYNC) __syncthreads();
    page = next;
  }
  __syncthreads();
  write_piece(sh, out, running, sum, partial, stats, value_dim, tiles, group, share, warp, lane);
  if (!is_last(sh, tickets + blockIdx.x / pieces * gridDim.y + blockIdx.y, sh.kept[2])) return;
  const int* lists = heads + blockIdx.y / parts;
  const int group_begin = lists[0], group_size = lists[1] - group_begin;
  const int token = sh.kept[0], origin = sh.kept[1], end_row = sh.kept[3];
  for (int m = warp; m < end_row; m += WARPS) {
    const int r = blockIdx.y % parts * ROWS + m, t = r / group_size;
    const int head = heads[kv_heads + 1 + group_begin + r % group_size];
    const Span s = span_of(positions[token + t], limit, window, most);
    const long long at = (static_cast<long long>(origin + t) * num_heads + head) * stride;
    join_pieces(partial + at * value_dim, stats + at, s.last() - s.first() + 1,
                attended + (static_cast<long long>(token + t) * num_heads + head) * value_dim,
                value_dim);
  }
}
