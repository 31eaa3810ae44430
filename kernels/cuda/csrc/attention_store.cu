// Puts new keys and values into their pages.
#include "attention_store.cuh"

using namespace voltapile;

// grid: (warps of a token / 4, T), 128 threads; a warp for each 32 values of a head of k, then of v
extern "C" __global__ void __launch_bounds__(128)
store_kv(const float* k, const float* v, unsigned char* keys, unsigned char* values,
         const int* table, const int* slots, const int* positions, int width, int pages,
         int kv_heads, int key_dim, int value_dim, int key_kind, int value_kind) {
  const int t = blockIdx.y, position = positions[t];
  const int page = page_of(table, slots[t], position, width, pages);
  if (page < 0) return;
  const int key_units = kv_heads * ((key_dim + 31) / 32);
  int unit = blockIdx.x * 4 + threadIdx.x / 32;
  const bool is_value = unit >= key_units;
  if (is_value) unit -= key_units;
  const int dim = is_value ? value_dim : key_dim, kind = is_value ? value_kind : key_kind;
  const int head = unit / ((dim + 31) / 32), block = unit - head * ((dim + 31) / 32);
  if (head >= kv_heads) return;
  const int d = 32 * block + (threadIdx.x & 31), row = position & (PAGE - 1);
  const float* from = (is_value ? v : k) + (static_cast<long long>(t) * kv_heads + head) * dim;
  unsigned char* to = (is_value ? values : keys) +
                      (static_cast<long long>(page) * kv_heads + head) * head_bytes(kind, dim);
  const float value = d < dim ? from[d] : 0.0f;
  if (kind != F16)
    store_integers(to, kind, row, dim, block, value);
  else if (d < dim)
    store_half(to, row, dim, d, value);
}
