// The op that chooses tokens, as kernels/random.md says: rows are adjusted, measured, drawn from.
#include <algorithm>
#include <cmath>
#include <vector>

#include "commands.h"
#include "sample_adjust.h"
#include "sample_draw.h"

namespace voltapile {
namespace {

constexpr std::int64_t kChunk = 4096;   // logits in one RowStats
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

// Of the parts of a row, which follow each other.
RowStats merge(const RowStats* parts, std::int64_t count) {
  RowStats all = parts[0];
  for (std::int64_t c = 1; c < count; ++c) {
    all.max = std::max(all.max, parts[c].max);
    all.min = std::min(all.min, parts[c].min);
    all.is_bad = all.is_bad || parts[c].is_bad;
  }
  all.sum = 0.0;
  for (std::int64_t c = 0; c < count && std::isfinite(all.max); ++c) {
    all.sum += parts[c].sum * std::exp(static_cast<double>(parts[c].max - all.max));
  }
  return all;
}

bool can_choose(const RowStats& all) { return !all.is_bad && std::isfinite(all.max); }

class Sample final : public Command {
 public:
  Sample(const float* logits, std::int64_t vocab, const BatchView& batch, const SlotView& state,
         const OutputView& out, float* adjusted)
      : logits_(logits), vocab_(vocab), batch_(batch), state_(state), out_(out),
        adjusted_(adjusted), chunks_((vocab + kChunk - 1) / kChunk),
        stats_(batch.num_outputs * chunks_), adjusted_stats_(batch.num_outputs * chunks_) {}

  void run(Team& team) override {
    if (adjust_rows(team)) team.barrier();
    const auto [begin, end] = team.share(batch_.num_outputs * chunks_);
    for (std::int64_t i = begin; i < end; ++i) measure(i / chunks_, i % chunks_);
    team.barrier();
    auto& histogram = *reinterpret_cast<Histogram*>(team.local);
    for (std::int64_t r = team.rank; r < batch_.num_outputs; r += team.size) {
      choose(r, histogram);
    }
  }

 private:
  // What is chosen from in row r: the logits and their statistics.
  struct Row {
    const float* x;
    const RowStats* stats;
  };

  std::int32_t slot(std::int64_t r) const { return batch_.slots[batch_.outputs[r]]; }
  std::int32_t position(std::int64_t r) const { return batch_.positions[batch_.outputs[r]] + 1; }
  bool is_running(std::int64_t r) const { return state_.finished[slot(r)] == kRunning; }
  bool is_changed(std::int64_t r) const { return is_running(r) && is_adjusted(state_, slot(r)); }
  Row raw(std::int64_t r) const { return {logits_ + r * vocab_, stats_.data() + r * chunks_}; }
  Row changed(std::int64_t r) const {
    return {adjusted_ + r * vocab_, adjusted_stats_.data() + r * chunks_};
  }

  // This rank's share; true if there was any for the team.
  bool adjust_rows(Team& team) {
    bool any = false;
    for (std::int64_t r = 0; r < batch_.num_outputs; ++r) {
      if (!is_changed(r)) continue;
      any = true;
      if (r % team.size != team.rank) continue;
      adjust(raw(r).x, vocab_, state_, slot(r), position(r), adjusted_ + r * vocab_,
             reinterpret_cast<Occurrence*>(team.local));
    }
    return any;
  }

  // Of one chunk of a row.
  void measure(std::int64_t r, std::int64_t chunk) {
    if (!is_running(r)) return;
    const std::int64_t start = chunk * kChunk, n = std::min(kChunk, vocab_ - start);
    const bool with_sum = state_.logprobs[slot(r)] >= 0;
    stats_[r * chunks_ + chunk] = kernels().row_stats(raw(r).x + start, n, with_sum);
    if (!is_changed(r)) return;
    adjusted_stats_[r * chunks_ + chunk] = kernels().row_stats(changed(r).x + start, n, false);
  }

