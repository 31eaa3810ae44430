// Commands over a Group: who copies, who waits, who adds.
#include <algorithm>
#include <cstring>

#include "group.h"

namespace voltapile {
namespace {

constexpr std::int64_t kAlone = 8192;  // floats up to which one thread does everything
constexpr std::int64_t kBlock = 1024;  // floats that are added at once

// Thread 0 waits for the other ranks, everybody for thread 0. The same answer for all threads: it
// can only change in another meeting, which needs all of them.
bool meet(Group& group, Team& team) {
  team.barrier();
  if (team.rank == 0 && !group.meet()) team.fail();
  team.barrier();
  return !group.failed();
}

const float* floats(const std::uint8_t* bytes) { return reinterpret_cast<const float*>(bytes); }
float* floats(std::uint8_t* bytes) { return reinterpret_cast<float*>(bytes); }

// One range of a buffer for this thread.
using Range = std::pair<std::int64_t, std::int64_t>;

void put(const float* part, float* half, Range range) {
  const auto [begin, end] = range;
  const std::size_t bytes = (end - begin) * sizeof(float);
  if (begin == end) return;
  if (part) {
    std::memcpy(half + begin, part + begin, bytes);
  } else {
    std::memset(half + begin, 0, bytes);
  }
}

struct AllReduce final : Command {
  void run(Team& team) override {
    if (!group) return add_alone(team.share(count, 16));
    const std::int64_t most = group->half_bytes() / static_cast<std::int64_t>(sizeof(float));
    if (count <= std::min(kAlone, most)) {
      if (team.rank == 0) add_small(team);
      return;
    }
    for (std::int64_t at = 0; at < count; at += most) {
      if (!add_large(team, at, std::min(most, count - at))) return;
    }
  }

  void add_alone(Range range) const {
    for (std::int64_t i = range.first; i < range.second; ++i) {
      const float sum = part ? part[i] : 0.0f;
      out[i] = accumulate ? out[i] + sum : sum;
    }
  }

  // Everybody adds everything.
  void add_small(Team& team) {
    put(part, floats(group->half(group->rank())), {0, count});
    if (!group->meet()) return team.fail();
    add({0, count}, out, accumulate);
  }

  // Each rank adds one range, then everybody takes all of them.
  bool add_large(Team& team, std::int64_t at, std::int64_t n) {
    put(part ? part + at : nullptr, floats(group->half(group->rank())), team.share(n, 16));
    if (!meet(*group, team)) return false;
    const Range mine = range_of(group->rank(), n);
    const Range ours = team.share(mine.second - mine.first, 16);
    add({mine.first + ours.first, mine.first + ours.second}, floats(group->half(group->rank())),
        false);
    if (!meet(*group, team)) return false;
    for (int rank = 0; rank < group->ranks(); ++rank) {
      const Range theirs = range_of(rank, n);
      const Range part_of = team.share(theirs.second - theirs.first, 16);
      take(floats(group->met_half(rank)), at,
           {theirs.first + part_of.first, theirs.first + part_of.second});
    }
    return true;
  }

  // to (+)= the sum of all halves, over a range.
  void add(Range range, float* to, bool onto) const {
    float sum[kBlock];
    for (std::int64_t begin = range.first; begin < range.second; begin += kBlock) {
      const std::int64_t n = std::min(kBlock, range.second - begin);
      std::copy_n(floats(group->met_half(0)) + begin, n, sum);
      for (int rank = 1; rank < group->ranks(); ++rank) {
        const float* half = floats(group->met_half(rank)) + begin;
        for (std::int64_t i = 0; i < n; ++i) sum[i] += half[i];
      }
      for (std::int64_t i = 0; i < n; ++i) to[begin + i] = onto ? to[begin + i] + sum[i] : sum[i];
    }
  }

  void take(const float* half, std::int64_t at, Range range) const {
    for (std::int64_t i = range.first; i < range.second; ++i) {
      out[at + i] = accumulate ? out[at + i] + half[i] : half[i];
    }
  }

  // Which floats of n a rank adds.
  Range range_of(int rank, std::int64_t n) const {
    const std::int64_t units = (n + 15) / 16;
    const auto edge = [&](int r) { return std::min(n, units * r / group->ranks() * 16); };
    return {edge(rank), edge(rank + 1)};
  }

