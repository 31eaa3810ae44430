// Attention over paged keys and values. Included by vec_kernels.h.
//
// A row is one query head of one token. Positions are cut at absolute multiples into pieces
// (about 256 positions); a piece gives a Node (max, sum, weighted values) per row, and Nodes are
// merged along the binary tree over piece numbers, where absent ones change nothing. So a row's
// bits depend on its own range of positions alone: not on the rows computed beside it, nor on
// how threads shared the pieces. Rows of neighbouring tokens of a slot and of the heads of one
// kv head form an Item, and share every load of keys and values.
#pragma once

namespace voltapile {
namespace VOLTAPILE_ISA {
namespace {

// A thread's memory: queries, scores, the Partial of an Item begun by an earlier rank (0), and
// that of the Item in work (1).
struct Local {
  float* q;
  float* scores;
  Partial* partial[2];

  Local(std::uint8_t* base, const AttentionArgs& args, const Shape& shape) {
    q = reinterpret_cast<float*>(base);
    scores = q + args.cache.key_dim * kMaxRows;
    base += bytes(args.cache, shape) - 2 * Partial::bytes(shape);
    partial[0] = reinterpret_cast<Partial*>(base);
    partial[1] = reinterpret_cast<Partial*>(base + Partial::bytes(shape));
  }
  static std::int64_t bytes(const KvLayout& cache, const Shape& shape) {
    const std::int64_t floats =
        cache.key_dim * kMaxRows + shape.max_rows * shape.piece_pitch;
    return ceil_div(floats * 4, 64) * 64 + 2 * Partial::bytes(shape);
  }
};

// --- items ------------------------------------------------------------------------------------

// Positions [first, last] that a token sees.
struct Range {
  std::int64_t first, last;
};

inline Range seen(const AttentionArgs& args, std::int64_t token) {
  const std::int64_t last = args.at.positions[token];
  const std::int64_t first = args.window > 0 ? last - args.window + 1 : 0;
  return {first > 0 ? first : 0, last};
}

// Neighbouring tokens of one slot, and the pieces that they see.
struct Tile {
  std::int64_t token, count, slot;
  Range range;              // of all of them
  std::int64_t begin, end;  // pieces
};

inline Tile next_tile(const AttentionArgs& args, const Shape& shape, std::int64_t token,
                      std::int64_t max_tokens) {
  Tile tile{token, 0, args.at.slots[token], seen(args, token), 0, 0};
  while (token < args.at.tokens && tile.count < max_tokens && args.at.slots[token] == tile.slot) {
    const Range range = seen(args, token);
    if (range.first < tile.range.first) tile.range.first = range.first;
    if (range.last > tile.range.last) tile.range.last = range.last;
    ++tile.count;
    ++token;
  }
  tile.begin = tile.range.first / shape.piece_tokens;
  tile.end = tile.range.last / shape.piece_tokens + 1;
  return tile;
}

struct Item {
  Tile tile;
  HeadGroup group;
  std::int64_t number;
  std::int64_t rows() const { return tile.count * group.count; }
};

// Copies the scaled queries of an item to [dim][kMaxRows].
inline void pack_queries(const AttentionArgs& args, const Item& item, float* q) {
  const std::int64_t dim = args.cache.key_dim;
  for (std::int64_t r = 0; r < item.rows(); ++r) {
    const std::int64_t token = item.tile.token + r / item.group.count;
    const std::int64_t head = item.group.heads[r % item.group.count];
    const float* x = args.q + (token * args.heads + head) * dim;
    for (std::int64_t d = 0; d < dim; ++d) q[d * kMaxRows + r] = x[d] * args.scale;
  }
}

// --- one piece --------------------------------------------------------------------------------

inline std::int64_t clamp(std::int64_t x, std::int64_t high) {
  return x < 0 ? 0 : x > high ? high : x;
}

// Scores of positions that a row does not see become -inf; then max, exp and sum.
inline void soften(const AttentionArgs& args, const Shape& shape, Range range, std::int64_t piece,
                   std::int64_t pages, float* row, float* max, float* sum) {
  const std::int64_t pitch = args.cache.pitch, page_tokens = args.cache.page_tokens;
  for (std::int64_t page = 0; page < pages; ++page) {
    const std::int64_t start = piece * shape.piece_tokens + page * page_tokens;
    const std::int64_t a = clamp(range.first - start, page_tokens);
    const std::int64_t b = clamp(range.last + 1 - start, page_tokens);
    float* x = row + page * pitch;
    for (std::int64_t n = 0; n < a; ++n) x[n] = -__builtin_inff();
    for (std::int64_t n = b > a ? b : a; n < pitch; ++n) x[n] = -__builtin_inff();
  }
  Vec top = splat(-__builtin_inff());
  for (std::int64_t n = 0; n < pages * pitch; n += W) {
    Vec x = load(row + n);
    if (args.softcap > 0.0f) {
      // tanh(y) = 1 - 2 / (e^2y + 1)
      const Vec e = exp_vec(x * splat(2.0f / args.softcap));
      const Vec capped = splat(args.softcap) * (splat(1.0f) - splat(2.0f) / (e + splat(1.0f)));
      x = x == splat(-__builtin_inff()) ? x : capped;
      store(row + n, x);
    }
    top = top > x ? top : x;
  }
  *max = max_lanes(top);
  const bool empty = range.first >= (piece + 1) * shape.piece_tokens ||
                     range.last < piece * shape.piece_tokens;
  const Vec tops = splat(empty ? 0.0f : *max);
  Vec total = splat(0.0f);
  for (std::int64_t n = 0; n < pages * pitch; n += W) {
    const Vec p = exp_vec(load(row + n) - tops);
    store(row + n, p);
    total = total + p;
  }
  *sum = sum_lanes(total);
}

inline std::int64_t page_id(const AttentionArgs& args, const Item& item, std::int64_t page) {
  const Places& at = args.at;
  const std::int64_t id = page < at.table_width ? at.table[item.tile.slot * at.table_width + page]
                                                : 0;
  return id < 0 || id >= args.cache.pages ? 0 : id;  // a wrong page must not be a wild read
}

template <class K, class V>
void compute_piece(const AttentionArgs& args, const Shape& shape, const Item& item,
                   std::int64_t piece, const Local& local, float* node) {
  const KvLayout& cache = args.cache;
  const std::int64_t rows = item.rows(), pitch = shape.piece_pitch;
  const std::int64_t start = piece * shape.piece_tokens;
  const std::int64_t tokens = clamp(item.tile.range.last + 1 - start, shape.piece_tokens);
  const std::int64_t skipped = clamp(item.tile.range.first - start, shape.piece_tokens);
  const std::int64_t first_page = skipped / cache.page_tokens;
  const std::int64_t pages = ceil_div(tokens, cache.page_tokens);
  auto page_of = [&](std::int64_t page) {
    return page_id(args, item, piece * shape.piece_pages + page) * cache.kv_heads +
           item.group.kv_head;
  };
  for (std::int64_t page = first_page; page < pages; ++page) {
    const K keys(cache.keys + page_of(page) * cache.key_head_bytes(), cache.key_dim, cache.pitch);
    for_blocks(rows, [&](auto block, std::int64_t r) {
      score_block<block.count>(local.q + r, keys, cache.key_dim, cache.pitch,
                               local.scores + r * pitch + page * cache.pitch, pitch);
    });
  }
  float* max = node;
  float* sum = node + shape.max_rows;
  float* acc = node + 2 * shape.max_rows;
  for (std::int64_t r = 0; r < rows; ++r) {
    const Range range = seen(args, item.tile.token + r / item.group.count);
    soften(args, shape, range, piece, pages, local.scores + r * pitch, max + r, sum + r);
  }
  __builtin_memset(acc, 0, rows * shape.acc_pitch * 4);
  for (std::int64_t page = first_page; page < pages; ++page) {
    // Nothing outside of what the tile sees is read: it may be another request's by now.
    const std::int64_t n = clamp(skipped - page * cache.page_tokens, cache.page_tokens);
    const std::int64_t stop = clamp(tokens - page * cache.page_tokens, cache.page_tokens);
    const V values(cache.values + page_of(page) * cache.value_head_bytes(), cache.page_tokens,
                   cache.value_dim);
    for_blocks(rows, [&](auto block, std::int64_t r) {
      value_block<block.count>(local.scores + r * pitch + page * cache.pitch, pitch, values, n,
                               stop, cache.value_dim, acc + r * shape.acc_pitch,
                               shape.acc_pitch);
    });
  }
}

inline void write_item(const AttentionArgs& args, const Shape& shape, const Item& item,
                       Partial* p) {
  finish(shape, item.rows(), p);
  const float* node = p->data(shape, 0);
  const std::int64_t dim = args.cache.value_dim;
  for (std::int64_t r = 0; r < item.rows(); ++r) {
    const std::int64_t token = item.tile.token + r / item.group.count;
    const std::int64_t head = item.group.heads[r % item.group.count];
    float* out = args.out + (token * args.heads + head) * dim;
    const float* acc = node + 2 * shape.max_rows + r * shape.acc_pitch;
    const float sum = node[shape.max_rows + r];
    const bool sees_nothing = args.at.positions[token] < 0;
    const float scale = sees_nothing ? 0.0f : 1.0f / sum;
    if (args.weights)
      args.weights[token * args.heads + head] =
          sees_nothing ? -__builtin_inff() : node[r] + __builtin_logf(sum);
    for (std::int64_t d = 0; d < dim; ++d) out[d] = acc[d] * scale;
  }
}

// --- sharing ----------------------------------------------------------------------------------

// f(item, number of its first piece in the flat list of all items' pieces).
template <class F>
std::int64_t for_items(const AttentionArgs& args, const Shape& shape, F f) {
  std::int64_t most = 1, number = 0, flat = 0;
  for (std::int64_t g = 0; g < args.num_groups; ++g) {
    most = args.groups[g].count > most ? args.groups[g].count : most;
  }
  const std::int64_t max_tokens = shape.max_rows / most > 1 ? shape.max_rows / most : 1;
  for (std::int64_t token = 0; token < args.at.tokens;) {
    const Tile tile = next_tile(args, shape, token, max_tokens);
    for (std::int64_t g = 0; g < args.num_groups; ++g, ++number) {
      f(Item{tile, args.groups[g], number}, flat);
      flat += tile.end - tile.begin;
    }
    token += tile.count;
  }
  return flat;
}

template <class K, class V>
void compute_part(const AttentionArgs& args, const Shape& shape, const Item& item,
                  std::int64_t begin, std::int64_t end, const Local& local, Partial* p) {
  pack_queries(args, item, local.q);
  p->item = item.number;
  p->count = 0;
  for (std::int64_t piece = begin; piece < end; ++piece) {
    compute_piece<K, V>(args, shape, item, piece, local, p->data(shape, p->count));
    p->nodes[p->count++] = {piece, 0};
    fold(shape, item.rows(), p);
  }
}

template <class K, class V>
void attention_as(const AttentionArgs& args, Team& team) {
  const Shape shape(args.cache, args.at.table_width, args.max_rows);
  const Local local(team.local, args, shape);
  local.partial[0]->item = local.partial[1]->item = -1;
  const std::int64_t total = for_items(args, shape, [](const Item&, std::int64_t) {});
  const auto [begin, end] = team.share(total);
  Item started{};  // the item that this rank begins and later ranks go on with
  started.number = -1;
  for_items(args, shape, [&, begin = begin, end = end](const Item& item, std::int64_t flat) {
    const std::int64_t stop = flat + item.tile.end - item.tile.begin;
    const std::int64_t a = flat > begin ? flat : begin, b = stop < end ? stop : end;
    if (a >= b) return;
    Partial* p = local.partial[a == flat ? 1 : 0];
    const std::int64_t shift = item.tile.begin - flat;
    compute_part<K, V>(args, shape, item, a + shift, b + shift, local, p);
    if (a == flat && b == stop) {
      write_item(args, shape, item, p);
      p->item = -1;
    } else if (a == flat) {
      started = item;
    }
  });
  if (team.size == 1) return;
  team.barrier();
  if (started.number < 0) return;
  for (int rank = team.rank + 1; rank < team.size; ++rank) {
    Partial* from = Local(team.locals[rank], args, shape).partial[0];
    if (from->item != started.number) break;
    for (int i = 0; i < from->count; ++i) {
      append(shape, started.rows(), local.partial[1], from, i);
    }
  }
  write_item(args, shape, started, local.partial[1]);
}

inline std::int64_t attention_rows(const KvLayout& cache, std::int64_t table_width,
                                   std::int64_t local_bytes) {
  std::int64_t rows = kMaxRows;
  while (rows > 0 && Local::bytes(cache, Shape(cache, table_width, rows)) > local_bytes) {
    rows /= 2;
  }
  return rows;
}

template <class K>
void attention_with(const AttentionArgs& args, Team& team) {
  switch (args.cache.value_type) {
    case KvType::f32: return attention_as<K, Head<float>>(args, team);
    case KvType::f16: return attention_as<K, Head<std::uint16_t>>(args, team);
    case KvType::q8_0: return attention_as<K, Q8Values>(args, team);
  }
}

inline void attention(const AttentionArgs& args, Team& team) {
  switch (args.cache.key_type) {
    case KvType::f32: return attention_with<Head<float>>(args, team);
    case KvType::f16: return attention_with<Head<std::uint16_t>>(args, team);
    case KvType::q8_0: return attention_with<Q8Keys>(args, team);
  }
}

}  // namespace
}  // namespace VOLTAPILE_ISA
}  // namespace voltapile
