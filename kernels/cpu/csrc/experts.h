// Commands for routed experts: which ones a token takes, and their feed-forward nets.
#pragma once
#include <cstdint>
#include <memory>

#include "engine.h"
#include "matmul.h"

namespace voltapile {

struct RouteArgs {
  const float* logits;  // [tokens, experts]
  std::int64_t tokens, experts, used;
  std::int64_t generated;  // so many first tokens count in row 1 of counts, the others in row 0
  std::int32_t* chosen;    // [tokens, used]
  float* weights;          // [tokens, used]
  std::int64_t* counts;    // [2, experts]
};

std::unique_ptr<Command> make_route(const RouteArgs& args);

// x rounded to BF16, ties to even.
std::unique_ptr<Command> make_round_bf16(const float* x, float* out, std::int64_t count);

// Scratch, private to the command until it has run. pairs: what expert_pairs says.
struct ExpertScratch {
  std::uint8_t* quantised;        // quantised_bytes(tokens, D)
  float* inner;                   // [pairs, F]
  std::uint8_t* inner_quantised;  // quantised_bytes(pairs, F)
  float* outputs;                 // [pairs, D]
  std::int32_t* lists;            // [count + 1 + pairs + tokens * used]
};

// gate, up [count * F, D], down [count * D, F]: experts first, first + 1, ... of the layer.
struct ExpertArgs {
  const float* x;  // [tokens, D]
  std::int64_t tokens;
  const std::int32_t* chosen;  // [tokens, used]: others than these experts are left out
  const float* weights;        // [tokens, used]
  std::int64_t used;
  const Matrix *gate, *up, *down;
  std::int64_t count, first;
  float* out;  // [tokens, D]
  bool accumulate;
  ExpertScratch scratch;
};

// At most so many choices of tokens fall on `count` experts.
std::int64_t expert_pairs(std::int64_t tokens, std::int64_t used, std::int64_t count);
std::unique_ptr<Command> make_experts(const ExpertArgs& args);

}  // namespace voltapile
