// Commands of the Qwen families that need no vectors of their own: copies, n-gram rows, index keys
// and the choice of blocks.
#include "families.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "commands.h"
#include "matmul.h"

namespace voltapile {

const FamilyKernels& family_kernels() {
#ifdef VOLTAPILE_X86
  if (std::strcmp(isa(), "avx512") == 0) return families_avx512;
  if (std::strcmp(isa(), "avx2") == 0) return families_avx2;
#endif
  return families_plain;
}

namespace {

// --- copies --------------------------------------------------------------------------------------

struct StreamsArgs {
  const float* x;
  std::int64_t tokens, width, count;
  float* out;
};

void streams(const StreamsArgs& args, Team& team) {
  const auto [begin, end] = team.share(args.tokens * args.count);
  for (std::int64_t i = begin; i < end; ++i)
    std::memcpy(args.out + i * args.width, args.x + i / args.count * args.width,
                static_cast<std::size_t>(args.width) * 4);
}

struct SplitArgs {
  const float* x;
  std::int64_t units, dim;
  float *first, *second;
};

void split_heads(const SplitArgs& args, Team& team) {
  const auto [begin, end] = team.share(args.units);
  const std::size_t nbytes = static_cast<std::size_t>(args.dim) * 4;
  for (std::int64_t i = begin; i < end; ++i) {
    std::memcpy(args.first + i * args.dim, args.x + 2 * i * args.dim, nbytes);
    std::memcpy(args.second + i * args.dim, args.x + (2 * i + 1) * args.dim, nbytes);
  }
}

// --- n-grams -------------------------------------------------------------------------------------

struct NGramRows final : Command {
  void run(Team& team) override {
    const auto [begin, end] = team.share(args.tokens);
    for (std::int64_t t = begin; t < end; ++t) hash(t);
  }

  void hash(std::int64_t t) const {
    const std::int64_t order = static_cast<std::int64_t>(hashing.multipliers.size());
    const std::int64_t all = static_cast<std::int64_t>(hashing.moduli.size());
    const std::int64_t heads = all / (order - 1);
    const std::int32_t* history = args.history + args.slots[t] * args.context;
    std::uint64_t hashed = 0;
    bool is_over = false;  // everything before a boundary counts as one
    for (std::int64_t n = 0; n < order; ++n) {
      const std::int64_t at = args.positions[t] - n;
      // A finished slot may go past the end.
      std::int32_t token = at >= 0 && at < args.context ? history[at] : hashing.boundary;
      is_over |= n > 0 && token == hashing.boundary;
      if (is_over) token = hashing.boundary;
      const auto i = static_cast<std::size_t>(n);
      hashed ^= static_cast<std::uint64_t>(token) * hashing.multipliers[i];
      for (std::int64_t h = std::max<std::int64_t>(n - 1, 0) * heads; h < n * heads; ++h) {
        const auto head = static_cast<std::size_t>(h);
        args.rows[t * all + h] =
            static_cast<std::int64_t>(hashed % hashing.moduli[head] + hashing.offsets[head]);
      }
    }
  }

  HashArgs args;
  Hashing hashing;
};

// --- keys of blocks ------------------------------------------------------------------------------

std::int64_t page_of(const Places& at, std::int64_t pages, std::int64_t token, std::int64_t page) {
  if (page < 0 || page >= at.table_width) return -1;
  const std::int64_t id = at.table[at.slots[token] * at.table_width + page];
  return id < 0 || id >= pages ? -1 : id;
}

struct IndexStore final : Command {
  void run(Team& team) override {
    const auto [begin, end] = team.share(args.at.tokens);
    for (std::int64_t t = begin; t < end; ++t)
      if ((args.at.positions[t] + 1) % args.cache.block == 0 && !is_repeated(t))
        pool(t, team.local);
    team.barrier();  // the ring is read before it is overwritten
    for (std::int64_t t = begin; t < end; ++t)
      if (!is_repeated(t)) keep(t);
  }

  // Padding rows stand at one place; only the last of them is stored.
  bool is_repeated(std::int64_t t) const {
    const Places& at = args.at;
    return t + 1 < at.tokens && at.slots[t + 1] == at.slots[t] &&
           at.positions[t + 1] == at.positions[t];
  }

  float* ring_row(std::int64_t t, std::int64_t position) const {
    const IndexLayout& cache = args.cache;
    const std::int64_t page =
        page_of(args.at, cache.pages, t, position / cache.page_tokens);
    if (page < 0) return nullptr;
    return cache.ring + (page * kIndexRing + position % kIndexRing) * cache.dim;
  }

  // The key of an earlier position of a token's slot: of this step or one before.
  const float* key_at(std::int64_t t, std::int64_t position) const {
    const std::int64_t other = t - (args.at.positions[t] - position);
    const bool is_here = other >= 0 && args.at.slots[other] == args.at.slots[t] &&
                         args.at.positions[other] == position;
    return is_here ? args.keys + other * args.cache.dim : ring_row(t, position);
  }

