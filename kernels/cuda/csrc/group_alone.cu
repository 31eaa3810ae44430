// What a rank does without the others: its part among zeros, a part added, and proofs of a path.

// out [rows, width]: x [rows, columns] from column `offset` on, zeros beside it.
// grid: (width / 256, rows)
extern "C" __global__ void group_place(const float* x, float* out, int columns, int width,
                                       int offset) {
  const int column = blockIdx.x * blockDim.x + threadIdx.x;
  if (column >= width) return;
  const long long row = blockIdx.y;
  const int from = column - offset;
  const bool is_there = 0 <= from && from < columns;
  out[row * width + column] = is_there ? x[row * columns + from] : 0.0f;
}

// out (+)= part, or zeros where that is null
extern "C" __global__ void group_add(const float* part, float* out, long long count,
                                     int accumulate) {
  const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const float value = part == nullptr ? 0.0f : part[i];
  out[i] = accumulate ? out[i] + value : value;
}

namespace voltapile {

__device__ __forceinline__ unsigned pattern(long long i, unsigned seed) {
  unsigned x = static_cast<unsigned>(i) * 2654435761u ^ seed * 2246822519u;
  x ^= x >> 15;
  return x * 2654435761u;
}

}  // namespace voltapile

using namespace voltapile;

// Words that follow from their place and a seed, 16 bytes a store; count of 16 bytes.
extern "C" __global__ void group_fill(uint4* memory, long long count, unsigned seed) {
  const long long all = static_cast<long long>(gridDim.x) * blockDim.x;
  for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += all) {
    uint4 words;
    words.x = pattern(4 * i, seed);
    words.y = pattern(4 * i + 1, seed);
    words.z = pattern(4 * i + 2, seed);
    words.w = pattern(4 * i + 3, seed);
    memory[i] = words;
  }
}

// wrong += how many of them differ
extern "C" __global__ void group_check(const uint4* memory, long long count, unsigned seed,
                                       unsigned* wrong) {
  const long long all = static_cast<long long>(gridDim.x) * blockDim.x;
  unsigned found = 0;
  for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += all) {
    const uint4 words = memory[i];
    found += words.x != pattern(4 * i, seed) || words.y != pattern(4 * i + 1, seed) ||
             words.z != pattern(4 * i + 2, seed) || words.w != pattern(4 * i + 3, seed);
  }
  if (found) atomicAdd(wrong, found);
}
