// A sorted list's prefix without sorting: the first token, in order of falling logit (equal ones by
// id), at which a running sum reaches a target. Sums are of integers, so that the order in which
// threads add changes nothing. Knows logits and weights, not what is chosen with them.
#pragma once
#include "block.cuh"
#include "random.cuh"

namespace voltapile {

// A row of logits over a temperature. d, how far a token lies below the best one, is what counts:
// its weight is exp(-d) in units of 2^-44, and what lies 32 or more below weighs nothing.
struct Spectrum {
  const float* logits;
  int vocab;
  float temperature, best;  // best: the largest logit over the temperature

  __device__ float at(int i) const { return __fdiv_rn(logits[i], temperature); }
  __device__ float depth(float x) const { return x == best ? 0.0f : __fsub_rn(best, x); }
};

constexpr int BINS = 2048;
constexpr int LIST = 1024;  // tokens of a bin that are looked at one by one
constexpr unsigned NOWHERE = 0xffffffffu;

__device__ __forceinline__ u64 weight_of(float depth) {
  return static_cast<u64>(static_cast<double>(expf(-depth)) * 17592186044416.0);  // 2^44
}
// 31 bits, rising with depth.
__device__ __forceinline__ unsigned key_of(float depth) {
  return depth < 32.0f ? static_cast<unsigned>(depth * 67108864.0f) : NOWHERE;  // 2^26
}

struct SelectScratch {
  u64 bins[BINS];
  u64 join[32];
  float value[LIST];
  int id[LIST];
  u64 before;  // the sum of all bins before the one that was found
  int found, count;
};

// The end of a search: the token and the running sums up to and with it.
struct Cut {
  int id;
  u64 sum;
};

// Adds a value to its bin; a warp whose values all go to one bin adds once.
__device__ __forceinline__ void add_to_bin(u64* bins, int bin, u64 value) {
  const int first = __shfl_sync(ALL, bin, 0);
  if (__all_sync(ALL, bin == first)) {
    if (first < 0) return;
    value = warp_join(value, Add());
    if ((threadIdx.x & 31) == 0) atomicAdd(bins + first, value);
  } else if (bin >= 0) {
    atomicAdd(bins + bin, value);
  }
}

// The bin at which the running sum reaches target, into s.found and s.before.
__device__ inline void find_bin(SelectScratch& s, u64 target) {
  __syncthreads();
  if (threadIdx.x < 32) {  // one warp: 64 neighbouring bins a lane
    constexpr int EACH = BINS / 32;
    const int lane = threadIdx.x;
    u64 mine = 0;
    for (int i = 0; i < EACH; ++i) mine += s.bins[lane * EACH + i];
    u64 upto = mine;
    for (int step = 1; step < 32; step <<= 1) {
      const u64 other = __shfl_up_sync(ALL, upto, step);
      if (lane >= step) upto += other;
    }
    if (upto >= target && upto - mine < target) {
      u64 before = upto - mine;
      int bin = lane * EACH;
      while (before + s.bins[bin] < target) before += s.bins[bin++];
      s.found = bin;
      s.before = before;
    }
  }
  __syncthreads();
}

// The first of equal tokens (by key) in the order of ids whose running sum reaches target.
__device__ inline void find_among_equals(const Spectrum& x, SelectScratch& s, unsigned key,
                                         u64 target, bool weighted) {
  if (threadIdx.x == 0) {  // rare: more than LIST tokens of one logit
    u64 sum = s.before;
    for (int i = 0; i < x.vocab; ++i) {
      const float depth = x.depth(x.at(i));
      if (key_of(depth) != key) continue;
      sum += weighted ? weight_of(depth) : 1;
      if (sum >= target) {
        s.found = i;
        s.before = sum;
        break;
      }
    }
  }
  __syncthreads();
}

// The tokens of a bin, one by one: each counts what comes before it.
__device__ inline void find_in_list(SelectScratch& s, int count, float best, u64 target,
                                    bool weighted) {
  const u64 start = s.before;
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    const float value = s.value[i];
    const int id = s.id[i];
    u64 before = start, own = 0;
    for (int j = 0; j < count; ++j) {
      const float other = s.value[j];
      const bool earlier = other > value || (other == value && s.id[j] < id);
      if (!earlier && j != i) continue;
      const u64 w = weighted ? weight_of(other == best ? 0.0f : __fsub_rn(best, other)) : 1;
      if (j == i) own = w; else before += w;
    }
    if (before < target && before + own >= target) {
      s.found = id;
      s.before = before + own;
    }
  }
  __syncthreads();
}

// weighted: target is a sum of weights, else a number of tokens. It must be within 1 and the sum
// over all tokens of weight (or all that lie less than 32 deep). All threads get the Cut; sum is
// as the target. Threads: whole warps.
__device__ inline Cut select(const Spectrum& x, SelectScratch& s, u64 target, bool weighted) {
  unsigned low = 0;  // keys [low, low + (BINS << shift)) are in the bins
  const int rounded = (x.vocab + 31) & ~31;
  if (threadIdx.x == 0) s.before = 0;
  __syncthreads();
  for (int shift = 20; ; shift -= shift == 20 ? 11 : 9) {
    const u64 start = s.before;
    for (int i = threadIdx.x; i < BINS; i += blockDim.x) s.bins[i] = 0;
    if (threadIdx.x == 0) s.count = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < rounded; i += blockDim.x) {
      const float depth = i < x.vocab ? x.depth(x.at(i)) : 99.0f;
      const unsigned key = key_of(depth), above = (key - low) >> shift;
      const int bin = key != NOWHERE && key >= low && above < BINS ? static_cast<int>(above) : -1;
      add_to_bin(s.bins, bin, weighted && bin >= 0 ? weight_of(depth) : bin >= 0);
    }
    find_bin(s, target - start);
    if (threadIdx.x == 0) s.before += start;
    const unsigned first = low + (static_cast<unsigned>(s.found) << shift);
    const unsigned width = 1u << shift;
    __syncthreads();
    for (int i = threadIdx.x; i < x.vocab; i += blockDim.x) {
      const float value = x.at(i);
      const unsigned key = key_of(x.depth(value));
      if (key == NOWHERE || key < first || key - first >= width) continue;
      const int place = atomicAdd(&s.count, 1);
      if (place < LIST) s.value[place] = value, s.id[place] = i;
    }
    __syncthreads();
    const int count = s.count;
    __syncthreads();
    if (count <= LIST) {
      find_in_list(s, count, x.best, target, weighted);
      break;
    }
    low = first;
    if (shift == 0) {
      find_among_equals(x, s, low, target, weighted);
      break;
    }
  }
  const Cut cut{s.found, s.before};
  __syncthreads();
  return cut;
}

}  // namespace voltapile
