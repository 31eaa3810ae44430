// The end of a product whose rows are heads of q, k and v (attention_head.cuh), of one token:
// whoever makes a value leaves it in memory as a word that is never 0, and of the blocks that make
// a head the one of the highest number waits for its words, and does the rest. So nothing is fenced
// and nobody counts, and since blocks start in order it waits for none that cannot start.
// -D HEAD: the longest head; 0: there is no such end.
#pragma once
#include "attention_head.cuh"
#include "group_wires.cuh"

#ifndef HEAD
#define HEAD 0
#endif

namespace voltapile {
#if HEAD

// words: zeros, of q, k and v, one behind another; they are zeros again in the end.
struct Posts {
  unsigned* words;
  TokenHeads heads;

  __device__ __forceinline__ void begin(int, int, int) const {}  // as Outgoing (group_push.cuh)
  __device__ __forceinline__ void send(float, int, int) const {}
};

__device__ __forceinline__ void post(float* place, float value) {
  unsigned* word = reinterpret_cast<unsigned*>(place);
#ifdef VP_EMULATION
  *word = hidden(value);
#else
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(word), "r"(hidden(value)) : "memory");
#endif
}
__device__ __forceinline__ unsigned posted(const unsigned* word) {
#ifdef VP_EMULATION
  return *word;
#else
  unsigned value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
#endif
}

// Those of a head, when all are there.
template <int PIECES>
__device__ __forceinline__ void take(unsigned* words, int dim, int lane, float (&held)[PIECES]) {
  unsigned found[PIECES];
  bool is_there;
  do {
    is_there = true;
#pragma unroll
    for (int i = 0; i < PIECES; ++i)
      found[i] = 32 * i + lane < dim ? posted(words + 32 * i + lane) : ~0u;
#pragma unroll
    for (int i = 0; i < PIECES; ++i) is_there &= found[i] != 0;
  } while (!__all_sync(~0u, is_there));
#pragma unroll
  for (int i = 0; i < PIECES; ++i) {
    held[i] = __uint_as_float(~found[i]);
    if (32 * i + lane < dim) words[32 * i + lane] = 0;
  }
}

// Whether `block`, which has a head's tile, is the one of the highest number that has one, and this
// its last one. Tiles are dealt to blocks in turn.
__device__ __forceinline__ bool is_last(int tile, int tiles, int block, int blocks) {
  if (block == blocks - 1) return tiles - 1 - tile < blocks;
  return tile == tiles - 1 && block >= tile;
}

// What is left to do for this team's units when its warps have made their part of all; each warp
// takes others. memory: shared, of the warp's own.
template <class Units>
__device__ __forceinline__ void finish_heads(const Posts& posts, const Units& units, int block,
                                             int blocks, int thread,
                                             std::uint8_t* memory) {
  const int lane = thread & 31, number = __shfl_sync(~0u, thread >> 5, 0);
  const int team = static_cast<unsigned>(number) / WARPS, warp = number & WARPS - 1;
  const int step = TEAMS * blocks;
  const TokenHeads& all = posts.heads;
#pragma unroll 1
  for (int unit = block + team * blocks + warp * step; unit < units.count; unit += WARPS * step) {
    const float* out = units.matrix(unit).out + 16 * unit;
    const int at = static_cast<int>(out - reinterpret_cast<float*>(posts.words));
    const int end_of_keys = (all.heads + all.kv_heads) * all.key_dim;
    const bool is_value = at >= end_of_keys;
    const int from = is_value ? at - end_of_keys : at;
    const int dim = is_value ? all.value_dim : all.key_dim;
    const int head = static_cast<unsigned>(from) / static_cast<unsigned>(dim);
    const int first = from - head * dim;
    if (!is_last(first / 16, dim / 16, block, blocks)) continue;
    Head<HEAD / 32> own(all, 0, head + (is_value ? all.heads + all.kv_heads : 0), lane);
    own.find_page();
    float held[HEAD / 32];
    take(posts.words + at - first, dim, lane, held);
    own.finish(held, reinterpret_cast<float*>(memory));
  }
}

#endif
}  // namespace voltapile