  // Mean of the block that ends with a token, norm, rotation; a column of the page.
  void pool(std::int64_t t, std::uint8_t* local) const {
    const IndexLayout& cache = args.cache;
    const std::int64_t first = args.at.positions[t] - cache.block + 1;
    const std::int64_t page = page_of(args.at, cache.pages, t, first / cache.page_tokens);
    if (page < 0) return;
    float* mean = reinterpret_cast<float*>(local);
    std::fill(mean, mean + cache.dim, 0.f);
    for (std::int64_t i = 0; i < cache.block; ++i) {
      const float* key = key_at(t, first + i);
      for (std::int64_t d = 0; d < cache.dim; ++d) mean[d] += key[d];
    }
    float squares = 0.f;
    for (std::int64_t d = 0; d < cache.dim; ++d) {
      mean[d] /= static_cast<float>(cache.block);
      squares += mean[d] * mean[d];
    }
    const float scale =
        1.f / std::sqrt(squares / static_cast<float>(cache.dim) + args.eps);
    for (std::int64_t d = 0; d < cache.dim; ++d) mean[d] *= scale * args.norm[d];
    rotate(mean, static_cast<float>(first));
    float* column = cache.pooled + page * cache.dim * cache.pitch() +
                    first % cache.page_tokens / cache.block;
    for (std::int64_t d = 0; d < cache.dim; ++d) column[d * cache.pitch()] = mean[d];
  }

  void rotate(float* x, float position) const {
    const std::int64_t pairs = static_cast<std::int64_t>(inv_freq.size());
    for (std::int64_t i = 0; i < pairs; ++i) {
      const double angle = position * inv_freq[static_cast<std::size_t>(i)];
      const float cosine = static_cast<float>(std::cos(angle)) * args.scale;
      const float sine = static_cast<float>(std::sin(angle)) * args.scale;
      const float a = x[i], b = x[i + pairs];
      x[i] = a * cosine - b * sine;
      x[i + pairs] = a * sine + b * cosine;
    }
  }

  // Puts a token's key into the ring, unless a later one of this step takes its place.
  void keep(std::int64_t t) const {
    const Places& at = args.at;
    const std::int64_t position = at.positions[t], next = position + kIndexRing;
    const bool is_same_page = next / args.cache.page_tokens == position / args.cache.page_tokens;
    const std::int64_t other = t + kIndexRing;
    if (is_same_page && other < at.tokens && at.slots[other] == at.slots[t] &&
        at.positions[other] == next)
      return;
    float* row = ring_row(t, position);
    if (row) std::memcpy(row, args.keys + t * args.cache.dim,
                         static_cast<std::size_t>(args.cache.dim) * 4);
  }

  IndexStoreArgs args;
  std::vector<float> inv_freq;
};

// --- choice of blocks ----------------------------------------------------------------------------

// Scores as integers in the same order: they are not negative (a NaN counts as the largest).
std::uint32_t key_of(float score) {
  std::uint32_t bits;
  std::memcpy(&bits, &score, 4);
  return bits;
}

// The `most`-th largest key, and how many keys equal to it are among the `most` largest.
std::pair<std::uint32_t, std::int64_t> threshold(const float* scores, std::int64_t count,
                                                 std::int64_t most) {
  std::uint32_t prefix = 0, mask = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    std::int64_t counts[256] = {};
    for (std::int64_t i = 0; i < count; ++i) {
      const std::uint32_t key = key_of(scores[i]);
      if ((key & mask) == prefix) ++counts[key >> shift & 255];
    }
    std::uint32_t digit = 255;
    for (; most > counts[digit]; --digit) most -= counts[digit];
    prefix |= digit << shift;
    mask |= std::uint32_t{255} << shift;
  }
  return {prefix, most};
}

struct ChooseBlocks final : Command {
  void run(Team& team) override {
    for (std::int64_t first = 0; first < args.at.tokens; first += args.wave) {
      const std::int64_t count = std::min(args.wave, args.at.tokens - first);
      score(first, count, team);
      team.barrier();
      const auto [begin, end] = team.share(count);
      for (std::int64_t i = begin; i < end; ++i)
        choose(first + i, args.scores + i * args.blocks());
      team.barrier();
    }
  }

  std::int64_t whole_blocks(std::int64_t token) const {
    const std::int64_t found = (args.at.positions[token] + std::int64_t{1}) / args.cache.block;
    return std::min(found, args.blocks());
  }
  std::int64_t pages_to_score(std::int64_t token) const {
    const std::int64_t blocks = whole_blocks(token), per_page = args.cache.per_page();
    return blocks <= args.most ? 0 : (blocks + per_page - 1) / per_page;
  }

