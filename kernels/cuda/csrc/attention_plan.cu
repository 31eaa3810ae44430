// Deals the tokens of a step out to two kernels: runs of neighbours of one slot that are as short
// as generated rows to attention_decode, in items, the others to attention_prefill, in tiles.
#include "attention_rows.cuh"

namespace voltapile {

struct Lists {
  int* plan;   // counts: items, tiles; then the items: first token, tokens
  int* tiles;  // first token of the run, its tokens, number of the tile in it
  int items = 0, num_tiles = 0;
};

__device__ __forceinline__ void deal(Lists& lists, const int* positions, int begin, int length,
                                     int shortest, int group, int tile_rows, int chunk, int limit,
                                     int window, int most) {
  const int lane = threadIdx.x;
  if (length > shortest) {
    const int count = static_cast<unsigned>(length * group + tile_rows - 1) / tile_rows;
#pragma unroll 1
    for (int i = lane; i < count; i += 32) {
      int* tile = lists.tiles + 3 * (lists.num_tiles + i);
      tile[0] = begin, tile[1] = length, tile[2] = i;
    }
    lists.num_tiles += count;
    return;
  }
  // At most 32 tokens; cut like tokens_of_item in attention_decode.cu.
  const int t = begin + lane;
  const bool is_inside = lane < length;
  bool leads = is_inside && static_cast<unsigned>(lane) % chunk == 0;
  const int piece = is_inside ? span_of(positions[t], limit, window, most).piece : 0;
  const int before = __shfl_up_sync(0xffffffffu, piece, 1);
  leads |= is_inside && lane > 0 && piece != before;
  const unsigned leaders = __ballot_sync(0xffffffffu, leads);
  if (leads) {
    int* item = lists.plan + 4 + 2 * (lists.items + __popc(leaders & ((1u << lane) - 1)));
    const unsigned later = leaders & ~((2u << lane) - 1);
    item[0] = t;
    item[1] = (later ? __ffs(later) - 1 : length) - lane;
  }
  lists.items += __popc(leaders);
}

}  // namespace voltapile

using namespace voltapile;

// one warp. shortest: runs of at most so many tokens (<= 31) are items. group: most query heads of
// a KV head; tile_rows: rows of a prefill block; chunk: most tokens of an item
extern "C" __global__ void __launch_bounds__(32)
attention_plan(const int* slots, const int* positions, int* plan, int* tiles, int tokens,
               int shortest, int group, int tile_rows, int chunk, int limit, int window, int most,
               int most_items, int most_tiles) {
  Lists lists{plan, tiles};
  int begin = 0;
#pragma unroll 1
  for (int base = 0; base <= tokens; base += 32) {
    const int t = base + threadIdx.x;
    const bool ends = t > 0 && t <= tokens && (t == tokens || slots[t] != slots[t - 1]);
    unsigned left = __ballot_sync(0xffffffffu, ends);
#pragma unroll 1
    while (left) {
      const int end = base + __ffs(left) - 1;
      left &= left - 1;
      deal(lists, positions, begin, end - begin, shortest, group, tile_rows, chunk, limit, window,
           most);
      begin = end;
    }
  }
  // More than the other launches were made for: a slot has two runs.
  if (lists.items > most_items || lists.num_tiles > most_tiles) __trap();
  if (threadIdx.x == 0) plan[0] = lists.items, plan[1] = lists.num_tiles;
}
