// Choosing tokens as kernels/random.md says, without sorting the vocabulary: candidates fall into
// a histogram over x, and only the few buckets in which a cut or the draw lies are sorted.
#include <algorithm>
#include <cmath>
#include <vector>

#include "commands.h"

namespace voltapile {
namespace {

constexpr std::int64_t kChunk = 4096;   // logits in one RowStats
constexpr float kSpan = 110.0f;         // exp(-kSpan) is 0 in float32
enum Finish { kRunning, kStop, kLength, kDoneBefore, kNotFinite };  // kernels/ops.py

std::uint64_t splitmix(std::uint64_t z) {
  z += 0x9E3779B97F4A7C15;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  return z ^ (z >> 31);
}

double uniform(std::uint64_t seed, std::uint64_t position, std::uint64_t purpose) {
  const std::uint64_t bits = splitmix(splitmix(splitmix(seed) ^ position) ^ purpose) >> 32;
  return static_cast<double>(bits >> 8) * 0x1p-24;
}

struct Candidate {
  std::int32_t id;
  float term;  // exp(x - top)
};

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
    for (std::size_t i = 0; i < count; ++i) found[i] = {ids[i], terms[i]};
    std::sort(found.begin(), found.end(), [this](const Candidate& a, const Candidate& b) {
      const float x = spectrum_.logits[a.id] / spectrum_.temperature;
      const float y = spectrum_.logits[b.id] / spectrum_.temperature;
      return x > y || (x == y && a.id < b.id);
    });
    return seen_.emplace_back(bucket, std::move(found)).second;
  }

  const Spectrum& spectrum_;
  Histogram& histogram_;
  std::vector<std::pair<std::int64_t, std::vector<Candidate>>> seen_;
};

struct Filters {
  std::int64_t top_k;
  double top_p;
  float min_p;
};

std::int32_t draw(const Spectrum& spectrum, const Filters& filters, double u, Histogram& histogram) {
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

class Sample final : public Command {
 public:
  Sample(const float* logits, std::int64_t vocab, const BatchView& batch, const SlotView& state,
         const OutputView& out)
      : logits_(logits), vocab_(vocab), batch_(batch), state_(state), out_(out),
        chunks_((vocab + kChunk - 1) / kChunk), stats_(batch.num_outputs * chunks_) {}

  void run(Team& team) override {
    const auto [begin, end] = team.share(batch_.num_outputs * chunks_);
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t start = i % chunks_ * kChunk;
      stats_[i] = kernels().row_stats(row(i / chunks_) + start, std::min(kChunk, vocab_ - start));
    }
    team.barrier();
    auto& histogram = *reinterpret_cast<Histogram*>(team.local);
    for (std::int64_t r = team.rank; r < batch_.num_outputs; r += team.size) {
      choose(r, histogram);
    }
  }

 private:
  const float* row(std::int64_t r) const { return logits_ + r * vocab_; }

  // Of the whole row.
  RowStats stats(std::int64_t r) const {
    const RowStats* parts = stats_.data() + r * chunks_;
    RowStats all = parts[0];
    for (std::int64_t c = 1; c < chunks_; ++c) {
      all.max = std::max(all.max, parts[c].max);
      all.min = std::min(all.min, parts[c].min);
      all.is_finite = all.is_finite && parts[c].is_finite;
    }
    all.sum = 0.0;
    for (std::int64_t c = 0; c < chunks_; ++c) {
      all.sum += parts[c].sum * std::exp(static_cast<double>(parts[c].max - all.max));
    }
    return all;
  }

  std::int32_t greedy(std::int64_t r, float max) const {
    std::int64_t c = 0;
    while (stats_[r * chunks_ + c].max != max) ++c;
    const float* x = row(r);
    std::int64_t i = c * kChunk;
    while (x[i] != max) ++i;
    return static_cast<std::int32_t>(i);
  }

  std::int32_t token(std::int64_t r, std::int32_t slot, std::int32_t position,
                     const RowStats& all, Histogram& histogram) const {
    const float temperature = state_.temperature[slot];
    const float top = all.max / temperature;
    // A temperature so small that x overflows is greedy in effect.
    if (!(temperature > 0.0f) || !std::isfinite(top)) return greedy(r, all.max);
    const float span = std::min(top - all.min / temperature, kSpan);
    const float scale = span > 0.0f ? Histogram::kBuckets / span : 1.0f;
    const Spectrum spectrum{row(r), vocab_, temperature, top, scale};
    const Filters filters{state_.top_k[slot], state_.top_p[slot], state_.min_p[slot]};
    const double u = uniform(state_.seed[slot], static_cast<std::uint64_t>(position), 0);
    return draw(spectrum, filters, u, histogram);
  }

  Finish finish(std::int32_t slot, std::int32_t token, std::int32_t position) const {
    const std::int32_t* stops = state_.stop_ids + slot * state_.num_stop_ids;
    if (std::find(stops, stops + state_.num_stop_ids, token) != stops + state_.num_stop_ids) {
      return kStop;
    }
    return position + 1 >= state_.max_position[slot] ? kLength : kRunning;
  }

  void choose(std::int64_t r, Histogram& histogram) {
    const std::int32_t t = batch_.outputs[r], slot = batch_.slots[t];
    const std::int32_t position = batch_.positions[t] + 1;
    out_.tokens[r] = -1;
    out_.logprobs[r] = 0.0f;
    if (state_.finished[slot] != kRunning) {
      out_.finish[r] = kDoneBefore;
      return;
    }
    const RowStats all = stats(r);
    if (!all.is_finite) {
      out_.finish[r] = state_.finished[slot] = kNotFinite;
      return;
    }
    const std::int32_t chosen = token(r, slot, position, all, histogram);
    out_.tokens[r] = state_.last_token[slot] = chosen;
    out_.logprobs[r] =
        static_cast<float>(static_cast<double>(row(r)[chosen] - all.max) - std::log(all.sum));
    state_.next_position[slot] = position;
    out_.finish[r] = state_.finished[slot] = finish(slot, chosen, position);
  }

  const float* logits_;
  std::int64_t vocab_;
  BatchView batch_;
  SlotView state_;
  OutputView out_;
  std::int64_t chunks_;
  std::vector<RowStats> stats_;
};

}  // namespace

std::unique_ptr<Command> make_sample(const float* logits, std::int64_t vocab,
                                     const BatchView& batch, const SlotView& state,
                                     const OutputView& out) {
  return std::make_unique<Sample>(logits, vocab, batch, state, out);
}

}  // namespace voltapile
