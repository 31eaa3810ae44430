// Attention to chosen blocks of positions and to those behind the last whole block; one token and one
// KV head with all its query heads a block, for a piece of what it sees. See kernels/families.py.
//
// Pieces are cut by what is seen, whatever else is computed. -D nothing: any head, any cache.
#include "attention_kv.cuh"
#include "block.cuh"
#include "grid.cuh"

namespace voltapile {

constexpr int TILE = 32;  // positions at once
constexpr int THREADS = 128;

// Values d and d + 1 of a head at a row of its page. head: where its part of the page begins.
__device__ __forceinline__ float2 kv_pair(const unsigned char* head, int kind, int dim, int row,
                                          int d) {
  const int at = row * dim + d;
  if (kind == F16) return half_values(reinterpret_cast<const unsigned*>(head)[at / 2]);
  const half_bits* scales = reinterpret_cast<const half_bits*>(head + integer_bytes(kind, dim));
  const float scale = half_value(scales[at / values_of(kind)]);
  if (kind == Q8_0) {
    const signed char* bytes = reinterpret_cast<const signed char*>(head) + at;
    return {scale * bytes[0], scale * bytes[1]};
  }
  const unsigned char* bytes = head + at / 32 * 16 + at % 16;
  const int shift = at % 32 < 16 ? 0 : 4;
  return {scale * ((bytes[0] >> shift & 15) - 8), scale * ((bytes[1] >> shift & 15) - 8)};
}

struct Seen {
  const int* blocks;  // of this token, rising
  int chosen, block, whole, count;

  __device__ __forceinline__ int position(int i) const {
    const int inside = chosen * block;
    return i < inside ? blocks[i / block] * block + i % block : whole * block + i - inside;
  }
};

}  // namespace voltapile

using namespace voltapile;

