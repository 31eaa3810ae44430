// Attention of few rows over long contexts: a block takes one piece of the positions for one KV
// head and all its query heads, of up to `chunk` tokens of a slot, so that keys and values are read
// once. Its warps are strands: warp w takes positions 16 w to 16 w + 15 of each page, through
// scores and sums of values, and meets the others at the end (attention_join.cuh). From sm_90 on a
// cluster of blocks takes a piece (attention_blocks.cuh), or one block all of it: with few tokens
// for latency, with many for less overhead; the bits are the same. Where a token has several
// pieces, what they give goes to `partial`, and whoever writes the last of a row's adds them.
// -D HEAD_DIM, KIND, ROW_TILES (16 rows each), CLUSTER
#include "attention_blocks.cuh"
#include "attention_items.cuh"
#include "grid.cuh"

namespace voltapile {

constexpr int LEAST_BLOCKS =  // of a processor
    !COPIES || DIM > 128 || ROW_TILES > 1 ? 1 : TURNS == 1 ? 3 : 2;

#ifndef VP_EMULATION
extern __shared__ __align__(128) unsigned char shared[];
#endif

struct Shared {
  union {
    Steps strands[STRANDS];
    struct {
      Ends ends;
      Inbox inbox;
    };
  };
  __align__(16) half_bits q[ROWS * PITCH];
  Row rows[ROWS];
  int query[ROWS];   // of a row, counted in heads of all tokens
  int pieces[ROWS];  // of a row, where there are several
  Source from;
  Bell bell;                  // of the inbox
  Bell bells[STRANDS][Steps::BELLS];
  KeptSums<(TURNS > 1)> kept[TURNS > 1 ? STRANDS : 1];
  int used;  // kept for the end, so that no register holds it meanwhile
};

// What each row sees, and where its piece goes. all: what they see together.
__device__ __forceinline__ void place_rows(Shared& sh, const Rows& mine, const Item& item,
                                           const Span& all, const Places& places,
                                           const int* positions, int piece, int num_heads,
                                           int limit, int window, int most) {
  static_assert(ROWS <= THREADS);
  const int m = threadIdx.x;
  if (m < ROWS) {
    Row row{0.0f, 0, 0, -1};
    if (m < mine.used) {
      int t = item.begin, head = mine.first + m;
#pragma unroll 1
      for (; head >= mine.members; head -= mine.members) ++t;
      const Span s = item.count == 1 ? all : span_of(positions[t], limit, window, most);
      const int query = t * num_heads + mine.head(head);
      row.low = s.low, row.high = s.high;
      if (all.first == all.last)
        row.slot = query;
      else if (piece >= s.first && piece <= s.last)
        row.slot = places.of(query) + piece - s.first;
      sh.query[m] = query, sh.pieces[m] = s.last - s.first + 1;
    }
    sh.rows[m] = row;
  }
  clear_quads(sh.q + mine.used * PITCH, (ROWS - mine.used) * (PITCH / 8), threadIdx.x, THREADS);
}

// Two rows of queries, `STRANDS` apart, that a warp has on their way together.
struct TwoRows {
  unsigned query[2];
  Query<DIM> held[2];

  __device__ __forceinline__ void find(const Shared& sh, int m) {
#pragma unroll
    for (int i = 0; i < 2; ++i) query[i] = sh.query[min(m + i * STRANDS, sh.used - 1)];
  }
  __device__ __forceinline__ void read(const float* q, int dim, int lane) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      held[i].read(q + query[i] * width_of(dim), width_of(dim), lane);
  }
  __device__ __forceinline__ void stage(Shared& sh, int m, float scale, int lane) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = m + i * STRANDS;
      if (row >= sh.used) break;
      const float power = held[i].template stage<KvTile::IN_FOURS>(sh.q + row * PITCH, lane);
      if (lane == 0) sh.rows[row].factor = power * scale;
    }
  }
};

