// How 32 new values of a head become part of a page; see attention_kv.cuh for how they lie there.
// f16: finite values beyond its range become the largest half. Blocks with a value that is not
// finite stay so in every type, so that whoever reads them notices.
#pragma once
#include "attention_kv.cuh"

namespace voltapile {

constexpr float LARGEST = 65504.0f;

// The page of a token's new values; -1: none. A finished slot may go past the end.
__device__ __forceinline__ int page_of(const int* table, int slot, int position, int width,
                                       int pages) {
  if (position < 0 || position / PAGE >= width) return -1;
  const int page = table[static_cast<long long>(slot) * width + position / PAGE];
  return page < pages ? page : -1;
}

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
