// Puts new keys and values into their pages; see attention_kv.cuh for how they lie there.
// f16: finite values beyond its range become the largest half. Blocks with a value that is not
// finite stay so in every type, so that whoever reads them notices.
#include "attention_kv.cuh"

namespace voltapile {

constexpr float LARGEST = 65504.0f;

__device__ __forceinline__ bool is_finite(float x) {
  return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u;
}

__device__ __forceinline__ half_bits to_half(float x) {
  return half_pair(is_finite(x) ? fminf(fmaxf(x, -LARGEST), LARGEST) : x, 0.0f) & 0xffff;
}

// A warp stores values 32 block to 32 block + 31 of one head at place `row` of its page.
__device__ void store(unsigned char* head, int kind, int row, int dim, int block, const float* x) {
  const int lane = threadIdx.x & 31, d = 32 * block + lane;
  const float value = d < dim ? x[d] : 0.0f;
  if (kind == F16) {
    if (d < dim) reinterpret_cast<half_bits*>(head)[row * dim + d] = to_half(value);
    return;
  }
  const unsigned size = __float_as_uint(value) << 1;  // NaN is larger than all
  unsigned most = size;
  for (int step = 16; step > 0; step >>= 1)
    most = max(most, __shfl_xor_sync(0xffffffffu, most, step));
  const bool is_sane = most < 0xff000000u;
  const int extreme = __ffs(__ballot_sync(0xffffffffu, size == most)) - 1;
  const float signed_most = __shfl_sync(0xffffffffu, value, extreme);
  // 127 times the largest scale, and -8 times it, must be halves.
  const float wanted = kind == Q8_0 ? fminf(fabsf(signed_most) / 127.0f, 515.5f)
                                    : fminf(fmaxf(signed_most / -8.0f, -8188.0f), 8188.0f);
  const unsigned scale = is_sane ? half_pair(wanted, 0.0f) : 0x7e00;
  const float step = half_value(scale);
  const float units = is_sane && step != 0.0f ? value / step : 0.0f;
  unsigned char* scales = head + PAGE * dim * 16 / values_of(kind);
  if (lane == 0) reinterpret_cast<half_bits*>(scales)[row * (dim / 32) + block] = scale;
  if (kind == Q8_0) {
    const int q = __float2int_rn(fminf(fmaxf(units, -127.0f), 127.0f));
    reinterpret_cast<signed char*>(head)[row * dim + d] = static_cast<signed char>(q);
  } else {
    const int q = __float2int_rn(fminf(fmaxf(units + 8.0f, 0.0f), 15.0f));
    const int high = __shfl_down_sync(0xffffffffu, q, 16);
    if (lane < 16) head[(row * dim + 32 * block) / 2 + lane] = q | high << 4;
  }
}

}  // namespace voltapile

using namespace voltapile;

// grid: (warps of a token / 4, T), 128 threads; a warp for each 32 values of a head of k, then of v
extern "C" __global__ void __launch_bounds__(128)
store_kv(const float* k, const float* v, unsigned char* keys, unsigned char* values,
         const int* table, const int* slots, const int* positions, int width, int pages,
         int kv_heads, int key_dim, int value_dim, int key_kind, int value_kind) {
  const int t = blockIdx.y, position = positions[t];
  if (position < 0 || position / PAGE >= width) return;  // a finished slot may go past the end
  const int page = table[static_cast<long long>(slots[t]) * width + position / PAGE];
  if (page < 0 || page >= pages) return;
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
