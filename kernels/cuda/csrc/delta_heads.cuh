// What the kernels of gated delta nets share: a token in shared memory, and how a head's state goes
// on by it. -D DIM, of a head.
//
// Two columns of a head's matrix are in eight lanes' registers. In a token's step nothing waits but
// for two sums over them: S' q of the new state is decay S' q + (k . q) error.
#pragma once
#include "quotient.cuh"
#include "state_rows.cuh"

namespace voltapile {

constexpr int PARTS = 8;            // lanes that share two columns
constexpr int FOURS = DIM / 32;     // of keys that a lane holds of each
constexpr int PER_LANE = DIM / 32;  // values of a head that a lane of a warp holds
constexpr int BATCH = 8;            // tokens that are in shared memory at once
constexpr int TAPS = 4, PAST = TAPS - 1;  // most of a convolution

struct Heads {
  int keys, values;
  __device__ int channels() const { return (2 * keys + values) * DIM; }
};

// The taps of a channel, the last of TAPS where there are fewer.
struct Taps {
  float of[TAPS];

  __device__ __forceinline__ Taps(const void* all, int kind, int channel, int count) {
#pragma unroll
    for (int j = 0; j < TAPS; ++j) {
      const int tap = j - TAPS + count;
      of[j] = tap < 0 ? 0.0f : tap_at(all, kind, static_cast<long long>(channel) * count + tap);
    }
  }
  // Of a token's input and those before it, the oldest first; through silu. Where e^-x is beyond
  // 2^126 the true value is below any that counts.
  __device__ __forceinline__ float apply(const float (&past)[PAST], float x) const {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < PAST; ++j) sum = fmaf(of[j], past[j], sum);
    sum = fmaf(of[PAST], x, sum);
    return quotient(sum, 1.0f + expf(fminf(-sum, 80.0f)));
  }
};

// A channel's taps, and its inputs so far.
struct Channel {
  Taps taps;
  float past[PAST];

  __device__ __forceinline__ float go_on(float x) {
    const float y = taps.apply(past, x);
#pragma unroll
    for (int j = 0; j + 1 < PAST; ++j) past[j] = past[j + 1];
    past[PAST - 1] = x;
    return y;
  }
};

// VALUES: of the head that a block has.
template <int VALUES>
struct Token {
  float4 q[DIM / 4], k[DIM / 4], v[VALUES / 4];
  struct {
    float decay, rate;  // of the state; of what is learnt
    float both, none;   // k . q
  } gates;
};

__device__ __forceinline__ float log_decay_of(float a, float rate, float dt) {
  const float x = a + dt;
  return rate * (fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))));
}
__device__ __forceinline__ float decay_of(float a, float rate, float dt) {
  return expf(log_decay_of(a, rate, dt));
}

__device__ __forceinline__ float dot(const float4& x, const float4& y, float sum) {
  return fmaf(x.w, y.w, fmaf(x.z, y.z, fmaf(x.y, y.y, fmaf(x.x, y.x, sum))));
}

// k . q of a token, by the lanes that share columns.
template <int VALUES>
__device__ __forceinline__ float product_of(const Token<VALUES>& own, int part) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < FOURS; ++i) sum = dot(own.q[PARTS * i + part], own.k[PARTS * i + part], sum);
#pragma unroll
  for (int step = PARTS / 2; step > 0; step >>= 1) sum += __shfl_xor_sync(ALL, sum, step);
  return sum;
}

// Sets `both` of BATCH tokens; a block's first PARTS BATCH threads, whole warps, call.
template <int VALUES>
__device__ __forceinline__ void multiply_both(Token<VALUES>* tokens) {
  if (threadIdx.x >= PARTS * BATCH) return;
  Token<VALUES>& own = tokens[threadIdx.x / PARTS];
  const float both = product_of(own, threadIdx.x % PARTS);
  if (threadIdx.x % PARTS == 0) own.gates.both = both;
}

// What a lane holds of two neighbouring columns of the state.
struct Columns {
  float4 s[2][FOURS];

