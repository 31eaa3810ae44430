// Scores of many rows of prompts against the keys of whole blocks, on tensor cores. See
// sparse_index.cu: index_scores does the same for few rows.
//
// A block of threads keeps TOKENS tokens' queries of all heads in shared memory; each of its warps
// takes KEYS keys in turn. A float is two halves, the second one what the first has rounded off,
// and of their four products the least is left out: about 21 bits stay. A score is summed in an
// order of its own, so it does not depend on which tokens are beside it.
#include "attention_mma.cuh"
#include "block.cuh"
#include "grid.cuh"
#include "sparse_pages.cuh"

namespace voltapile {

constexpr int GROUPS = VP_ARCH >= 800 ? 2 : 1;  // of 16 tokens
constexpr int TOKENS = 16 * GROUPS, KEYS = 16;
constexpr int ROUNDS = 4;       // times KEYS keys of a warp
constexpr int AT_ONCE = 8;      // rows that are on their way together
constexpr float RAISE = 16.0f;  // so that second halves of small numbers are not denormal

// Halves of a row: `dim` first ones, `dim` second ones.
__device__ __forceinline__ int pitch_of(int dim) { return 2 * dim + PAD; }

__device__ __forceinline__ void put_split(half_bits* to, int dim, float4 v) {
  v = {v.x * RAISE, v.y * RAISE, v.z * RAISE, v.w * RAISE};
  const uint2 high{half_pair(v.x, v.y), half_pair(v.z, v.w)};
  const float2 a = half_values(high.x), b = half_values(high.y);
  *reinterpret_cast<uint2*>(to) = high;
  *reinterpret_cast<uint2*>(to + dim) =
      uint2{half_pair(v.x - a.x, v.y - a.y), half_pair(v.z - b.x, v.w - b.y)};
}

// Rows of floats, on their way together, become rows of halves; null: zeros. A warp calls.
__device__ __forceinline__ void stage_rows(half_bits* to, const float* const (&from)[AT_ONCE],
                                           int dim, int lane) {
#pragma unroll 1
  for (int c = 4 * lane; c < dim; c += 128) {
    float4 v[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
      v[i] = from[i] ? *reinterpret_cast<const float4*>(from[i] + c) : float4{0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) put_split(to + i * pitch_of(dim) + c, dim, v[i]);
  }
}

// Queries of `count` tokens, of all heads; rows of a head are neighbours.
__device__ __forceinline__ void stage_queries(half_bits* to, const float* q, int count, int heads,
                                              int dim, int warp, int warps, int lane) {
#pragma unroll 1
  for (int r = AT_ONCE * warp; r < heads * TOKENS; r += AT_ONCE * warps) {
    const float* from[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int token = r % TOKENS + i, head = r / TOKENS;
      from[i] = token < count ? q + static_cast<unsigned>((token * heads + head) * dim) : nullptr;
    }
    stage_rows(to + r * pitch_of(dim), from, dim, lane);
  }
}

// KEYS keys of a slot from `first` on; zeros where nobody sees one, or where it has no page.
__device__ __forceinline__ void stage_keys(half_bits* to, const float* pooled, const Pages& pages,
                                           int slot, int first, int end, int shift, int dim,
                                           int lane) {
  const int per_page = PAGE >> shift, index = first + lane % KEYS;
  const int page = index < end ? pages.at(slot, index << shift) : -1;
  const int own = page < 0 ? -1 : page * per_page + (index & (per_page - 1));
#pragma unroll 1
  for (int j = 0; j < KEYS; j += AT_ONCE) {
    const float* from[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int key = __shfl_sync(ALL, own, j + i);
      from[i] = key < 0 ? nullptr : pooled + static_cast<std::uint64_t>(key) * dim;
    }
    stage_rows(to + j * pitch_of(dim), from, dim, lane);
  }
}

// Of each token and key the sum over heads of what is positive.
__device__ __forceinline__ void multiply(Square (&total)[GROUPS], const half_bits* queries,
                                         const half_bits* keys, int heads, int dim, int lane) {
  const int pitch = pitch_of(dim);
#pragma unroll
  for (int g = 0; g < GROUPS; ++g) total[g].clear();
#pragma unroll 1
  for (int head = 0; head < heads; ++head, queries += TOKENS * pitch) {
    Square large[GROUPS], small[GROUPS];
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) large[g].clear(), small[g].clear();
#pragma unroll 4
    for (int k = 0; k < dim; k += 16) {
      const Mma::B high = Mma::load_b(keys + k, pitch, lane);
      const Mma::B low = Mma::load_b(keys + dim + k, pitch, lane);
#pragma unroll
      for (int g = 0; g < GROUPS; ++g) {
        const half_bits* own = queries + 16 * g * pitch + k;
        const Mma::A a = Mma::load_a(own, pitch, lane);
        Mma::product(large[g], a, high);
        Mma::product(small[g], a, low);
        Mma::product(small[g], Mma::load_a(own + dim, pitch, lane), high);
      }
    }
#pragma unroll
    for (int g = 0; g < GROUPS; ++g)
#pragma unroll
      for (int e = 0; e < 8; ++e) total[g].e[e] += fmaxf(large[g].e[e] + small[g].e[e], 0.0f);
  }
}

// limit: how many keys the lane-th token sees. Two keys are written together.
__device__ __forceinline__ void write_scores(const Square (&total)[GROUPS], float* scores, int most,
                                             int first, int limit, int lane) {
#pragma unroll
  for (int g = 0; g < GROUPS; ++g)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = 16 * g + Mma::row(lane, i), its = __shfl_sync(ALL, limit, row);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int index = first + 8 * h + 2 * Mma::pair(lane);
        const float* e = total[g].e + 4 * h + 2 * i;
        if (index < its)
          *reinterpret_cast<float2*>(scores + static_cast<unsigned>(row * most + index)) =
              float2{e[0] * (1 / RAISE / RAISE), e[1] * (1 / RAISE / RAISE)};
      }
    }
}

}  // namespace voltapile

