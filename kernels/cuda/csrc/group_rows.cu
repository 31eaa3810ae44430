// Of two ranks, the sum over a prompt's rows, and the norm that comes after it: a block takes whole
// rows, which travel as eights (group_eights.cuh) in chunks, the next one while a chunk is added.
// 512 threads. As in group_sum_twins, a rank that has seen the other's flag n knows that n - 2 has
// been read there.
#include "block.cuh"
#include "grid.cuh"
#include "group.cuh"
#include "group_eights.cuh"

namespace voltapile {

constexpr int THREADS = 512, CHUNK = 8 * THREADS;  // floats of an exchange
static_assert(CHUNK == 2 * TWIN);

__device__ __forceinline__ float squares(const Eight& v) {
  return ((v.a.x * v.a.x + v.a.y * v.a.y) + (v.a.z * v.a.z + v.a.w * v.a.w)) +
         ((v.b.x * v.b.x + v.b.y * v.b.y) + (v.b.z * v.b.z + v.b.w * v.b.w));
}
__device__ __forceinline__ float4 normed(float4 v, float norm, float4 w) {
  return make_float4(v.x * norm * w.x, v.y * norm * w.y, v.z * norm * w.z, v.w * norm * w.w);
}

__device__ __forceinline__ float4 scaled(float4 v, float by) {
  return make_float4(v.x * by, v.y * by, v.z * by, v.w * by);
}
__device__ __forceinline__ Eight scaled(const Eight& v, float by) {
  return {scaled(v.a, by), scaled(v.b, by)};
}

// Of a row, what one exchange takes.
struct Piece {
  long long at;        // in an array of rows
  int column, length;  // the latter in float4
  __device__ __forceinline__ Piece(int row, int chunk, int n)
      : at(static_cast<long long>(row) * n + chunk * CHUNK),
        column(chunk * CHUNK),
        length(min(n - column, CHUNK) / 4) {}
};

}  // namespace voltapile

using namespace voltapile;

// x [rows, n] (+)= the sum of the parts; n is a multiple of 8. This rank's is part, times the scales of
// its rows, plus a bias, where those are not null. weight: out = rms_norm of x, or null.
extern "C" __global__ void __launch_bounds__(512, 2)
group_sum_rows(Group* group, const float* part, const float* scales, const float* bias, float* x,
               const float* weight, float* out, int rows, int n, float eps,
               int accumulate) {
  __shared__ float scratch[32];
  grid_wait();
  grid_launch();
  const int other = 1 - group->rank, block = blockIdx.x;
  const Peer peer = group->peers[other];
  unsigned exchange = group->pieces[other][block];
  const int chunks = (n + CHUNK - 1) / CHUNK;
  Wait wait(group);
  const auto hand_over = [&](int row, int chunk) {
    const Piece piece(row, chunk, n);
    Eight own = Eights::load(part, piece.at, piece.length);
    if (scales != nullptr) own = scaled(own, scales[row]);
    if (bias != nullptr) own = plus(own, Eights::load(bias, piece.column, piece.length));
    Eights::write(twin_of(peer.out, exchange + 1), piece.length, own);
    __syncthreads();
    if (threadIdx.x == 0) store_flag(flag_of(peer.out, PIECE_FLAG), exchange + 1);
    return Eights::rounded(own);
  };
  Eight next = hand_over(block, 0);
#pragma unroll 1
  for (int row = block; row < rows; row += gridDim.x) {
    float sum = 0.0f;
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const Piece piece(row, chunk, n);
      const Eight before = Eights::load(accumulate ? x : nullptr, piece.at, piece.length), own = next;
      ++exchange;
      if (threadIdx.x == 0) await(flag_of(peer.in, PIECE_FLAG), exchange, other, wait);
      __syncthreads();
      const Eight theirs = Eights::read(twin_of(peer.in, exchange), piece.length);
      const bool ends = chunk + 1 == chunks;
      const int next_row = ends ? row + gridDim.x : row;
      if (next_row < rows) next = hand_over(next_row, ends ? 0 : chunk + 1);
      const Eight after = plus(before, plus(own, theirs));
      Eights::put(x, piece.at, piece.length, after, 0);
      sum += squares(after);
    }
    if (weight == nullptr) continue;
    sum = block_join(sum, scratch, Add());
    const float norm = 1.0f / sqrtf(sum / n + eps);
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const Piece piece(row, chunk, n);
      const Eight v = Eights::load(x, piece.at, piece.length);  // what this thread wrote
      const Eight w = Eights::load(weight, piece.column, piece.length);
      Eights::put(out, piece.at, piece.length, {normed(v.a, norm, w.a), normed(v.b, norm, w.b)}, 0);
    }
  }
  if (threadIdx.x == 0) {
    wait.end();
    group->pieces[other][block] = exchange;
  }
}
