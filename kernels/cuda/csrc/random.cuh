// The random numbers of kernels/random.md.
#pragma once

namespace voltapile {

using u64 = unsigned long long;

__device__ __forceinline__ u64 splitmix(u64 z) {
  z += 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

// 24 bits; times 2^-24 they are the uniform number in [0, 1).
__device__ __forceinline__ unsigned uniform24(u64 seed, u64 position, u64 purpose) {
  return static_cast<unsigned>(splitmix(splitmix(splitmix(seed) ^ position) ^ purpose) >> 40);
}

}  // namespace voltapile
