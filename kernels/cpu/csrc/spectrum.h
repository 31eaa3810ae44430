// Passes over a row of logits for sampling. Included by vec_kernels.h.
#pragma once

namespace voltapile {
namespace VOLTAPILE_ISA {
namespace {

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

constexpr float kInfinity = __builtin_inff();

// A sum in float64, lane by lane until the end.
class Sum {
 public:
  void add(Vec x) { lanes_ += __builtin_convertvector(x, Doubles); }
  double total() const {
    double sum = 0.0;
    for (int i = 0; i < W; ++i) sum += lanes_[i];
    return sum;
  }

 private:
  typedef double Doubles __attribute__((vector_size(8 * W)));
  Doubles lanes_ = {};
};

// Of a mask whose lanes are 0 or -1.
inline bool any_lane(Int mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps((__m256)mask) != 0;
#else
  std::int32_t any = 0;
  for (int i = 0; i < W; ++i) any |= mask[i];
  return any != 0;
#endif
}

inline RowStats row_stats(const float* x, std::int64_t n, bool with_sum) {
  const Vec infinity = splat(kInfinity);
  Vec high = -infinity, low = infinity;
  Int good = vec_to_bits(high) == vec_to_bits(high);  // all ones
  for_vectors(x, n, x[0], [&](Vec v, std::int64_t) {
    high = v > high ? v : high;
    low = (v < low) & (v > -infinity) ? v : low;
    good &= v < infinity;  // false for a NaN
  });
  RowStats stats{max_lanes(high), -max_lanes(-low), any_lane(~good), 0.0};
  if (!with_sum || stats.is_bad || stats.max == -kInfinity) return stats;
  const Vec top = splat(stats.max);
  Sum sum;
  for_vectors(x, n, -kInfinity, [&](Vec v, std::int64_t) { sum.add(exp_vec(v - top)); });
  stats.sum = sum.total();
  return stats;
}

// kernels/random.md's penalties; the same operations as penalised() of sample_adjust.h.
inline void penalise(const Penalties& p, const float* logits, std::int64_t n, float* x) {
  const Vec repetition = splat(p.repetition), presence = splat(p.presence);
  const Vec frequency = splat(p.frequency), zero = splat(0.0f);
  const Int one = vec_to_bits(zero) + 1;
  const auto apply = [&](Vec v, Int seen) {
    const Int count = (seen >> 1) & 0x7fffffff;
    const Vec repeated = v > zero ? v / repetition : v * repetition;
    v = seen >= one ? repeated : v;
    const Vec less = v - (frequency * __builtin_convertvector(count, Vec) + presence);
    return count >= one ? less : v;
  };
  std::int64_t i = 0;
  for (; i + W <= n; i += W) store(x + i, apply(load(logits + i), vec_to_bits(load(x + i))));
  if (i == n) return;
  float v[W] = {}, seen[W] = {};
  __builtin_memcpy(v, logits + i, (n - i) * sizeof(float));
  __builtin_memcpy(seen, x + i, (n - i) * sizeof(float));
  store(v, apply(load(v), vec_to_bits(load(seen))));
  __builtin_memcpy(x + i, v, (n - i) * sizeof(float));
}

inline std::int64_t best(const float* x, std::int64_t n, std::int64_t most, std::int32_t* ids,
                         float* values) {
  std::int64_t found = 0;
  float least = -kInfinity;  // what a new one must exceed
  if (most <= 0) return 0;
  for_vectors(x, n, -kInfinity, [&](Vec v, std::int64_t start) {
    if (!any_lane(v > splat(least))) return;
    for (int lane = 0; lane < W; ++lane) {
      if (!(v[lane] > least)) continue;
      std::int64_t place = found < most ? found++ : most - 1;
      for (; place > 0 && values[place - 1] < v[lane]; --place) {
        values[place] = values[place - 1];
        ids[place] = ids[place - 1];
      }
      values[place] = v[lane];
      ids[place] = static_cast<std::int32_t>(start + lane);
      if (found == most) least = values[most - 1];
    }
  });
  return found;
}

inline void scan_head(const Spectrum& s, HeadScan* scan, Candidate* found) {
  const Vec temperature = splat(s.temperature), top = splat(s.top), least = splat(scan->least);
  std::int64_t i = scan->next, count = scan->count;
  Sum mass;
  for (; i < s.n && count <= HeadScan::kRoom - W; i += W) {
    float rest[W];
    const bool is_whole = i + W <= s.n;
    for (int lane = 0; !is_whole && lane < W; ++lane) {
      rest[lane] = i + lane < s.n ? s.logits[i + lane] : -kInfinity;
    }
    const Vec x = (is_whole ? load(s.logits + i) : load(rest)) / temperature;
    const Vec term = exp_vec(x - top);
    mass.add(term);
    if (!any_lane(x > least)) continue;
    for (int lane = 0; lane < W; ++lane) {
      if (!(x[lane] > scan->least)) continue;
      found[count++] = {x[lane], static_cast<std::int32_t>(i + lane), term[lane]};
    }
  }
  scan->next = i < s.n ? i : s.n;
  scan->count = count;
  scan->mass += mass.total();
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
    if (!any_lane(same)) return;
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
