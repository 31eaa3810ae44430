// Bias, penalties and mask of one row, as kernels/random.md says.
#pragma once
#include <algorithm>
#include <cstring>
#include <limits>

#include "commands.h"

namespace voltapile {

inline bool has_penalties(const SlotView& state, std::int32_t slot) {
  return state.repetition_penalty[slot] != 1.0f || state.presence_penalty[slot] != 0.0f ||
         state.frequency_penalty[slot] != 0.0f;
}

// The row is changed before a token is chosen. Another one costs nothing.
inline bool is_adjusted(const SlotView& state, std::int32_t slot) {
  return state.bias_count[slot] > 0 || state.masked[slot] || has_penalties(state, slot);
}

// Tokens without a bit are never chosen; nor are those that the mask has no word for.
inline void apply_mask(const std::uint32_t* mask, std::int64_t words, std::int64_t vocab,
                       float* out) {
  constexpr float kNever = -std::numeric_limits<float>::infinity();
  for (std::int64_t start = 0; start < vocab; start += 32) {
    const std::uint32_t bits = start / 32 < words ? mask[start / 32] : 0;
    if (bits == 0xffffffffu) continue;
    const std::int64_t count = std::min<std::int64_t>(32, vocab - start);
    for (std::int64_t i = 0; i < count; ++i) {
      if (!(bits >> i & 1)) out[start + i] = kNever;
    }
  }
}

inline float penalised(const Penalties& p, float x, Occurrence seen) {
  const std::uint32_t count = seen >> 1;
  if (seen) x = x > 0.0f ? x / p.repetition : x * p.repetition;
  return count ? x - (p.frequency * static_cast<float>(count) + p.presence) : x;
}

// Occurrences [vocab] of the tokens that a slot knew before `position`, within its window.
inline void count_tokens(const SlotView& state, std::int32_t slot, std::int64_t position,
                         std::int64_t vocab, Occurrence* seen) {
  std::memset(seen, 0, vocab * sizeof *seen);
  const std::int32_t* history = state.history + slot * state.context;
  const std::int64_t end = std::min(position, state.context), window = state.penalty_window[slot];
  for (std::int64_t i = window > 0 ? std::max<std::int64_t>(0, position - window) : 0; i < end;
       ++i) {
    const std::int64_t token = history[i];
    if (token < 0 || token >= vocab) continue;  // an image's place
    seen[token] = (seen[token] | 1) + (i >= state.prompt_tokens[slot] ? 2 : 0);
  }
}

// out [vocab] = the logits of a row for the token at `position`, adjusted. local: scratch for an
// Occurrence of each of a slot's biases.
inline void adjust(const float* logits, std::int64_t vocab, const SlotView& state,
                   std::int32_t slot, std::int64_t position, float* out, Occurrence* local) {
  const std::int64_t biases = std::min<std::int64_t>(state.bias_count[slot], state.num_biases);
  const std::int32_t* ids = state.bias_ids + slot * state.num_biases;
  const float* values = state.bias_values + slot * state.num_biases;
  const Penalties penalties{state.repetition_penalty[slot], state.presence_penalty[slot],
                            state.frequency_penalty[slot]};
  if (has_penalties(state, slot)) {
    // Occurrences stand where the penalised logits will: both have four bytes.
    static_assert(sizeof(Occurrence) == sizeof(float));
    auto* seen = reinterpret_cast<Occurrence*>(out);
    count_tokens(state, slot, position, vocab, seen);
    for (std::int64_t i = 0; i < biases; ++i) local[i] = ids[i] < vocab ? seen[ids[i]] : 0;
    kernels().penalise(penalties, logits, vocab, out);
  } else {
    std::memcpy(out, logits, vocab * sizeof *out);
    std::fill(local, local + biases, 0);
  }
  for (std::int64_t i = 0; i < biases; ++i) {
    if (ids[i] < vocab) out[ids[i]] = penalised(penalties, logits[ids[i]] + values[i], local[i]);
  }
  if (state.masked[slot]) {
    apply_mask(state.mask + slot * state.mask_words, state.mask_words, vocab, out);
  }
}

}  // namespace voltapile
