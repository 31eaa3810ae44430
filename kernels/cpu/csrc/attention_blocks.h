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

// The keys or values of one head in one page: [rows][cols] of T. For keys a row is a dimension,
// for values a position; at() gives W neighbours of a row.
template <class T>
struct Head {
  Head(const std::uint8_t* base, std::int64_t, std::int64_t cols)
      : data(reinterpret_cast<const T*>(base)), cols(cols) {}
  Vec at(std::int64_t row, std::int64_t col) const { return load_as(data + row * cols + col); }
  const T* data;
  std::int64_t cols;
};

struct Q8Keys {
  Q8Keys(const std::uint8_t* base, std::int64_t dim, std::int64_t pitch)
      : scales(reinterpret_cast<const std::uint16_t*>(base)),
        data(reinterpret_cast<const std::int8_t*>(scales + dim / KvLayout::kBlock * pitch)),
        pitch(pitch) {}
  Vec at(std::int64_t d, std::int64_t n) const {
    return load_half(scales + d / KvLayout::kBlock * pitch + n) * load_bytes(data + d * pitch + n);
  }
  const std::uint16_t* scales;
  const std::int8_t* data;
  std::int64_t pitch;
};

struct Q8Values {
  Q8Values(const std::uint8_t* base, std::int64_t page_tokens, std::int64_t dim)
      : scales(reinterpret_cast<const std::uint16_t*>(base)),
        data(reinterpret_cast<const std::int8_t*>(scales + dim / KvLayout::kBlock * page_tokens)),
        dim(dim) {}
  Vec at(std::int64_t n, std::int64_t d) const {
    const std::uint16_t scale = scales[(n * dim + d) / KvLayout::kBlock];
    return splat(half_to_float(scale)) * load_bytes(data + n * dim + d);
  }
  const std::uint16_t* scales;
  const std::int8_t* data;
  std::int64_t dim;
};

