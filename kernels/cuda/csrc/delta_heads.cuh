// What the kernels of gated delta nets share: a token in shared memory, and how a head's state goes on
// by it. -D DIM, of a head.
//
// A column of a head's matrix is in four lanes' registers. In a token's step nothing waits but for
// two sums over it: S' q of the new state is decay S' q + (k . q) error.
#pragma once
#include "state_rows.cuh"

namespace voltapile {

constexpr int FOURS = DIM / 16;     // of keys that a lane holds of its column
constexpr int PER_LANE = DIM / 32;  // values of a head that a lane of a warp holds
constexpr int BATCH = 8;            // tokens that are in shared memory at once

struct Heads {
  int keys, values;
  __device__ int channels() const { return (2 * keys + values) * DIM; }
};

// VALUES: of the head that a block has.
template <int VALUES>
struct Token {
  float4 q[DIM / 4], k[DIM / 4], v[VALUES / 4];
  float decay, rate;  // of the state; of what is learnt
  float both;         // k . q
};

__device__ __forceinline__ float decay_of(float a, float rate, float dt) {
  const float x = a + dt;
  return expf(rate * (fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x)))));
}

// Sets `both` of BATCH tokens; the first 16 BATCH threads of a block, whole warps, call.
template <int VALUES>
__device__ __forceinline__ void multiply_both(Token<VALUES>* tokens) {
  const int lane = threadIdx.x & 15;
  Token<VALUES>& own = tokens[threadIdx.x / 16];
  const float *q = reinterpret_cast<const float*>(own.q), *k = reinterpret_cast<const float*>(own.k);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < DIM / 16; ++i) sum = fmaf(q[16 * i + lane], k[16 * i + lane], sum);
  for (int step = 8; step > 0; step >>= 1) sum += __shfl_xor_sync(ALL, sum, step);
  if (lane == 0) own.both = sum;
}

__device__ __forceinline__ float column_sum(const float4& sum) {
  float all = (sum.x + sum.y) + (sum.z + sum.w);
  all += __shfl_xor_sync(ALL, all, 1);  // four lanes have a column
  return all + __shfl_xor_sync(ALL, all, 2);
}

// The column's part of the state goes on by a token; returns its output.
template <int VALUES>
__device__ __forceinline__ float go_on(float4 (&s)[FOURS], const Token<VALUES>& in, int column,
                                       int part) {
  float4 keys = make_float4(0.0f, 0.0f, 0.0f, 0.0f), queries = keys;
#pragma unroll
  for (int i = 0; i < FOURS; ++i) {
    const float4 k = in.k[4 * i + part], q = in.q[4 * i + part];
    keys.x = fmaf(s[i].x, k.x, keys.x), keys.y = fmaf(s[i].y, k.y, keys.y);
    keys.z = fmaf(s[i].z, k.z, keys.z), keys.w = fmaf(s[i].w, k.w, keys.w);
    queries.x = fmaf(s[i].x, q.x, queries.x), queries.y = fmaf(s[i].y, q.y, queries.y);
    queries.z = fmaf(s[i].z, q.z, queries.z), queries.w = fmaf(s[i].w, q.w, queries.w);
  }
  const float decay = in.decay, value = reinterpret_cast<const float*>(in.v)[column];
  const float known = column_sum(keys), asked = column_sum(queries);
  const float error = in.rate * fmaf(-decay, known, value);
#pragma unroll
  for (int i = 0; i < FOURS; ++i) {
    const float4 k = in.k[4 * i + part];
    s[i].x = fmaf(k.x, error, decay * s[i].x), s[i].y = fmaf(k.y, error, decay * s[i].y);
    s[i].z = fmaf(k.z, error, decay * s[i].z), s[i].w = fmaf(k.w, error, decay * s[i].w);
  }
  return fmaf(in.both, error, decay * asked);
}

// Of z, from the lane's first value on.
__device__ __forceinline__ void read_gates(const float* z, bool is_sigmoid, float (&out)[PER_LANE]) {
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) out[i] = is_sigmoid ? sigmoid(z[32 * i]) : silu(z[32 * i]);
}

// The output of one head, normed and gated; a warp calls. o, norm, y: from the lane's first value on.
__device__ __forceinline__ void end_head(const float* o, const float* norm,
                                         const float (&gates)[PER_LANE], float* y, float eps) {
  float held[PER_LANE], sum = 0.0f;
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) held[i] = o[32 * i], sum = fmaf(held[i], held[i], sum);
  const float factor = 1.0f / sqrtf(warp_join(sum, Add()) / DIM + eps);
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) y[32 * i] = held[i] * factor * norm[32 * i] * gates[i];
}

}  // namespace voltapile