// grid: (KV heads * pieces, tokens), 128 threads. heads: int[kv_heads + 1 + H], where each KV head's
// query heads begin and end, then those. out: [tokens][H][value_dim] if pieces is 1, else
// [tokens][H][pieces][value_dim] with stats [tokens][H][pieces]: the largest score, sum.
// Shared: floats [members * key_dim] q, [members * value_dim] sums, [members * TILE] scores,
// [3 * members], [TILE * (wider dim + 1)] keys or values.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
attend_to(const float* q, const unsigned char* keys, const unsigned char* values, const int* table,
          const int* slots, const int* positions, const int* blocks, const int* counts,
          const int* heads, float* out, float2* stats, int kv_heads, int num_heads, int key_dim,
          int value_dim, int key_kind, int value_kind, int width, int pages, int block, int most,
          int pieces, int piece, float scale) {
  extern __shared__ __align__(128) std::uint8_t shared[];
  float* memory = reinterpret_cast<float*>(shared);
  grid_launch();
  grid_wait();
  const int t = blockIdx.y, kv_head = blockIdx.x / pieces, own_piece = blockIdx.x % pieces;
  const int begin = heads[kv_head], members = heads[kv_head + 1] - begin;
  const int *own = heads + kv_heads + 1 + begin, position = positions[t];
  const int slot = slots[t], lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  Seen seen{blocks + static_cast<long long>(t) * most, counts[t], block, (position + 1) / block, 0};
  seen.count = seen.chosen * block + position + 1 - seen.whole * block;
  const int start = pieces == 1 ? 0 : own_piece * piece;
  const int end = pieces == 1 ? seen.count : min(start + piece, seen.count);
  const int pitch = max(key_dim, value_dim) + 1;
  float *query = memory, *sum = query + members * key_dim, *score = sum + members * value_dim;
  float *largest = score + members * TILE, *total = largest + members, *alpha = total + members;
  float* tile = alpha + members;
  for (int i = threadIdx.x; i < members * key_dim; i += THREADS)
    query[i] = q[(static_cast<long long>(t) * num_heads + own[i / key_dim]) * key_dim + i % key_dim];
  for (int i = threadIdx.x; i < members * value_dim; i += THREADS) sum[i] = 0.0f;
  for (int i = threadIdx.x; i < members; i += THREADS) largest[i] = -1e30f, total[i] = 0.0f;
  // Rows of a tile as floats.
  const auto fetch = [&](const unsigned char* cache, int kind, int dim, int from, int rows) {
    const long long bytes = head_bytes(kind, dim);
    for (int i = threadIdx.x; i < rows * (dim / 2); i += THREADS) {
      const int r = i / (dim / 2), d = i % (dim / 2) * 2, at = seen.position(from + r);
      const int page = table[static_cast<long long>(slot) * width + at / PAGE];
      float2 two = {0.0f, 0.0f};
      if (page >= 0 && page < pages)
        two = kv_pair(cache + (static_cast<long long>(page) * kv_heads + kv_head) * bytes, kind, dim,
                      at % PAGE, d);
      tile[r * pitch + d] = two.x, tile[r * pitch + d + 1] = two.y;
    }
  };
  for (int from = start; from < end; from += TILE) {
    const int rows = min(TILE, end - from);
    __syncthreads();  // what was read may be overwritten
    fetch(keys, key_kind, key_dim, from, rows);
    __syncthreads();
    for (int i = threadIdx.x; i < members * TILE; i += THREADS) {
      const int m = i / TILE, r = i % TILE;
      float dot = 0.0f;
      if (r < rows)
        for (int d = 0; d < key_dim; ++d) dot = fmaf(query[m * key_dim + d], tile[r * pitch + d], dot);
      score[i] = r < rows ? dot * scale : -1e30f;
    }
    __syncthreads();
    for (int m = warp; m < members; m += THREADS / 32) {
      const float own_score = score[m * TILE + lane], before = largest[m];
      const float now = fmaxf(before, warp_join(own_score, Max()));
      const float weight = lane < rows ? expf(own_score - now) : 0.0f;
      const float all = warp_join(weight, Add());
      score[m * TILE + lane] = weight;
      __syncwarp();
      if (lane == 0) {
        alpha[m] = expf(before - now);
        total[m] = total[m] * alpha[m] + all;
        largest[m] = now;
      }
    }
    fetch(values, value_kind, value_dim, from, rows);
    __syncthreads();
    for (int i = threadIdx.x; i < members * value_dim; i += THREADS) {
      const int m = i / value_dim, d = i % value_dim;
      float y = sum[i] * alpha[m];
      for (int r = 0; r < rows; ++r) y = fmaf(score[m * TILE + r], tile[r * pitch + d], y);
      sum[i] = y;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < members * value_dim; i += THREADS) {
    const int m = i / value_dim, d = i % value_dim;
    const long long row = (static_cast<long long>(t) * num_heads + own[m]) * pieces + own_piece;
    out[row * value_dim + d] = pieces == 1 ? sum[i] / total[m] : sum[i];
    if (d == 0 && pieces > 1) stats[row] = {largest[m], total[m]};
  }
}

// grid: (H, tokens), 128 threads
extern "C" __global__ void __launch_bounds__(THREADS, 1)
join_attended(const float* parts, const float2* stats, float* out, int pieces, int dim) {
  grid_launch();
  grid_wait();
  const long long row = static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x;
  float largest = -1e30f, total = 0.0f;
  for (int i = 0; i < pieces; ++i) largest = fmaxf(largest, stats[row * pieces + i].x);
  for (int i = 0; i < pieces; ++i) {
    const float2 own = stats[row * pieces + i];
    total += own.y * expf(own.x - largest);
  }
  for (int d = threadIdx.x; d < dim; d += THREADS) {
    float sum = 0.0f;
    for (int i = 0; i < pieces; ++i)
      sum += parts[(row * pieces + i) * dim + d] * expf(stats[row * pieces + i].x - largest);
    out[row * dim + d] = sum / total;
  }
}