using namespace voltapile;

// grid: (blocks of positions / (ROUNDS * KEYS * warps), tokens / TOKENS); dim: a multiple of 16;
// most: even, for a page has several blocks. scores: as index_scores. Shared: rows of queries, then
// KEYS rows of each warp.
extern "C" __global__ void __launch_bounds__(512, 1)
index_scores_tiled(const float* q, const float* pooled, const int* table, const int* slots,
                   const int* positions, float* scores, int tokens, int heads, int dim, int shift,
                   int width, int pages, int most, int chosen) {
  extern __shared__ __align__(128) std::uint8_t shared[];
  grid_launch();
  grid_wait();
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  const int t = blockIdx.y * TOKENS, count = min(TOKENS, tokens - t);
  const int begin = blockIdx.x * (ROUNDS * KEYS * warps);
  int slot = -1, whole = 0;  // of the lane-th token
  if (lane < count) slot = slots[t + lane], whole = min((positions[t + lane] + 1) >> shift, most);
  if (whole <= chosen) whole = 0;
  if (warp_join(whole, Max()) <= begin) return;
  half_bits* queries = reinterpret_cast<half_bits*>(shared);
  half_bits* keys = queries + (heads * TOKENS + KEYS * warp) * pitch_of(dim);
  stage_queries(queries, q + static_cast<unsigned>(t * heads) * dim, count, heads, dim, warp, warps,
                lane);
  __syncthreads();
  unsigned left = __ballot_sync(ALL, whole > 0);
#pragma unroll 1
  while (left != 0) {  // a slot at a time
    const int its = __shfl_sync(ALL, slot, __ffs(left) - 1);
    const int limit = slot == its ? whole : 0;
    left &= ~__ballot_sync(ALL, slot == its);
    const int end = min(begin + ROUNDS * KEYS * warps, warp_join(limit, Max()));
#pragma unroll 1
    for (int first = begin + KEYS * warp; first < end; first += KEYS * warps) {
      stage_keys(keys, pooled, {table, width, pages}, its, first, end, shift, dim, lane);
      __syncwarp();
      Square total[GROUPS];
      multiply(total, queries, keys, heads, dim, lane);
      write_scores(total, scores + static_cast<unsigned>(t * most), most, first, limit, lane);
      __syncwarp();
    }
  }
}
