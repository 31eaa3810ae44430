// Drawing a token from one row, without sorting the vocabulary.
//
// Most draws fall among the few best candidates: one pass finds these, and the mass of all. Where a
// cut or the draw lies behind them, a histogram over x says which candidates to sort.
#pragma once
#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "kernels.h"

namespace voltapile {

struct Filters {
  std::int64_t top_k;
  double top_p;
  float min_p;
};

inline bool comes_first(const Candidate& a, const Candidate& b) {
  return a.x > b.x || (a.x == b.x && a.id < b.id);
}

// --- of a steep distribution: its head ---------------------------------------------------------

// The best candidates in order; all of them, if they are few.
class Head {
 public:
  explicit Head(const Spectrum& spectrum) {
    HeadScan scan{0, 0, -__builtin_inff(), 0.0};
    while (scan.next < spectrum.n) {
      kernels().scan_head(spectrum, &scan, found_);
      if (scan.count <= kMost) continue;
      is_whole_ = false;
      std::nth_element(found_, found_ + kMost - 1, found_ + scan.count, comes_first);
      scan.count = kMost;
      scan.least = found_[kMost - 1].x;
    }
    count_ = scan.count;
    mass_ = scan.mass;
    std::sort(found_, found_ + count_, comes_first);
    double sum = 0.0;
    for (std::int64_t i = 0; i < count_; ++i) masses_[i] = sum += found_[i].term;
  }

  std::int64_t count() const { return count_; }
  bool is_whole() const { return is_whole_; }
  double all_mass() const { return mass_; }                             // of the whole row
  double mass(std::int64_t count) const { return masses_[count - 1]; }  // of the first ones
  std::int32_t id(std::int64_t i) const { return found_[i].id; }

  // How many come before the first one, it included, with reached(mass up to it); 0: not here.
  template <class Reached>
  std::int64_t shortest(Reached reached) const {
    for (std::int64_t i = 0; i < count_; ++i) {
      if (reached(masses_[i])) return i + 1;
    }
    return 0;
  }
  std::int64_t at_least(float term) const {
    std::int64_t i = 0;
    while (i < count_ && found_[i].term >= term) ++i;
    return i;
  }

 private:
  static constexpr std::int64_t kMost = 256;
  Candidate found_[HeadScan::kRoom];
  double masses_[HeadScan::kRoom];
  std::int64_t count_;
  double mass_;
  bool is_whole_ = true;
};

// The token; -1 where the head does not tell.
inline std::int32_t draw_from_head(const Spectrum& spectrum, const Filters& filters, double u) {
  const Head head(spectrum);
  std::int64_t count = head.is_whole() ? head.count() : spectrum.n;  // that are kept
  double mass = head.all_mass();
  const auto keep = [&](std::int64_t most) {
    if (most >= count) return true;
    if (most > head.count()) return false;
    count = most;
    mass = head.mass(most);
    return true;
  };
  if (filters.top_k > 0 && !keep(filters.top_k)) return -1;
  std::int64_t least = count;
  if (filters.top_p < 1.0) {
    const double target = filters.top_p * mass;
    const std::int64_t few = head.shortest([&](double m) { return m >= target; });
    if (few == 0 && count > head.count()) return -1;
    if (few > 0) least = std::min(least, few);
  }
  if (filters.min_p > 0.0f) {
    const std::int64_t enough = head.at_least(filters.min_p);
    if (enough == head.count() && enough < least) return -1;
    least = std::max<std::int64_t>(1, std::min(least, enough));
  }
  if (!keep(least)) return -1;
  const double target = u * mass;
  const std::int64_t drawn = head.shortest([&](double m) { return m > target; });
  if (drawn > 0) return head.id(std::min(drawn, count) - 1);
  return count <= head.count() ? head.id(count - 1) : -1;
}

// --- of a flat distribution: a histogram over x, of which few buckets are sorted -----------------

// The first `count` candidates in order of falling x; `id` is the last of them.
struct Prefix {
  std::int64_t count;
  double mass;
  std::int32_t id;
};

// The candidates of one row, sorted where somebody looks.
class Order {
 public:
  Order(const Spectrum& spectrum, Histogram& histogram)
      : spectrum_(spectrum), histogram_(histogram) {}

  // The shortest non-empty prefix with reached(prefix), which must grow with it; else all.
  template <class Reached>
  Prefix shortest(Reached reached) {
    Prefix at{0, 0.0, -1};
    std::int64_t last = -1;
    for (std::int64_t b = 0; b < Histogram::kBuckets; ++b) {
      if (histogram_.count[b] == 0) continue;
      last = b;
      const Prefix whole{at.count + histogram_.count[b], at.mass + histogram_.mass[b], -1};
      if (reached(whole)) {
        for (const Candidate& c : sorted(b)) {
          at = {at.count + 1, at.mass + static_cast<double>(c.term), c.id};
          if (reached(at)) return at;
        }
      }
      at = whole;  // not reached after all: the two sums are rounded differently
    }
    at.id = sorted(last).back().id;
    return at;
  }

 private:
  const std::vector<Candidate>& sorted(std::int64_t bucket) {
    for (const auto& [number, candidates] : seen_) {
      if (number == bucket) return candidates;
    }
    const std::size_t count = histogram_.count[bucket];
    std::vector<std::int32_t> ids(count);
    std::vector<float> terms(count);
    kernels().gather_bucket(spectrum_, bucket, ids.data(), terms.data());
    std::vector<Candidate> found(count);
    for (std::size_t i = 0; i < count; ++i) {
      found[i] = {spectrum_.logits[ids[i]] / spectrum_.temperature, ids[i], terms[i]};
    }
    std::sort(found.begin(), found.end(), comes_first);
    return seen_.emplace_back(bucket, std::move(found)).second;
  }

  const Spectrum& spectrum_;
  Histogram& histogram_;
  std::vector<std::pair<std::int64_t, std::vector<Candidate>>> seen_;
};

inline std::int32_t draw_from_all(const Spectrum& spectrum, const Filters& filters, double u,
                                  Histogram& histogram) {
  const std::int64_t enough = kernels().histogram(spectrum, filters.min_p, &histogram);
  Order order(spectrum, histogram);
  Prefix kept{spectrum.n, 0.0, -1};
  for (double mass : histogram.mass) kept.mass += mass;
  if (filters.top_k > 0 && filters.top_k < kept.count) {
    kept = order.shortest([&](const Prefix& p) { return p.count >= filters.top_k; });
  }
  std::int64_t count = kept.count;
  if (filters.top_p < 1.0) {
    const double target = filters.top_p * kept.mass;
    count = order.shortest([&](const Prefix& p) {
      return p.mass >= target || p.count >= kept.count;
    }).count;
  }
  if (filters.min_p > 0.0f) count = std::max<std::int64_t>(1, std::min(count, enough));
  if (count < kept.count) {
    kept = order.shortest([&](const Prefix& p) { return p.count >= count; });
  }
  const double target = u * kept.mass;
  return order.shortest([&](const Prefix& p) {
    return p.mass > target || p.count >= kept.count;
  }).id;
}

inline std::int32_t draw(const Spectrum& spectrum, const Filters& filters, double u,
                         Histogram& histogram) {
  const std::int32_t found = draw_from_head(spectrum, filters, u);
  return found >= 0 ? found : draw_from_all(spectrum, filters, u, histogram);
}

}  // namespace voltapile
