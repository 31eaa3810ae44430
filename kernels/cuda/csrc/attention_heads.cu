// What happens to q, k and v between their product and attention, in one pass: heads of q and k are
// normed (where the model does) and rotated, keys and values put into their pages. Which pages, the
// norms' weights and the angles are read before the kernel before this one has ended. All heads
// take one path, since instructions that few warps run must be fetched by all. -D HEAD: the longest
// head.
#include "attention_turn.cuh"
#include "grid.cuh"

namespace voltapile {

constexpr int WARPS = 4;

#ifndef VP_EMULATION
extern __shared__ __align__(16) unsigned char shared[];
#endif

}  // namespace voltapile

using namespace voltapile;

// grid: (heads of q, k and v / 4, T), 128 threads: a warp for each head. q changes in place.
extern "C" __global__ void __launch_bounds__(128)
rope_store(float* q, const float* k, const float* v, const float* q_norm, const float* k_norm,
           const float* angles, unsigned char* keys, unsigned char* values, const int* table,
           const int* slots, const int* positions, int heads, int kv_heads, int key_dim,
           int value_dim, int pairs, int apart, float eps, int width, int pages, int key_kind,
           int value_kind) {
  const int lane = threadIdx.x & 31, t = blockIdx.y;
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0);  // known to be one number
  int number = blockIdx.x * WARPS + warp;
  grid_launch();
  const bool is_query = number < heads, is_value = number >= heads + kv_heads;
  const float* weight = is_query ? q_norm : is_value ? nullptr : k_norm;
  const int count = is_query ? heads : kv_heads, dim = is_value ? value_dim : key_dim;
  number -= is_query ? 0 : is_value ? heads + kv_heads : heads;
  const Turns turns(pairs, apart);
  Head<HEAD> head;
  head.read_constants(weight, angles + 2 * t * pairs, turns, dim, lane);
  const int position = positions[t], page = page_of(table, slots[t], position, width, pages);
  grid_wait();
  if (number >= count) return;
  float* row = reinterpret_cast<float*>(shared) + warp * HEAD;
  float* query = q + static_cast<long long>(t * heads + number) * dim;
  const float* from = is_query ? query
                               : (is_value ? v : k) +
                                     static_cast<long long>(t * kv_heads + number) * dim;
  head.read(from, dim, lane);
  if (weight != nullptr) head.norm(dim, eps);
  if (!is_value) head.rotate(turns, row, lane);
  if (is_query) {
#pragma unroll
    for (int i = 0; i < Head<HEAD>::PIECES; ++i)
      if (32 * i + lane < dim) query[32 * i + lane] = head.held[i];
    return;
  }
  if (page < 0) return;
  const int kind = is_value ? value_kind : key_kind, place = position & (PAGE - 1);
  unsigned char* to = (is_value ? values : keys) +
                      static_cast<long long>(page * kv_heads + number) * head_bytes(kind, dim);
  head.put(row, lane);
  store_head(spot_of(to, kind, place, dim), row, kind, dim);
}
