// Commands of ranks that share out keys and values by position (kernels/positions.py).
#pragma once
#include <cstdint>
#include <memory>

#include "engine.h"

namespace voltapile {

// Run number `part` of each `parts`, of `run` positions, is kept here. seen: the last kept position
// up to each, -1 if there is none; stored: the same, and its slot, of tokens that are kept here.
struct KeepArgs {
  const std::int32_t *positions, *slots;
  std::int32_t *seen, *stored, *stored_slots;
  std::int64_t tokens, part, parts, run;
  std::int32_t padding;
};
// o [tokens, heads, dim]: each head times exp(weights) over the sum of exp(all_weights), which is
// [tokens, parts, heads].
struct WeighArgs {
  float* o;
  const float *weights, *all_weights;
  std::int64_t tokens, heads, dim, parts;
};
// out [rows, width]: columns of x [rows, cols] from `offset` on.
struct TakeArgs {
  const float* x;
  float* out;
  std::int64_t rows, cols, width, offset;
};

std::unique_ptr<Command> make_keep(const KeepArgs& args);
std::unique_ptr<Command> make_weigh(const WeighArgs& args);
std::unique_ptr<Command> make_take(const TakeArgs& args);

}  // namespace voltapile
