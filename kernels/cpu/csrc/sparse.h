// Scores of blocks of positions, and attention to the chosen ones. Included by vec_kernels.h.
//
// What a token sees is a list of spans: its chosen blocks, ascending, and the positions behind its
// last whole block. Pieces of the list give Nodes, as in attention.h, that are merged one after
// another: a row's bits depend on its own list alone.
#pragma once

namespace voltapile {
namespace VOLTAPILE_ISA {
namespace {

inline std::int64_t page_of(const Places& at, std::int64_t pages, std::int64_t token,
                            std::int64_t page) {
  if (page < 0 || page >= at.table_width) return 0;
  const std::int64_t id = at.table[at.slots[token] * at.table_width + page];
  return id < 0 || id >= pages ? 0 : id;  // a wrong page must not be a wild read
}

inline void score_pages(const ChooseArgs& args, std::int64_t token, std::int64_t begin,
                        std::int64_t end, float* scores) {
  const IndexLayout& cache = args.cache;
  const std::int64_t pitch = cache.pitch(), per_page = cache.per_page();
  for (std::int64_t page = begin; page < end; ++page) {
    const float* keys =
        cache.pooled + page_of(args.at, cache.pages, token, page) * cache.dim * pitch;
    for (std::int64_t n = 0; n < per_page; n += W) {
      Vec total = splat(0.0f);
      for (std::int64_t h = 0; h < args.heads; ++h) {
        const float* q = args.q + (token * args.heads + h) * cache.dim;
        Vec sum = splat(0.0f);
        for (std::int64_t d = 0; d < cache.dim; ++d)
          sum = madd(splat(q[d]), load(keys + d * pitch + n), sum);
        total = total + at_least(sum, splat(0.0f));
      }
      store_part(scores + page * per_page + n, total, per_page - n);
    }
  }
}

// --- what a token sees ---------------------------------------------------------------------------

constexpr std::int64_t kPieceSpans = 64;

struct Span {
  std::int64_t begin, end;  // positions, all in one block
};

struct Sight {
  Sight(const ChosenArgs& args, std::int64_t token)
      : chosen(args.chosen + token * args.most), count(args.counts[token]), block(args.block) {
    const Places& at = args.attention.at;
    const std::int64_t most = at.table_width * args.attention.cache.page_tokens;
    const std::int64_t seen = clamp(at.positions[token] + std::int64_t{1}, most);
    tail = {seen / block * block, seen};
    spans = count + (tail.begin < tail.end);
  }
  Span span(std::int64_t i) const {
    return i < count ? Span{chosen[i] * block, (chosen[i] + 1) * block} : tail;
  }
  std::int64_t pieces() const { return ceil_div(spans, kPieceSpans); }

  const std::int32_t* chosen;
  std::int64_t count, block, spans;
  Span tail;
};

struct ChosenLocal {
  float *q, *scores, *lanes, *nodes[2];
  std::int64_t pitch;  // of scores: positions of a piece