  Group* group;
  const float* part;
  float* out;
  std::int64_t count;
  bool accumulate;
};

struct AllGather final : Command {
  void run(Team& team) override {
    if (!group) return scatter(part, 0, 0, team.share(rows * widths[0]));
    const std::int64_t most = group->half_bytes() / static_cast<std::int64_t>(sizeof(float));
    const std::int64_t longest = rows * *std::max_element(widths.begin(), widths.end());
    for (std::int64_t at = 0; at < longest; at += most) {
      const auto here = [&](int rank) {  // so many floats of that rank lie in this round
        return std::clamp(rows * widths[rank] - at, std::int64_t{0}, most);
      };
      const int rank = group->rank();
      put(part + (here(rank) ? at : 0), floats(group->half(rank)), team.share(here(rank), 16));
      if (!meet(*group, team)) return;
      for (int other = 0; other < group->ranks(); ++other) {
        scatter(floats(group->met_half(other)), other, at, team.share(here(other), 16));
      }
    }
  }

  // Floats at + range of a rank's part go to their rows; they lie at `range` of `from`.
  void scatter(const float* from, int rank, std::int64_t at, Range range) const {
    std::int64_t width = widths[rank], stride = 0, column = 0;
    for (std::size_t r = 0; r < widths.size(); ++r) {
      if (static_cast<int>(r) == rank) column = stride;
      stride += widths[r];
    }
    for (std::int64_t i = range.first; i < range.second;) {
      const std::int64_t row = (at + i) / width, begin = (at + i) % width;
      const std::int64_t n = std::min(width - begin, range.second - i);
      std::copy_n(from + i, n, out + row * stride + column + begin);
      i += n;
    }
  }

  Group* group;
  const float* part;
  float* out;
  std::int64_t rows;
  std::vector<std::int64_t> widths;
};

struct BroadcastArgs {
  Group* group;
  std::uint8_t* data;
  std::int64_t bytes;
  int source;
};

void broadcast(const BroadcastArgs& args, Team& team) {
  if (!args.group || team.rank != 0) return;
  Group& group = *args.group;
  for (std::int64_t at = 0; at < args.bytes; at += group.half_bytes()) {
    const std::int64_t n = std::min(group.half_bytes(), args.bytes - at);
    const bool is_source = group.rank() == args.source;
    if (is_source) std::copy_n(args.data + at, n, group.half(args.source));
    if (!group.meet()) return team.fail();
    if (!is_source) std::copy_n(group.met_half(args.source), n, args.data + at);
  }
}

struct MessageArgs {
  Group* group;
  std::uint8_t* data;
  std::int64_t bytes;
  int other;
  bool is_sent;
};

void pass_on(const MessageArgs& args, Team& team) {
  if (team.rank != 0) return;
  const bool done = args.is_sent ? args.group->send(args.other, args.data, args.bytes)
                                 : args.group->receive(args.other, args.data, args.bytes);
  if (!done) team.fail();
}

struct PlaceArgs {
  const float* x;
  float* out;
  std::int64_t rows, cols, width, offset;
};

void place(const PlaceArgs& args, Team& team) {
  const auto [begin, end] = team.share(args.rows);
  for (std::int64_t row = begin; row < end; ++row) {
    float* out = args.out + row * args.width;
    std::fill_n(out, args.width, 0.0f);
    std::copy_n(args.x + row * args.cols, args.cols, out + args.offset);
  }
}

std::unique_ptr<Command> make_message(Group* group, const float* x, std::int64_t count, int other,
                                      bool is_sent) {
  auto* data = reinterpret_cast<std::uint8_t*>(const_cast<float*>(x));
  const std::int64_t bytes = count * static_cast<std::int64_t>(sizeof(float));
  return make_call(pass_on, MessageArgs{group, data, bytes, other, is_sent});
}

}  // namespace

std::unique_ptr<Command> make_all_reduce(Group* group, const float* part, float* out,
                                         std::int64_t count, bool accumulate) {
  auto command = std::make_unique<AllReduce>();
  command->group = group;
  command->part = part;
  command->out = out;
  command->count = count;
  command->accumulate = accumulate;
  return command;
}

std::unique_ptr<Command> make_all_gather(Group* group, const float* part, float* out,
                                         std::int64_t rows, std::vector<std::int64_t> widths) {
  auto command = std::make_unique<AllGather>();
  command->group = group;
  command->part = part;
  command->out = out;
  command->rows = rows;
  command->widths = std::move(widths);
  return command;
}

std::unique_ptr<Command> make_broadcast(Group* group, std::uint8_t* data, std::int64_t bytes,
                                        int source) {
  return make_call(broadcast, BroadcastArgs{group, data, bytes, source});
}

std::unique_ptr<Command> make_send(Group* group, const float* x, std::int64_t count, int target) {
  return make_message(group, x, count, target, true);
}

std::unique_ptr<Command> make_receive(Group* group, float* x, std::int64_t count, int source) {
  return make_message(group, x, count, source, false);
}

std::unique_ptr<Command> make_place(const float* x, float* out, std::int64_t rows,
                                    std::int64_t cols, std::int64_t width, std::int64_t offset) {
  return make_call(place, PlaceArgs{x, out, rows, cols, width, offset});
}

}  // namespace voltapile
