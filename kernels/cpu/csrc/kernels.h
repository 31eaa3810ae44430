// The inner loops that exist once for each instruction set, and what they are given.
//
// vec_<isa>.cpp compile the same sources with different compiler options; kernels() picks. Sums
// run in an order that depends on shapes and the instruction set alone.
#pragma once
#include <cstdint>

#include "engine.h"

namespace voltapile {

struct RmsNormArgs {
  const float* x;       // [rows, cols]
  const float* weight;  // [cols]
  float* out;
  std::int64_t rows, cols;
  float eps;
  bool accumulate;  // out += instead of out =
};

struct RopeArgs {
  float* x;             // [tokens, heads, head_dim], in place
  const float* angles;  // [tokens, pairs, 2]: cos, sin
  std::int64_t tokens, heads, head_dim, pairs;
  bool neox;            // pairs (i, i + pairs) instead of (2i, 2i + 1)
};

enum class KvType { f32, f16, q8_0 };

// Pages of one layer. A page holds, for each kv head, keys [key_dim][pitch] (a position is a
// column, so that scores are computed for neighbouring positions at once) and values
// [page_tokens][value_dim]. pitch is page_tokens rounded up to kPitch. q8_0: half scales of 16
// dimensions each come first, [key_dim / 16][pitch] or [page_tokens][value_dim / 16].
struct KvLayout {
  static constexpr std::int64_t kPitch = 32;
  static constexpr std::int64_t kBlock = 16;  // values that share a scale in q8_0
  std::uint8_t* keys;
  std::uint8_t* values;  // readable for 128 bytes past its end: vectors overrun the last row
  KvType key_type, value_type;
  std::int64_t pages, kv_heads, page_tokens, pitch, key_dim, value_dim;

  static std::int64_t bytes(KvType type, std::int64_t n) {
    return type == KvType::f32 ? n * 4 : type == KvType::f16 ? n * 2 : n / kBlock * (kBlock + 2);
  }
  std::int64_t key_head_bytes() const { return bytes(key_type, key_dim * pitch); }
  std::int64_t value_head_bytes() const { return bytes(value_type, page_tokens * value_dim); }
};

// Where the tokens of a step are: slots[t], positions[t], table [slots, table_width] of pages.
struct Places {
  const std::int32_t* slots;
  const std::int32_t* positions;
  const std::int32_t* table;
  std::int64_t table_width, tokens;
};

struct StoreKvArgs {
  const float* k;  // [tokens, kv_heads, key_dim]
  const float* v;  // [tokens, kv_heads, value_dim]
  KvLayout cache;
  Places at;
};

// Query heads that read one kv head.
struct HeadGroup {
  std::int64_t kv_head, count;
  const std::int32_t* heads;
};

struct AttentionArgs {
  const float* q;  // [tokens, heads, key_dim]
  float* out;      // [tokens, heads, value_dim]
  float* weights;  // [tokens, heads] log(sum(exp(score))), or null
  KvLayout cache;
  Places at;
  const HeadGroup* groups;
  std::int64_t num_groups, heads;
  std::int64_t max_rows;  // query rows (tokens x heads of a group) computed together
  float scale, softcap;   // softcap 0: none
  std::int64_t window;    // 0: none
};

// Over a part of a row of logits. -inf is a token that is never chosen.
struct RowStats {
  float max, min;   // min: of what is not -inf
  bool is_bad;      // it holds a NaN or +inf
  double sum;       // of exp(x - max), where it was asked for
};

// How often a token occurs in a slot's history: 0 not at all, else 1 + 2 * times generated.
using Occurrence = std::uint32_t;

struct Penalties {
  float repetition, presence, frequency;
};

// One that may be chosen: x = logit / temperature.
struct Candidate {
  float x;
  std::int32_t id;
  float term;  // exp(x - top)
};

// How far a search for the best candidates has come.
struct HeadScan {
  static constexpr std::int64_t kRoom = 1024;
  std::int64_t next;   // the first id that has not been looked at
  std::int64_t count;  // of candidates found
  float least;         // only an x above it is of interest
  double mass;         // of all that were looked at: sum of exp(x - top)
};

struct Histogram {
  static constexpr std::int64_t kBuckets = 4096;
  static constexpr float kSpan = 110.0f;  // exp(-kSpan) is 0 in float32
  std::uint32_t count[kBuckets];
  double mass[kBuckets];
};

// Candidates of one row by x = logit / temperature: bucket int((top - x) * scale), the last one
// open ended; mass is exp(x - top).
struct Spectrum {
  const float* logits;
  std::int64_t n;
  float temperature, top, scale;
};

struct Kernels {
  void (*rms_norm)(const RmsNormArgs&, Team&);
  void (*rope)(const RopeArgs&, Team&);
  void (*store_kv)(const StoreKvArgs&, Team&);
  void (*attention)(const AttentionArgs&, Team&);
  // The most rows that fit in local_bytes, at most 16; 0 if not even one does.
  std::int64_t (*attention_rows)(const KvLayout&, std::int64_t table_width,
                                 std::int64_t local_bytes);
  RowStats (*row_stats)(const float* x, std::int64_t n, bool with_sum);
  // x [n] holds Occurrences and is overwritten by the penalised logits.
  void (*penalise)(const Penalties&, const float* logits, std::int64_t n, float* x);
  // The `most` largest that are not -inf, largest first, equal ones by id; returns how many.
  std::int64_t (*best)(const float* x, std::int64_t n, std::int64_t most, std::int32_t* ids,
                       float* values);
  // Goes on until the row ends or `found` [HeadScan::kRoom] has no room for a vector more.
  void (*scan_head)(const Spectrum&, HeadScan*, Candidate* found);
  // Fills the histogram; returns how many candidates have exp(x - top) >= least.
  std::int64_t (*histogram)(const Spectrum&, float least, Histogram*);
  // Ids of one bucket's candidates in ascending order, and exp(x - top) of each.
  std::int64_t (*gather_bucket)(const Spectrum&, std::int64_t bucket, std::int32_t* ids,
                                float* terms);
};

extern const Kernels kernels_plain;
#ifdef VOLTAPILE_X86
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
#endif

// Those of the instruction set in use (matmul.h's isa()).
const Kernels& kernels();

}  // namespace voltapile
