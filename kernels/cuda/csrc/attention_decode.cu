// Attention of few rows over long contexts: a block takes one piece of the positions for one KV
// head and all its query heads, of up to `chunk` tokens of a slot, so that keys and values are read
// once. Its warps are strands: warp w takes positions 16 w to 16 w + 15 of each page, through scores
// and sums of values, and meets the others at the end (attention_join.cuh). What a piece gives goes
// to `partial`; the block that is the last of all pieces adds them.
// -D HEAD_DIM, KIND, ROW_TILES (16 rows each), PIECE
#include "attention_join.cuh"
#include "grid.cuh"

namespace voltapile {

constexpr int LEAST_BLOCKS = COPIES && DIM <= 128 && ROW_TILES == 1 ? 4 : 1;  // of a processor

#ifndef VP_EMULATION
extern __shared__ __align__(16) unsigned char shared[];
#endif

// The tokens that a block takes together.
struct Item {
  int begin, count;
  int fresh;  // first position that this step stores for their slot
};

struct Shared {
  union {
    Steps strands[STRANDS];
    Ends ends;
    float weights[STRANDS][MOST_PIECES + 1];
  };
  __align__(16) half_bits q[ROWS * PITCH];
  Row rows[ROWS];
  Item item;  // kept for the end, so that no register holds it meanwhile
  int base, pieces, used, answer;
};

// Tokens from t on that a block takes together; none if another token's block takes t. They are
// neighbours of one slot with pieces of one length, cut after each `chunk` tokens of the slot.
__device__ __forceinline__ Item item_at(const int* slots, const int* positions, int t, int first,
                                        int last, int chunk, int limit, int window, int most) {
  int start = t;
  while (start > first && slots[start - 1] == slots[t]) --start;
  const int piece = span_of(positions[t], limit, window, most).piece;
  if ((t - start) % chunk != 0 &&
      span_of(positions[t - 1], limit, window, most).piece == piece)
    return {t, 0, 0};
  int count = 1;
  while (t + count < last && slots[t + count] == slots[t] && (t + count - start) % chunk != 0 &&
         span_of(positions[t + count], limit, window, most).piece == piece)
    ++count;
  return {t, count, positions[start]};
}

// Query head of the block's row r, and its token in the item.
struct Rows {
  const int* own;  // the KV head's query heads
  int members, first;
  __device__ int head(int m) const { return own[(first + m) % members]; }
  __device__ int token(int m) const { return (first + m) / members; }
};

// What each row sees, and where its piece goes.
__device__ __forceinline__ void place_rows(Shared& sh, const Rows& mine, const int* positions,
                                           int piece, int num_heads, int stride, int limit,
                                           int window, int most) {
  for (int m = threadIdx.x; m < ROWS; m += THREADS) {
    Row row{0.0f, 0, 0, -1};
    if (m < sh.used) {
      const int t = mine.token(m);
      const Span s = span_of(positions[sh.item.begin + t], limit, window, most);
      row.low = s.low, row.high = s.high;
      if (sh.pieces == 1)
        row.slot = (sh.item.begin + t) * num_heads + mine.head(m);
      else if (piece >= s.first() && piece <= s.last())
        row.slot = ((sh.base + t) * num_heads + mine.head(m)) * stride + piece - s.first();
    }
    sh.rows[m] = row;
  }
}

__device__ __forceinline__ void stage_queries(Shared& sh, const Rows& mine, const float* q,
                                              int num_heads, int dim, float scale, int warp,
                                              int lane) {
  for (int m = warp; m < (sh.used + 15) / 16 * 16; m += STRANDS) {
    half_bits* to = sh.q + m * PITCH;
    float power = 0.0f;
    if (m < sh.used) {
      const long long at = static_cast<long long>(sh.item.begin + mine.token(m)) * num_heads;
      power = stage_query<DIM, KvTile::IN_FOURS>(q + (at + mine.head(m)) * dim, dim, to, lane);
    } else {
      for (int i = lane; i < DIM; i += 32) to[i] = 0;
    }
    if (lane == 0) sh.rows[m].factor = power * scale;
  }
}

// s[t] = 16 queries times STEP keys, for t < tiles.
__device__ __forceinline__ void score(Square (&s)[ROW_TILES], const half_bits* q,
                                      const KvTile& keys, int tiles, int lane) {
#pragma unroll
  for (int start = 0; start < DIM; start += CHAIN) {
    Square part[ROW_TILES];
#pragma unroll
    for (int t = 0; t < ROW_TILES; ++t) part[t].clear();
#pragma unroll
    for (int k = start; k < min(DIM, start + CHAIN); k += KvTile::WIDTH) {
      Mma::B b[KvTile::WIDTH / 16];
      keys.keys(b, k, lane);
#pragma unroll
      for (int j = 0; j < KvTile::WIDTH / 16; ++j)
#pragma unroll
        for (int t = 0; t < ROW_TILES; ++t)
          if (t < tiles)
            Mma::product(part[t], Mma::load_a(q + 16 * t * PITCH + k + 16 * j, PITCH, lane), b[j]);
    }
#pragma unroll
    for (int t = 0; t < ROW_TILES; ++t)
#pragma unroll
      for (int e = 0; e < 8; ++e)
        s[t].e[e] = start == 0 ? part[t].e[e] : s[t].e[e] + part[t].e[e];
  }
}

// Scores of STEP positions from p on become probabilities; `alpha`: what the sums of values so far
// are to be multiplied by. Returns whether that changes any.
__device__ __forceinline__ bool soften(Square (&s)[ROW_TILES], Sums& sums,
                                       float (&alpha)[ROW_TILES][2], const Row* rows, int p,
                                       float cap, int tiles, int lane) {
  bool moves = false;
#pragma unroll
  for (int t = 0; t < ROW_TILES; ++t)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      alpha[t][i] = 1.0f;
      if (t >= tiles) continue;
      const Row row = rows[16 * t + Mma::row(lane, i)];
      finish_scores(s[t], i, p, row.low, row.high, row.factor, cap, lane);
      const float shift = sums.running[t][i].take(row_max(largest(s[t], i)), alpha[t][i]);
      sums.sum[t][i] = __fmaf_rn(sums.sum[t][i], alpha[t][i], exponentials(s[t], i, shift));
      moves |= alpha[t][i] != 1.0f;
    }
  return __ballot_sync(WHOLE_WARP, moves) != 0;
}

