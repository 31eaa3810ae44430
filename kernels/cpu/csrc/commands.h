// Commands for everything but the matrix products (matmul.h). Pointers are not owned; what they
// point to is read when the command runs.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "engine.h"
#include "kernels.h"

namespace voltapile {

// numpy's Batch and SlotState (kernels/ops.py), as far as begin and sample use them.
struct BatchView {
  std::int32_t *tokens, *positions, *rope_positions;
  const std::int32_t *slots, *continues, *outputs;
  std::int64_t num_tokens, num_outputs;
};

struct SlotView {
  std::int32_t *last_token, *next_position, *finished, *history;
  const std::int32_t *max_position, *stop_ids, *top_k, *prompt_tokens, *penalty_window, *bias_count,
      *bias_ids, *logprobs, *masked, *forced;
  const float *temperature, *top_p, *min_p, *repetition_penalty, *presence_penalty,
      *frequency_penalty, *bias_values;
  const std::uint64_t* seed;
  const std::uint32_t* mask;
  std::int64_t num_stop_ids, num_biases, context, mask_words;  // of each slot
};

struct OutputView {
  std::int32_t *tokens, *finish, *logprob_ids;
  float* logprobs;
  std::int64_t num_logprobs;  // of each row
};

std::unique_ptr<Command> make_begin(const BatchView& batch, const SlotView& state);
// adjusted [outputs, vocab]: scratch for the logits of rows with a bias, penalties or a mask.
std::unique_ptr<Command> make_sample(const float* logits, std::int64_t vocab,
                                     const BatchView& batch, const SlotView& state,
                                     const OutputView& out, float* adjusted);
std::unique_ptr<Command> make_rms_norm(const RmsNormArgs& args);
std::unique_ptr<Command> make_rope(const RopeArgs& args);
// out [tokens, pairs, 2]: cos and sin of float32(position) * inv_freq, times scale.
std::unique_ptr<Command> make_rope_angles(const std::int32_t* positions, std::int64_t tokens,
                                          std::vector<float> inv_freq, float scale, float* out);
// out row i = row index[i] of x (index null: row i); cols floats a row. A row out of [0, rows) is
// zero.
std::unique_ptr<Command> make_gather(const float* x, std::int64_t rows, const std::int32_t* index,
                                     std::int64_t count, std::int64_t cols, float* out);
// x = cap * tanh(x / cap), in place.
std::unique_ptr<Command> make_softcap(float* x, std::int64_t count, float cap);

// Query heads by the kv head that they read, at most max_rows together. Throws
// std::invalid_argument if head_map names a kv head that there is not.
struct Heads {
  Heads() = default;
  Heads(const std::vector<std::int32_t>& head_map, std::int64_t kv_heads, std::int64_t max_rows);
  std::vector<std::int32_t> heads;  // in the order of groups, which point into it
  std::vector<HeadGroup> groups;
};

std::unique_ptr<Command> make_store_kv(const StoreKvArgs& args);
// Fills in groups and rows of args; throws std::invalid_argument if head_map names a kv head that
// the cache does not have, or a row does not fit in local_bytes.
std::unique_ptr<Command> make_attention(const AttentionArgs& args,
                                        const std::vector<std::int32_t>& head_map,
                                        std::int64_t local_bytes);

}  // namespace voltapile
