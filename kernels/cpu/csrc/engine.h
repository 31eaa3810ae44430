// The shape that every CPU computation has: a Command, run by all threads of a Team together.
//
// A Command's run() is called once by every thread of the team with its own rank; threads split
// the work by rank and may meet at barrier() between phases. Results must not depend on size.
// The engine puts a barrier after each Command.
#pragma once
#include <cstdint>
#include <memory>
#include <utility>

namespace voltapile {

class Team {
 public:
  virtual ~Team() = default;
  virtual void barrier() = 0;
  virtual void fail() = 0;  // nothing after this command runs, now or later; by rank 0

  int rank = 0;
  int size = 1;
  // Scratch of this thread alone (L2-sized), 64-byte aligned; for weight panels and the like.
  std::uint8_t* local = nullptr;
  std::int64_t local_bytes = 0;
  // The `local` of every rank: what a thread left there is readable by others after a barrier.
  std::uint8_t* const* locals = nullptr;

  // This rank's part [begin, end) of n items handed out in units of `grain`.
  std::pair<std::int64_t, std::int64_t> share(std::int64_t n, std::int64_t grain = 1) const {
    const std::int64_t units = (n + grain - 1) / grain;
    const std::int64_t begin = units * rank / size * grain;
    const std::int64_t end = units * (rank + 1) / size * grain;
    return {begin < n ? begin : n, end < n ? end : n};
  }
};

struct Command {
  virtual ~Command() = default;
  virtual void run(Team& team) = 0;
};

// A Command that is a plain function over a plain struct.
template <class Args>
struct Call final : Command {
  using Function = void (*)(const Args&, Team&);
  Call(Function function, const Args& args) : function(function), args(args) {}
  void run(Team& team) override { function(args, team); }
  Function function;
  Args args;
};

template <class Args>
std::unique_ptr<Command> make_call(void (*function)(const Args&, Team&), const Args& args) {
  return std::make_unique<Call<Args>>(function, args);
}

}  // namespace voltapile
