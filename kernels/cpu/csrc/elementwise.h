// Norms and rotations, one row or head at a time. Included by vec_kernels.h.
#pragma once

namespace voltapile {
namespace VOLTAPILE_ISA {
namespace {

inline float sum_of_squares(const float* x, std::int64_t n) {
  Vec a = splat(0.0f), b = splat(0.0f);
  std::int64_t i = 0;
  for (; i + 2 * W <= n; i += 2 * W) {
    const Vec u = load(x + i), v = load(x + i + W);
    a = madd(u, u, a);
    b = madd(v, v, b);
  }
  float tail = 0.0f;
  for (; i < n; ++i) tail += x[i] * x[i];
  return sum_lanes(a + b) + tail;
}

inline void rms_norm(const RmsNormArgs& args, Team& team) {
  const auto [begin, end] = team.share(args.rows);
  const std::int64_t n = args.cols;
  for (std::int64_t row = begin; row < end; ++row) {
    const float* x = args.x + row * n;
    float* out = args.out + row * n;
    const float mean = sum_of_squares(x, n) / static_cast<float>(n);
    const float scale = 1.0f / __builtin_sqrtf(mean + args.eps);
    const Vec scales = splat(scale);
    std::int64_t i = 0;
    for (; i + W <= n; i += W) {
      const Vec y = load(x + i) * scales * load(args.weight + i);
      store(out + i, args.accumulate ? load(out + i) + y : y);
    }
    for (; i < n; ++i) {
      const float y = x[i] * scale * args.weight[i];
      out[i] = args.accumulate ? out[i] + y : y;
    }
  }
}

inline void rotate(float* a, float* b, float cosine, float sine) {
  const float x = *a, y = *b;
  *a = x * cosine - y * sine;
  *b = x * sine + y * cosine;
}

inline void rope(const RopeArgs& args, Team& team) {
  const auto [begin, end] = team.share(args.tokens * args.heads);
  for (std::int64_t unit = begin; unit < end; ++unit) {
    float* x = args.x + unit * args.head_dim;
    const float* angles = args.angles + unit / args.heads * args.pairs * 2;
    const std::int64_t step = args.neox ? 1 : 2, apart = args.neox ? args.pairs : 1;
    for (std::int64_t i = 0; i < args.pairs; ++i) {
      rotate(x + i * step, x + i * step + apart, angles[2 * i], angles[2 * i + 1]);
    }
  }
}

}  // namespace
}  // namespace VOLTAPILE_ISA
}  // namespace voltapile
