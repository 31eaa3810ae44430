// Tokens as records for matmul_wide.cu and matmul_cluster.cu, once for all blocks, in global
// memory: [chunk][token] of them, or of each turn of `room` tokens [chunk] in CrowdOrder. -D FORMAT
// and OTHER, which matmul_block.cuh knows; MANY 2; SEATED: whether they are seated.
#include "grid.cuh"
#include "matmul_chunk.cuh"
#include "norm_row.cuh"

using namespace voltapile;

// Where a token's part of a chunk goes: to `place` from `offset` on, as number `own`.
template <bool IS_SEATED>
struct Target {
  using Place = Records;
  long long offset;
  int room, own;

  __device__ __forceinline__ Target(int chunk, int, int token, int tokens, int, int)
      : offset(static_cast<long long>(chunk) * Place::bytes(tokens)), room(tokens), own(token) {}
};
template <>
struct Target<true> {
  using Place = CrowdOrder;
  long long offset;
  int room, own;

  __device__ __forceinline__ Target(int chunk, int chunks, int token, int, int turn, int seats)
      : room(seats) {
    const int number = static_cast<unsigned>(token) / static_cast<unsigned>(turn);
    offset = static_cast<long long>(number * chunks + chunk) * Place::bytes(seats);
    own = token - number * turn;
  }
};
using To = Target<SEATED>;

template <class F>
__device__ __forceinline__ void stage_chunk(const float* x, std::uint8_t* records, int chunk,
                                            const To& to, int lane) {
  using Staged = BlockTokens<F, To::Place>;
  float4 a, b;
  Staged::load_whole(x, 256 * chunk, lane, a, b);
  Staged(records + to.offset, to.room).put(to.own, a, b, lane);
}

// grid: (chunks / 8, tokens of each format), 256 threads: a warp for a chunk of a token. k: a
// multiple of 256
extern "C" __global__ void __launch_bounds__(256)
    stage_tokens(const float* x, std::uint8_t* records, std::uint8_t* other_records, int k,
                 int tokens, int room, int seats) {
  constexpr bool IS_SAME = Equal<formats::FORMAT, formats::OTHER>::value;
  grid_launch();
  const bool is_other = !IS_SAME && blockIdx.y >= tokens;
  const int lane = threadIdx.x & 31, token = blockIdx.y - (is_other ? tokens : 0);
  const int chunk = blockIdx.x * 8 + __shfl_sync(~0u, threadIdx.x >> 5, 0);
  x += static_cast<long long>(token) * k;
  const To to(chunk, k / 256, token, tokens, room, seats);
  grid_wait();
  if (256 * chunk >= k) return;
  if (!IS_SAME && is_other)
    stage_chunk<formats::OTHER>(x, other_records, chunk, to, lane);
  else
    stage_chunk<formats::FORMAT>(x, records, chunk, to, lane);
}

// A lane's eight neighbours of a chunk go to a token's place, times `factor`. turned: the same of
// all lanes, one behind the other.
template <class F>
__device__ __forceinline__ void put_neighbours(float4 a, float4 b, const float4* turned,
                                               float factor, std::uint8_t* records,
                                               const To& to, int lane) {
  using Staged = BlockTokens<F, To::Place>;
  if constexpr (Order<F>::APART != 4)
    Staged::load_whole(reinterpret_cast<const float*>(turned), 0, lane, a, b);
  Staged(records + to.offset, to.room).put(to.own, scaled(a, factor), scaled(b, factor), lane);
}

constexpr int MOST_CHUNKS = 32;

// The same of rows that are normed first, by weights `gain`, with the bits of norm.cu; the normed
// rows go to `out`, if that is not null. share: 1 / k. grid: (tokens), a warp for each chunk.
// Nothing is decided, and little is held, so that several blocks find room where a product leaves a
// multiprocessor.
extern "C" __global__ void __launch_bounds__(32 * MOST_CHUNKS)
    norm_tokens(const float* x, const float* gain, float* out, std::uint8_t* records,
                std::uint8_t* other_records, int k, int tokens, int room, int seats, float share,
                float eps) {
  using First = formats::FORMAT;
  using Second = formats::OTHER;
  constexpr bool IS_SAME = Equal<First, Second>::value;
  __shared__ float sums[MOST_CHUNKS];
  __shared__ float4 turned[MOST_CHUNKS][RUN / 4];
  grid_launch();
  const int lane = threadIdx.x & 31, chunk = __shfl_sync(~0u, threadIdx.x >> 5, 0);
  const int token = blockIdx.x, at = RUN * chunk + 8 * lane;
  const To place(chunk, k / RUN, token, tokens, room, seats);
  const float4* from = reinterpret_cast<const float4*>(x + static_cast<long long>(token) * k + at);
  float4* to = reinterpret_cast<float4*>(out + static_cast<long long>(token) * k + at);
  const float4 v = reinterpret_cast<const float4*>(gain + at)[0];
  const float4 w = reinterpret_cast<const float4*>(gain + at)[1];
  grid_wait();
  float4 a = from[0], b = from[1];
  const float sum = warp_join(squares_of(a, b), Add());
  if (lane == 0) sums[chunk] = sum;
  a = scaled(a, v), b = scaled(b, w);
  float4* own = turned[chunk];
  if constexpr (Order<First>::APART != 4 || Order<Second>::APART != 4)
    own[2 * lane] = a, own[2 * lane + 1] = b;
  __syncthreads();
  const float factor = norm_factor<MOST_CHUNKS>(sums, blockDim.x / 32, share, eps, lane);
  put_neighbours<First>(a, b, own, factor, records, place, lane);
  if (!IS_SAME) put_neighbours<Second>(a, b, own, factor, other_records, place, lane);
  if (out != nullptr) to[0] = scaled(a, factor), to[1] = scaled(b, factor);
}
