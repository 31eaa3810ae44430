// Gates and residual streams. Included by vec_kernels.h.
#pragma once

namespace voltapile {
namespace VOLTAPILE_ISA {
namespace {

// The first n values, at most W; the rest is zero, and is not written.
inline Vec load_part(const float* p, std::int64_t n) {
  if (n >= W) return load(p);
  float part[W] = {};
  __builtin_memcpy(part, p, n * 4);
  return load(part);
}

inline void store_part(float* p, Vec x, std::int64_t n) {
  if (n >= W) return store(p, x);
  float part[W];
  store(part, x);
  __builtin_memcpy(p, part, n * 4);
}

inline Vec sigmoid(Vec x) { return splat(1.0f) / (splat(1.0f) + exp_vec(-x)); }
inline Vec silu_of(Vec x) { return x * sigmoid(x); }
inline float sigmoid_one(float x) { return 1.0f / (1.0f + exp_one(-x)); }

// y[i] = f(y[i], x[i]); a value's bits do not depend on its place.
template <class F>
inline void each(float* y, const float* x, std::int64_t n, F f) {
  std::int64_t i = 0;
  for (; i + W <= n; i += W) store(y + i, f(load(y + i), load(x + i)));
  if (i < n) store_part(y + i, f(load_part(y + i, n - i), load_part(x + i, n - i)), n - i);
}

inline void silu(const SiluArgs& args, Team& team) {
  const auto [begin, end] = team.share(args.count, W);
  const Vec scale = splat(args.scale);
  each(args.x + begin, args.x + begin, end - begin,
       [=](Vec x, Vec) { return silu_of(x * scale); });
}

inline void gate(const GateArgs& args, Team& team) {
  const auto [begin, end] = team.share(args.count, W);
  each(args.y + begin, args.gate + begin, end - begin,
       [](Vec y, Vec g) { return y * sigmoid(g); });
}

inline float dot(const float* a, const float* b, std::int64_t n) {
  Vec sum[2] = {splat(0.0f), splat(0.0f)};
  std::int64_t i = 0;
  for (; i + 2 * W <= n; i += 2 * W) {
    sum[0] = madd(load(a + i), load(b + i), sum[0]);
    sum[1] = madd(load(a + i + W), load(b + i + W), sum[1]);
  }
  float tail = 0.0f;
  for (; i < n; ++i) tail += a[i] * b[i];
  return sum_lanes(sum[0] + sum[1]) + tail;
}

inline void gate_rows(const GateRowsArgs& args, Team& team) {
  const auto [begin, end] = team.share(args.tokens);
  for (std::int64_t t = begin; t < end; ++t) {
    const Vec factor =
        splat(sigmoid_one(dot(args.x + t * args.width, args.weight, args.width)));
    float* y = args.y + t * args.cols;
    each(y, y, args.cols, [=](Vec v, Vec) { return v * factor; });
  }
}

inline float inverse_root(const float* x, std::int64_t n, float eps) {
  return 1.0f / __builtin_sqrtf(sum_of_squares(x, n) / static_cast<float>(n) + eps);
}

// out = x * scale * weight.
inline void scale_row(const float* x, float scale, const float* weight, std::int64_t n,
                      float* out) {
  const Vec scales = splat(scale);
  std::int64_t i = 0;
  for (; i + W <= n; i += W) store(out + i, load(x + i) * scales * load(weight + i));
  for (; i < n; ++i) out[i] = x[i] * scale * weight[i];
}

inline void stream_norm(const StreamNormArgs& args, Team& team) {
  const auto [begin, end] = team.share(args.tokens * args.count);
  for (std::int64_t unit = begin; unit < end; ++unit) {
    const std::int64_t stream = unit % args.count * args.width;
    const float* x = args.x + unit * args.width;
    scale_row(x, inverse_root(x, args.width, args.eps), args.weight + stream, args.width,
              args.out + unit * args.width);
  }
}

// Threads share the columns: one token has as many as many have.
inline void stream_mix(const StreamMixArgs& args, Team& team) {
  const auto [begin, end] = team.share(args.width, W);
  const Vec share = splat(1.0f / static_cast<float>(args.count));
  for (std::int64_t t = 0; t < args.tokens; ++t) {
    const float* x = args.x + t * args.count * args.width;
    const float* gates = args.gate + t * args.count * args.width;
    for (std::int64_t d = begin; d < end; d += W) {
      const std::int64_t n = end - d < W ? end - d : W;
      Vec sum = splat(0.0f);
      for (std::int64_t s = 0; s < args.count; ++s) {
        const std::int64_t at = s * args.width + d;
        sum = sum + load_part(x + at, n) * sigmoid(load_part(gates + at, n));
      }
      store_part(args.out + t * args.width + d, sum * share, n);
    }
  }
}

inline void stream_add(const StreamAddArgs& args, Team& team) {
  const auto [begin, end] = team.share(args.width, W);
  for (std::int64_t t = 0; t < args.tokens; ++t) {
    const float* y = args.y + t * args.width;
    for (std::int64_t s = 0; s < args.count; ++s) {
      const float inject = args.inject[t * args.count + s] / static_cast<float>(args.count);
      const Vec factor = splat(2.0f * sigmoid_one(inject));
      float* x = args.x + (t * args.count + s) * args.width;
      each(x + begin, y + begin, end - begin, [=](Vec u, Vec v) { return u + factor * v; });
    }
  }
}

}  // namespace
}  // namespace VOLTAPILE_ISA
}  // namespace voltapile
