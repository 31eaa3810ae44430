// What a product gives to a sum with its norm (group_norm.cu), sent to all ranks, itself too: value
// by value, as soon as it is there. The way then lies beside the end of the product, and the sum
// need not wait for that end.
#pragma once
#include "grid.cuh"
#include "group.cuh"

namespace voltapile {

// MOST: tokens of a block.
template <bool PUSHES, int MOST = 8>
struct Outgoing {
  const Group* group;
  int rank, ranks;

  // Finds where `tokens` rows from `first` on go, then lets the next kernel start. By a whole warp
  // of every block, before the block meets.
  __device__ __forceinline__ void begin(int first, int tokens, int lane) const {
#pragma unroll 1
    for (int i = lane; i < tokens * MOST_RANKS; i += 32) {
      const int token = first + i / MOST_RANKS, other = i % MOST_RANKS;
      if (other < ranks)
        places()[i] = row_of(group->peers[other].out, load_fresh(group->rows + token), token);
    }
    __syncwarp();
    grid_launch();
  }
  // token: counted from the first.
  __device__ __forceinline__ void send(float value, int token, int column) const {
    const unsigned word = hidden(value);
#pragma unroll 1
    for (int i = 0; i < ranks; ++i)
      store_fresh(word_of(places()[token * MOST_RANKS + i], column), word);
  }

 private:
  static __device__ __forceinline__ uint4** places() {
    __shared__ uint4* kept[MOST * MOST_RANKS];
    return kept;
  }
};

template <int MOST>
struct Outgoing<false, MOST> {
  __device__ __forceinline__ void begin(int, int, int) const {}
  __device__ __forceinline__ void send(float, int, int) const {}
};

}  // namespace voltapile
