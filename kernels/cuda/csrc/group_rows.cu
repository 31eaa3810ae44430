// Of two ranks, the sum over a prompt's rows, and the norm that comes after it: a block takes whole
// rows, which travel as eights (group_eights.cuh) in chunks, one of them ahead. 512 threads.
//
// A thread has one pack of each exchange and writes, polls and reads its own: no barrier, no fence.
// It sends pack n + 1 when it has read n; the other's n says that the other has read n - 1, in
// whose place n + 1 goes. All packs of an exchange are written, whatever the row's length, so what
// lies in a place is two exchanges old or new, and eight bits of flag tell. Where 16 bytes may
// arrive in parts, a block's flag behind them tells instead.
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

// Eights between this block and its twin.
struct Line {
  Group* group;
  Peer peer;
  int other;

  static __device__ __forceinline__ unsigned flag(unsigned exchange) { return exchange % 255 + 1; }

  __device__ __forceinline__ void send(unsigned exchange, uint4 words) const {
    uint4* to = eights_of(peer.out, exchange) + threadIdx.x;
    store_four(to, words);
    if (!peer.is_narrow) return;
    __syncthreads();
    if (threadIdx.x == 0) store_flag(flag_of(peer.out, ROWS_FLAG), exchange);
  }
  __device__ __forceinline__ Eight receive(unsigned exchange, Wait& wait) const {
    const uint4* from = eights_of(peer.in, exchange) + threadIdx.x;
    if (peer.is_narrow) {
      if (threadIdx.x == 0) await(flag_of(peer.in, ROWS_FLAG), exchange, other, wait);
      __syncthreads();
      return Eights::unpack(load_four(from));
    }
    uint4 words = load_four(from);
    while (Eights::flag_of(words) != flag(exchange) && !wait.is_over(other))
      words = load_four(from);
    return Eights::unpack(words);
  }
};

}  // namespace voltapile

using namespace voltapile;

// x [rows, n] (+)= the sum of the parts; n is a multiple of 8. This rank's is part, times the
// scales of its rows, plus a bias, where those are not null. weight: out = rms_norm of x, or null.
extern "C" __global__ void __launch_bounds__(512, 2)
group_sum_rows(Group* group, const float* part, const float* scales, const float* bias, float* x,
               const float* weight, float* out, int rows, int n, float eps, int accumulate) {
  __shared__ float scratch[32];
  grid_wait();
  grid_launch();
  const int rank = group->rank, chunks = (n + CHUNK - 1) / CHUNK;
  const Line line{group, group->peers[1 - rank], 1 - rank};
  unsigned exchange = group->pieces[rank][blockIdx.x];
  Wait wait(group);
  const auto own_of = [&](int row, int chunk) {
    const Piece piece(row, chunk, n);
    Eight own = Eights::load(part, piece.at, piece.length);
    if (scales != nullptr) own = scaled(own, scales[row]);
    if (bias != nullptr) own = plus(own, Eights::load(bias, piece.column, piece.length));
    return Eights::pack(own, Line::flag(exchange + 1));
  };
  uint4 own = own_of(blockIdx.x, 0);
  line.send(exchange + 1, own);
#pragma unroll 1
  for (int row = blockIdx.x; row < rows; row += gridDim.x) {
    float sum = 0.0f;
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const Piece piece(row, chunk, n);
      const Eight before = Eights::load(accumulate ? x : nullptr, piece.at, piece.length);
      const bool ends = chunk + 1 == chunks;
      const int next_row = ends ? row + gridDim.x : row;
      ++exchange;
      uint4 next = own;
      if (next_row < rows) next = own_of(next_row, ends ? 0 : chunk + 1);
      const Eight theirs = line.receive(exchange, wait);
      if (next_row < rows) line.send(exchange + 1, next);
      const Eight after = plus(before, plus(Eights::unpack(own), theirs));
      own = next;
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
  wait.end();
  __syncthreads();
  if (threadIdx.x == 0) group->pieces[rank][blockIdx.x] = exchange;
}
