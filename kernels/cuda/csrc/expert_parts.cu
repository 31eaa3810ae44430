// Down of chosen experts for more generated rows: what expert_down_stream.cu adds, pair by pair;
// expert_join adds it up, with the same bits. -D as in expert_twins.cuh; STRIP: tiles of a block.
#include "expert_twins.cuh"

using namespace voltapile;

// grid: (rows / 16 / STRIP, tokens * used + turns of the one that all take). parts: [tokens *
// used][rows], other_parts [tokens][rows].
extern "C" __global__ void __launch_bounds__(32 * WARPS, 16 / WARPS)
    expert_parts(const Expert* table, int count, int first, const int* chosen, const float* inner,
                 float* parts, int tokens, int used, int k, int rows, int room,
                 const std::uint8_t* other_down, const float* other_inner, float* other_parts,
                 int other_k) {
#if VP_ARCH >= 800
  extern __shared__ __align__(128) std::uint8_t shared[];
  __shared__ Seats seats;
  grid_launch();
  grid_wait();
  const int pairs = tokens * used, y = blockIdx.y, begin = 16 * STRIP * blockIdx.x;
  const int tiles = min(STRIP, (rows - begin + 15) / 16), last_row = min(15, rows - 1);
  // For `own` tokens, by a thread for each; row: its place among those of `from` and of `to`.
  const auto make = [&](const auto& strip, const std::uint8_t* down, int row_bytes, int own,
                        long long row, const float* from, float* to) {
    __syncthreads();  // what is in shared memory has been read
    if (threadIdx.x < own) {
      seats.from[threadIdx.x] = row * strip.k;
      seats.to[threadIdx.x] = row * rows;
    }
    __syncthreads();
    Seated source{seats, from};
    const Sums sums = strip.multiply(
        own,
        [&](int t) {
          return down + static_cast<long long>(first_row_of(begin + 16 * t, rows)) * row_bytes;
        },
        source, false);
#pragma unroll 1
    for (int i = threadIdx.x; i < 16 * tiles * own; i += 32 * WARPS) {
      const int tile = i / 16 / own, token = i / 16 - tile * own, meant = begin + 16 * tile;
      const int row = first_row_of(meant, rows) + i % 16;
      if (row >= meant && row < rows) to[seats.to[token] + row] = sums.of(tile, token, i % 16);
    }
  };
  if (!IS_ALONE && y >= pairs) {
    const int start = (y - pairs) * room;
    make(Strip<O>{tiles, other_k, last_row, room, shared}, other_down,
         Chunks<O>{other_k}.row_bytes(), min(room, tokens - start), start + threadIdx.x,
         other_inner, other_parts);
    return;
  }
  const Expert* expert = Experts{table, count, first}.find(chosen[y]);
  if (expert == nullptr) return;
  const std::uint8_t* down = expert->matrices[DOWN];
#pragma unroll 1
  for (int turn = 0, left = room + 1; left > room; turn += room) {
    int mine = y;
    left = 1;
    if (tokens > 1) {
      left = twins_of(chosen, pairs, y, turn, mine);
      if (left <= 0) return;
    }
    make(Strip<F>{tiles, k, last_row, room, shared}, down, Chunks<F>{k}.row_bytes(),
         min(room, left), mine, inner, parts);
  }
#endif
}
