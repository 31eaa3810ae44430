// A sum over ranks in the tail of the product that makes its parts: whoever has a value sends it to
// all others, waits for theirs and adds up. No launch for the sum, and nothing behind it to wait
// for but the product itself, as on one GPU.
//
// A word of each rank, hidden() and so never 0, goes to a place of its own, [16 columns][row]
// [column]; who reads it empties its place. A place is empty again before it is written to: of two
// halves, one exchange takes the one and the next the other; a peer sends exchange n + 2 when its
// kernel of n + 1 has ended, which saw all that this rank sent for n + 1, and this rank sent that
// when its kernel of n had ended.
// Blocks wait for tiles that others make: so all blocks are there at once, or they start in the
// order of their tiles, of whatever token, and whoever makes several makes them in that order.
#pragma once
#include "grid.cuh"
#include "group.cuh"

namespace voltapile {

constexpr int TILE_WORDS = 16 * TAIL_ROWS;  // of 16 columns

struct Tail {
  struct Way {
    unsigned *out, *in;
    int is_narrow;
    // What was read has been emptied, which the host's memory must know before the next exchange.
    __device__ __forceinline__ void settle() const {
      if (is_narrow) order_all();
    }
  };

  Group* group;
  int rank, ranks;

  // Which exchange this is: each launch counts 65,536 in all and each block of it before the next
  // kernel may start, so all its blocks see one number. By a whole warp of every block, before the
  // block meets.
  __device__ __forceinline__ void begin(int lane) const {
    unsigned number = 0;
    if (lane == 0) {
      const bool is_first = blockIdx.x == 0 && blockIdx.y == 0;
      number = count_on(&group->tails, is_first ? 65537u - gridDim.x * gridDim.y : 1u);
    }
    const unsigned exchange = __shfl_sync(~0u, number, 0) >> 16;
    const long long at = TAILS_AT + (exchange & 1) * HALF_TAILS;
    if (lane < ranks) {
      const Peer peer = group->peers[lane];
      ways()[lane] = {reinterpret_cast<unsigned*>(peer.out + at),
                      reinterpret_cast<unsigned*>(peer.in + at), peer.is_narrow};
    }
    __syncwarp();
  }
  __device__ __forceinline__ void send(float value, int place) const {
    const unsigned word = hidden(value);
#pragma unroll 1
    for (int i = 0; i < ranks; ++i)
      if (i != rank) store_fresh(ways()[i].out + place, word);
  }
  // The sum over ranks, in their order, of what was sent from here and there; after a failure
  // anything.
  __device__ __forceinline__ float total(float own, int place) const {
    Wait wait(group);
    float sum = -0.0f;  // which changes nothing that it is added to
#pragma unroll 1
    for (int i = 0; i < ranks; ++i) sum += i == rank ? own : take(i, place, wait);
    wait.end();
    return sum;
  }

  // Of this exchange, by rank.
  static __device__ __forceinline__ Way* ways() {
    __shared__ Way kept[TAIL_RANKS];
    return kept;
  }

 private:
  static __device__ __forceinline__ float take(int other, int place, Wait& wait) {
    const Way way = ways()[other];
    unsigned word;
    do {
      word = load_fresh(way.in + place);
    } while (word == 0 && !wait.is_over(other));
    store_fresh(way.in + place, 0);
    way.settle();
    return __uint_as_float(~word);
  }
};

}  // namespace voltapile