  ChosenLocal(const ChosenArgs& args, const Shape& shape, std::uint8_t* base)
      : q(reinterpret_cast<float*>(base)),
        pitch(ceil_div(kPieceSpans * args.block, W) * W) {
    scores = q + args.attention.cache.key_dim * kMaxRows;
    lanes = scores + kMaxRows * pitch;
    nodes[0] = lanes + kMaxRows * W;
    nodes[1] = nodes[0] + shape.node_floats();
  }
};

// One token and the heads of one group.
struct ChosenItem {
  std::int64_t token;
  HeadGroup group;
};

// f(page, positions [begin, end) in it, index of the first among the piece's scores).
template <class F>
inline void for_spans(const ChosenArgs& args, const Sight& sight, std::int64_t piece, F f) {
  const std::int64_t page_tokens = args.attention.cache.page_tokens;
  const std::int64_t stop = (piece + 1) * kPieceSpans;
  std::int64_t index = 0;
  for (std::int64_t i = piece * kPieceSpans; i < stop && i < sight.spans;) {
    Span span = sight.span(i++);  // with its neighbours in the page
    const std::int64_t page = span.begin / page_tokens;
    for (; i < stop && i < sight.spans; ++i) {
      const Span next = sight.span(i);
      if (next.begin != span.end || next.begin / page_tokens != page) break;
      span.end = next.end;
    }
    f(page, span.begin - page * page_tokens, span.end - page * page_tokens, index);
    index += span.end - span.begin;
  }
}

template <int R, class K>
inline void score_lanes(const float* q, const K& keys, std::int64_t dim, std::int64_t n,
                        float* out) {
  Vec sum[R];
  for (int r = 0; r < R; ++r) sum[r] = splat(0.0f);
  for (std::int64_t d = 0; d < dim; ++d) {
    const Vec k = keys.at(d, n);
    for (int r = 0; r < R; ++r) sum[r] = madd(splat(q[d * kMaxRows + r]), k, sum[r]);
  }
  for (int r = 0; r < R; ++r) store(out + r * W, sum[r]);
}

// Scores of positions [begin, end) of a page to place `index` of each row.
template <class K>
inline void score_span(const ChosenArgs& args, const ChosenItem& item, const K& keys,
                       std::int64_t begin, std::int64_t end, std::int64_t index,
                       const ChosenLocal& local) {
  const std::int64_t dim = args.attention.cache.key_dim, rows = item.group.count;
  for (std::int64_t n = begin / W * W; n < end; n += W) {
    for_blocks(rows, [&](auto block, std::int64_t r) {
      score_lanes<block.count>(local.q + r, keys, dim, n, local.lanes + r * W);
    });
    const std::int64_t first = n < begin ? begin : n, last = n + W < end ? n + W : end;
    for (std::int64_t r = 0; r < rows; ++r) {
      __builtin_memcpy(local.scores + r * local.pitch + index + first - begin,
                       local.lanes + r * W + first - n, (last - first) * 4);
    }
  }
}

inline void soften_chosen(float* row, std::int64_t count, float* max, float* sum) {
  const std::int64_t padded = ceil_div(count, W) * W;
  for (std::int64_t n = count; n < padded; ++n) row[n] = -__builtin_inff();
  Vec top = splat(-__builtin_inff());
  for (std::int64_t n = 0; n < padded; n += W) {
    const Vec x = load(row + n);
    top = top > x ? top : x;
  }
  *max = max_lanes(top);
  Vec total = splat(0.0f);
  for (std::int64_t n = 0; n < padded; n += W) {
    const Vec p = exp_vec(load(row + n) - splat(*max));
    store(row + n, p);
    total = total + p;
  }
  *sum = sum_lanes(total);
}

template <class K, class V>
void chosen_piece(const ChosenArgs& args, const Shape& shape, const ChosenItem& item,
                  const Sight& sight, std::int64_t piece, const ChosenLocal& local, float* node) {
  const KvLayout& cache = args.attention.cache;
  const std::int64_t rows = item.group.count;
  const auto head_of = [&](std::int64_t page) {
    return page_of(args.attention.at, cache.pages, item.token, page) * cache.kv_heads +
           item.group.kv_head;
  };
  std::int64_t count = 0;
  for_spans(args, sight, piece,
            [&](std::int64_t page, std::int64_t begin, std::int64_t end, std::int64_t index) {
    const K keys(cache.keys + head_of(page) * cache.key_head_bytes(), cache.key_dim, cache.pitch);
    score_span(args, item, keys, begin, end, index, local);
    count = index + end - begin;
  });
  float* acc = node + 2 * shape.max_rows;
  for (std::int64_t r = 0; r < rows; ++r)
    soften_chosen(local.scores + r * local.pitch, count, node + r, node + shape.max_rows + r);
  __builtin_memset(acc, 0, rows * shape.acc_pitch * 4);
  for_spans(args, sight, piece,
            [&](std::int64_t page, std::int64_t begin, std::int64_t end, std::int64_t index) {
    const V values(cache.values + head_of(page) * cache.value_head_bytes(), cache.page_tokens,
                   cache.value_dim);
    for_blocks(rows, [&](auto block, std::int64_t r) {
      value_block<block.count>(local.scores + r * local.pitch + index - begin, local.pitch,
                               values, begin, end, cache.value_dim, acc + r * shape.acc_pitch,
                               shape.acc_pitch);
    });
  });
}

inline void pack_token(const ChosenArgs& args, const ChosenItem& item, float* q) {
  const AttentionArgs& attention = args.attention;
  const std::int64_t dim = attention.cache.key_dim;
  for (std::int64_t r = 0; r < item.group.count; ++r) {
    const float* x = attention.q + (item.token * attention.heads + item.group.heads[r]) * dim;
    for (std::int64_t d = 0; d < dim; ++d) q[d * kMaxRows + r] = x[d] * attention.scale;
  }
}

inline void write_token(const ChosenArgs& args, const Shape& shape, const ChosenItem& item,
                        const float* node) {
  const std::int64_t dim = args.attention.cache.value_dim;
  for (std::int64_t r = 0; r < item.group.count; ++r) {
    const std::int64_t head = item.token * args.attention.heads + item.group.heads[r];
    const float* acc = node + 2 * shape.max_rows + r * shape.acc_pitch;
    const float scale = 1.0f / node[shape.max_rows + r];
    for (std::int64_t d = 0; d < dim; ++d) args.attention.out[head * dim + d] = acc[d] * scale;
  }
}

// --- sharing -------------------------------------------------------------------------------------

constexpr std::int64_t kFewTokens = 8;  // of which threads share the pieces, not the items

inline std::int64_t most_pieces(const ChosenArgs& args) {
  return ceil_div(args.most + 1, kPieceSpans);
}

inline std::int64_t chosen_nodes(const ChosenArgs& args) {
  const AttentionArgs& attention = args.attention;
  if (attention.at.tokens > kFewTokens) return 0;
  const Shape shape(attention.cache, attention.at.table_width, kMaxRows);
  return attention.at.tokens * attention.num_groups * most_pieces(args) * shape.node_floats();
}

template <class K, class V>
void many_tokens(const ChosenArgs& args, Team& team) {
  const AttentionArgs& attention = args.attention;
  const Shape shape(attention.cache, attention.at.table_width, kMaxRows);
  const ChosenLocal local(args, shape, team.local);
  const auto [begin, end] = team.share(attention.at.tokens * attention.num_groups);
  for (std::int64_t unit = begin; unit < end; ++unit) {
    const ChosenItem item{unit / attention.num_groups,
                          attention.groups[unit % attention.num_groups]};
    const Sight sight(args, item.token);
    pack_token(args, item, local.q);
    for (std::int64_t piece = 0; piece < sight.pieces(); ++piece) {
      chosen_piece<K, V>(args, shape, item, sight, piece, local, local.nodes[piece > 0]);
      if (piece > 0) merge_nodes(shape, item.group.count, local.nodes[0], local.nodes[1]);
    }
    write_token(args, shape, item, local.nodes[0]);
  }
}

template <class K, class V>
void few_tokens(const ChosenArgs& args, Team& team) {
  const AttentionArgs& attention = args.attention;
  const Shape shape(attention.cache, attention.at.table_width, kMaxRows);
  const ChosenLocal local(args, shape, team.local);
  const std::int64_t items = attention.at.tokens * attention.num_groups, most = most_pieces(args);
  const auto item_of = [&](std::int64_t unit) {
    return ChosenItem{unit / attention.num_groups, attention.groups[unit % attention.num_groups]};
  };
  const auto node_of = [&](std::int64_t unit, std::int64_t piece) {
    return args.nodes + (unit * most + piece) * shape.node_floats();
  };
  std::int64_t total = 0, at = 0;
  for (std::int64_t unit = 0; unit < items; ++unit)
    total += Sight(args, item_of(unit).token).pieces();
  const auto [begin, end] = team.share(total);
  for (std::int64_t unit = 0; unit < items; ++unit) {
    const ChosenItem item = item_of(unit);
    const Sight sight(args, item.token);
    bool packed = false;
    for (std::int64_t piece = 0; piece < sight.pieces(); ++piece, ++at) {
      if (at < begin || at >= end) continue;
      if (!packed) pack_token(args, item, local.q);
      packed = true;
      chosen_piece<K, V>(args, shape, item, sight, piece, local, node_of(unit, piece));
    }
  }
  team.barrier();
  const auto [first, last] = team.share(items);
  for (std::int64_t unit = first; unit < last; ++unit) {
    const ChosenItem item = item_of(unit);
    const std::int64_t pieces = Sight(args, item.token).pieces();
    for (std::int64_t piece = 1; piece < pieces; ++piece)
      merge_nodes(shape, item.group.count, node_of(unit, 0), node_of(unit, piece));
    write_token(args, shape, item, node_of(unit, 0));
  }
}

template <class K, class V>
void attention_to_as(const ChosenArgs& args, Team& team) {
  args.attention.at.tokens > kFewTokens ? many_tokens<K, V>(args, team)
                                        : few_tokens<K, V>(args, team);
}

template <class K>
void attention_to_with(const ChosenArgs& args, Team& team) {
  switch (args.attention.cache.value_type) {
    case KvType::f32: return attention_to_as<K, Head<float>>(args, team);
    case KvType::f16: return attention_to_as<K, Head<std::uint16_t>>(args, team);
    case KvType::q8_0: return attention_to_as<K, Q8Values>(args, team);
  }
}

inline void attention_to(const ChosenArgs& args, Team& team) {
  switch (args.attention.cache.key_type) {
    case KvType::f32: return attention_to_with<Head<float>>(args, team);
    case KvType::f16: return attention_to_with<Head<std::uint16_t>>(args, team);
    case KvType::q8_0: return attention_to_with<Q8Keys>(args, team);
  }
}

}  // namespace
}  // namespace VOLTAPILE_ISA
}  // namespace voltapile
