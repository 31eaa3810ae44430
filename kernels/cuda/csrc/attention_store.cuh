// How 32 new values of a head become part of a page; see attention_kv.cuh for how they lie there.
// f16: finite values beyond its range become the largest half. Blocks with a value that is not
// finite stay so in every type, so that whoever reads them notices.
#pragma once
#include "attention_kv.cuh"

namespace voltapile {

constexpr float LARGEST = 65504.0f;

// The page of a token's new values; -1: none. A finished slot may go past the end. (No branch: slot
// and position are read at once.)
__device__ __forceinline__ int page_of(const int* table, int slot, int position, int width,
                                       int pages) {
  const unsigned place = static_cast<unsigned>(position) / PAGE, last = width - 1;
  const int page = table[static_cast<long long>(slot) * width + min(place, last)];
  return place <= last && page < pages ? page : -1;
}

__device__ __forceinline__ bool is_finite(float x) {
  return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u;
}

__device__ __forceinline__ half_bits to_half(float x) {
  return half_pair(is_finite(x) ? fminf(fmaxf(x, -LARGEST), LARGEST) : x, 0.0f) & 0xffff;
}

// What a lane has of 16 neighbouring lanes' values in q8_0, and their scale.
struct Rounded {
  unsigned scale;
  int value;
};

// The scale is the one of 16, the largest value becoming 127.4, 126.9, ... 119.9 units, that leaves
// the least error: each lane tries one. (A tenth to a fifth less than always 127 leaves, squared.)
__device__ __forceinline__ Rounded round_to_bytes(float value, float most) {
  const int lane = threadIdx.x & 31;
  const float wanted = fminf(most / (127.4f - 0.5f * (lane & 15)), 515.5f);  // 127 times it: a half
  unsigned scale = half_pair(wanted, 0.0f);
  const float step = half_value(scale), inverse = step > 0.0f ? 1.0f / step : 0.0f;
  float error = 0.0f;
#pragma unroll 4
  for (int i = 0; i < 16; ++i) {
    const float x = __shfl_sync(0xffffffffu, value, (lane & 16) | i);
    const float units = rintf(fminf(fmaxf(__fmul_rn(x, inverse), -127.0f), 127.0f));
    const float off = __fmaf_rn(-units, step, x);
    error = __fmaf_rn(off, off, error);
  }
#pragma unroll
  for (int bits = 1; bits < 16; bits <<= 1) {
    const float other = __shfl_xor_sync(0xffffffffu, error, bits);
    const unsigned others = __shfl_xor_sync(0xffffffffu, scale, bits);
    if (other < error || (other == error && others < scale)) error = other, scale = others;
  }
  const float unit = half_value(scale), units = unit > 0.0f ? __fmul_rn(value, 1.0f / unit) : 0.0f;
  return {scale, __float2int_rn(fminf(fmaxf(units, -127.0f), 127.0f))};
}

__device__ __forceinline__ void store_half(unsigned char* head, int row, int dim, int d, float x) {
  const int place = row * dim + (d ^ 8 * turn_of(row, dim / 8));
  reinterpret_cast<half_bits*>(head)[place] = to_half(x);
}

// A warp stores values 32 block to 32 block + 31 of one head, zeros behind its end, at place `row`
// of its page; of a type that is not f16.
__device__ __forceinline__ void store_integers(unsigned char* head, int kind, int row, int dim,
                                               int block, float value) {
  const int lane = threadIdx.x & 31, d = 32 * block + lane;
  half_bits* scales = reinterpret_cast<half_bits*>(head + integer_bytes(kind, dim));
  const unsigned size = __float_as_uint(value) << 1;  // NaN is larger than all
  unsigned most = size;
  for (int step = 8; step > 0; step >>= 1)
    most = max(most, __shfl_xor_sync(0xffffffffu, most, step));
  if (kind == Q8_0) {
    const bool is_sane = most < 0xff000000u;
    const float largest = __uint_as_float(is_sane ? most >> 1 : 0);
    const Rounded r = round_to_bytes(is_sane ? value : 0.0f, largest);
    const int place = row * dim + (d ^ 16 * turn_of(row, dim / 16));
    if (d < dim && lane % 16 == 0) scales[(row * dim + d) / 16] = is_sane ? r.scale : 0x7e00;
    if (d < dim) head[place] = static_cast<unsigned char>(r.value) ^ (~BYTE_SIGNS & 0x80);
    return;
  }
  most = max(most, __shfl_xor_sync(0xffffffffu, most, 16));
  const bool is_sane = most < 0xff000000u;
  const int extreme = __ffs(__ballot_sync(0xffffffffu, size == most)) - 1;
  const float signed_most = __shfl_sync(0xffffffffu, value, extreme);
  // -8 times the largest scale must be a half.
  const float wanted = fminf(fmaxf(signed_most / -8.0f, -8188.0f), 8188.0f);
  const unsigned scale = is_sane ? half_pair(wanted, 0.0f) : 0x7e00;
  const float step = half_value(scale);
  const float units = is_sane && step != 0.0f ? value / step : 0.0f;
  if (lane == 0) scales[row * (dim / 32) + block] = scale;
  const int q = __float2int_rn(fminf(fmaxf(units + 8.0f, 0.0f), 15.0f));
  const int high = __shfl_down_sync(0xffffffffu, q, 16);
  const int place = row * dim / 2 + 16 * (block ^ turn_of(row, dim / 32)) + lane;
  if (lane < 16) head[place] = q | high << 4;
}

}  // namespace voltapile
