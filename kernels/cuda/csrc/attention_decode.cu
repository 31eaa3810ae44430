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
#include "attention_steps.cuh"
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

// What a launch is told.
struct Call {
  const float* q;
  Cache caches[2];
  const int *table, *slots, *positions, *heads, *plan;
  float* partial;
  float2* stats;
  unsigned* tickets;
  float *attended, *weights;
  int first, last, parts, kv_heads, num_heads, width, pages;
  float scale, cap;
  int window, most, stride, chunk, pieces, members;
};

constexpr bool LOOPS = TURNS > 1;  // blocks take one piece after another

// The `one`-th of the launch. Tokens are looked at together where blocks loop: those of a single
// piece, most likely all, then cost no turn more.
__device__ __forceinline__ Errand find_errand(const Call& all, int one) {
  if (LOOPS && all.plan == nullptr)
    return errand_of(all.slots + all.first, all.positions + all.first, all.last - all.first, one,
                     all.chunk, all.pieces);
  const int number = all.pieces == 1 ? one : one / all.pieces;
  return {number, one - number * all.pieces, -1};
}

struct Piece {
  Places places;
  int number;  // of its token or item
  int positions;
  bool is_only;
};

// What a block does when its queries are there.
__device__ __forceinline__ void finish(Shared& sh, const Call& all, Steps::State& state,
                                       const Piece& piece, int warp, int lane) {
  const int rank = blockIdx.x % BLOCKS;
  Sums sums;
  go_through(sums, sh, state, all.cap, warp, lane);
  const Target to{all.attended, all.partial, all.stats, piece.is_only, all.caches[1].dim,
                  {all.weights, all.positions, all.num_heads}};
  const Member own{&sh.bell, rank, blocks_of(piece.positions)};
  write_piece(sh.ends, sh.inbox, sh.rows, sums, sh.used, own, to, warp, lane);
  if (!piece.is_only)
    join_rows(sh, all.tickets + (piece.number * gridDim.y + blockIdx.y) * ROWS, own, to,
              piece.places);
  if (!LOOPS) return;
  state.end(lane);
  order_copies();  // of the next piece, behind what lies where they go
  __syncthreads();
}

// A piece, if anybody sees any of it. All threads of the block return alike.
__device__ __forceinline__ void take(Shared& sh, const Call& all, const Errand& errand, int warp,
                                     int lane) {
  const int limit = all.width * PAGE, window = all.window, most = all.most;
  const unsigned rank = blockIdx.x % BLOCKS;
  const int number = errand.number, index = all.first + number;
  const int kv_head = all.parts == 1 ? blockIdx.y : blockIdx.y / all.parts;
  const bool is_planned = all.plan != nullptr, is_even = all.members > 0;
  const int own_begin = is_even ? kv_head * all.members : all.heads[kv_head];  // with the rest
  const int own_end = is_even ? own_begin + all.members : all.heads[kv_head + 1];
  if (is_planned) {
    grid_wait();
    if (index >= all.plan[0]) return;
  }
  const Item item = is_planned
                        ? Item{all.plan[4 + 2 * index], all.plan[5 + 2 * index], 1 << 30}
                        : item_at(all.slots, all.positions, index, all.first, all.last, all.chunk,
                                  limit, window, most);
  Rows mine{is_even ? nullptr : all.heads + all.kv_heads + 1 + own_begin, own_begin,
            own_end - own_begin, static_cast<int>(blockIdx.y - kv_head * all.parts) * ROWS};
  mine.used = min(ROWS, item.count * mine.members - mine.first);
  if (mine.used <= 0) return;
  const Span seen = span_of_item(item, all.positions, limit, window, most);
  const int piece = seen.first + errand.piece;
  const int least = seen.low / (PAGE * SHARES) * (PAGE * SHARES);
  const int start = max(piece * seen.piece, least), end = min((piece + 1) * seen.piece, seen.high);
  if (start + begin_of(rank) >= end) return;

  const int slot = errand.slot >= 0 ? errand.slot : all.slots[item.begin];
  const Pages where{all.table + static_cast<long long>(slot) * all.width, all.pages, all.kv_heads,
                    kv_head, all.width};
  const Source from{{all.caches[0], all.caches[1]}, where, seen.low, seen.high,
                    start + begin_of(rank), end};
  Steps::State state(from, sh.bells[warp], lane);
  if (threadIdx.x == 0) {
    open_inbox(&sh.bell);
    sh.from = from;
    sh.used = mine.used;
  }
  __syncthreads();
  sh.strands[warp].begin(sh.from, state, item.fresh, lane);
  const int offset = (is_planned ? number * all.chunk : number) - item.begin;
  const Places places{offset * all.num_heads * all.stride, all.stride};
  place_rows(sh, mine, item, seen, places, all.positions, piece, all.num_heads, limit, window,
             most);
  __syncthreads();
  TwoRows queries;
  queries.find(sh, warp);
  grid_wait();
  queries.read(all.q, all.caches[0].dim, lane);
  sh.strands[warp].go_on(sh.from, state, lane);
  queries.stage(sh, warp, all.scale, lane);
  stage_more(sh, all.q, all.caches[0].dim, all.scale, warp, lane);
  __syncthreads();
  finish(sh, all, state, Piece{places, number, end - start, seen.first == seen.last}, warp, lane);
}

}  // namespace voltapile

using namespace voltapile;

// grid: (tokens or items * pieces * BLOCKS, KV heads * parts of their rows); where a block takes
// whole pieces, there may be fewer of them: then it takes each so many-th
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
  const int lane = threadIdx.x & 31;
  const int warp = __shfl_sync(WHOLE_WARP, threadIdx.x >> 5, 0);  // known to be one number
  grid_launch();
  const Call all{q,        {{key_base, key_kind, key_dim}, {value_base, value_kind, value_dim}},
                 table,    slots,     positions, heads, plan,  partial, stats,  tickets,
                 attended, weights,   first,     last,  parts, kv_heads, num_heads, width,
                 pages,    scale,     cap,       window, most, stride,  chunk,  pieces,
                 members};
  if (!LOOPS) return take(sh, all, find_errand(all, blockIdx.x / BLOCKS), warp, lane);
#pragma unroll 1
  for (int one = blockIdx.x; one < (last - first) * pieces; one += gridDim.x) {
    const Errand errand = find_errand(all, one);
    if (errand.number < 0) return;
    take(sh, all, errand, warp, lane);
  }
}
