// Gated delta nets: a head of a run at a time. Included by vec_kernels.h.
//
// A head's matrix stays in the first-level cache, some columns of it at a time, while all tokens of
// a piece go through it; the arithmetic is the plain recurrence for any number of tokens, so that
// bits depend neither on chunks nor on drafts. A matrix is read once and written once for a token:
// with u = S'k and p = S'q of the matrix S before, e = beta (v - g u) and o = g p + (k . q) e.
#pragma once

namespace voltapile {
namespace VOLTAPILE_ISA {
namespace {

constexpr int kColumnVecs = W == 16 ? 4 : 2;  // what the registers hold

// A thread's memory: one piece's k, q, v and o [inputs][pitch], and numbers of each input.
struct DeltaLocal {
  std::int64_t pitch;
  float *k, *q, *v, *o, *beta, *decay, *kq, *matrix;
  std::uint8_t* notes;

  DeltaLocal(const DeltaArgs& args, std::uint8_t* base)
      : pitch((args.dim + W - 1) / W * W), notes(base) {
    float* next = reinterpret_cast<float*>(base + Notes::bytes(args.step));
    const auto take = [&](std::int64_t floats) {
      float* const taken = next;
      next += floats;
      return taken;
    };
    matrix = take(args.dim * pitch);
    for (float** each : {&k, &q, &v, &o}) *each = take(kPieceInputs * pitch);
    for (float** each : {&beta, &decay, &kq}) *each = take(kPieceInputs);
  }
};

// x[0 .. dim) divided by sqrt(sum of squares + eps), times scale.
inline void normalise(float* x, std::int64_t dim, float eps, float scale) {
  const Vec factor = splat(scale / __builtin_sqrtf(sum_of_squares(x, dim) + eps));
  each(x, x, dim, [=](Vec y, Vec) { return y * factor; });
}

inline float softplus(float x) {
  return (x > 0.0f ? x : 0.0f) + __builtin_log1pf(__builtin_expf(-__builtin_fabsf(x)));
}

// What input i of a run gives head h: k, q, v after the convolution, beta and decay.
inline void take_input(const DeltaArgs& args, const Run& run, const Inputs& inputs,
                       std::int64_t head, std::int64_t i, std::int64_t at, DeltaLocal& local) {
  const std::int64_t dim = args.dim, keys = args.key_heads * dim;
  const std::int64_t key = args.key_head_of[head] * dim;
  const std::int64_t columns[] = {keys + key, key, 2 * keys + head * dim};
  float* const rows[] = {local.k + at * local.pitch, local.q + at * local.pitch,
                         local.v + at * local.pitch};
  for (int part = 0; part < 3; ++part) {
    for (std::int64_t d = 0; d < dim; d += W) {
      store_part(rows[part] + d,
                 convolve(inputs, i, args.taps, args.kernel, 1, columns[part] + d,
                          dim - d < W ? dim - d : W),
                 dim - d < W ? dim - d : W);
    }
  }
  normalise(rows[0], dim, args.eps, 1.0f);
  normalise(rows[1], dim, args.eps, 1.0f / __builtin_sqrtf(static_cast<float>(dim)));
  const bool stands = i < run.kept;
  const std::int64_t logged = (run.slot * kMaxProvisional + i) * args.value_heads + head;
  const std::int64_t own = (run.begin + i - run.kept) * args.value_heads + head;
  const float b = stands ? args.log_b[logged] : args.b[own];
  const float a = stands ? args.log_a[logged] : args.a[own];
  local.beta[at] = 1.0f / (1.0f + __builtin_expf(-b));
  local.decay[at] = __builtin_expf(args.rate[head] * softplus(a + args.dt[head]));
  local.kq[at] = dot(rows[0], rows[1], dim);
}

// N vectors of columns (of the last one `lanes` if it is cut) of a matrix [dim][dim] go through
// `count` inputs. One pass over them ends an input and begins the next: u = S'k and p = S'q.
template <int N, bool kCut>
inline void recur(const DeltaLocal& local, float* matrix, std::int64_t dim, std::int64_t column,
                  std::int64_t lanes, std::int64_t count) {
  const auto get = [=](const float* x) { return kCut ? load_part(x, lanes) : load(x); };
  const auto put = [=](float* x, Vec v) { kCut ? store_part(x, v, lanes) : store(x, v); };
  const std::int64_t pitch = local.pitch;
  matrix += column;
  Vec u[N], p[N], e[N];
  for (int j = 0; j < N; ++j) u[j] = p[j] = splat(0.0f);
  for (std::int64_t i = 0; i < dim; ++i) {
    const Vec k = splat(local.k[i]), q = splat(local.q[i]);
    for (int j = 0; j < N; ++j) {
      const Vec s = get(matrix + i * dim + j * W);
      u[j] = madd(k, s, u[j]);
      p[j] = madd(q, s, p[j]);
    }
  }
  for (std::int64_t t = 0; t < count; ++t) {
    const Vec decay = splat(local.decay[t]), beta = splat(local.beta[t]), kq = splat(local.kq[t]);
    for (int j = 0; j < N; ++j) {
      const std::int64_t at = t * pitch + column + j * W;
      e[j] = beta * (get(local.v + at) - decay * u[j]);
      put(local.o + at, madd(decay, p[j], kq * e[j]));
      u[j] = p[j] = splat(0.0f);
    }
    const float* k = local.k + t * pitch;
    const float* next_q = local.q + (t + 1) * pitch;
    if (t + 1 == count) {
      for (std::int64_t i = 0; i < dim; ++i) {
        for (int j = 0; j < N; ++j) {
          float* place = matrix + i * dim + j * W;
          put(place, madd(splat(k[i]), e[j], get(place) * decay));
        }
      }
      return;
    }
    for (std::int64_t i = 0; i < dim; ++i) {
      const Vec ks = splat(k[i]), nk = splat(k[pitch + i]), nq = splat(next_q[i]);
      for (int j = 0; j < N; ++j) {
        float* place = matrix + i * dim + j * W;
        const Vec s = madd(ks, e[j], get(place) * decay);
        put(place, s);
        u[j] = madd(nk, s, u[j]);
        p[j] = madd(nq, s, p[j]);
      }
    }
  }
}

inline void recur_all(const DeltaLocal& local, float* matrix, std::int64_t dim,
                      std::int64_t count) {
  std::int64_t c = 0;
  for (; c + kColumnVecs * W <= dim; c += kColumnVecs * W)
    recur<kColumnVecs, false>(local, matrix, dim, c, W, count);
  for (; c + W <= dim; c += W) recur<1, false>(local, matrix, dim, c, W, count);
  if (c < dim) recur<1, true>(local, matrix, dim, c, dim - c, count);
}

// out = norm of o, gated by z.
inline void write_head(const DeltaArgs& args, std::int64_t token, std::int64_t head,
                       const float* o) {
  const std::int64_t at = (token * args.value_heads + head) * args.dim;
  float* out = args.out + at;
  scale_row(o, inverse_root(o, args.dim, args.eps), args.norm, args.dim, out);
  if (args.gates_by_sigmoid) {
    each(out, args.z + at, args.dim, [](Vec y, Vec z) { return y * sigmoid(z); });
  } else {
    each(out, args.z + at, args.dim, [](Vec y, Vec z) { return y * silu_of(z); });
  }
}

// Inputs [begin, end) of a run through a head's matrix; those of the step itself are answered.
inline void run_inputs(const DeltaArgs& args, const Run& run, const Inputs& inputs,
                       std::int64_t head, std::int64_t begin, std::int64_t end, float* matrix,
                       DeltaLocal& local) {
  for (std::int64_t i = begin; i < end; i += kPieceInputs) {
    const std::int64_t count = end - i < kPieceInputs ? end - i : kPieceInputs;
    for (std::int64_t at = 0; at < count; ++at)
      take_input(args, run, inputs, head, i + at, at, local);
    recur_all(local, matrix, args.dim, count);
    for (std::int64_t at = 0; at < count; ++at) {
      const std::int64_t own = i + at - run.kept;
      if (own >= 0) write_head(args, run.begin + own, head, local.o + at * local.pitch);
    }
  }
}

inline void run_head(const DeltaArgs& args, const Run& run, std::int64_t head,
                     DeltaLocal& local) {
  const Inputs inputs(args.history, run, args.m);
  const std::int64_t size = args.dim * args.dim, end = run.kept + run.tokens();
  float* matrix = args.matrices + (run.slot * args.value_heads + head) * size;
  if (run.is_fresh) __builtin_memset(matrix, 0, size * 4);
  run_inputs(args, run, inputs, head, 0, run.kept, matrix, local);
  if (args.step.is_provisional) {
    __builtin_memcpy(local.matrix, matrix, size * 4);
    matrix = local.matrix;
  }
  run_inputs(args, run, inputs, head, run.kept, end, matrix, local);
}

inline void log_gates(const DeltaArgs& args, const Run& run) {
  for (std::int64_t i = 0; i < run.tokens() && i < kMaxProvisional; ++i) {
    const std::int64_t to = (run.slot * kMaxProvisional + i) * args.value_heads;
    const std::int64_t from = (run.begin + i) * args.value_heads;
    __builtin_memcpy(args.log_b + to, args.b + from, args.value_heads * 4);
    __builtin_memcpy(args.log_a + to, args.a + from, args.value_heads * 4);
  }
}

// Threads share heads of runs, by how many inputs they have; then channels of what is remembered.
inline void delta_net(const DeltaArgs& args, Team& team) {
  DeltaLocal local(args, team.local);
  const Notes notes(args.step, args.history.logged, local.notes);
  const std::int64_t heads = args.value_heads;
  std::int64_t total = 0, at = 0;
  for_runs(args.step, notes,
           [&](const Run& run) { total += heads * (run.kept + run.tokens()); });
  const auto [begin, end] = team.share(total);
  for_runs(args.step, notes, [&, begin = begin, end = end](const Run& run) {
    const std::int64_t one = run.kept + run.tokens();
    for (std::int64_t h = 0; h < heads; ++h, at += one)
      if (begin <= at && at < end) run_head(args, run, h, local);
  });
  team.barrier();
  const auto [first, last] = team.share(args.history.width, W);
  const bool is_provisional = args.step.is_provisional;
  for_runs(args.step, notes, [&, first = first, last = last](const Run& run) {
    const Inputs inputs(args.history, run, args.m);
    remember(args.history, run, inputs, is_provisional, first, last);
    if (team.rank != 0) return;
    if (is_provisional) log_gates(args, run);
    args.history.logged[run.slot] = logged_after(run, is_provisional);
  });
}

}  // namespace
}  // namespace VOLTAPILE_ISA
}  // namespace voltapile
