// Passes over a row of logits for sampling. Included by vec_kernels.h.
#pragma once

namespace voltapile {
namespace VOLTAPILE_ISA {
namespace {

inline bool is_finite(float x) { return x - x == 0.0f; }

// Calls f(values, start) for vectors of x, the last one padded with `fill`.
template <class F>
inline void for_vectors(const float* x, std::int64_t n, float fill, F f) {
  std::int64_t i = 0;
  for (; i + W <= n; i += W) f(load(x + i), i);
  if (i == n) return;
  float rest[W];
  for (int lane = 0; lane < W; ++lane) rest[lane] = i + lane < n ? x[i + lane] : fill;
  f(load(rest), i);
}

inline RowStats row_stats(const float* x, std::int64_t n) {
  Vec high = splat(x[0]), low = high, check = splat(0.0f);
  for_vectors(x, n, x[0], [&](Vec v, std::int64_t) {
    high = high > v ? high : v;
    low = low < v ? low : v;
    check = check + v * splat(0.0f);  // NaN if anything is not finite
  });
  RowStats stats{max_lanes(high), -max_lanes(-low), is_finite(sum_lanes(check)), 0.0};
  if (!stats.is_finite) return stats;
  const Vec top = splat(stats.max);
  for_vectors(x, n, -__builtin_inff(), [&](Vec v, std::int64_t) {
    stats.sum += static_cast<double>(sum_lanes(exp_vec(v - top)));
  });
  return stats;
}

struct Binned {
  Vec term;    // exp(x - top)
  Int bucket;
};

inline Binned bin(const Spectrum& s, Vec logits) {
  const Vec below = logits / splat(s.temperature) - splat(s.top);
  const Vec place = at_most(-below * splat(s.scale), splat(Histogram::kBuckets - 1));
  return {exp_vec(below), __builtin_convertvector(place, Int)};
}

inline std::int64_t histogram(const Spectrum& s, float least, Histogram* h) {
  __builtin_memset(h, 0, sizeof *h);
  std::int64_t enough = 0;
  for_vectors(s.logits, s.n, s.logits[0], [&](Vec v, std::int64_t start) {
    const Binned part = bin(s, v);
    const int lanes = s.n - start < W ? static_cast<int>(s.n - start) : W;
    float terms[W];
    store(terms, part.term);
    for (int i = 0; i < lanes; ++i) {
      const std::int32_t b = part.bucket[i];
      h->count[b] += 1;
      h->mass[b] += static_cast<double>(terms[i]);
      enough += terms[i] >= least;
    }
  });
  return enough;
}

inline std::int64_t gather_bucket(const Spectrum& s, std::int64_t bucket, std::int32_t* ids,
                                  float* terms) {
  std::int64_t found = 0;
  for_vectors(s.logits, s.n, s.logits[0], [&](Vec v, std::int64_t start) {
    const Binned part = bin(s, v);
    const Int same = part.bucket == static_cast<std::int32_t>(bucket);
    std::int32_t any = 0;
    for (int i = 0; i < W; ++i) any |= same[i];
    if (!any) return;
    for (int i = 0; i < W && start + i < s.n; ++i) {
      if (!same[i]) continue;
      ids[found] = static_cast<std::int32_t>(start + i);
      terms[found++] = part.term[i];
    }
  });
  return found;
}

}  // namespace
}  // namespace VOLTAPILE_ISA
}  // namespace voltapile
