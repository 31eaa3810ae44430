// What happens to q, k and v between their product and attention, in one pass: heads of q and k are
// normed (where the model does) and rotated, keys and values put into their pages. Norms' weights,
// angles, slots and positions are asked for before the kernel before this one has ended, and
// nothing waits for them until heads are on their way. All heads take one path, since instructions
// that few warps run must be fetched by all. -D HEAD: the longest head.
#include "attention_store.cuh"
#include "grid.cuh"

namespace voltapile {

constexpr int WARPS = 4, PIECES = HEAD / 32;  // of a head; lane i has value i of each

#ifndef VP_EMULATION
extern __shared__ __align__(16) unsigned char shared[];
#endif

__device__ __forceinline__ void norm(float (&held)[PIECES], const float (&factors)[PIECES], int n,
                                     float eps) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < PIECES; ++i) sum += held[i] * held[i];
  for (int step = 16; step > 0; step >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  const float norm = 1.0f / sqrtf(sum / n + eps);
#pragma unroll
  for (int i = 0; i < PIECES; ++i) held[i] = held[i] * norm * factors[i];
}

// Of a token: pair i is (i, i + apart), or of neighbours with 1 apart.
struct Turns {
  int pairs, apart, shift, mask;  // of d, so that there is one path

  __device__ __forceinline__ Turns(int pairs, int apart)
      : pairs(pairs), apart(apart), shift(apart == 1), mask(2 * shift - 1) {}
  __device__ __forceinline__ bool is_second(int d) const { return (d & mask) >= apart; }
  __device__ __forceinline__ int pair_of(int d) const {
    return (is_second(d) ? d - apart : d) >> shift;
  }
  // row: the head.
  __device__ __forceinline__ void apply(float (&held)[PIECES], const float2 (&turns)[PIECES],
                                        const float* row, int lane) const {
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
      const int d = 32 * i + lane;
      if (d >= 2 * pairs) break;
      const float other = row[is_second(d) ? d - apart : d + apart] * turns[i].y;
      const float own = held[i] * turns[i].x;
      held[i] = is_second(d) ? other + own : own - other;
    }
  }
};

}  // namespace voltapile

using namespace voltapile;

// grid: (heads of q, k and v / 4, T), 128 threads: a warp for each head. q: where queries go; they
// come from q_from, q_step values from each other, which may be q.
extern "C" __global__ void __launch_bounds__(128)
rope_store(float* q, const float* q_from, int q_step, const float* k, const float* v,
           const float* q_norm, const float* k_norm, const float* angles, unsigned char* keys,
           unsigned char* values, const int* table, const int* slots, const int* positions,
           int heads, int kv_heads, int key_dim, int value_dim, int pairs, int apart, float eps,
           int width, int pages, int key_kind, int value_kind) {
  const int lane = threadIdx.x & 31, t = blockIdx.y;
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0);  // known to be one number
  int head = blockIdx.x * WARPS + warp;
  grid_launch();
  const bool is_query = head < heads, is_value = head >= heads + kv_heads;
  const float* weight = is_query ? q_norm : is_value ? nullptr : k_norm;
  const int count = is_query ? heads : kv_heads, dim = is_value ? value_dim : key_dim;
  head -= is_query ? 0 : is_value ? heads + kv_heads : heads;
  const Turns turns(pairs, apart);
  float factors[PIECES], held[PIECES];
  float2 turn[PIECES];
#pragma unroll
  for (int i = 0; i < PIECES; ++i) {
    const int d = 32 * i + lane;
    factors[i] = weight != nullptr && d < dim ? weight[d] : 1.0f;
    if (d < 2 * pairs)
      turn[i] = reinterpret_cast<const float2*>(angles)[t * pairs + turns.pair_of(d)];
  }
  const int position = positions[t], slot = slots[t];
  grid_wait();
  if (head >= count) return;
  float* row = reinterpret_cast<float*>(shared) + warp * HEAD;
  float* query = q + static_cast<long long>(t * heads + head) * dim;
  const float* from = (is_query ? q_from : is_value ? v : k) +
                      static_cast<long long>(t * count + head) * (is_query ? q_step : dim);
#pragma unroll
  for (int i = 0; i < PIECES; ++i) held[i] = 32 * i + lane < dim ? from[32 * i + lane] : 0.0f;
  const int page = page_of(table, slot, position, width, pages);
  if (weight != nullptr) norm(held, factors, dim, eps);
#pragma unroll
  for (int i = 0; i < PIECES; ++i) row[32 * i + lane] = held[i];
  __syncwarp();
  if (!is_value) turns.apply(held, turn, row, lane);
  if (is_query) {
#pragma unroll
    for (int i = 0; i < PIECES; ++i)
      if (32 * i + lane < dim) query[32 * i + lane] = held[i];
    return;
  }
  if (page < 0) return;
  const int kind = is_value ? value_kind : key_kind, place = position & (PAGE - 1);
  unsigned char* to = (is_value ? values : keys) +
                      static_cast<long long>(page * kv_heads + head) * head_bytes(kind, dim);
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
