// What the compiler makes long code of where every last bit and every input count.
#pragma once

namespace voltapile {

#ifdef VP_EMULATION
inline float quotient(float x, float y) { return x / y; }
inline float inverse_root(float x) { return 1.0f / sqrtf(x); }
#else
// Right to two units in the last place, for y below 2^126; a few instructions.
__device__ __forceinline__ float quotient(float x, float y) { return __fdividef(x, y); }
// Right to two units in the last place.
__device__ __forceinline__ float inverse_root(float x) { return rsqrtf(x); }
#endif

}  // namespace voltapile