// Those behind the first two of each warp.
__device__ __forceinline__ void stage_more(Shared& sh, const float* q, int dim, float scale,
                                           int warp, int lane) {
#pragma unroll 1
  for (int m = warp + 2 * STRANDS; m < sh.used; m += 2 * STRANDS) {
    TwoRows rows;
    rows.find(sh, m);
    rows.read(q, dim, lane);
    rows.stage(sh, m, scale, lane);
  }
}

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

// A strand's whole way.
__device__ __forceinline__ void go_through(Sums& sums, Shared& sh, Steps::State& state, float cap,
                                           int warp, int lane) {
  Steps& steps = sh.strands[warp];
  const Source& from = sh.from;
  const int tiles = (sh.used + 15) / 16;
  Sums share;
  Sums& mine = TURNS > 1 ? share : sums;
  clear(sums);
  clear(mine);
  bool is_kept = false;
  Walk at(from);
  while (!at.is_done(from)) {
    Square s[ROW_TILES];
    float alpha[ROW_TILES][2];
    const int turn = at.turn;
    score(s, sh.q, steps.keys(from, state, at.p, lane), tiles, lane);
    steps.end_keys(from, state, lane);
    soften(s, mine, alpha, sh.rows, at.p, cap, sh.used, lane);
    add_values(mine, s, steps.values(from, state, at.p, lane), alpha, tiles, lane);
    steps.end_values(from, state, lane);
    at.go_on(from);
    if (TURNS > 1 && at.turn != turn) {
      join_share(sums, share);
      clear(share);
      if (turn < TURNS / 2 && at.turn >= TURNS / 2) {
        sh.kept[warp].keep(sums, lane);
        clear(sums);
        is_kept = true;
      }
    }
  }
  if (TURNS > 1 && is_kept) sh.kept[warp].join(sums, lane);
}

// Of the rows whose piece this block wrote, those whose last piece that was: joins their pieces and
// normalises. Tickets: of rows; each is 0 again then. A call, since its registers would be taken
// from those of the products.
__device__ __noinline__ void join_rows(Shared& sh, unsigned* tickets, Member own, Target to,
                                       Places places) {
  __syncthreads();
  const int row = threadIdx.x;
  if (row < sh.used) {
    const bool is_own = row % HALF % own.blocks == own.rank && sh.rows[row].slot >= 0;
    const unsigned others = sh.pieces[row] - 1;
    if (!is_own || take_ticket(tickets + row, others) != others) sh.pieces[row] = 0;
  }
  __syncthreads();
  const int wide = width_of(to.dim) / 4;
#pragma unroll 1
  for (int at = threadIdx.x; at < sh.used * wide; at += THREADS) {
    const int m = at / wide, d = at % wide * 4, query = sh.query[m], place = places.of(query);
    if (sh.pieces[m] == 0) continue;
    const Part all = join_pieces(to.partial + place * (4 * wide) + d, to.stats + place,
                                 sh.pieces[m], 4 * wide);
    write_result(to, all, query, d);
  }
}

}  // namespace voltapile

using namespace voltapile;

