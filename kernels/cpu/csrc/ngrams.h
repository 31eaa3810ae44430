// What n-gram embeddings add to the residual streams. Included by vec_kernels.h.
#pragma once

namespace voltapile {
namespace VOLTAPILE_ISA {
namespace {

// norm(key) . norm(x) of one stream.
inline float stream_score(const NGramArgs& args, std::int64_t unit, std::int64_t weights) {
  const float* key = args.key + unit * args.width;
  const float* x = args.x + unit * args.width;
  const float* a = args.norm_key + weights;
  const float* b = args.norm_query + weights;
  Vec sum = splat(0.0f);
  for (std::int64_t i = 0; i < args.width; i += W) {
    const std::int64_t n = args.width - i < W ? args.width - i : W;
    const Vec left = load_part(key + i, n) * load_part(a + i, n);
    sum = madd(left, load_part(x + i, n) * load_part(b + i, n), sum);
  }
  return sum_lanes(sum) * inverse_root(key, args.width, args.eps) *
         inverse_root(x, args.width, args.eps);
}

// added = factor * value, and its norm, which the convolution takes.
inline void gate_stream(const NGramArgs& args, std::int64_t unit) {
  const std::int64_t weights = unit % args.count * args.width;
  const float root = __builtin_sqrtf(static_cast<float>(args.width));
  const float score = stream_score(args, unit, weights) / root;
  const float size = __builtin_fabsf(score);
  const float bent = __builtin_sqrtf(size > 1e-6f ? size : size == size ? 1e-6f : size);
  const float sign = score > 0.0f ? 1.0f : score < 0.0f ? -1.0f : 0.0f;
  const Vec factor = splat(sigmoid_one(sign * bent));
  const float* value = args.value + unit / args.count * args.width;
  float* added = args.added + unit * args.width;
  each(added, value, args.width, [=](Vec, Vec v) { return factor * v; });
  scale_row(added, inverse_root(added, args.width, args.eps), args.norm_conv + weights,
            args.width, args.normed + unit * args.width);
}

inline void ngram_add(const NGramArgs& args, Team& team) {
  const Notes notes(args.step, args.history.logged, team.local);
  const auto [first, last] = team.share(args.step.tokens * args.count);
  for (std::int64_t unit = first; unit < last; ++unit) gate_stream(args, unit);
  team.barrier();
  const std::int64_t all = args.count * args.width;
  const bool is_provisional = args.step.is_provisional;
  const auto [begin, end] = team.share(all, W);
  for_runs(args.step, notes, [&, begin = begin, end = end](const Run& run) {
    const Inputs inputs(args.history, run, args.normed);
    for (std::int64_t i = 0; i < run.tokens(); ++i) {
      for (std::int64_t c = begin; c < end; c += W) {
        const std::int64_t n = end - c < W ? end - c : W, at = (run.begin + i) * all + c;
        const Vec bent =
            convolve(inputs, run.kept + i, args.taps, args.kernel, args.dilation, c, n);
        const Vec added = load_part(args.added + at, n) + bent;
        store_part(args.x + at, load_part(args.x + at, n) + added, n);
      }
    }
    remember(args.history, run, inputs, is_provisional, begin, end);
    if (team.rank == 0) args.history.logged[run.slot] = logged_after(run, is_provisional);
  });
}

}  // namespace
}  // namespace VOLTAPILE_ISA
}  // namespace voltapile
