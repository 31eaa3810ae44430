// Runs of a step's tokens, and the inputs of their causal convolutions. Included by vec_kernels.h.
#pragma once

namespace voltapile {
namespace VOLTAPILE_ISA {
namespace {

// Neighbouring tokens [begin, end) of one slot. kept: of a provisional step before, come first.
struct Run {
  std::int64_t begin, end, slot, kept;
  bool is_fresh;  // from position 0: what the slot remembers is another request's
  std::int64_t tokens() const { return end - begin; }
};

// How many inputs of a provisional step stand, by number of the run. Each thread notes that for
// itself: what is logged may be overwritten before another one looks.
struct Notes {
  std::uint8_t* kept;

  Notes(const StepView& step, const std::int32_t* logged, std::uint8_t* memory) : kept(memory) {
    std::int64_t number = 0;
    for (std::int64_t t = 0; t < step.tokens; ++t) {
      const std::int64_t slot = step.slots[t];
      if (t > 0 && step.slots[t - 1] == slot) continue;
      std::int64_t count = step.kept ? step.kept[slot] : kMaxProvisional;
      count = logged[slot] < count ? logged[slot] : count;
      count = count < 0 || step.positions[t] == 0 ? 0 : count;
      kept[number++] = static_cast<std::uint8_t>(count < kMaxProvisional ? count
                                                                         : kMaxProvisional);
    }
  }
  static std::int64_t bytes(const StepView& step) { return (step.tokens + 63) / 64 * 64; }
};

// f(run) for all of them.
template <class F>
inline void for_runs(const StepView& step, const Notes& notes, F f) {
  std::int64_t number = 0;
  for (std::int64_t t = 0; t < step.tokens; ++number) {
    Run run{t, t, step.slots[t], notes.kept[number], step.positions[t] == 0};
    while (run.end < step.tokens && step.slots[run.end] == run.slot) ++run.end;
    f(run);
    t = run.end;
  }
}

// The inputs of a run, [-depth, kept + tokens): what was before, what stands, and its own.
struct Inputs {
  Inputs(const History& history, const Run& run, const float* own)
      : before(run.is_fresh ? nullptr
                            : history.rows + run.slot * history.depth * history.width),
        log(history.log + run.slot * kMaxProvisional * history.width),
        own(own + run.begin * history.width),
        depth(history.depth), kept(run.kept), width(history.width) {}

  const float* row(std::int64_t i) const {  // null: zeros
    if (i < 0) return before ? before + (depth + i) * width : nullptr;
    return i < kept ? log + i * width : own + (i - kept) * width;
  }
  const float *before, *log, *own;
  std::int64_t depth, kept, width;
};

// Columns [column, column + n), n <= W, of silu of the convolution at input i.
inline Vec convolve(const Inputs& inputs, std::int64_t i, const float* taps, std::int64_t kernel,
                    std::int64_t dilation, std::int64_t column, std::int64_t n) {
  Vec sum = splat(0.0f);
  for (std::int64_t j = 0; j < kernel; ++j) {
    const float* row = inputs.row(i - (kernel - 1 - j) * dilation);
    if (!row) continue;
    const float* tap = taps + j * inputs.width + column;
    sum = madd(load_part(tap, n), load_part(row + column, n), sum);
  }
  return silu_of(sum);
}

// Columns [begin, end) of what a slot remembers after a run: up to its kept inputs, with its own
// in the log, if it is provisional; else all.
inline void remember(const History& history, const Run& run, const Inputs& inputs,
                     bool is_provisional, std::int64_t begin, std::int64_t end) {
  const std::int64_t last = run.kept + (is_provisional ? 0 : run.tokens());
  const std::size_t nbytes = (end - begin) * 4;
  float* rows = history.rows + run.slot * history.depth * history.width + begin;
  for (std::int64_t r = 0; r < history.depth; ++r) {
    const float* from = inputs.row(last - history.depth + r);
    float* to = rows + r * history.width;
    if (!from) {
      __builtin_memset(to, 0, nbytes);
    } else if (from + begin != to) {
      __builtin_memcpy(to, from + begin, nbytes);
    }
  }
  if (!is_provisional) return;
  float* log = history.log + run.slot * kMaxProvisional * history.width + begin;
  for (std::int64_t i = 0; i < run.tokens() && i < kMaxProvisional; ++i) {
    __builtin_memcpy(log + i * history.width, inputs.own + i * history.width + begin, nbytes);
  }
}

inline std::int32_t logged_after(const Run& run, bool is_provisional) {
  if (!is_provisional) return 0;
  return static_cast<std::int32_t>(run.tokens() < kMaxProvisional ? run.tokens()
                                                                  : kMaxProvisional);
}

}  // namespace
}  // namespace VOLTAPILE_ISA
}  // namespace voltapile
