// What happens to q, k and v between their product and attention, in one pass: heads of q and k are
// normed (where the model does) and rotated, keys and values put into their pages. Which pages, and
// the norms' weights, are read before the kernel before this one has ended.
#include "attention_store.cuh"
#include "grid.cuh"

namespace voltapile {

constexpr int WARPS = 4, PIECES = 8;  // of 32 values: the longest head

#ifndef VP_EMULATION
extern __shared__ __align__(16) unsigned char shared[];
#endif

struct Angles {
  const float2* turns;  // of the token
  int pairs, apart;     // 1 apart: neighbours; else pair i is (i, i + apart)

  __device__ int pair_of(int d) const {
    return apart == 1 ? d / 2 : d < pairs ? d : d - pairs;
  }
  __device__ bool is_second(int d) const { return apart == 1 ? d & 1 : d >= pairs; }
};

// Of a head's norm; ones where there is none.
struct Factors {
  float each[PIECES];
  __device__ Factors(const float* weight, int n) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < PIECES; ++i)
      each[i] = weight != nullptr && 32 * i + lane < n ? weight[32 * i + lane] : 1.0f;
  }
};

// A warp norms and rotates one head of n values; the result lies in `row`.
__device__ __forceinline__ void norm_and_rotate(const float* x, bool is_normed,
                                                const Factors& factors, float eps,
                                                const Angles& angles, int n, float* row) {
  const int lane = threadIdx.x & 31;
  float held[PIECES], sum = 0.0f;
  float2 turn[PIECES];
#pragma unroll
  for (int i = 0; i < PIECES; ++i) {
    const int d = 32 * i + lane;
    held[i] = d < n ? x[d] : 0.0f;
    turn[i] = d < 2 * angles.pairs ? angles.turns[angles.pair_of(d)] : float2{1.0f, 0.0f};
    sum += held[i] * held[i];
  }
  if (is_normed) {
  for (int step = 16; step > 0; step >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    const float norm = 1.0f / sqrtf(sum / n + eps);
#pragma unroll
    for (int i = 0; i < PIECES; ++i) held[i] = held[i] * norm * factors.each[i];
  }
#pragma unroll
  for (int i = 0; i < PIECES; ++i)
    if (32 * i + lane < n) row[32 * i + lane] = held[i];
  __syncwarp();
#pragma unroll
  for (int i = 0; i < PIECES; ++i) {
    const int d = 32 * i + lane;
    if (d >= 2 * angles.pairs) break;
    const bool is_second = angles.is_second(d);
    const float other = row[is_second ? d - angles.apart : d + angles.apart];
    held[i] = is_second ? other * turn[i].y + held[i] * turn[i].x
                        : held[i] * turn[i].x - other * turn[i].y;
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < PIECES; ++i)
    if (32 * i + lane < 2 * angles.pairs) row[32 * i + lane] = held[i];
  __syncwarp();
}

}  // namespace voltapile

using namespace voltapile;

// grid: (heads of q, k and v / 4, T), 128 threads: a warp for each head. q changes in place.
extern "C" __global__ void __launch_bounds__(128)
rope_store(float* q, const float* k, const float* v, const float* q_norm, const float* k_norm,
           const float* angles, unsigned char* keys, unsigned char* values, const int* table,
           const int* slots, const int* positions, int heads, int kv_heads, int key_dim,
           int value_dim, int pairs, int apart, float eps, int width, int pages, int key_kind,
           int value_kind) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, unit = blockIdx.x * WARPS + warp;
  const long long t = blockIdx.y;
  grid_launch();
  float* row = reinterpret_cast<float*>(shared) + warp * key_dim;
  const Angles turns{reinterpret_cast<const float2*>(angles) + t * pairs, pairs, apart};
  const bool is_query = unit < heads, is_key = !is_query && unit < heads + kv_heads;
  const float* weight = is_query ? q_norm : is_key ? k_norm : nullptr;
  const Factors factors(weight, key_dim);
  const int position = positions[t];
  const int page = is_query ? 0 : page_of(table, slots[t], position, width, pages);
  grid_wait();
  if (unit >= heads + 2 * kv_heads) return;
  if (is_query) {
    float* head = q + (t * heads + unit) * key_dim;
    norm_and_rotate(head, weight != nullptr, factors, eps, turns, key_dim, row);
    for (int d = lane; d < key_dim; d += 32) head[d] = row[d];
    return;
  }
  const int head = (unit - heads) % kv_heads, dim = is_key ? key_dim : value_dim;
  const int kind = is_key ? key_kind : value_kind;
  const float* from = (is_key ? k : v) + (t * kv_heads + head) * dim;
  if (is_key) norm_and_rotate(from, weight != nullptr, factors, eps, turns, dim, row);
  if (page < 0) return;
  const long long place = static_cast<long long>(page) * kv_heads + head;
  unsigned char* to = (is_key ? keys : values) + place * head_bytes(kind, dim);
  for (int block = 0; 32 * block < dim; ++block)
    store(to, kind, position % PAGE, dim, block, is_key ? row : from);
}
