// A token's experts by its logits, and the weights of the chosen ones, by a warp: ranks are counted
// among the few that may be chosen. The largest logits are chosen, of equal ones the first expert,
// and last what is no number. -D HELD: experts are no more than 32 times as many.
#pragma once
#include "block.cuh"
#include "quotient.cuh"

#ifndef HELD
#define HELD 32
#endif

namespace voltapile {

using u64 = unsigned long long;

constexpr unsigned EXPERTS = 32 * HELD;  // the most that an instance takes
constexpr unsigned MOST_USED = 32;
constexpr unsigned NO_NUMBER = 1;

// Of a logit, never 0: in the order of numbers, and what is no number is below them all.
__device__ __forceinline__ unsigned key_of(float x) {
  const unsigned bits = __float_as_uint(x + 0.0f);  // there is one zero
  const unsigned key = bits ^ (static_cast<unsigned>(static_cast<int>(bits) >> 31) | 0x80000000u);
  return x == x ? key : NO_NUMBER;
}
__device__ __forceinline__ float logit_of(unsigned key) {
  const unsigned is_negative = static_cast<unsigned>(static_cast<int>(~key) >> 31);
  return __uint_as_float(key ^ (is_negative | 0x80000000u));
}

// Keys of a lane: of experts lane, lane + 32, ...; 0 where there is none.
using Keys = unsigned[HELD];

// A token's choice in shared memory.
struct __align__(16) Choice {
  unsigned keys[EXPERTS + 4];        // of candidates in the order of experts; 0 behind them
  unsigned short experts[EXPERTS];   // theirs
  u64 winners[MOST_USED];            // by rank: a key and its expert
};

// What other blocks write meanwhile.
__device__ __forceinline__ unsigned look_at(const unsigned* place) {
#ifdef VP_EMULATION
  return *place;
#else
  unsigned value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(place) : "memory");
  return value;
#endif
}
__device__ __forceinline__ void leave(unsigned* place, unsigned value) {
#ifdef VP_EMULATION
  *place = value;
#else
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(place), "r"(value) : "memory");
#endif
}

// A token's keys as blocks leave them, when all are there; places are 0 again then.
__device__ __forceinline__ void collect(unsigned* inbox, Keys& keys, unsigned experts,
                                        unsigned lane) {
  unsigned least;
  do {
    least = NO_NUMBER;
#pragma unroll
    for (unsigned i = 0; i < HELD; ++i) {
      const unsigned e = 32 * i + lane;
      keys[i] = e < experts ? look_at(inbox + e) : 0;
      if (e < experts) least = min(least, keys[i]);
    }
  } while (least == 0);
#pragma unroll
  for (unsigned i = 0; i < HELD; ++i)
    if (32 * i + lane < experts) leave(inbox + 32 * i + lane, 0);
}

struct Min {
  __device__ unsigned operator()(unsigned a, unsigned b) const { return a < b ? a : b; }
};
__device__ __forceinline__ unsigned least_of_warp(unsigned value) {
#if VP_ARCH >= 800 && !defined(VP_EMULATION)
  return __reduce_min_sync(ALL, value);
#else
  return warp_join(value, Min());
#endif
}

// Puts down which experts may be chosen, and tells how many: of `used` groups of lanes or more each
// has one that is no less than the least of their best, so no other is chosen.
__device__ __forceinline__ unsigned put_candidates(const Keys& keys, Choice& own, unsigned used,
                                                   unsigned lane) {
  unsigned best = keys[0];
#pragma unroll
  for (unsigned i = 1; i < HELD; ++i) best = max(best, keys[i]);
#pragma unroll 1
  for (unsigned size = 1; 2 * size * used <= 32; size *= 2)
    best = max(best, __shfl_xor_sync(ALL, best, size));
  const unsigned least = max(least_of_warp(best), 1u), before = (1u << lane) - 1;
  unsigned count = 0;
#pragma unroll
  for (unsigned i = 0; i < HELD; ++i) {
    const bool is_in = keys[i] >= least;
    const unsigned all = __ballot_sync(ALL, is_in), at = count + __popc(all & before);
    if (is_in) own.keys[at] = keys[i], own.experts[at] = 32 * i + lane;
    count += __popc(all);
  }
  if (lane < 4) own.keys[count + lane] = 0;
  __syncwarp();
  return count;
}

// Of candidates those that are chosen.
__device__ __forceinline__ void rank_candidates(Choice& own, unsigned count, unsigned used,
                                                unsigned lane) {
#pragma unroll 1
  for (unsigned mine = lane; mine < count; mine += 32) {
    const unsigned key = own.keys[mine];
    unsigned rank = 0;
#pragma unroll 1
    for (unsigned at = 0; at < count; at += 4) {
      const uint4 others = *reinterpret_cast<const uint4*>(own.keys + at);
      rank += others.x > key - (at < mine);  // of equal ones the first
      rank += others.y > key - (at + 1 < mine);
      rank += others.z > key - (at + 2 < mine);
      rank += others.w > key - (at + 3 < mine);
    }
    if (rank < used) own.winners[rank] = static_cast<u64>(key) << 32 | own.experts[mine];
  }
  __syncwarp();
}

// The warp calls. Weights are shares of the chosen ones, so that the others' sum cancels. They are
// added by rank.
__device__ __forceinline__ void choose(const Keys& keys, Choice& own, int* chosen, float* weights,
                                       u64* counts, unsigned used, unsigned lane) {
  rank_candidates(own, put_candidates(keys, own, used, lane), used, lane);
  const u64 winner = own.winners[min(lane, used - 1)];
  const unsigned key = static_cast<unsigned>(winner >> 32), expert = static_cast<unsigned>(winner);
  const float best = logit_of(static_cast<unsigned>(own.winners[0] >> 32));
  const float value = key == NO_NUMBER ? 0.0f : expf(logit_of(key) - best);
  float all = 0.0f;
#pragma unroll 4
  for (unsigned rank = 0; rank < used; ++rank) all += __shfl_sync(ALL, value, rank);
  if (lane >= used) return;
  chosen[lane] = static_cast<int>(expert);
  weights[lane] = quotient(value, all);
  atomicAdd(counts + expert, static_cast<u64>(1));
}

}  // namespace voltapile