__device__ __forceinline__ void add_values(Sums& sums, const Square (&s)[ROW_TILES],
                                           const KvTile& values,
                                           const float (&alpha)[ROW_TILES][2], bool moves,
                                           int tiles, int lane) {
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
        if (t >= tiles) continue;
        Square& out = sums.out[t][c + j];
        Square fresh;
        fresh.clear();
        if (TRUNCATES) Mma::product_by_rows(fresh, p[t], b[j]);
        if (TRUNCATES || moves)
#pragma unroll
          for (int e = 0; e < 8; ++e)
            out.e[e] = TRUNCATES ? __fmaf_rn(out.e[e], alpha[t][e >> 1 & 1], fresh.e[e])
                                 : __fmul_rn(out.e[e], alpha[t][e >> 1 & 1]);
        if (!TRUNCATES) Mma::product_by_rows(out, p[t], b[j]);
      }
  }
}

// The block that came last adds the pieces of all rows and normalises. A call, since its registers
// would be taken from those of the products.
__device__ __noinline__ void join_pieces(Shared& sh, Rows mine, const int* positions,
                                         const float* partial, const float2* stats,
                                         float* attended, int num_heads, int dim, int stride,
                                         int limit, int window, int most) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const auto pieces_of = [&](int m) {
    const Span s = span_of(positions[sh.item.begin + mine.token(m)], limit, window, most);
    return s.last() - s.first() + 1;
  };
  const auto place_of = [&](int m) {
    return ((sh.base + mine.token(m)) * static_cast<long long>(num_heads) + mine.head(m)) * stride;
  };
  for (int first = 0; first < sh.used; first += STRANDS) {
    __syncthreads();
    if (first + warp < sh.used)
      weigh_pieces(sh.weights[warp], stats + place_of(first + warp), pieces_of(first + warp), lane);
    __syncthreads();
    for (int at = threadIdx.x; at < STRANDS * dim / 4; at += THREADS) {
      const int r = at / (dim / 4), d = at % (dim / 4) * 4, m = first + r;
      if (m >= sh.used) break;
      const float4 sum =
          add_pieces(sh.weights[r], partial + place_of(m) * dim + d, pieces_of(m), dim);
      const long long to = (sh.item.begin + mine.token(m)) * static_cast<long long>(num_heads);
      *reinterpret_cast<float4*>(attended + (to + mine.head(m)) * dim + d) =
          divided(sum, sh.weights[r][MOST_PIECES]);
    }
  }
}

}  // namespace voltapile

using namespace voltapile;

