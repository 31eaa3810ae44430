// A token's experts by its logits: ranks by counting, and the weights of the chosen ones. The
// largest logits are chosen, of equal ones the first expert, and last what is no number.
// -D HELD: experts are no more than 32 times as many.
#pragma once
#include "block.cuh"
#include "quotient.cuh"

#ifndef HELD
#define HELD 32
#endif

namespace voltapile {

using u64 = unsigned long long;

constexpr unsigned EXPERTS = 32 * HELD;  // the most that an instance takes
constexpr unsigned GROUPS = 64;          // of neighbouring experts
constexpr unsigned MEMBERS = EXPERTS / GROUPS;
constexpr unsigned MOST_USED = 32;
constexpr unsigned SPLIT = 2;                      // lanes that share a candidate
constexpr unsigned AT_ONCE = HELD < 8 ? HELD : 8;  // of a thread's loads
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

// A token's choice in shared memory. keys: of its logits, 0 where there is no expert.
struct Choice {
  unsigned keys[EXPERTS];
  u64 best[GROUPS], winners[MOST_USED];  // by rank
  int groups[MOST_USED];                 // by the rank of their best

  // Larger than all that come behind it: of equal ones the first expert.
  __device__ __forceinline__ u64 whole(unsigned expert) const {
    return static_cast<u64>(keys[expert]) << 32 | ~expert;
  }
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

// Threads that work on one token: a warp, or a power of two of warps.
struct Crew {
  unsigned mine, bits;  // this one's number; log2 of how many there are

  __device__ __forceinline__ unsigned size() const { return 1u << bits; }
};

// The `used` best groups hold all that is chosen, since each has one that is better than any of the
// others. Ranks are counted. The whole block calls, with used = 0 for a token that is not there.
__device__ __forceinline__ void rank_groups(Choice& own, unsigned used, Crew crew) {
#pragma unroll 1
  for (unsigned g = crew.mine; g < GROUPS; g += crew.size()) {
    unsigned best = own.keys[MEMBERS * g], at = 0;
#pragma unroll
    for (unsigned i = 1; i < MEMBERS; ++i) {
      const unsigned key = own.keys[MEMBERS * g + i];
      if (key > best) best = key, at = i;
    }
    own.best[g] = static_cast<u64>(best) << 32 | ~(MEMBERS * g + at);
  }
  __syncthreads();
  const unsigned split = crew.bits > 6 ? crew.bits - 6 : 0;  // log2 of lanes that share a group
#pragma unroll 1
  for (unsigned item = crew.mine; item < GROUPS << split; item += crew.size()) {
    const unsigned g = item >> split;
    const u64 best = own.best[g], *with = own.best + (item & ((1u << split) - 1));
    unsigned rank = 0;
#pragma unroll 1
    for (unsigned j = 0; j < GROUPS >> split; j += 8)
#pragma unroll
      for (unsigned i = 0; i < 8; ++i) rank += with[(j + i) << split] > best;
#pragma unroll 1
    for (unsigned step = 1u << split >> 1; step > 0; step >>= 1)
      rank += __shfl_xor_sync(ALL, rank, step);
    if (rank < used) own.groups[rank] = g;
  }
  __syncthreads();
}

// Of their members the best; the block calls as above.
__device__ __forceinline__ void rank_members(Choice& own, unsigned used, Crew crew) {
  const unsigned items = used * MEMBERS * SPLIT;
#pragma unroll 1
  for (unsigned start = 0; start < items; start += crew.size()) {
    const bool is_in = start + crew.mine < items;
    const unsigned item = is_in ? start + crew.mine : 0, i = item / SPLIT, part = item % SPLIT;
    const u64 candidate = own.whole(MEMBERS * own.groups[i / MEMBERS] + i % MEMBERS);
    unsigned rank = 0;
#pragma unroll 2
    for (unsigned g = part; g < used; g += SPLIT) {
      const unsigned first = MEMBERS * own.groups[g];
#pragma unroll
      for (unsigned j = 0; j < MEMBERS; ++j) rank += own.whole(first + j) > candidate;
    }
    rank += __shfl_xor_sync(ALL, rank, 1);
    if (is_in && rank < used) own.winners[rank] = candidate;
  }
  __syncthreads();
}

// When keys are there; the block calls as above. Weights are shares of the chosen ones, so that the
// others' sum cancels. They are added by rank.
__device__ __forceinline__ void choose(Choice& own, int* chosen, float* weights, u64* counts,
                                       unsigned used, Crew crew) {
  __syncthreads();
  rank_groups(own, used, crew);
  rank_members(own, used, crew);
  if (crew.mine >= 32 || used == 0) return;
  const u64 winner = own.winners[min(crew.mine, used - 1)];
  const unsigned key = static_cast<unsigned>(winner >> 32), expert = ~static_cast<unsigned>(winner);
  const float best = logit_of(static_cast<unsigned>(own.winners[0] >> 32));
  const float value = key == NO_NUMBER ? 0.0f : expf(logit_of(key) - best);
  float all = 0.0f;
#pragma unroll 4
  for (unsigned rank = 0; rank < used; ++rank) all += __shfl_sync(ALL, value, rank);
  if (crew.mine >= used) return;
  chosen[crew.mine] = static_cast<int>(expert);
  weights[crew.mine] = quotient(value, all);
  atomicAdd(counts + expert, static_cast<u64>(1));
}

// A token's keys as blocks leave them, when all are there; places are 0 again then.
__device__ __forceinline__ void collect(unsigned* inbox, unsigned* keys, unsigned experts,
                                        Crew crew) {
#pragma unroll 1
  for (unsigned start = crew.mine; start < EXPERTS; start += AT_ONCE * crew.size()) {
    unsigned key[AT_ONCE], least;
    do {
#pragma unroll
      for (unsigned i = 0; i < AT_ONCE; ++i) {
        const unsigned e = start + (i << crew.bits);
        key[i] = e < experts ? look_at(inbox + e) : NO_NUMBER;
      }
      least = key[0];
#pragma unroll
      for (unsigned i = 1; i < AT_ONCE; ++i) least = min(least, key[i]);
    } while (least == 0);
#pragma unroll
    for (unsigned i = 0; i < AT_ONCE; ++i) {
      const unsigned e = start + (i << crew.bits);
      if (e < EXPERTS) keys[e] = e < experts ? key[i] : 0;
      if (e < experts) leave(inbox + e, 0);
    }
  }
}

}  // namespace voltapile
