// The end of a tile in matmul_cluster.cu: sums go to the blocks that own their tokens, which add
// those of all classes in order, then bias, residual or gate.
#pragma once
#include "matmul_crew.cuh"

#if VP_ARCH == 900
namespace voltapile {

// Sums on their way to their owner: [warp][class][token][8] pairs of rows.
__device__ __forceinline__ int pair_at(int warp, int which, int token, int pair) {
  return ((warp * CLASSES + which) * TOKENS + token) * 8 + pair;
}

// To all blocks: what they own of this warp's sums.
__device__ __forceinline__ void send_sums(const Sums& total, float2* box, Bell* bell, int warp,
                                          int which, const Tile& tile) {
#pragma unroll
  for (int i = 0; i < 2 * PASSES; ++i) {
    const int token = 8 * (i / 2) + tile.sum_token(i % 2);
    send({total[i / 2][i % 2], total[i / 2][2 + i % 2]},
         box + pair_at(warp, which, token % TOKENS, tile.lane >> 2), bell, token / TOKENS);
  }
}

// What a lane has to do with the end of a tile: one token's sums of two rows. Of a gate and its up
// that two warps have multiplied, these take a row each.
struct Finish {
  const Launch& all;
  int pair, own, row;
  bool is_there[2];
  float* out;
  const float *bias, *up_bias;
  float before[2] = {};

  __device__ __forceinline__ Finish(const Launch& all, unsigned mask, int tile, int lane)
      : all(all), pair(lane & 7), own(lane >> 3) {
    const Place place(all, mask, tile);
    const int token = all.rank * TOKENS + own, rows = place.matrix.rows;
    const Tile held{4 * pair};
    row = place.row + held.sum_row(0);
    bias = place.matrix.bias, up_bias = all.matrices[1].bias;
    out = place.matrix.out + static_cast<long long>(all.first_token + token) * rows + row;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      is_there[i] = own < TOKENS && token < all.tokens &&
                    (!all.is_glu() || (tile & 1) == i);
      if (is_there[i] && all.kind == ADD) before[i] = out[8 * i];
    }
  }
  // letter: what all classes have sent of a tile; its parts are of warps of one group each.
  __device__ __forceinline__ float2 sum_of(const float2* letter, int parts) const {
    letter += pair_at(0, 0, own, pair);
    float2 whole[CLASSES], sum{0, 0};
#pragma unroll
    for (int which = 0; which < CLASSES; ++which) whole[which] = letter[pair_at(0, which, 0, 0)];
#pragma unroll 1
    for (int n = 1; n < parts; ++n)
#pragma unroll
      for (int which = 0; which < CLASSES; ++which)
        add(whole[which], letter[pair_at(n * GROUP_WARPS, which, 0, 0)]);
#pragma unroll
    for (int which = 0; which < CLASSES; ++which) add(sum, whole[which]);
    return sum;
  }
  static __device__ __forceinline__ void add(float2& sum, float2 part) {
    sum.x += part.x;
    sum.y += part.y;
  }
  // letter: of this tile, or of a gate, and behind it its up's.
  __device__ __forceinline__ void write(const float2* letter, int parts) const {
    if (!is_there[0] && !is_there[1]) return;
    float2 value{0, 0}, gate;
#pragma unroll 1
    for (int half = 0; half <= all.is_glu(); ++half) {  // one path for a gate and its up
      gate = value;
      value = sum_of(letter + half * LETTER, parts);
      const float* add_to = half ? up_bias : bias;
      if (add_to != nullptr) add(value, {add_to[row], add_to[row + 8]});
    }
    if (all.is_glu()) {
      const float slope = is_there[0] ? gate.x : gate.y, sum = is_there[0] ? value.x : value.y;
      out[is_there[0] ? 0 : 8] = activated(slope, all.kind) * sum;
      return;
    }
    if (is_there[0]) out[0] = all.kind == ADD ? before[0] + value.x : value.x;
    if (is_there[1]) out[8] = all.kind == ADD ? before[1] + value.y : value.y;
  }
};

// The end of a warp's tile. With two boxes one may be sent to while the other is read: who has got
// all sums of a round knows that all blocks have read those before it.
template <class F>
__device__ __forceinline__ void finish_tile(const Launch& all, const Work& work,
                                            const Memory<F>& memory, unsigned mask, int round,
                                            int lane) {
  const Work::Task task = work.task(round);
  if (!task.is_in) return;
  const int box = all.boxes > 1 ? round & 1 : 0, uses = all.boxes > 1 ? round >> 1 : round;
  Bell* bells = memory.bells_of(box);
  if (task.part == 0) {
    // A gate and its up are two warps'. What others send lies in this block's shared memory, too,
    // which no cache hides; by PTX's scopes it would take `await`.
    const int glu = all.is_glu(), first = task.first & ~glu;
    const Finish finish(all, mask, task.tile, lane);
#pragma unroll 1
    for (int n = 0; n < task.parts << glu; ++n)
      await_own(bells + first + (n & glu) + GROUP_WARPS * (n >> glu), ~uses & 1);
    finish.write(memory.box(box) + first * LETTER, task.parts);
  }
  const int next = round + all.boxes;
  if (lane == 0 && next < work.rounds && work.task(next).is_in)
    expect(bells + work.warp, LETTER_BYTES);
  __syncwarp();
}

}  // namespace voltapile
#endif
