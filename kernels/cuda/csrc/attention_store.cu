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
  const int key_blocks = (key_dim + 31) / 32, value_blocks = (value_dim + 31) / 32;
  int unit = blockIdx.x * 4 + threadIdx.x / 32;
  const bool is_value = unit >= kv_heads * key_blocks;
  if (is_value) unit -= kv_heads * key_blocks;
  const int blocks = is_value ? value_blocks : key_blocks, dim = is_value ? value_dim : key_dim;
  const int head = unit / blocks, kind = is_value ? value_kind : key_kind;
  if (head >= kv_heads) return;
  const long long place = static_cast<long long>(page) * kv_heads + head;
  const float* from = is_value ? v : k;
  store((is_value ? values : keys) + place * head_bytes(kind, dim), kind, position % PAGE, dim,
        unit % blocks, from + (static_cast<long long>(t) * kv_heads + head) * dim);
}
