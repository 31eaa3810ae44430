// What happens to q, k and v between their product and attention, in one pass (attention_head.cuh).
// Norms' weights, angles, slots and positions are asked for before the kernel before this one has
// ended, and nothing waits for them until heads are on their way. -D HEAD: the longest head.
#include "attention_head.cuh"
#include "grid.cuh"

namespace voltapile {

constexpr int WARPS = 4, PIECES = HEAD / 32;

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
  grid_launch();
  const TokenHeads all{q,     q_norm,    k_norm,  angles,    keys,  values, table, slots,
                  positions, heads, kv_heads, key_dim, value_dim, pairs, apart, eps,
                  width, pages,     key_kind, value_kind};
  Head<PIECES> own(all, t, blockIdx.x * WARPS + warp, lane);
  grid_wait();
  if (!own.is_there()) return;
  const int count = own.is_query ? heads : kv_heads;
  const float* from = (own.is_query ? q : own.is_value ? v : k) +
                      static_cast<long long>(t * count + own.head) * own.dim;
  float held[PIECES];
#pragma unroll
  for (int i = 0; i < PIECES; ++i)
    held[i] = 32 * i + lane < own.dim ? from[32 * i + lane] : 0.0f;
  own.find_page();
  own.finish(held, reinterpret_cast<float*>(shared) + warp * HEAD);
}
