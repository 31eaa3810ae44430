// The end of a product whose rows are heads of k, v and q, in that order, of one token: q's and k's
// are normed (where the model does) and rotated, keys and values put into their pages, and q's to
// where attention reads them.
//
// Whoever makes a value leaves it in memory as a word that is never 0, and of the blocks that make
// a head the one of the highest number waits for its words, and does the rest. So nothing is fenced
// and nobody counts, and since blocks start in order it waits for none that cannot start.
// -D HEAD: values of a head; 0: there is no such end.
#pragma once
#include "attention_head.cuh"
#include "group_wires.cuh"
#include "matmul_norm.cuh"

#ifndef HEAD
#define HEAD 0
#endif

namespace voltapile {
#if HEAD && VP_ARCH >= 800

constexpr int PIECES = HEAD / 32, TILES_OF_HEAD = HEAD / 16;
static_assert(HEAD % 64 == 0 && (TILES_OF_HEAD & TILES_OF_HEAD - 1) == 0);

struct Posts {
  float* q;
  const float *k_norm, *q_norm, *angles;  // norms: or null
  unsigned char *keys, *values;
  const int *table, *slots, *positions;
  int kv_heads, width, pages, key_kind, value_kind;
  int apart;  // pair i of HEAD / 2: (i, i + apart), or of neighbours with 1
  float eps;

  __device__ __forceinline__ void begin(int, int, int) const {}  // as Outgoing (group_push.cuh)
  __device__ __forceinline__ void send(float, int, int) const {}
};

// Where the token's keys and values go. A warp of the block looks it up, with so much in between
// that it never waits.
struct NewPlace {
  int position, slot, entry;

  __device__ __forceinline__ void ask(const Posts& posts) {
    position = *posts.positions, slot = *posts.slots;
  }
  __device__ __forceinline__ void look_up(const Posts& posts) {
    entry = entry_of(posts.table, slot, position, posts.width);
  }
  __device__ __forceinline__ int page(const Posts& posts) const {
    return page_of(entry, position, posts.width, posts.pages);
  }
  // Of the block.
  static __device__ __forceinline__ NewPlace& kept() {
    __shared__ NewPlace place;
    return place;
  }
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

// A head, when all of it is there.
__device__ __forceinline__ void await_head(const unsigned* words, float (&held)[PIECES]) {
  unsigned found[PIECES];
  bool is_there;
  do {
    is_there = true;
#pragma unroll
    for (int i = 0; i < PIECES; ++i) found[i] = posted(words + 32 * i);
#pragma unroll
    for (int i = 0; i < PIECES; ++i) is_there &= found[i] != 0;
  } while (!__all_sync(~0u, is_there));
#pragma unroll
  for (int i = 0; i < PIECES; ++i) held[i] = __uint_as_float(~found[i]);
}

// Whether `block`, which has a head's tile, is the one of the highest number that has one, and this
// its last one. Tiles are dealt to blocks in turn.
__device__ __forceinline__ bool is_last(int tile, int block, int blocks) {
  if (block == blocks - 1) return TILES_OF_HEAD - 1 - tile < blocks;
  return tile == TILES_OF_HEAD - 1 && block >= tile;
}

struct Turns {
  static constexpr int HALF = PIECES / 2;
  bool is_near;  // neighbours
  float2 turn[PIECES];

  // Where two are one, the compiler does not know it, and need not wait to make two of it.
  __device__ __forceinline__ Turns(const Posts& posts, int lane) : is_near(posts.apart == 1) {
    const float2* angles = reinterpret_cast<const float2*>(posts.angles);
    const int near = ready(is_near);
#pragma unroll
    for (int i = 0; i < PIECES; ++i)
      turn[i] = angles[(32 * (i % HALF) + lane >> near) + near * (16 * HALF) * (i / HALF)];
  }
  __device__ __forceinline__ void apply(float (&held)[PIECES], int lane) const {
    float others[PIECES];
#pragma unroll
    for (int i = 0; i < PIECES; ++i)
      others[i] = is_near ? __shfl_xor_sync(~0u, held[i], 1) : held[i ^ HALF];
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
      const float other = others[i] * turn[i].y, own = held[i] * turn[i].x;
      held[i] = (is_near ? lane & 1 : i & HALF) ? other + own : own - other;
    }
  }
};

// Into its page, if there is one.
__device__ __forceinline__ void put(const Posts& posts, const float (&held)[PIECES], int head,
                                    bool is_key, float* row) {
  const NewPlace place = NewPlace::kept();
  const int page = place.page(posts), kind = is_key ? posts.key_kind : posts.value_kind;
  if (page < 0) return;
  const long long number = static_cast<long long>(page) * posts.kv_heads + head;
  unsigned char* to = (is_key ? posts.keys : posts.values) + number * head_bytes(kind, HEAD);
  store_head(held, to, kind, place.position & (PAGE - 1), HEAD, row);
}

// What is left to do for this team's units when its warps have made their part of all; each warp
// takes others. memory: shared, of the warp's own.
template <class Units>
__device__ __forceinline__ void finish_heads(const Posts& posts, const Units& units, int block,
                                             int blocks, int thread, std::uint8_t* memory) {
  const int lane = thread & 31, number = __shfl_sync(~0u, thread >> 5, 0);
  const int team = static_cast<unsigned>(number) / WARPS, warp = number & WARPS - 1;
  const int step = TEAMS * blocks;
#pragma unroll 1
  for (int unit = block + team * blocks + warp * step; unit < units.count; unit += WARPS * step) {
    const int tile = unit & TILES_OF_HEAD - 1;
    if (!is_last(tile, block, blocks)) continue;
    const bool is_key = unit < units.first, is_query = unit >= units.second;
    const int before = is_query ? units.second : is_key ? 0 : units.first;
    const int head = static_cast<unsigned>(unit - before) / TILES_OF_HEAD;
    unsigned* words = reinterpret_cast<unsigned*>(units.matrix(unit).out) + 16 * (unit - tile);
    words += lane;
    const float* weight = is_query ? posts.q_norm : is_key ? posts.k_norm : nullptr;
    float factors[PIECES], held[PIECES];
#pragma unroll
    for (int i = 0; i < PIECES; ++i) factors[i] = weight != nullptr ? weight[32 * i + lane] : 1.0f;
    const Turns turns(posts, lane);
    await_head(words, held);
    if (weight != nullptr) norm_head(held, factors, HEAD, posts.eps);
    if (is_query || is_key) turns.apply(held, lane);
    if (is_query) {
#pragma unroll
      for (int i = 0; i < PIECES; ++i) posts.q[HEAD * head + 32 * i + lane] = held[i];
    }
#pragma unroll
    for (int i = 0; i < PIECES; ++i) words[32 * i] = 0;
    if (!is_query) put(posts, held, head, is_key, reinterpret_cast<float*>(memory));
  }
}

#endif
}  // namespace voltapile