// grid: (tokens or items * pieces, KV heads * parts of their rows)
// heads: int[kv_heads + 1 + H], where each KV head's query heads begin and end, then those
// plan: null, or of attention_plan.cu: int count, -, -, -, then (first token, tokens) of each item
// partial: float[tokens * H * stride, value_dim], stats: largest score and sum alike
// tickets: a zero for each token or item and blockIdx.y
// What was there when the step began (slots, positions, tables, older keys and values) is read
// before the kernel before this one has ended.
extern "C" __global__ void __launch_bounds__(THREADS, LEAST_BLOCKS)
attention_decode(const float* q, const unsigned char* key_base, const unsigned char* value_base,
                 const int* table, const int* slots, const int* positions, const int* heads,
                 const int* plan, float* partial, float2* stats, unsigned* tickets,
                 float* attended, int first, int last, int parts, int kv_heads, int num_heads,
                 int key_dim, int value_dim, int key_kind, int value_kind, int width, int pages,
                 float scale, float cap, int window, int most, int stride, int chunk, int pieces) {
  Shared& sh = *reinterpret_cast<Shared*>(shared);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, limit = width * PAGE;
  const int number = blockIdx.x / pieces, index = first + number;
  const bool is_planned = plan != nullptr;
  grid_launch();
  if (is_planned) {
    grid_wait();
    if (index >= plan[0]) return;
  }
  const Item item = is_planned ? Item{plan[4 + 2 * index], plan[5 + 2 * index], 0}
                               : item_at(slots, positions, index, first, last, chunk, limit,
                                         window, most);
  const int kv_head = blockIdx.y / parts, part = blockIdx.y % parts;
  const Rows mine{heads + kv_heads + 1 + heads[kv_head], heads[kv_head + 1] - heads[kv_head],
                  part * ROWS};
  const int used = min(ROWS, item.count * mine.members - part * ROWS), tiles = (used + 15) / 16;
  if (used <= 0) return;
  Span whole = span_of(positions[item.begin], limit, window, most);  // of all tokens together
  for (int t = 1; t < item.count; ++t) {
    const Span s = span_of(positions[item.begin + t], limit, window, most);
    whole.low = min(whole.low, s.low), whole.high = max(whole.high, s.high);
  }
  const int piece = whole.first() + blockIdx.x % pieces;
  const int start = max(piece * whole.piece, whole.low / PAGE * PAGE);
  const int end = min((piece + 1) * whole.piece, whole.high);
  if (start >= end) return;

  Steps& steps = sh.strands[warp];
  Steps::State state;
  const Pages where{table + static_cast<long long>(slots[item.begin]) * width, pages, kv_heads,
                    kv_head, width};
  const Source from{{key_base, key_kind, key_dim}, {value_base, value_kind, value_dim}, where,
                    whole.low, whole.high, start + STEP * warp, end};
  steps.begin(from, state, item.fresh, true, lane);
  if (threadIdx.x == 0) {
    sh.item = item, sh.used = used;
    sh.base = is_planned ? number * chunk : number;
    sh.pieces = whole.last() - whole.first() + 1;
  }
  __syncthreads();
  place_rows(sh, mine, positions, piece, num_heads, stride, limit, window, most);
  __syncthreads();
  grid_wait();
  steps.begin(from, state, item.fresh, false, lane);
  stage_queries(sh, mine, q, num_heads, key_dim, scale, warp, lane);
  __syncthreads();

  Sums sums;
#pragma unroll
  for (int t = 0; t < ROW_TILES; ++t)
#pragma unroll
    for (int c = 0; c < DIM / 16; ++c) sums.out[t][c].clear();
  for (int p = from.first; p < end; p += PAGE) {
    Square s[ROW_TILES];
    float alpha[ROW_TILES][2];
    score(s, sh.q, steps.keys(from, state, p, lane), tiles, lane);
    steps.end_keys(from, state, p, lane);
    const bool moves = soften(s, sums, alpha, sh.rows, p, cap, tiles, lane);
    add_values(sums, s, steps.values(from, state, p, lane), alpha, moves, tiles, lane);
    steps.end_values(from, state, p, lane);
  }
  write_piece(sh.ends, sh.rows, sums, sh.used, sh.pieces == 1, attended, partial, stats, value_dim,
              warp, lane);
  if (sh.pieces == 1) return;
  if (is_last(sh.answer, tickets + number * gridDim.y + blockIdx.y, sh.pieces))
    join_pieces(sh, mine, positions, partial, stats, attended, num_heads, value_dim, stride, limit,
                window, most);
}
