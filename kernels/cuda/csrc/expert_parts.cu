// Down of chosen experts for more generated rows: what expert_down_stream.cu adds, pair by pair;
// expert_join adds it up, with the same bits. -D as in expert_twins.cuh; STRIP: tiles of a block.
#include "expert_twins.cuh"

using namespace voltapile;

#if VP_ARCH >= 800
// Rows that expert_up_stream writes: weights are asked for before they are there.
struct Later : Seated {
  static constexpr bool IS_EARLY = true;

  __device__ __forceinline__ void arrive() const { grid_wait(); }
};
#endif

// grid: (rows / 16 / STRIP, tokens * used + turns of the one that all take). parts: [tokens *
// used][rows], other_parts [tokens][rows]. What was chosen is there before the wait, since
// expert_up_stream is the kernel before. depth, other_depth: of rings. All lie by tiles.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 16 / WARPS)
    expert_parts(const Expert* table, int count, int first, const int* chosen, const float* inner,
                 float* parts, int tokens, int used, int k, int rows, int room, int depth,
                 const std::uint8_t* other_down, const float* other_inner, float* other_parts,
                 int other_k, int other_depth) {
#if VP_ARCH >= 800
  extern __shared__ __align__(128) std::uint8_t shared[];
  __shared__ Seats seats;
  const int pairs = tokens * used, y = blockIdx.y, begin = STRIP * blockIdx.x;
  const int tiles = min(STRIP, rows / 16 - begin);
  // For `own` tokens, by a thread for each; row: its place among those of `from` and of `to`.
  const auto make = [&](const auto& strip, auto& ring, const std::uint8_t* down, int row_bytes,
                        int own, long long row, const float* from, float* to) {
    __syncthreads();  // what is in shared memory has been read
    if (threadIdx.x < own) {
      seats.from[threadIdx.x] = row * strip.k;
      seats.to[threadIdx.x] = row * rows;
    }
    __syncthreads();
    Later source{seats, from};
    const Sums sums = strip.multiply(
        own, [&](int t) { return down + 16ll * (begin + t) * row_bytes; }, source, ring);
#pragma unroll 1
    for (int i = threadIdx.x; i < 16 * tiles * own; i += 32 * WARPS) {
      const int tile = i / 16 / own, token = i / 16 - tile * own;
      to[seats.to[token] + 16 * (begin + tile) + i % 16] = sums.of(tile, token, i % 16);
    }
  };
  if (!IS_ALONE && y >= pairs) {
    const int start = (y - pairs) * room;
    const Strip<O> strip{tiles, other_k, room, other_depth, shared};
    auto ring = strip.ring();
    make(strip, ring, other_down, Chunks<O>{other_k}.row_bytes(), min(room, tokens - start),
         start + threadIdx.x, other_inner, other_parts);
    return;
  }
  const Strip<F> strip{tiles, k, room, depth, shared};
  auto ring = strip.ring();
  const Expert* expert = Experts{table, count, first}.find(__ldcg(chosen + y));
  if (expert == nullptr) {
    grid_wait();
    return;
  }
  const std::uint8_t* down = expert->matrices[DOWN];
#pragma unroll 1
  for (int turn = 0, left = room + 1; left > room; turn += room) {
    int mine = y;
    left = 1;
    if (tokens > 1) {
      left = twins_of(chosen, pairs, y, turn, mine);
      if (left <= 0) {
        grid_wait();
        return;
      }
    }
    make(strip, ring, down, Chunks<F>{k}.row_bytes(), min(room, left), mine, inner, parts);
  }
#endif
}
