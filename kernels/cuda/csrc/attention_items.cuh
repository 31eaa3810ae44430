// Which tokens a block of attention_decode takes, their heads, and where what it finds goes.
#pragma once
#include "attention_rows.cuh"

namespace voltapile {

// The tokens that a block takes together.
struct Item {
  int begin, count;
  int fresh;  // first position that this step stores for their slot
};

// Tokens from t on that a block takes together; none if another token's block takes t. They are
// neighbours of one slot with pieces of one length, cut after each `chunk` tokens of the slot.
__device__ __forceinline__ Item item_at(const int* slots, const int* positions, int t, int first,
                                        int last, int chunk, int limit, int window, int most) {
  const int slot = slots[t];
  const auto piece_of = [&](int i) { return span_of(positions[i], limit, window, most).piece; };
  int start = t;
#pragma unroll 1
  while (start > first && slots[start - 1] == slot) --start;
  const int phase = static_cast<unsigned>(t - start) % chunk;
  if (phase != 0 && piece_of(t - 1) == piece_of(t)) return {t, 0, 0};
  int count = 1;
#pragma unroll 1
  while (t + count < last && phase + count < chunk && slots[t + count] == slot &&
         piece_of(t + count) == piece_of(t))
    ++count;
#pragma unroll 1
  while (start > 0 && slots[start - 1] == slot) --start;  // an earlier launch's tokens, too
  return {t, count, positions[start]};
}

// Of all tokens together; their pieces have one length.
__device__ __forceinline__ Span span_of_item(const Item& item, const int* positions, int limit,
                                             int window, int most) {
  Span all = span_of(positions[item.begin], limit, window, most);
#pragma unroll 1
  for (int t = 1; t < item.count; ++t) {
    const Span s = span_of(positions[item.begin + t], limit, window, most);
    all.low = min(all.low, s.low), all.high = max(all.high, s.high);
    all.first = min(all.first, s.first), all.last = max(all.last, s.last);
  }
  return all;
}

// A block's rows: heads of one KV head, for one token after another.
struct Rows {
  const int* own;  // the KV head's query heads; null: `members` from `begin` on
  int begin, members, first;
  int used;

  __device__ int head(int i) const { return own != nullptr ? own[i] : begin + i; }
};

// Where pieces of rows go in `partial`: those of query 0 from `first` on, `stride` a query.
struct Places {
  int first, stride;
  __device__ int of(int query) const { return first + query * stride; }
};

}  // namespace voltapile
