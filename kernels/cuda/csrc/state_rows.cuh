// Rows of a step (the tokens of one slot, neighbours) and what a layer remembers of a slot before
// them: a history of the last `depth` inputs, and the inputs of a provisional step, of which the
// first `kept` stand. See kernels/families.py.
//
// Kernels of one layer come in order: the first only reads the state and notes in `stands` how many
// of each slot's logged tokens stand (FRESH: nothing that is remembered counts); the last writes
// it.
#pragma once
#include "block.cuh"
#include "grid.cuh"
#include "half.cuh"

namespace voltapile {

constexpr int WINDOW = 8;  // tokens of a provisional step
constexpr int FRESH = -1;

struct Step {
  const int *slots, *positions;
  const int* kept;  // by slot, or null: all
  int tokens, is_provisional;
};

__device__ __forceinline__ bool is_start(const int* slots, int t) {
  return t == 0 || slots[t - 1] != slots[t];
}

// How many tokens of its row come before token t, but no more than `most`.
__device__ __forceinline__ int before_in_row(const int* slots, int t, int most) {
  int count = 0;
  while (count < most && t - count > 0 && slots[t - count - 1] == slots[t]) ++count;
  return count;
}

// The first token of the step's row `index`, or -1. The whole warp calls.
__device__ __forceinline__ int find_row(const int* slots, int tokens, int index) {
  const int lane = threadIdx.x & 31;
#pragma unroll 1
  for (int base = 0; base < tokens; base += 32) {
    const int t = base + lane;
    unsigned starts = __ballot_sync(ALL, t < tokens && is_start(slots, t));
    const int count = __popc(starts);
    if (index < count) {
#pragma unroll 1
      while (index-- > 0) starts &= starts - 1;
      return base + __ffs(static_cast<int>(starts)) - 1;
    }
    index -= count;
  }
  return -1;
}

// Tokens of the row that begins at `first`. The whole warp calls.
__device__ __forceinline__ int row_length(const int* slots, int tokens, int first) {
  constexpr int SEVERAL = 4;  // loads under way: a prompt's rows are long
  const int lane = threadIdx.x & 31, own = slots[first];
  for (int base = first + 1; base < tokens; base += 32 * SEVERAL) {
    bool is_other[SEVERAL];
#pragma unroll
    for (int i = 0; i < SEVERAL; ++i) {
      const int t = base + 32 * i + lane;
      is_other[i] = t < tokens && slots[t] != own;
    }
#pragma unroll
    for (int i = 0; i < SEVERAL; ++i) {
      const unsigned others = __ballot_sync(ALL, is_other[i]);
      if (others != 0) return base + 32 * i + __ffs(static_cast<int>(others)) - 1 - first;
    }
  }
  return tokens - first;
}

// Of the slot of the row that begins at `first`.
__device__ __forceinline__ int standing(const Step& step, const int* logged, int first) {
  if (step.positions[first] == 0) return FRESH;
  const int slot = step.slots[first], count = logged[slot];
  return step.kept == nullptr ? count : min(count, step.kept[slot]);
}

// What was before a row's first token; of one slot.
struct Past {
  const float *history, *log;  // [depth][width], oldest first; [WINDOW][width]
  int depth, width, stands;

  __device__ __forceinline__ Past(const float* histories, const float* logs, int slot, int depth,
                                  int width, int stands)
      : history(histories + static_cast<long long>(slot) * depth * width),
        log(logs + static_cast<long long>(slot) * WINDOW * width),
        depth(depth), width(width), stands(stands) {}
  // The input `back` tokens before the first: 1 to depth.
  __device__ __forceinline__ float at(int back, int channel) const {
    if (stands == FRESH) return 0.0f;
    return back <= stands ? log[(stands - back) * width + channel]
                          : history[(depth + stands - back) * width + channel];
  }
};

// Channel `channel` of a slot's state goes on over a row of `count` inputs [count][width], or notes
// them. A state is read at places that are written later only.
__device__ __forceinline__ void go_on(float* histories, float* logs, const Past& past, int slot,
                                      const float* row, int count, int channel,
                                      int is_provisional) {
  float* history = histories + static_cast<long long>(slot) * past.depth * past.width;
  float* log = logs + static_cast<long long>(slot) * WINDOW * past.width;
  const int passed = is_provisional ? 0 : count;
  for (int i = 0; i < past.depth; ++i) {
    const int back = past.depth - i;  // from the end
    history[i * past.width + channel] =
        back <= passed ? row[static_cast<long long>(passed - back) * past.width + channel]
                       : past.at(back - passed, channel);
  }
  if (!is_provisional) return;
  for (int i = 0; i < min(count, WINDOW); ++i)
    log[i * past.width + channel] = row[static_cast<long long>(i) * past.width + channel];
}

// A value of a small matrix. kind: 0 F32, 1 F16, 2 BF16.
__device__ __forceinline__ float tap_at(const void* taps, int kind, long long i) {
  if (kind == 0) return static_cast<const float*>(taps)[i];
  const unsigned bits = static_cast<const unsigned short*>(taps)[i];
  return kind == 1 ? half_value(bits) : __uint_as_float(bits << 16);
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }

}  // namespace voltapile
