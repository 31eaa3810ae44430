// A token's experts by its logits, and the weights of the chosen ones, by a warp: ranks are counted
// among the few that may be chosen. The largest logits are chosen, of equal ones the first expert,
// and last what is no number. -D HELD: experts are no more than 32 times as many.
#pragma once
#include "block.cuh"
#include "half.cuh"
#include "quotient.cuh"

#ifndef HELD
#define HELD 32
#endif

namespace voltapile {

using u64 = unsigned long long;

constexpr unsigned EXPERTS = 32 * HELD;  // the most that an instance takes
constexpr unsigned MOST_USED = 32;
constexpr unsigned NO_NUMBER = 1, LEAST_NUMBER = 0x007fffff;  // keys, of that and of -infinity

// Of a logit, never 0: in the order of numbers, and what is no number is below them all.
__device__ __forceinline__ unsigned key_of(float x) {
  const unsigned bits = __float_as_uint(x + 0.0f);  // there is one zero
  const unsigned key = bits ^ (static_cast<unsigned>(static_cast<int>(bits) >> 31) | 0x80000000u);
  return x == x ? key : NO_NUMBER;
}
// What is no number is as the least one.
__device__ __forceinline__ float logit_of(unsigned key) {
  key = max(key, LEAST_NUMBER);
  const unsigned is_negative = static_cast<unsigned>(static_cast<int>(~key) >> 31);
  return __uint_as_float(key ^ (is_negative | 0x80000000u));
}

// Keys of a lane: of experts lane, lane + 32, ...; 0 where there is none.
using Keys = unsigned[HELD];

constexpr unsigned ROUND = 32;  // candidates that one is compared with at once

// A token's choice in shared memory.
struct __align__(16) Choice {
  // Of candidates in the order of experts, and zeros; then what a lane writes to no purpose.
  unsigned keys[EXPERTS + ROUND + 32];
  unsigned short experts[EXPERTS + ROUND + 32];
  float values[MOST_USED];  // of the chosen ones, by rank: shares of their sum
  int winners[MOST_USED];
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
  inbox += lane;
  bool is_whole;
  do {
    is_whole = true;
#pragma unroll
    for (unsigned i = 0; i < HELD; ++i)
      keys[i] = 32 * i + lane < experts ? look_at(inbox + 32 * i) : NO_NUMBER;
#pragma unroll
    for (unsigned i = 0; i < HELD; ++i) is_whole &= keys[i] != 0;
  } while (!__all_sync(ALL, is_whole));
#pragma unroll
  for (unsigned i = 0; i < HELD; ++i) {
    if (32 * i + lane < experts) leave(inbox + 32 * i, 0);
    else keys[i] = 0;
  }
}

struct Least {
  __device__ unsigned operator()(unsigned a, unsigned b) const { return min(a, b); }
};
__device__ __forceinline__ unsigned least_of_warp(unsigned value) {
#if VP_ARCH >= 800 && !defined(VP_EMULATION)
  return __reduce_min_sync(ALL, value);
#else
  return warp_join(value, Least());
#endif
}
__device__ __forceinline__ unsigned most_of_warp(unsigned value) { return ~least_of_warp(~value); }

// Puts down who may be chosen, and tells how many. Lanes l, l + used, ... are a group, so that each
// of `used` groups has one that is no less than the least of their best: nobody below that is.
// best: of the lane's keys. Of experts in any order that leaves 22 where 8 are chosen, in the mean.
__device__ __forceinline__ unsigned put_candidates(const Keys& keys, unsigned best, Choice& own,
                                                   unsigned used, unsigned lane) {
  unsigned most = best;
#pragma unroll 1
  for (unsigned from = lane + used; from < lane + 32; from += 4 * used) {
    unsigned other[4];
#pragma unroll
    for (unsigned i = 0; i < 4; ++i) other[i] = __shfl_sync(ALL, best, from + i * used & 31);
#pragma unroll
    for (unsigned i = 0; i < 4; ++i) most = max(most, from + i * used < 32 ? other[i] : 0);
  }
  const unsigned least = max(least_of_warp(lane < used ? most : ~0u), 1u);
  const unsigned before = (1u << lane) - 1;
  unsigned count = 0;
#pragma unroll
  for (unsigned i = 0; i < HELD; ++i) {
    const bool is_in = keys[i] >= least;
    const unsigned all = __ballot_sync(ALL, is_in);
    const unsigned at = is_in ? count + __popc(all & before) : EXPERTS + ROUND + lane;
    own.keys[at] = keys[i], own.experts[at] = 32 * i + lane;  // without a branch
    count += __popc(all);
  }
  static_assert(ROUND == 32);
  own.keys[count + lane] = 0, own.values[lane] = 0.0f;
  __syncwarp();
  return count;
}

// Counts one more, if a > b.
__device__ __forceinline__ void count_more(unsigned& more, unsigned a, unsigned b) {
#ifdef VP_EMULATION
  more += a > b;
#else
  asm("{ .reg .pred p; setp.gt.u32 p, %1, %2; @p add.u32 %0, %0, 1; }"
      : "+r"(more) : "r"(a), "r"(b));
#endif
}

// How many candidates are better than one; of equal ones the first is.
__device__ __forceinline__ unsigned rank_of(const Choice& own, unsigned key, unsigned mine,
                                            unsigned count) {
  const auto four = [&](unsigned at) { return *reinterpret_cast<const uint4*>(own.keys + at); };
  const unsigned place = mine & 3;
  const uint4 beside = four(mine - place);
  unsigned more[4] = {place > 0 && beside.x == key, place > 1 && beside.y == key,
                      place > 2 && beside.z == key, 0};  // apart, so that none waits for another
#pragma unroll 1
  for (unsigned at = 0; at < count; at += ROUND) {
    uint4 others[ROUND / 4];
#pragma unroll
    for (unsigned i = 0; i < ROUND / 4; ++i) others[i] = four(at + 4 * i);
#pragma unroll
    for (unsigned i = 0; i < ROUND / 4; ++i) {
      const unsigned below = at + 4 * i + 4 <= mine ? key - 1 : key;
      count_more(more[0], others[i].x, below), count_more(more[1], others[i].y, below);
      count_more(more[2], others[i].z, below), count_more(more[3], others[i].w, below);
    }
  }
  return (more[0] + more[1]) + (more[2] + more[3]);
}

// The warp calls. Weights are shares of the chosen ones, so that the others' sum cancels. They are
// added by rank.
__device__ __forceinline__ void choose(const Keys& keys, Choice& own, int* chosen, float* weights,
                                       u64* counts, unsigned used, unsigned lane) {
  unsigned best = keys[0];
#pragma unroll
  for (unsigned i = 1; i < HELD; ++i) best = max(best, keys[i]);
  const unsigned count = put_candidates(keys, best, own, used, lane);
  const float first = logit_of(most_of_warp(best));
#pragma unroll 1
  for (unsigned mine = lane; mine < count; mine += 32) {
    const unsigned key = own.keys[mine];
    const int expert = own.experts[mine];
    const float value = expf(logit_of(key) - first);
    const unsigned rank = rank_of(own, key, mine, count);
    if (rank < used) own.values[rank] = value, own.winners[rank] = expert;
  }
  __syncwarp();
  if (lane >= used) return;
  const int expert = own.winners[lane];
  const float value = own.values[lane];
  float all = 0.0f;
#pragma unroll 1
  for (unsigned rank = 0; rank < used; rank += 8)
#pragma unroll
    for (unsigned i = 0; i < 8; ++i) all += own.values[rank + i];
  chosen[lane] = expert;
  weights[lane] = quotient(value, all);
  atomicAdd(counts + expert, static_cast<u64>(1));
}

}  // namespace voltapile