// scores[r][n] = q[r] . keys[..][n] for n in [0, count), R rows; q is [dim][kMaxRows].
template <int R, class K>
void score_block(const float* q, const K& keys, std::int64_t dim, std::int64_t count,
                 float* scores, std::int64_t scores_pitch) {
  for (std::int64_t n = 0; n < count; n += 2 * W) {
    Vec sum[R][2];
    for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = splat(0.0f);
    for (std::int64_t d = 0; d < dim; ++d) {
      const Vec k0 = keys.at(d, n), k1 = keys.at(d, n + W);
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

// acc[r][..] += sum over n in [begin, end) of p[r][n] * values[n][..], R rows.
template <int R, class V>
void value_block(const float* p, std::int64_t p_pitch, const V& values, std::int64_t begin,
                 std::int64_t end, std::int64_t dim, float* acc, std::int64_t acc_pitch) {
  for (std::int64_t d = 0; d < dim; d += 2 * W) {
    Vec sum[R][2];
    for (int r = 0; r < R; ++r) {
      sum[r][0] = load(acc + r * acc_pitch + d);
      sum[r][1] = load(acc + r * acc_pitch + d + W);
    }
    for (std::int64_t n = begin; n < end; ++n) {
      const Vec v0 = values.at(n, d), v1 = values.at(n, d + W);
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

// Writes x to places at, at + step, ... of a head of type f32 or f16.
inline void put(std::uint8_t* head, KvType type, std::int64_t at, std::int64_t step,
                const float* x, std::int64_t dim) {
  float* floats = reinterpret_cast<float*>(head) + at;
  std::uint16_t* halves = reinterpret_cast<std::uint16_t*>(head) + at;
  for (std::int64_t d = 0; d < dim; ++d) {
    if (type == KvType::f32) {
      floats[d * step] = x[d];
    } else {
      halves[d * step] = to_half(x[d]);
    }
  }
}

inline Vec round_units(Vec x, Vec inverse) {
  const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: rounds to an integer, ties to even
  return at_most(at_least(x * inverse, splat(-127.0f)), splat(127.0f)) + magic - magic;
}

// x as a half holds it, unless it is so small that a half has fewer bits.
inline Vec round_to_half(Vec x) {
  const Vec wide = x * splat(8193.0f);  // 2^13 + 1
  return wide - (wide - x);
}

// The scale of kBlock finite values: the one of 16, the largest value becoming 127.4, 126.9, ...
// 119.9 units, that leaves the least error. (A tenth to a fifth less than always 127, squared.)
inline std::uint16_t best_scale(const float* x, float most) {
  constexpr float kUnits[16] = {127.4f, 126.9f, 126.4f, 125.9f, 125.4f, 124.9f, 124.4f, 123.9f,
                                123.4f, 122.9f, 122.4f, 121.9f, 121.4f, 120.9f, 120.4f, 119.9f};
  float steps[16], errors[16];
  for (int i = 0; i < 16; i += W) {
    const Vec step = round_to_half(at_most(splat(most) / load(kUnits + i), splat(515.5f)));
    const Vec inverse = step > splat(0.0f) ? splat(1.0f) / step : splat(0.0f);
    Vec error = splat(0.0f);
    for (std::int64_t d = 0; d < KvLayout::kBlock; ++d) {
      const Vec off = madd(-round_units(splat(x[d]), inverse), step, splat(x[d]));
      error = madd(off, off, error);
    }
    store(steps + i, step);
    store(errors + i, error);
  }
  int best = 0;
  for (int i = 1; i < 16; ++i) best = errors[i] < errors[best] ? i : best;
  return to_half(steps[best]);  // 127 times 515.5 is a half
}

// q8_0: integers to data[at + d * step], scales to scales[scale_at + d / kBlock * scale_step]. A
// block with a value that is not finite stays so.
inline void put_q8(std::uint16_t* scales, std::int64_t scale_at, std::int64_t scale_step,
                   std::int8_t* data, std::int64_t at, std::int64_t step, const float* x,
                   std::int64_t dim) {
  constexpr std::int64_t kBlock = KvLayout::kBlock;
  for (std::int64_t d = 0; d < dim; d += kBlock) {
    float most = 0.0f, check = 0.0f;
    for (std::int64_t i = d; i < d + kBlock; ++i) {
      const float size = __builtin_fabsf(x[i]);
      most = size > most ? size : most;
      check += x[i] * 0.0f;
    }
    const bool is_sane = check == 0.0f;
    const std::uint16_t scale = is_sane ? best_scale(x + d, most) : 0x7e00;
    const float unit = half_to_float(scale);
    const Vec inverse = splat(unit > 0.0f ? 1.0f / unit : 0.0f);
    scales[scale_at + d / kBlock * scale_step] = scale;
    for (std::int64_t i = d; i < d + kBlock; i += W) {
      float units[W];
      store(units, round_units(load(x + i), inverse));
      for (int j = 0; j < W; ++j)
        data[at + (i + j) * step] = is_sane ? static_cast<std::int8_t>(units[j]) : 0;
    }
  }
}

inline void put_key(const KvLayout& cache, std::uint8_t* head, std::int64_t offset,
                    const float* k) {
  const std::int64_t dim = cache.key_dim, pitch = cache.pitch;
  if (cache.key_type != KvType::q8_0) return put(head, cache.key_type, offset, pitch, k, dim);
  std::uint16_t* scales = reinterpret_cast<std::uint16_t*>(head);
  std::int8_t* data = reinterpret_cast<std::int8_t*>(scales + dim / KvLayout::kBlock * pitch);
  put_q8(scales, offset, pitch, data, offset, pitch, k, dim);
}

inline void put_value(const KvLayout& cache, std::uint8_t* head, std::int64_t offset,
                      const float* v) {
  const std::int64_t dim = cache.value_dim, blocks = dim / KvLayout::kBlock;
  if (cache.value_type != KvType::q8_0) return put(head, cache.value_type, offset * dim, 1, v, dim);
  std::uint16_t* scales = reinterpret_cast<std::uint16_t*>(head);
  std::int8_t* data = reinterpret_cast<std::int8_t*>(scales + blocks * cache.page_tokens);
  put_q8(scales, offset * blocks, 1, data, offset * dim, 1, v, dim);
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
    put_key(cache, keys, offset, args.k + unit * cache.key_dim);
    put_value(cache, values, offset, args.v + unit * cache.value_dim);
  }
}

}  // namespace
}  // namespace VOLTAPILE_ISA
}  // namespace voltapile
