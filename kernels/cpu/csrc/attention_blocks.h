// Products of query rows with keys and of probabilities with values, and the writing of both to
// their pages. Included by vec_kernels.h.
//
// Every sum is one chain in the order of dimensions or positions, whatever R is: a row's bits do
// not depend on the rows beside it.
#pragma once

namespace voltapile {
namespace VOLTAPILE_ISA {
namespace {

constexpr std::int64_t kMaxRows = 16;
constexpr std::int64_t kBlockRows = W == 16 ? 8 : 4;  // rows whose sums fit the registers

inline std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

inline Vec load_as(const float* p) { return load(p); }
inline Vec load_as(const std::uint16_t* p) { return load_half(p); }

// scores[r][n] = q[r] . keys[..][n] for n in [0, count), R rows; q is [dim][kMaxRows].
template <int R, class K>
void score_block(const float* q, const K* keys, std::int64_t dim, std::int64_t pitch,
                 std::int64_t count, float* scores, std::int64_t scores_pitch) {
  for (std::int64_t n = 0; n < count; n += 2 * W) {
    Vec sum[R][2];
    for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = splat(0.0f);
    for (std::int64_t d = 0; d < dim; ++d) {
      const Vec k0 = load_as(keys + d * pitch + n), k1 = load_as(keys + d * pitch + n + W);
      for (int r = 0; r < R; ++r) {
        const Vec x = splat(q[d * kMaxRows + r]);
        sum[r][0] = madd(x, k0, sum[r][0]);
        sum[r][1] = madd(x, k1, sum[r][1]);
      }
    }
    for (int r = 0; r < R; ++r) {
      store(scores + r * scores_pitch + n, sum[r][0]);
      store(scores + r * scores_pitch + n + W, sum[r][1]);
    }
  }
}

// acc[r][..] += sum over n in [0, count) of p[r][n] * values[n][..], R rows.
template <int R, class V>
void value_block(const float* p, std::int64_t p_pitch, const V* values, std::int64_t dim,
                 std::int64_t count, float* acc, std::int64_t acc_pitch) {
  for (std::int64_t d = 0; d < dim; d += 2 * W) {
    Vec sum[R][2];
    for (int r = 0; r < R; ++r) {
      sum[r][0] = load(acc + r * acc_pitch + d);
      sum[r][1] = load(acc + r * acc_pitch + d + W);
    }
    for (std::int64_t n = 0; n < count; ++n) {
      const Vec v0 = load_as(values + n * dim + d), v1 = load_as(values + n * dim + d + W);
      for (int r = 0; r < R; ++r) {
        const Vec x = splat(p[r * p_pitch + n]);
        sum[r][0] = madd(x, v0, sum[r][0]);
        sum[r][1] = madd(x, v1, sum[r][1]);
      }
    }
    for (int r = 0; r < R; ++r) {
      store(acc + r * acc_pitch + d, sum[r][0]);
      store(acc + r * acc_pitch + d + W, sum[r][1]);
    }
  }
}

// f(Rows<R>, first row) for blocks of at most kBlockRows that cover `rows`.
template <int R>
struct Rows {
  static constexpr int count = R;
};

template <class F>
inline void for_blocks(std::int64_t rows, F f) {
  std::int64_t r = 0;
  for (; r + kBlockRows <= rows; r += kBlockRows) f(Rows<kBlockRows>(), r);
  switch (rows - r) {
    case 1: return f(Rows<1>(), r);
    case 2: return f(Rows<2>(), r);
    case 3: return f(Rows<3>(), r);
    case 4: return f(Rows<4>(), r);
    case 5: return f(Rows<5>(), r);
    case 6: return f(Rows<6>(), r);
    case 7: return f(Rows<7>(), r);
    default: return;
  }
}

// --- storing ----------------------------------------------------------------------------------

inline void put(std::uint8_t* base, KvType type, std::int64_t index, float x) {
  if (type == KvType::f32) {
    reinterpret_cast<float*>(base)[index] = x;
  } else {
    reinterpret_cast<std::uint16_t*>(base)[index] = to_half(x);
  }
}

inline void store_kv(const StoreKvArgs& args, Team& team) {
  const KvLayout& cache = args.cache;
  const Places& at = args.at;
  const auto [begin, end] = team.share(at.tokens * cache.kv_heads);
  for (std::int64_t unit = begin; unit < end; ++unit) {
    const std::int64_t token = unit / cache.kv_heads, head = unit % cache.kv_heads;
    const std::int64_t position = at.positions[token], offset = position % cache.page_tokens;
    const std::int64_t page = position / cache.page_tokens;
    if (position < 0 || page >= at.table_width) continue;  // must not become a wild write
    const std::int64_t id = at.table[at.slots[token] * at.table_width + page];
    if (id < 0 || id >= cache.pages) continue;
    std::uint8_t* keys = cache.keys + (id * cache.kv_heads + head) * cache.key_head_bytes();
    std::uint8_t* values = cache.values + (id * cache.kv_heads + head) * cache.value_head_bytes();
    const float* k = args.k + unit * cache.key_dim;
    const float* v = args.v + unit * cache.value_dim;
    for (std::int64_t d = 0; d < cache.key_dim; ++d) {
      put(keys, cache.key_type, d * cache.pitch + offset, k[d]);
    }
    for (std::int64_t d = 0; d < cache.value_dim; ++d) {
      put(values, cache.value_type, offset * cache.value_dim + d, v[d]);
    }
  }
}

}  // namespace
}  // namespace VOLTAPILE_ISA
}  // namespace voltapile