  // Threads share the pages of all tokens.
  void score(std::int64_t first, std::int64_t count, Team& team) const {
    std::int64_t total = 0, at = 0;
    for (std::int64_t i = 0; i < count; ++i) total += pages_to_score(first + i);
    const auto [begin, end] = team.share(total);
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t pages = pages_to_score(first + i);
      const std::int64_t from = std::clamp<std::int64_t>(begin - at, 0, pages);
      const std::int64_t to = std::clamp<std::int64_t>(end - at, 0, pages);
      if (from < to) score_pages(args, first + i, from, to, args.scores + i * args.blocks());
      at += pages;
    }
  }

  void choose(std::int64_t token, const float* scores) const {
    std::int32_t* chosen = args.chosen + token * args.most;
    const std::int64_t blocks = whole_blocks(token);
    std::int64_t found = 0;
    if (blocks <= args.most) {
      for (; found < blocks; ++found) chosen[found] = static_cast<std::int32_t>(found);
    } else {
      auto [key, equal] = threshold(scores, blocks, args.most);
      for (std::int64_t b = 0; b < blocks; ++b) {
        const std::uint32_t mine = key_of(scores[b]);
        if (mine > key || (mine == key && equal-- > 0))
          chosen[found++] = static_cast<std::int32_t>(b);
      }
    }
    args.counts[token] = static_cast<std::int32_t>(found);
  }

  ChooseArgs args;
  ScorePages score_pages;
};

struct DeltaNet final : Command {
  void run(Team& team) override { function(args, team); }
  DeltaArgs args;
  std::vector<std::int32_t> key_head_of;
  void (*function)(const DeltaArgs&, Team&);
};

struct AttentionTo final : Command {
  void run(Team& team) override { function(args, team); }
  ChosenArgs args;
  Heads heads;
  void (*function)(const ChosenArgs&, Team&);
};

}  // namespace

std::unique_ptr<Command> make_delta_net(const DeltaArgs& args,
                                        std::vector<std::int32_t> key_head_of,
                                        std::int64_t local_bytes) {
  const std::int64_t pitch = (args.dim + 15) / 16 * 16;
  const std::int64_t floats = pitch * (args.dim + 4 * kPieceInputs) + 3 * kPieceInputs;
  if (floats * 4 + args.step.tokens + 64 > local_bytes)
    throw std::invalid_argument("delta net: heads of " + std::to_string(args.dim) +
                                " dimensions do not fit in " + std::to_string(local_bytes) +
                                " bytes a thread");
  for (const std::int32_t key : key_head_of)
    if (key < 0 || key >= args.key_heads) throw std::invalid_argument("no such key head");
  auto command = std::make_unique<DeltaNet>();
  command->args = args;
  command->key_head_of = std::move(key_head_of);
  command->args.key_head_of = command->key_head_of.data();
  command->function = family_kernels().delta_net;
  return command;
}

std::unique_ptr<Command> make_streams(const float* x, std::int64_t tokens, std::int64_t width,
                                      std::int64_t count, float* out) {
  return make_call(streams, StreamsArgs{x, tokens, width, count, out});
}

std::unique_ptr<Command> make_split_heads(const float* x, std::int64_t units, std::int64_t dim,
                                          float* first, float* second) {
  return make_call(split_heads, SplitArgs{x, units, dim, first, second});
}

std::unique_ptr<Command> make_ngram_rows(const HashArgs& args, Hashing hashing) {
  auto command = std::make_unique<NGramRows>();
  command->args = args;
  command->hashing = std::move(hashing);
  return command;
}

std::unique_ptr<Command> make_index_store(const IndexStoreArgs& args,
                                          std::vector<float> inv_freq) {
  auto command = std::make_unique<IndexStore>();
  command->args = args;
  command->inv_freq = std::move(inv_freq);
  return command;
}

std::unique_ptr<Command> make_choose_blocks(const ChooseArgs& args) {
  auto command = std::make_unique<ChooseBlocks>();
  command->args = args;
  command->score_pages = family_kernels().score_pages;
  return command;
}

std::int64_t chosen_node_floats(const ChosenArgs& args, const std::vector<std::int32_t>& head_map) {
  const Heads heads(head_map, args.attention.cache.kv_heads, kChosenRows);
  ChosenArgs sized = args;
  sized.attention.num_groups = static_cast<std::int64_t>(heads.groups.size());
  return family_kernels().chosen_node_floats(sized);
}

std::unique_ptr<Command> make_attention_to(const ChosenArgs& args,
                                           const std::vector<std::int32_t>& head_map) {
  auto command = std::make_unique<AttentionTo>();
  command->heads = Heads(head_map, args.attention.cache.kv_heads, kChosenRows);
  command->args = args;
  AttentionArgs& attention = command->args.attention;
  attention.groups = command->heads.groups.data();
  attention.num_groups = static_cast<std::int64_t>(command->heads.groups.size());
  attention.heads = static_cast<std::int64_t>(head_map.size());
  command->function = family_kernels().attention_to;
  return command;
}

}  // namespace voltapile