  std::int32_t greedy(const Row& row, float max) const {
    std::int64_t c = 0;
    while (row.stats[c].max != max) ++c;
    std::int64_t i = c * kChunk;
    while (row.x[i] != max) ++i;
    return static_cast<std::int32_t>(i);
  }

  std::int32_t token(std::int64_t r, const Row& row, const RowStats& all,
                     Histogram& histogram) const {
    const float temperature = state_.temperature[slot(r)];
    const float top = all.max / temperature;
    // A temperature so small that x overflows is greedy in effect.
    if (!(temperature > 0.0f) || !std::isfinite(top)) return greedy(row, all.max);
    const float span = std::min(top - all.min / temperature, Histogram::kSpan);
    const float scale = span > 0.0f ? Histogram::kBuckets / span : 1.0f;
    const Spectrum spectrum{row.x, vocab_, temperature, top, scale};
    const Filters filters{state_.top_k[slot(r)], state_.top_p[slot(r)], state_.min_p[slot(r)]};
    const auto at = static_cast<std::uint64_t>(position(r));
    return draw(spectrum, filters, uniform(state_.seed[slot(r)], at, 0), histogram);
  }

  Finish finish(std::int32_t slot, std::int32_t token, std::int32_t position) const {
    const std::int32_t* stops = state_.stop_ids + slot * state_.num_stop_ids;
    if (std::find(stops, stops + state_.num_stop_ids, token) != stops + state_.num_stop_ids) {
      return kStop;
    }
    return position + 1 >= state_.max_position[slot] ? kLength : kRunning;
  }

  void write_logprobs(std::int64_t r, std::int32_t chosen, const RowStats& all) {
    std::int32_t* ids = out_.logprob_ids + r * out_.num_logprobs;
    float* values = out_.logprobs + r * out_.num_logprobs;
    const std::int64_t most =
        std::min<std::int64_t>(state_.logprobs[slot(r)], out_.num_logprobs - 1);
    const std::int64_t found = kernels().best(raw(r).x, vocab_, most, ids + 1, values + 1);
    ids[0] = chosen;
    values[0] = raw(r).x[chosen];
    const double log_sum = std::log(all.sum);
    for (std::int64_t i = 0; i <= found; ++i) {
      values[i] = static_cast<float>(static_cast<double>(values[i] - all.max) - log_sum);
    }
  }

  void choose(std::int64_t r, Histogram& histogram) {
    const std::int32_t s = slot(r);
    out_.tokens[r] = -1;
    std::fill_n(out_.logprob_ids + r * out_.num_logprobs, out_.num_logprobs, -1);
    std::fill_n(out_.logprobs + r * out_.num_logprobs, out_.num_logprobs, 0.0f);
    if (!is_running(r)) {
      out_.finish[r] = kDoneBefore;
      return;
    }
    const RowStats before = merge(raw(r).stats, chunks_);
    const Row row = is_changed(r) ? changed(r) : raw(r);
    const RowStats all = is_changed(r) ? merge(row.stats, chunks_) : before;
    if (!can_choose(before) || !can_choose(all)) {
      out_.finish[r] = state_.finished[s] = kNotFinite;
      return;
    }
    const std::int32_t forced = state_.forced[s];
    const std::int32_t chosen = forced < 0 ? token(r, row, all, histogram) : forced;
    out_.tokens[r] = state_.last_token[s] = chosen;
    if (state_.logprobs[s] >= 0) write_logprobs(r, chosen, before);
    state_.next_position[s] = position(r);
    out_.finish[r] = state_.finished[s] = finish(s, chosen, position(r));
  }

  const float* logits_;
  std::int64_t vocab_;
  BatchView batch_;
  SlotView state_;
  OutputView out_;
  float* adjusted_;
  std::int64_t chunks_;
  std::vector<RowStats> stats_, adjusted_stats_;
};

}  // namespace

std::unique_ptr<Command> make_sample(const float* logits, std::int64_t vocab,
                                     const BatchView& batch, const SlotView& state,
                                     const OutputView& out, float* adjusted) {
  return std::make_unique<Sample>(logits, vocab, batch, state, out, adjusted);
}

}  // namespace voltapile
