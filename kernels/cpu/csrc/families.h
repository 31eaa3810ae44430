// What the Qwen families need beyond kernels.h: its inner loops for each instruction set, and the
// Commands over them. See kernels/families.py for what is computed.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "engine.h"
#include "kernels.h"

namespace voltapile {

constexpr std::int64_t kMaxProvisional = 8;  // MAX_PROVISIONAL
constexpr std::int64_t kIndexRing = 16;      // INDEX_RING
constexpr std::int64_t kPieceInputs = 64;    // of a delta net that go through a head together
constexpr std::int64_t kChosenRows = 16;     // most heads of a kv head computed together

// --- elementwise ---------------------------------------------------------------------------------

struct SiluArgs {
  float* x;  // x = silu(x * scale)
  std::int64_t count;
  float scale;
};

struct GateArgs {
  float* y;  // y *= sigmoid(gate)
  const float* gate;
  std::int64_t count;
};

struct GateRowsArgs {
  float* y;             // [tokens, cols] *= sigmoid(x . weight)
  const float* x;       // [tokens, width]
  const float* weight;  // [width]
  std::int64_t tokens, cols, width;
};

struct StreamNormArgs {
  const float* x;       // [tokens, count * width]
  const float* weight;  // [count * width]
  float* out;
  std::int64_t tokens, count, width;
  float eps;
};

struct StreamMixArgs {
  const float *x, *gate;  // [tokens, count * width]
  float* out;             // [tokens, width]
  std::int64_t tokens, count, width;
};

struct StreamAddArgs {
  float* x;             // [tokens, count * width]
  const float* inject;  // [tokens, count]
  const float* y;       // [tokens, width]
  std::int64_t tokens, count, width;
};

// --- states --------------------------------------------------------------------------------------

// The tokens of a step by slot, and what tells how they go on with a state.
struct StepView {
  const std::int32_t* slots;
  const std::int32_t* positions;
  const std::int32_t* kept;  // of each slot; null: all that were logged
  std::int64_t tokens;
  bool is_provisional;
};

// The last `depth` inputs of a causal convolution of each slot, and those of a provisional step.
struct History {
  float* rows;           // [slots, depth, width]
  float* log;            // [slots, kMaxProvisional, width]
  std::int32_t* logged;  // [slots]
  std::int64_t depth, width;
};

struct DeltaArgs {
  const float *m, *z, *b, *a;  // [tokens, channels], [tokens, value_heads * dim], [.., value_heads]
  const float* taps;           // [kernel, channels]
  const float *rate, *dt;      // [value_heads]
  const float* norm;           // [dim]
  const std::int32_t* key_head_of;  // [value_heads]
  float* out;                       // [tokens, value_heads * dim]
  float* matrices;                  // [slots, value_heads, dim, dim]
  float *log_b, *log_a;             // [slots, kMaxProvisional, value_heads]
  History history;
  StepView step;
  std::int64_t key_heads, value_heads, dim, kernel;
  float eps;
  bool gates_by_sigmoid;  // else by silu
};

struct NGramArgs {
  float* x;            // [tokens, count * width]
  const float* key;    // alike
  const float* value;  // [tokens, width]
  const float *norm_key, *norm_query, *norm_conv;  // [count * width]
  const float* taps;                               // [kernel, count * width]
  float *added, *normed;                           // scratch like x
  History history;
  StepView step;
  std::int64_t count, width, kernel, dilation;
  float eps;
};

// --- attention to chosen blocks ------------------------------------------------------------------

// ring [pages, kIndexRing, dim]; pooled [pages, dim, pitch]: a column for each block of the page.
struct IndexLayout {
  float *ring, *pooled;
  std::int64_t pages, page_tokens, block, dim;
  std::int64_t per_page() const { return page_tokens / block; }
  std::int64_t pitch() const { return (per_page() + 15) / 16 * 16; }
};

struct IndexStoreArgs {
  const float* keys;  // [tokens, dim]
  const float* norm;  // [dim]
  float scale, eps;   // scale: of the rotation
  IndexLayout cache;
  Places at;
};

struct ChooseArgs {
  const float* q;  // [tokens, heads, dim]
  std::int64_t heads, most;
  IndexLayout cache;
  Places at;
  float* scores;         // [wave, most blocks of a slot]
  std::int64_t wave;     // tokens that are scored together
  std::int32_t* chosen;  // [tokens, most], ascending
  std::int32_t* counts;  // [tokens]
  std::int64_t blocks() const { return at.table_width * cache.per_page(); }
};

// Of one token, pages [begin, end) of its slot: scores of their whole blocks.
using ScorePages = void (*)(const ChooseArgs&, std::int64_t token, std::int64_t begin,
                            std::int64_t end, float* scores);

struct ChosenArgs {
  AttentionArgs attention;     // without window and softcap
  const std::int32_t* chosen;  // [tokens, most]
  const std::int32_t* counts;  // [tokens]
  std::int64_t most, block;
  float* nodes;  // partial results of few tokens, see chosen_node_floats
};

struct FamilyKernels {
  void (*silu)(const SiluArgs&, Team&);
  void (*gate)(const GateArgs&, Team&);
  void (*gate_rows)(const GateRowsArgs&, Team&);
  void (*stream_norm)(const StreamNormArgs&, Team&);
  void (*stream_mix)(const StreamMixArgs&, Team&);
  void (*stream_add)(const StreamAddArgs&, Team&);
  void (*delta_net)(const DeltaArgs&, Team&);
  void (*ngram_add)(const NGramArgs&, Team&);
  ScorePages score_pages;
  void (*attention_to)(const ChosenArgs&, Team&);
  // Of scratch for the partial results of so many tokens; 0 where there are none.
  std::int64_t (*chosen_node_floats)(const ChosenArgs&);
};

extern const FamilyKernels families_plain;
#ifdef VOLTAPILE_X86
extern const FamilyKernels families_avx2;
extern const FamilyKernels families_avx512;
#endif
const FamilyKernels& family_kernels();  // of the instruction set in use

// --- commands ------------------------------------------------------------------------------------

// Throws std::invalid_argument where local_bytes do not hold a head.
std::unique_ptr<Command> make_delta_net(const DeltaArgs& args,
                                        std::vector<std::int32_t> key_head_of,
                                        std::int64_t local_bytes);

// x [tokens, width] `count` times side by side.
std::unique_ptr<Command> make_streams(const float* x, std::int64_t tokens, std::int64_t width,
                                      std::int64_t count, float* out);
// x [tokens, heads, 2, dim]: the first and the second dim values of each head.
std::unique_ptr<Command> make_split_heads(const float* x, std::int64_t units, std::int64_t dim,
                                          float* first, float* second);

struct HashArgs {
  const std::int32_t *slots, *positions, *history;  // history [slots, context]
  std::int64_t tokens, context;
  std::int64_t* rows;  // [tokens, heads of all orders]
};
struct Hashing {
  std::vector<std::uint64_t> multipliers, moduli, offsets;
  std::int32_t boundary;
};
std::unique_ptr<Command> make_ngram_rows(const HashArgs& args, Hashing hashing);

std::unique_ptr<Command> make_index_store(const IndexStoreArgs& args, std::vector<float> inv_freq);
std::unique_ptr<Command> make_choose_blocks(const ChooseArgs& args);
// Fills in heads and groups of args.attention.
std::unique_ptr<Command> make_attention_to(const ChosenArgs& args,
                                           const std::vector<std::int32_t>& head_map);
// Floats of ChosenArgs::nodes.
std::int64_t chosen_node_floats(const ChosenArgs& args, const std::vector<std::int32_t>& head_map);

}  // namespace voltapile
