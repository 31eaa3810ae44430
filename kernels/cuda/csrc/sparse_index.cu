// The indexer of attention to chosen blocks: keys of whole blocks of positions, scores of queries
// against them; sparse_choose.cu takes the best ones. See kernels/families.py.
//
// A cache has for each page the keys of its last RING positions, by position % RING, and a key for
// each of its blocks. Kernels of a layer come in order: index_pool reads the ring that index_ring
// writes then, or writes it itself.
#include "block.cuh"
#include "grid.cuh"
#include "sparse_pages.cuh"

namespace voltapile {

constexpr int RING = 16;
constexpr int WIDEST = 256;  // key
constexpr int THREADS = 128, EACH = WIDEST / THREADS;  // of index_pool, and keys' values of each
constexpr int LANES = 8, HEADS = 4, ROUNDS = 4;  // of a key, at once, and times 4 keys of a warp
constexpr int KEYS = ROUNDS * 32 / LANES, FOURS = 4;  // a lane's floats of a key, by fours

// A token's key to its place in the ring.
__device__ __forceinline__ void store_key(float* ring, const float* keys, int t, int page,
                                          unsigned position, int dim) {
  float* to = ring + key_of(page, RING, position % RING, dim);
  const float* from = keys + static_cast<unsigned>(t * dim);
#pragma unroll 1
  for (int i = threadIdx.x; i < dim; i += blockDim.x) to[i] = from[i];
}

// Cosines and sines of a position's pairs, as rope.cu makes them, times `scale`.
__device__ __forceinline__ void find_turns(float2* turns, const float* inv_freq, int pairs,
                                           int position, float scale) {
#pragma unroll 1
  for (int i = threadIdx.x; i < pairs; i += THREADS) {
    double sine, cosine;
    sincos(static_cast<double>(static_cast<float>(position) * inv_freq[i]), &sine, &cosine);
    turns[i] = {static_cast<float>(cosine) * scale, static_cast<float>(sine) * scale};
  }
}

// Value i of a key or query, turned: pair i is (i, i + pairs). turn: of value i, if it has one.
__device__ __forceinline__ float turned(const float* row, int i, int pairs, float2 turn) {
  if (i >= 2 * pairs) return row[i];
  return i < pairs ? row[i] * turn.x - row[i + pairs] * turn.y
                   : row[i - pairs] * turn.y + row[i] * turn.x;
}

// A warp norms and turns a head of queries, from q to out. angles: of the token. rows: shared, a
// warp's own.
__device__ __forceinline__ void end_query(const float* q, const float* norm, const float2* angles,
                                          float* out, float* row, int dim, int pairs, float eps) {
  constexpr int HELD = WIDEST / 32;
  const int lane = threadIdx.x & 31;
  float weight[HELD], held[HELD], sum = 0.0f;
  float2 turns[HELD];
#pragma unroll
  for (int n = 0; n < HELD; ++n) {
    const int i = 32 * n + lane;
    weight[n] = i < dim ? norm[i] : 0.0f;
    if (i < 2 * pairs) turns[n] = angles[i < pairs ? i : i - pairs];
  }
  grid_wait();
#pragma unroll
  for (int n = 0; n < HELD; ++n) held[n] = 32 * n + lane < dim ? q[32 * n + lane] : 0.0f;
#pragma unroll
  for (int n = 0; n < HELD; ++n) sum = fmaf(held[n], held[n], sum);
  const float factor = 1.0f / sqrtf(warp_join(sum, Add()) / dim + eps);
#pragma unroll
  for (int n = 0; n < HELD; ++n) row[32 * n + lane] = held[n] * (factor * weight[n]);
  __syncwarp();
#pragma unroll
  for (int n = 0; n < HELD; ++n)
    if (const int i = 32 * n + lane; i < dim) out[i] = turned(row, i, pairs, turns[n]);
}

__device__ __forceinline__ float dot(const float4& a, const float4& b, float sum) {
  return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}

// What a lane has of keys and of up to HEADS queries, `wide` fours each; all asked for at once.
__device__ __forceinline__ void add_products(float (&sum)[ROUNDS][HEADS],
                                             const float4* const (&key)[ROUNDS], const float4* q,
                                             int heads, int wide, int first) {
#pragma unroll 1
  for (int c = first; c < wide; c += FOURS * LANES) {
    float4 k[FOURS][ROUNDS];
#pragma unroll
    for (int j = 0; j < FOURS; ++j)
#pragma unroll
      for (int i = 0; i < ROUNDS; ++i)
        k[j][i] = key[i] && c + j * LANES < wide ? key[i][c + j * LANES] : float4{0, 0, 0, 0};
#pragma unroll
    for (int j = 0; j < FOURS; ++j)
#pragma unroll
      for (int h = 0; h < HEADS; ++h) {
        const float4 query = q[min(h, heads - 1) * wide + min(c + j * LANES, wide - 1)];
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) sum[i][h] = dot(query, k[j][i], sum[i][h]);
      }
  }
}

}  // namespace voltapile

using namespace voltapile;

// Of all: a block has 1 << shift positions.