// grid: (tokens or items * pieces * BLOCKS, KV heads * parts of their rows)
// heads: int[kv_heads + 1 + H], where each KV head's query heads begin and end, then those
// members: not 0 where each KV head has that many query heads, in their order; spares reading those
// plan: null, or of attention_plan.cu: int count, -, -, -, then (first token, tokens) of each item
// partial: float[tokens * H * stride, value_dim], stats: largest score and sum alike
// tickets: zeros, ROWS for each token or item and blockIdx.y
// weights: null, or float[tokens * H] (Weighing)
// cap: of KIND 3 alone
// What was there when the step began (slots, positions, tables, older keys and values) is read
// before the kernel before this one has ended.
extern "C" __global__ void VP_CLUSTER __launch_bounds__(THREADS, LEAST_BLOCKS)
attention_decode(const float* q, const unsigned char* key_base, const unsigned char* value_base,
                 const int* table, const int* slots, const int* positions, const int* heads,
                 const int* plan, float* partial, float2* stats, unsigned* tickets,
                 float* attended, float* weights, int first, int last, int parts, int kv_heads,
                 int num_heads, int key_dim, int value_dim, int key_kind, int value_kind,
                 int width, int pages, float scale, float cap, int window, int most, int stride,
                 int chunk, int pieces, int members) {
  Shared& sh = *reinterpret_cast<Shared*>(own_memory(shared));
  const int lane = threadIdx.x & 31, limit = width * PAGE;
  const int warp = __shfl_sync(WHOLE_WARP, threadIdx.x >> 5, 0);  // known to be one number
  const unsigned rank = blockIdx.x % BLOCKS, one = blockIdx.x / BLOCKS;
  const int number = pieces == 1 ? one : one / pieces, index = first + number;
  const int kv_head = parts == 1 ? blockIdx.y : blockIdx.y / parts;
  const bool is_planned = plan != nullptr;
  const bool is_even = members > 0;
  const int own_begin = is_even ? kv_head * members : heads[kv_head];  // asked for with the rest
  const int own_end = is_even ? own_begin + members : heads[kv_head + 1];
  if (is_planned) {
    grid_wait();
    if (index >= plan[0]) return;
  }
  const Item item = is_planned ? Item{plan[4 + 2 * index], plan[5 + 2 * index], 1 << 30}
                               : item_at(slots, positions, index, first, last, chunk, limit,
                                         window, most);
  Rows mine{is_even ? nullptr : heads + kv_heads + 1 + own_begin, own_begin, own_end - own_begin,
            static_cast<int>(blockIdx.y - kv_head * parts) * ROWS};
  mine.used = min(ROWS, item.count * mine.members - mine.first);
  if (mine.used <= 0) return;
  const Span all = span_of_item(item, positions, limit, window, most);
  const int piece = all.first + one - number * pieces;
  const int least = all.low / (PAGE * SHARES) * (PAGE * SHARES);
  const int start = max(piece * all.piece, least), end = min((piece + 1) * all.piece, all.high);
  if (start + begin_of(rank) >= end) return;

  const Pages where{table + static_cast<long long>(slots[item.begin]) * width, pages, kv_heads,
                    kv_head, width};
  const Source from{{{key_base, key_kind, key_dim}, {value_base, value_kind, value_dim}}, where,
                    all.low, all.high, start + begin_of(rank), end};
  Steps::State state(from, sh.bells[warp], lane);
  if (threadIdx.x == 0) {
    open_inbox(&sh.bell);
    sh.from = from;
    sh.used = mine.used;
  }
  __syncthreads();
  sh.strands[warp].begin(sh.from, state, item.fresh, lane);
  const Places places{((is_planned ? number * chunk : number) - item.begin) * num_heads * stride,
                      stride};
  const bool is_only = all.first == all.last;
  place_rows(sh, mine, item, all, places, positions, piece, num_heads, limit, window, most);
  __syncthreads();
  TwoRows queries;
  queries.find(sh, warp);
  grid_wait();
  queries.read(q, key_dim, lane);
  sh.strands[warp].go_on(sh.from, state, lane);
  queries.stage(sh, warp, scale, lane);
  stage_more(sh, q, key_dim, scale, warp, lane);
  __syncthreads();
  grid_launch();  // not before queries are here, which a product's weights would hold up

  Sums sums;
  go_through(sums, sh, state, cap, warp, lane);
  const Target to{attended, partial, stats, is_only, value_dim, {weights, positions, num_heads}};
  const Member own{&sh.bell, static_cast<int>(rank), blocks_of(end - start)};
  write_piece(sh.ends, sh.inbox, sh.rows, sums, sh.used, own, to, warp, lane);
  if (!is_only)
    join_rows(sh, tickets + (number * gridDim.y + blockIdx.y) * ROWS, own, to, places);
}
