// The indexer of attention to chosen blocks: keys of whole blocks of positions, scores of queries
// against them, the best ones. See kernels/families.py.
//
// A cache has for each page the keys of its last RING positions, by position % RING, and a key for
// each of its blocks. Kernels of a layer come in order: index_pool reads the ring that index_ring
// writes then.
#include "block.cuh"
#include "grid.cuh"
#include "sparse_pages.cuh"

namespace voltapile {

constexpr int RING = 16;
constexpr int WIDEST = 256;  // key
constexpr int DIGITS = 256;

__device__ __forceinline__ int warp_sum(int x) {
#if !defined(VP_EMULATION) && __CUDA_ARCH__ >= 800
  return __reduce_add_sync(ALL, x);
#else
  return warp_join(x, Add());
#endif
}

// Blocks that the threads before this one flag, and all of them; a count in each half of the int.
__device__ __forceinline__ int before_me(int own, int* sums, int& all) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  int upto = own;
#pragma unroll 1
  for (int step = 1; step < 32; step <<= 1) {
    const int other = __shfl_up_sync(ALL, upto, step);
    if (lane >= step) upto += other;
  }
  __syncthreads();  // sums may still be read
  if (lane == 31) sums[warp] = upto;
  __syncthreads();
  const int its = lane < warps ? sums[lane] : 0;
  all = warp_sum(its);
  return upto - own + warp_sum(lane < warp ? its : 0);
}

__device__ __forceinline__ float dot(const float4& a, const float4& b) {
  return (a.x * b.x + a.y * b.y) + (a.z * b.z + a.w * b.w);
}
// Of `wide` times four values; many of the key's are on their way at once.
__device__ __forceinline__ float product(const float4* query, const float4* key, int wide) {
  constexpr int AT_ONCE = 16;
  float sum = 0.0f;
  int i = 0;
#pragma unroll 1
  for (; i + AT_ONCE <= wide; i += AT_ONCE)
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j) sum += dot(query[i + j], key[i + j]);
#pragma unroll 1
  for (; i < wide; ++i) sum += dot(query[i], key[i]);
  return sum;
}

}  // namespace voltapile

using namespace voltapile;

// Of all: a block has 1 << shift positions.

// grid: (tokens), 128 threads. pooled: [pages][PAGE >> shift][dim]. Of each block that a token
// ends: the mean of its keys, normed, rotated by its first position.
extern "C" __global__ void __launch_bounds__(128, 1)
index_pool(const float* keys, const float* norm, const float* inv_freq, const float* ring,
           float* pooled, const int* table, const int* slots, const int* positions, int dim,
           int shift, int width, int pages, int pairs, float scale, float eps) {
  __shared__ float scratch[32], key[WIDEST];
  grid_launch();
  grid_wait();
  const int t = blockIdx.x, position = positions[t], slot = slots[t], block = 1 << shift;
  if (((position + 1) & (block - 1)) != 0) return;
  const int page = Pages{table, width, pages}.at(slot, position);
  if (page < 0) return;
  const int first = position - block + 1;
  int own = 0;  // tokens of the block that this step brings, before this one
#pragma unroll 1
  while (own < block - 1 && t - own > 0 && slots[t - own - 1] == slot) ++own;
  float squares = 0.0f;
#pragma unroll 1
  for (int i = threadIdx.x; i < dim; i += blockDim.x) {
    float sum = 0.0f;
#pragma unroll 4
    for (int j = 0; j < block; ++j) {
      const int back = block - 1 - j;
      sum += *(back <= own ? keys + static_cast<unsigned>((t - back) * dim + i)
                           : ring + key_of(page, RING, (first + j) % RING, dim) + i);
    }
    key[i] = sum * __int_as_float((127 - shift) << 23);  // 1 / block
    squares += key[i] * key[i];
  }
  const float factor = 1.0f / sqrtf(block_join(squares, scratch, Add()) / dim + eps);
#pragma unroll 1
  for (int i = threadIdx.x; i < dim; i += blockDim.x) key[i] *= factor * norm[i];
  __syncthreads();
  const int per_page = PAGE >> shift;
  float* out = pooled + key_of(page, per_page, (position >> shift) & (per_page - 1), dim);
#pragma unroll 1
  for (int i = threadIdx.x; i < dim; i += blockDim.x) {
    if (i >= 2 * pairs) {
      out[i] = key[i];
      continue;
    }
    const int pair = i < pairs ? i : i - pairs;
    double sine, cosine;  // as rope.cu does it
    sincos(static_cast<double>(static_cast<float>(first) * inv_freq[pair]), &sine, &cosine);
    const float c = static_cast<float>(cosine) * scale, s = static_cast<float>(sine) * scale;
    out[i] = i < pairs ? key[pair] * c - key[pair + pairs] * s
                       : key[pair] * s + key[pair + pairs] * c;
  }
}

