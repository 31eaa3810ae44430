// Routed experts: tokens are grouped by expert, and each expert's rows are multiplied with its own.
//
// A pair is a token and one of its experts. Pairs lie sorted by expert and then by token. gate and
// up make a pair's inner values, in blocks that are quantised where they are made; after one
// barrier, threads share the rows of all down matrices, so that each sums its own columns of every
// token, in the order of routing. Few tokens: no thread waits for another's grouping.
#include "experts.h"

#include <cmath>
#include <vector>

#include "matmul_tiles.h"

namespace voltapile {
namespace {

constexpr std::int64_t kFewTokens = 8;  // of which each thread sorts the pairs for itself,
constexpr std::int64_t kFewBytes = 192 << 10;  // if what they multiply with takes no more
constexpr std::int64_t kWeightsCost = 4;  // reading an expert's rows costs as much as so many pairs

// --- routing -------------------------------------------------------------------------------------

// The `used` largest, largest first, equal ones by number. NaN is never larger.
void choose(const float* logits, std::int64_t count, std::int64_t used, std::int32_t* chosen) {
  std::int64_t found = 0;
  for (std::int64_t e = 0; e < count; ++e) {
    if (found == used && !(logits[e] > logits[chosen[used - 1]])) continue;
    std::int64_t at = found < used ? found++ : used - 1;
    for (; at > 0 && logits[e] > logits[chosen[at - 1]]; --at) chosen[at] = chosen[at - 1];
    chosen[at] = static_cast<std::int32_t>(e);
  }
}

void route(const RouteArgs& args, Team& team) {
  const auto [begin, end] = team.share(args.tokens);
  for (std::int64_t t = begin; t < end; ++t) {
    const float* logits = args.logits + t * args.experts;
    std::int32_t* chosen = args.chosen + t * args.used;
    float* weights = args.weights + t * args.used;
    choose(logits, args.experts, args.used, chosen);
    float check = 0.f;  // one NaN makes the token's weights NaN
    for (std::int64_t e = 0; e < args.experts; ++e) check += logits[e] != logits[e] ? 1.f : 0.f;
    float sum = 0.f;
    for (std::int64_t r = 0; r < args.used; ++r) {
      weights[r] = std::exp(logits[chosen[r]] - logits[chosen[0]]);
      sum += weights[r];
    }
    if (check > 0.f) sum = std::nanf("");
    std::int64_t* counts = args.counts + (t < args.generated ? args.experts : 0);
    for (std::int64_t r = 0; r < args.used; ++r) {
      weights[r] /= sum;
      __atomic_fetch_add(counts + chosen[r], 1, __ATOMIC_RELAXED);
    }
  }
}

struct RoundArgs {
  const float* x;
  float* out;
  std::int64_t count;
};

void round_bf16(const RoundArgs& args, Team& team) {
  const auto [begin, end] = team.share(args.count);
  for (std::int64_t i = begin; i < end; ++i) {
    std::uint32_t bits;
    std::memcpy(&bits, args.x + i, 4);
    const bool is_nan = args.x[i] != args.x[i];  // whose bits must not be added to
    bits = (is_nan ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
    std::memcpy(args.out + i, &bits, 4);
  }
}

// --- grouping ------------------------------------------------------------------------------------

// Pairs of expert e are order[starts[e]] ... ; a pair is token * used + rank. place: of each pair
// in order, -1 where its expert is not here.
struct Groups {
  Groups(const ExpertArgs& args, std::int32_t* lists)
      : starts(lists),
        order(starts + args.count + 1),
        place(order + expert_pairs(args.tokens, args.used, args.count)) {}
  static std::int64_t bytes(const ExpertArgs& args) {
    const std::int64_t pairs = expert_pairs(args.tokens, args.used, args.count);
    return (args.count + 1 + pairs + args.tokens * args.used) * 4;
  }
  std::int32_t size(std::int64_t e) const { return starts[e + 1] - starts[e]; }

  std::int32_t *starts, *order, *place;
};

void sort_pairs(const ExpertArgs& args, const Groups& groups) {
  const std::int64_t pairs = args.tokens * args.used;
  const auto local = [&](std::int64_t i) -> std::int64_t {
    const std::int64_t e = args.chosen[i] - args.first;
    return e >= 0 && e < args.count ? e : -1;
  };
  std::fill(groups.starts, groups.starts + args.count + 1, 0);
  for (std::int64_t i = 0; i < pairs; ++i)
    if (local(i) >= 0) ++groups.starts[local(i) + 1];
  for (std::int64_t e = 0; e < args.count; ++e) groups.starts[e + 1] += groups.starts[e];
  for (std::int64_t i = 0; i < pairs; ++i) {  // starts[e] runs ahead to the next expert's ...
    const std::int64_t e = local(i);
    groups.place[i] = e < 0 ? -1 : groups.starts[e]++;
    if (e >= 0) groups.order[groups.place[i]] = static_cast<std::int32_t>(i);
  }
  for (std::int64_t e = args.count; e > 0; --e) groups.starts[e] = groups.starts[e - 1];
  groups.starts[0] = 0;  // ... and is put back
}

// --- experts -------------------------------------------------------------------------------------

std::vector<Matrix> split(const Matrix& all, std::int64_t count) {
  std::vector<Matrix> experts(static_cast<std::size_t>(count), all);
  for (std::int64_t e = 0; e < count; ++e) {
    Matrix& expert = experts[static_cast<std::size_t>(e)];
    expert.rows = all.rows / count;
    expert.data += e * expert.rows * all.row_bytes;
    if (expert.factors) expert.factors += e;
  }
  return experts;
}

class Experts : public Command {
 public:
  explicit Experts(const ExpertArgs& args)
      : args_(args), outer_(args.x, args.tokens, args.gate->cols, args.scratch.quantised),
        inner_(args.scratch.inner, 0, args.down->cols, args.scratch.inner_quantised) {
    const Matrix* all[] = {args.gate, args.up, args.down};
    for (int i = 0; i < 3; ++i) {
      if (all[i]->rows % args.count != 0) throw std::invalid_argument("experts of unlike sizes");
      matrices_[i] = split(*all[i], args.count);
      const Factor first = (i < 2 ? outer_ : inner_).add(&matrices_[i][0]);
      for (const Matrix& each : matrices_[i]) factors_[i].push_back({&each, first.kernel});
    }
    if (args.gate->rows != args.up->rows || args.down->cols * args.count != args.gate->rows ||
        args.down->rows != args.gate->cols * args.count)
      throw std::invalid_argument("gate, up and down of an expert do not fit together");
    if (gate().takes_floats() != factors_[1][0].takes_floats())
      throw std::invalid_argument("experts' gate and up: one is quantised, the other is not");
    is_few_ = args.tokens <= kFewTokens && args.tokens * outer_.stride(gate()) <= kFewBytes;
  }

  void run(Team& team) override {
    Desk desk = outer_.prepare(team);
    auto* lists = is_few_ ? reinterpret_cast<std::int32_t*>(desk.take(Groups::bytes(args_)))
                          : args_.scratch.lists;
    const Groups groups(args_, lists);
    if (is_few_ || team.rank == 0) sort_pairs(args_, groups);
    if (!is_few_) {
      team.barrier();
      line_up(desk, groups, team);
      team.barrier();
    }
    gate_and_up(desk, groups, team);
    team.barrier();
    down(desk, groups, team);
  }

 private:
  const Factor& gate() const { return factors_[0][0]; }
  std::int64_t ffn() const { return args_.down->cols; }
  std::int64_t width() const { return args_.gate->cols; }

  // Copies what the pairs multiply with, one behind another, to where their outputs will be.
  void line_up(const Desk& desk, const Groups& groups, Team& team) const {
    const auto [begin, end] = team.share(groups.starts[args_.count]);
    for (std::int64_t p = begin; p < end; ++p) copy_input(desk, groups, p, lined_up(p));
  }
  std::uint8_t* lined_up(std::int64_t pair) const {
    return reinterpret_cast<std::uint8_t*>(args_.scratch.outputs) + pair * outer_.stride(gate());
  }
  void copy_input(const Desk& desk, const Groups& groups, std::int64_t pair,
                  std::uint8_t* target) const {
    const std::int64_t stride = outer_.stride(gate());
    const std::int64_t token = groups.order[pair] / args_.used;
    std::memcpy(target, outer_.input(desk, gate()) + token * stride,
                static_cast<std::size_t>(stride));
  }

  // Blocks of inner values of all experts, shared by what they cost.
  void gate_and_up(Desk desk, const Groups& groups, Team& team) const {
    const std::int64_t chunk = outer_.chunk();
    float* gates = desk.take_tile(chunk * outer_.isa().lanes);
    float* ups = desk.take_tile(chunk * outer_.isa().lanes);
    std::uint8_t* gathered = nullptr;
    if (is_few_ && args_.tokens > 1)
      gathered = desk.take(args_.tokens * outer_.stride(gate()));
    const std::int64_t blocks = (ffn() + kBlock - 1) / kBlock;
    std::int64_t total = 0, at = 0;
    for (std::int64_t e = 0; e < args_.count; ++e) total += cost(groups, e) * blocks;
    const auto [begin, end] = team.share(total);
    for (std::int64_t e = 0; e < args_.count && at < end; ++e) {
      const std::int64_t one = cost(groups, e);
      if (one == 0) continue;
      const auto block_at = [&, at = at](std::int64_t place) {
        return std::clamp<std::int64_t>((place - at + one - 1) / one, 0, blocks);
      };
      const std::int64_t first = begin > at ? block_at(begin) : 0, last = block_at(end);
      for (std::int64_t p = groups.starts[e]; first < last && p < groups.starts[e + 1];
           p += chunk) {
        const std::int64_t count = std::min<std::int64_t>(chunk, groups.starts[e + 1] - p);
        const std::uint8_t* x = input(desk, groups, p, count, gathered);
        for (std::int64_t b = first; b < last; ++b)
          inner_block(desk, e, b, x, p, count, gates, ups);
      }
      at += one * blocks;
    }
  }
  static std::int64_t cost(const Groups& groups, std::int64_t e) {
    return groups.size(e) ? groups.size(e) + kWeightsCost : 0;
  }

  const std::uint8_t* input(const Desk& desk, const Groups& groups, std::int64_t pair,
                            std::int64_t count, std::uint8_t* gathered) const {
    const std::int64_t stride = outer_.stride(gate());
    if (!is_few_) return lined_up(pair);
    if (count == 1) return outer_.input(desk, gate()) + groups.order[pair] / args_.used * stride;
    for (std::int64_t i = 0; i < count; ++i)
      copy_input(desk, groups, pair + i, gathered + i * stride);
    return gathered;
  }

  // silu(gate x) * up x of the rows of one block, for some pairs; quantised for down.
  void inner_block(const Desk& desk, std::int64_t e, std::int64_t block, const std::uint8_t* x,
                   std::int64_t pair, std::int64_t count, float* gates, float* ups) const {
    const Isa& isa = outer_.isa();
    const std::int64_t stop = std::min((block + 1) * kBlock, ffn());
    for (std::int64_t row = block * kBlock; row < stop; row += isa.lanes) {
      const auto at = static_cast<std::size_t>(e);
      outer_.multiply_at(desk, factors_[0][at], row / isa.lanes, x, count, gates);
      outer_.multiply_at(desk, factors_[1][at], row / isa.lanes, x, count, ups);
      isa.silu_mul(gates, ups, count * isa.lanes);
      const std::int64_t rows = std::min<std::int64_t>(isa.lanes, stop - row);
      for (std::int64_t i = 0; i < count; ++i)
        std::memcpy(args_.scratch.inner + (pair + i) * ffn() + row, gates + i * isa.lanes,
                    static_cast<std::size_t>(rows) * 4);
    }
    if (factors_[2][0].takes_floats()) return;
    for (std::int64_t i = pair; i < pair + count; ++i)
      isa.quantise(args_.scratch.inner + i * ffn() + block * kBlock, 1,
                   args_.scratch.inner_quantised + i * inner_.record_stride() +
                       block * kRecordBytes);
  }

  void down(Desk desk, const Groups& groups, Team& team) const {
    const std::int64_t chunk = inner_.chunk(), lanes = inner_.isa().lanes;
    float* tile = desk.take_tile(chunk * lanes);
    desk.records = args_.scratch.inner_quantised;
    const std::uint8_t* x = inner_.input(desk, factors_[2][0]);
    const auto [begin, end] = team.share((width() + lanes - 1) / lanes);
    for (std::int64_t e = 0; e < args_.count; ++e) {
      const Factor& factor = factors_[2][static_cast<std::size_t>(e)];
      for (std::int64_t p = groups.starts[e]; p < groups.starts[e + 1]; p += chunk) {
        const std::int64_t count = std::min<std::int64_t>(chunk, groups.starts[e + 1] - p);
        for (std::int64_t g = begin; g < end; ++g) {
          inner_.multiply_at(desk, factor, g, x + p * inner_.stride(factor), count, tile);
          const std::int64_t rows = std::min(lanes, width() - g * lanes);
          for (std::int64_t i = 0; i < count; ++i)
            std::memcpy(args_.scratch.outputs + (p + i) * width() + g * lanes, tile + i * lanes,
                        static_cast<std::size_t>(rows) * 4);
        }
      }
    }
    sum(groups, begin * lanes, std::min(end * lanes, width()));
  }

  // Some columns of all tokens: pairs times their weights, in the order of routing.
  void sum(const Groups& groups, std::int64_t begin, std::int64_t end) const {
    constexpr std::int64_t kColumns = 64;
    for (std::int64_t t = 0; t < args_.tokens; ++t) {
      for (std::int64_t column = begin; column < end; column += kColumns) {
        const std::int64_t count = std::min(kColumns, end - column);
        float sums[kColumns] = {};
        for (std::int64_t i = t * args_.used; i < (t + 1) * args_.used; ++i) {
          if (groups.place[i] < 0) continue;
          const float* y = args_.scratch.outputs + groups.place[i] * width() + column;
          for (std::int64_t c = 0; c < count; ++c) sums[c] += args_.weights[i] * y[c];
        }
        float* out = args_.out + t * width() + column;
        for (std::int64_t c = 0; c < count; ++c)
          out[c] = args_.accumulate ? out[c] + sums[c] : sums[c];
      }
    }
  }

  ExpertArgs args_;
  Multiplication outer_, inner_;  // with gate and up; with down
  bool is_few_;
  std::vector<Matrix> matrices_[3];
  std::vector<Factor> factors_[3];
};

}  // namespace

std::unique_ptr<Command> make_route(const RouteArgs& args) { return make_call(route, args); }

std::unique_ptr<Command> make_round_bf16(const float* x, float* out, std::int64_t count) {
  return make_call(round_bf16, RoundArgs{x, out, count});
}

std::int64_t expert_pairs(std::int64_t tokens, std::int64_t used, std::int64_t count) {
  return tokens * std::min(used, count);
}

std::unique_ptr<Command> make_experts(const ExpertArgs& args) {
  return std::make_unique<Experts>(args);
}

}  // namespace voltapile