// grid: (tokens, 1 + heads / 4), 128 threads. pooled: [pages][PAGE >> shift][dim]. Of each block
// that a token ends: the mean of its keys, normed, rotated by its first position. stores: the ring
// is written too; no slot may bring so many tokens that one takes the place of a key that another
// reads. What earlier steps left is read ahead. Heads of q, if there are any, become q_out, normed
// and turned by the step's angles, in blocks of their own; the last of them may be made twice.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
index_pool(const float* keys, const float* norm, const float* inv_freq, float* ring, float* pooled,
           const int* table, const int* slots, const int* positions, const float* q,
           const float* q_norm, const float* angles, float* q_out, int heads, int dim, int shift,
           int width, int pages, int pairs, int stores, float scale, float eps) {
  __shared__ float scratch[32], rows[THREADS / 32][WIDEST];
  __shared__ float2 turns[WIDEST / 2];
  grid_launch();
  if (blockIdx.y > 0) {
    const int warp = threadIdx.x / 32, head = (blockIdx.y - 1) * (THREADS / 32) + warp;
    const long long token = blockIdx.x, at = (token * heads + min(head, heads - 1)) * dim;
    const float2* turns_of = reinterpret_cast<const float2*>(angles) + token * pairs;
    end_query(q + at, q_norm, turns_of, q_out + at, rows[warp], dim, pairs, eps);
    return;
  }
  float* key = rows[0];
  const int t = blockIdx.x, position = positions[t], slot = slots[t], block = 1 << shift;
  const int page = Pages{table, width, pages}.at(slot, position), first = position - block + 1;
  const bool is_end = (first & (block - 1)) == 0 && page >= 0;
  float sum[EACH] = {}, weight[EACH] = {};
  int past = block - 1;  // tokens of the block that an earlier step brought, in the end
  if (is_end) {
#pragma unroll 1
    for (int i = t; past > 0 && i > 0 && slots[i - 1] == slot; --i) --past;
    find_turns(turns, inv_freq, pairs, first, scale);
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
      const int i = threadIdx.x + THREADS * n;
      if (i >= dim) continue;
      weight[n] = norm[i];
#pragma unroll 4
      for (int j = 0; j < past; ++j)
        sum[n] += ring[key_of(page, RING, (first + j) % RING, dim) + i];
    }
  }
  grid_wait();
  if (stores && page >= 0) store_key(ring, keys, t, page, position, dim);
  if (!is_end) return;
  float squares = 0.0f;
#pragma unroll
  for (int n = 0; n < EACH; ++n) {
    const int i = threadIdx.x + THREADS * n;
    if (i >= dim) continue;
#pragma unroll 4
    for (int j = past; j < block; ++j)
      sum[n] += keys[static_cast<unsigned>((t - (block - 1 - j)) * dim + i)];
    sum[n] *= __int_as_float((127 - shift) << 23);  // 1 / block
    squares += sum[n] * sum[n];
  }
  const float factor = 1.0f / sqrtf(block_join(squares, scratch, Add()) / dim + eps);
#pragma unroll
  for (int n = 0; n < EACH; ++n)
    if (const int i = threadIdx.x + THREADS * n; i < dim) key[i] = sum[n] * (factor * weight[n]);
  __syncthreads();
  const int per_page = PAGE >> shift;
  float* out = pooled + key_of(page, per_page, (position >> shift) & (per_page - 1), dim);
#pragma unroll 1
  for (int i = threadIdx.x; i < dim; i += THREADS) {
    const float2 turn = i < 2 * pairs ? turns[i < pairs ? i : i - pairs] : float2{1.0f, 0.0f};
    out[i] = turned(key, i, pairs, turn);
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
  store_key(ring, keys, t, page, position, dim);
}

// grid: (blocks of positions / (4 * KEYS), tokens), 128 threads. scores: [tokens][most]: of each
// whole block the sum over heads of what is positive of q . key; of tokens that see more than
// `chosen` of them. Eight lanes have a key, all that a warp reads is on its way at once.
extern "C" __global__ void __launch_bounds__(128, 1)
index_scores(const float* q, const float* pooled, const int* table, const int* slots,
             const int* positions, float* scores, int heads, int dim, int shift, int width,
             int pages, int most, int chosen) {
  grid_launch();
  const int t = blockIdx.y, whole = min((positions[t] + 1) >> shift, most), slot = slots[t];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, per_page = PAGE >> shift;
  const int first = (blockIdx.x * 4 + warp) * KEYS;
  const bool has_keys = whole > chosen && first < whole;
  const float4* key[ROUNDS];
#pragma unroll
  for (int i = 0; i < ROUNDS; ++i) {
    const int index = min(first + 4 * i + lane / LANES, whole - 1);
    const int page = has_keys ? Pages{table, width, pages}.at(slot, index << shift) : -1;
    key[i] = page < 0 ? nullptr
                      : reinterpret_cast<const float4*>(
                            pooled + key_of(page, per_page, index & (per_page - 1), dim));
    if (page >= 0)
      for (int c = 2 * (lane % LANES); c < dim / 4; c += 2 * LANES) prefetch(key[i] + c);
  }
  grid_wait();
  if (!has_keys) return;
  const int wide = dim / 4;
  const float4* own = reinterpret_cast<const float4*>(q) + static_cast<unsigned>(t * heads * wide);
  float total[ROUNDS] = {};
#pragma unroll 1
  for (int head = 0; head < heads; head += HEADS, own += HEADS * wide) {
    float sum[ROUNDS][HEADS] = {};
    add_products(sum, key, own, heads - head, wide, lane % LANES);
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i)
#pragma unroll
      for (int h = 0; h < HEADS; ++h) {
#pragma unroll
        for (int step = 1; step < LANES; step <<= 1)
          sum[i][h] += __shfl_xor_sync(ALL, sum[i][h], step);
        if (head + h < heads) total[i] += fmaxf(sum[i][h], 0.0f);
      }
  }
  const int own_round = lane % LANES, index = first + 4 * own_round + lane / LANES;
  float score = total[0];
#pragma unroll
  for (int i = 1; i < ROUNDS; ++i)
    if (own_round == i) score = total[i];
  if (own_round < ROUNDS && index < whole) scores[static_cast<unsigned>(t * most + index)] = score;
}
