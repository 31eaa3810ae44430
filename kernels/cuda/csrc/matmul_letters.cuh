// The end of a tile in matmul_cluster.cu: sums go to the blocks that own their tokens, which add
// those of all classes in order, then bias, residual or gate.
#pragma once
#include "matmul_crew.cuh"

#if VP_ARCH == 900
namespace voltapile {

// Sums on their way to their owner: [warp][class][two tokens][8] times two rows of two tokens each.
__device__ __forceinline__ int letter_at(int warp, int which, int token, int pair) {
  return 2 * (((warp * CLASSES + which) * (TOKENS / 2) + token / 2) * 16 + 2 * pair + token % 2);
}

// To all blocks: what they own of this warp's sums.
__device__ __forceinline__ void send_sums(const Sums& total, float* box, Bell* bell, int warp,
                                          int which, const Tile& tile) {
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) {
    const int token = 8 * pass + tile.sum_token(0);
    const float(&own)[Tile::VALUES] = total[pass];
    send(float4{own[0], own[2], own[1], own[3]},
         reinterpret_cast<float4*>(box + letter_at(warp, which, token % TOKENS, tile.lane >> 2)),
         bell, token / TOKENS);
  }
}

// What is a lane's at the end of each tile, and is not computed again: a token, or -1 where there
// is none, the first of two rows, and where their sums lie in a letter.
struct Desk {
  int token, row, place;

  __device__ __forceinline__ Desk(const Launch& all, int lane) {
    const int own = lane >> 3, pair = lane & 7, rank_token = all.rank * TOKENS + own;
    const bool is_there = own < TOKENS && rank_token < all.tokens;
    token = __shfl_sync(~0u, is_there ? all.first_token + rank_token : -1, lane);
    row = __shfl_sync(~0u, Tile{4 * pair}.sum_row(0), lane);
    place = __shfl_sync(~0u, letter_at(0, 0, own, pair), lane);
  }
};

// What a lane has to do with the end of a tile: two sums of one token. They are of two rows; or,
// since two warps have multiplied a gate and its up, of one row's gate and its up.
struct Finish {
  const Launch& all;
  int token, row;
  float* out;
  const float *bias, *other_bias;
  const float *letter, *other;
  float before[2] = {};

  // letters: what all classes have sent of this tile, or of a gate; its up's follow.
  __device__ __forceinline__ Finish(const Launch& all, unsigned mask, const float* letters,
                                    int tile, const Desk& desk)
      : all(all), token(desk.token) {
    const Place place(all, mask, tile);
    const bool is_glu = all.is_glu();
    const int second = is_glu ? tile & 1 : 0;
    row = place.row + desk.row + 8 * second;
    bias = place.matrix.bias, other_bias = is_glu ? all.matrices[1].bias : bias;
    letter = letters + desk.place + second;
    other = letter + (is_glu ? LETTER : 1);
    out = place.matrix.out + static_cast<long long>(token) * place.matrix.rows + row;
    if (token >= 0 && all.kind == ADD) before[0] = out[0], before[1] = out[8];
  }
  // A tile's parts are of warps of one group each.
  __device__ __forceinline__ void write(int parts) const {
    if (token < 0) return;
    float first[CLASSES], second[CLASSES], one = 0, two = 0;
#pragma unroll
    for (int which = 0; which < CLASSES; ++which) {
      first[which] = letter[letter_at(0, which, 0, 0)];
      second[which] = other[letter_at(0, which, 0, 0)];
    }
#pragma unroll 1
    for (int n = 1; n < parts; ++n)
#pragma unroll
      for (int which = 0; which < CLASSES; ++which) {
        first[which] += letter[letter_at(n * GROUP_WARPS, which, 0, 0)];
        second[which] += other[letter_at(n * GROUP_WARPS, which, 0, 0)];
      }
#pragma unroll
    for (int which = 0; which < CLASSES; ++which) one += first[which], two += second[which];
    if (bias != nullptr || other_bias != nullptr) {
      if (bias != nullptr) one += bias[row];
      if (other_bias != nullptr) two += other_bias[all.is_glu() ? row : row + 8];
    }
    if (all.is_glu()) {
      out[0] = activated(one, all.kind) * two;
      return;
    }
    out[0] = all.kind == ADD ? before[0] + one : one;
    out[8] = all.kind == ADD ? before[1] + two : two;
  }
};

// The end of a warp's tile. With two boxes one may be sent to while the other is read: who has got
// all sums of a round knows that all blocks have read those before it.
template <class F>
__device__ __forceinline__ void finish_tile(const Launch& all, const Work& work,
                                            const Memory<F>& memory, unsigned mask, int round,
                                            const Desk& desk, int lane) {
  if (round >= work.own_rounds) return;
  const bool is_shared = work.shares(round);
  const int parts = is_shared ? work.parts : 1, part = is_shared ? work.part : 0;
  const int box = all.boxes > 1 ? round & 1 : 0, uses = all.boxes > 1 ? round >> 1 : round;
  Bell* bells = memory.bells_of(box);
  if (part == 0) {
    // A gate and its up are two warps'. What others send lies in this block's shared memory, too,
    // which no cache hides; by PTX's scopes it would take `await`.
    const int glu = all.is_glu(), first = work.warp & ~glu;
    const Finish finish(all, mask, memory.box(box) + first * LETTER, work.tile(round), desk);
#pragma unroll 1
    for (int n = 0; n < parts; ++n) {
      await_own(bells + first + GROUP_WARPS * n, ~uses & 1);
      if (glu) await_own(bells + first + 1 + GROUP_WARPS * n, ~uses & 1);
    }
    finish.write(parts);
  }
  if (lane == 0 && round + all.boxes < work.own_rounds) expect(bells + work.warp, LETTER_BYTES);
  __syncwarp();
}

}  // namespace voltapile
#endif