  // matrix: of the head, [column][key]
  __device__ __forceinline__ void read(const float* matrix, int column, int part) {
#pragma unroll
    for (int c = 0; c < 2; ++c)
#pragma unroll
      for (int i = 0; i < FOURS; ++i)
        s[c][i] = reinterpret_cast<const float4*>(matrix + (column + c) * DIM)[PARTS * i + part];
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < 2 * FOURS; ++i) s[i % 2][i / 2] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  __device__ __forceinline__ void write(float* matrix, int column, int part) const {
#pragma unroll
    for (int c = 0; c < 2; ++c)
#pragma unroll
      for (int i = 0; i < FOURS; ++i)
        reinterpret_cast<float4*>(matrix + (column + c) * DIM)[PARTS * i + part] = s[c][i];
  }

  // On by a token. The output: of column `column` in the first half of its lanes, of the next one
  // in the others. column: among the token's values. both: see Token.
  template <int VALUES>
  __device__ __forceinline__ float go_on(const Token<VALUES>& in, float both, int column,
                                         int part) {
    const auto gates = in.gates;
    const bool is_second = part & 4;  // this lane's half of them has the second column
    const float value = reinterpret_cast<const float*>(in.v)[column + is_second];
    float4 k[FOURS];
    float known[2] = {}, asked[2] = {};
#pragma unroll
    for (int i = 0; i < FOURS; ++i) {
      const float4 q = in.q[PARTS * i + part];
      k[i] = in.k[PARTS * i + part];
#pragma unroll
      for (int c = 0; c < 2; ++c) known[c] = dot(s[c][i], k[i], known[c]);
#pragma unroll
      for (int c = 0; c < 2; ++c) asked[c] = dot(s[c][i], q, asked[c]);
    }
    const float own = gates.rate * fmaf(-gates.decay, half_sum(known, is_second), value);
    const float other = __shfl_xor_sync(ALL, own, 4);
    const float error[2] = {is_second ? other : own, is_second ? own : other};
#pragma unroll
    for (int c = 0; c < 2; ++c)
#pragma unroll
      for (int i = 0; i < FOURS; ++i) {
        s[c][i].x = fmaf(k[i].x, error[c], gates.decay * s[c][i].x);
        s[c][i].y = fmaf(k[i].y, error[c], gates.decay * s[c][i].y);
        s[c][i].z = fmaf(k[i].z, error[c], gates.decay * s[c][i].z);
        s[c][i].w = fmaf(k[i].w, error[c], gates.decay * s[c][i].w);
      }
    return fmaf(both, own, gates.decay * half_sum(asked, is_second));
  }

 private:
  // Sums over the lanes: of the first column in one half of them, of the second in the other. The
  // exchange makes both columns' sums wait for each other, so that they are made side by side.
  static __device__ __forceinline__ float half_sum(const float (&x)[2], bool is_second) {
    float sum = (is_second ? x[1] : x[0]) + __shfl_xor_sync(ALL, is_second ? x[0] : x[1], 4);
    sum += __shfl_xor_sync(ALL, sum, 2);
    return sum + __shfl_xor_sync(ALL, sum, 1);
  }
};

// Of one head, from the lane's first value on.
__device__ __forceinline__ void read_head(const float* from, float (&out)[PER_LANE]) {
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) out[i] = from[32 * i];
}

// The output of one head, normed and gated by z; a warp calls. o, norm, y: from the lane's first
// value.
__device__ __forceinline__ void end_head(const float* o, const float* norm,
                                         const float (&z)[PER_LANE], float* y, bool is_sigmoid,
                                         float eps) {
  float held[PER_LANE], sum = 0.0f;
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) held[i] = o[32 * i], sum = fmaf(held[i], held[i], sum);
  const float factor = inverse_root(warp_join(sum, Add()) / DIM + eps);
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i)
    y[32 * i] = held[i] * factor * norm[32 * i] *
                quotient(is_sigmoid ? 1.0f : z[i], 1.0f + expf(fminf(-z[i], 80.0f)));
}

}  // namespace voltapile
