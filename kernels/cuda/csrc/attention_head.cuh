// What happens to a token's head between its product and attention: those of q and k are normed
// (where the model does) and rotated, keys and values put into their pages. A warp takes a head;
// its lane i has values i, 32 + i and so on. All heads take one path, since instructions that few
// warps run must be fetched by all.
#pragma once
#include "attention_store.cuh"

namespace voltapile {

// Of all tokens. They are counted: those of q, then of k, then of v.
struct TokenHeads {
  float* q;  // [tokens][heads][key_dim], where those of q go
  const float *q_norm, *k_norm, *angles;
  unsigned char *keys, *values;
  const int *table, *slots, *positions;
  int heads, kv_heads, key_dim, value_dim, pairs, apart;  // pair i: (i, i + apart), 1: neighbours
  float eps;
  int width, pages, key_kind, value_kind;
};

// One of at most 32 * PIECES values. What it needs beside them is asked for when it is made.
template <int PIECES>
struct Head {
  const TokenHeads& all;
  int token, lane, head;  // of those of its kind
  bool is_query, is_value;
  int dim;
  const float* weight;  // of its norm
  float factors[PIECES];
  float2 turn[PIECES];
  int position, slot, page = -1;

  __device__ __forceinline__ Head(const TokenHeads& all, int token, int number, int lane)
      : all(all), token(token), lane(lane) {
    is_query = number < all.heads, is_value = number >= all.heads + all.kv_heads;
    weight = is_query ? all.q_norm : is_value ? nullptr : all.k_norm;
    dim = is_value ? all.value_dim : all.key_dim;
    head = number - (is_query ? 0 : is_value ? all.heads + all.kv_heads : all.heads);
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
      const int d = 32 * i + lane;
      factors[i] = weight != nullptr && d < dim ? weight[d] : 1.0f;
      if (d < 2 * all.pairs)
        turn[i] = reinterpret_cast<const float2*>(all.angles)[token * all.pairs + pair_of(d)];
    }
    position = all.positions[token], slot = all.slots[token];
  }
  __device__ __forceinline__ bool is_there() const {
    return head < (is_query ? all.heads : all.kv_heads);
  }
  __device__ __forceinline__ void find_page() {
    page = page_of(all.table, slot, position, all.width, all.pages);
  }
  // row: as many values in shared memory, the warp's.
  __device__ __forceinline__ void finish(float (&held)[PIECES], float* row) const {
    if (weight != nullptr) norm(held);
#pragma unroll
    for (int i = 0; i < PIECES; ++i) row[32 * i + lane] = held[i];
    __syncwarp();
    if (!is_value) rotate(held, row);
    if (is_query) {
      float* query = all.q + static_cast<long long>(token * all.heads + head) * dim;
#pragma unroll
      for (int i = 0; i < PIECES; ++i)
        if (32 * i + lane < dim) query[32 * i + lane] = held[i];
    } else if (page >= 0) {
      store(held, row);
    }
  }

 private:
  // One path for both kinds of pairs.
  __device__ __forceinline__ bool is_second(int d) const {
    return (d & (all.apart == 1 ? 1 : -1)) >= all.apart;
  }
  __device__ __forceinline__ int pair_of(int d) const {
    return (is_second(d) ? d - all.apart : d) >> (all.apart == 1);
  }
  __device__ __forceinline__ void norm(float (&held)[PIECES]) const {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < PIECES; ++i) sum += held[i] * held[i];
    for (int step = 16; step > 0; step >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    const float norm = 1.0f / sqrtf(sum / dim + all.eps);
#pragma unroll
    for (int i = 0; i < PIECES; ++i) held[i] = held[i] * norm * factors[i];
  }
  __device__ __forceinline__ void rotate(float (&held)[PIECES], const float* row) const {
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
      const int d = 32 * i + lane;
      if (d >= 2 * all.pairs) break;
      const float other = row[is_second(d) ? d - all.apart : d + all.apart] * turn[i].y;
      const float own = held[i] * turn[i].x;
      held[i] = is_second(d) ? other + own : own - other;
    }
  }
  __device__ __forceinline__ void store(const float (&held)[PIECES], float* row) const {
    const int kind = is_value ? all.value_kind : all.key_kind, place = position & (PAGE - 1);
    unsigned char* to = (is_value ? all.values : all.keys) +
                        static_cast<long long>(page * all.kv_heads + head) * head_bytes(kind, dim);
    if (kind == F16) {
#pragma unroll
      for (int i = 0; i < PIECES; ++i)
        if (32 * i + lane < dim) store_half(to, place, dim, 32 * i + lane, held[i]);
      return;
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < PIECES; ++i) row[32 * i + lane] = held[i];
    __syncwarp();
#pragma unroll 1
    for (int block = 0; 32 * block < dim; ++block)
      store_integers(to, kind, place, dim, block, row[32 * block + lane]);
  }
};

}  // namespace voltapile
