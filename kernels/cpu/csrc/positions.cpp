#include "positions.h"

#include <algorithm>
#include <cmath>

namespace voltapile {
namespace {

void keep(const KeepArgs& args, Team& team) {
  if (team.rank != 0) return;
  const std::int64_t cycle = args.run * args.parts;
  for (std::int64_t t = 0; t < args.tokens; ++t) {
    const std::int64_t position = args.positions[t], end = position + 1;
    const std::int64_t own =
        std::clamp<std::int64_t>(end % cycle - args.part * args.run, 0, args.run);
    args.seen[t] = static_cast<std::int32_t>(end / cycle * args.run + own - 1);
    const bool is_here = position / args.run % args.parts == args.part;
    args.stored[t] = std::max(args.seen[t], 0);
    args.stored_slots[t] = is_here ? args.slots[t] : args.padding;
  }
}

// One after the other in the order of ranks, so that all have the same bits.
void weigh(const WeighArgs& args, Team& team) {
  const auto [begin, end] = team.share(args.tokens * args.heads);
  for (std::int64_t i = begin; i < end; ++i) {
    const std::int64_t token = i / args.heads, head = i % args.heads;
    const float* all = args.all_weights + token * args.parts * args.heads + head;
    float top = all[0], sum = 0.0f;
    for (std::int64_t p = 1; p < args.parts; ++p) top = std::max(top, all[p * args.heads]);
    for (std::int64_t p = 0; p < args.parts; ++p) sum += std::exp(all[p * args.heads] - top);
    const float share = std::exp(args.weights[i] - top) / sum;
    float* o = args.o + i * args.dim;
    for (std::int64_t d = 0; d < args.dim; ++d) o[d] *= share;
  }
}

void take(const TakeArgs& args, Team& team) {
  const auto [begin, end] = team.share(args.rows);
  for (std::int64_t row = begin; row < end; ++row)
    std::copy_n(args.x + row * args.cols + args.offset, args.width, args.out + row * args.width);
}

}  // namespace

std::unique_ptr<Command> make_keep(const KeepArgs& args) { return make_call(keep, args); }
std::unique_ptr<Command> make_weigh(const WeighArgs& args) { return make_call(weigh, args); }
std::unique_ptr<Command> make_take(const TakeArgs& args) { return make_call(take, args); }

}  // namespace voltapile
