// What a product gives to a sum with its norm (group_norm.cu), sent to the other ranks value by
// value as soon as it is there: the way to them then lies beside the end of the product.
#pragma once
#include "group.cuh"

namespace voltapile {

template <bool PUSHES>
struct Outgoing {
  static constexpr int MOST_TOKENS = 8;
  const Group* group;
  int rank, ranks;

  // Finds where rows go, after grid_wait and before the block meets. One warp, the one that has the
  // least to stage.
  __device__ __forceinline__ void find(int tokens, int lane) const {
#pragma unroll 1
    for (int i = lane; i < tokens * MOST_RANKS; i += 32) {
      const int token = i / MOST_RANKS, other = i % MOST_RANKS;
      if (other < ranks - 1)
        places()[i] = row_of(group->peers[other + (other >= rank)].out, group->rows[token], token);
    }
  }
  __device__ __forceinline__ void send(float value, int token, int column) const {
    const unsigned word = hidden(value);
#pragma unroll 1
    for (int i = 0; i < ranks - 1; ++i)
      store_fresh(word_of(places()[token * MOST_RANKS + i], column), word);
  }

 private:
  static __device__ __forceinline__ uint4** places() {
    __shared__ uint4* kept[MOST_TOKENS * MOST_RANKS];
    return kept;
  }
};

template <>
struct Outgoing<false> {
  __device__ __forceinline__ void find(int, int) const {}
  __device__ __forceinline__ void send(float, int, int) const {}
};

}  // namespace voltapile