// grid: (tokens), 128 threads. Of positions that share a place the last stays.
extern "C" __global__ void __launch_bounds__(128, 1)
index_ring(const float* keys, float* ring, const int* table, const int* slots,
           const int* positions, int tokens, int dim, int width, int pages) {
  grid_launch();
  grid_wait();
  const int t = blockIdx.x, slot = slots[t];
  const unsigned position = positions[t];
  const bool is_passed = t + RING < tokens && slots[t + RING] == slot &&
                         (position + RING) / PAGE == position / PAGE;
  const int page = Pages{table, width, pages}.at(slot, position);
  if (is_passed || page < 0) return;
  float* to = ring + key_of(page, RING, position % RING, dim);
  const float* from = keys + static_cast<unsigned>(t * dim);
#pragma unroll 1
  for (int i = threadIdx.x; i < dim; i += blockDim.x) to[i] = from[i];
}

// grid: (blocks of positions / 128, tokens), 128 threads. scores: [tokens][most]: of each whole
// block the sum over heads of what is positive of q . key; of tokens that see more than `chosen` of
// them.
extern "C" __global__ void __launch_bounds__(128, 1)
index_scores(const float* q, const float* pooled, const int* table, const int* slots,
             const int* positions, float* scores, int heads, int dim, int shift, int width,
             int pages, int most, int chosen) {
  extern __shared__ __align__(128) std::uint8_t shared[];
  float4* queries = reinterpret_cast<float4*>(shared);
  grid_launch();
  grid_wait();
  const int t = blockIdx.y, whole = min((positions[t] + 1) >> shift, most), wide = dim / 4;
  if (whole <= chosen || static_cast<int>(blockIdx.x) * 128 >= whole) return;
  const float4* own = reinterpret_cast<const float4*>(q) + static_cast<unsigned>(t * heads) * wide;
#pragma unroll 1
  for (int i = threadIdx.x; i < heads * wide; i += 128) queries[i] = own[i];
  __syncthreads();
  const int index = blockIdx.x * 128 + threadIdx.x, per_page = PAGE >> shift;
  if (index >= whole) return;
  const int page = Pages{table, width, pages}.at(slots[t], index << shift);
  float sum = 0.0f;
  if (page >= 0) {
    const float4* key = reinterpret_cast<const float4*>(
        pooled + key_of(page, per_page, index & (per_page - 1), dim));
    const float4* query = queries;
#pragma unroll 1
    for (int head = 0; head < heads; ++head, query += wide)
      sum += fmaxf(product(query, key, wide), 0.0f);
  }
  scores[static_cast<unsigned>(t * most + index)] = sum;
}

// grid: (tokens), 256 threads. blocks: [tokens][chosen], rising; counts: [tokens]. The largest
// scores, of equal ones the first; all, if there are no more. Scores are not negative, so their
// bits are in their order.
extern "C" __global__ void __launch_bounds__(256)
index_choose(const float* scores, const int* positions, int* blocks, int* counts, int shift,
             int most, int chosen) {
  __shared__ int digits[DIGITS], sums[32], digit, above;
  grid_launch();
  grid_wait();
  const int t = blockIdx.x, whole = min((positions[t] + 1) >> shift, most);
  const unsigned* own = reinterpret_cast<const unsigned*>(scores) + static_cast<unsigned>(t * most);
  blocks += static_cast<unsigned>(t * chosen);
  if (threadIdx.x == 0) counts[t] = min(whole, chosen);
  if (whole <= chosen) {
#pragma unroll 1
    for (int i = threadIdx.x; i < whole; i += 256) blocks[i] = i;
    return;
  }
  unsigned found = 0;  // the digits of the last score that is taken
  int left = chosen;   // how many of those with these digits are
#pragma unroll 1
  for (int place = 24; place >= 0; place -= 8) {
    digits[threadIdx.x] = 0;
    __syncthreads();
#pragma unroll 4
    for (int i = threadIdx.x; i < whole; i += 256) {
      const unsigned bits = own[i];
      if (place == 24 || bits >> (place + 8) == found) atomicAdd(digits + (bits >> place & 255), 1);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      int sum = 0, d = DIGITS - 1;
#pragma unroll 1
      for (; d > 0 && sum + digits[d] < left; --d) sum += digits[d];
      digit = d, above = sum;
    }
    __syncthreads();
    found = found << 8 | static_cast<unsigned>(digit);
    left -= above;
    __syncthreads();
  }
  int larger = 0, equal = 0;  // blocks so far
#pragma unroll 1
  for (int base = 0; base < whole; base += 256) {
    const int i = base + threadIdx.x;
    const unsigned bits = i < whole ? own[i] : 0u;
    const bool is_larger = i < whole && bits > found, is_equal = i < whole && bits == found;
    int all;
    const int before = before_me(is_larger + (is_equal << 16), sums, all);
    const int equals = equal + (before >> 16), taken = larger + (before & 0xffff);
    if (is_larger || (is_equal && equals < left)) blocks[taken + min(equals, left)] = i;
    larger += all & 0xffff, equal += all >> 16;
  }
}
