// Random blocks of a quantisation whose weights centre on zero, for timing models without a file.
#include "random.cuh"

using namespace voltapile;

__device__ __forceinline__ unsigned short half_of(float x) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}

// grid: (blocks / blockDim). place, other: offsets of float16 fields of a block, -1 for none; they
// become size and other_size times a number in [0.5, 1).
extern "C" __global__ void fill_blocks(unsigned char* data, long long blocks, int bytes, int place,
                                       float size, int other, float other_size, u64 seed) {
  const long long block = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (block >= blocks) return;
  unsigned char* out = data + block * bytes;
  u64 state = splitmix(seed ^ block);
  const float scale = 0.5f + 0.5f * (state >> 40) * 5.9604644775390625e-8f;
  for (int i = 0; i < bytes; ++i) {
    if (i % 8 == 0) state = splitmix(state);
    out[i] = static_cast<unsigned char>(state >> (8 * (i % 8)));
  }
  if (place >= 0) {
    const unsigned short bits = half_of(scale * size);
    out[place] = bits & 255, out[place + 1] = bits >> 8;
  }
  if (other >= 0) {
    const unsigned short bits = half_of(scale * other_size);
    out[other] = bits & 255, out[other + 1] = bits >> 8;
  }
}

// Values between -size and size. bytes: 4 float32, 2 float16, 3 bfloat16.
extern "C" __global__ void fill_values(void* data, long long count, int bytes, float size,
                                       float middle, u64 seed) {
  const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const float uniform = (splitmix(seed ^ i) >> 40) * 5.9604644775390625e-8f;
  const float x = middle + size * (2.0f * uniform - 1.0f);
  if (bytes == 4) static_cast<float*>(data)[i] = x;
  else static_cast<unsigned short*>(data)[i] = bytes == 2 ? half_of(x) : __float_as_uint(x) >> 16;
}
