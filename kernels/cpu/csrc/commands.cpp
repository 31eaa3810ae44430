#include "commands.h"

#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "matmul.h"

namespace voltapile {

const Kernels& kernels() {
#ifdef VOLTAPILE_X86
  if (std::strcmp(isa(), "avx512") == 0) return kernels_avx512;
  if (std::strcmp(isa(), "avx2") == 0) return kernels_avx2;
#endif
  return kernels_plain;
}

namespace {

struct BeginArgs {
  BatchView batch;
  SlotView state;
};

void begin(const BeginArgs& args, Team& team) {
  if (team.rank != 0) return;
  const BatchView& batch = args.batch;
  for (std::int64_t t = 0; t < batch.num_tokens; ++t) {
    const std::int32_t slot = batch.slots[t];
    if (batch.continues[t]) {
      batch.tokens[t] = args.state.last_token[slot];
      batch.positions[t] = args.state.next_position[slot];
      batch.rope_positions[t] = args.state.next_position[slot];
    }
    const std::int64_t position = batch.positions[t];
    if (position < args.state.context) {  // a finished slot may go past the end
      args.state.history[slot * args.state.context + position] = batch.tokens[t];
    }
  }
}

struct GatherArgs {
  const float* x;
  const std::int32_t* index;
  float* out;
  std::int64_t rows, count, cols;
};

void gather(const GatherArgs& args, Team& team) {
  const auto [begin, end] = team.share(args.count);
  const std::size_t bytes = args.cols * sizeof(float);
  for (std::int64_t i = begin; i < end; ++i) {
    const std::int64_t row = args.index ? args.index[i] : i;
    float* out = args.out + i * args.cols;
    if (row < 0 || row >= args.rows) {
      std::memset(out, 0, bytes);
    } else {
      std::memcpy(out, args.x + row * args.cols, bytes);
    }
  }
}

struct SoftcapArgs {
  float* x;
  std::int64_t count;
  float cap;
};

void softcap(const SoftcapArgs& args, Team& team) {
  const auto [begin, end] = team.share(args.count);
  for (std::int64_t i = begin; i < end; ++i) {
    args.x[i] = args.cap * std::tanh(args.x[i] / args.cap);
  }
}

struct RopeAngles final : Command {
  void run(Team& team) override {
    const auto [begin, end] = team.share(tokens);
    const std::int64_t pairs = static_cast<std::int64_t>(inv_freq.size());
    for (std::int64_t t = begin; t < end; ++t) {
      for (std::int64_t i = 0; i < pairs; ++i) {
        const double angle = static_cast<float>(positions[t]) * inv_freq[i];
        out[(t * pairs + i) * 2] = static_cast<float>(std::cos(angle)) * scale;
        out[(t * pairs + i) * 2 + 1] = static_cast<float>(std::sin(angle)) * scale;
      }
    }
  }
  const std::int32_t* positions;
  std::int64_t tokens;
  std::vector<float> inv_freq;
  float scale;
  float* out;
};

struct Attention final : Command {
  void run(Team& team) override { function(args, team); }
  AttentionArgs args;
  void (*function)(const AttentionArgs&, Team&);
  Heads heads;
};

}  // namespace

std::unique_ptr<Command> make_begin(const BatchView& batch, const SlotView& state) {
  return make_call(begin, BeginArgs{batch, state});
}

std::unique_ptr<Command> make_rms_norm(const RmsNormArgs& args) {
  return make_call(kernels().rms_norm, args);
}

std::unique_ptr<Command> make_rope(const RopeArgs& args) {
  return make_call(kernels().rope, args);
}

std::unique_ptr<Command> make_rope_angles(const std::int32_t* positions, std::int64_t tokens,
                                          std::vector<float> inv_freq, float scale, float* out) {
  auto command = std::make_unique<RopeAngles>();
  command->positions = positions;
  command->tokens = tokens;
  command->inv_freq = std::move(inv_freq);
  command->scale = scale;
  command->out = out;
  return command;
}

std::unique_ptr<Command> make_gather(const float* x, std::int64_t rows, const std::int32_t* index,
                                     std::int64_t count, std::int64_t cols, float* out) {
  return make_call(gather, GatherArgs{x, index, out, rows, count, cols});
}

std::unique_ptr<Command> make_softcap(float* x, std::int64_t count, float cap) {
  return make_call(softcap, SoftcapArgs{x, count, cap});
}

std::unique_ptr<Command> make_store_kv(const StoreKvArgs& args) {
  return make_call(kernels().store_kv, args);
}

Heads::Heads(const std::vector<std::int32_t>& head_map, std::int64_t kv_heads,
             std::int64_t max_rows) {
  for (std::int32_t kv : head_map) {
    if (kv < 0 || kv >= kv_heads) {
      throw std::invalid_argument("head_map names kv head " + std::to_string(kv) + " of " +
                                  std::to_string(kv_heads));
    }
  }
  heads.reserve(head_map.size());
  for (std::int64_t kv = 0; kv < kv_heads; ++kv) {
    HeadGroup group{kv, 0, nullptr};
    for (std::size_t h = 0; h < head_map.size(); ++h) {
      if (head_map[h] != kv) continue;
      if (group.count == max_rows) {
        groups.push_back(group);
        group.count = 0;
      }
      heads.push_back(static_cast<std::int32_t>(h));
      if (group.count++ == 0) group.heads = &heads.back();
    }
    if (group.count > 0) groups.push_back(group);
  }
}

std::unique_ptr<Command> make_attention(const AttentionArgs& args,
                                        const std::vector<std::int32_t>& head_map,
                                        std::int64_t local_bytes) {
  auto command = std::make_unique<Attention>();
  command->args = args;
  command->function = kernels().attention;
  command->args.max_rows =
      kernels().attention_rows(args.cache, args.at.table_width, local_bytes);
  if (command->args.max_rows == 0) {
    throw std::invalid_argument("attention: heads of " + std::to_string(args.cache.value_dim) +
                                " dimensions do not fit in " + std::to_string(local_bytes) +
                                " bytes a thread");
  }
  command->heads = Heads(head_map, args.cache.kv_heads, command->args.max_rows);
  command->args.groups = command->heads.groups.data();
  command->args.num_groups = static_cast<std::int64_t>(command->heads.groups.size());
  return command;
}

}  // namespace voltapile
